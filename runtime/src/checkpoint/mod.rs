//! Checkpoints: the trained numbers of a run, cut as each rank had them, read as any other layout needs them.
//!
//! A checkpoint is a folder `step-00000012/`. Each rank writes `rank-00000.bin`, its pieces one after another as raw little-endian
//! f32, and `rank-00000.json`, where each piece lies: (kind, parameter, first element, elements), and a sha256 per block of 1 MiB.
//! Rank 0 adds `manifest.json`. Everything is written in `.tmp-step-00000012.<nonce>/`, synced and renamed ([`crate::durable`]). Pieces are
//! ranges of *parameters*, not of any sharding, so (world, stage, offload) never enters the format and nothing needs converting.
//!
//! * [`writer`] a rank's file, and the commit by rank 0.
//! * [`reader`] any range of any parameter, each block checked as it is read.
//! * [`folder`] which checkpoint is the latest good one; what may be deleted.
//! * [`base`] which base model the numbers belong to.

pub mod base;
pub mod folder;
pub mod reader;
pub mod writer;

pub use base::BaseId;
pub use folder::{Check, Latest, keep_latest, latest, step_dir, steps, sweep, tmp_dir};
pub use reader::Reader;
pub use writer::{ShardInfo, ShardWriter, abandon, commit};

use crate::durable;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Version of the format that is written; a reader refuses any other.
pub const FORMAT: u32 = 1;

/// Bytes under one checksum.
pub const BLOCK_BYTES: usize = 1 << 20;

/// Name of the manifest in a checkpoint folder.
pub const MANIFEST: &str = "manifest.json";

/// Result of checkpoint work.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What a piece holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// The fp32 master of a trained weight.
    Weight,
    /// AdamW's first moment.
    M,
    /// AdamW's second moment.
    V,
}

/// All kinds.
pub const KINDS: [Kind; 3] = [Kind::Weight, Kind::M, Kind::V];

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Kind::Weight => "weight",
            Kind::M => "m",
            Kind::V => "v",
        })
    }
}

/// A trained parameter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Param {
    /// Name, as in the model or adapter.
    pub name: String,
    /// Shape.
    pub shape: Vec<usize>,
}

impl Param {
    /// Number of elements.
    pub fn elems(&self) -> usize {
        self.shape.iter().product()
    }
}

/// What a checkpoint is: `manifest.json`. The caller fills everything but `files`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// [`FORMAT`].
    pub format: u32,
    /// Steps done.
    pub step: u64,
    /// Updates applied (skipped steps excluded): AdamW's bias correction continues from here.
    pub optimizer_steps: u64,
    /// Ranks that wrote; only says which files belong.
    pub ranks: usize,
    /// The files, one per rank; filled by [`commit`].
    #[serde(default)]
    pub files: Vec<ShardInfo>,
    /// Trained parameters.
    pub params: Vec<Param>,
    /// Where the data stands, in the data loader's own form.
    pub cursor: serde_json::Value,
    /// Run seed: shuffling, initialization and dropout are functions of it and of positions.
    pub seed: u64,
    /// The base model.
    pub base: BaseId,
    /// Hash of the configuration keys that must not change on resume, made by the caller.
    pub config_hash: String,
    /// Anything else the trainer wants back.
    #[serde(default)]
    pub extra: serde_json::Value,
}

/// What can be wrong with a checkpoint.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file operation failed.
    #[error("checkpoint: {0}")]
    File(#[from] durable::Error),
    /// A file of the base model cannot be read.
    #[error("checkpoint: {0}")]
    Base(#[from] crate::hf::Error),
    /// The folder is not a whole checkpoint.
    #[error("checkpoint {}: {what}", dir.display())]
    Damaged {
        /// The checkpoint.
        dir: PathBuf,
        /// What is wrong, expected and got.
        what: String,
    },
    /// The checkpoint is of another format version.
    #[error("checkpoint {}: format {got}, this program reads format {FORMAT}; use the version that wrote it", dir.display())]
    Format {
        /// The checkpoint.
        dir: PathBuf,
        /// Its version.
        got: u32,
    },
    /// A piece does not fit its parameter, or the pieces do not cover it once.
    #[error("checkpoint: {kind} of '{param}': {what}")]
    Piece {
        /// Which kind.
        kind: Kind,
        /// Which parameter.
        param: String,
        /// What is wrong, expected and got.
        what: String,
    },
    /// No parameter of this name is in the checkpoint.
    #[error("checkpoint {}: it has no parameter '{param}': it is of another model or other LoRA targets", dir.display())]
    NoParam {
        /// The checkpoint.
        dir: PathBuf,
        /// The name.
        param: String,
    },
}
