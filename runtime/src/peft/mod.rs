//! Adapters as PEFT has them, in and out: the configuration ([`config`]), which layers get one ([`plan`]),
//! and the files ([`mod@file`]). A fresh start is [`crate::source`]'s.
//!
//! What PEFT can express and we cannot honour is refused with the reason, since an adapter that loads and then means something
//! else is the worst outcome.

pub mod config;
pub mod file;
pub mod plan;

pub use config::{AdapterConfig, Targets};
pub use file::{Adapter, AdapterTensor, load_adapter, save_adapter};
pub use plan::{LoraPlan, LoraTarget};

use crate::{durable, hf};
use std::path::PathBuf;

/// Result of adapter work.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can be wrong with an adapter.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file operation failed.
    #[error(transparent)]
    File(#[from] durable::Error),
    /// The safetensors file or the model's configuration is wrong.
    #[error(transparent)]
    Model(#[from] hf::Error),
    /// A key of `adapter_config.json` has a value that cannot be used.
    #[error("{}: {key}: expected {expected}, got {got}", path.display())]
    Value {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// What would be right.
        expected: String,
        /// What is there.
        got: String,
    },
    /// The adapter uses something that is not implemented.
    #[error("{}: {key} = {got} is not supported: {why}", path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// Its value.
        got: String,
        /// Why, and what to do.
        why: String,
    },
    /// The selection of layers is wrong.
    #[error("lora.{key}: {what}")]
    Targets {
        /// `target_modules`, `rank_pattern`, `alpha_pattern`, `exclude_modules`.
        key: &'static str,
        /// What is wrong, and what exists.
        what: String,
    },
    /// `[lora]` and the adapter of `lora.adapter_path` disagree.
    #[error("lora.{key} is {here}, but the adapter {} has {there}; remove the key or change it", path.display())]
    Contradiction {
        /// The key.
        key: &'static str,
        /// Configured.
        here: String,
        /// In the adapter.
        there: String,
        /// The adapter.
        path: PathBuf,
    },
    /// The tensors do not fit the configuration; all problems at once.
    #[error("adapter {}: {} tensors do not fit:\n  {}", path.display(), problems.len(), problems.join("\n  "))]
    Tensors {
        /// The folder.
        path: PathBuf,
        /// One line each.
        problems: Vec<String>,
    },
    /// A saved adapter read back differently.
    #[error("adapter {}: tensor '{name}' read back differs from what was written; the disk or the memory is faulty; the earlier adapter is untouched", path.display())]
    ReadBack {
        /// The folder.
        path: PathBuf,
        /// The tensor.
        name: String,
    },
}
