//! One step of a job on the simulated device, recorded: what it allocates, and the tape of what it enqueues.
//!
//! The trainer itself runs, so a plan and a run cannot differ in what they do. A rank stands for all. The step is recorded in the
//! middle of a run: a step without batches comes before, so that resident weights are there. Groups of micro-batches are alike:
//! the first, one of the middle and the last are recorded, and the middle one counts as often as there are such.

use crate::data::HostBatch;
use crate::engine::{Engine, EngineOptions, StepInput};
use crate::error::{Error, Result};
use crate::model::Model;
use std::cell::Cell;
use std::sync::Arc;
use zrt_collectives::sim::SimComm;
use zrt_kernels::gpu::launch::Arch;
use zrt_kernels::sim::tape::Tape;
use zrt_kernels::sim::{SimDevice, SimOptions};
use zrt_kernels::{AdamW, Category, Device, MemoryUse, Place};

/// Whose scratch sizes are planned.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Sizes {
    /// A CPU device of so many threads.
    Cpu {
        /// Threads.
        threads: usize,
    },
    /// The kernels of a GPU.
    Gpu {
        /// Architecture; unknown ones count as `sm_80`.
        arch: String,
    },
}

/// What a rank holds and does in a step.
#[derive(Clone, Debug)]
pub struct Recording {
    /// Bytes by place and category.
    pub memory: Vec<(Place, Category, MemoryUse)>,
    /// Of these, bytes of pages that all ranks of the host share.
    pub shared_bytes: usize,
    /// All and trained parameters.
    pub parameters: (usize, usize),
    /// Elements of the largest tensor.
    pub largest: usize,
    /// Bytes of a copy of all weights.
    pub weight_bytes: usize,
    /// Useful FLOPs of one micro-batch: without recomputation.
    pub flops_per_micro_batch: f64,
    /// Visits that recomputation can cover.
    pub recomputable: usize,
    /// The step; empty where only memory was asked for.
    pub tape: Tape,
}

fn device(sizes: &Sizes) -> Result<Arc<SimDevice>> {
    Ok(match sizes {
        Sizes::Cpu { threads } => SimDevice::new(SimOptions { threads: *threads })?,
        Sizes::Gpu { arch } => {
            let known = Arch::known(arch).or_else(|| Arch::known("sm_80"));
            let known = known.ok_or_else(|| Error::Input(format!("no kernels are known for {arch}")))?;
            SimDevice::with_sizes(SimOptions { threads: 1 }, move |shape| zrt_kernels::gpu::workspace_bytes(&known, shape))?
        }
    })
}

/// A micro-batch of full sequences, one document each.
fn full_batch(options: &EngineOptions) -> HostBatch {
    let (n, len) = (options.shape.tokens, options.shape.seq_len);
    let documents = (n / len.max(1)).max(1);
    let cu_seqlens = (0..=n).map(|d| (d.min(documents) * len).min(n) as i32).collect();
    HostBatch {
        ids: vec![0; n],
        labels: vec![0; n],
        positions: vec![0; n],
        cu_seqlens,
        documents,
        trained: n as u64,
        tokens: n as u64,
        samples: Vec::new(),
    }
}

/// Runs `model` with `options` as one of `ranks`. Without `timed` nothing is enqueued: memory alone is known then.
pub fn record(model: Arc<dyn Model>, options: &EngineOptions, ranks: usize, sizes: &Sizes, timed: bool) -> Result<Recording> {
    let device = device(sizes)?;
    let comm = Arc::new(SimComm::new(ranks).with_shared_pages(options.share_pages).on(device.link()));
    let mut engine = Engine::new(device.clone(), comm, model, options.clone())?;
    let per_group = ranks * options.group;
    let groups = options.micro_batches.div_ceil(per_group);
    let repeats = groups.saturating_sub(2).max(1);
    let mut tape = Tape::default();
    if timed {
        let hp = AdamW { lr: 0.0, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0, step: 1 };
        let trained_tokens = (options.shape.tokens * options.micro_batches) as u64;
        let none = |_| Ok(None);
        engine.step(&StepInput { step: 0, hp, trained_tokens, batch: &none, stop: false })?;

        let host = full_batch(options);
        let running = Cell::new(usize::MAX);
        let batch = |index: usize| {
            let group = index / per_group;
            if running.replace(group) != group && groups > 3 {
                match group {
                    1 => device.mark(0),
                    2 => {
                        device.mark(1);
                        device.mute(true);
                    }
                    g if g == groups - 1 => device.mute(false),
                    _ => {}
                }
            }
            Ok((groups <= 3 || group < 2 || group == groups - 1).then(|| host.clone()))
        };
        let recorded = groups.min(3) * options.group.min(options.micro_batches) * engine.visits().len();
        device.record(recorded * 96 + 4096);
        engine.step(&StepInput { step: 1, hp, trained_tokens, batch: &batch, stop: false })?;
        tape = device.take_tape(if groups > 3 { repeats as u64 } else { 1 });
    }
    let plan = engine.plan();
    Ok(Recording {
        memory: device.memory(),
        shared_bytes: engine.shared_bytes(),
        parameters: plan.parameters(),
        largest: plan.units.iter().flat_map(|u| &u.params).map(|p| p.elems()).max().unwrap_or(0),
        weight_bytes: plan.segments.iter().map(|s| s.elems * s.dtype.bytes()).sum(),
        flops_per_micro_batch: engine.flops_per_micro_batch(),
        recomputable: engine.visits().iter().filter(|v| v.recompute).count(),
        tape,
    })
}
