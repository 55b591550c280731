//! How does an adapter become part of a model? Tensor by tensor, range by range: `W + scale * B A` summed in f32 and rounded once
//! to the base's type; everything else copied as it is stored.
//!
//! Merging in bf16, or into another base than the one trained on, is the classic way to a model that is not the one evaluated. So the base
//! is checked (shapes always; identity where the adapter carries it), and the report says how much of the update the
//! rounding cost.

use crate::checkpoint::BaseId;
use crate::hf::export::{Exported, MAX_SHARD_BYTES, TensorSpec, export_model};
use crate::hf::{self, ArchConfig, Stored, Weights};
use crate::peft::{self, LoraTarget, load_adapter};
use half::{bf16, f16};
use rayon::prelude::*;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// Result of a merge.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can stop a merge.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The base or the output directory.
    #[error("merge: base: {0}")]
    Model(#[from] hf::Error),
    /// The adapter.
    #[error("merge: {0}")]
    Adapter(#[from] peft::Error),
    /// The adapter was trained on another base.
    #[error("merge: the adapter {} was not trained on the base {}: {what}; give the base it was trained on, or allow another base explicitly", adapter.display(), base.display())]
    OtherBase {
        /// The adapter folder.
        adapter: PathBuf,
        /// The base directory.
        base: PathBuf,
        /// What differs.
        what: String,
    },
    /// The output would replace its own input, or something that is not a model.
    #[error("merge: output {}: {what}", out.display())]
    Output {
        /// The output directory.
        out: PathBuf,
        /// Why not, and what to do.
        what: String,
    },
}

/// Choices of a merge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Largest weight file.
    pub max_shard_bytes: u64,
    /// Merge even if the adapter says it was trained on another base of the same shapes.
    pub allow_other_base: bool,
    /// Replace an existing output directory.
    pub overwrite: bool,
}

impl Default for Options {
    fn default() -> Self {
        Options { max_shard_bytes: MAX_SHARD_BYTES, allow_other_base: false, overwrite: false }
    }
}

/// What was done.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    /// What was written.
    pub written: Exported,
    /// Tensors in the model.
    pub tensors: usize,
    /// Tensors that an adapter changed.
    pub merged: usize,
    /// Root mean square of the update `scale * B A` over the changed tensors.
    pub update_rms: f64,
    /// Root mean square of what rounding to the base's type lost there; 0 for f32.
    pub rounding_rms: f64,
    /// Whether the adapter's record of its base was checked (`false`: it has none).
    pub base_checked: bool,
}

/// An adapter's factors in memory.
struct Factors {
    /// `[r, in]`
    a: Vec<f32>,
    /// `[out, r]`
    b: Vec<f32>,
    target: LoraTarget,
}

/// Merges the adapter into the base and writes a Hugging Face directory at `out`. Peak memory: the adapter and one range.
///
/// # Errors
/// Base and adapter do not fit, either is damaged or not finite, `out` exists (without `overwrite`), or the disk fails; then `out` is as before.
pub fn merge(base_dir: &Path, adapter_dir: &Path, out: &Path, options: &Options) -> Result<Report> {
    check_output(base_dir, adapter_dir, out, options)?;
    let arch = ArchConfig::load(base_dir)?;
    let base = Weights::open(base_dir)?;
    base.validate(&arch)?;
    let adapter = load_adapter(adapter_dir, &arch)?;
    if let Some(trained_on) = adapter.base.as_ref().filter(|_| !options.allow_other_base) {
        // A random start has no files to compare with; its configuration still must agree.
        let mut here = BaseId::of(base_dir, &base)?;
        if trained_on.weights.starts_with("random:") {
            here.weights.clone_from(&trained_on.weights);
        }
        if let Some(what) = trained_on.difference(&here) {
            return Err(Error::OtherBase { adapter: adapter_dir.into(), base: base_dir.into(), what });
        }
    }
    let mut factors = HashMap::new();
    for target in &adapter.plan.targets {
        let f = Factors { a: adapter.a(target)?, b: adapter.b(target)?, target: target.clone() };
        factors.insert(target.weight_name(), f);
    }
    let specs = model_order(&arch, &base)?;
    let mut sums = Sums::default();
    let written = export_model(out, base_dir, &specs, options.max_shard_bytes, &mut |spec, start, bytes| {
        match factors.get(&spec.name) {
            None => base.read_stored(&spec.name, start, bytes)?,
            Some(f) => {
                let mut values = vec![0f32; bytes.len() / spec.dtype.bytes()];
                base.read_into_f32(&spec.name, start, &mut values)?;
                sums.add(&add_rounded(bytes, &mut values, start, spec.dtype, f));
            }
        }
        Ok(())
    })?;
    let mean = |square: f64| if sums.elems == 0 { 0.0 } else { (square / sums.elems as f64).sqrt() };
    Ok(Report {
        written,
        tensors: specs.len(),
        merged: factors.len(),
        update_rms: mean(sums.update),
        rounding_rms: mean(sums.rounding),
        base_checked: adapter.base.is_some() && !options.allow_other_base,
    })
}

