//! Products of pairs of `bf16`, where the processor has instructions for them: how a block of the result is computed.
//!
//! A call sums several products ([`Term`]s, say a layer and its adapter) into one result that is rounded once. Their `k` is cut into
//! rounds by their lengths alone and every element is one chain in that order, so bits depend neither on items nor on threads. In a
//! round both operands are packed, but for rows of A that can be read where they lie: as many rows of A as the second-level cache holds, past which the panels of B (32 columns) go. Where
//! one round is the whole sum, an item takes all rows, B is packed once per call, and sums leave the tiles only to be rounded.
//!
//! What multiplies a block is a [`Unit`]: the tiles of [`amx`], or the vectors of [`dots`] (AVX512-BF16). Nothing else needs either: with the
//! instructions of AMX emulated, and pairs multiplied by any vectors, tests run this very code on any x86-64.

pub(in crate::cpu) mod amx;
pub(in crate::cpu) mod dots;
#[cfg(all(test, target_os = "linux"))]
pub(in crate::cpu) mod emulate;
pub(in crate::cpu) mod pack;
#[cfg(all(test, target_os = "linux"))]
mod tests;

use super::{Finish, Operand, Pool, Product, item_shape, prepare_bias};
use crate::Write;
use crate::cpu::float::{Elem, Float, Shared};
use crate::cpu::simd::Simd;
use half::bf16;
use std::ops::Range;

/// Rows and columns of a block of sums.
pub const SIDE: usize = 32;
/// Values of `k` per step: a row of a tile is 32 `bf16`.
pub const STEP: usize = 32;
/// Pairs of a step.
const PAIRS: usize = STEP / 2;
/// Elements of 32 bits in a step of a packed panel: 32 rows (or columns) of 16 pairs.
pub const STEP_ELEMS: usize = SIDE * STEP / 2;

/// What multiplies blocks: 32 x 32 sums of pairs.
pub trait Unit: Sized {
    /// Steps of a round at most. Sums of a round stay in registers.
    const ROUND: usize;
    /// Steps of A that stay in the second-level cache while panels of B pass by.
    const CHUNK: usize;
    /// Whether rows of A may lie anyhow: in place, or in columns. If not, they are packed as [`Rows::packed`] says.
    const ANY_ROWS: bool;

    /// Makes the unit ready on this thread for as long as the value lives.
    ///
    /// # Safety
    /// The processor has the unit, or a test emulates it.
    unsafe fn ready() -> Self;

    /// `c [32,32] = a [32, 32 steps] b [32 steps, 32]`, added to `c` unless `first`. A step of `b` is 16 rows of 32 pairs. Products of pairs are
    /// added in the order of `k`, so cutting a sum into several calls does not change it.
    ///
    /// # Safety
    /// `a` and `b` hold `steps` steps, `c` 1024 elements.
    unsafe fn product<S: Simd>(&self, s: S, steps: usize, a: Rows, b: *const u8, c: *mut f32, first: bool);

    /// [`Unit::product`] of packed rows for long sums, whose operands come from the second-level cache.
    ///
    /// # Safety
    /// As there.
    unsafe fn long_product<S: Simd>(&self, s: S, steps: usize, a: *const u8, b: *const u8, c: *mut f32, first: bool);
}

/// 32 rows of A: 16 pairs of each are one step.
#[derive(Clone, Copy)]
pub struct Rows {
    /// The first.
    pub at: *const u8,
    /// Bytes from row to row.
    pub row: usize,
    /// Bytes from pair to pair.
    pub pair: usize,
    /// Bytes from step to step.
    pub step: usize,
}

impl Rows {
    /// As [`pack::pack_a`] leaves them: a step is 32 rows of 16 pairs.
    #[inline(always)]
    pub fn packed(at: *const u8) -> Rows {
        Rows { at, row: 4 * PAIRS, pair: 4, step: 4 * STEP_ELEMS }
    }

