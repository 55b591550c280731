//! Hugging Face model directories, in and out: what a model is ([`arch`]), where it lies ([`folder`]), its weights by
//! ranges ([`weights`]), its rotary table ([`rope`]), and a directory written back ([`export`]).
//!
//! Everything here treats files as hostile: numbers, offsets and names are checked before they are used, and an error names
//! the file, the key, what was expected and what was found.

pub mod arch;
pub mod export;
pub mod folder;
pub mod header;
pub mod rope;
pub mod weights;

pub use arch::{ArchConfig, Architecture, LinearModule, Rope};
pub use header::{Stored, TensorInfo};
pub use weights::Weights;

use std::path::{Path, PathBuf};

/// Result of reading or writing a model directory.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can be wrong with a model directory.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The system refused a file operation.
    #[error("cannot {action} {}: {source}{}", path.display(), crate::durable::hint(source))]
    Io {
        /// `"read"`, `"write"`, `"rename"`, ...
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A file is not the JSON it should be.
    #[error("{}: not valid JSON: {why}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The parser's reason, with line and column.
        why: String,
    },
    /// A key of a JSON file has a value that cannot be used.
    #[error("{}: {key}: expected {expected}, got {got}", path.display())]
    Value {
        /// The file.
        path: PathBuf,
        /// The key, dotted.
        key: String,
        /// What would be right.
        expected: String,
        /// What is there.
        got: String,
    },
    /// The model is of a kind that has no implementation.
    #[error("{}: architecture {got} is not supported; supported are {}", path.display(), arch::SUPPORTED)]
    Architecture {
        /// The file.
        path: PathBuf,
        /// The name found.
        got: String,
    },
    /// The model asks for something that is not implemented.
    #[error("{}: {what}", path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// What, and what to do.
        what: String,
    },
    /// A safetensors file breaks its format.
    #[error("{}: not a valid safetensors file: {what}", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// What is wrong, expected and got.
        what: String,
    },
    /// No weights that can be read.
    #[error("{}: {what}", dir.display())]
    NoWeights {
        /// The directory.
        dir: PathBuf,
        /// What is there instead.
        what: String,
    },
    /// The weights do not fit the configuration; all problems at once.
    #[error("{}: {} of the weights do not fit config.json:\n  {}", dir.display(), problems.len(), problems.join("\n  "))]
    Tensors {
        /// The directory.
        dir: PathBuf,
        /// One line each: missing, misshaped, unexpected, unreadable.
        problems: Vec<String>,
    },
    /// A tensor that is not in the files.
    #[error("{}: there is no tensor '{name}'", dir.display())]
    NoTensor {
        /// The directory.
        dir: PathBuf,
        /// The name asked for.
        name: String,
    },
    /// A range outside a tensor, or a destination that does not fit.
    #[error("tensor '{name}': {what}")]
    Range {
        /// The tensor.
        name: String,
        /// Expected and got.
        what: String,
    },
    /// A tensor has values that are not finite.
    #[error(
        "tensor '{name}': element {index} is {value}; {count} of {elems} values are not finite: the file is damaged or the run that wrote it diverged"
    )]
    NotFinite {
        /// The tensor.
        name: String,
        /// First such element.
        index: usize,
        /// Its value.
        value: f32,
        /// How many.
        count: usize,
        /// Of how many.
        elems: usize,
    },
    /// The producer of a tensor to write failed.
    #[error("tensor '{name}': {source}")]
    Produce {
        /// The tensor.
        name: String,
        /// The producer's reason.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The model is neither a directory nor in the local cache.
    #[error("model '{id}': {what}")]
    NotFound {
        /// As configured.
        id: String,
        /// Where it was looked for, and what to do.
        what: String,
    },
}

impl Error {
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Error {
        let path = path.to_path_buf();
        move |source| Error::Io { action, path, source }
    }
}

impl From<crate::durable::Error> for Error {
    fn from(e: crate::durable::Error) -> Error {
        Error::Io { action: e.action, path: e.path, source: e.source }
    }
}
