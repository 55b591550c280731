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
                gate.load(at, &mut g[..n]);
                up.load(at, &mut u[..n]);
                // Whole vectors: what lies behind n is computed and not stored.
                for i in (0..BLOCK).step_by(S::LANES) {
                    let (a, b) = (s.load_slice(&g[i..]), s.load_slice(&u[i..]));
                    s.store_slice(&mut g[i..], s.mul(s.mul(a, sigmoid(s, a)), b));
                }
                h.store(at, &g[..n]);
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
                dh.load(at, &mut d[..n]);
                gate.load(at, &mut g[..n]);
                up.load(at, &mut u[..n]);
                let one = s.splat(1.0);
                for i in (0..BLOCK).step_by(S::LANES) {
                    let (dh, a, b) = (s.load_slice(&d[i..]), s.load_slice(&g[i..]), s.load_slice(&u[i..]));
                    let sig = sigmoid(s, a);
                    let slope = s.mul(sig, s.fma(a, s.sub(one, sig), one));
                    s.store_slice(&mut g[i..], s.mul(s.mul(dh, b), slope));
                    s.store_slice(&mut u[i..], s.mul(dh, s.mul(a, sig)));
                }
                dgate.store(at, &g[..n]);
                dup.store(at, &u[..n]);
            }
        }
    } }
    for_each_item(pool, dh.elems(), |start, end| item(pool.isa(), start, end, dgate, dup, dh, gate, up));
}
