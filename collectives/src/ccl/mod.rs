//! The communicator of GPUs: one implementation for NCCL and RCCL, which have one interface.
//!
//! Which file answers what: `sys` the generated numbers and signatures; `library` where the functions come from; `settings` what practice
//! recommends; `join` how ranks become a group; `link` how the library is called without waiting for ever; `issue` how a collective gets onto a
//! stream; `sums` how sums get the bits of the fixed tree; `copies` how few GPUs gather by copies, and `peer` how
//! they see each other's memory; `board` how different collectives are found; `watch` who notices what will not end.
//! This file holds the communicator.
//!
//! Ranks are processes of one host, one GPU each: what the library cannot carry (tags, heartbeats, why the group ended) travels through shared memory.
//! When the group is lost, the library's communicator is aborted, so that streams go on: what collectives were to write is then undefined. The
//! group is known to be lost before that: who reads a result asks [`Communicator::health`] after it, and takes it only if that is good.
#![allow(unsafe_code)]

mod board;
mod copies;
mod issue;
mod join;
mod library;
mod link;
mod peer;
mod settings;
mod sums;
#[doc(hidden)]
pub mod sys;
mod watch;

pub use copies::{CopyOptions, CopyWhen, HANDLE_BYTES, PeerMemory};
#[doc(hidden)]
pub use library::Api;
pub use library::Library;
pub use peer::GpuMemory;
pub use settings::recommended_env;

use crate::operands::{Check, Counters};
use crate::{Communicator, Counts, Health, Result};
use copies::Copies;
use link::Link;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use watch::{Watch, Watched};
use zrt_kernels::gpu::driver::Vendor;
use zrt_kernels::{Buffer, Device, Event, Stream, View, ViewMut};

/// How a communicator of GPUs behaves. All ranks must use the same values.
#[derive(Clone, Debug)]
pub struct CclOptions {
    /// Whose library.
    pub vendor: Vendor,
    /// The library's path, in place of `libnccl.so.2` or `librccl.so.1`.
    pub library: Option<PathBuf>,
    /// Names the group in the store, so that a job may have several.
    pub name: String,
    /// Time for all ranks to meet and for the library to connect them.
    pub init_timeout: Duration,
    /// Time that the device may stay in one collective, waiting for a rank that comes late.
    pub train_timeout: Duration,
    /// Time without a sign of life after which a process counts as lost, and in which a collective that all ranks have come to must make its way
    /// (beside 10 s for each GB). At least 0.5 s.
    pub heartbeat_timeout: Duration,
    /// Sums have the bits of the fixed tree over ranks; otherwise what the library's order gives.
    pub deterministic: bool,
    /// Device memory for parts of sums on their way, in bytes: larger sums take several rounds.
    pub scratch_bytes: usize,
}

impl CclOptions {
    /// What each rank's part of a sum takes at least.
    const LEAST_SCRATCH_BYTES: usize = 4096;

    /// Device memory that a communicator of `ranks` holds, for plans: name and bytes.
    pub fn memory(&self, ranks: usize) -> [(&'static str, usize); 2] {
        [("scratch of collectives", self.scratch_bytes.max(Self::LEAST_SCRATCH_BYTES * ranks)), ("barrier", 64)]
    }

    /// The usual values.
    pub fn new(vendor: Vendor) -> CclOptions {
        CclOptions {
            vendor,
            library: None,
            name: "world".to_string(),
            init_timeout: Duration::from_secs(300),
            train_timeout: Duration::from_secs(100),
            heartbeat_timeout: Duration::from_secs(10),
            deterministic: true,
            scratch_bytes: 64 << 20,
        }
    }
}

/// One rank of a group of GPUs. See [`CclComm::join`].
pub struct CclComm {
    check: Check,
    name: String,
    deterministic: bool,
    device: Arc<dyn Device>,
    scratch: Buffer,
    /// Recorded where the last user of `scratch` is done with it.
    scratch_free: Arc<dyn Event>,
    /// What a barrier adds up.
    flag: Buffer,
    /// Held while a collective is enqueued.
    order: Mutex<()>,
    counters: Counters,
    watched: Arc<Watched>,
    watch: Option<Watch>,
    /// Where gathers of some length are copies.
    copies: Option<Copies>,
    link: Arc<Link>,
}

impl CclComm {
    /// Time for a call of the library that is running, when another thread asks for its state.
    const GLANCE: Duration = Duration::from_millis(50);
    /// Time for the device, and for the others, to be done with what was enqueued before the communicator ends.
    const DRAIN: Duration = Duration::from_secs(5);

