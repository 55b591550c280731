//! How fast does a configuration train, and a model load? Measured with threads as ranks, beside what the machine needs for the bytes
//! alone. `zlaunch bench` prints what is measured here.

use crate::config::Config;
use crate::engine::{Engine, EngineOptions};
use crate::error::{Error, Result};
use crate::hf::{ArchConfig, Weights};
use crate::job::{Job, input};
use crate::model::BatchShape;
use crate::model::decoder::Decoder;
use crate::progress::StepReport;
use crate::run::{cpu_device, local_options, threads};
use crate::source::Sources;
use crate::store::WeightSource;
use crate::trainer::{Hook, Run, Surroundings, train};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Instant;
use zrt_collectives::Comm;
use zrt_collectives::local::{LocalGroup, LocalOptions};
use zrt_collectives::store::{MemoryStore, Store};
use zrt_kernels::cpu::trace::TraceKind;
use zrt_kernels::cpu::{CpuDevice, CpuOptions};
use zrt_kernels::{Category, DType, Device, Place};

/// Time of one operation in a step of rank 0.
#[derive(Clone, Debug, PartialEq)]
pub struct OpTime {
    /// The stream it ran on.
    pub stream: String,
    /// Its name, of a collective without what it was for.
    pub op: String,
    /// Seconds a step, mean over the measured steps; of a collective, waiting for other ranks included.
    pub secs: f64,
    /// Calls a step.
    pub calls: f64,
}

/// What a few steps of a configuration took.
#[derive(Clone, Debug, Default)]
pub struct StepRates {
    /// Every step of rank 0, the first of which starts cold.
    pub steps: Vec<StepReport>,
    /// Floating-point operations of matmuls of all ranks in a step.
    pub flops: f64,
    /// Rows times their length of a step over all ranks: tokens with padding.
    pub slots: usize,
    /// By time, longest first; of the steps after the first.
    pub ops: Vec<OpTime>,
}

impl StepRates {
    /// Median seconds of the steps after the first (of all, where there is one).
    pub fn median_secs(&self) -> f64 {
        let warm = if self.steps.len() > 1 { &self.steps[1..] } else { &self.steps[..] };
        let mut secs: Vec<f64> = warm.iter().map(|s| s.secs).collect();
        secs.sort_by(f64::total_cmp);
        secs.get(secs.len() / 2).copied().unwrap_or(0.0)
    }
}

/// Collects rank 0's timeline step by step.
struct Watch {
    device: Arc<CpuDevice>,
    out: Arc<Mutex<Watched>>,
}

#[derive(Default)]
struct Watched {
    flops: f64,
    /// (seconds, calls) by (stream, operation).
    ops: BTreeMap<(String, String), (f64, usize)>,
}

impl Hook for Watch {
    fn after_step(&mut self, run: &mut Run, report: &mut StepReport) -> Result<()> {
        let events = self.device.trace_events();
        let mut out = self.out.lock().unwrap_or_else(|e| e.into_inner());
        out.flops = run.engine.flops_per_micro_batch() * run.job.batch.micro_batches as f64;
        if report.step == 1 {
            return Ok(());
        }
        for e in events.iter().filter(|e| e.kind == TraceKind::Task) {
            let op = e.name.split(' ').next().unwrap_or_default().to_string();
            let entry = out.ops.entry((e.stream.to_string(), op)).or_default();
            entry.0 += e.end_ns.saturating_sub(e.start_ns) as f64 * 1e-9;
            entry.1 += 1;
        }
        Ok(())
    }

    fn end(&mut self, _run: &mut Run) -> Result<()> {
        Ok(())
    }
}

/// Runs `one(comm)` on a thread per rank; the results in the order of ranks, or the first error.
fn on_ranks<T: Send>(ranks: usize, options: LocalOptions, one: impl Fn(Comm) -> Result<T> + Sync) -> Result<Vec<T>> {
    let comms = LocalGroup::threads(ranks, options)?;
    std::thread::scope(|scope| {
        let run = |comm: Comm| {
            let result = one(comm.clone());
            if let Err(e) = &result {
                comm.abort(&e.to_string());
            }
            result
        };
        let threads: Vec<_> = comms.into_iter().map(|comm| scope.spawn(move || run(comm))).collect();
        threads.into_iter().map(|t| t.join().unwrap_or_else(|_| Err(Error::Model("a rank panicked".into())))).collect()
    })
}

