//! Collectives: what ranks do together, behind one trait.
//!
//! * [`Communicator`] the contract. Every call is enqueued on a stream and carries (sequence number, operation, dtype,
//!   length, tag); a mismatch between ranks is an error that names both, not a hang.
//! * [`local`] ranks of one host, as threads or processes, through shared memory; reductions in a fixed binary tree.
//! * [`ccl`] ranks with a GPU each, through NCCL or RCCL, loaded at run time.
//! * [`sim`] one rank that stands for all; counts calls and bytes.
//! * [`solo`] a group of one, on any device.
//! * [`store`] the rendezvous: set / get / wait / add with deadlines, in process or over TCP with a per-job secret.
//! * [`watchdog`] a thread that calls back once when the group is lost.
//! * [`mod@bench`] how long the local collectives take on this machine, beside a plain copy.
#![deny(unsafe_code)]

pub mod bench;
pub mod ccl;
pub mod local;
mod operands;
pub mod sim;
pub mod solo;
pub mod store;
mod tree;
pub mod watchdog;

pub use ccl::{CclComm, CclOptions};
pub use local::{LocalComm, LocalGroup, LocalOptions};
pub use sim::SimComm;
pub use solo::SoloComm;
pub use store::{MemoryStore, Secret, ServerOptions, Store, TcpStore, TcpStoreServer};
pub use watchdog::Watchdog;

use std::sync::Arc;
use zrt_kernels::{Buffer, Stream, View, ViewMut};

/// Result of a collective call.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can go wrong between ranks.
#[derive(Clone, Debug, thiserror::Error, PartialEq)]
pub enum Error {
    /// Two ranks issued different collectives at the same place in the sequence.
    #[error(
        "collective mismatch at #{sequence}: rank {rank} issued {here}, rank {other} issued {there}; all ranks must issue the same collectives in the same order"
    )]
    Mismatch {
        /// Sequence number.
        sequence: u64,
        /// This rank.
        rank: usize,
        /// What this rank issued: operation, dtype, elements, tag.
        here: String,
        /// The rank that differs.
        other: usize,
        /// What that rank issued.
        there: String,
    },
    /// A rank did not arrive, or stopped being alive.
    #[error("rank {rank}: {what}: waited {secs} s for rank {culprit} ({state})")]
    Timeout {
        /// This rank.
        rank: usize,
        /// The collective waited in: `#17 all_gather layers.3`.
        what: String,
        /// The rank that is missing.
        culprit: usize,
        /// What is known of it: `"no heartbeat for 10 s"`, `"alive, last in #16 reduce_scatter layers.4"`, `"process is gone"`.
        state: String,
        /// Seconds waited.
        secs: u64,
    },
    /// The job was aborted.
    #[error("rank {rank}: aborted by rank {by}: {reason}")]
    Aborted {
        /// This rank.
        rank: usize,
        /// Who called `abort` first.
        by: usize,
        /// Its reason.
        reason: String,
    },
    /// Operands do not fit the collective.
    #[error("rank {rank}: {op} '{tag}': {what}")]
    Operand {
        /// This rank.
        rank: usize,
        /// The operation.
        op: &'static str,
        /// The tag.
        tag: String,
        /// What is wrong, with expected and got.
        what: String,
    },
    /// The rendezvous failed.
    #[error("rendezvous: {0}")]
    Rendezvous(String),
    /// The device failed.
    #[error(transparent)]
    Device(#[from] zrt_kernels::Error),
}

/// Whether the group can go on.
#[derive(Clone, Debug, PartialEq)]
pub enum Health {
    /// All ranks are alive as far as is known.
    Good,
    /// The group is lost; the first error.
    Lost(Error),
}

/// The ranks of one job. One communicator and one issuing thread per rank.
///
/// Lengths and dtypes come from views, never from counts. Calls enqueue on `s` and return; failures surface as the
/// stream's error (with this crate's message as text), from [`Communicator::health`], and from later calls.
/// Reductions are sums in f32 arithmetic (i32 stays i32), combined over ranks in a fixed binary tree: rank order, pairs (0,1), (2,3), then
/// pairs of pairs; a missing right sibling is passed up unchanged.
pub trait Communicator: Send + Sync {
    /// This rank.
    fn rank(&self) -> usize;
    /// Number of ranks.
    fn ranks(&self) -> usize;
    /// `dst` = the ranks' `src` in rank order; `dst` has `ranks` times the elements. `src` may be this rank's part of `dst` (no self copy then).
    fn all_gather(&self, dst: &ViewMut, src: &View, tag: &str, s: &dyn Stream) -> Result<()>;
    /// `dst` = this rank's part of the sum of the ranks' `src`; `src` has `ranks` times the elements.
    fn reduce_scatter(&self, dst: &ViewMut, src: &View, tag: &str, s: &dyn Stream) -> Result<()>;
    /// `data` = sum over ranks, in place, the same bits on all ranks and as reduce_scatter + all_gather.
    fn all_reduce(&self, data: &ViewMut, tag: &str, s: &dyn Stream) -> Result<()>;
    /// Part j of `src` goes to rank j; part i of `dst` comes from rank i. Equal lengths, divisible by `ranks`.
    fn all_to_all(&self, dst: &ViewMut, src: &View, tag: &str, s: &dyn Stream) -> Result<()>;
    /// `data` of rank `root` to all.
    fn broadcast(&self, data: &ViewMut, root: usize, tag: &str, s: &dyn Stream) -> Result<()>;
    /// Later work on `s` runs after all ranks got here.
    fn barrier(&self, tag: &str, s: &dyn Stream) -> Result<()>;
    /// Memory of `bytes` that all ranks of this host map at the same contents; `None` where that cannot be
    /// (other hosts, sharing turned off). Collective: all ranks call it in the same order with the same arguments, before training. Zeroed.
    fn share_pages(&self, name: &str, bytes: usize) -> Result<Option<Buffer>>;
    /// Never blocks.
    fn health(&self) -> Health;
    /// From any thread: all waits of all ranks end with [`Error::Aborted`].
    fn abort(&self, reason: &str);
    /// Collectives run by kind and bytes moved by this rank, for tests and traces.
    fn counts(&self) -> Counts;
}

/// A shared communicator.
pub type Comm = Arc<dyn Communicator>;

/// Collectives issued so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// `all_gather` calls.
    pub all_gather: u64,
    /// `reduce_scatter` calls.
    pub reduce_scatter: u64,
    /// `all_reduce` calls.
    pub all_reduce: u64,
    /// `all_to_all` calls.
    pub all_to_all: u64,
    /// `broadcast` calls.
    pub broadcast: u64,
    /// `barrier` calls.
    pub barrier: u64,
    /// Bytes this rank contributed or received, as the algorithm's minimum: (ranks-1)/ranks of the full length each.
    pub bytes: u64,
}
