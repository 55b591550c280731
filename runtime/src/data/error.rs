//! What can be wrong with data, and what to do about it. Every variant names the file (and the line) that a user would open.

use std::path::{Path, PathBuf};

/// Errors of the data module.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// A file cannot be read or written.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried: "read", "write", ...
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The reason of the operating system.
        source: std::io::Error,
    },
    /// A row of a data file is broken.
    #[error("{}:{line}: {message}", path.display())]
    Row {
        /// The data file.
        path: PathBuf,
        /// Line, counted from 1.
        line: u64,
        /// What was expected, what was there, what to try.
        message: String,
    },
    /// The tokenizer or its configuration is missing, broken or lacks something.
    #[error("tokenizer {}: {message}", path.display())]
    Tokenizer {
        /// The file or folder.
        path: PathBuf,
        /// What is wrong and what to try.
        message: String,
    },
    /// The chat template is missing, does not compile or fails on a conversation.
    #[error("chat template: {0}")]
    Template(String),
    /// No row, or no row left, to train on.
    #[error("no data: {0}")]
    Empty(String),
    /// A request that contradicts itself or the data.
    #[error("{0}")]
    Invalid(String),
}

impl DataError {
    pub(crate) fn io(action: &'static str, path: &Path, source: std::io::Error) -> Self {
        DataError::Io { action, path: path.to_path_buf(), source }
    }

    pub(crate) fn tokenizer(path: &Path, message: impl Into<String>) -> Self {
        DataError::Tokenizer { path: path.to_path_buf(), message: message.into() }
    }
}
