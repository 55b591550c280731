//! Which angle has dimension i at position p? Inverse frequencies of every rotary variant, and the table that `Ops::rope` reads.
//!
//! The arithmetic follows transformers: tensors are f32 there, scalars are Python floats (f64) that become f32 when they
//! meet a tensor. Powers are computed in f64 and rounded, so each f32 power is at most the last bit from PyTorch's own.

use super::{ArchConfig, Rope};
use std::f64::consts::PI;

/// Inverse frequencies `[D/2]` and the factor of cosines and sines, for sequences of at most `seq_len` tokens (only
/// the dynamic variant depends on it).
pub fn inverse_frequencies(arch: &ArchConfig, seq_len: usize) -> (Vec<f32>, f32) {
    let dim = arch.head_dim;
    // base ** (arange(0, dim, 2) / dim), in f32
    let powers = |base: f64| -> Vec<f32> {
        (0..dim / 2).map(|i| f64::from(base as f32).powf(f64::from((2 * i) as f32 / dim as f32)) as f32).collect()
    };
    let inverse = |base: f64| -> Vec<f32> { powers(base).into_iter().map(|p| 1.0 / p).collect() };
    let theta = arch.rope_theta;
    match arch.rope {
        Rope::Default => (inverse(theta), 1.0),
        Rope::Linear { factor } => (inverse(theta).into_iter().map(|f| f / factor as f32).collect(), 1.0),
        Rope::Dynamic { factor } => {
            let length = seq_len.max(arch.max_position) as f64;
            let stretch = (factor * length / arch.max_position as f64) - (factor - 1.0);
            (inverse(theta * stretch.powf(dim as f64 / (dim as f64 - 2.0))), 1.0)
        }
        Rope::Llama3 { factor, low, high, original_max } => {
            (inverse(theta).into_iter().map(|f| llama3(f, factor as f32, low, high, original_max as f64)).collect(), 1.0)
        }
        Rope::Yarn { factor, beta_fast, beta_slow, attention_factor, original_max, mscale, mscale_all_dim, truncate } => {
            let (low, high) = yarn_range(dim, theta, original_max as f64, beta_fast, beta_slow, truncate);
            let inv = powers(theta)
                .into_iter()
                .enumerate()
                .map(|(i, p)| {
                    let ramp = ((i as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
                    let keep = 1.0 - ramp;
                    (1.0 / (factor as f32 * p)) * (1.0 - keep) + (1.0 / p) * keep
                })
                .collect();
            let scale = |m: f64| if factor <= 1.0 { 1.0 } else { 0.1 * m * factor.ln() + 1.0 };
            let derived = match (mscale, mscale_all_dim) {
                (Some(m), Some(all)) => scale(m) / scale(all),
                _ => scale(1.0),
            };
            (inv, attention_factor.unwrap_or(derived) as f32)
        }
    }
}

fn llama3(inv: f32, factor: f32, low: f64, high: f64, original_max: f64) -> f32 {
    let wavelength = (2.0 * PI) as f32 / inv;
    if wavelength > (original_max / low) as f32 {
        inv / factor
    } else if wavelength < (original_max / high) as f32 {
        inv
    } else {
        let smooth = (original_max as f32 / wavelength - low as f32) / (high - low) as f32;
        (1.0 - smooth) * inv / factor + smooth * inv
    }
}

/// Dimensions between which YaRN's ramp runs.
fn yarn_range(dim: usize, base: f64, original_max: f64, fast: f64, slow: f64, truncate: bool) -> (f64, f64) {
    let at = |rotations: f64| dim as f64 * (original_max / (rotations * 2.0 * PI)).ln() / (2.0 * base.ln());
    let (low, high) = (at(fast), at(slow));
    let (low, high) = if truncate { (low.floor(), high.ceil()) } else { (low, high) };
    let (low, high) = (low.max(0.0), high.min(dim as f64 - 1.0));
    // transformers widens an empty ramp to avoid dividing by zero.
    (low, if low == high { high + 0.001 } else { high })
}

/// The table of `Ops::rope`: `[positions, D]` f32, row p = `D/2` cosines, then `D/2` sines, times the attention factor.
/// The angle is the f32 product of position and inverse frequency, as in transformers; its cosine and sine are computed in f64.
pub fn rope_table(arch: &ArchConfig, positions: usize) -> Vec<f32> {
    let (inv, factor) = inverse_frequencies(arch, positions);
    let mut table = vec![0f32; positions * arch.head_dim];
    for (p, row) in table.chunks_exact_mut(arch.head_dim).enumerate() {
        let (cosines, sines) = row.split_at_mut(arch.head_dim / 2);
        for ((c, s), f) in cosines.iter_mut().zip(sines).zip(&inv) {
            let angle = f64::from(p as f32 * f);
            *c = angle.cos() as f32 * factor;
            *s = angle.sin() as f32 * factor;
        }
    }
    table
}