    /// As [`pack::pack_b`] leaves columns: a step is 16 rows of 32 pairs.
    #[inline(always)]
    fn columns(at: *const u8) -> Rows {
        Rows { at, row: 4, pair: 4 * SIDE, step: 4 * STEP_ELEMS }
    }

    /// Of an operand whose rows run along `k`, as they lie: `None` where that is slower than packing them, since rows a multiple of 4 KiB apart
    /// share a set of the first-level cache, and where a step is not whole.
    fn in_place<U: Unit>(term: &Term<'_>, rows: &Range<usize>, ks: &Range<usize>) -> Option<Rows> {
        let bytes = 2 * term.a.stride;
        let whole = rows.len() == SIDE && ks.len().is_multiple_of(STEP) && !bytes.is_multiple_of(4096);
        (U::ANY_ROWS && term.a.k_contiguous && whole).then(|| Rows {
            at: term.x.as_ptr().wrapping_add(rows.start * term.a.stride + ks.start).cast(),
            row: bytes,
            pair: 4,
            step: 2 * STEP,
        })
    }
}

/// Defines a function over [`Simd`] and [`Unit`] from its generic body, with the conversions of AVX512-BF16 at the levels that have pairs:
/// `pair_fn! { fn name[U: Unit] = body(x: f32); }` makes `fn name<U: Unit>(isa: Isa, x: f32)` of `body::<S, U>(s, x)`.
macro_rules! pair_fn {
    ($(#[$meta:meta])* fn $name:ident[$($G:ident : $bound:path),*] = $body:ident($($arg:ident: $ty:ty),* $(,)?);) => {
        $(#[$meta])*
        fn $name<$($G: $bound),*>(isa: $crate::cpu::simd::Isa $(, $arg: $ty)*) {
            use $crate::cpu::simd::{avx512::Avx512Bf16, simd_fn};
            simd_fn! { fn in_vectors[S $(, $G: $bound)*](s: S $(, $arg: $ty)*) { $body::<S $(, $G)*>(s $(, $arg)*) } }
            #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
            fn with_pairs<$($G: $bound),*>($($arg: $ty),*) {
                // SAFETY: the features of this function are those that the type proves.
                $body::<Avx512Bf16 $(, $G)*>(unsafe { Avx512Bf16::assume() } $(, $arg)*)
            }
            if isa.has_pairs() {
                // SAFETY: an `Isa` with pairs exists only where the processor has these features.
                unsafe { with_pairs::<$($G),*>($($arg),*) }
            } else {
                in_vectors::<$($G),*>(isa $(, $arg)*)
            }
        }
    };
}
pub(in crate::cpu) use pair_fn;

/// `by_unit!(isa, U => expression)`: the expression with the [`Unit`] of a level that has pairs as `U`.
macro_rules! by_unit {
    ($isa:expr, $U:ident => $run:expr) => {
        if $isa.level() == $crate::cpu::simd::Level::Amx {
            type $U = $crate::cpu::matmul::pairs::amx::Tiles;
            $run
        } else {
            type $U = $crate::cpu::matmul::pairs::dots::Dots;
            $run
        }
    };
}
pub(in crate::cpu) use by_unit;

/// Steps of a round that fit the scratch.
const ROUND: usize = 64;
/// Stretches of a round: from so many terms it takes steps.
const STRETCHES: usize = 8;
/// Elements of packed B: 8 panels of a whole round, more of a short one.
const PACKED_B: usize = 8 * ROUND * STEP_ELEMS;
/// Elements of packed A: the largest chunk.
const PACKED_A: usize = 8 * ROUND * STEP_ELEMS;
/// Sums that are kept from round to round: of 512 rows and 256 columns, or the reverse where there are few rows.
const SUMS: usize = 512 * 256;
/// Columns whose bias is kept.
const ITEM_N: usize = 1024;
/// Elements of one block of sums.
const BLOCK: usize = SIDE * SIDE;
const _: () = {
    assert!(<amx::Tiles as Unit>::ROUND <= ROUND && <dots::Dots as Unit>::ROUND <= ROUND);
    assert!(<amx::Tiles as Unit>::CHUNK * STEP_ELEMS <= PACKED_A && <dots::Dots as Unit>::CHUNK * STEP_ELEMS <= PACKED_A);
};
const _: () = assert!(PACKED_B + PACKED_A + SUMS + ITEM_N <= crate::cpu::pool::SCRATCH_ELEMS);

/// One of the products that a call sums: `a [m,k] b [k,n]`, with the data of both.
#[derive(Clone, Copy)]
pub struct Term<'a> {
    /// Rows.
    pub a: Operand<'a>,
    /// Its data.
    pub x: &'a [bf16],
    /// Columns.
    pub b: Operand<'a>,
    /// Its data.
    pub y: &'a [bf16],
    /// Length of its sums.
    pub k: usize,
}

impl Term<'_> {
    /// A term without values.
    pub const EMPTY: Term<'static> = {
        let none = Operand { data: Float::Bf16(&[]), stride: 0, k_contiguous: true };
        Term { a: none, x: &[], b: none, y: &[], k: 0 }
    };
}

