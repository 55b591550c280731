//! What a running job tells those who watch it: one small record a step, published in the rendezvous store.
//!
//! The trainer's rank 0 writes it under [`PROGRESS_KEY`]; the launcher reads it for its live line. The same record is a line of
//! `metrics.jsonl`, so a watcher and a later reader see the same names.

use serde::{Deserialize, Serialize};

/// Store key under which rank 0 publishes the latest [`StepReport`] as JSON.
pub const PROGRESS_KEY: &str = "progress";
/// Store key under which rank 0 publishes how the run ended: a JSON [`RunEnd`].
pub const RUN_END_KEY: &str = "run_end";
/// Exit code of a rank that failed only because another one did.
pub const VICTIM_EXIT_CODE: i32 = 75;

/// Store key under which `rank` reports why it failed, as a JSON [`ErrorReport`].
pub fn error_key(rank: usize) -> String {
    format!("error/{rank}")
}

/// One finished step.
#[derive(Clone, Debug, Default, Deserialize, Serialize, PartialEq)]
pub struct StepReport {
    /// Steps done, from 1.
    pub step: u64,
    /// Steps of the whole run.
    pub steps: u64,
    /// Mean loss per trained token of this step's batch, in nats; `null` in JSON when it is not finite.
    #[serde(deserialize_with = "nan_for_null")]
    pub loss: f64,
    /// Gradient norm before clipping, likewise.
    #[serde(deserialize_with = "nan_for_null")]
    pub grad_norm: f64,
    /// Learning rate of this step.
    pub lr: f64,
    /// Tokens of this step over all ranks, padding left out.
    pub tokens: u64,
    /// Those of them that are trained on.
    pub trained_tokens: u64,
    /// `tokens` per second of this step.
    pub tokens_per_s: f64,
    /// Share of the device's peak arithmetic rate, 0 to 1; 0 when the peak is unknown.
    pub share_of_peak: f64,
    /// Memory held by this rank, bytes.
    pub memory_bytes: u64,
    /// Steps skipped so far for a gradient that was not finite.
    pub skipped: u64,
    /// Seconds of this step.
    pub secs: f64,
    /// Loss on the held-out data, when it was evaluated after this step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eval_loss: Option<f64>,
}

/// JSON has no NaN; a skipped step is still a step to report.
fn nan_for_null<'de, D: serde::Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or(f64::NAN))
}

/// Why a rank failed.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq, Eq)]
pub struct ErrorReport {
    /// The rank that reports.
    pub rank: usize,
    /// The rank it blames, if not itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub culprit: Option<usize>,
    /// The error, for people.
    pub text: String,
}

/// Something that the run leaves behind.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq, Eq)]
pub struct Saved {
    /// What it is, for people: `"adapter"`, `"model"`, `"checkpoint"`.
    pub what: String,
    /// Where.
    pub path: std::path::PathBuf,
}

/// A run that ended in order.
#[derive(Clone, Debug, Default, Deserialize, Serialize, PartialEq)]
pub struct RunEnd {
    /// Steps done before this start.
    pub first_step: u64,
    /// Steps of this start.
    pub steps: u64,
    /// Loss of the last step.
    pub loss: Option<f64>,
    /// Final loss on held-out data.
    pub eval_loss: Option<f64>,
    /// Tokens of this start.
    pub tokens: u64,
    /// Steps skipped for gradients that were not finite.
    pub skipped: u64,
    /// Seconds of training.
    pub secs: f64,
    /// Ended by request before the last step.
    pub stopped: bool,
    /// What the run leaves behind.
    pub saved: Vec<Saved>,
}
