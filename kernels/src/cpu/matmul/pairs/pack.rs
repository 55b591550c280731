//! Packing for products of pairs: `bf16`, neighbours along `k`, in panels of 32 columns of B or 32 rows of A.
//!
//! A step is 32 values of `k`: a panel of B holds 16 rows of 32 pairs for each (what the manual calls VNNI order), a panel of A 32
//! rows of 16 pairs. What lies beyond the matrix is packed as zero, so edges cost no code in the product.

use super::{PAIRS, SIDE, STEP, STEP_ELEMS};
use crate::cpu::matmul::Operand;
use crate::cpu::simd::Simd;
use half::bf16;
use std::ops::Range;

/// The pair of `k` and `k + 1` at `at` of each row; zero beyond `end`.
#[inline(always)]
unsafe fn pair(x: *const bf16, at: usize, stride: usize, k: usize, end: usize) -> u32 {
    // SAFETY: the caller's elements are inside the operand.
    unsafe {
        let low = u32::from((*x.add(k * stride + at)).to_bits());
        let high = if k + 1 < end { u32::from((*x.add((k + 1) * stride + at)).to_bits()) } else { 0 };
        low | high << 16
    }
}

/// Packs columns `cols` and `k` values `ks` of B: panels `distance` elements apart.
///
/// # Safety
/// The ranges lie inside `x`, which is the data of `b`; `out` has room for whole panels and steps.
#[inline(always)]
pub unsafe fn pack_b<S: Simd>(s: S, out: *mut f32, distance: usize, x: &[bf16], b: &Operand<'_>, cols: Range<usize>, ks: Range<usize>) {
    if !b.k_contiguous {
        // SAFETY: passed on.
        return unsafe { rows_in_pairs(s, out, distance, x, b.stride, cols, ks) };
    }
    for (panel, first) in cols.clone().step_by(SIDE).enumerate() {
        let width = SIDE.min(cols.end - first);
        // SAFETY: a panel has room for all steps; sources are inside the operand.
        unsafe { columns_of_rows(s, out.add(panel * distance), x, b.stride, first, width, ks.clone()) };
    }
}

/// Packs rows `rows` (at most 32) and `k` values `ks` of A.
///
/// # Safety
/// As [`pack_b`].
#[inline(always)]
pub unsafe fn pack_a<S: Simd>(s: S, out: *mut f32, x: &[bf16], a: &Operand<'_>, rows: Range<usize>, ks: Range<usize>) {
    // SAFETY: passed on.
    unsafe {
        if a.k_contiguous {
            whole_rows(out.cast(), x, a.stride, rows, ks);
        } else {
            rows_of_columns(s, out, x, a.stride, rows, ks);
        }
    }
}

/// A, `k` contiguous: 64 bytes of each row and step. Rows are read from end to end: they come from memory, the panel is in a cache.
#[inline(always)]
unsafe fn whole_rows(out: *mut bf16, x: &[bf16], stride: usize, rows: Range<usize>, ks: Range<usize>) {
    let (whole, rest) = (ks.len() / STEP, ks.len() % STEP);
    for r in 0..SIDE {
        // SAFETY: inside the steps; sources inside the operand.
        unsafe {
            let dst = out.add(r * STEP);
            if r >= rows.len() {
                (0..ks.len().div_ceil(STEP)).for_each(|step| dst.add(step * SIDE * STEP).write_bytes(0, STEP));
                continue;
            }
            let src = x.as_ptr().add((rows.start + r) * stride + ks.start);
            for step in 0..whole {
                std::ptr::copy_nonoverlapping(src.add(step * STEP), dst.add(step * SIDE * STEP), STEP);
            }
            if rest > 0 {
                let last = dst.add(whole * SIDE * STEP);
                last.write_bytes(0, STEP);
                std::ptr::copy_nonoverlapping(src.add(whole * STEP), last, rest);
            }
        }
    }
}