/// What a round takes of one term.
#[derive(Clone, Copy, Default)]
struct Stretch {
    term: usize,
    start: usize,
    end: usize,
    /// Steps before it in the round.
    before: usize,
}

impl Stretch {
    fn ks(&self) -> Range<usize> {
        self.start..self.end
    }

    fn steps(&self) -> usize {
        (self.end - self.start).div_ceil(STEP)
    }
}

/// Cuts the `k` of all terms into rounds of about the same number of steps.
struct Rounds {
    /// Rounds.
    count: usize,
    /// Steps of a round, but for the last.
    steps: usize,
    term: usize,
    k: usize,
}

impl Rounds {
    fn new(most: usize, terms: &[Term<'_>]) -> Rounds {
        let steps: usize = terms.iter().map(|t| t.k.div_ceil(STEP)).sum();
        let count = steps.div_ceil(most).max(terms.len().div_ceil(STRETCHES)).max(1);
        Rounds { count, steps: steps.div_ceil(count), term: 0, k: 0 }
    }

    /// The stretches of the next round and their number.
    fn next(&mut self, terms: &[Term<'_>]) -> ([Stretch; STRETCHES], usize) {
        let (mut out, mut count, mut before) = ([Stretch::default(); STRETCHES], 0, 0);
        while count < STRETCHES && before < self.steps && self.term < terms.len() {
            let (start, k) = (self.k, terms[self.term].k);
            let end = k.min(start + (self.steps - before) * STEP);
            if start < end {
                out[count] = Stretch { term: self.term, start, end, before };
                before += out[count].steps();
                count += 1;
            }
            (self.term, self.k) = if end == k { (self.term + 1, 0) } else { (self.term, end) };
        }
        (out, count)
    }
}

/// One call, shared by its work items.
struct Call<'a, C> {
    c: Shared<'a, C>,
    stride: usize,
    terms: &'a [Term<'a>],
    p: Product<'a>,
}

/// [`blocks`] on the unit of the pool's level.
///
/// # Safety
/// The level has pairs. Operands were checked against the shape.
pub unsafe fn blocks_by_level<C: Elem>(pool: &Pool, c: Shared<'_, C>, stride: usize, terms: &[Term<'_>], p: Product<'_>) {
    // SAFETY: an `Isa` of a level exists only where its unit was detected; the rest by contract.
    by_unit!(pool.isa(), U => unsafe { blocks::<U, C>(pool, c, stride, terms, p) })
}