fn check_output(base: &Path, adapter: &Path, out: &Path, options: &Options) -> Result<()> {
    let refuse = |what: String| Err(Error::Output { out: out.into(), what });
    let Ok(real) = out.canonicalize() else { return Ok(()) };
    for (input, role) in [(base, "base"), (adapter, "adapter")] {
        if input.canonicalize().is_ok_and(|i| i.starts_with(&real)) {
            return refuse(format!("it is or contains the {role} directory; choose another"));
        }
    }
    let empty = real.read_dir().is_ok_and(|mut entries| entries.next().is_none());
    if empty || (options.overwrite && real.join("config.json").is_file()) {
        return Ok(());
    }
    match options.overwrite {
        true => refuse("it exists and is not a model directory; remove it or choose another".into()),
        false => refuse("it exists; remove it, choose another, or allow overwriting".into()),
    }
}

/// Tensors in model order, as the base stores them.
fn model_order(arch: &ArchConfig, base: &Weights) -> Result<Vec<TensorSpec>> {
    let mut specs = Vec::new();
    // A stored copy of a tied head would go stale next to the embedding, so it is left out, as transformers does.
    for (name, shape) in arch.parameters() {
        let dtype = base.tensor(&name)?.dtype;
        specs.push(TensorSpec { name, shape, dtype });
    }
    Ok(specs)
}

#[derive(Default)]
struct Sums {
    elems: u64,
    update: f64,
    rounding: f64,
}

impl Sums {
    fn add(&mut self, other: &Sums) {
        self.elems += other.elems;
        self.update += other.update;
        self.rounding += other.rounding;
    }
}

/// `bytes = round(values + scale * B A)` for elements `start..` of a `[out, in]` weight; one task per row.
fn add_rounded(bytes: &mut [u8], values: &mut [f32], start: usize, dtype: Stored, f: &Factors) -> Sums {
    let (inputs, width) = (f.target.inputs, dtype.bytes());
    // Ranges begin and end inside rows; cutting at row ends gives every task one row or a part of one.
    let head = (inputs - start % inputs).min(values.len()) % inputs;
    let (v0, v1) = values.split_at_mut(head);
    let (b0, b1) = bytes.split_at_mut(head * width);
    let rows = v1.par_chunks_mut(inputs).zip(b1.par_chunks_mut(inputs * width)).enumerate();
    let parts: Vec<Sums> = rows.map(|(i, (v, b))| add_row(b, v, start + head + i * inputs, dtype, f)).collect();
    let mut sums = if head > 0 { add_row(b0, v0, start, dtype, f) } else { Sums::default() };
    parts.iter().for_each(|p| sums.add(p));
    sums
}

fn add_row(bytes: &mut [u8], values: &mut [f32], start: usize, dtype: Stored, f: &Factors) -> Sums {
    let LoraTarget { inputs, r, scale, .. } = f.target;
    let (row, column) = (start / inputs, start % inputs);
    let mut update = vec![0f32; values.len()];
    for k in 0..r {
        let b = f.b[row * r + k];
        let a = &f.a[k * inputs + column..][..values.len()];
        update.iter_mut().zip(a).for_each(|(u, a)| *u += b * a);
    }
    let mut sums = Sums { elems: values.len() as u64, ..Sums::default() };
    for ((v, u), out) in values.iter_mut().zip(&update).zip(bytes.chunks_exact_mut(dtype.bytes())) {
        let change = scale * u;
        let exact = *v + change;
        let rounded = match dtype {
            Stored::BF16 => {
                let x = bf16::from_f32(exact);
                out.copy_from_slice(&x.to_le_bytes());
                x.to_f32()
            }
            Stored::F16 => {
                let x = f16::from_f32(exact);
                out.copy_from_slice(&x.to_le_bytes());
                x.to_f32()
            }
            _ => {
                out.copy_from_slice(&exact.to_le_bytes());
                exact
            }
        };
        sums.update += f64::from(change).powi(2);
        sums.rounding += f64::from(rounded - exact).powi(2);
    }
    sums
}
