//! The training loop: ten lines, and hooks ([`crate::hooks`]) for everything else.

use crate::engine::{Engine, StepInput};
use crate::error::{Error, Result};
use crate::job::{Job, engine_options};
use crate::lr::lr_at;
use crate::progress::StepReport;
use crate::resume::find_checkpoint;
use crate::source::{CheckpointState, Sources};
use crate::store::WeightSource;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use zrt_collectives::Comm;
use zrt_collectives::store::Store;
use zrt_kernels::{AdamW, Device};

/// A rank's surroundings.
#[derive(Clone)]
pub struct Surroundings {
    /// The device.
    pub device: Arc<dyn Device>,
    /// The other ranks.
    pub comm: Comm,
    /// The rendezvous store.
    pub store: Arc<dyn Store>,
    /// Set from outside (a signal): save and end after the running step.
    pub stop: Arc<AtomicBool>,
    /// Write `metrics.jsonl`, checkpoints and the result. Off: only train (tests, benches).
    pub write: bool,
}

/// What a run did.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Summary {
    /// One report per step of this start of the run.
    pub steps: Vec<StepReport>,
    /// The step it started from.
    pub first_step: u64,
    /// Ended by request before the last step.
    pub stopped: bool,
    /// Seconds of training.
    pub secs: f64,
    /// Final loss on held-out data.
    pub eval_loss: Option<f64>,
    /// The adapter or model.
    pub result: Option<PathBuf>,
    /// The last checkpoint.
    pub checkpoint: Option<PathBuf>,
}

/// Longest wait for another rank that is alive but has long work of its own (a disk, a search).
const LONG_WORK: Duration = Duration::from_secs(3600);

/// Waits for `key` in the store while all ranks are well: for work that takes a rank as long as it takes, outside collectives.
pub fn wait_word(at: &Surroundings, key: &str) -> Result<Vec<u8>> {
    let until = Instant::now() + LONG_WORK;
    loop {
        let found = at.store.get(key, Duration::from_secs(2));
        if found.is_ok() || Instant::now() >= until {
            return Ok(found?);
        }
        if let zrt_collectives::Health::Lost(lost) = at.comm.health() {
            return Err(lost.into());
        }
    }
}

/// Something that happens around steps. All ranks have the same hooks, so a hook may use collectives.
pub trait Hook {
    /// After a step; may add to its report.
    fn after_step(&mut self, run: &mut Run, report: &mut StepReport) -> Result<()>;
    /// After the last step.
    fn end(&mut self, run: &mut Run) -> Result<()>;
}

/// A run in progress, as hooks see it.
pub struct Run<'a> {
    /// The job.
    pub job: &'a Job,
    /// The engine.
    pub engine: Engine,
    /// Device, ranks, store.
    pub at: Surroundings,
    /// Steps done, this start's first step included.
    pub step: u64,
    /// Some update with a positive rate and a non-zero gradient was applied.
    pub moved: bool,
    /// Steps skipped so far.
    pub skipped: u64,
    /// What is known of the outcome.
    pub summary: Summary,
}

impl Run<'_> {
    /// True on the rank that writes what all have in common.
    pub fn is_first(&self) -> bool {
        self.at.comm.rank() == 0
    }
}

/// Trains `job` on this rank. Collective.
pub fn train(job: &Job, at: Surroundings, hooks: &mut [Box<dyn Hook>]) -> Result<Summary> {
    let mut run = start(job, at)?;
    let total = job.schedule.total_steps();
    let begun = Instant::now();
    // The time of this line tells how long a start takes, see benches/compare/run.sh.
    tracing::info!("training begins at step {} of {total}", run.step + 1);
    let mut in_a_row = 0;
    while run.step < total && !run.summary.stopped {
        let step_begun = Instant::now();
        let step = run.step;
        let lr = lr_at(&job.config.lr_scheduler, job.config.optimizer.lr, step, total);
        let batch = |i: usize| job.micro_batch(step, i);
        let step_input = StepInput {
            step,
            hp: adamw(job, lr),
            trained_tokens: job.schedule.trained_tokens(step),
            batch: &batch,
            stop: run.at.stop.load(Ordering::Relaxed),
        };
        let out = run.engine.step(&step_input)?;
        if out.applied {
            in_a_row = 0;
            run.moved |= lr > 0.0 && out.grad_norm > 0.0;
        } else {
            in_a_row += 1;
            run.skipped += 1;
            name_nonfinite(&mut run, &step_input, in_a_row)?;
        }
        run.step += 1;
        run.summary.stopped = out.stop && run.step < total;
        let mut report = report(&run, step_begun.elapsed(), &out, lr, total);
        for hook in hooks.iter_mut() {
            hook.after_step(&mut run, &mut report)?;
        }
        run.summary.steps.push(report);
    }
    // All of them, whatever one of them meets: a full disk for the checkpoint may have room for the adapter.
    let mut ended = Ok(());
    for hook in hooks.iter_mut() {
        ended = ended.and(hook.end(&mut run));
    }
    ended?;
    run.engine.sync()?;
    run.summary.secs = begun.elapsed().as_secs_f64();
    Ok(run.summary)
}

