//! The CPU device: what a CPU is as a device, with real asynchronous streams. A product backend, and the one on which a
//! missing wait can be found without a GPU.
//!
//! * [`heap`] memory and its ledger; [`stream`] the queues; [`event`] what was passed; both used by all modes.
//! * [`tracker`] finds accesses that no event orders; [`trace`] writes timelines.
//! * [`pool`], [`simd`] and the files named after the maths: the operations.
#![allow(rustdoc::private_intra_doc_links)]

pub mod adamw;
mod adapted;
pub mod attention;
pub mod convert;
pub mod dropout;
pub mod elementwise;
pub mod embedding;
mod event;
pub mod float;
pub(crate) mod heap;
mod info;
pub mod limits;
pub mod linear;
#[cfg(test)]
mod linear_tests;
pub mod lora;
mod lora_split;
pub mod loss;
pub mod matmul;
pub mod norm;
pub mod norm_tree;
pub mod operand;
pub mod ops;
pub mod pool;
#[cfg(test)]
mod reference;
pub mod rope;
pub mod simd;
pub(crate) mod stream;
pub mod swiglu;
pub mod trace;
mod tracker;

use crate::device::{Device, DeviceInfo, Event, Stream};
use crate::memory::{Buffer, Category, Mapping, MemoryUse, Place};
use crate::{Error, Ops, Result};
use heap::{Ledger, Pages};
pub(crate) use info::processor;
pub use ops::CpuOps;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// How tasks of streams run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// A thread per stream.
    #[default]
    Threaded,
    /// At once, in the thread that enqueues: for debuggers and for errors at the line that caused them.
    Inline,
    /// As threaded, with random delays before tasks and memory that starts as NaN, so that a missing wait or a read of
    /// what was never written shows. Turns the access tracker on.
    Chaos {
        /// The delays of a stream are a function of this and of its number.
        seed: u64,
    },
}

/// How to make a [`CpuDevice`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuOptions {
    /// Threads of the operations, at least 1; by default as many as the process has cores.
    pub threads: usize,
    /// How tasks run.
    pub mode: Mode,
    /// Check that every two accesses to the same bytes are ordered by events: [`Error::Race`] at the call that is not.
    pub track: bool,
    /// Collect a timeline, see [`CpuDevice::trace_events`].
    pub trace: bool,
}

impl Default for CpuOptions {
    fn default() -> Self {
        CpuOptions { threads: processor().cores, mode: Mode::Threaded, track: false, trace: false }
    }
}

/// The CPU as a device.
pub struct CpuDevice {
    options: CpuOptions,
    ledger: Arc<Ledger>,
    setup: stream::Setup,
    streams_made: AtomicU64,
    ops: Box<dyn Ops>,
    /// Holds the row of the pool's scratch.
    _scratch: Option<Box<dyn Mapping>>,
}

impl CpuDevice {
    /// A device with the operations of the CPU on `options.threads` threads.
    pub fn new(options: CpuOptions) -> Result<Arc<CpuDevice>> {
        let pool = pool::Pool::new(options.threads)?;
        CpuDevice::build(options, Box::new(CpuOps::new(pool)), pool::scratch_bytes(options.threads))
    }

    /// A device that computes with `ops`.
    pub fn with_ops(options: CpuOptions, ops: Box<dyn Ops>) -> Result<Arc<CpuDevice>> {
        CpuDevice::build(options, ops, 0)
    }

    fn build(options: CpuOptions, ops: Box<dyn Ops>, scratch_bytes: usize) -> Result<Arc<CpuDevice>> {
        if options.threads == 0 {
            return Err(Error::Shape { op: "cpu device", what: "threads is 0, expected at least 1".into() });
        }
        let chaos = if let Mode::Chaos { seed } = options.mode { Some(seed) } else { None };
        let setup = stream::Setup {
            threaded: options.mode != Mode::Inline,
            chaos,
            tracker: (options.track || chaos.is_some()).then(Default::default),
            trace: options.trace.then(Default::default),
        };
        let ledger = Arc::new(Ledger::default());
        let scratch = ledger.scratch(scratch_bytes);
        Ok(Arc::new(CpuDevice { options, ledger, setup, streams_made: AtomicU64::new(0), ops, _scratch: scratch }))
    }

    /// What it was made with.
    pub fn options(&self) -> CpuOptions {
        self.options
    }

    /// Name of the instruction set that kernels use.
    pub fn isa(&self) -> &'static str {
        processor().isa
    }

    /// Takes the timeline collected since the last call; empty unless [`CpuOptions::trace`] was set.
    /// Events of work that is still queued come with a later call.
    pub fn trace_events(&self) -> Vec<trace::TraceEvent> {
        self.setup.trace.as_ref().map(|t| t.take()).unwrap_or_default()
    }
}

impl Device for CpuDevice {
    fn info(&self) -> DeviceInfo {
        device_info("cpu", self.options.threads)
    }

    fn alloc(&self, name: &str, bytes: usize, place: Place, category: Category) -> Result<Buffer> {
        let pages = Pages::map(name, bytes, self.setup.chaos.is_some())?;
        Ok(Buffer::from_mapping(name, place, self.ledger.count(Box::new(pages), place, category)))
    }

    fn adopt(&self, buffer: Buffer, category: Category) -> Result<Buffer> {
        Ok(self.ledger.adopt(buffer, category))
    }

    fn stream(&self, name: &str) -> Result<Arc<dyn Stream>> {
        let number = self.streams_made.fetch_add(1, Ordering::Relaxed);
        // Any odd factor keeps the seeds of a device's streams apart.
        let chaos = self.setup.chaos.map(|seed| seed ^ number.wrapping_mul(0xA076_1D64_78BD_642F));
        Ok(Arc::new(stream::CpuStream::new(name, stream::Setup { chaos, ..self.setup.clone() })?))
    }

    fn event(&self) -> Result<Arc<dyn Event>> {
        Ok(Arc::new(event::CpuEvent::new(self.setup.tracker.clone())))
    }

    fn memory(&self) -> Vec<(Place, Category, MemoryUse)> {
        self.ledger.report()
    }

    fn ops(&self) -> &dyn Ops {
        &*self.ops
    }
}

/// What both the real and the simulated device say of themselves: the same numbers, so that a plan's "% of peak" holds.
pub(crate) fn device_info(kind: &'static str, threads: usize) -> DeviceInfo {
    let p = processor();
    // Threads beyond the cores add nothing to the peak.
    let busy = threads.min(p.cores) as f64;
    DeviceInfo {
        kind,
        name: p.name.clone(),
        threads,
        memory_bytes: heap::memory_bytes(),
        peak_flops_f32: busy * p.core_flops_f32,
        peak_flops_bf16: busy * p.core_flops_bf16,
    }
}

#[cfg(test)]
mod device_tests;
#[cfg(test)]
mod ops_tests;
