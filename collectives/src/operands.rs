//! What did a rank ask for, and do its operands fit? The checks, names and byte counts that every communicator shares.

use crate::{Counts, Error, Result};
use std::borrow::Cow;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use zrt_kernels::{DType, View, ViewMut};

/// The collectives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Op {
    AllGather = 1,
    ReduceScatter,
    AllReduce,
    AllToAll,
    Broadcast,
    Barrier,
    SharePages,
}

impl Op {
    pub const ALL: [Op; 7] = [Op::AllGather, Op::ReduceScatter, Op::AllReduce, Op::AllToAll, Op::Broadcast, Op::Barrier, Op::SharePages];

    pub const fn name(self) -> &'static str {
        match self {
            Op::AllGather => "all_gather",
            Op::ReduceScatter => "reduce_scatter",
            Op::AllReduce => "all_reduce",
            Op::AllToAll => "all_to_all",
            Op::Broadcast => "broadcast",
            Op::Barrier => "barrier",
            Op::SharePages => "share_pages",
        }
    }
}

/// One collective as a rank issued it: what is compared between ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Call<'t> {
    pub op: Op,
    pub dtype: DType,
    /// Elements of the longer operand: `ranks` parts where the collective has parts.
    pub elems: usize,
    /// Broadcast only; 0 elsewhere.
    pub root: usize,
    /// Borrowed while the caller waits, owned while a stream holds it.
    pub tag: Cow<'t, str>,
}

const DTYPES: [DType; 4] = [DType::F32, DType::BF16, DType::I32, DType::U8];

/// Word-wise multiply and fold: tags are short and nobody attacks them, but every call hashes one.
pub(crate) fn fold(h: u64, word: u64) -> u64 {
    let h = (h ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    h ^ (h >> 29)
}

impl Call<'_> {
    /// Operation, dtype and root in one word for shared memory: 8, 8 and 32 bits.
    pub fn kind(&self) -> u64 {
        let dtype = DTYPES.iter().position(|d| *d == self.dtype).unwrap_or(0);
        self.op as u64 | (dtype as u64) << 8 | (self.root as u64) << 32
    }

    /// The call that [`Call::kind`] and the other words say; `None` where they are no call.
    pub fn from_words(kind: u64, elems: u64, tag: String) -> Option<Call<'static>> {
        Some(Call {
            op: *Op::ALL.iter().find(|op| **op as u64 == kind & 0xff)?,
            dtype: *DTYPES.get((kind >> 8 & 0xff) as usize)?,
            elems: elems as usize,
            root: (kind >> 32) as usize,
            tag: tag.into(),
        })
    }

    /// Of the whole tag, since its text is cut in shared memory.
    pub fn tag_hash(&self) -> u64 {
        let (words, rest) = self.tag.as_bytes().as_chunks::<8>();
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        let h = words.iter().fold(self.tag.len() as u64, |h, word| fold(h, u64::from_le_bytes(*word)));
        fold(h, u64::from_le_bytes(last))
    }

    /// The whole length in bytes.
    pub fn bytes(&self) -> usize {
        self.elems * self.dtype.bytes()
    }

    /// The same call, kept beyond the caller's tag.
    pub fn into_owned(self) -> Call<'static> {
        Call { op: self.op, dtype: self.dtype, elems: self.elems, root: self.root, tag: Cow::Owned(self.tag.into_owned()) }
    }

    /// The name in traces and stream errors.
    pub fn task_name(&self) -> String {
        format!("{} {}", self.op.name(), self.tag)
    }
}

impl fmt::Display for Call<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.op {
            Op::Barrier => write!(f, "barrier '{}'", self.tag),
            Op::Broadcast => write!(f, "broadcast {}[{}] from rank {} '{}'", self.dtype, self.elems, self.root, self.tag),
            op => write!(f, "{} {}[{}] '{}'", op.name(), self.dtype, self.elems, self.tag),
        }
    }
}

/// Checks operands for one rank of a group.
#[derive(Clone, Copy)]
pub(crate) struct Check {
    pub rank: usize,
    pub ranks: usize,
}

impl Check {
    fn fail<T>(self, op: Op, tag: &str, what: String) -> Result<T> {
        Err(Error::Operand { rank: self.rank, op: op.name(), tag: tag.to_string(), what })
    }

    fn same_type(self, op: Op, tag: &str, dst: &View, src: &View) -> Result<()> {
        if dst.dtype() != src.dtype() {
            return self.fail(op, tag, format!("dst is {}, src is {}; both must have one type", dst.dtype(), src.dtype()));
        }
        Ok(())
    }

    /// `long` must have `ranks` parts of `short`'s elements.
    fn parts(self, op: Op, tag: &str, long: (&str, usize), short: (&str, usize)) -> Result<()> {
        if short.1.checked_mul(self.ranks) != Some(long.1) {
            let (l, s, n) = (long.0, short.0, self.ranks);
            return self.fail(op, tag, format!("{l} has {} elements, expected {n} ranks x {} of {s}", long.1, short.1));
        }
        Ok(())
    }

