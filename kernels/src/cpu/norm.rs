//! RMSNorm (Zhang & Sennrich 2019), forward and backward, over rows of any width: a hidden vector or a head (q/k norm).
//! The weight's gradient is a sum over all rows: fixed groups of rows, as many as depends on the shape alone, each sum into
//! their own row of the workspace, and those are added in order, so threads change nothing.
#![allow(unsafe_code)]

use super::operand::{BLOCK, Operand, Raw};
use super::pool::Pool;
use super::simd::simd_fn;
use crate::Write;
use std::ops::Range;

/// Most groups of rows that sum the weight's gradient: bounds the workspace, and is far above the threads of a host.
const GROUPS: usize = 64;

/// Lanes of a row's sums: a fixed interleaving that fills the widest registers.
const LANES: usize = 16;

/// Rows of one group.
fn group_rows(rows: usize, cols: usize) -> usize {
    // At least some thousand elements, so that a group pays for being handed out.
    rows.div_ceil(GROUPS).max(4096usize.div_ceil(cols.max(1)))
}

/// f32 elements of workspace for [`backward`].
pub fn workspace_elems(rows: usize, cols: usize) -> usize {
    rows.div_ceil(group_rows(rows, cols)) * cols
}

#[inline(always)]
fn total(lanes: &[f32; LANES]) -> f32 {
    let mut s = *lanes;
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            s[i] += s[i + half];
        }
        half /= 2;
    }
    s[0]
}

/// Adds `x[i] * y[i]` to lane `i % LANES`.
#[inline(always)]
fn dot(lanes: &mut [f32; LANES], x: &[f32], y: &[f32]) {
    let ((xs, x_tail), (ys, y_tail)) = (x.as_chunks::<LANES>(), y.as_chunks::<LANES>());
    for (x, y) in xs.iter().zip(ys) {
        for i in 0..LANES {
            lanes[i] += x[i] * y[i];
        }
    }
    for (lane, (x, y)) in lanes.iter_mut().zip(x_tail.iter().zip(y_tail)) {
        *lane += x * y;
    }
}

/// [`crate::Ops::rmsnorm`]: `y, x [rows, cols]`, `rstd [rows]`, `weight [cols]`; `y` may be `x`.
#[allow(clippy::too_many_arguments)]
pub fn forward(pool: &Pool, y: Operand, rstd: Raw<f32>, x: Operand, weight: Operand, eps: f32, rows: usize, cols: usize) {
    simd_fn! { fn group[S](_s: S, range: Range<usize>, y: Operand, rstd: Raw<f32>, x: Operand, weight: Operand, eps: f32, cols: usize) {
        let (mut a, mut w) = ([0f32; BLOCK], [0f32; BLOCK]);
        for row in range {
            let mut lanes = [0f32; LANES];
            for c in (0..cols).step_by(BLOCK) {
                let n = BLOCK.min(cols - c);
                // SAFETY: a row belongs to one item.
                unsafe { x.load(row * cols + c, &mut a[..n]) };
                dot(&mut lanes, &a[..n], &a[..n]);
            }
            let r = 1.0 / (total(&lanes) / cols as f32 + eps).sqrt();
            // SAFETY: as above.
            unsafe { rstd.slice(row, 1)[0] = r };
            for c in (0..cols).step_by(BLOCK) {
                let n = BLOCK.min(cols - c);
                // SAFETY: as above; x is read before y, which may be x, is written.
                unsafe {
                    x.load(row * cols + c, &mut a[..n]);
                    weight.load(c, &mut w[..n]);
                    for (a, w) in a[..n].iter_mut().zip(&w) {
                        *a = *a * r * w;
                    }
                    y.store(row * cols + c, &a[..n]);
                }
            }
        }
    } }
    let step = group_rows(rows, cols);
    pool.for_each(rows.div_ceil(step), |i| group(pool.isa(), i * step..((i + 1) * step).min(rows), y, rstd, x, weight, eps, cols));
}

