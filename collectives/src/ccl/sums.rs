//! How do sums over ranks get the same bits from a library that adds in an order of its own? It only moves the parts; they are added on the
//! device, f32 by f32, in the fixed tree over ranks that [`crate::Communicator`] defines.
//!
//! Parts land in scratch memory that was planned, in as many rounds as that takes.

use super::CclComm;
use super::issue::Issue;
use crate::Result;
use zrt_kernels::{DType, View, ViewMut};

/// Up to this length an all_reduce is one exchange of everything: a second exchange would cost more than the bytes it saves.
const SHORT_BYTES: usize = 32 << 10;
/// Rounds are multiples of these many elements.
const ALIGN_ELEMS: usize = 64;

impl CclComm {
    /// Whether the library's own sum has the bits that ours has. One addition has no order, and it is rounded once: two ranks' f32. Integers wrap,
    /// in any order. Sums of two bf16 may be rounded otherwise than ours, from f32, to nearest even.
    pub(super) fn library_sums(&self, dtype: DType) -> bool {
        let ranks = self.check.ranks;
        !self.deterministic || ranks == 1 || dtype == DType::I32 || (ranks == 2 && dtype == DType::F32)
    }

    /// Elements of one rank's part in a round: the parts of all ranks fit scratch, and for bf16 their f32 forms.
    pub(super) fn round_elems(&self, dtype: DType, sums: bool) -> usize {
        let widened = if sums && dtype == DType::BF16 { DType::F32.bytes() } else { 0 };
        self.scratch.bytes() / (self.check.ranks * (dtype.bytes() + widened)) / ALIGN_ELEMS * ALIGN_ELEMS
    }

    /// Where the part of `rank` lands when parts have `elems` elements.
    pub(super) fn landing(&self, dtype: DType, rank: usize, elems: usize) -> Result<ViewMut> {
        Ok(self.scratch.view_mut(dtype, rank * elems * dtype.bytes(), elems)?)
    }

    /// Scratch that `ranks` parts of `dtype` leave over, for the f32 form of one.
    fn widened(&self, dtype: DType, rank: usize, elems: usize) -> Result<ViewMut> {
        let beyond = (self.check.ranks * elems * dtype.bytes()).next_multiple_of(DType::F32.bytes());
        Ok(self.scratch.view_mut(DType::F32, beyond + rank * elems * DType::F32.bytes(), elems)?)
    }
}

