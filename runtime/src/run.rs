//! A rank process: device, ranks, job, training; and the dry run, which does the same on the simulated device.

use crate::config::Config;
use crate::cores;
use crate::device;
use crate::engine::{Engine, StepInput};
use crate::error::{Error, Result};
use crate::hooks::hooks;
use crate::job::{Job, ModelPart, engine_options, input};
use crate::plan::{Placement, Segment};
use crate::progress::{ErrorReport, error_key};
use crate::rank::RankEnv;
use crate::trainer::{Summary, Surroundings, train};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;
use zrt_collectives::Communicator;
use zrt_collectives::local::LocalOptions;
use zrt_collectives::sim::SimComm;
use zrt_collectives::store::{MemoryStore, Store, TcpStore};
use zrt_kernels::cpu::{CpuDevice, CpuOptions, Mode};
use zrt_kernels::sim::SimDevice;
use zrt_kernels::{AdamW, Category, Device, MemoryUse, Place};

/// What the command line adds to the configuration.
#[derive(Clone, Default)]
pub struct RunOptions {
    /// Write a Chrome/Perfetto timeline of this rank's streams to this file.
    pub trace: Option<PathBuf>,
    /// Set from outside (a signal): save and end after the running step.
    pub stop: Arc<AtomicBool>,
}

/// Threads for operations on each of `ranks` ranks of this host.
pub fn threads(config: &Config, ranks: usize) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    if config.device.threads > 0 { config.device.threads } else { (cores / ranks.max(1)).max(1) }
}

/// The CPU device that `config` asks for, with `threads` threads.
pub fn cpu_device(config: &Config, threads: usize, trace: bool) -> Result<Arc<CpuDevice>> {
    let mode = match config.device.mode.as_str() {
        "inline" => Mode::Inline,
        "chaos" => Mode::Chaos { seed: config.training.seed },
        _ => Mode::Threaded,
    };
    let track = matches!(mode, Mode::Chaos { .. });
    Ok(CpuDevice::new(CpuOptions { threads, mode, track, trace })?)
}

/// Options of the local communicator.
pub fn local_options(config: &Config) -> LocalOptions {
    let secs = Duration::from_secs;
    LocalOptions {
        init_timeout: secs(config.comm.init_timeout_seconds),
        train_timeout: secs(config.comm.train_timeout_seconds),
        heartbeat_timeout: secs(config.comm.heartbeat_timeout_seconds),
        share_pages: config.comm.share_pages,
        ..LocalOptions::default()
    }
}

/// Connects to the job's store; a job of one process without a launcher has its own.
pub fn connect_store(config: &Config, env: &RankEnv) -> Result<Arc<dyn Store>> {
    let secret = match &env.job {
        Some(secret) => secret.clone(),
        None if env.world_size == 1 => return Ok(Arc::new(MemoryStore::new())),
        None => return Err(Error::Input("this job has no secret: start ranks with `zlaunch -n`, which sets ZLAUNCH_JOB".to_string())),
    };
    let address = format!("{}:{}", env.master_addr, env.master_port);
    let found = std::net::ToSocketAddrs::to_socket_addrs(&address).ok().and_then(|mut a| a.next());
    let address = found.ok_or_else(|| Error::Input(format!("MASTER_ADDR and MASTER_PORT: {address} is no address")))?;
    let deadline = Duration::from_secs(config.comm.init_timeout_seconds);
    Ok(Arc::new(TcpStore::connect(address, secret, deadline)?))
}

/// Trains as rank `env.rank`; reports a failure to the store before it returns it.
pub fn run(config: &Config, env: &RankEnv, options: &RunOptions) -> Result<Summary> {
    let store = connect_store(config, env)?;
    let outcome = run_with(config, env, options, store.clone()).map_err(|e| e.of_rank(env.rank));
    if let Err(e) = &outcome {
        let report = ErrorReport { rank: env.rank, culprit: e.culprit().filter(|c| *c != env.rank), text: e.to_string() };
        if let Ok(text) = serde_json::to_vec(&report) {
            let _ = store.set(&error_key(env.rank), &text);
        }
    }
    outcome
}

