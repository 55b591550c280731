//! The training loop: ten lines, and hooks for everything else (evaluation, saving, metrics).

use crate::checkpoint::{self, Check, Manifest, Param, Reader};
use crate::data::HostBatch;
use crate::durable;
use crate::engine::{Engine, StepInput};
use crate::error::{Error, Result};
use crate::export;
use crate::job::{Job, engine_options, input};
use crate::lr::lr_at;
use crate::progress::{PROGRESS_KEY, StepReport};
use crate::saver::{Save, SavePlace};
use crate::source::{CheckpointState, Sources};
use crate::store::WeightSource;
use std::io::Write;
use std::path::{Path, PathBuf};
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
    fn is_first(&self) -> bool {
        self.at.comm.rank() == 0
    }
}

/// Trains `job` on this rank. Collective.
pub fn train(job: &Job, at: Surroundings, hooks: &mut [Box<dyn Hook>]) -> Result<Summary> {
    let mut run = start(job, at)?;
    let total = job.schedule.total_steps();
    let begun = Instant::now();
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
    for hook in hooks.iter_mut() {
        hook.end(&mut run)?;
    }
    run.engine.sync()?;
    run.summary.secs = begun.elapsed().as_secs_f64();
    Ok(run.summary)
}

/// The usual hooks: evaluation, saving, metrics, and the result at the end.
pub fn hooks(job: &Job, write: bool) -> Vec<Box<dyn Hook>> {
    let mut hooks: Vec<Box<dyn Hook>> = vec![Box::new(Evaluate)];
    if write {
        // Metrics first: a step that a checkpoint holds is never missing there.
        hooks.push(Box::new(Metrics { file: None }));
        hooks.push(Box::new(Saving { pending: None, patience: Duration::from_secs(600) }));
        hooks.push(Box::new(Result_ { name: if job.model.lora.is_some() { "adapter" } else { "model" } }));
    }
    hooks
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
    let options = engine_options(&job.config, &job.batch);
    let mut engine = Engine::new(at.device.clone(), at.comm.clone(), job.model.model.clone(), options)?;
    let s = &job.sources;
    let sources = Sources { base: s.base.clone(), adapter: s.adapter.clone(), checkpoint: reader.clone(), seed: s.seed };
    let source: Arc<dyn WeightSource> = Arc::new(sources);
    engine.load(&source).map_err(as_input)?;
    let (mut step, mut moved, mut skipped) = (0, false, 0);
    if let Some(reader) = reader {
        let manifest = reader.manifest();
        (step, moved) = (manifest.step, manifest.optimizer_steps > 1);
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

/// Rank 0 chooses the checkpoint, the others open the same.
fn find_checkpoint(job: &Job, at: &Surroundings) -> Result<Option<Arc<Reader>>> {
    if !at.write {
        return Ok(None);
    }
    let folder = &job.config.checkpoint.folder;
    let key = "resume";
    if at.comm.rank() == 0 {
        let chosen = choose_checkpoint(job, folder);
        let word = match &chosen {
            Ok(Some(reader)) => format!("from {}", reader.dir().display()),
            Ok(None) => String::new(),
            Err(e) => format!("error {e}"),
        };
        at.store.set(key, word.as_bytes())?;
        return chosen.map(|c| c.map(Arc::new));
    }
    let patience = Duration::from_secs(job.config.comm.init_timeout_seconds);
    let word = at.store.get(key, patience)?;
    let word = String::from_utf8_lossy(&word).into_owned();
    match word.split_once(' ') {
        None => Ok(None),
        Some(("from", dir)) => Ok(Some(Arc::new(Reader::open(Path::new(dir)).map_err(input)?))),
        Some((_, why)) => Err(Error::Input(why.to_string())),
    }
}

fn choose_checkpoint(job: &Job, folder: &Path) -> Result<Option<Reader>> {
    std::fs::create_dir_all(folder).map_err(|source| Error::Io { path: folder.display().to_string(), source })?;
    for name in checkpoint::sweep(folder) {
        tracing::info!("removed {name}, left unfinished by an earlier run");
    }
    let reader = match job.config.checkpoint.resume.as_str() {
        "auto" => {
            let latest = checkpoint::latest(folder, Check::Full).map_err(input)?;
            for (dir, why) in &latest.skipped {
                tracing::warn!("checkpoint {} is not usable: {why}", dir.display());
            }
            latest.found
        }
        "none" => {
            let latest = checkpoint::latest(folder, Check::Sizes).map_err(input)?;
            if let Some(found) = latest.found {
                return Err(Error::Input(format!(
                    "{} holds a run already ({}): choose another checkpoint.folder, or checkpoint.resume = \"auto\" to continue it",
                    folder.display(),
                    found.dir().display()
                )));
            }
            None
        }
        path => Some(Reader::open(Path::new(path)).map_err(input)?),
    };
    if let Some(reader) = &reader {
        check_resumable(job, reader)?;
        tracing::info!("continuing after step {} from {}", reader.manifest().step, reader.dir().display());
    }
    Ok(reader)
}

/// Can `job` continue what its run folder holds? Called before ranks start; they check again, and every byte.
///
/// # Errors
/// [`Error::Input`]: the checkpoint is of another base or configuration.
pub fn check_resume(job: &Job) -> Result<()> {
    let reader = match job.config.checkpoint.resume.as_str() {
        "none" => None,
        "auto" => checkpoint::latest(&job.config.checkpoint.folder, Check::Sizes).map_err(input)?.found,
        path => Some(Reader::open(Path::new(path)).map_err(input)?),
    };
    reader.map_or(Ok(()), |reader| check_resumable(job, &reader))
}

fn check_resumable(job: &Job, reader: &Reader) -> Result<()> {
    let (dir, manifest) = (reader.dir().display(), reader.manifest());
    if let Some(what) = manifest.base.difference(&job.base) {
        return Err(Error::Input(format!("checkpoint {dir} is of another base model: {what}")));
    }
    let (now, then) = (job.resume_keys(), &manifest.extra["keys"]);
    let differing: Vec<String> = now
        .as_object()
        .into_iter()
        .flatten()
        .filter(|(k, v)| then.get(k) != Some(v) && (!k.starts_with("lora.") || then["trained"] == now["trained"]))
        .map(|(k, v)| format!("{k}: {} there, {v} here", then.get(k).unwrap_or(&serde_json::Value::Null)))
        .collect();
    if !differing.is_empty() {
        return Err(Error::Input(format!(
            "checkpoint {dir} is of another configuration:\n  {}\nset them back, or start anew in another checkpoint.folder",
            differing.join("\n  ")
        )));
    }
    Ok(())
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
        let word = run.at.store.get(&key(r), Duration::from_secs(run.job.config.comm.train_timeout_seconds))?;
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
    let tokens: u64 = (0..m).map(|i| run.job.schedule.batch(step, i).tokens).sum();
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

/// Loss on held-out data, every `eval.interval` steps and at the end.
struct Evaluate;

impl Evaluate {
    fn run(run: &mut Run) -> Result<Option<f64>> {
        let Some(eval) = &run.job.eval else { return Ok(None) };
        let count = eval.total_steps() as usize;
        let batch = |i: usize| -> Result<Option<HostBatch>> { Ok(Some(eval.batch(i as u64, 0))) };
        let (loss, _) = run.engine.evaluate(count, &batch)?;
        run.summary.eval_loss = Some(loss);
        Ok(Some(loss))
    }
}

impl Hook for Evaluate {
    fn after_step(&mut self, run: &mut Run, report: &mut StepReport) -> Result<()> {
        let interval = run.job.config.eval.interval;
        let last = run.step == run.job.schedule.total_steps() || run.summary.stopped;
        if last || interval > 0 && run.step.is_multiple_of(interval) {
            report.eval_loss = Evaluate::run(run)?;
        }
        Ok(())
    }

    fn end(&mut self, _: &mut Run) -> Result<()> {
        Ok(())
    }
}

/// Checkpoints every `checkpoint.interval` steps and at the end.
struct Saving {
    pending: Option<Save>,
    patience: Duration,
}

impl Saving {
    fn place(&self, run: &Run) -> Result<SavePlace> {
        // One nonce for all ranks and this start of the run: the store lives as long as the job.
        let key = "checkpoint-nonce";
        if run.is_first() && !run.at.store.check(&[key])? {
            let nanos = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_nanos());
            run.at.store.set(key, format!("{:x}-{nanos:x}", std::process::id()).as_bytes())?;
        }
        let nonce = run.at.store.get(key, Duration::from_secs(run.job.config.comm.init_timeout_seconds))?;
        Ok(SavePlace {
            folder: run.job.config.checkpoint.folder.clone(),
            nonce: String::from_utf8_lossy(&nonce).into_owned(),
            rank: run.at.comm.rank(),
            ranks: run.at.comm.ranks(),
            keep: run.job.config.checkpoint.keep_latest_k,
            patience: self.patience,
        })
    }

    fn save(&mut self, run: &mut Run) -> Result<()> {
        let place = self.place(run)?;
        let plan = run.engine.plan();
        let params = plan
            .units
            .iter()
            .flat_map(|u| &u.params)
            .filter(|p| p.trainable)
            .map(|p| Param { name: p.name.clone(), shape: p.shape.clone() })
            .collect();
        let keys = run.job.resume_keys();
        let manifest = Manifest {
            format: checkpoint::FORMAT,
            step: run.step,
            optimizer_steps: run.engine.updates(),
            ranks: place.ranks,
            files: Vec::new(),
            params,
            cursor: serde_json::json!({ "step": run.step }),
            seed: run.job.config.training.seed,
            base: run.job.base.clone(),
            config_hash: format!("{:08x?}", zrt_kernels::philox::key_of(0, &keys.to_string())),
            extra: serde_json::json!({ "keys": keys }),
        };
        let save = Save::start(place, manifest, run.at.store.clone())?;
        run.engine.export_state(&mut |kind, name, start, values| {
            save.push(kind, name, start, values);
            Ok(())
        })?;
        save.close();
        self.pending = Some(save);
        Ok(())
    }

    /// The outcome of a save in progress. A failed one in the middle of a run is a warning: the next may succeed.
    fn settle(&mut self, run: &mut Run) -> Result<()> {
        if let Some(save) = self.pending.take() {
            run.summary.checkpoint = Some(save.wait(&self.place(run)?)?);
        }
        Ok(())
    }
}

impl Hook for Saving {
    fn after_step(&mut self, run: &mut Run, _: &mut StepReport) -> Result<()> {
        let interval = run.job.config.checkpoint.interval;
        let last = run.step == run.job.schedule.total_steps() || run.summary.stopped;
        if !last && interval > 0 && run.step.is_multiple_of(interval) {
            if let Err(e) = self.settle(run)
                && run.is_first()
            {
                tracing::warn!("{e}; training goes on");
            }
            self.save(run)?;
        }
        Ok(())
    }

    fn end(&mut self, run: &mut Run) -> Result<()> {
        if let Err(e) = self.settle(run)
            && run.is_first()
        {
            tracing::warn!("{e}");
        }
        if run.step > run.summary.first_step {
            self.save(run)?;
            self.settle(run)?;
        }
        Ok(())
    }
}

/// One JSON object a step, to `metrics.jsonl`, the store and the log.
struct Metrics {
    file: Option<std::fs::File>,
}

impl Metrics {
    /// Opens the file; of an earlier start keeps the steps before this one's first.
    fn open(run: &Run) -> std::io::Result<std::fs::File> {
        let folder = &run.job.config.checkpoint.folder;
        std::fs::create_dir_all(folder)?;
        let path = folder.join("metrics.jsonl");
        let mut kept = String::new();
        if run.summary.first_step > 0
            && let Ok(text) = std::fs::read_to_string(&path)
        {
            for line in text.lines() {
                let step = serde_json::from_str::<serde_json::Value>(line).ok().and_then(|v| v["step"].as_u64());
                if step.is_some_and(|s| s <= run.summary.first_step) {
                    kept.push_str(line);
                    kept.push('\n');
                }
            }
        }
        durable::replace_file(&path, kept.as_bytes()).map_err(|e| e.source)?;
        std::fs::File::options().append(true).open(&path)
    }
}

impl Hook for Metrics {
    fn after_step(&mut self, run: &mut Run, report: &mut StepReport) -> Result<()> {
        if !run.is_first() {
            return Ok(());
        }
        let text = serde_json::to_string(report).map_err(|e| Error::Save(e.to_string()))?;
        if self.file.is_none() {
            match Metrics::open(run) {
                Ok(file) => self.file = Some(file),
                Err(e) => tracing::warn!("metrics.jsonl: {e}; training goes on"),
            }
        }
        if let Some(file) = &mut self.file
            && let Err(e) = writeln!(file, "{text}")
        {
            tracing::warn!("metrics.jsonl: {e}; training goes on");
        }
        let freq = run.job.config.metrics.log_freq.max(1);
        if report.step.is_multiple_of(freq) || report.step == report.steps {
            run.at.store.set(PROGRESS_KEY, text.as_bytes())?;
        }
        Ok(())
    }

    fn end(&mut self, _: &mut Run) -> Result<()> {
        Ok(())
    }
}

/// The adapter or the model, when the run is complete.
struct Result_ {
    name: &'static str,
}

impl Hook for Result_ {
    fn after_step(&mut self, _: &mut Run, _: &mut StepReport) -> Result<()> {
        Ok(())
    }

    fn end(&mut self, run: &mut Run) -> Result<()> {
        let dir = run.job.config.checkpoint.folder.join(self.name);
        match &run.job.model.lora {
            Some(plan) => {
                let name = run.job.config.model.path.clone();
                export::adapter(&mut run.engine, plan, &run.job.base, &name, &dir, run.moved)?;
            }
            None => export::model(&mut run.engine, &run.job.model, &dir)?,
        }
        run.summary.result = Some(dir);
        Ok(())
    }
}
