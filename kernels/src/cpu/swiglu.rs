//! SwiGLU (Shazeer 2020): `h = silu(gate) * up` with `silu(g) = g * sigmoid(g)`, and its backward, which recomputes the
//! sigmoid instead of storing it. Outputs may be inputs, so each block is read whole before it is written.
#![allow(unsafe_code)]

use super::elementwise::{blocks, for_each_item};
use super::operand::{BLOCK, Operand};
use super::pool::Pool;
use super::simd::{Simd, simd_fn};

/// `1 / (1 + e^-x)`.
#[inline(always)]
fn sigmoid<S: Simd>(s: S, x: S::V) -> S::V {
    let one = s.splat(1.0);
    s.div(one, s.add(one, s.exp(s.sub(s.splat(0.0), x))))
}

/// [`crate::Ops::swiglu`]: all `[elems]`; `h` may be `gate`.
pub fn forward(pool: &Pool, h: Operand, gate: Operand, up: Operand) {
    simd_fn! { fn item[S](s: S, start: usize, end: usize, h: Operand, gate: Operand, up: Operand) {
        let (mut g, mut u) = ([0f32; BLOCK], [0f32; BLOCK]);
        for (at, n) in blocks(start, end) {
            // SAFETY: in range by `for_each_item`; items are disjoint, and aliases are read before they are written.
            unsafe {
                gate.load(s, at, &mut g[..n]);
                up.load(s, at, &mut u[..n]);
                // Whole vectors: what lies behind n is computed and not stored.
                for i in (0..BLOCK).step_by(S::LANES) {
                    let (a, b) = (s.load_slice(&g[i..]), s.load_slice(&u[i..]));
                    s.store_slice(&mut g[i..], s.mul(s.mul(a, sigmoid(s, a)), b));
                }
                h.store(s, at, &g[..n]);
            }
        }
    } }
    for_each_item(pool, h.elems(), |start, end| item(pool.isa(), start, end, h, gate, up));
}

/// [`crate::Ops::swiglu_backward`]: with `s = sigmoid(gate)`: `dgate = dh up s (1 + gate (1 - s))`, `dup = dh gate s`.
pub fn backward(pool: &Pool, dgate: Operand, dup: Operand, dh: Operand, gate: Operand, up: Operand) {
    simd_fn! { fn item[S](s: S, start: usize, end: usize, dgate: Operand, dup: Operand, dh: Operand, gate: Operand, up: Operand) {
        let (mut d, mut g, mut u) = ([0f32; BLOCK], [0f32; BLOCK], [0f32; BLOCK]);
        for (at, n) in blocks(start, end) {
            // SAFETY: as in `forward`.
            unsafe {
                dh.load(s, at, &mut d[..n]);
                gate.load(s, at, &mut g[..n]);
                up.load(s, at, &mut u[..n]);
                let one = s.splat(1.0);
                for i in (0..BLOCK).step_by(S::LANES) {
                    let (dh, a, b) = (s.load_slice(&d[i..]), s.load_slice(&g[i..]), s.load_slice(&u[i..]));
                    let sig = sigmoid(s, a);
                    let slope = s.mul(sig, s.fma(a, s.sub(one, sig), one));
                    s.store_slice(&mut g[i..], s.mul(s.mul(dh, b), slope));
                    s.store_slice(&mut u[i..], s.mul(dh, s.mul(a, sig)));
                }
                dgate.store(s, at, &g[..n]);
                dup.store(s, at, &u[..n]);
            }
        }
    } }
    for_each_item(pool, dh.elems(), |start, end| item(pool.isa(), start, end, dgate, dup, dh, gate, up));
}

#[cfg(test)]
mod tests {
    use super::super::reference::{Values, assert_close, assert_gradient, on_every_pool, rounding};
    use super::*;

    fn naive(g: &[f64], u: &[f64]) -> Vec<f64> {
        g.iter().zip(u).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect()
    }

    #[test]
    fn matches_the_naive_function_and_its_differences() {
        for (elems, bf16) in [(1, false), (64 * BLOCK + 301, false), (5000, true)] {
            let make = |seed| Values::random(elems, bf16, seed);
            let (mut gate, mut up, mut dh) = (make(1), make(2), make(3));
            let (g, u, d) = (gate.f64s(), up.f64s(), dh.f64s());
            for got in on_every_pool(|pool| {
                let (mut h, mut dg, mut du) = (gate.like(), gate.like(), gate.like());
                forward(pool, h.operand(), gate.operand(), up.operand());
                backward(pool, dg.operand(), du.operand(), dh.operand(), gate.operand(), up.operand());
                // In place, all of it.
                let (mut a, mut b, mut c) = (gate.clone(), up.clone(), gate.clone());
                let (pa, pb, pc) = (a.operand(), b.operand(), c.operand());
                forward(pool, pc, pc, up.operand());
                backward(pool, pa, pb, dh.operand(), pa, pb);
                let mut e = dh.clone();
                let pe = e.operand();
                backward(pool, pe, pb, pe, gate.operand(), up.operand());
                assert_eq!((h.f32s(), dg.f32s(), du.f32s()), (c.f32s(), a.f32s(), b.f32s()));
                assert_eq!(dg.f32s(), e.f32s());
                vec![h.f32s(), dg.f32s(), du.f32s()]
            }) {
                assert_close("h", &got[0], &naive(&g, &u), rounding(bf16));
                let loss = |g: &[f64], u: &[f64]| naive(g, u).iter().zip(&d).map(|(h, d)| h * d).sum::<f64>();
                // One rounding of each element, and some of f32.
                let tolerance = if bf16 { 5e-3 } else { 1e-6 };
                assert_gradient("dgate", &got[1], &g, tolerance, |g| loss(g, &u));
                assert_gradient("dup", &got[2], &u, tolerance, |u| loss(&g, u));
            }
        }
    }

    #[test]
    fn large_values_saturate() {
        let pool = Pool::new(1).unwrap();
        let mut gate = Values::new(vec![-1e4, -200.0, 200.0, 1e4], false);
        let mut ones = Values::new(vec![1.0; 4], false);
        let (mut h, mut dg, mut du) = (gate.like(), gate.like(), gate.like());
        forward(&pool, h.operand(), gate.operand(), ones.operand());
        backward(&pool, dg.operand(), du.operand(), ones.operand(), gate.operand(), ones.operand());
        assert_eq!(h.f32s(), [0.0, 0.0, 200.0, 1e4]);
        assert_eq!((dg.f32s(), du.f32s()), (vec![0.0, 0.0, 1.0, 1.0], vec![0.0, 0.0, 200.0, 1e4]));
    }
}