    fn summable(self, op: Op, tag: &str, dtype: DType) -> Result<()> {
        if dtype == DType::U8 {
            return self.fail(op, tag, "u8 has no sum; expected f32, bf16 or i32".to_string());
        }
        Ok(())
    }

    /// Operands may be apart, or `src`'s bytes `allowed` within `dst`'s allocation may be shared exactly.
    fn overlap(self, op: Op, tag: &str, dst: &View, src: &View, allowed: bool, which: &str) -> Result<()> {
        let ((da, d0, d1), (sa, s0, s1)) = (dst.span(), src.span());
        if da == sa && d0 < s1 && s0 < d1 && !allowed {
            return self.fail(op, tag, format!("dst {dst:?} and src {src:?} overlap; expected disjoint, or {which}"));
        }
        Ok(())
    }

    pub fn all_gather<'t>(self, dst: &ViewMut, src: &View, tag: &'t str) -> Result<Call<'t>> {
        let op = Op::AllGather;
        self.same_type(op, tag, dst, src)?;
        self.parts(op, tag, ("dst", dst.elems()), ("src", src.elems()))?;
        self.overlap(op, tag, dst, src, src.span() == self.part(dst, src.bytes()), "src = this rank's part of dst")?;
        Ok(Call { op, dtype: dst.dtype(), elems: dst.elems(), root: 0, tag: tag.into() })
    }

    pub fn reduce_scatter<'t>(self, dst: &ViewMut, src: &View, tag: &'t str) -> Result<Call<'t>> {
        let op = Op::ReduceScatter;
        self.same_type(op, tag, dst, src)?;
        self.summable(op, tag, src.dtype())?;
        self.parts(op, tag, ("src", src.elems()), ("dst", dst.elems()))?;
        self.overlap(op, tag, dst, src, dst.span() == self.part(src, dst.bytes()), "dst = this rank's part of src")?;
        Ok(Call { op, dtype: src.dtype(), elems: src.elems(), root: 0, tag: tag.into() })
    }

    pub fn all_reduce<'t>(self, data: &ViewMut, tag: &'t str) -> Result<Call<'t>> {
        self.summable(Op::AllReduce, tag, data.dtype())?;
        Ok(Call { op: Op::AllReduce, dtype: data.dtype(), elems: data.elems(), root: 0, tag: tag.into() })
    }

    pub fn all_to_all<'t>(self, dst: &ViewMut, src: &View, tag: &'t str) -> Result<Call<'t>> {
        let op = Op::AllToAll;
        self.same_type(op, tag, dst, src)?;
        if dst.elems() != src.elems() || !dst.elems().is_multiple_of(self.ranks) {
            let what =
                format!("dst has {} elements, src {}; expected equal and divisible by {} ranks", dst.elems(), src.elems(), self.ranks);
            return self.fail(op, tag, what);
        }
        self.overlap(op, tag, dst, src, dst.span() == src.span(), "the same elements")?;
        Ok(Call { op, dtype: dst.dtype(), elems: dst.elems(), root: 0, tag: tag.into() })
    }

    pub fn broadcast<'t>(self, data: &ViewMut, root: usize, tag: &'t str) -> Result<Call<'t>> {
        if root >= self.ranks {
            return self.fail(Op::Broadcast, tag, format!("root is {root}, expected a rank below {}", self.ranks));
        }
        Ok(Call { op: Op::Broadcast, dtype: data.dtype(), elems: data.elems(), root, tag: tag.into() })
    }

    pub fn barrier<'t>(self, tag: &'t str) -> Call<'t> {
        Call { op: Op::Barrier, dtype: DType::U8, elems: 0, root: 0, tag: tag.into() }
    }

    /// The span of this rank's part of `long`.
    fn part(self, long: &View, part_bytes: usize) -> (u64, usize, usize) {
        let (id, start, _) = long.span();
        (id, start + self.rank * part_bytes, start + (self.rank + 1) * part_bytes)
    }
}

/// Thread-safe [`Counts`].
#[derive(Default)]
pub(crate) struct Counters {
    calls: [AtomicU64; 7],
    bytes: AtomicU64,
}

impl Counters {
    /// Counts one issued call: (ranks-1)/ranks of its length; twice for an all_reduce, which is a reduce_scatter and an all_gather.
    pub fn add(&self, call: &Call, ranks: usize) {
        self.calls[call.op as usize - 1].fetch_add(1, Relaxed);
        let passes = if call.op == Op::AllReduce { 2 } else { 1 };
        let bytes = (call.bytes() as u128 * (ranks as u128 - 1) / ranks as u128) as u64;
        self.bytes.fetch_add(passes * bytes, Relaxed);
    }

    pub fn get(&self) -> Counts {
        let calls = |op: Op| self.calls[op as usize - 1].load(Relaxed);
        Counts {
            all_gather: calls(Op::AllGather),
            reduce_scatter: calls(Op::ReduceScatter),
            all_reduce: calls(Op::AllReduce),
            all_to_all: calls(Op::AllToAll),
            broadcast: calls(Op::Broadcast),
            barrier: calls(Op::Barrier),
            bytes: self.bytes.load(Relaxed),
        }
    }
}
