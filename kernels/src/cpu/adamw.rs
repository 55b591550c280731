//! AdamW (Loshchilov & Hutter 2019): the sequence of rounded operations that [`crate::Ops::adamw`] documents, so that host and
//! device, portable and vector code give the same bits: no fused multiply-add, and vector square roots and divisions are correctly
//! rounded, so one body serves every instruction set.
//!
//! The update is bound by memory: 28 bytes a parameter and 2 for the copy. So it is one pass, the clipping factor is applied to the
//! gradient as it is read, and the copy is written around the caches: nobody reads it before the next step, and a line that is
//! overwritten whole need not be fetched first. `zlaunch bench adam` prints its speed beside a loop that only moves the same bytes.
#![allow(unsafe_code)]

use super::elementwise::{blocks, for_each_item};
use super::float::Elem;
use super::operand::{Operand, Raw};
use super::pool::Pool;
use super::simd::{Simd, simd_fn};
use crate::AdamW;

/// The numbers of one update, each rounded once to `f32` from `f64`; the GPU's kernel takes the same.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Factors {
    pub lr: f32,
    pub decay: f32,
    pub beta1: f32,
    pub rest1: f32,
    pub beta2: f32,
    pub rest2: f32,
    pub step: f32,
    pub root2: f32,
    pub eps: f32,
}

/// The decimal number that was written, such as 0.999, instead of its neighbour in `f32`: `1 - 0.999f32` is off by 1.3e-5,
/// and PyTorch computes with the `f64` of the written number.
fn written(x: f32) -> f64 {
    x.to_string().parse().unwrap_or(f64::from(x))
}

/// `base^exponent` by squaring: products alone, so that hosts with different mathematical libraries agree to the bit. The
/// error, `exponent * base^exponent` roundings, is far below what f32 can show.
fn power(mut base: f64, mut exponent: u64) -> f64 {
    let mut result = 1.0;
    while exponent > 0 {
        if exponent % 2 == 1 {
            result *= base;
        }
        base *= base;
        exponent /= 2;
    }
    result
}

impl Factors {
    pub fn new(hp: AdamW) -> Factors {
        let (beta1, beta2) = (written(hp.beta1), written(hp.beta2));
        let correction = |beta: f64| 1.0 - power(beta, hp.step);
        Factors {
            lr: hp.lr,
            decay: hp.weight_decay,
            beta1: hp.beta1,
            rest1: (1.0 - beta1) as f32,
            beta2: hp.beta2,
            rest2: (1.0 - beta2) as f32,
            step: (written(hp.lr) / correction(beta1)) as f32,
            root2: correction(beta2).sqrt() as f32,
            eps: hp.eps,
        }
    }

    /// New (parameter, m, v) of a vector of elements.
    #[inline(always)]
    fn update<S: Simd>(&self, s: S, p: S::V, m: S::V, v: S::V, g: S::V, scale: f32) -> (S::V, S::V, S::V) {
        // Adding 0 turns -0 into 0, so that the sign of an absent gradient shows nowhere.
        let g = s.add(s.mul(g, s.splat(scale)), s.splat(0.0));
        let p = s.sub(p, s.mul(s.mul(p, s.splat(self.lr)), s.splat(self.decay)));
        let m = s.add(s.mul(s.splat(self.beta1), m), s.mul(s.splat(self.rest1), g));
        let v = s.add(s.mul(s.splat(self.beta2), v), s.mul(s.splat(self.rest2), s.mul(g, g)));
        let denominator = s.add(s.div(s.sqrt(v), s.splat(self.root2)), s.splat(self.eps));
        (s.sub(p, s.div(s.mul(s.splat(self.step), m), denominator)), m, v)
    }
}

/// What [`update`] works on; all of the same length.
#[derive(Clone, Copy)]
pub struct State {
    /// Master weights.
    pub param: Raw<f32>,
    /// First moment.
    pub m: Raw<f32>,
    /// Second moment.
    pub v: Raw<f32>,
    /// Receives the weights in their storage type.
    pub copy_out: Option<Operand>,
    /// Gradient, before `scale`.
    pub g: Raw<f32>,
}

