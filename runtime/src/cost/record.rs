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
use std::sync::{Arc, Mutex};
use zrt_collectives::sim::SimComm;
use zrt_kernels::gpu::launch::Arch;
use zrt_kernels::sim::tape::Tape;
use zrt_kernels::sim::{SimDevice, SimOptions};
use zrt_kernels::{AdamW, Category, Device, MemoryUse, OpShape, Place};

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
            // Asked at every call of an operation, of few shapes; the answer takes a search over tilings.
            let answers: Mutex<Vec<(OpShape, usize)>> = Mutex::default();
            let bytes = move |shape: OpShape| {
                let mut answers = answers.lock().unwrap_or_else(|e| e.into_inner());
                if let Some((_, bytes)) = answers.iter().find(|(s, _)| *s == shape) {
                    return *bytes;
                }
                let bytes = zrt_kernels::gpu::workspace_bytes(&known, shape);
                answers.push((shape, bytes));
                bytes
            };
            SimDevice::with_sizes(SimOptions { threads: 1 }, bytes)?
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

/// Groups of a recorded step: the first, one that stands for all in the middle, the last.
const GROUPS: usize = 3;

/// Runs `model` with `options` as one of `ranks`. Without `timed` nothing is enqueued: memory alone is known then.
pub fn record(model: Arc<dyn Model>, options: &EngineOptions, ranks: usize, sizes: &Sizes, timed: bool) -> Result<Recording> {
    let device = device(sizes)?;
    let engine = |device: &Arc<SimDevice>, options: &EngineOptions| {
        let comm = Arc::new(SimComm::new(ranks).with_shared_pages(options.share_pages).on(device.link()));
        Engine::new(device.clone(), comm, model.clone(), options.clone())
    };
    let mut whole = engine(&device, options)?;
    let per_group = ranks * options.group;
    let groups = options.micro_batches.div_ceil(per_group);
    let tape = match (timed, groups > GROUPS) {
        (false, _) => Tape::default(),
        (true, false) => step(&device, &mut whole, 1)?,
        // An engine of fewer groups: what they hold is known from the whole one, and going through all of them takes long.
        (true, true) => {
            let device = self::device(sizes)?;
            let left_out = groups - GROUPS;
            let short = EngineOptions { micro_batches: options.micro_batches - left_out * per_group, ..options.clone() };
            step(&device, &mut engine(&device, &short)?, 1 + left_out as u64)?
        }
    };
    let engine = whole;
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

/// The tape of a step of `engine` in the middle of a run; of more than one `repeats`, the second group of three stands for so many.
fn step(device: &Arc<SimDevice>, engine: &mut Engine, repeats: u64) -> Result<Tape> {
    let options = engine.options().clone();
    let hp = AdamW { lr: 0.0, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0, step: 1 };
    let trained_tokens = (options.shape.tokens * options.micro_batches) as u64;
    let none = |_| Ok(None);
    engine.step(&StepInput { step: 0, hp, trained_tokens, batch: &none, stop: false })?;

    let per_group = engine.comm().ranks() * options.group;
    let host = full_batch(&options);
    let running = Cell::new(usize::MAX);
    let batch = |index: usize| {
        let group = index / per_group;
        if running.replace(group) != group && repeats > 1 && (1..GROUPS).contains(&group) {
            device.mark(group as u32 - 1);
        }
        Ok(Some(host.clone()))
    };
    let groups = options.micro_batches.div_ceil(per_group);
    device.record(groups * options.group.min(options.micro_batches) * engine.visits().len() * 96 + 4096);
    engine.step(&StepInput { step: 1, hp, trained_tokens, batch: &batch, stop: false })?;
    Ok(device.take_tape(repeats))
}