/// Pairs of rows `k`, `k + 1` of columns `first .. first + width`, side by side; zero beyond `width` up to 32.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn pairs_of_row<S: Simd>(s: S, dst: *mut f32, x: &[bf16], stride: usize, first: usize, width: usize, k: usize, end: usize) {
    let mut j = 0;
    // SAFETY: 32 elements of room; sources inside the operand.
    unsafe {
        if k + 1 < end {
            while j + 2 * S::LANES <= width {
                let low = x.as_ptr().add(k * stride + first + j).cast::<u16>();
                let pairs = s.load_two_of_pairs(low, low.add(stride));
                s.store(dst.add(j), pairs[0]);
                s.store(dst.add(j + S::LANES), pairs[1]);
                j += 2 * S::LANES;
            }
            while j + S::LANES <= width {
                let low = x.as_ptr().add(k * stride + first + j).cast::<u16>();
                s.store(dst.add(j), s.load_pairs(low, low.add(stride)));
                j += S::LANES;
            }
        }
        while j < SIDE {
            let bits = if j < width && k < end { pair(x.as_ptr(), first + j, stride, k, end) } else { 0 };
            *dst.add(j).cast::<u32>() = bits;
            j += 1;
        }
    }
}

/// B, columns contiguous: two rows become a row of pairs. Rows are read from end to end, as memory likes it.
#[inline(always)]
unsafe fn rows_in_pairs<S: Simd>(s: S, out: *mut f32, distance: usize, x: &[bf16], stride: usize, cols: Range<usize>, ks: Range<usize>) {
    for row in 0..ks.len().div_ceil(STEP) * PAIRS {
        for (panel, first) in cols.clone().step_by(SIDE).enumerate() {
            let width = SIDE.min(cols.end - first);
            // SAFETY: a row of 32 pairs of the panel.
            unsafe { pairs_of_row(s, out.add(panel * distance + row * SIDE), x, stride, first, width, ks.start + 2 * row, ks.end) };
        }
    }
}

/// B, `k` contiguous: pairs move as 32 bits, transposed in blocks of 8 x 8.
#[inline(always)]
unsafe fn columns_of_rows<S: Simd>(s: S, out: *mut f32, x: &[bf16], stride: usize, first: usize, width: usize, ks: Range<usize>) {
    let pairs = ks.len().div_ceil(STEP) * PAIRS;
    for j in (0..SIDE).step_by(8) {
        let real = width.saturating_sub(j).min(8);
        let src = x.as_ptr().wrapping_add((first + j) * stride + ks.start);
        let mut p = 0;
        // SAFETY: inside the panel; sources inside the operand.
        unsafe {
            // Rows of odd length are not whole pairs apart and go one by one.
            while real == 8 && stride.is_multiple_of(2) && 2 * p + 16 <= ks.len() {
                s.transpose8(src.add(2 * p).cast::<f32>(), stride / 2, out.add(p * SIDE + j), SIDE);
                p += 8;
            }
            while p < pairs {
                for c in 0..8 {
                    let bits = if c < real && 2 * p < ks.len() { pair(src, c * stride, 1, 2 * p, ks.len()) } else { 0 };
                    *out.add(p * SIDE + j + c).cast::<u32>() = bits;
                }
                p += 1;
            }
        }
    }
}

/// A, rows contiguous: a step as rows of pairs, then transposed in blocks of 8 x 8.
#[inline(always)]
unsafe fn rows_of_columns<S: Simd>(s: S, out: *mut f32, x: &[bf16], stride: usize, rows: Range<usize>, ks: Range<usize>) {
    let mut pairs = [0.0f32; STEP_ELEMS];
    for step in 0..ks.len().div_ceil(STEP) {
        // SAFETY: `pairs` and the step of the panel have 16 x 32 elements.
        unsafe {
            for p in 0..PAIRS {
                let k = ks.start + step * STEP + 2 * p;
                pairs_of_row(s, pairs.as_mut_ptr().add(p * SIDE), x, stride, rows.start, rows.len(), k, ks.end);
            }
            for p in (0..PAIRS).step_by(8) {
                for r in (0..SIDE).step_by(8) {
                    s.transpose8(pairs.as_ptr().add(p * SIDE + r), SIDE, out.add(step * STEP_ELEMS + r * PAIRS + p), PAIRS);
                }
            }
        }
    }
}
