//! How does an adapter get to disk and back without harm? Written beside its place, read back, compared with the live tensors, renamed.
//!
//! The users' worst stories are adapters that are empty, partial or zero and noticed weeks later; so a tensor without elements,
//! with a value that is not finite, missing or unexpected refuses here, with names.

use super::config::{AdapterConfig, CONFIG_FILE};
use super::plan::{LoraPlan, LoraTarget};
use super::{Error, Result};
use crate::checkpoint::BaseId;
use crate::durable::{self, Staging};
use crate::hf::export::{TensorSpec, write_safetensors};
use crate::hf::weights::check_finite;
use crate::hf::{ArchConfig, Stored, Weights};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::path::Path;
use zrt_kernels::DType;

/// File name of the tensors in an adapter folder.
pub const TENSORS_FILE: &str = "adapter_model.safetensors";
/// File name of the record of the base the adapter was trained on; other programs ignore it.
pub const BASE_FILE: &str = "base_id.json";

/// A live tensor to save.
#[derive(Clone, Debug)]
pub struct AdapterTensor<'a> {
    /// PEFT's name ([`LoraTarget::a_name`]).
    pub name: String,
    /// Shape.
    pub shape: Vec<usize>,
    /// Elements, row-major.
    pub values: &'a [f32],
}

/// Saves an adapter folder atomically: `adapter_config.json`, `adapter_model.safetensors` (f32) and, if given, the base's identity.
///
/// # Errors
/// A tensor is empty, not finite or of another length than its shape; the disk fails; what was read back differs. An earlier adapter in `dir` stays in each case.
pub fn save_adapter(dir: &Path, config: &AdapterConfig, tensors: &[AdapterTensor], base: Option<&BaseId>) -> Result<()> {
    let mut problems = Vec::new();
    if tensors.is_empty() {
        problems.push("there are no tensors".into());
    }
    let mut by_name: BTreeMap<&str, &AdapterTensor> = BTreeMap::new();
    for t in tensors {
        let elems: usize = t.shape.iter().product();
        if t.values.is_empty() || elems != t.values.len() {
            problems.push(format!("{}: expected shape {:?} with at least one element, got {} elements", t.name, t.shape, t.values.len()));
        } else if let Err(e) = check_finite(&t.name, bytemuck::cast_slice(t.values), DType::F32) {
            problems.push(e.to_string());
        }
        if by_name.insert(&t.name, t).is_some() {
            problems.push(format!("{}: comes twice", t.name));
        }
    }
    if !problems.is_empty() {
        return Err(Error::Tensors { path: dir.into(), problems });
    }
    let staging = Staging::new(dir)?;
    let specs: Vec<TensorSpec> =
        by_name.values().map(|t| TensorSpec { name: t.name.clone(), shape: t.shape.clone(), dtype: Stored::F32 }).collect();
    let path = staging.path().join(TENSORS_FILE);
    write_safetensors(&path, &specs, &mut |spec, start, bytes| {
        let values = by_name.get(spec.name.as_str()).map_or(&[][..], |t| t.values);
        bytes.copy_from_slice(bytemuck::cast_slice(&values[start..start + bytes.len() / 4]));
        Ok(())
    })?;
    durable::write_new(&staging.path().join(CONFIG_FILE), config.to_json().as_bytes())?;
    if let Some(base) = base {
        durable::write_new(&staging.path().join(BASE_FILE), base.to_json().as_bytes())?;
    }
    let back = Weights::open_file(&path)?;
    for t in tensors {
        let mut bytes = vec![0u8; t.values.len() * 4];
        let live: &[u8] = bytemuck::cast_slice(t.values);
        let same_shape = back.tensor(&t.name)?.shape == t.shape;
        back.read(&t.name, 0, &mut bytes, DType::F32)?;
        if !same_shape || Sha256::digest(&bytes) != Sha256::digest(live) {
            return Err(Error::ReadBack { path: dir.into(), name: t.name.clone() });
        }
    }
    Ok(staging.install()?)
}

/// Names of the B matrices that are all zero: adapters that do nothing. After a step with a non-zero gradient and rate, that is a bug.
pub fn zero_b<'a>(tensors: &'a [AdapterTensor]) -> Vec<&'a str> {
    let dead = |t: &&AdapterTensor| t.name.ends_with(".lora_B.weight") && t.values.iter().all(|v| *v == 0.0);
    tensors.iter().filter(dead).map(|t| t.name.as_str()).collect()
}

/// An adapter on disk, checked against a model.
#[derive(Debug)]
pub struct Adapter {
    /// Targets with ranks and scales.
    pub plan: LoraPlan,
    /// The tensors, read by ranges under [`LoraTarget::a_name`] and [`LoraTarget::b_name`].
    pub weights: Weights,
    /// The base the adapter was trained on, if its writer said.
    pub base: Option<BaseId>,
}

impl Adapter {
    /// A of a target, `[r, in]`, as f32.
    ///
    /// # Errors
    /// The read fails.
    pub fn a(&self, target: &LoraTarget) -> Result<Vec<f32>> {
        Ok(self.weights.read_f32(&target.a_name())?)
    }

    /// B of a target, `[out, r]`, as f32.
    ///
    /// # Errors
    /// The read fails.
    pub fn b(&self, target: &LoraTarget) -> Result<Vec<f32>> {
        Ok(self.weights.read_f32(&target.b_name())?)
    }
}

/// Opens an adapter folder for a model: configuration honoured, every tensor present, of the right shape and finite.
///
/// # Errors
/// Any of that does not hold; all tensors that do not fit are named at once. Pickle files are never read.
pub fn load_adapter(dir: &Path, arch: &ArchConfig) -> Result<Adapter> {
    let config = AdapterConfig::load(dir)?;
    let plan = LoraPlan::of(&config, arch)?;
    let path = dir.join(TENSORS_FILE);
    if !path.is_file() && dir.join("adapter_model.bin").is_file() {
        let what = format!(
            "there is only the pickle file adapter_model.bin, which can run code when it is read and never is; convert it to {TENSORS_FILE}"
        );
        return Err(crate::hf::Error::NoWeights { dir: dir.into(), what }.into());
    }
    let weights = Weights::open_file(&path)?;
    let expected: BTreeMap<String, Vec<usize>> = plan.parameters().into_iter().collect();
    let mut problems = Vec::new();
    for (name, shape) in &expected {
        match weights.tensor(name) {
            Err(_) => problems.push(format!("{name}: missing, expected shape {shape:?}")),
            Ok(t) if t.shape != *shape => problems.push(format!("{name}: expected shape {shape:?}, got {:?}", t.shape)),
            Ok(_) => match weights.read_f32(name) {
                Ok(values) => problems.extend(check_finite(name, bytemuck::cast_slice(&values), DType::F32).err().map(|e| e.to_string())),
                Err(e) => problems.push(e.to_string()),
            },
        }
    }
    let unexpected = weights.names().iter().filter(|n| !expected.contains_key(*n));
    problems.extend(unexpected.map(|n| format!("{n}: unexpected; names are base_model.model.<module path>.lora_A.weight")));
    if !problems.is_empty() {
        return Err(Error::Tensors { path: dir.into(), problems });
    }
    let base_path = dir.join(BASE_FILE);
    let base = match std::fs::read_to_string(&base_path) {
        Ok(text) => Some(BaseId::parse(&text, &base_path)?),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => None,
        Err(e) => return Err(durable::at("read", &base_path)(e).into()),
    };
    Ok(Adapter { plan, weights, base })
}
