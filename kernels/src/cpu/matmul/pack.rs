//! Packing: operands of any layout and type become panels that the tile reads front to back.
//!
//! A panel of B holds, for each step along `k`, the columns of a tile side by side. A panel of A keeps rows whole where `k` is
//! contiguous in memory (a plain copy) and keeps steps whole where rows are; the tile takes strides, so A is never transposed.
//! What lies beyond the matrix is packed as zero.

use super::Operand;
use super::tile::PanelA;
use crate::cpu::float::{Elem, Float};
use crate::cpu::simd::{Simd, prefetch};
use std::ops::Range;

/// Rows ahead of which a matrix is fetched that is read row by row: each is in another page, where no hardware prefetcher follows.
const ROWS_AHEAD: usize = 8;
/// Elements ahead of which eight rows are fetched that are read side by side.
const COLS_AHEAD: usize = 64;

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
pub fn readable(a: &Operand<'_>) -> Option<*const f32> {
    match a.data {
        Float::F32(x) if a.k_contiguous && !a.stride.is_multiple_of(1024) => Some(x.as_ptr()),
        _ => None,
    }
}

/// Packs rows `rows` and `k` values `ks` of A.
///
/// # Safety
/// The ranges lie inside the operand; `out` has room for the panels.
#[inline(always)]
pub unsafe fn pack_a<S: Simd>(s: S, out: *mut f32, a: &Operand<'_>, rows: Range<usize>, ks: Range<usize>) {
    // SAFETY: passed on.
    unsafe {
        match (a.data, a.k_contiguous) {
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
pub unsafe fn pack_b<S: Simd>(s: S, out: *mut f32, b: &Operand<'_>, cols: Range<usize>, ks: Range<usize>) {
    // SAFETY: passed on.
    unsafe {
        match (b.data, b.k_contiguous) {
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