    /// What was loaded, and its version: `libnccl.so.2 2.18.3`.
    pub fn library(&self) -> &str {
        self.link.library.name()
    }

    /// Waits a little for `done`, as long as the group is good; whether it came.
    fn drain(&self, done: impl Fn() -> bool) -> bool {
        let until = Instant::now() + Self::DRAIN;
        while self.link.control.error().is_none() && Instant::now() < until {
            if done() {
                return true;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        false
    }
}

impl Drop for CclComm {
    fn drop(&mut self) {
        self.drain(|| self.watched.idle());
        if let Some(copies) = self.copies.take() {
            let mine = copies.into_own(self.check.rank);
            self.watched.unmapped();
            if !self.drain(|| self.watched.all_unmapped()) {
                // Others may still read it: it stays until the process ends.
                std::mem::forget(mine);
            }
        }
        self.watch = None;
        self.link.finish();
    }
}

impl Communicator for CclComm {
    fn rank(&self) -> usize {
        self.check.rank
    }
    fn ranks(&self) -> usize {
        self.check.ranks
    }
    fn all_gather(&self, dst: &ViewMut, src: &View, tag: &str, s: &dyn Stream) -> Result<()> {
        self.enqueue(self.check.all_gather(dst, src, tag)?, s, |issue| {
            if let Some(copies) = self.copies.as_ref().filter(|copies| copies.take(src.bytes())) {
                return issue.with_scratch(|| issue.gather_by_copies(copies, dst, src));
            }
            let (to, from) = (issue.span(dst)?, issue.span(src)?);
            issue.native(vec![src.clone()], vec![dst.clone()], move |library| library.all_gather(to, from))
        })
    }
    fn reduce_scatter(&self, dst: &ViewMut, src: &View, tag: &str, s: &dyn Stream) -> Result<()> {
        self.enqueue(self.check.reduce_scatter(dst, src, tag)?, s, |issue| {
            if !self.library_sums(dst.dtype()) {
                return issue.with_scratch(|| issue.scatter_sums(dst, src));
            }
            let (to, from) = (issue.span(dst)?, issue.span(src)?);
            issue.native(vec![src.clone()], vec![dst.clone()], move |library| library.reduce_scatter(to, from))
        })
    }
    fn all_reduce(&self, data: &ViewMut, tag: &str, s: &dyn Stream) -> Result<()> {
        self.enqueue(self.check.all_reduce(data, tag)?, s, |issue| {
            if !self.library_sums(data.dtype()) {
                return issue.with_scratch(|| issue.reduce_sums(data));
            }
            let span = issue.span(data)?;
            issue.native(vec![], vec![data.clone()], move |library| library.all_reduce(span))
        })
    }
    fn all_to_all(&self, dst: &ViewMut, src: &View, tag: &str, s: &dyn Stream) -> Result<()> {
        self.enqueue(self.check.all_to_all(dst, src, tag)?, s, |issue| issue.all_to_all(dst, src))
    }
    fn broadcast(&self, data: &ViewMut, root: usize, tag: &str, s: &dyn Stream) -> Result<()> {
        self.enqueue(self.check.broadcast(data, root, tag)?, s, |issue| {
            let span = issue.span(data)?;
            issue.native(vec![], vec![data.clone()], move |library| library.broadcast(span, root))
        })
    }
    fn barrier(&self, tag: &str, s: &dyn Stream) -> Result<()> {
        self.enqueue(self.check.barrier(tag), s, |issue| issue.meet())
    }
    /// GPUs share no pages.
    fn share_pages(&self, _name: &str, _bytes: usize) -> Result<Option<Buffer>> {
        Ok(None)
    }
    /// Also asks the library: a result that was read before this says "good" was written by all ranks.
    fn health(&self) -> Health {
        let control = &self.link.control;
        let trouble = || self.watched.look().or_else(|| self.link.trouble(Self::GLANCE));
        let error = control.error().or_else(|| trouble().map(|error| control.lose(error)));
        error.map_or(Health::Good, Health::Lost)
    }
    fn abort(&self, reason: &str) {
        self.link.control.abort(reason);
        self.link.abort();
    }
    fn counts(&self) -> Counts {
        self.counters.get()
    }
}
