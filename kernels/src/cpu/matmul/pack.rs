//! Packing: operands of any layout and type become panels that the tile reads front to back.
//!
//! A panel of B holds, for each step along `k`, the columns of a tile side by side. A panel of A keeps rows whole where `k` is
//! contiguous in memory (a plain copy) and keeps steps whole where rows are; the tile takes strides, so A is never transposed.
//! What lies beyond the matrix is packed as zero. In pairs, a step is two neighbours along `k` in 32 bits.

use super::Operand;
use super::tile::{Packing, PanelA};
use crate::cpu::float::{Elem, Float};
use crate::cpu::simd::{Simd, prefetch};
use half::bf16;
use std::ops::Range;

/// Rows ahead of which a matrix is fetched that is read row by row: each is in another page, where no hardware prefetcher follows.
const ROWS_AHEAD: usize = 8;
/// Elements ahead of which eight rows are fetched that are read side by side.
const COLS_AHEAD: usize = 64;

/// Steps of `k` values.
#[inline(always)]
pub fn steps<P: Packing>(k: usize) -> usize {
    if P::PAIRS { k.div_ceil(2) } else { k }
}

/// Elements between panels of A: a vector of slack, since stores may run past a panel's last step.
#[inline(always)]
pub fn panel_a_elems<S: Simd>(steps: usize) -> usize {
    S::TILE_ROWS * steps + 16
}

/// Where panel `panel` of a packed block is and how it is laid out.
#[inline(always)]
pub fn panel_a<S: Simd>(packed: *const f32, panel: usize, steps: usize, k_contiguous: bool) -> PanelA {
    let base = packed.wrapping_add(panel * panel_a_elems::<S>(steps));
    match k_contiguous {
        true => PanelA { base, row_stride: steps, step_stride: 1 },
        false => PanelA { base, row_stride: 1, step_stride: S::TILE_ROWS },
    }
}

/// The data of an A that tiles read in place: `f32` whose rows run along `k`, and are not a multiple of 4 KiB apart, which would put
/// the rows of a tile into one set of the first-level cache.
#[inline(always)]
pub fn readable<P: Packing>(a: &Operand<'_>) -> Option<*const f32> {
    match a.data {
        Float::F32(x) if !P::PAIRS && a.k_contiguous && !a.stride.is_multiple_of(1024) => Some(x.as_ptr()),
        _ => None,
    }
}

/// Packs rows `rows` and `k` values `ks` of A.
///
/// # Safety
/// The ranges lie inside the operand; `out` has room for the panels.
#[inline(always)]
pub unsafe fn pack_a<S: Simd, P: Packing>(s: S, out: *mut f32, a: &Operand<'_>, rows: Range<usize>, ks: Range<usize>) {
    // SAFETY: passed on.
    unsafe {
        match (a.data, a.k_contiguous) {
            (Float::Bf16(x), true) if P::PAIRS => rows_of_pairs::<S>(out, x, a.stride, rows, ks),
            (Float::Bf16(x), false) if P::PAIRS => steps_of_pairs::<S>(out, x, a.stride, rows, ks),
            (Float::F32(x), true) => rows_whole(s, out, x, a.stride, rows, ks),
            (Float::Bf16(x), true) => rows_whole(s, out, x, a.stride, rows, ks),
            (Float::F32(x), false) => steps_whole(s, out, x, a.stride, rows, ks),
            (Float::Bf16(x), false) => steps_whole(s, out, x, a.stride, rows, ks),
        }
    }
}