/// [`crate::Ops::adamw`]. With `scale` NaN only `copy_out` is written, with the weights as they are.
pub fn update(pool: &Pool, t: State, scale: f32, hp: AdamW) {
    simd_fn! { fn item[S](s: S, start: usize, end: usize, t: State, scale: f32, f: Factors) {
        for (at, n) in blocks(start, end) {
            // SAFETY: in range by `for_each_item`; items are disjoint.
            let (p, m, v, g) = unsafe { (t.param.slice(at, n), t.m.slice(at, n), t.v.slice(at, n), t.g.read(at, n)) };
            if !scale.is_nan() {
                let mut i = 0;
                while i + S::LANES <= n {
                    let (a, b, c) =
                        f.update(s, s.load_slice(&p[i..]), s.load_slice(&m[i..]), s.load_slice(&v[i..]), s.load_slice(&g[i..]), scale);
                    s.store_slice(&mut p[i..], a);
                    s.store_slice(&mut m[i..], b);
                    s.store_slice(&mut v[i..], c);
                    i += S::LANES;
                }
                if i < n {
                    // SAFETY: fewer than a vector are left, as many in each.
                    unsafe {
                        let (a, b) = (f32::load_part(s, p.as_ptr().add(i), n - i), f32::load_part(s, m.as_ptr().add(i), n - i));
                        let (c, d) = (f32::load_part(s, v.as_ptr().add(i), n - i), f32::load_part(s, g.as_ptr().add(i), n - i));
                        let (a, b, c) = f.update(s, a, b, c, d, scale);
                        f32::store_part(s, p.as_mut_ptr().add(i), a, n - i);
                        f32::store_part(s, m.as_mut_ptr().add(i), b, n - i);
                        f32::store_part(s, v.as_mut_ptr().add(i), c, n - i);
                    }
                }
            }
            if let Some(out) = t.copy_out {
                // The block's weights are in the first-level cache. SAFETY: as above.
                unsafe { out.stream(s, at, p) };
            }
        }
        s.stream_end();
    } }
    let f = Factors::new(hp);
    for_each_item(pool, t.param.elems(), |start, end| item(pool.isa(), start, end, t, scale, f));
}

#[cfg(test)]
mod tests {
    use super::super::operand::BLOCK;
    use super::super::reference::{Values, on_every_pool};
    use super::*;

    const HP: AdamW = AdamW { lr: 2e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.1, step: 1 };

    fn state(p: &mut [f32], m: &mut [f32], v: &mut [f32], copy: Option<&mut Values>, g: &mut [f32]) -> State {
        State { param: Raw::new(p), m: Raw::new(m), v: Raw::new(v), copy_out: copy.map(|c| c.operand()), g: Raw::new(g) }
    }

    /// Four steps of `torch.optim.AdamW(lr=2e-3 * (1 - 0.2 i), weight_decay=0.1, foreach=False)` of PyTorch 2.15 on f32.
    #[test]
    fn follows_torch() {
        let gradients =
            [[0.1, -2.0, 1e-4, 0.0, 3.0], [-0.05, 1.5, 2e-4, 0.0, -1e-3], [0.3, 0.25, -1e-4, 0.0, 40.0], [1e-6, -0.7, 5e-5, 0.0, 0.02]];
        let golden: [[f32; 5]; 4] = [
            [0.4979, -1.247_75, 0.000_999_6, 1.999_6, -0.751_85],
            [0.497_394_2, -1.247_407_6, -0.000_544_753_4, 1.999_280_2, -0.752_801_4],
            [0.496_529_9, -1.247_251_7, -0.001_048_759_6, 1.999_040_4, -0.753_522],
            [0.496_050_8, -1.247_023_8, -0.001_411_433, 1.998_880_5, -0.753_904_76],
        ];
        let (m_golden, v_golden) =
            ([0.030_240_102, -0.0718, 1.948_999_9e-5, 0.0, 3.820_619], [0.000_102_375_045, 0.006_785_952, 6.238_007e-11, 0.0, 1.607_373_5]);
        let pool = Pool::new(1).unwrap();
        let (mut p, mut m, mut v) = ([0.5f32, -1.25, 3e-3, 2.0, -0.75], [0f32; 5], [0f32; 5]);
        for (i, (g, want)) in gradients.iter().zip(golden).enumerate() {
            let hp = AdamW { lr: 2e-3 * (1.0 - 0.2 * i as f32), step: i as u64 + 1, ..HP };
            // Half the gradient, twice the scale: exact.
            let mut g = g.map(|g| g / 2.0);
            update(&pool, state(&mut p, &mut m, &mut v, None, &mut g), 2.0, hp);
            for (got, want) in p.iter().zip(want) {
                // A parameter moves by about lr a step; torch groups the decay and the first moment otherwise, which is
                // another rounding (6e-8 relative) of each.
                assert!((got - want).abs() <= 2e-7 * want.abs() + 1e-6 * hp.lr, "step {i}: {got} instead of {want}");
            }
        }
        for (got, want) in m.iter().zip(m_golden).chain(v.iter().zip(v_golden)) {
            assert!((got - want).abs() <= 3e-7 * want.abs(), "{got} instead of {want}");
        }
    }

