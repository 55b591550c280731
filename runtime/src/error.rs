//! What can go wrong in a run, as values: what, where, expected and got, and what to try.

/// Result of the runtime's calls.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A failure of a run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The user's input cannot work: configuration, model folder, data. Exit code 2.
    #[error("{0}")]
    Input(String),
    /// The layout of the model is impossible.
    #[error("plan: {0}")]
    Plan(String),
    /// The device or one of its streams failed.
    #[error("rank {rank}: {source}")]
    Device {
        /// This rank.
        rank: usize,
        /// The cause.
        source: zrt_kernels::Error,
    },
    /// Ranks lost each other.
    #[error(transparent)]
    Comm(#[from] zrt_collectives::Error),
    /// A model broke its contract with the engine.
    #[error("model: {0}")]
    Model(String),
    /// Training cannot go on: the numbers are not finite.
    #[error("{0}")]
    NotFinite(String),
    /// Something could not be saved; the training state and earlier checkpoints are intact.
    #[error("saving: {0}")]
    Save(String),
    /// A rank could not write its part of a checkpoint; the training state and earlier checkpoints are intact.
    #[error("saving the checkpoint: rank {rank}: {why}; earlier checkpoints are intact")]
    Checkpoint {
        /// The rank.
        rank: usize,
        /// What happened.
        why: String,
    },
    /// A file or folder.
    #[error("{path}: {source}")]
    Io {
        /// Which.
        path: String,
        /// The cause.
        source: std::io::Error,
    },
}

impl Error {
    pub(crate) fn plan(what: String) -> Error {
        Error::Plan(what)
    }

    /// Attaches this rank to a device's error.
    pub fn device(rank: usize) -> impl Fn(zrt_kernels::Error) -> Error {
        move |source| Error::Device { rank, source }
    }

    /// The same as it is told by `rank`, whose device it is about.
    pub(crate) fn of_rank(self, rank: usize) -> Error {
        match self {
            Error::Device { source, .. } | Error::Comm(zrt_collectives::Error::Device(source)) => Error::Device { rank, source },
            other => other,
        }
    }

    /// The rank that this error is about: who returns it is a victim, unless it is that rank.
    pub fn culprit(&self) -> Option<usize> {
        match self {
            Error::Comm(zrt_collectives::Error::Timeout { culprit, .. }) => Some(*culprit),
            Error::Comm(zrt_collectives::Error::Aborted { by, .. }) => Some(*by),
            Error::Checkpoint { rank, .. } => Some(*rank),
            _ => None,
        }
    }

    /// True when the cause is the user's input: exit code 2.
    pub fn is_input(&self) -> bool {
        matches!(self, Error::Input(_))
    }
}

impl From<zrt_kernels::Error> for Error {
    fn from(source: zrt_kernels::Error) -> Self {
        Error::Device { rank: 0, source }
    }
}