#[inline(always)]
unsafe fn rows_whole<S: Simd, E: Elem>(s: S, out: *mut f32, x: &[E], stride: usize, rows: Range<usize>, ks: Range<usize>) {
    let steps = ks.len();
    for (panel, first) in rows.clone().step_by(S::TILE_ROWS).enumerate() {
        for r in 0..S::TILE_ROWS {
            // SAFETY: inside the panel; sources inside the operand.
            unsafe {
                let dst = out.add(panel * panel_a_elems::<S>(steps) + r * steps);
                if first + r >= rows.end {
                    dst.write_bytes(0, steps);
                    continue;
                }
                let src = x.as_ptr().add((first + r) * stride + ks.start);
                let mut k = 0;
                while k + S::LANES <= steps {
                    s.store(dst.add(k), E::load(s, src.add(k)));
                    k += S::LANES;
                }
                while k < steps {
                    *dst.add(k) = (*src.add(k)).to_f32();
                    k += 1;
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn steps_whole<S: Simd, E: Elem>(s: S, out: *mut f32, x: &[E], stride: usize, rows: Range<usize>, ks: Range<usize>) {
    let steps = ks.len();
    for (step, k) in ks.enumerate() {
        for (panel, first) in rows.clone().step_by(S::TILE_ROWS).enumerate() {
            let at = k * stride + first;
            // SAFETY: inside the panel and its slack; sources inside the operand.
            unsafe {
                let dst = out.add(panel * panel_a_elems::<S>(steps) + step * S::TILE_ROWS);
                prefetch(x.as_ptr().wrapping_add(at + ROWS_AHEAD * stride));
                if first + S::LANES <= rows.end {
                    // A whole vector may be longer than the tile is high: the next step overwrites the rest.
                    s.store(dst, E::load(s, x.as_ptr().add(at)));
                } else {
                    for r in 0..S::TILE_ROWS {
                        *dst.add(r) = if first + r < rows.end { x.get_unchecked(at + r).to_f32() } else { 0.0 };
                    }
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn rows_of_pairs<S: Simd>(out: *mut f32, x: &[bf16], stride: usize, rows: Range<usize>, ks: Range<usize>) {
    let steps = ks.len().div_ceil(2);
    for (panel, first) in rows.clone().step_by(S::TILE_ROWS).enumerate() {
        for r in 0..S::TILE_ROWS {
            // SAFETY: inside the panel; sources inside the operand.
            unsafe {
                let dst = out.add(panel * panel_a_elems::<S>(steps) + r * steps);
                dst.write_bytes(0, steps);
                if first + r < rows.end {
                    let src = x.as_ptr().add((first + r) * stride + ks.start);
                    std::ptr::copy_nonoverlapping(src, dst.cast::<bf16>(), ks.len());
                }
            }
        }
    }
}

/// The pair of `k` and `k + 1` at `at` of each row; zero beyond `end`.
#[inline(always)]
pub unsafe fn pair(x: *const bf16, at: usize, stride: usize, k: usize, end: usize) -> u32 {
    // SAFETY: the caller's elements are inside the operand.
    unsafe {
        let low = u32::from((*x.add(k * stride + at)).to_bits());
        let high = if k + 1 < end { u32::from((*x.add((k + 1) * stride + at)).to_bits()) } else { 0 };
        low | high << 16
    }
}

#[inline(always)]
unsafe fn steps_of_pairs<S: Simd>(out: *mut f32, x: &[bf16], stride: usize, rows: Range<usize>, ks: Range<usize>) {
    let steps = ks.len().div_ceil(2);
    for step in 0..steps {
        let k = ks.start + 2 * step;
        for (panel, first) in rows.clone().step_by(S::TILE_ROWS).enumerate() {
            for r in 0..S::TILE_ROWS {
                // SAFETY: inside the panel; sources inside the operand.
                unsafe {
                    let dst = out.add(panel * panel_a_elems::<S>(steps) + step * S::TILE_ROWS + r).cast::<u32>();
                    *dst = if first + r < rows.end { pair(x.as_ptr(), first + r, stride, k, ks.end) } else { 0 };
                }
            }
        }
    }
}

/// Columns of the panel of B that starts `done` columns into a block of `cols`, padded to whole vectors.
#[inline(always)]
pub fn panel_b_cols<S: Simd>(cols: usize, done: usize) -> usize {
    (cols - done).min(S::TILE_VECTORS * S::LANES).next_multiple_of(S::LANES)
}

/// Packs columns `cols` and `k` values `ks` of B. The panel of the columns from `done` on starts at `done * steps`.
///
/// # Safety
/// The ranges lie inside the operand; `out` has room for the panels.
#[inline(always)]
pub unsafe fn pack_b<S: Simd, P: Packing>(s: S, out: *mut f32, b: &Operand<'_>, cols: Range<usize>, ks: Range<usize>) {
    // SAFETY: passed on.
    unsafe {
        match (b.data, b.k_contiguous) {
            (Float::Bf16(x), true) if P::PAIRS => transposed_pairs(s, out, x, b.stride, cols, ks),
            (Float::Bf16(x), false) if P::PAIRS => straight_pairs(s, out, x, b.stride, cols, ks),
            (Float::F32(x), true) => transposed(s, out, x, b.stride, cols, ks),
            (Float::Bf16(x), true) => transposed(s, out, x, b.stride, cols, ks),
            (Float::F32(x), false) => straight(s, out, x, b.stride, cols, ks),
            (Float::Bf16(x), false) => straight(s, out, x, b.stride, cols, ks),
        }
    }
}

#[inline(always)]
unsafe fn straight<S: Simd, E: Elem>(s: S, out: *mut f32, x: &[E], stride: usize, cols: Range<usize>, ks: Range<usize>) {
    let steps = ks.len();
    // Panels may be a power of two apart: more at once than the first-level cache has ways would evict each other.
    let together = 4 * S::TILE_VECTORS * S::LANES;
    for group in (0..cols.len()).step_by(together) {
        let end = (group + together).min(cols.len());
        for (step, k) in ks.clone().enumerate() {
            let mut done = group;
            while done < end {
                let width = panel_b_cols::<S>(cols.len(), done);
                let mut j = 0;
                while j < width {
                    let left = cols.len() - done - j;
                    // SAFETY: inside the panel; sources inside the operand.
                    unsafe {
                        let src = x.as_ptr().add(k * stride + cols.start + done + j);
                        prefetch(src.wrapping_add(ROWS_AHEAD * stride));
                        let v = if left >= S::LANES { E::load(s, src) } else { E::load_part(s, src, left) };
                        s.store(out.add(done * steps + step * width + j), v);
                    }
                    j += S::LANES;
                }
                done += width;
            }
        }
    }
}

#[inline(always)]
unsafe fn straight_pairs<S: Simd>(s: S, out: *mut f32, x: &[bf16], stride: usize, cols: Range<usize>, ks: Range<usize>) {
    let steps = ks.len().div_ceil(2);
    for step in 0..steps {
        let k = ks.start + 2 * step;
        let mut done = 0;
        while done < cols.len() {
            let width = panel_b_cols::<S>(cols.len(), done);
            // SAFETY: inside the panel; sources inside the operand.
            unsafe {
                let dst = out.add(done * steps + step * width);
                let mut j = 0;
                while k + 1 < ks.end && j < width && done + j + S::LANES <= cols.len() {
                    let low = x.as_ptr().add(k * stride + cols.start + done + j).cast::<u16>();
                    s.store(dst.add(j), s.load_pairs(low, low.add(stride)));
                    j += S::LANES;
                }
                while j < width {
                    let bits = if done + j < cols.len() { pair(x.as_ptr(), cols.start + done + j, stride, k, ks.end) } else { 0 };
                    *dst.add(j).cast::<u32>() = bits;
                    j += 1;
                }
            }
            done += width;
        }
    }
}

#[inline(always)]
unsafe fn transposed<S: Simd, E: Elem>(s: S, out: *mut f32, x: &[E], stride: usize, cols: Range<usize>, ks: Range<usize>) {
    let steps = ks.len();
    let mut done = 0;
    while done < cols.len() {
        let width = panel_b_cols::<S>(cols.len(), done);
        // SAFETY: inside the panel; sources inside the operand.
        unsafe {
            let dst = out.add(done * steps);
            let mut j = 0;
            while j < width {
                let real = (cols.len() - done).saturating_sub(j).min(8);
                let src = x.as_ptr().wrapping_add((cols.start + done + j) * stride + ks.start);
                let mut k = 0;
                while real == 8 && k + 8 <= steps {
                    for c in 0..8 {
                        prefetch(src.wrapping_add(c * stride + k + COLS_AHEAD));
                    }
                    s.transpose8(src.add(k), stride, dst.add(k * width + j), width);
                    k += 8;
                }
                while k < steps {
                    for c in 0..8 {
                        *dst.add(k * width + j + c) = if c < real { (*src.add(c * stride + k)).to_f32() } else { 0.0 };
                    }
                    k += 1;
                }
                j += 8;
            }
        }
        done += width;
    }
}

#[inline(always)]
unsafe fn transposed_pairs<S: Simd>(s: S, out: *mut f32, x: &[bf16], stride: usize, cols: Range<usize>, ks: Range<usize>) {
    let steps = ks.len().div_ceil(2);
    let mut done = 0;
    while done < cols.len() {
        let width = panel_b_cols::<S>(cols.len(), done);
        // SAFETY: inside the panel; sources inside the operand.
        unsafe {
            let dst = out.add(done * steps);
            let mut j = 0;
            while j < width {
                let real = (cols.len() - done).saturating_sub(j).min(8);
                let src = x.as_ptr().wrapping_add((cols.start + done + j) * stride + ks.start);
                let mut step = 0;
                // Pairs move as 32 bits; rows of odd length are not whole pairs apart and go one by one.
                while real == 8 && stride.is_multiple_of(2) && 2 * step + 16 <= ks.len() {
                    s.transpose8(src.add(2 * step).cast::<f32>(), stride / 2, dst.add(step * width + j), width);
                    step += 8;
                }
                while step < steps {
                    for c in 0..8 {
                        let bits = if c < real { pair(src, c * stride, 1, 2 * step, ks.len()) } else { 0 };
                        *dst.add(step * width + j + c).cast::<u32>() = bits;
                    }
                    step += 1;
                }
                j += 8;
            }
        }
        done += width;
    }
}
