//! What would the ranks send, without sending it? One rank that stands for all: operands are checked, calls and bytes
//! counted, and each collective is noted by the simulated device it is on, or is one host task on the stream, which is not run.
#![allow(unsafe_code)]

use crate::operands::Op;
use crate::operands::{Call, Check, Counters};
use crate::{Communicator, Counts, Error, Health, Result};
use std::sync::Mutex;
use zrt_kernels::memory::Mapping;
use zrt_kernels::sim::{Kind, SimLink};
use zrt_kernels::{Buffer, HostTask, Place, Stream, View, ViewMut};

/// A simulated group. It moves no data: destinations keep what they held.
pub struct SimComm {
    check: Check,
    shared_pages: bool,
    counters: Counters,
    link: Option<SimLink>,
    lost: Mutex<Option<Error>>,
}

impl SimComm {
    /// Rank 0 of `ranks` (at least 1), without shared pages.
    pub fn new(ranks: usize) -> SimComm {
        SimComm {
            check: Check { rank: 0, ranks: ranks.max(1) },
            shared_pages: false,
            counters: Counters::default(),
            link: None,
            lost: Mutex::new(None),
        }
    }

    /// Stands for `rank` instead of rank 0; a rank outside the group becomes the last one.
    pub fn with_rank(mut self, rank: usize) -> SimComm {
        self.check.rank = rank.min(self.check.ranks - 1);
        self
    }

    /// Notes collectives on the tape of a device ([`zrt_kernels::sim::SimDevice::link`]) instead of as host tasks.
    pub fn on(mut self, link: SimLink) -> SimComm {
        self.link = Some(link);
        self
    }

    /// Whether [`Communicator::share_pages`] returns a buffer (of simulated addresses) or `None`.
    pub fn with_shared_pages(mut self, yes: bool) -> SimComm {
        self.shared_pages = yes;
        self
    }

    fn enqueue(&self, call: Call, reads: &[&View], writes: &[&ViewMut], s: &dyn Stream) -> Result<()> {
        if let Health::Lost(error) = self.health() {
            return Err(error);
        }
        self.counters.add(&call, self.check.ranks);
        if let Some(link) = &self.link {
            link.collective(kind(call.op), call.dtype, call.bytes(), &call.tag, s);
            return Ok(());
        }
        let reads = reads.iter().map(|&v| v.clone()).collect();
        let writes = writes.iter().map(|&v| v.clone()).collect();
        Ok(s.host(HostTask { name: call.task_name().into(), reads, writes, run: Box::new(|| Ok(())) })?)
    }
}

/// The simulated device's name of a collective.
fn kind(op: Op) -> Kind {
    match op {
        Op::AllGather => Kind::AllGather,
        Op::ReduceScatter => Kind::ReduceScatter,
        Op::AllReduce => Kind::AllReduce,
        Op::AllToAll => Kind::AllToAll,
        Op::Broadcast => Kind::Broadcast,
        Op::Barrier | Op::SharePages => Kind::Barrier,
    }
}

/// Bytes that nobody can touch.
struct NullMapping(usize);

// SAFETY: a null base is allowed for memory that the host cannot touch.
unsafe impl Mapping for NullMapping {
    fn base(&self) -> *mut u8 {
        std::ptr::null_mut()
    }
    fn bytes(&self) -> usize {
        self.0
    }
}

impl Communicator for SimComm {
    fn rank(&self) -> usize {
        self.check.rank
    }
    fn ranks(&self) -> usize {
        self.check.ranks
    }
    fn all_gather(&self, dst: &ViewMut, src: &View, tag: &str, s: &dyn Stream) -> Result<()> {
        self.enqueue(self.check.all_gather(dst, src, tag)?, &[src], &[dst], s)
    }
    fn reduce_scatter(&self, dst: &ViewMut, src: &View, tag: &str, s: &dyn Stream) -> Result<()> {
        self.enqueue(self.check.reduce_scatter(dst, src, tag)?, &[src], &[dst], s)
    }
    fn all_reduce(&self, data: &ViewMut, tag: &str, s: &dyn Stream) -> Result<()> {
        self.enqueue(self.check.all_reduce(data, tag)?, &[data], &[data], s)
    }
    fn all_to_all(&self, dst: &ViewMut, src: &View, tag: &str, s: &dyn Stream) -> Result<()> {
        self.enqueue(self.check.all_to_all(dst, src, tag)?, &[src], &[dst], s)
    }
    fn broadcast(&self, data: &ViewMut, root: usize, tag: &str, s: &dyn Stream) -> Result<()> {
        self.enqueue(self.check.broadcast(data, root, tag)?, &[data], &[data], s)
    }
    fn barrier(&self, tag: &str, s: &dyn Stream) -> Result<()> {
        self.enqueue(self.check.barrier(tag), &[], &[], s)
    }
    fn share_pages(&self, name: &str, bytes: usize) -> Result<Option<Buffer>> {
        Ok(self.shared_pages.then(|| Buffer::from_mapping(name, Place::Device, Box::new(NullMapping(bytes)))))
    }
    fn health(&self) -> Health {
        match &*self.lost.lock().unwrap_or_else(|e| e.into_inner()) {
            Some(error) => Health::Lost(error.clone()),
            None => Health::Good,
        }
    }
    fn abort(&self, reason: &str) {
        let rank = self.check.rank;
        let mut lost = self.lost.lock().unwrap_or_else(|e| e.into_inner());
        lost.get_or_insert_with(|| Error::Aborted { rank, by: rank, reason: reason.to_string() });
    }
    fn counts(&self) -> Counts {
        self.counters.get()
    }
}
