//! Where activations lie: boundaries and kept activations per micro-batch, and one region shared by what lives within one visit.

use super::EngineOptions;
use crate::error::{Error, Result};
use crate::model::{TensorSpec, VisitSpec};
use crate::plan::ShardPlan;
use zrt_kernels::{Buffer, Category, Device, Place, ViewMut};

/// A visit's place in memory.
pub(super) struct VisitMemory {
    /// Per micro-batch of a group (one entry when shared with others).
    pub acts: Vec<Vec<ViewMut>>,
    pub scratch: Vec<ViewMut>,
    /// Output per micro-batch; empty for the last visit.
    pub outputs: Vec<ViewMut>,
    pub recompute: bool,
}

/// The engine's assumptions about a model, checked once.
pub(super) fn check_visits(visits: &[VisitSpec], plan: &ShardPlan) -> Result<()> {
    let fail = |what: String| Err(Error::Model(what));
    if visits.is_empty() {
        return fail("no visits".into());
    }
    for (v, visit) in visits.iter().enumerate() {
        let before = v.checked_sub(1).map_or(0, |p| visits[p].output);
        if visit.input != before {
            return fail(format!("visit {} takes {} elements, the one before gives {before}", visit.name, visit.input));
        }
        if (visit.output == 0) != (v + 1 == visits.len()) {
            return fail(format!("visit {}: only the last has no output", visit.name));
        }
        if visit.in_place && visit.input != visit.output {
            return fail(format!("visit {} is in_place with input {} and output {}", visit.name, visit.input, visit.output));
        }
        if let Some(u) = visit.units.iter().find(|&&u| u >= plan.units.len()) {
            return fail(format!("visit {} opens unit {u} of {}", visit.name, plan.units.len()));
        }
    }
    for (u, unit) in plan.units.iter().enumerate() {
        if plan.trained(u).is_some() && !visits.iter().any(|v| v.units.contains(&u)) {
            return fail(format!("unit {} is trained but no visit opens it", unit.name));
        }
    }
    Ok(())
}

/// Cuts tensors out of one region, each aligned to 64 bytes.
fn carve(buffer: &Buffer, at: &mut usize, specs: &[TensorSpec]) -> Result<Vec<ViewMut>> {
    let mut out = Vec::with_capacity(specs.len());
    for s in specs {
        out.push(buffer.view_mut(s.dtype, *at, s.elems)?);
        *at += region_bytes(std::slice::from_ref(s));
    }
    Ok(out)
}

fn region_bytes(specs: &[TensorSpec]) -> usize {
    specs.iter().map(|s| (s.elems * s.dtype.bytes()).next_multiple_of(64)).sum()
}

/// Boundaries and activations per micro-batch; one shared region for what lives within one visit (scratch, recomputed activations, the last visit's).
pub(super) fn plan_memory(
    visits: &[VisitSpec],
    options: &EngineOptions,
    group: usize,
    first_trained: usize,
    device: &dyn Device,
) -> Result<Vec<VisitMemory>> {
    let last = visits.len() - 1;
    let mut left = options.recompute;
    let recompute: Vec<bool> = visits
        .iter()
        .enumerate()
        .map(|(v, visit)| {
            let yes = visit.recompute && v >= first_trained && left > 0;
            left -= usize::from(yes);
            yes
        })
        .collect();
    // No backward reads what lies before the first trained visit.
    let shared_acts = |v: usize| recompute[v] || v == last || v < first_trained;
    let largest = |of: &dyn Fn(usize) -> usize| (0..visits.len()).map(of).max().unwrap_or(0).max(64);
    let work_bytes = largest(&|v| if shared_acts(v) { region_bytes(&visits[v].acts) } else { 0 });
    let scratch_bytes = largest(&|v| region_bytes(&visits[v].scratch));
    let work = device.alloc("working activations", work_bytes, Place::Device, Category::Activations)?;
    let scratch = device.alloc("scratch", scratch_bytes, Place::Device, Category::Activations)?;
    let mut memory = Vec::with_capacity(visits.len());
    for (v, visit) in visits.iter().enumerate() {
        let boundary = TensorSpec { name: "output", elems: visit.output, dtype: options.shape.compute };
        let own: &[TensorSpec] = if shared_acts(v) { &[] } else { &visit.acts };
        let bytes = region_bytes(own) + region_bytes(std::slice::from_ref(&boundary));
        let region = device.alloc(&format!("activations {}", visit.name), (bytes * group).max(64), Place::Device, Category::Activations)?;
        let mut at = 0;
        let mut acts = Vec::new();
        let mut outputs = Vec::new();
        for _ in 0..group {
            acts.push(carve(&region, &mut at, own)?);
            if visit.output > 0 {
                outputs.extend(carve(&region, &mut at, std::slice::from_ref(&boundary))?);
            }
        }
        if shared_acts(v) {
            acts = vec![carve(&work, &mut 0, &visit.acts)?];
        }
        memory.push(VisitMemory { acts, scratch: carve(&scratch, &mut 0, &visit.scratch)?, outputs, recompute: recompute[v] });
    }
    Ok(memory)
}
