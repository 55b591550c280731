//! What a run leaves for others: a PEFT adapter, or a Hugging Face model. Collective: every rank opens the units, rank 0 writes.

use crate::checkpoint::BaseId;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::hf::Stored;
use crate::hf::export::{MAX_SHARD_BYTES, TensorSpec, export_model};
use crate::job::ModelPart;
use crate::peft::{AdapterTensor, LoraPlan, save_adapter};
use crate::plan::{ParamKind, ParamSpec};
use std::collections::HashMap;
use std::path::Path;
use zrt_kernels::DType;

/// Writes the adapter to `dir`. `moved`: some update with a rate above zero and a non-zero gradient was applied, so a `B` that is
/// all zero is a fault and refuses.
pub fn adapter(engine: &mut Engine, plan: &LoraPlan, base: &BaseId, base_name: &str, dir: &Path, moved: bool) -> Result<()> {
    let writer = engine.comm().rank() == 0;
    let mut tensors: Vec<(ParamSpec, Vec<f32>)> = Vec::new();
    engine.export_weights(&|p| p.kind == ParamKind::Adapter, &mut |spec, _, bytes| {
        if writer {
            let values = bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
            tensors.push((spec.clone(), values));
        }
        Ok(())
    })?;
    if !writer {
        return Ok(());
    }
    let tensors: Vec<AdapterTensor> =
        tensors.iter().map(|(s, v)| AdapterTensor { name: s.name.clone(), shape: s.shape.clone(), values: v }).collect();
    let dead = crate::peft::file::zero_b(&tensors);
    if moved && !dead.is_empty() {
        return Err(Error::Save(format!(
            "{} of the adapter is all zero after training, so it would do nothing: not saved ({} such tensors)",
            dead[0],
            dead.len()
        )));
    }
    let mut config = plan.config.clone();
    config.base_model.get_or_insert_with(|| base_name.to_string());
    save_adapter(dir, &config, &tensors, Some(base)).map_err(|e| Error::Save(e.to_string()))
}

/// Writes the whole model to `dir`, unit by unit: rank 0 holds one unit at a time. `gate(unit)` returns when rank 0 wants the unit, so
/// that no rank waits for a disk in a collective.
pub fn model(engine: &mut Engine, part: &ModelPart, dir: &Path, gate: &dyn Fn(usize) -> Result<()>) -> Result<()> {
    let units = engine.plan().units.len();
    let writer = engine.comm().rank() == 0;
    let mut next = 0;
    let mut outcome = Ok(());
    if writer {
        let stored = match engine.options().shape.compute {
            DType::BF16 => Stored::BF16,
            _ => Stored::F32,
        };
        let specs: Vec<TensorSpec> = engine
            .plan()
            .units
            .iter()
            .flat_map(|u| &u.params)
            .map(|p| TensorSpec { name: p.name.clone(), shape: p.shape.clone(), dtype: stored })
            .collect();
        let mut held: HashMap<String, Vec<u8>> = HashMap::new();
        outcome = export_model(dir, &part.folder, &specs, MAX_SHARD_BYTES, &mut |spec, start, dst| {
            while !held.contains_key(&spec.name) && next < units {
                held.clear();
                gate(next)?;
                for (p, bytes) in engine.unit_weights(next)? {
                    held.insert(p.name, bytes);
                }
                next += 1;
            }
            let bytes = held.get(&spec.name).ok_or_else(|| format!("{} is in no unit", spec.name))?;
            let at = start * spec.dtype.bytes();
            let part = bytes.get(at..at + dst.len()).ok_or_else(|| format!("{}: range outside the tensor", spec.name))?;
            dst.copy_from_slice(part);
            Ok(())
        })
        .map(|_| ())
        .map_err(|e| Error::Save(e.to_string()));
    }
    // Whatever happened to the file, the ranks open the same units.
    while next < units {
        gate(next)?;
        engine.unit_weights(next)?;
        next += 1;
    }
    outcome
}
