//! What happens around steps: evaluation, checkpoints, metrics, and the result at the end.

use crate::checkpoint::{self, Manifest, Param};
use crate::data::HostBatch;
use crate::durable;
use crate::error::{Error, Result};
use crate::export;
use crate::job::Job;
use crate::progress::{PROGRESS_KEY, StepReport};
use crate::saver::{Save, SavePlace};
use crate::trainer::{Hook, Run, wait_word};
use std::io::Write;
use std::time::Duration;

/// Longest wait for the file of another rank after one's own is written.
const PATIENCE: Duration = Duration::from_secs(600);

/// The usual hooks: evaluation, saving, metrics, and the result at the end.
pub fn hooks(job: &Job, write: bool) -> Vec<Box<dyn Hook>> {
    let mut hooks: Vec<Box<dyn Hook>> = vec![Box::new(Evaluate)];
    if write {
        // Metrics first: a step that a checkpoint holds is never missing there.
        hooks.push(Box::new(Metrics { file: None }));
        hooks.push(Box::new(Outcome { name: if job.model.lora.is_some() { "adapter" } else { "model" } }));
        hooks.push(Box::new(Saving { pending: None, patience: PATIENCE }));
    }
    hooks
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
            extra: serde_json::json!({ "keys": keys, "moved": run.moved }),
        };
        let save = Save::start(place, manifest, run.at.store.clone())?;
        run.engine.export_state(&mut |kind, name, start, values| {
            save.push(kind, name, start, values);
            Ok(())
        })?;
        save.close();
        // A rank whose disk is slower than its queue is long may come late: wait for it here, not in the next collective.
        let key = |rank: usize| format!("queued/{}/{rank}", run.step);
        run.at.store.set(&key(run.at.comm.rank()), b"")?;
        for rank in 0..run.at.comm.ranks() {
            wait_word(&run.at, &key(rank))?;
        }
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
            // Nobody may be watching: the launcher can be stopped or gone, and then says so itself.
            if let Err(e) = run.at.store.set(PROGRESS_KEY, text.as_bytes()) {
                tracing::warn!("progress: {e}; training goes on");
            }
        }
        Ok(())
    }

    fn end(&mut self, _: &mut Run) -> Result<()> {
        Ok(())
    }
}

/// The adapter or the model, at the end.
struct Outcome {
    name: &'static str,
}

impl Hook for Outcome {
    fn after_step(&mut self, _: &mut Run, _: &mut StepReport) -> Result<()> {
        Ok(())
    }

    fn end(&mut self, run: &mut Run) -> Result<()> {
        let dir = run.job.config.checkpoint.folder.join(self.name);
        let outcome = match &run.job.model.lora {
            Some(plan) => {
                let name = run.job.config.model.path.clone();
                export::adapter(&mut run.engine, plan, &run.job.base, &name, &dir, run.moved)
            }
            None => {
                let (at, first, step) = (run.at.clone(), run.is_first(), run.step);
                let gate = move |unit: usize| -> Result<()> {
                    let key = format!("export/{step}/{unit}");
                    if first {
                        at.store.set(&key, b"")?;
                    } else {
                        wait_word(&at, &key)?;
                    }
                    Ok(())
                };
                export::model(&mut run.engine, &run.job.model, &dir, &gate)
            }
        };
        // Rank 0 may write for long after the others opened their last unit: they wait for its word, not in a collective.
        let key = format!("outcome/{}", run.step);
        if run.is_first() {
            let word = outcome.as_ref().err().map_or(String::new(), |e| e.to_string());
            run.at.store.set(&key, word.as_bytes())?;
            outcome?;
        } else {
            outcome?;
            let word = wait_word(&run.at, &key)?;
            if !word.is_empty() {
                return Err(Error::Save(String::from_utf8_lossy(&word).into_owned()));
            }
        }
        run.summary.result = Some(dir);
        Ok(())
    }
}