/// `c = alpha * sum of a b over all terms + bias (+ c)`; `p.k` is not read.
///
/// # Safety
/// The unit can be made ready. Operands were checked against the shape.
pub unsafe fn blocks<U: Unit, C: Elem>(pool: &Pool, c: Shared<'_, C>, stride: usize, terms: &[Term<'_>], p: Product<'_>) {
    let (m, n) = (p.m, p.n);
    let rounds = Rounds::new(U::ROUND, terms);
    let cols = (PACKED_B / (rounds.steps.max(1) * STEP_ELEMS) * SIDE).min(ITEM_N);
    let most = match (rounds.count, m) {
        (1, _) => (m.next_multiple_of(SIDE), cols),
        (_, ..=256) => (256, cols.min(SUMS / 256)),
        _ => (512, cols.min(SUMS / 512)),
    };
    let (rows, cols) = item_shape(pool, (m, n), most, (SIDE, SIDE));
    let (down, across) = (m.div_ceil(rows), n.div_ceil(cols));
    let call = Call { c, stride, terms, p };
    pool.for_each_scratch(down * across, |item, scratch| {
        let (i, j) = (item / across, item % across);
        let (rows, cols) = (i * rows..((i + 1) * rows).min(m), j * cols..((j + 1) * cols).min(n));
        run_item::<U, C>(pool.isa(), &call, rows, cols, scratch);
    });
}

