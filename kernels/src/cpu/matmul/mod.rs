//! Dense products of any layout: blocked, packed, summed in `f32`.
//!
//! `c [m,n] = alpha * a [m,k] b [k,n] + bias [n] (+ c)`. The result is cut into blocks that work items compute on their own: an
//! item packs what it needs of B (and of A, where it cannot be read in place) into its thread's scratch, sums tiles in registers over blocks of `k` (the partial sums of
//! a block of the result stay in scratch), and rounds once at the end. Blocks of `k` depend on `k` alone and every element is one
//! chain of multiply-adds per block, so the bits do not depend on how many items or threads there are. After Goto and van de
//! Geijn, "Anatomy of high-performance matrix multiplication" (2008), and BLIS. Where pairs of bf16 have an instruction of their own they
//! have their own blocks too ([`pairs`]).
#![allow(unsafe_code)]

mod pack;
#[cfg(target_arch = "x86_64")]
pub(in crate::cpu) mod pairs;
mod tile;

use super::float::{Elem, Float, FloatMut, Shared};
use super::pool::{Pool, SCRATCH_ELEMS};
use super::simd::{Isa, Simd, simd_fn};
use crate::Write;
use std::ops::Range;
use tile::{Finish, PanelA};

/// Values of `k` per block: long sums make the start and the end of a tile cheap. A tile's panel of A lies in the first-level cache
/// and its panel of B comes from the second, which keeps up with 64 bytes in 6 cycles. Measured in docs/performance.md.
const BLOCK_K: usize = 576;
/// Rows that pass by a panel of B: those of A lie in the second-level cache.
const BLOCK_M: usize = 96;
/// Largest block of the result: a multiple of every tile height (4, 6, 8), no less than the 512 tokens of a short batch.
const ITEM_M: usize = 528;
/// Largest block of the result: rounded down to whole panels.
const ITEM_N: usize = 512;

const PACKED_A: usize = 56_320;
const PACKED_B: usize = BLOCK_K * ITEM_N;
const PARTIAL: usize = ITEM_M * ITEM_N;
const LAST_TILE: usize = 8 * 64;
const _: () = assert!(PACKED_A + PACKED_B + PARTIAL + ITEM_N + LAST_TILE <= SCRATCH_ELEMS);

/// A matrix as a product reads it: rows of A or columns of B (index `i`) against the summed index `k`.
#[derive(Clone, Copy, Debug)]
pub struct Operand<'a> {
    data: Float<'a>,
    stride: usize,
    k_contiguous: bool,
}

impl<'a> Operand<'a> {
    /// Element (i, k) is at `i * stride + k`: activations as A, weights `[O,I]` as B of `x W^T`.
    pub fn k_inner(data: Float<'a>, stride: usize) -> Self {
        Operand { data, stride, k_contiguous: true }
    }

    /// Element (i, k) is at `k * stride + i`: weights `[O,I]` as B of `dy W`; `dy` as A and `x` as B of `dy^T x`.
    pub fn k_outer(data: Float<'a>, stride: usize) -> Self {
        Operand { data, stride, k_contiguous: false }
    }

    fn check(&self, name: &str, i: usize, k: usize) {
        let (outer, inner) = if self.k_contiguous { (i, k) } else { (k, i) };
        let last = if outer == 0 || inner == 0 { 0 } else { (outer - 1) * self.stride + inner };
        assert!(self.stride >= inner && self.data.elems() >= last, "matmul: {name} has {} elements, needs {last}", self.data.elems());
    }
}

/// What to compute beside the operands.
#[derive(Clone, Copy, Debug)]
pub struct Product<'a> {
    /// Rows of the result.
    pub m: usize,
    /// Columns of the result.
    pub n: usize,
    /// Length of the sums.
    pub k: usize,
    /// Multiplies the sums.
    pub alpha: f32,
    /// `[n]`, added to every row.
    pub bias: Option<Float<'a>>,
    /// Whether the result replaces `c` or is added to it.
    pub write: Write,
}

/// `c [m,n]`, rows `stride` apart, receives `alpha * a b + bias`, set or added; the sum is in `f32` and is rounded once.
/// Panics when an operand is shorter than its shape: operations check lengths before they enqueue anything.
pub fn matmul(pool: &Pool, c: FloatMut<'_>, stride: usize, a: Operand<'_>, b: Operand<'_>, p: Product<'_>) {
    match c {
        FloatMut::F32(c) => by_level(pool, c, stride, a, b, p),
        FloatMut::Bf16(c) => by_level(pool, c, stride, a, b, p),
    }
}

