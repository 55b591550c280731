//! What tests of operations share: operands with storage of either type, and comparison with an `f64` reference.

use super::operand::{Operand, Raw};
use super::pool::Pool;
use super::simd::Isa;
use crate::philox::{normal_pair, philox4x32};
use half::bf16;

/// An operand's storage.
#[derive(Clone, Debug)]
pub enum Values {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
}

impl Values {
    pub fn new(x: Vec<f32>, bf16: bool) -> Values {
        if bf16 { Values::Bf16(x.into_iter().map(half::bf16::from_f32).collect()) } else { Values::F32(x) }
    }

    /// Standard normal values.
    pub fn random(elems: usize, bf16: bool, seed: u32) -> Values {
        let value = |i: usize| {
            let w = philox4x32([i as u32, 0, 0, 0], [seed, 1]);
            normal_pair(w[0], w[1]).0
        };
        Values::new((0..elems).map(value).collect(), bf16)
    }

    /// As many elements of the same type, all NaN, so that what is not written shows.
    pub fn like(&self) -> Values {
        match self {
            Values::F32(x) => Values::F32(vec![f32::NAN; x.len()]),
            Values::Bf16(x) => Values::Bf16(vec![bf16::NAN; x.len()]),
        }
    }

    pub fn operand(&mut self) -> Operand {
        match self {
            Values::F32(x) => Operand::F32(Raw::new(x)),
            Values::Bf16(x) => Operand::Bf16(Raw::new(x)),
        }
    }

    pub fn f32s(&self) -> Vec<f32> {
        match self {
            Values::F32(x) => x.clone(),
            Values::Bf16(x) => x.iter().map(|x| x.to_f32()).collect(),
        }
    }

    pub fn f64s(&self) -> Vec<f64> {
        self.f32s().into_iter().map(f64::from).collect()
    }

    pub fn cut(&self, start: usize, elems: usize) -> Values {
        match self {
            Values::F32(x) => Values::F32(x[start..start + elems].to_vec()),
            Values::Bf16(x) => Values::Bf16(x[start..start + elems].to_vec()),
        }
    }

    pub fn set(&mut self, i: usize, value: f32) {
        match self {
            Values::F32(x) => x[i] = value,
            Values::Bf16(x) => x[i] = bf16::from_f32(value),
        }
    }

    pub fn poison(&mut self, start: usize, elems: usize) {
        (start..start + elems).for_each(|i| self.set(i, f32::NAN));
    }
}

/// Every element within `relative` of the largest magnitude of the whole.
pub fn assert_close(what: &str, got: &[f32], want: &[f64], relative: f64) {
    assert_eq!(got.len(), want.len());
    let largest = want.iter().fold(0f64, |m, x| m.max(x.abs()));
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!((f64::from(*g) - w).abs() <= relative * largest, "{what}[{i}] is {g}, expected {w} within {:e}", relative * largest);
    }
}

/// `got`, a gradient, agrees along random directions with central differences of `f` at `x`. The tolerance is relative to
/// what errors of the elements, unrelated to one another, would make of the sum.
pub fn assert_gradient(what: &str, got: &[f32], x: &[f64], tolerance: f64, f: impl Fn(&[f64]) -> f64) {
    for seed in [101, 102, 103] {
        let direction = Values::random(x.len(), false, seed).f64s();
        // Truncation ~ step^2 and cancellation ~ 1e-16 / step are both far below what f32 can show.
        let step = 1e-5;
        let at = |sign: f64| f(&x.iter().zip(&direction).map(|(x, d)| x + sign * step * d).collect::<Vec<_>>());
        let want = (at(1.0) - at(-1.0)) / (2.0 * step);
        let terms = || got.iter().zip(&direction).map(|(g, d)| f64::from(*g) * d);
        let norm = terms().map(|t| t * t).sum::<f64>().sqrt();
        // Elements that cancel to nothing keep the rounding of what cancelled: values of the order of 1.
        let floor = 0.2 * (x.len() as f64).sqrt();
        let got: f64 = terms().sum();
        assert!((got - want).abs() <= tolerance * (norm + floor), "{what}: {got} along a direction, expected {want} (norm {norm})");
    }
}

/// Results of `run` on every instruction set, each asserted to have the same bits with 1, 2 and 3 threads.
pub fn on_every_pool(mut run: impl FnMut(&Pool) -> Vec<Vec<f32>>) -> Vec<Vec<Vec<f32>>> {
    let mut each = Vec::new();
    for isa in Isa::available() {
        let mut by_threads = [1, 2, 3].map(|threads| run(&Pool::with_isa(threads, isa).unwrap()));
        let [one, rest @ ..] = &by_threads;
        for other in rest {
            for (a, b) in one.iter().zip(other) {
                assert!(a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits()), "{}: threads change bits", isa.name());
            }
        }
        each.push(std::mem::take(&mut by_threads[0]));
    }
    each
}

/// Relative error of one rounding to the storage type, and a little for the f32 arithmetic before it.
pub fn rounding(bf16: bool) -> f64 {
    if bf16 { 4e-3 } else { 1e-6 }
}
