//! The innermost loops of a product: one tile of the result in registers, and what happens to it when its sum is complete.

use crate::cpu::float::Elem;
use crate::cpu::simd::{Simd, prefetch};

/// A packed panel of A: element (row, step) is at `base + row * row_stride + step * step_stride`.
#[derive(Clone, Copy)]
pub struct PanelA {
    /// First element.
    pub base: *const f32,
    /// Distance of rows.
    pub row_stride: usize,
    /// Distance of steps along `k`.
    pub step_stride: usize,
}

/// `out[row, 0..NV vectors] = a b (+ out, when not the first part of the sum)`, `steps` long.
///
/// Every element is one chain of multiply-adds in the order of `k`, whatever its place in the tile: results do not depend on how
/// the matrix is cut.
///
/// # Safety
/// `a` holds `S::TILE_ROWS` rows (at least `MR`) and `b` `NV` vectors of `steps` steps; `out` is valid for `MR` rows of `NV` vectors.
#[inline(always)]
pub unsafe fn tile<S: Simd, const MR: usize, const NV: usize>(
    s: S,
    steps: usize,
    a: PanelA,
    b: *const f32,
    out: *mut f32,
    out_stride: usize,
    before: Option<(*const f32, usize)>,
) {
    let mut acc = [[s.splat(0.0); NV]; MR];
    let mut rows = [a.base; MR];
    let mut r = 0;
    while r < MR {
        // SAFETY: the panel has MR rows.
        rows[r] = unsafe { a.base.add(r * a.row_stride) };
        // Where the tile goes, what it is added to, and where the rows of the next tile begin.
        prefetch(out.wrapping_add(r * out_stride));
        prefetch(out.wrapping_add(r * out_stride + NV * S::LANES - 1));
        if let Some((before, stride)) = before {
            prefetch(before.wrapping_add(r * stride));
            prefetch(before.wrapping_add(r * stride + NV * S::LANES - 1));
        }
        prefetch(a.base.wrapping_add((MR + r) * a.row_stride));
        r += 1;
    }
    let mut b = b;
    let mut at = 0;
    let mut left = steps;
    while left > 0 {
        let mut bv = [s.splat(0.0); NV];
        let mut j = 0;
        while j < NV {
            // SAFETY: NV vectors per step.
            bv[j] = unsafe { s.load(b.add(j * S::LANES)) };
            j += 1;
        }
        let mut r = 0;
        while r < MR {
            // SAFETY: `steps` steps per row.
            let av = s.splat(unsafe { *rows[r].add(at) });
            let mut j = 0;
            while j < NV {
                acc[r][j] = s.fma(av, bv[j], acc[r][j]);
                j += 1;
            }
            r += 1;
        }
        // SAFETY: stays within, or one past, the panel.
        b = unsafe { b.add(NV * S::LANES) };
        at += a.step_stride;
        left -= 1;
    }
    if let Some((before, stride)) = before {
        let mut r = 0;
        while r < MR {
            let mut j = 0;
            while j < NV {
                // SAFETY: laid out as `out`.
                acc[r][j] = s.add(unsafe { s.load(before.add(r * stride + j * S::LANES)) }, acc[r][j]);
                j += 1;
            }
            r += 1;
        }
    }
    let mut r = 0;
    while r < MR {
        let mut j = 0;
        while j < NV {
            // SAFETY: valid by contract.
            unsafe { s.store(out.add(r * out_stride + j * S::LANES), acc[r][j]) };
            j += 1;
        }
        r += 1;
    }
}

/// [`tile`] of full height for a panel of `vectors` vectors.
///
/// # Safety
/// As [`tile`], with `1 <= vectors <= S::TILE_VECTORS`.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
pub unsafe fn full_tile<S: Simd>(
    s: S,
    vectors: usize,
    steps: usize,
    a: PanelA,
    b: *const f32,
    out: *mut f32,
    out_stride: usize,
    before: Option<(*const f32, usize)>,
) {
    // SAFETY: passed on; conditions on constants leave the tiles of other instruction sets out.
    unsafe {
        match (S::TILE_ROWS, S::TILE_VECTORS, vectors) {
            (4, 1, _) => tile::<S, 4, 1>(s, steps, a, b, out, out_stride, before),
            (6, 2, 2) => tile::<S, 6, 2>(s, steps, a, b, out, out_stride, before),
            (6, 2, _) => tile::<S, 6, 1>(s, steps, a, b, out, out_stride, before),
            (8, 3, 3) => tile::<S, 8, 3>(s, steps, a, b, out, out_stride, before),
            (8, 3, 2) => tile::<S, 8, 2>(s, steps, a, b, out, out_stride, before),
            (8, 3, _) => tile::<S, 8, 1>(s, steps, a, b, out, out_stride, before),
            _ => {}
        }
    }
}

/// What is done with complete sums: `c = alpha * sum + bias + c`, rounded once to the storage type.
#[derive(Clone, Copy)]
pub struct Finish {
    /// Multiplies the sum.
    pub alpha: f32,
    /// One value a column, or null.
    pub bias: *const f32,
    /// Whether the old value is added.
    pub add: bool,
}

/// Writes `rows` x `cols` complete sums.
///
/// # Safety
/// `sums` holds whole vectors up to `cols` in each row; `c` is valid for `rows` x `cols`; a bias has whole vectors up to `cols`.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
pub unsafe fn finish<S: Simd, C: Elem>(
    s: S,
    sums: *const f32,
    sums_stride: usize,
    c: *mut C,
    c_stride: usize,
    rows: usize,
    cols: usize,
    how: Finish,
) {
    let alpha = s.splat(how.alpha);
    for r in 0..rows {
        let mut j = 0;
        while j < cols {
            // SAFETY: valid by contract; partial vectors touch `cols - j` elements of c.
            unsafe {
                let whole = cols - j >= S::LANES;
                let at = c.add(r * c_stride + j);
                let mut base = s.splat(0.0);
                if !how.bias.is_null() {
                    base = s.load(how.bias.add(j));
                }
                if how.add {
                    let old = if whole { C::load(s, at) } else { C::load_part(s, at, cols - j) };
                    base = s.add(base, old);
                }
                let v = s.fma(s.load(sums.add(r * sums_stride + j)), alpha, base);
                if whole {
                    C::store(s, at, v);
                } else {
                    C::store_part(s, at, v, cols - j);
                }
            }
            j += S::LANES;
        }
    }
}