    #[test]
    fn powers_are_those_of_the_library() {
        for (base, exponent) in [(0.9, 1), (0.9, 2), (0.999, 17), (0.95, 1000), (0.9999, 123_457), (0.0, 3)] {
            let want = f64::powf(base, exponent as f64);
            // Relative to the difference from 1, which is what is used: a small part of an f32 rounding, 6e-8.
            assert!((power(base, exponent) - want).abs() <= 1e-12 * (1.0 - want), "{base}^{exponent}");
        }
    }

    fn wide(n: usize, seed: u32) -> Vec<f32> {
        let (x, e) = (Values::random(n, false, seed).f32s(), Values::random(n, false, seed + 100).f32s());
        let mut x: Vec<f32> = x.iter().zip(e).map(|(x, e)| x * 2f32.powi((e * 25.0) as i32)).collect();
        x[..6].copy_from_slice(&[0.0, -0.0, 1e-40, -1e-44, f32::MIN_POSITIVE, 1e15]);
        x
    }

    #[test]
    fn every_instruction_set_and_the_scalar_sequence_give_the_same_bits() {
        let n = 3 * 64 * BLOCK + 77;
        let (p0, m0, v0, g0) = (wide(n, 1), wide(n, 2), wide(n, 3).iter().map(|v| v.abs()).collect::<Vec<_>>(), wide(n, 4));
        let hp = AdamW { step: 17, ..HP };
        let scale = 0.37f32;
        // The sequence of the contract, written out again.
        let (bc1, bc2) = (1.0 - 0.9f64.powi(17), 1.0 - 0.999f64.powi(17));
        let step = (2e-3f64 / bc1) as f32;
        let (mut p1, mut m1, mut v1) = (p0.clone(), m0.clone(), v0.clone());
        for i in 0..n {
            let g = g0[i] * scale + 0.0;
            p1[i] -= p1[i] * hp.lr * hp.weight_decay;
            m1[i] = 0.9 * m1[i] + (1.0 - 0.9f64) as f32 * g;
            v1[i] = 0.999 * v1[i] + (1.0 - 0.999f64) as f32 * (g * g);
            p1[i] -= step * m1[i] / (v1[i].sqrt() / bc2.sqrt() as f32 + hp.eps);
        }
        for bf16 in [false, true] {
            let want_copy = Values::new(p1.clone(), bf16).f32s();
            for got in on_every_pool(|pool| {
                let (mut p, mut m, mut v, mut g) = (p0.clone(), m0.clone(), v0.clone(), g0.clone());
                let mut copy = Values::new(vec![f32::NAN; n], bf16);
                update(pool, state(&mut p, &mut m, &mut v, Some(&mut copy), &mut g), scale, hp);
                vec![p, m, v, copy.f32s()]
            }) {
                for (got, want) in got.iter().zip([&p1, &m1, &v1, &want_copy]) {
                    assert!(got.iter().zip(want.iter()).all(|(a, b)| a.to_bits() == b.to_bits()));
                }
            }
        }
    }

    #[test]
    fn a_scale_that_is_nan_changes_nothing() {
        let pool = Pool::new(1).unwrap();
        let (mut p, mut m, mut v, mut g) = ([1.5f32; 300], [0.25f32; 300], [0.5f32; 300], [f32::NAN; 300]);
        let mut copy = Values::new(vec![0.0; 300], true);
        update(&pool, state(&mut p, &mut m, &mut v, Some(&mut copy), &mut g), f32::NAN, HP);
        assert_eq!((p, m, v, copy.f32s()), ([1.5; 300], [0.25; 300], [0.5; 300], vec![1.5; 300]));
    }
}