/// Two `bf16` operands go to the instructions for them, whatever the shape: a token's result must not depend on how many there are.
fn by_level<C: Elem>(pool: &Pool, c: &mut [C], stride: usize, a: Operand<'_>, b: Operand<'_>, p: Product<'_>) {
    #[cfg(target_arch = "x86_64")]
    if let (true, Float::Bf16(x), Float::Bf16(y)) = (pool.isa().has_pairs(), a.data, b.data) {
        if let Some(c) = checked(c, stride, &a, &b, &p) {
            // SAFETY: the level says which unit is there; operands are checked.
            unsafe { pairs::blocks_by_level(pool, c, stride, &[pairs::Term { a, x, b, y, k: p.k }], p) }
        }
        return;
    }
    blocks(pool, c, stride, a, b, p)
}

/// `c [m,n] = sum of a b over `terms` + bias (+ c)` of bf16 operands, with one rounding; a term is (a, b, length of its sums),
/// `p.k` is not read. Panics where pairs have no instructions, or an operand is shorter than its shape.
pub fn matmul_terms<C: Elem>(pool: &Pool, c: &mut [C], stride: usize, terms: &[(Operand<'_>, Operand<'_>, usize)], p: Product<'_>) {
    assert!(pool.isa().has_pairs(), "matmul_terms: no products of pairs on {}", pool.isa().name());
    #[cfg(target_arch = "x86_64")]
    {
        assert!(terms.len() <= MAX_TERMS, "matmul_terms: {} terms, at most {MAX_TERMS}", terms.len());
        let mut all = [pairs::Term::EMPTY; MAX_TERMS];
        for (term, (a, b, k)) in all.iter_mut().zip(terms) {
            let (Float::Bf16(x), Float::Bf16(y)) = (a.data, b.data) else { panic!("matmul_terms: operands are not bf16") };
            a.check("a", p.m, *k);
            b.check("b", p.n, *k);
            *term = pairs::Term { a: *a, x, b: *b, y, k: *k };
        }
        let Some((a, b, k)) = terms.first() else { return };
        if let Some(c) = checked(c, stride, a, b, &Product { k: *k, ..p }) {
            // SAFETY: the level says which unit is there; operands are checked.
            unsafe { pairs::blocks_by_level(pool, c, stride, &all[..terms.len()], p) }
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (c, stride, terms, p);
}

/// Products that [`matmul_terms`] sums at most.
pub const MAX_TERMS: usize = 16;

/// One product, shared by its work items.
struct Job<'a, C> {
    c: Shared<'a, C>,
    stride: usize,
    a: Operand<'a>,
    b: Operand<'a>,
    p: Product<'a>,
}

/// The result for items to share, once every operand was found to be as long as the shape says; `None` where there is nothing to do.
fn checked<'a, C>(c: &'a mut [C], stride: usize, a: &Operand<'_>, b: &Operand<'_>, p: &Product<'_>) -> Option<Shared<'a, C>> {
    let (m, n) = (p.m, p.n);
    if m == 0 || n == 0 {
        return None;
    }
    a.check("a", m, p.k);
    b.check("b", n, p.k);
    assert!(stride >= n && c.len() >= (m - 1) * stride + n, "matmul: c has {} elements", c.len());
    assert!(p.bias.is_none_or(|b| b.elems() >= n), "matmul: bias is shorter than {n}");
    Some(Shared::new(c))
}

fn blocks<C: Elem>(pool: &Pool, c: &mut [C], stride: usize, a: Operand<'_>, b: Operand<'_>, p: Product<'_>) {
    let (m, n) = (p.m, p.n);
    let Some(c) = checked(c, stride, &a, &b, &p) else { return };
    let (tile_rows, tile_cols) = tile_shape(pool.isa());
    // A sum of one block keeps no partial sums, so an item may take all rows and B is packed once per call.
    let most_rows = if p.k <= BLOCK_K { m.next_multiple_of(tile_rows) } else { ITEM_M };
    let (rows, cols) = item_shape(pool, (m, n), (most_rows, ITEM_N / tile_cols * tile_cols), (tile_rows, tile_cols));
    let (down, across) = (m.div_ceil(rows), n.div_ceil(cols));
    let job = Job { c, stride, a, b, p };
    pool.for_each_scratch(down * across, |item, scratch| {
        let (i, j) = (item / across, item % across);
        let (rows, cols) = (i * rows..((i + 1) * rows).min(m), j * cols..((j + 1) * cols).min(n));
        run_item::<C>(pool.isa(), &job, rows, cols, scratch);
    });
}

/// Rows and columns of an item of a result `(m, n)`: as large as scratch allows (`most`), since what is packed is used once per
/// item; smaller until every thread has work, in whole tiles. The choice is free, as it does not change results.
fn item_shape(pool: &Pool, (m, n): (usize, usize), most: (usize, usize), tile: (usize, usize)) -> (usize, usize) {
    let even = |whole: usize, most: usize, unit: usize| whole.div_ceil(whole.div_ceil(most)).next_multiple_of(unit);
    let ((mut most_rows, mut most_cols), (tile_rows, tile_cols)) = (most, tile);
    loop {
        let (rows, cols) = (even(m, most_rows, tile_rows), even(n, most_cols, tile_cols));
        let items = m.div_ceil(rows) * n.div_ceil(cols);
        let enough = pool.threads() == 1 || items >= 2 * pool.threads() || (items >= pool.threads() && items % pool.threads() == 0);
        let (split_rows, split_cols) = (rows >= 8 * tile_rows, cols >= 2 * tile_cols);
        if enough || !(split_rows || split_cols) {
            return (rows, cols);
        }
        if split_rows && (rows >= cols || !split_cols) {
            most_rows = (rows / 2).next_multiple_of(tile_rows);
        } else {
            most_cols = (cols / 2).next_multiple_of(tile_cols);
        }
    }
}

simd_fn! {
    /// Rows and columns of a tile.
    fn tile_shape[S](s: S) -> (usize, usize) {
        let _ = s;
        (S::TILE_ROWS, S::TILE_VECTORS * S::LANES)
    }
}

simd_fn! {
    fn run_item[S, C: Elem](s: S, job: &Job<'_, C>, rows: Range<usize>, cols: Range<usize>, scratch: &mut [f32]) {
        item_body::<S, C>(s, job, rows, cols, scratch)
    }
}

/// Computes rows `rows` and columns `cols` of the result.
#[inline(always)]
fn item_body<S: Simd, C: Elem>(s: S, job: &Job<'_, C>, rows: Range<usize>, cols: Range<usize>, scratch: &mut [f32]) {
    let (packed_a, rest) = scratch.split_at_mut(PACKED_A);
    let (packed_b, rest) = rest.split_at_mut(PACKED_B);
    let (partial, rest) = rest.split_at_mut(PARTIAL);
    let (bias, last) = rest.split_at_mut(ITEM_N);
    let (height, width) = (S::TILE_ROWS, S::TILE_VECTORS * S::LANES);
    let padded_rows = rows.len().next_multiple_of(height);
    assert!((padded_rows <= ITEM_M || job.p.k <= BLOCK_K) && cols.len().next_multiple_of(S::LANES) <= ITEM_N);
    let how = Finish { alpha: job.p.alpha, bias: prepare_bias(bias, job.p.bias, &cols), add: job.p.write == Write::Add };
    let plain = how.bias.is_null() && !how.add && how.alpha == 1.0;
    let k_blocks = job.p.k.div_ceil(BLOCK_K).max(1);
    let block_k = job.p.k.div_ceil(k_blocks).next_multiple_of(8);
    let block_m = rows.len().div_ceil(rows.len().div_ceil(BLOCK_M)).next_multiple_of(height);
    for kb in 0..k_blocks {
        let ks = (kb * block_k).min(job.p.k)..((kb + 1) * block_k).min(job.p.k);
        let steps = ks.len();
        let (first, complete) = (kb == 0, kb + 1 == k_blocks);
        // SAFETY: ranges were checked against the operands; a block fits PACKED_B.
        unsafe { pack::pack_b::<S>(s, packed_b.as_mut_ptr(), &job.b, cols.clone(), ks.clone()) };
        let mut top = rows.start;
        while top < rows.end {
            let block = top..(top + block_m).min(rows.end);
            let in_place = pack::readable(&job.a).filter(|_| block.len().is_multiple_of(height));
            if in_place.is_none() {
                // SAFETY: as above; BLOCK_M rows fit PACKED_A.
                unsafe { pack::pack_a::<S>(s, packed_a.as_mut_ptr(), &job.a, block.clone(), ks.clone()) };
            }
            let mut done = 0;
            while done < cols.len() {
                let panel_cols = pack::panel_b_cols::<S>(cols.len(), done);
                let vectors = panel_cols / S::LANES;
                for (panel, row) in block.clone().step_by(height).enumerate() {
                    let a = match in_place {
                        Some(x) => PanelA { base: x.wrapping_add(row * job.a.stride + ks.start), row_stride: job.a.stride, step_stride: 1 },
                        None => pack::panel_a::<S>(packed_a.as_ptr(), panel, steps, job.a.k_contiguous),
                    };
                    // SAFETY: panels hold `steps` steps; partial sums have a tile per tile of the item, panel by panel (ITEM_M is a whole
                    // number of tiles); a tile of complete sums fits LAST_TILE; items write disjoint parts of c.
                    unsafe {
                        let b = packed_b.as_ptr().add(done * steps);
                        let place = if first && complete { 0 } else { done * padded_rows + (row - rows.start) * panel_cols };
                        let sums = partial.as_mut_ptr().add(place);
                        let before = (!first).then_some((sums as *const f32, panel_cols));
                        if !complete {
                            tile::full_tile::<S>(s, vectors, steps, a, b, sums, panel_cols, before);
                            continue;
                        }
                        let c = job.c.ptr().add(row * job.stride + cols.start + done);
                        let (m, n) = (height.min(block.end - row), panel_cols.min(cols.len() - done));
                        if let (true, Some(c)) = (plain && m == height && n == panel_cols, C::as_f32(c)) {
                            tile::full_tile::<S>(s, vectors, steps, a, b, c, job.stride, before);
                            continue;
                        }
                        tile::full_tile::<S>(s, vectors, steps, a, b, last.as_mut_ptr(), width, before);
                        let how = Finish { bias: if how.bias.is_null() { how.bias } else { how.bias.add(done) }, ..how };
                        tile::finish::<S, C>(s, last.as_ptr(), width, c, job.stride, m, n, how);
                    }
                }
                done += panel_cols;
            }
            top = block.end;
        }
    }
}

/// `Ok` when products on `isa` agree with the portable path, for every layout and type; part of the check before first use.
pub(crate) fn self_check(isa: Isa) -> Result<(), String> {
    // Edges everywhere; whole tiles.
    self_check_shape(isa, 19, 101, 37)?;
    self_check_shape(isa, 96, 64, 64)
}

fn self_check_shape(isa: Isa, m: usize, n: usize, k: usize) -> Result<(), String> {
    let value = |i: usize| ((i * 37 % 101) as f32 - 50.0) / 64.0;
    let (a, b): (Vec<f32>, Vec<f32>) = ((0..m * k).map(value).collect(), (0..n * k).map(|i| value(i + 7)).collect());
    let narrow = |x: &[f32]| -> Vec<half::bf16> { x.iter().map(|x| half::bf16::from_f32(*x)).collect() };
    let (ah, bh) = (narrow(&a), narrow(&b));
    let pools = [isa, Isa::PORTABLE].map(|isa| Pool::with_isa(1, isa));
    let [Ok(pool), Ok(portable)] = &pools else { return Err("no memory for scratch".into()) };
    let p = Product { m, n, k, alpha: 1.0, bias: None, write: Write::Set };
    for case in 0..8 {
        let (fa, fb) = if case & 1 == 0 { (Float::F32(&a), Float::F32(&b)) } else { (Float::Bf16(&ah), Float::Bf16(&bh)) };
        let oa = if case & 2 == 0 { Operand::k_inner(fa, k) } else { Operand::k_outer(fa, m) };
        let ob = if case & 4 == 0 { Operand::k_inner(fb, k) } else { Operand::k_outer(fb, n) };
        let (mut got, mut want) = (vec![0.0f32; m * n], vec![0.0f32; m * n]);
        matmul(pool, FloatMut::F32(&mut got), n, oa, ob, p);
        matmul(portable, FloatMut::F32(&mut want), n, oa, ob, p);
        // Sums of at most 64 products below 1 in two orders; a wrong lane is off by far more.
        if let Some(i) = (0..m * n).find(|i| (got[*i] - want[*i]).abs() > 1e-4 || got[*i].is_nan()) {
            return Err(format!("matmul of layout {case}, element {i}: {} instead of {}", got[i], want[i]));
        }
    }
    Ok(())
}

/// The bias of columns `cols` as `f32`, padded with zeros; null without one.
fn prepare_bias(out: &mut [f32], bias: Option<Float<'_>>, cols: &Range<usize>) -> *const f32 {
    let Some(bias) = bias else { return std::ptr::null() };
    out.fill(0.0);
    for (o, j) in out.iter_mut().zip(cols.clone()) {
        *o = bias.get(j);
    }
    out.as_ptr()
}

#[cfg(test)]
mod tests;
