//! First values of parameters: from a checkpoint, an adapter, the model's files, or random, in this order of preference.
//!
//! Every value is a function of the parameter's name and the element, so any rank can read any range.

use crate::checkpoint::{Kind, Reader};
use crate::engine::ReadState;
use crate::hf::Weights;
use crate::hf::weights::check_finite;
use crate::plan::{Init, ParamKind, ParamSpec};
use crate::store::WeightSource;
use half::bf16;
use std::sync::Arc;
use zrt_kernels::DType;
use zrt_kernels::philox::{key_of, normal_pair, philox4x32, unit_f32};

/// Where the parameters of a run come from.
#[derive(Default)]
pub struct Sources {
    /// Base weights; `None`: random start.
    pub base: Option<Arc<Weights>>,
    /// A PEFT adapter to continue from.
    pub adapter: Option<Arc<Weights>>,
    /// Trained parameters of an earlier run.
    pub checkpoint: Option<Arc<Reader>>,
    /// Seed of random values.
    pub seed: u64,
}

impl WeightSource for Sources {
    fn read(&self, param: &ParamSpec, start: usize, dst: &mut [u8], dtype: DType) -> Result<(), String> {
        let file = match param.kind {
            ParamKind::Adapter => &self.adapter,
            ParamKind::Base => &self.base,
        };
        if let (true, Some(reader)) = (param.trainable, &self.checkpoint) {
            as_f32(dst, dtype, |values| reader.read(Kind::Weight, &param.name, start, values).map_err(|e| e.to_string()))
        } else if let Some(weights) = file {
            weights.read(&param.name, start, dst, dtype).map_err(|e| e.to_string())?;
            check_finite(&param.name, dst, dtype).map_err(|e| e.to_string())
        } else {
            as_f32(dst, dtype, |values| {
                init_values(param.init, self.seed, &param.name, start, values);
                Ok(())
            })
        }
    }
}

/// Optimizer state out of a checkpoint.
pub struct CheckpointState(pub Arc<Reader>);

impl ReadState for CheckpointState {
    fn read(&self, kind: Kind, name: &str, start: usize, out: &mut [f32]) -> Result<(), String> {
        self.0.read(kind, name, start, out).map_err(|e| e.to_string())
    }
}

/// Runs `fill` on f32 values and stores them as `dtype`; bf16 goes through blocks of 64 Ki elements.
fn as_f32(dst: &mut [u8], dtype: DType, mut fill: impl FnMut(&mut [f32]) -> Result<(), String>) -> Result<(), String> {
    match dtype {
        DType::F32 => match bytemuck::try_cast_slice_mut(dst) {
            Ok(values) => fill(values),
            Err(_) => {
                let mut values = vec![0f32; dst.len() / 4];
                fill(&mut values)?;
                dst.copy_from_slice(bytemuck::cast_slice(&values));
                Ok(())
            }
        },
        DType::BF16 => {
            let mut values = vec![0f32; dst.len() / 2];
            fill(&mut values)?;
            for (d, v) in dst.chunks_exact_mut(2).zip(&values) {
                d.copy_from_slice(&bf16::from_f32(*v).to_le_bytes());
            }
            Ok(())
        }
        other => Err(format!("weights cannot be stored as {other}")),
    }
}

/// Elements `start..` of a random parameter: Philox with the element's block as counter, keyed by (seed, name).
pub fn init_values(init: Init, seed: u64, name: &str, start: usize, out: &mut [f32]) {
    let key = key_of(seed, name);
    let words = |e: usize| philox4x32([(e / 4) as u32, ((e / 4) >> 32) as u32, 0, 0], key);
    match init {
        Init::Zeros => out.fill(0.0),
        Init::Ones => out.fill(1.0),
        Init::Uniform(bound) => {
            for (i, v) in out.iter_mut().enumerate() {
                let e = start + i;
                *v = (2.0 * unit_f32(words(e)[e % 4]) - 1.0) * bound;
            }
        }
        Init::Normal(std) => {
            for (i, v) in out.iter_mut().enumerate() {
                let e = start + i;
                let w = words(e);
                let (a, b) = if e % 4 < 2 { normal_pair(w[0], w[1]) } else { normal_pair(w[2], w[3]) };
                *v = std * if e.is_multiple_of(2) { a } else { b };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_agree_and_moments_are_right() {
        for init in [Init::Normal(0.5), Init::Uniform(0.5)] {
            let mut all = vec![0f32; 40_000];
            init_values(init, 7, "w", 0, &mut all);
            let mut part = vec![0f32; 1001];
            init_values(init, 7, "w", 333, &mut part);
            assert_eq!(&all[333..1334], &part[..]);
            let mean = all.iter().sum::<f32>() / 4e4;
            let var = all.iter().map(|x| x * x).sum::<f32>() / 4e4;
            // Standard error of the mean is 0.0025; five of them.
            assert!(mean.abs() < 0.0125, "{mean}");
            let want = if matches!(init, Init::Normal(_)) { 0.25 } else { 0.25 / 3.0 };
            assert!((var - want).abs() < 0.03 * want * 2.0, "{var}");
        }
    }
}