/// Trains `config` on `ranks` threads as ranks for its number of steps, writing nothing.
///
/// # Errors
/// Whatever stops the job, of the first rank that failed.
pub fn steps(config: &Config, ranks: usize) -> Result<StepRates> {
    let job = Job::open(config, ranks, false)?;
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let watched: Arc<Mutex<Watched>> = Arc::default();
    let one = |comm: Comm| {
        let first = comm.rank() == 0;
        let device = cpu_device(config, threads(config, ranks), first)?;
        let mut hooks: Vec<Box<dyn Hook>> = Vec::new();
        if first {
            hooks.push(Box::new(Watch { device: device.clone(), out: watched.clone() }));
        }
        let at = Surroundings { device, comm, store: store.clone(), stop: Arc::new(AtomicBool::new(false)), write: false };
        Ok(train(&job, at, &mut hooks)?.steps)
    };
    let mut reports = on_ranks(ranks, local_options(config), one)?;
    let steps = if reports.is_empty() { Vec::new() } else { reports.swap_remove(0) };
    let found = std::mem::take(&mut *watched.lock().unwrap_or_else(|e| e.into_inner()));
    let count = steps.len().saturating_sub(1).max(1) as f64;
    let op = |((stream, op), (secs, calls))| OpTime { stream, op, secs: secs / count, calls: calls as f64 / count };
    let mut ops: Vec<OpTime> = found.ops.into_iter().map(op).collect();
    ops.sort_by(|a, b| b.secs.total_cmp(&a.secs));
    Ok(StepRates { steps, flops: found.flops, slots: job.batch.global_batch_size * config.training.seq_len, ops })
}

/// Seconds that loading a model took, and the machine for the bytes alone. Medians of the rounds.
#[derive(Clone, Copy, Debug, Default)]
pub struct LoadRates {
    /// Bytes of the files.
    pub bytes: u64,
    /// All weights into their homes, the files not in the page cache.
    pub cold: f64,
    /// `cat FILES > /dev/null` likewise.
    pub cat_cold: f64,
    /// All weights into their homes, the files in the page cache.
    pub warm: f64,
    /// `cat` likewise.
    pub cat_warm: f64,
    /// As many bytes copied from memory by all ranks at once into memory of the same kind that was never touched.
    pub memcpy_new: f64,
    /// The same again, into memory in use.
    pub memcpy_used: f64,
}

/// Loads the frozen weights of the model in `folder` as `dtype` at `zero.stage` 3 on `ranks` threads as ranks, `rounds` times each way.
///
/// # Errors
/// No model in the folder, not enough memory, or no `cat`.
pub fn load(folder: &Path, ranks: usize, dtype: DType, share_pages: bool, rounds: usize) -> Result<LoadRates> {
    let files: Vec<_> = Weights::open(folder).map_err(input)?.files().map(Path::to_path_buf).collect();
    let mut bytes = Vec::new();
    for path in &files {
        File::open(path).and_then(|mut f| f.read_to_end(&mut bytes)).map_err(|e| io(path, e))?;
    }
    let bytes: Arc<[u8]> = bytes.into();
    let mut all: [Vec<f64>; 6] = Default::default();
    for _ in 0..rounds.max(1) {
        forget(&files)?;
        all[0].push(load_once(folder, ranks, dtype, share_pages)?);
        all[1].push(cold_read_secs(&files)?);
        all[2].push(load_once(folder, ranks, dtype, share_pages)?);
        all[3].push(cat(&files)?);
        let (new, used) = memcpy(&bytes, ranks, share_pages)?;
        all[4].push(new);
        all[5].push(used);
    }
    let [cold, cat_cold, warm, cat_warm, memcpy_new, memcpy_used] = all.map(|mut v| {
        v.sort_by(f64::total_cmp);
        v[v.len() / 2]
    });
    Ok(LoadRates { bytes: bytes.len() as u64, cold, cat_cold, warm, cat_warm, memcpy_new, memcpy_used })
}

