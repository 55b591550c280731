//! What can go wrong on a device. Errors are cheap to clone: a stream keeps its first one and reports it to all that wait.

use crate::DType;

/// Result of a device call.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A failure of a device, a stream or an operation.
#[derive(Clone, Debug, thiserror::Error, PartialEq)]
pub enum Error {
    /// Memory could not be had.
    #[error("out of memory: {what} wants {bytes} bytes ({reason}); lower training.micro_batch_size or seq_len, or raise zero.stage")]
    OutOfMemory {
        /// Which allocation.
        what: String,
        /// Bytes asked for.
        bytes: usize,
        /// What the system said.
        reason: String,
    },
    /// An operand has the wrong number of elements.
    #[error("{op}: {operand} has {got} elements, expected {expected}")]
    Length {
        /// The operation.
        op: &'static str,
        /// The operand's name in the operation's documentation.
        operand: &'static str,
        /// Elements wanted.
        expected: usize,
        /// Elements found.
        got: usize,
    },
    /// An operand has the wrong element type.
    #[error("{op}: {operand} is {got}, expected {expected}")]
    Type {
        /// The operation.
        op: &'static str,
        /// The operand's name in the operation's documentation.
        operand: &'static str,
        /// Types wanted, as text.
        expected: &'static str,
        /// Type found.
        got: DType,
    },
    /// A shape number is outside what the operation can do.
    #[error("{op}: {what}")]
    Shape {
        /// The operation.
        op: &'static str,
        /// What is wrong, with expected and got.
        what: String,
    },
    /// A view was cut outside its parent.
    #[error("view of {elems} {dtype} at byte {offset} leaves its allocation '{name}' of {bytes} bytes")]
    Range {
        /// Allocation's name.
        name: String,
        /// Start, in bytes.
        offset: usize,
        /// Elements.
        elems: usize,
        /// Element type.
        dtype: DType,
        /// Bytes of the parent.
        bytes: usize,
    },
    /// A task on a stream failed; the stream stays failed.
    #[error("stream '{stream}', {task}: {why}")]
    Task {
        /// The stream's name.
        stream: String,
        /// The task's name.
        task: String,
        /// The cause.
        why: String,
    },
    /// Two operations on different streams touch the same bytes and no event orders them (debug access tracker).
    #[error("race: {0}")]
    Race(String),
    /// The view lives on another kind of device.
    #[error("{op}: operand is not in host memory of this device")]
    NotHost {
        /// The operation.
        op: &'static str,
    },
    /// The stream has no driver's queue.
    #[error("stream '{stream}', {task}: only a GPU's streams take work of a vendor library")]
    NotNative {
        /// The stream's name.
        stream: String,
        /// The task's name.
        task: String,
    },
    /// A call of a driver or of a vendor's library failed.
    #[error("{what}: {call} returned {code} ({text})")]
    Driver {
        /// What was being done: an operation, a copy, an allocation, with the device.
        what: String,
        /// The function.
        call: &'static str,
        /// Its result, as the library gave it; it may be one that this build has never heard of.
        code: i32,
        /// What the library says of it.
        text: String,
    },
    /// A vendor's library cannot be used.
    #[error("{library}: {why}")]
    Library {
        /// The library: the name or path that was tried.
        library: String,
        /// What is missing, and what to do.
        why: String,
    },
    /// A wait ended by its deadline.
    #[error("{what}: no progress within {secs} s")]
    Deadline {
        /// What was waited for.
        what: String,
        /// Seconds waited.
        secs: u64,
    },
}