pair_fn! {
    /// One item, with the vectors of the level.
    fn run_item[U: Unit, C: Elem] = item(call: &Call<'_, C>, rows: Range<usize>, cols: Range<usize>, scratch: &mut [f32]);
}

/// Computes rows `rows` and columns `cols` of the result.
#[inline(always)]
fn item<S: Simd, U: Unit, C: Elem>(s: S, call: &Call<'_, C>, rows: Range<usize>, cols: Range<usize>, scratch: &mut [f32]) {
    let (packed_b, rest) = scratch.split_at_mut(PACKED_B);
    let (packed_a, rest) = rest.split_at_mut(PACKED_A);
    let (sums, bias) = rest.split_at_mut(SUMS);
    let p = &call.p;
    let how = Finish { alpha: p.alpha, bias: prepare_bias(&mut bias[..ITEM_N], p.bias, &cols), add: p.write == Write::Add };
    let mut rounds = Rounds::new(U::ROUND, call.terms);
    let panels = cols.len().div_ceil(SIDE);
    let blocks = rows.len().div_ceil(SIDE);
    assert!(panels * SIDE <= ITEM_N && (rounds.count == 1 || blocks * panels * BLOCK <= SUMS));
    let chunk = (U::CHUNK / rounds.steps.max(1)).max(1);
    // Chunks of about one size.
    let chunk = rows.len().div_ceil(rows.len().div_ceil(chunk * SIDE)).next_multiple_of(SIDE);
    // SAFETY: the caller of `blocks` saw that the unit is there.
    let unit = unsafe { U::ready() };
    for round in 0..rounds.count {
        let (stretches, count) = rounds.next(call.terms);
        let stretches = &stretches[..count];
        let steps: usize = stretches.iter().map(Stretch::steps).sum();
        let (first, complete) = (round == 0, round + 1 == rounds.count);
        for stretch in stretches {
            let term = &call.terms[stretch.term];
            // SAFETY: ranges lie inside the operands; a round fits PACKED_B.
            unsafe {
                let out = packed_b.as_mut_ptr().add(stretch.before * STEP_ELEMS);
                pack::pack_b(s, out, steps * STEP_ELEMS, term.y, &term.b, cols.clone(), stretch.ks());
            }
        }
        for top in rows.clone().step_by(chunk) {
            let block = top..(top + chunk).min(rows.end);
            for stretch in stretches {
                let term = &call.terms[stretch.term];
                if U::ANY_ROWS && !term.a.k_contiguous {
                    // SAFETY: as above; the panels of a chunk fit PACKED_A.
                    unsafe {
                        let out = packed_a.as_mut_ptr().add(stretch.before * STEP_ELEMS);
                        pack::pack_b(s, out, steps * STEP_ELEMS, term.x, &term.a, block.clone(), stretch.ks());
                    }
                    continue;
                }
                for (i, row) in block.clone().step_by(SIDE).enumerate() {
                    let height = SIDE.min(block.end - row);
                    if Rows::in_place::<U>(term, &(row..row + height), &stretch.ks()).is_some() {
                        continue;
                    }
                    // SAFETY: as above.
                    unsafe {
                        let out = packed_a.as_mut_ptr().add((i * steps + stretch.before) * STEP_ELEMS);
                        pack::pack_a(s, out, term.x, &term.a, row..row + height, stretch.ks());
                    }
                }
            }
            for panel in 0..panels {
                let (done, width) = (panel * SIDE, SIDE.min(cols.len() - panel * SIDE));
                for (i, row) in block.clone().step_by(SIDE).enumerate() {
                    let height = SIDE.min(block.end - row);
                    // Complete sums of one round need a place only until they are rounded: one that stays in the first-level cache.
                    let place = if first && complete { 0 } else { panel * blocks + (row - rows.start) / SIDE };
                    // SAFETY: packed rows and panels hold the steps of the round; there is a block of sums per panel of A and B; a
                    // block of the result is inside c, and items write disjoint ones.
                    unsafe {
                        let sums = sums.as_mut_ptr().add(place * BLOCK);
                        let b = packed_b.as_ptr().add(panel * steps * STEP_ELEMS).cast::<u8>();
                        let a = packed_a.as_ptr().add(i * steps * STEP_ELEMS).cast::<u8>();
                        if U::ANY_ROWS && steps > 0 {
                            for (n, stretch) in stretches.iter().enumerate() {
                                let (term, before) = (&call.terms[stretch.term], 4 * stretch.before * STEP_ELEMS);
                                let rows = match Rows::in_place::<U>(term, &(row..row + height), &stretch.ks()) {
                                    Some(rows) => rows,
                                    None if term.a.k_contiguous => Rows::packed(a.add(before)),
                                    None => Rows::columns(a.add(before)),
                                };
                                unit.product(s, stretch.steps(), rows, b.add(before), sums, first && n == 0);
                            }
                        } else {
                            unit.long_product(s, steps, a, b, sums, first);
                        }
                        if complete {
                            let c = call.c.ptr().add(row * call.stride + cols.start + done);
                            if (height, width, how.alpha) == (SIDE, SIDE, 1.0) && how.bias.is_null() {
                                finish_whole::<S, C>(s, sums, c, call.stride, how.add);
                            } else {
                                let how = Finish { bias: if how.bias.is_null() { how.bias } else { how.bias.add(done) }, ..how };
                                super::tile::finish::<S, C>(s, sums, SIDE, c, call.stride, height, width, how);
                            }
                        }
                    }
                }
            }
        }
    }
    drop(unit);
}

/// [`super::tile::finish`] of a whole block without bias and factor.
///
/// # Safety
/// `sums` has 1024 elements; `c` is valid for 32 x 32.
#[inline(always)]
unsafe fn finish_whole<S: Simd, C: Elem>(s: S, sums: *const f32, c: *mut C, stride: usize, add: bool) {
    for r in 0..SIDE {
        for j in (0..SIDE).step_by(2 * S::LANES) {
            // SAFETY: inside both blocks by contract; 32 columns are whole pairs of vectors.
            unsafe {
                let (sums, at) = (sums.add(r * SIDE + j), c.add(r * stride + j));
                let (mut low, mut high) = (s.load(sums), s.load(sums.add(S::LANES)));
                if add {
                    (low, high) = (s.add(C::load(s, at), low), s.add(C::load(s, at.add(S::LANES)), high));
                }
                C::store_flushed(s, at, low, high);
            }
        }
    }
}