fn io(path: &Path, source: std::io::Error) -> Error {
    Error::Io { path: path.display().to_string(), source }
}

/// Tells the kernel to drop the files from its cache.
fn forget(files: &[PathBuf]) -> Result<()> {
    for path in files {
        let file = File::open(path).map_err(|e| io(path, e))?;
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).map_err(|e| io(path, e.into()))?;
    }
    Ok(())
}

/// Seconds of `cat FILES > /dev/null`.
fn cat(files: &[PathBuf]) -> Result<f64> {
    let begun = Instant::now();
    let status =
        Command::new("cat").args(files).stdin(Stdio::null()).stdout(Stdio::null()).status().map_err(|e| io(Path::new("cat"), e))?;
    if status.success() { Ok(begun.elapsed().as_secs_f64()) } else { Err(Error::Input(format!("cat failed: {status}"))) }
}

/// Seconds in which `files` are read that the kernel was told to drop from its cache; the disk may have one of its own.
///
/// # Errors
/// A file that cannot be read, or no `cat`.
pub fn cold_read_secs(files: &[PathBuf]) -> Result<f64> {
    forget(files)?;
    cat(files)
}

fn local(share_pages: bool) -> LocalOptions {
    LocalOptions { share_pages, ..LocalOptions::default() }
}

/// Seconds of the slowest rank from the common start of loading to its end.
fn load_once(folder: &Path, ranks: usize, dtype: DType, share_pages: bool) -> Result<f64> {
    let arch = ArchConfig::load(folder).map_err(input)?;
    let weights = Arc::new(Weights::open(folder).map_err(input)?);
    let one = |comm: Comm| {
        // Adapters freeze the base; here there are none, so that only files are read.
        let model = Decoder::new(arch.clone(), 16, Some(&[]), 0.0)?;
        let shape = BatchShape { tokens: 16, seq_len: 16, compute: dtype };
        let options = EngineOptions { stage: 3, share_pages, ..EngineOptions::new(shape, ranks) };
        let device = CpuDevice::new(CpuOptions { threads: 1, ..CpuOptions::default() })?;
        let stream = device.stream("start")?;
        let mut engine = Engine::new(device, comm.clone(), Arc::new(model), options)?;
        let source: Arc<dyn WeightSource> = Arc::new(Sources { base: Some(weights.clone()), ..Sources::default() });
        comm.barrier("start", &*stream)?;
        stream.sync()?;
        let begun = Instant::now();
        engine.load(&source)?;
        Ok(begun.elapsed().as_secs_f64())
    };
    Ok(on_ranks(ranks, local(share_pages), one)?.into_iter().fold(0.0, f64::max))
}

/// Seconds in which all ranks together copy `from` into memory of the kind that holds weights: new memory, then the same again.
fn memcpy(from: &Arc<[u8]>, ranks: usize, share_pages: bool) -> Result<(f64, f64)> {
    let part = from.len() / ranks;
    let one = |comm: Comm| {
        let device = CpuDevice::new(CpuOptions { threads: 1, ..CpuOptions::default() })?;
        let stream = device.stream("copy")?;
        let pages = if share_pages { comm.share_pages("memcpy", part * ranks)? } else { None };
        let mine = match pages {
            Some(pages) => pages.all(DType::U8)?.slice(comm.rank() * part, part)?,
            None => device.alloc("memcpy", part, Place::Device, Category::Weights)?.all(DType::U8)?,
        };
        let start = comm.rank() * part;
        let mut secs = [0.0; 2];
        for secs in &mut secs {
            comm.barrier("start", &*stream)?;
            stream.sync()?;
            let begun = Instant::now();
            let from = from.clone();
            stream.write(
                &mine,
                "memcpy",
                Box::new(move |dst| {
                    dst.copy_from_slice(&from[start..start + dst.len()]);
                    Ok(())
                }),
            )?;
            stream.sync()?;
            *secs = begun.elapsed().as_secs_f64();
        }
        Ok(secs)
    };
    let slowest = on_ranks(ranks, local(share_pages), one)?;
    Ok(slowest.iter().fold((0.0, 0.0), |(a, b), s| (s[0].max(a), s[1].max(b))))
}