fn adamw(job: &Job, lr: f64) -> AdamW {
    let o = &job.config.optimizer;
    AdamW {
        lr: lr as f32,
        beta1: o.betas[0] as f32,
        beta2: o.betas[1] as f32,
        eps: o.eps as f32,
        weight_decay: o.weight_decay as f32,
        step: 0,
    }
}

/// Engine, weights, and the state of the checkpoint to continue, if there is one.
fn start<'a>(job: &'a Job, at: Surroundings) -> Result<Run<'a>> {
    let reader = find_checkpoint(job, &at)?;
    let options = engine_options(&job.config, &job.batch)?;
    let mut engine = Engine::new(at.device.clone(), at.comm.clone(), job.model.model.clone(), options)?;
    let s = &job.sources;
    let sources =
        Sources { base: s.base.clone(), adapter: s.adapter.clone(), checkpoint: reader.clone(), seed: s.seed, ..Sources::default() };
    let source: Arc<dyn WeightSource> = Arc::new(sources);
    engine.load(&source).map_err(as_input)?;
    let (mut step, mut moved, mut skipped) = (0, false, 0);
    if let Some(reader) = reader {
        let manifest = reader.manifest();
        (step, moved) = (manifest.step, manifest.extra["moved"] == true);
        skipped = manifest.step - manifest.optimizer_steps.min(manifest.step);
        engine.import_state(manifest.optimizer_steps, Arc::new(CheckpointState(reader.clone())))?;
    }
    let summary = Summary { first_step: step, ..Summary::default() };
    let run = Run { job, engine, at, step, moved, skipped, summary };
    Ok(run)
}

/// Reading weights fails when files are wrong: the user's to mend.
fn as_input(e: Error) -> Error {
    match e {
        Error::Device { source: zrt_kernels::Error::Task { why, .. }, .. } => Error::Input(format!("loading the model: {why}")),
        other => other,
    }
}

/// A step was skipped: name the first tensor that is not finite on each rank; give up after too many in a row.
fn name_nonfinite(run: &mut Run, step_input: &StepInput, in_a_row: u64) -> Result<()> {
    let found = run.engine.find_nonfinite(step_input)?;
    let (rank, step) = (run.at.comm.rank(), step_input.step);
    let key = |r: usize| format!("nonfinite/{step}/{r}");
    let word = found.map_or(String::new(), |(name, index)| {
        let samples = run.job.schedule.batch(step, index).samples;
        let set = run.job.schedule.set();
        let names: Vec<String> = samples.iter().take(4).map(|s| set.name(set.document(s.document).source)).collect();
        format!("rank {rank}: {name} in micro-batch {index} ({})", names.join(", "))
    });
    run.at.store.set(&key(rank), word.as_bytes())?;
    let mut words = Vec::new();
    for r in 0..run.at.comm.ranks() {
        let word = wait_word(&run.at, &key(r))?;
        words.push(String::from_utf8_lossy(&word).into_owned());
    }
    words.retain(|w| !w.is_empty());
    let what = if words.is_empty() { "no tensor found not finite when run again".into() } else { words.join("; ") };
    let text = format!("step {}: gradient not finite, no weight was changed; first: {what}", step + 1);
    if rank == 0 {
        tracing::warn!("{text}");
    }
    let limit = run.job.config.training.max_skipped_steps.max(1);
    if in_a_row >= limit {
        return Err(Error::NotFinite(format!(
            "{text}; {in_a_row} such steps in a row (training.max_skipped_steps), giving up: lower optimizer.lr or check the data"
        )));
    }
    Ok(())
}

fn report(run: &Run, took: Duration, out: &crate::engine::StepOutput, lr: f64, steps: u64) -> StepReport {
    let secs = took.as_secs_f64().max(1e-9);
    let step = run.step - 1;
    let (m, ranks) = (run.job.batch.micro_batches, run.at.comm.ranks());
    // Only the first rank reports; the count takes a look at every row.
    let tokens: u64 = if run.is_first() { (0..m).map(|i| run.job.schedule.batch(step, i).tokens).sum() } else { 0 };
    let info = run.at.device.info();
    let peak = match run.engine.options().shape.compute {
        zrt_kernels::DType::BF16 => info.peak_flops_bf16,
        _ => info.peak_flops_f32,
    };
    let rate = run.engine.flops_per_micro_batch() * m as f64 / ranks as f64 / secs;
    StepReport {
        step: run.step,
        steps,
        loss: out.loss,
        grad_norm: f64::from(out.grad_norm),
        lr,
        tokens,
        trained_tokens: run.job.schedule.trained_tokens(step),
        tokens_per_s: tokens as f64 / secs,
        share_of_peak: if peak > 0.0 { rate / peak } else { 0.0 },
        memory_bytes: run.at.device.memory().iter().map(|(_, _, u)| u.bytes as u64).sum(),
        skipped: run.skipped,
        secs,
        eval_loss: None,
    }
}
