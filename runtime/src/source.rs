//! First values of parameters: from a checkpoint, an adapter, the model's files, or random, in this order of preference.
//!
//! Every value is a function of the parameter's name and the element, so any rank can read any range.

use crate::checkpoint::{Kind, Reader};
use crate::engine::ReadState;
use crate::hf::Weights;
use crate::hf::weights::{check_finite, is_finite};
use crate::plan::{Init, ParamKind, ParamSpec};
use crate::store::{ReadPart, WeightSource};
use half::bf16;
use rayon::prelude::*;
use std::sync::{Arc, OnceLock};
use zrt_kernels::DType;
use zrt_kernels::cpu::convert;
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
    /// Who reads: made at the first need, gone with the sources, so that nothing of loading is left in a step.
    pub readers: Readers,
}

/// Threads that read side by side.
#[derive(Default)]
pub struct Readers(OnceLock<Option<rayon::ThreadPool>>);

/// Bytes of one read. The values are looked at before they leave the cache of the core that read them, and there is enough to share.
const PART_BYTES: usize = 512 << 10;

/// Threads that read for one rank. A disk wants several requests at a time, whatever the number of cores.
const READERS: usize = 4;

impl WeightSource for Sources {
    fn read(&self, param: &ParamSpec, start: usize, dst: &mut [u8], dtype: DType) -> Result<(), String> {
        let file = match param.kind {
            ParamKind::Adapter => &self.adapter,
            ParamKind::Base => &self.base,
        };
        if let (true, Some(reader)) = (param.trainable, &self.checkpoint) {
            as_f32(dst, dtype, |at, values| reader.read(Kind::Weight, &param.name, start + at, values).map_err(|e| e.to_string()))
        } else if let Some(weights) = file {
            weights.read(&param.name, start, dst, dtype).map_err(|e| e.to_string())?;
            if is_finite(dst, dtype) { Ok(()) } else { Err(not_finite(weights, &param.name, dst, dtype)) }
        } else {
            as_f32(dst, dtype, |at, values| {
                init_values(param.init, self.seed, &param.name, start + at, values);
                Ok(())
            })
        }
    }

    /// Cut into parts of `PART_BYTES` that `READERS` threads take in turn.
    fn read_all(&self, parts: Vec<ReadPart<'_>>, dtype: DType) -> Result<(), String> {
        let step = PART_BYTES / dtype.bytes();
        let cut = |p| {
            let ReadPart { param, start, dst } = p;
            let small = dst.chunks_mut(step * dtype.bytes()).enumerate();
            small.map(move |(i, dst)| ReadPart { param, start: start + i * step, dst })
        };
        let small: Vec<ReadPart> = parts.into_iter().flat_map(cut).collect();
        let read = |p: ReadPart| self.read(p.param, p.start, p.dst, dtype);
        let readers = self.readers.0.get_or_init(|| rayon::ThreadPoolBuilder::new().num_threads(READERS).build().ok());
        match readers {
            Some(pool) if small.len() > 1 => pool.install(|| small.into_par_iter().with_max_len(1).try_for_each(read)),
            // What cannot be started is not missed.
            _ => small.into_iter().try_for_each(read),
        }
    }
}

/// What is wrong with a tensor of which `part` is not finite: counted over all of it.
fn not_finite(weights: &Weights, name: &str, part: &[u8], dtype: DType) -> String {
    let whole = weights.read_f32(name).and_then(|values| check_finite(name, bytemuck::cast_slice(&values), DType::F32));
    // Finite in the file, then: too large for the narrower type.
    let found = whole.and_then(|()| check_finite(name, part, dtype));
    found.err().map_or_else(|| format!("tensor '{name}' is not finite"), |e| e.to_string())
}

/// Optimizer state out of a checkpoint.
pub struct CheckpointState(pub Arc<Reader>);

impl ReadState for CheckpointState {
    fn read(&self, kind: Kind, name: &str, start: usize, out: &mut [f32]) -> Result<(), String> {
        self.0.read(kind, name, start, out).map_err(|e| e.to_string())
    }
}

/// Lets `fill(first, values)` make f32 values, and stores them as `dtype`: in place, or through a small buffer.
fn as_f32(dst: &mut [u8], dtype: DType, mut fill: impl FnMut(usize, &mut [f32]) -> Result<(), String>) -> Result<(), String> {
    const BLOCK: usize = 16 << 10;
    if !matches!(dtype, DType::F32 | DType::BF16) {
        return Err(format!("weights cannot be stored as {dtype}"));
    }
    if let (DType::F32, Ok(values)) = (dtype, bytemuck::try_cast_slice_mut(dst)) {
        return fill(0, values);
    }
    let mut values = vec![0f32; BLOCK.min(dst.len() / dtype.bytes())];
    for (i, dst) in dst.chunks_mut(BLOCK * dtype.bytes()).enumerate() {
        let values = &mut values[..dst.len() / dtype.bytes()];
        fill(i * BLOCK, values)?;
        match dtype {
            DType::F32 => dst.copy_from_slice(bytemuck::cast_slice(values)),
            _ => match bytemuck::try_cast_slice_mut(dst) {
                Ok(narrow) => convert::narrow(narrow, values),
                Err(_) => dst.chunks_exact_mut(2).zip(values).for_each(|(d, v)| d.copy_from_slice(&bf16::from_f32(*v).to_le_bytes())),
            },
        }
    }
    Ok(())
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