/// What [`backward`] reads and writes.
#[derive(Clone, Copy)]
pub struct Backward {
    /// `[rows, cols]`; may be `dy` with `Set`.
    pub dx: Option<(Operand, Write)>,
    /// `[cols]`.
    pub dweight: Option<(Raw<f32>, Write)>,
    /// `[rows, cols]`.
    pub dy: Operand,
    /// `[rows, cols]`.
    pub x: Operand,
    /// `[rows]`.
    pub rstd: Raw<f32>,
    /// `[cols]`.
    pub weight: Operand,
    /// `[groups, cols]`, see [`workspace_elems`].
    pub partial: Raw<f32>,
}

/// [`crate::Ops::rmsnorm_backward`]: with `n = x * rstd` and `g = dy * weight`,
/// `dx = rstd * (g - n * mean(g * n))`, `dweight = sum over rows of dy * n`.
pub fn backward(pool: &Pool, t: Backward, rows: usize, cols: usize) {
    simd_fn! { fn group[S](_s: S, i: usize, range: Range<usize>, t: Backward, cols: usize) {
        let (mut a, mut d, mut w) = ([0f32; BLOCK], [0f32; BLOCK], [0f32; BLOCK]);
        // SAFETY: each group has its own row.
        let mut partial = t.dweight.map(|_| unsafe { t.partial.slice(i * cols, cols) });
        if let Some(p) = &mut partial {
            p.fill(0.0);
        }
        for row in range {
            // SAFETY: written by forward.
            let r = unsafe { t.rstd.read(row, 1)[0] };
            let mut lanes = [0f32; LANES];
            for c in (0..cols).step_by(BLOCK) {
                let n = BLOCK.min(cols - c);
                let at = row * cols + c;
                let (a, d, w) = (&mut a[..n], &mut d[..n], &mut w[..n]);
                // SAFETY: a row belongs to one item.
                unsafe {
                    t.x.load(at, a);
                    t.dy.load(at, d);
                    t.weight.load(c, w);
                }
                if let Some(p) = &mut partial {
                    for ((p, d), a) in p[c..c + n].iter_mut().zip(&*d).zip(&*a) {
                        *p += d * (a * r);
                    }
                }
                for (d, w) in d.iter_mut().zip(&*w) {
                    *d *= *w;
                }
                dot(&mut lanes, d, a);
            }
            let Some((dx, write)) = t.dx else { continue };
            // mean(g * n) * rstd, the factor of x inside the bracket.
            let mean = total(&lanes) * r / cols as f32 * r;
            for c in (0..cols).step_by(BLOCK) {
                let n = BLOCK.min(cols - c);
                let at = row * cols + c;
                let (a, d, w) = (&mut a[..n], &mut d[..n], &mut w[..n]);
                // SAFETY: as above; dy is read before dx, which may be dy, is written.
                unsafe {
                    t.x.load(at, a);
                    t.dy.load(at, d);
                    t.weight.load(c, w);
                    for ((d, a), w) in d.iter_mut().zip(&*a).zip(&*w) {
                        *d = r * (*d * w - a * mean);
                    }
                    if write == Write::Add {
                        dx.load(at, a);
                        for (d, a) in d.iter_mut().zip(&*a) {
                            *d += *a;
                        }
                    }
                    dx.store(at, d);
                }
            }
        }
    } }
    let step = group_rows(rows, cols);
    let groups = rows.div_ceil(step);
    pool.for_each(groups, |i| group(pool.isa(), i, i * step..((i + 1) * step).min(rows), t, cols));

    let Some((dweight, write)) = t.dweight else { return };
    pool.for_each(cols.div_ceil(BLOCK), |item| {
        let c = item * BLOCK;
        let n = BLOCK.min(cols - c);
        let mut sum = [0f32; BLOCK];
        // SAFETY: columns belong to one item, and the groups have ended.
        unsafe {
            for i in 0..groups {
                for (s, p) in sum.iter_mut().zip(t.partial.read(i * cols + c, n)) {
                    *s += p;
                }
            }
            for (to, s) in dweight.slice(c, n).iter_mut().zip(&sum) {
                *to = if write == Write::Add { *to + s } else { *s };
            }
        }
    });
}