impl Issue<'_> {
    /// Runs `body` when nobody else uses the scratch memory.
    pub fn with_scratch(&self, body: impl FnOnce() -> Result<()>) -> Result<()> {
        self.stream.wait(&self.comm.scratch_free)?;
        body()?;
        Ok(self.stream.record(&self.comm.scratch_free)?)
    }

    /// Sends part j of `src` to rank j, from element `at` of each part on; the others' go to `place`.
    pub fn swap(&self, src: &View, at: usize, elems: usize, place: impl Fn(usize) -> Result<ViewMut>) -> Result<()> {
        let part = src.elems() / self.comm.check.ranks;
        let (mut reads, mut writes, mut parts) = (Vec::new(), Vec::new(), Vec::new());
        for peer in self.comm.link.control.peers() {
            let (send, recv) = (src.slice(peer * part + at, elems)?, place(peer)?);
            parts.push((peer, self.span(&send)?, self.span(&recv)?));
            reads.push(send);
            writes.push(recv);
        }
        self.native(reads, writes, move |to| to.exchange(&parts))
    }

    /// Part j of `src` goes to rank j, part i of `dst` comes from rank i; in place through scratch.
    pub fn all_to_all(&self, dst: &ViewMut, src: &View) -> Result<()> {
        let (comm, part) = (self.comm, dst.elems() / self.comm.check.ranks);
        let of = |rank: usize, at: usize, elems: usize| dst.slice(rank * part + at, elems);
        if dst.span() != src.span() {
            let rank = comm.check.rank;
            self.swap(src, 0, part, |peer| Ok(of(peer, 0, part)?))?;
            return Ok(self.stream.copy(&of(rank, 0, part)?, &src.slice(rank * part, part)?)?);
        }
        self.with_scratch(|| {
            let round = comm.round_elems(dst.dtype(), false);
            for at in (0..part).step_by(round) {
                let elems = round.min(part - at);
                let landing = |rank| comm.landing(dst.dtype(), rank, elems);
                self.swap(src, at, elems, landing)?;
                for peer in comm.link.control.peers() {
                    self.stream.copy(&of(peer, at, elems)?, &landing(peer)?.view())?;
                }
            }
            Ok(())
        })
    }

    /// `dst` = this rank's part of the tree sum of the ranks' `src`.
    pub fn scatter_sums(&self, dst: &ViewMut, src: &View) -> Result<()> {
        let (comm, dtype, part) = (self.comm, dst.dtype(), dst.elems());
        let round = comm.round_elems(dtype, true);
        for at in (0..part).step_by(round) {
            let elems = round.min(part - at);
            let landing = |rank| comm.landing(dtype, rank, elems);
            self.swap(src, at, elems, landing)?;
            let own = src.slice(comm.check.rank * part + at, elems)?;
            let leaf = |rank| if rank == comm.check.rank { Ok((own.clone(), None)) } else { landing(rank).map(|l| (l.view(), Some(l))) };
            self.tree(&dst.slice(at, elems)?, (0..comm.check.ranks).map(leaf).collect::<Result<_>>()?)?;
        }
        Ok(())
    }

    /// `data` = tree sum over ranks, by an exchange of everything.
    pub fn gather_sums(&self, data: &ViewMut) -> Result<()> {
        let (comm, dtype) = (self.comm, data.dtype());
        let round = comm.round_elems(dtype, true);
        for at in (0..data.elems()).step_by(round) {
            let elems = round.min(data.elems() - at);
            let (here, all) = (data.slice(at, elems)?, comm.landing(dtype, 0, elems * comm.check.ranks)?);
            let (dst, src) = (self.span(&all)?, self.span(&here)?);
            self.native(vec![here.view()], vec![all], move |to| to.all_gather(dst, src))?;
            let leaf = |rank| comm.landing(dtype, rank, elems).map(|l| (l.view(), Some(l)));
            self.tree(&here, (0..comm.check.ranks).map(leaf).collect::<Result<_>>()?)?;
        }
        Ok(())
    }

    /// `data` = tree sum over ranks: each sums its part, then all collect the parts.
    pub fn reduce_sums(&self, data: &ViewMut) -> Result<()> {
        let (rank, ranks) = (self.comm.check.rank, self.comm.check.ranks);
        let even = if data.bytes() <= SHORT_BYTES { 0 } else { data.elems() / ranks * ranks };
        if even > 0 {
            let whole = data.slice(0, even)?;
            let own = whole.slice(rank * (even / ranks), even / ranks)?;
            self.scatter_sums(&own, &whole)?;
            let (dst, src) = (self.span(&whole)?, self.span(&own)?);
            self.native(vec![own.view()], vec![whole], move |to| to.all_gather(dst, src))?;
        }
        self.gather_sums(&data.slice(even, data.elems() - even)?)
    }

    /// `dst` = sum of the leaves, pairs first, then pairs of pairs; a leaf without a right sibling is passed up. Where a leaf may be written it
    /// is scratch. A sum of two has no order, so it may be kept in either's place.
    fn tree(&self, dst: &ViewMut, mut level: Vec<(View, Option<ViewMut>)>) -> Result<()> {
        let (ops, s) = (self.comm.device.ops(), self.stream);
        let narrow = dst.dtype() != DType::F32;
        if narrow {
            for (rank, leaf) in level.iter_mut().enumerate() {
                let wide = self.comm.widened(dst.dtype(), rank, dst.elems())?;
                ops.cast(&wide, &leaf.0, s)?;
                *leaf = (wide.view(), Some(wide));
            }
        }
        while level.len() > 1 {
            let last = level.len() == 2 && !narrow;
            let mut sums = Vec::with_capacity(level.len().div_ceil(2));
            for pair in level.chunks(2) {
                let [(a, a_place), (b, b_place)] = pair else {
                    sums.push(pair[0].clone());
                    continue;
                };
                let place = if last { Some(dst) } else { a_place.as_ref().or(b_place.as_ref()) };
                let place = place.unwrap_or(dst);
                ops.add(place, a, b, s)?;
                sums.push((place.view(), Some(place.clone())));
            }
            level = sums;
        }
        if narrow {
            ops.cast(dst, &level[0].0, s)?;
        }
        Ok(())
    }
}
