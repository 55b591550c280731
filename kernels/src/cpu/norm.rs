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
    simd_fn! { fn group[S](s: S, range: Range<usize>, y: Operand, rstd: Raw<f32>, x: Operand, weight: Operand, eps: f32, cols: usize) {
        let (mut a, mut w) = ([0f32; BLOCK], [0f32; BLOCK]);
        for row in range {
            let mut lanes = [0f32; LANES];
            for c in (0..cols).step_by(BLOCK) {
                let n = BLOCK.min(cols - c);
                // SAFETY: a row belongs to one item.
                unsafe { x.load(s, row * cols + c, &mut a[..n]) };
                dot(&mut lanes, &a[..n], &a[..n]);
            }
            let r = 1.0 / (total(&lanes) / cols as f32 + eps).sqrt();
            // SAFETY: as above.
            unsafe { rstd.slice(row, 1)[0] = r };
            for c in (0..cols).step_by(BLOCK) {
                let n = BLOCK.min(cols - c);
                // SAFETY: as above; x is read before y, which may be x, is written.
                unsafe {
                    x.load(s, row * cols + c, &mut a[..n]);
                    weight.load(s, c, &mut w[..n]);
                    for (a, w) in a[..n].iter_mut().zip(&w) {
                        *a = *a * r * w;
                    }
                    y.store(s, row * cols + c, &a[..n]);
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
    simd_fn! { fn group[S](s: S, i: usize, range: Range<usize>, t: Backward, cols: usize) {
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
                    t.x.load(s, at, a);
                    t.dy.load(s, at, d);
                    t.weight.load(s, c, w);
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
                    t.x.load(s, at, a);
                    t.dy.load(s, at, d);
                    t.weight.load(s, c, w);
                    for ((d, a), w) in d.iter_mut().zip(&*a).zip(&*w) {
                        *d = r * (*d * w - a * mean);
                    }
                    if write == Write::Add {
                        dx.load(s, at, a);
                        for (d, a) in d.iter_mut().zip(&*a) {
                            *d += *a;
                        }
                    }
                    dx.store(s, at, d);
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

#[cfg(test)]
mod tests {
    use super::super::reference::{Values, assert_close, assert_gradient, on_every_pool, rounding};
    use super::*;

    const EPS: f32 = 1e-5;

    fn naive(x: &[f64], w: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let rows = x.chunks(w.len());
        let rstd: Vec<f64> =
            rows.clone().map(|r| 1.0 / (r.iter().map(|x| x * x).sum::<f64>() / w.len() as f64 + f64::from(EPS)).sqrt()).collect();
        let y = rows.zip(&rstd).flat_map(|(r, s)| r.iter().zip(w).map(move |(x, w)| x * s * w)).collect();
        (y, rstd)
    }

    fn check(rows: usize, cols: usize, bf16: bool) {
        let make = |n, seed| Values::random(n, bf16, seed);
        let (mut x, mut w, mut dy) = (make(rows * cols, 1), make(cols, 2), make(rows * cols, 3));
        let (before, wbefore) = (make(rows * cols, 4), Values::random(cols, false, 5));
        let (xs, ws, dys) = (x.f64s(), w.f64s(), dy.f64s());
        let (y, rstd) = naive(&xs, &ws);
        let loss = |x: &[f64], w: &[f64]| naive(x, w).0.iter().zip(&dys).map(|(y, d)| y * d).sum::<f64>();
        for got in on_every_pool(|pool| {
            let (mut y, mut rstd) = (x.like(), vec![f32::NAN; rows]);
            forward(pool, y.operand(), Raw::new(&mut rstd), x.operand(), w.operand(), EPS, rows, cols);
            let mut in_place = x.clone();
            let handle = in_place.operand();
            forward(pool, handle, Raw::new(&mut rstd), handle, w.operand(), EPS, rows, cols);
            assert_eq!(y.f32s(), in_place.f32s());

            let (mut dx, mut dw) = (x.like(), vec![f32::NAN; cols]);
            let mut partial = vec![f32::NAN; workspace_elems(rows, cols)];
            let t = Backward {
                dx: Some((dx.operand(), Write::Set)),
                dweight: Some((Raw::new(&mut dw), Write::Set)),
                dy: dy.operand(),
                x: x.operand(),
                rstd: Raw::new(&mut rstd),
                weight: w.operand(),
                partial: Raw::new(&mut partial),
            };
            backward(pool, t, rows, cols);
            let (mut dx_added, Values::F32(mut dw_added)) = (before.clone(), wbefore.clone()) else { unreachable!() };
            let dweight = Some((Raw::new(&mut dw_added), Write::Add));
            backward(pool, Backward { dx: Some((dx_added.operand(), Write::Add)), dweight, ..t }, rows, cols);
            // Without the weight's gradient, in place.
            let mut in_place = dy.clone();
            let handle = in_place.operand();
            backward(pool, Backward { dx: Some((handle, Write::Set)), dweight: None, dy: handle, ..t }, rows, cols);
            assert_eq!(dx.f32s(), in_place.f32s());
            vec![y.f32s(), rstd, dx.f32s(), dw, dx_added.f32s(), dw_added]
        }) {
            assert_close("y", &got[0], &y, rounding(bf16));
            assert_close("rstd", &got[1], &rstd, 1e-6);
            // bf16: errors of one rounding each, 2^-9 relative to the element; f32: of sums over a row.
            let tolerance = if bf16 { 5e-3 } else { 3e-6 };
            assert_gradient("dx", &got[2], &xs, tolerance, |x| loss(x, &ws));
            // Sums over all rows in f32, whatever the storage.
            assert_gradient("dweight", &got[3], &ws, 3e-6, |w| loss(&xs, w));
            let sum = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) + f64::from(*b)).collect::<Vec<_>>();
            // The sum is rounded once; in bf16 the set gradient was rounded before, too.
            assert_close("dx added", &got[4], &sum(&got[2], &before.f32s()), if bf16 { 8e-3 } else { 1e-6 });
            assert_close("dweight added", &got[5], &sum(&got[3], &wbefore.f32s()), 1e-6);
        }
    }

    #[test]
    fn matches_the_naive_function_and_its_differences() {
        for bf16 in [false, true] {
            for (rows, cols) in [(1, 1), (7, 576), (9, 301), (700, 16), (130, 64), (33, 130)] {
                check(rows, cols, bf16);
            }
        }
    }
}
