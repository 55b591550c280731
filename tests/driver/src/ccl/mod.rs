//! How do ranks of an emulated NCCL or RCCL reach each other, in threads or processes? By sockets, from each rank to each other one:
//! [`bootstrap`] joins them through the process that made the unique id, [`comm`] is a communicator and what came in from its peers,
//! [`calls`] what operations send, wait for and compute, [`reduce`] how numbers are added.

pub mod bootstrap;
pub mod calls;
pub mod comm;
pub mod reduce;

/// Codes of ncclResult_t.
pub mod result {
    pub const SYSTEM: i32 = 2;
    pub const INVALID_ARGUMENT: i32 = 4;
    pub const INVALID_USAGE: i32 = 5;
    pub const REMOTE: i32 = 6;
    pub const IN_PROGRESS: i32 = 7;
}