fn run_with(config: &Config, env: &RankEnv, options: &RunOptions, store: Arc<dyn Store>) -> Result<Summary> {
    // Data first: whatever is wrong with the input shows before ranks meet.
    let job = Job::open(config, env.world_size, false)?;
    // Counted before the rank is bound to its part of the cores; threads that start later inherit the binding.
    let threads = threads(config, env.local_world_size);
    if config.device.bind_threads
        && let Some(cores) = cores::bind(env.local_rank, env.local_world_size, threads)
    {
        tracing::info!("bound to cores {cores:?}");
    }
    let computes = device::open(config, env.local_rank, env.local_world_size, options.trace.is_some())?;
    let comm = computes.join(config, store.clone(), env.rank, env.world_size)?;
    let at = Surroundings { device: computes.device(), comm: comm.clone(), store, stop: options.stop.clone(), write: true };
    let mut hooks = hooks(&job, true);
    hooks.extend(computes.notes());
    let outcome = train(&job, at, &mut hooks).map_err(|e| e.of_rank(env.rank));
    if let Err(e) = &outcome {
        comm.abort(&e.to_string());
    }
    if let Some(path) = &options.trace {
        let events = computes.trace_events();
        zrt_kernels::cpu::trace::write_chrome(path, env.rank as u32, &events)
            .map_err(|source| Error::Io { path: path.display().to_string(), source })?;
    }
    outcome
}

/// What a dry run found.
#[derive(Clone, Debug)]
pub struct DryRun {
    /// Ranks.
    pub ranks: usize,
    /// All and trained parameters.
    pub parameters: (usize, usize),
    /// Per unit: name and segments.
    pub units: Vec<(String, Vec<Segment>)>,
    /// Bytes of this rank by place and category; shared pages count whole.
    pub memory: Vec<(Place, Category, MemoryUse)>,
    /// Of these, bytes of pages that all ranks of the host share.
    pub shared_bytes: usize,
    /// Bytes of a rank: its own and its shard of shared pages.
    pub rank_bytes: usize,
    /// Bytes of the host: all ranks, shared pages once.
    pub host_bytes: usize,
    /// Collectives of one step, and bytes moved by a rank.
    pub collectives: zrt_collectives::Counts,
    /// Operations of one step.
    pub ops: zrt_kernels::sim::SimCounts,
    /// Micro-batches of a step.
    pub micro_batches: usize,
    /// Row of the placement table.
    pub placement: Placement,
}

/// Runs one step of `config` on the simulated device as rank 0 of `ranks`; needs `config.json`, no weights and no data.
pub fn dry_run(config: &Config, ranks: usize) -> Result<DryRun> {
    let batch = config.resolve(ranks).map_err(input)?;
    let part = ModelPart::open(config)?;
    let options = engine_options(config, &batch)?;
    let device = device::simulated(config, ranks)?;
    let _held = device::simulated_comm(config, &device, ranks)?;
    simulate(part.model.clone(), options, ranks, device)
}

/// The same for any model and options, on a fresh simulated device.
pub fn simulate(
    model: Arc<dyn crate::model::Model>,
    options: crate::engine::EngineOptions,
    ranks: usize,
    device: Arc<SimDevice>,
) -> Result<DryRun> {
    let comm = Arc::new(SimComm::new(ranks).with_shared_pages(options.share_pages));
    let stage = options.stage;
    let micro_batches = options.micro_batches;
    let n = options.shape.tokens;
    let mut engine = Engine::new(device.clone(), comm.clone(), model, options)?;
    device.reset_counts();
    let before = comm.counts();
    let mut cu_seqlens = vec![n as i32; n + 1];
    cu_seqlens[0] = 0;
    let host = crate::data::HostBatch {
        ids: vec![0; n],
        labels: vec![0; n],
        positions: vec![0; n],
        cu_seqlens,
        documents: 1,
        trained: n as u64,
        tokens: n as u64,
        samples: Vec::new(),
    };
    let hp = AdamW { lr: 0.0, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0, step: 1 };
    let batch = |_| Ok(Some(host.clone()));
    engine.step(&StepInput { step: 0, hp, trained_tokens: (n * micro_batches) as u64, batch: &batch, stop: false })?;
    let after = comm.counts();
    let plan = engine.plan();
    let units = plan
        .units
        .iter()
        .enumerate()
        .map(|(u, spec)| {
            let segments = plan.of_unit[u].iter().map(|&s| &plan.segments[s]);
            (spec.name.clone(), segments.cloned().collect())
        })
        .collect();
    let memory = device.memory();
    let total: usize = memory.iter().map(|(_, _, u)| u.peak_bytes).sum();
    let shared_bytes = engine.shared_bytes();
    let own = total - shared_bytes;
    Ok(DryRun {
        ranks,
        parameters: plan.parameters(),
        units,
        memory,
        shared_bytes,
        rank_bytes: own + shared_bytes / ranks,
        host_bytes: own * ranks + shared_bytes,
        collectives: zrt_collectives::Counts {
            all_gather: after.all_gather - before.all_gather,
            reduce_scatter: after.reduce_scatter - before.reduce_scatter,
            all_reduce: after.all_reduce - before.all_reduce,
            all_to_all: after.all_to_all - before.all_to_all,
            broadcast: after.broadcast - before.broadcast,
            barrier: after.barrier - before.barrier,
            bytes: after.bytes - before.bytes,
        },
        ops: device.counts(),
        micro_batches,
        placement: Placement::of(stage),
    })
}
