//! The one place where the command calls the runtime: everything else here only starts and watches processes.

use crate::fault::Fault;
use std::path::Path;
use std::sync::Arc;
use zrt::config::{Config, Resolved};
use zrt::data::{Length, PrepareSpec, Schedule, ScheduleSpec, Tokenizer};
use zrt::rank::RankEnv;

/// What the command line adds to the configuration of a rank.
#[derive(Clone, Copy, Debug, Default)]
pub struct RankOptions {
    /// Write a timeline into the run folder.
    pub trace: bool,
}

fn not_linked(what: &str) -> Fault {
    Fault::other(format!("{what} is not part of this build"))
}

/// Runs one rank to its end. An error becomes the rank's last words and its report in the store.
pub fn train_rank(_config: Config, _env: RankEnv, RankOptions { trace: _ }: RankOptions) -> Result<(), zrt::Error> {
    Err(zrt::Error::Input("the trainer is not part of this build".into()))
}

/// The plan of a job as text.
pub fn dry_run(_config: &Config, _batch: Resolved) -> Result<String, Fault> {
    Err(not_linked("the planner"))
}

/// Merges the adapter of `run` into its base; the text says what was written.
pub fn merge(_run: &Path, _out: &Path) -> Result<String, Fault> {
    Err(not_linked("merging"))
}

fn model_folder(config: &Config) -> Result<std::path::PathBuf, Fault> {
    zrt::hf::folder::resolve(&config.model.path, None).map_err(Fault::user)
}

/// Tokenizes all data into the cache, so that ranks find it there; with a progress bar on a terminal. The text is the report.
pub fn prepare(config: &Config) -> Result<String, Fault> {
    let model = model_folder(config)?;
    let mut reports = Vec::new();
    for (name, datasets) in [("data", &config.dataset), ("held-out data", &config.eval_dataset)] {
        if !datasets.is_empty() {
            let set = zrt::data::prepare(&PrepareSpec::new(config, datasets, &model), true).map_err(Fault::user)?;
            reports.push(format!("{name}: {}", set.report()));
        }
    }
    Ok(reports.join("\n"))
}

/// The first `rows` rows of training, as the trainer of one rank sees them.
pub fn data_show(config: &Config, rows: usize, color: bool) -> Result<String, Fault> {
    let batch = config.resolve(1)?;
    let model = model_folder(config)?;
    let set = zrt::data::prepare(&PrepareSpec::new(config, &config.dataset, &model), true).map_err(Fault::user)?;
    let schedule = Schedule::new(Arc::new(set), schedule_spec(config, batch)).map_err(Fault::user)?;
    let tokenizer = Tokenizer::load(&model, config.data.chat_template.as_deref()).ok();
    Ok(zrt::data::show(&schedule, tokenizer.as_ref(), rows, color))
}

fn schedule_spec(config: &Config, batch: Resolved) -> ScheduleSpec {
    let t = &config.training;
    ScheduleSpec {
        seq_len: t.seq_len,
        micro_batch_size: batch.micro_batch_size,
        global_batch_size: batch.global_batch_size,
        packing: config.data.packing,
        shuffle: config.data.shuffle,
        seed: t.seed,
        length: match t.epochs {
            Some(epochs) => Length::Epochs(epochs),
            None => Length::Steps(t.steps.unwrap_or(1)),
        },
    }
}
