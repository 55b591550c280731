//! AdamW (Loshchilov & Hutter 2019): the sequence of rounded operations that [`crate::Ops::adamw`] documents, so that host and
//! device, portable and vector code give the same bits. Plain Rust arithmetic is never contracted to fused multiply-add, and
//! vector square roots and divisions are correctly rounded, so one loop serves every instruction set.
#![allow(unsafe_code)]

use super::elementwise::for_each_item;
use super::operand::{BLOCK, Operand, Raw};
use super::pool::Pool;
use super::simd::simd_fn;
use crate::AdamW;

/// The numbers of one update, each rounded once to `f32` from `f64`.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Factors {
    lr: f32,
    decay: f32,
    beta1: f32,
    rest1: f32,
    beta2: f32,
    rest2: f32,
    step: f32,
    root2: f32,
    eps: f32,
}

/// The decimal number that was written, such as 0.999, instead of its neighbour in `f32`: `1 - 0.999f32` is off by 1.3e-5,
/// and PyTorch computes with the `f64` of the written number.
fn written(x: f32) -> f64 {
    x.to_string().parse().unwrap_or(f64::from(x))
}

impl Factors {
    fn new(hp: AdamW) -> Factors {
        let (beta1, beta2) = (written(hp.beta1), written(hp.beta2));
        let correction = |beta: f64| 1.0 - beta.powf(hp.step as f64);
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

    /// New (parameter, m, v) of one element.
    #[inline(always)]
    fn update(&self, p: f32, m: f32, v: f32, g: f32, scale: f32) -> (f32, f32, f32) {
        // Adding 0 turns -0 into 0, so that the sign of an absent gradient shows nowhere.
        let g = g * scale + 0.0;
        let p = p - p * self.lr * self.decay;
        let m = self.beta1 * m + self.rest1 * g;
        let v = self.beta2 * v + self.rest2 * (g * g);
        let denominator = v.sqrt() / self.root2 + self.eps;
        (p - self.step * m / denominator, m, v)
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
    simd_fn! { fn item[S](_s: S, start: usize, end: usize, t: State, scale: f32, f: Factors) {
        let n = end - start;
        // SAFETY: in range by `for_each_item`; items are disjoint.
        let (p, m, v, g) = unsafe { (t.param.slice(start, n), t.m.slice(start, n), t.v.slice(start, n), t.g.read(start, n)) };
        if !scale.is_nan() {
            for (((p, m), v), g) in p.iter_mut().zip(m).zip(v).zip(g) {
                (*p, *m, *v) = f.update(*p, *m, *v, *g, scale);
            }
        }
        if let Some(out) = t.copy_out {
            for (i, p) in p.chunks(BLOCK).enumerate() {
                // SAFETY: as above.
                unsafe { out.store(start + i * BLOCK, p) };
            }
        }
    } }
    let f = Factors::new(hp);
    for_each_item(pool, t.param.elems(), |start, end| item(pool.isa(), start, end, t, scale, f));
}
