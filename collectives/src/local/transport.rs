//! What does a collective cost without a stream? The same calls, run at once on the thread that calls.
//!
//! For host code that has nothing to overlap with, and for measuring: a stream's task costs allocations and a queue, which
//! for a short message is as much as the message.
#![allow(unsafe_code)]

use super::LocalComm;
use crate::Result;
use crate::operands::Call;
use std::sync::atomic::Ordering::Relaxed;
use zrt_kernels::{View, ViewMut};

/// The collectives of one rank, run by the calling thread: each returns when its result is there. They take their numbers and their turn
/// as the calls on streams do, so both may be mixed; all ranks must issue the same calls in the same order.
///
/// Operands are used while a call runs and by nobody else meanwhile, also not by a stream. Errors are those of [`crate::Communicator`].
#[derive(Clone, Copy)]
pub struct Transport<'a>(pub(super) &'a LocalComm);

impl Transport<'_> {
    /// See [`crate::Communicator::all_gather`].
    pub fn all_gather(&self, dst: &ViewMut, src: &View, tag: &str) -> Result<()> {
        self.run(self.0.check.all_gather(dst, src, tag)?, Some(src), Some(dst))
    }

    /// See [`crate::Communicator::reduce_scatter`].
    pub fn reduce_scatter(&self, dst: &ViewMut, src: &View, tag: &str) -> Result<()> {
        self.run(self.0.check.reduce_scatter(dst, src, tag)?, Some(src), Some(dst))
    }

    /// See [`crate::Communicator::all_reduce`].
    pub fn all_reduce(&self, data: &ViewMut, tag: &str) -> Result<()> {
        self.run(self.0.check.all_reduce(data, tag)?, Some(data), Some(data))
    }

    /// See [`crate::Communicator::all_to_all`].
    pub fn all_to_all(&self, dst: &ViewMut, src: &View, tag: &str) -> Result<()> {
        self.run(self.0.check.all_to_all(dst, src, tag)?, Some(src), Some(dst))
    }

    /// See [`crate::Communicator::broadcast`].
    pub fn broadcast(&self, data: &ViewMut, root: usize, tag: &str) -> Result<()> {
        self.run(self.0.check.broadcast(data, root, tag)?, Some(data), Some(data))
    }

    /// Returns after all ranks got here.
    pub fn barrier(&self, tag: &str) -> Result<()> {
        self.run(self.0.check.barrier(tag), None, None)
    }

    fn run(&self, call: Call, src: Option<&View>, dst: Option<&ViewMut>) -> Result<()> {
        let comm = self.0;
        if let Some(error) = comm.seat.error() {
            return Err(error);
        }
        let operands = comm.operands(&call, src, dst)?;
        comm.counters.add(&call, comm.check.ranks);
        let sequence = comm.next.fetch_add(1, Relaxed);
        // SAFETY: lengths were checked against the views, which outlive this call; exclusive use is the caller's promise.
        comm.seat.in_turn(sequence, &call, |pass| unsafe { pass.perform(operands) })
    }
}
