//! Products of `bf16` on AMX tiles: how a block of the result is computed.
//!
//! As in the parent module: blocks of `k` depend on `k` alone and every element is one chain in the order of `k`, so bits depend
//! neither on items nor on threads. A panel of B (32 columns of a block of `k`) lies in the first-level cache while the panels of A
//! pass by from the second; rows of A are read where they are unless their distance would put them all into one cache set. Where
//! one block of `k` is the whole sum, an item takes all rows, and B is packed once per call.
//!
//! Nothing here but [`tile`] needs the unit: with its instructions emulated, tests run this very code on any x86-64.

#[cfg(all(test, target_os = "linux"))]
pub(in crate::cpu) mod emulate;
pub(in crate::cpu) mod pack;
#[cfg(all(test, target_os = "linux"))]
mod tests;
pub(in crate::cpu) mod tile;

use super::{Finish, Job, Operand, Pool, Product, item_shape, prepare_bias};
use crate::Write;
use crate::cpu::float::{Elem, Shared};
use crate::cpu::simd::simd_fn;
use half::bf16;
use std::ops::Range;
use tile::{Rows, SIDE, STEP, STEP_ELEMS, Tiles};

/// Values of `k` per block: a panel of B takes 36 KB of the first-level cache's 48.
const BLOCK_K: usize = 576;
/// Rows whose sums are kept at once.
const ITEM_M: usize = 512;
/// Columns packed at once.
const ITEM_N: usize = 512;

const PACKED_B: usize = BLOCK_K / STEP * STEP_ELEMS * (ITEM_N / SIDE);
const PACKED_A: usize = BLOCK_K / STEP * STEP_ELEMS * (ITEM_M / SIDE);
const SUMS: usize = ITEM_M * ITEM_N;
/// Elements of one block of sums.
const BLOCK: usize = SIDE * SIDE;
const _: () = assert!(PACKED_B + PACKED_A + SUMS + ITEM_N <= crate::cpu::pool::SCRATCH_ELEMS);

/// `c = alpha * a b + bias (+ c)` of `bf16` operands, whose data are `x` and `y`.
///
/// # Safety
/// [`tile::detect`] was true. Operands were checked against the shape.
pub unsafe fn blocks<C: Elem>(
    pool: &Pool,
    c: Shared<'_, C>,
    stride: usize,
    (a, x): (Operand<'_>, &[bf16]),
    (b, y): (Operand<'_>, &[bf16]),
    p: Product<'_>,
) {
    let (m, n) = (p.m, p.n);
    let most_rows = if p.k <= BLOCK_K { m.next_multiple_of(SIDE) } else { ITEM_M };
    let (rows, cols) = item_shape(pool, (m, n), (most_rows, ITEM_N), (SIDE, SIDE));
    let (down, across) = (m.div_ceil(rows), n.div_ceil(cols));
    let job = Job { c, stride, a, b, p };
    pool.for_each_scratch(down * across, |item, scratch| {
        let (i, j) = (item / across, item % across);
        let (rows, cols) = (i * rows..((i + 1) * rows).min(m), j * cols..((j + 1) * cols).min(n));
        item_body::<C>(pool.isa(), &job, x, y, rows, cols, scratch);
    });
}

/// Whether tiles of A may be read from the operand: rows a multiple of 4 KiB apart share a set of the first-level cache.
fn readable(a: &Operand<'_>, k: usize) -> bool {
    a.k_contiguous && k.is_multiple_of(STEP) && !(a.stride * size_of::<bf16>()).is_multiple_of(4096)
}

simd_fn! {
    /// Computes rows `rows` and columns `cols` of the result.
    fn item_body[S, C: Elem](
        s: S,
        job: &Job<'_, C>,
        x: &[bf16],
        y: &[bf16],
        rows: Range<usize>,
        cols: Range<usize>,
        scratch: &mut [f32],
    ) {
        let (packed_b, rest) = scratch.split_at_mut(PACKED_B);
        let (packed_a, rest) = rest.split_at_mut(PACKED_A);
        let (sums, bias) = rest.split_at_mut(SUMS);
        let how = Finish { alpha: job.p.alpha, bias: prepare_bias(&mut bias[..ITEM_N], job.p.bias, &cols), add: job.p.write == Write::Add };
        let k_blocks = job.p.k.div_ceil(BLOCK_K).max(1);
        let block_k = job.p.k.div_ceil(k_blocks).next_multiple_of(STEP);
        let panels = cols.len().div_ceil(SIDE);
        assert!(panels * SIDE <= ITEM_N && (k_blocks == 1 || rows.len() <= ITEM_M));
        // SAFETY: the caller of `blocks` saw that the unit is there.
        let tiles = unsafe { Tiles::configure() };
        for kb in 0..k_blocks {
            let ks = (kb * block_k).min(job.p.k)..((kb + 1) * block_k).min(job.p.k);
            let steps = ks.len().div_ceil(STEP);
            let (first, complete) = (kb == 0, kb + 1 == k_blocks);
            let readable = readable(&job.a, ks.len());
            // SAFETY: ranges lie inside the operands; a block fits PACKED_B.
            unsafe { pack::pack_b(s, packed_b.as_mut_ptr(), y, &job.b, cols.clone(), ks.clone()) };
            for top in rows.clone().step_by(ITEM_M) {
                let block = top..(top + ITEM_M).min(rows.end);
                for (i, row) in block.clone().step_by(SIDE).enumerate() {
                    let height = SIDE.min(block.end - row);
                    if !(readable && height == SIDE) {
                        // SAFETY: as above; 16 panels fit PACKED_A.
                        unsafe { pack::pack_a(s, packed_a.as_mut_ptr().add(i * steps * STEP_ELEMS), x, &job.a, row..row + height, ks.clone()) };
                    }
                }
                for panel in 0..panels {
                    let (done, width) = (panel * SIDE, SIDE.min(cols.len() - panel * SIDE));
                    for (i, row) in block.clone().step_by(SIDE).enumerate() {
                        let height = SIDE.min(block.end - row);
                        let a = if readable && height == SIDE {
                            let row_bytes = job.a.stride * size_of::<bf16>();
                            let base = x.as_ptr().wrapping_add(row * job.a.stride + ks.start).cast();
                            Rows { base, row_bytes, half_bytes: SIDE / 2 * row_bytes, step_bytes: 2 * STEP }
                        } else {
                            let base = packed_a.as_ptr().wrapping_add(i * steps * STEP_ELEMS).cast();
                            Rows { base, row_bytes: 2 * STEP, half_bytes: STEP * SIDE, step_bytes: 2 * STEP * SIDE }
                        };
                        // SAFETY: rows and panels hold `steps` steps; there is a block of sums per panel of A and B; a block of the result
                        // is inside c, and items write disjoint ones.
                        unsafe {
                            let b = packed_b.as_ptr().add(panel * steps * STEP_ELEMS).cast();
                            let sums = sums.as_mut_ptr().add((panel * (ITEM_M / SIDE) + i) * BLOCK);
                            tile::product(&tiles, steps, a, b, sums, first);
                            if complete {
                                let c = job.c.ptr().add(row * job.stride + cols.start + done);
                                let how = Finish { bias: if how.bias.is_null() { how.bias } else { how.bias.add(done) }, ..how };
                                super::tile::finish::<S, C>(s, sums, SIDE, c, job.stride, height, width, how);
                            }
                        }
                    }
                }
            }
        }
        drop(tiles);
    }
}
