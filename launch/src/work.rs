//! The one place where the command calls the runtime: everything else here only starts and watches processes.

use crate::fault::Fault;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::signal::unix::{SignalKind, signal};
use zrt::Error;
use zrt::config::{Config, ModelInit, Resolved};
use zrt::data::Tokenizer;
use zrt::job::Job;
use zrt::merge::Options;
use zrt::progress::{RUN_END_KEY, RunEnd, Saved};
use zrt::rank::RankEnv;
use zrt::run::RunOptions;

/// What the command line adds to the configuration of a rank.
#[derive(Clone, Copy, Debug, Default)]
pub struct RankOptions {
    /// Write a timeline into the run folder.
    pub trace: bool,
}

/// Opens everything that a run reads and tokenizes its data into the cache, with a progress bar on a terminal: whatever is wrong
/// with the input shows once, before ranks start. The text is the report.
pub fn prepare(config: &Config, ranks: usize) -> Result<String, Fault> {
    let job = Job::open(config, ranks, true)?;
    zrt::resume::check_resume(&job)?;
    let mut report = format!("data: {}", job.schedule.set().report());
    if let Some(eval) = &job.eval {
        report += &format!("\nheld-out data: {}", eval.set().report());
    }
    report += &format!("\nplan: {}", crate::dry::line(&zrt::run::dry_run(config, ranks)?, config));
    Ok(report)
}

/// Runs one rank to its end, until the last step or SIGTERM. Errors are in the store already.
pub fn train_rank(config: Config, env: RankEnv, options: RankOptions) -> Result<(), Error> {
    let stop = Arc::new(AtomicBool::new(false));
    on_sigterm(stop.clone())?;
    let trace = options.trace.then(|| config.checkpoint.folder.join(format!("trace-rank-{}.json", env.rank)));
    let mut saved = Vec::new();
    let summary = zrt::run::run(&config, &env, &RunOptions { trace: trace.clone(), stop })?;
    if env.rank != 0 {
        return Ok(());
    }
    let kind = if config.lora.is_some() { "adapter" } else { "model" };
    saved.extend(summary.result.map(|path| Saved { what: kind.into(), path }));
    saved.extend(summary.checkpoint.map(|path| Saved { what: "checkpoint".into(), path }));
    saved.extend(trace.map(|path| Saved { what: "timeline".into(), path }));
    let end = RunEnd {
        first_step: summary.first_step,
        steps: summary.steps.len() as u64,
        loss: summary.steps.last().map(|s| s.loss),
        eval_loss: summary.eval_loss,
        tokens: summary.steps.iter().map(|s| s.tokens).sum(),
        skipped: summary.steps.last().map_or(0, |s| s.skipped),
        secs: summary.secs,
        stopped: summary.stopped,
        saved,
    };
    // The run is complete; a launcher that does not hear of it has a shorter summary, no more.
    let told =
        zrt::run::connect_store(&config, &env).and_then(|store| Ok(store.set(RUN_END_KEY, &serde_json::to_vec(&end).unwrap_or_default())?));
    if let Err(e) = told {
        tracing::warn!("the summary could not be passed on: {e}");
    }
    Ok(())
}

/// Sets `stop` when SIGTERM arrives. A thread of its own, since the rank's threads compute.
fn on_sigterm(stop: Arc<AtomicBool>) -> Result<(), Error> {
    let fail = |source| Error::Io { path: "SIGTERM".into(), source };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().map_err(fail)?;
    // Made here, so that no signal is missed between this call and the thread's first wait.
    let mut terminate = {
        let _in_runtime = runtime.enter();
        signal(SignalKind::terminate()).map_err(fail)?
    };
    let listen = move || {
        runtime.block_on(async {
            while terminate.recv().await.is_some() {
                stop.store(true, Ordering::Relaxed);
            }
        })
    };
    std::thread::Builder::new().name("signals".into()).spawn(listen).map(drop).map_err(fail)
}

/// The plan of a job as text.
pub fn dry_run(config: &Config, batch: Resolved) -> Result<String, Fault> {
    let plan = zrt::run::dry_run(config, batch.ranks)?;
    Ok(crate::dry::table(&plan, &batch, config))
}

/// Merges an adapter into its base; `run` is a run folder or an adapter folder. The text says what was written.
pub fn merge(run: &Path, out: &Path) -> Result<String, Fault> {
    let (base, adapter) = merge_inputs(run)?;
    let report = zrt::merge::merge(&base, &adapter, out, &Options::default()).map_err(Fault::user)?;
    let mut text = format!(
        "{}: {} of {} tensors merged, {:.1} MB in {} file{}",
        out.display(),
        report.merged,
        report.tensors,
        report.written.weight_bytes as f64 / 1e6,
        report.written.files.len(),
        if report.written.files.len() == 1 { "" } else { "s" }
    );
    text += &format!("\n  update rms {:.3e}, of which rounding to the base's type lost {:.3e}", report.update_rms, report.rounding_rms);
    if !report.base_checked {
        text += "\n  the adapter does not say which weights it was trained on: only names and shapes were compared";
    }
    Ok(text)
}

/// Base and adapter folders.
fn merge_inputs(run: &Path) -> Result<(PathBuf, PathBuf), Fault> {
    const ADAPTER: &str = "adapter_config.json";
    let saved = run.join("config.toml");
    if saved.is_file() {
        let config = Config::load(&saved, &[])?;
        if config.lora.is_none() {
            let model = run.join("model");
            return Err(Fault::user(format!(
                "{} trained all weights: there is nothing to merge, the model is {}",
                run.display(),
                model.display()
            )));
        }
        let adapter = run.join("adapter");
        if !adapter.join(ADAPTER).is_file() {
            return Err(Fault::user(format!(
                "{} has no {ADAPTER}: the run has not ended yet; start it again to continue it",
                adapter.display()
            )));
        }
        return Ok((model_folder(&config.model.path)?, adapter));
    }
    let read = |path: &Path| std::fs::read_to_string(path).ok().and_then(|t| serde_json::from_str::<serde_json::Value>(&t).ok());
    let Some(config) = read(&run.join(ADAPTER)) else {
        return Err(Fault::user(format!("{} is neither a run folder (config.toml) nor an adapter folder ({ADAPTER})", run.display())));
    };
    match config["base_model_name_or_path"].as_str() {
        Some(base) => Ok((model_folder(base)?, run.to_path_buf())),
        None => Err(Fault::user(format!("{} names no base_model_name_or_path", run.join(ADAPTER).display()))),
    }
}

fn model_folder(model: &str) -> Result<PathBuf, Fault> {
    zrt::hf::folder::resolve(model, None).map_err(Fault::user)
}

/// The first `rows` rows of training, as the trainer of one rank sees them.
pub fn data_show(config: &Config, rows: usize, color: bool) -> Result<String, Fault> {
    // Data can be looked at before there are weights.
    let mut config = config.clone();
    config.model.init = ModelInit::Random;
    let (config, _) = crate::choose::for_start(config, 1)?;
    let job = Job::open(&config, 1, true)?;
    // Data that is tokenized already needs no tokenizer; ids are shown then.
    let tokenizer = Tokenizer::load(&job.model.folder, config.data.chat_template.as_deref()).ok();
    Ok(zrt::data::show(&job.schedule, tokenizer.as_ref(), rows, color))
}
