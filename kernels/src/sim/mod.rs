//! The simulated device: what would this program allocate, compute and move? It runs the trainer unchanged, executes
//! nothing and touches no memory: buffers are address ranges in the ledger that the CPU device uses too, operations are
//! checked and counted, copies and host tasks counted, read-backs are zeros. This is how a run is sized before step 0.

mod ops;

pub use ops::SimOps;

use crate::cpu::heap::{AddressRange, Ledger};
use crate::device::{Device, DeviceInfo, Event, HostSource, HostTask, Readback, Stream};
use crate::memory::{Buffer, Category, Mapping, MemoryUse, Place, View, ViewMut};
use crate::{Error, OpShape, Ops, Result, checks, cpu};
use std::any::Any;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// How to make a [`SimDevice`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimOptions {
    /// Threads of the CPU device that is simulated: its scratch and its peak depend on them.
    pub threads: usize,
}

/// Calls of one operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpCount {
    /// Calls.
    pub calls: u64,
    /// Floating-point operations: exact for matrix products, a few per element elsewhere. Causal attention counts the
    /// pairs that the mask leaves, as if all documents of a call were of one length.
    pub flops: u64,
    /// Bytes of operands read and written, each once; scratch is left out.
    pub bytes: u64,
}

/// Calls that move bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MoveCount {
    /// Calls.
    pub calls: u64,
    /// Bytes of the destination (or of the source, for reads by the host).
    pub bytes: u64,
}

/// Everything that was enqueued so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SimCounts {
    /// By the operation's name in [`Ops`].
    pub ops: BTreeMap<&'static str, OpCount>,
    /// [`Stream::copy`].
    pub copies: MoveCount,
    /// [`Stream::fill`].
    pub fills: MoveCount,
    /// [`Stream::write`]: host data to the device.
    pub writes: MoveCount,
    /// [`Stream::read`]: to the host.
    pub reads: MoveCount,
    /// [`Stream::host`] by the task's name; bytes declared as read and written.
    pub host_tasks: BTreeMap<String, MoveCount>,
}

impl SimCounts {
    /// Floating-point operations of all operations.
    pub fn flops(&self) -> u64 {
        self.ops.values().map(|o| o.flops).sum()
    }
}

/// Shared by the device, its streams and its operations.
#[derive(Default)]
pub(crate) struct Counters(Mutex<SimCounts>);

impl Counters {
    fn lock(&self) -> MutexGuard<'_, SimCounts> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn op(&self, name: &'static str, flops: u64, bytes: usize) {
        let mut counts = self.lock();
        let op = counts.ops.entry(name).or_default();
        op.calls += 1;
        op.flops += flops;
        op.bytes += bytes as u64;
    }
}

impl MoveCount {
    fn add(&mut self, bytes: usize) {
        self.calls += 1;
        self.bytes += bytes as u64;
    }
}

/// See the module documentation.
pub struct SimDevice {
    options: SimOptions,
    ledger: Arc<Ledger>,
    counters: Arc<Counters>,
    ops: SimOps,
    /// Holds the row of the pool's scratch.
    _scratch: Option<Box<dyn Mapping>>,
}

impl SimDevice {
    /// A device that counts what a CPU device of as many threads would do, with its workspace and its scratch.
    pub fn new(options: SimOptions) -> Result<Arc<SimDevice>> {
        SimDevice::build(options, Box::new(cpu::ops::workspace_bytes), cpu::pool::scratch_bytes(options.threads))
    }

    /// A device that counts. `sizes` answers [`Ops::workspace_bytes`], so that planned sizes are those of the device that
    /// it computes for.
    pub fn with_sizes(options: SimOptions, sizes: impl Fn(OpShape) -> usize + Send + Sync + 'static) -> Result<Arc<SimDevice>> {
        SimDevice::build(options, Box::new(sizes), 0)
    }

    fn build(options: SimOptions, sizes: Box<ops::Sizes>, scratch_bytes: usize) -> Result<Arc<SimDevice>> {
        if options.threads == 0 {
            return Err(Error::Shape { op: "sim device", what: "threads is 0, expected at least 1".into() });
        }
        let (counters, ledger) = (Arc::new(Counters::default()), Arc::new(Ledger::default()));
        let scratch = ledger.scratch(scratch_bytes);
        Ok(Arc::new(SimDevice { options, ledger, ops: SimOps::new(sizes, counters.clone()), counters, _scratch: scratch }))
    }

    /// What it was made with.
    pub fn options(&self) -> SimOptions {
        self.options
    }

    /// Everything enqueued so far, or since [`SimDevice::reset_counts`].
    pub fn counts(&self) -> SimCounts {
        self.counters.lock().clone()
    }

    /// Starts counting anew, to look at one step or one phase.
    pub fn reset_counts(&self) {
        *self.counters.lock() = SimCounts::default();
    }
}

impl Device for SimDevice {
    fn info(&self) -> DeviceInfo {
        cpu::device_info("sim", self.options.threads)
    }

    fn alloc(&self, name: &str, bytes: usize, place: Place, category: Category) -> Result<Buffer> {
        if bytes > isize::MAX as usize / 2 {
            return Err(Error::OutOfMemory { what: name.to_string(), bytes, reason: "more than can be addressed".into() });
        }
        Ok(Buffer::from_mapping(name, place, self.ledger.count(Box::new(AddressRange(bytes)), place, category)))
    }

    fn adopt(&self, buffer: Buffer, category: Category) -> Result<Buffer> {
        Ok(self.ledger.adopt(buffer, category))
    }

    fn stream(&self, name: &str) -> Result<Arc<dyn Stream>> {
        Ok(Arc::new(SimStream { name: name.to_string(), counters: self.counters.clone() }))
    }

    fn event(&self) -> Result<Arc<dyn Event>> {
        Ok(Arc::new(SimEvent))
    }

    fn memory(&self) -> Vec<(Place, Category, MemoryUse)> {
        self.ledger.report()
    }

    fn ops(&self) -> &dyn Ops {
        &self.ops
    }
}

/// Always passed: nothing runs, so nothing is ever pending.
struct SimEvent;

impl Event for SimEvent {
    fn query(&self) -> bool {
        true
    }
    fn sync(&self, _deadline: Duration) -> Result<()> {
        Ok(())
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Counts.
struct SimStream {
    name: String,
    counters: Arc<Counters>,
}

impl Stream for SimStream {
    fn name(&self) -> &str {
        &self.name
    }

    fn record(&self, _event: &Arc<dyn Event>) -> Result<()> {
        Ok(())
    }

    fn wait(&self, _event: &Arc<dyn Event>) -> Result<()> {
        Ok(())
    }

    fn copy(&self, dst: &ViewMut, src: &View) -> Result<()> {
        checks::copy(dst, src)?;
        self.counters.lock().copies.add(dst.bytes());
        Ok(())
    }

    fn fill(&self, dst: &ViewMut, _value: f32) -> Result<()> {
        self.counters.lock().fills.add(dst.bytes());
        Ok(())
    }

    fn write(&self, dst: &ViewMut, _what: &str, _source: HostSource) -> Result<()> {
        self.counters.lock().writes.add(dst.bytes());
        Ok(())
    }

    fn read(&self, src: &View) -> Result<Readback> {
        self.counters.lock().reads.add(src.bytes());
        Ok(Readback::new(Arc::new(SimEvent), Arc::new(Mutex::new(vec![0; src.bytes()]))))
    }

    fn host(&self, task: HostTask) -> Result<()> {
        let bytes = task.reads.iter().map(View::bytes).chain(task.writes.iter().map(|v| v.bytes())).sum();
        let mut counts = self.counters.lock();
        match counts.host_tasks.get_mut(&*task.name) {
            Some(count) => count.add(bytes),
            None => counts.host_tasks.entry(task.name.into_owned()).or_default().add(bytes),
        }
        Ok(())
    }

    fn sync(&self) -> Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Category::Activations, DType, Place::Device as OnDevice, Write};

    const LONG: Duration = Duration::from_secs(60);

    fn device() -> Arc<SimDevice> {
        SimDevice::with_sizes(SimOptions { threads: 2 }, |shape| match shape {
            OpShape::SumSquares { elems } => elems,
            _ => 8,
        })
        .unwrap()
    }

    fn f32s(d: &SimDevice, elems: usize) -> ViewMut {
        d.alloc("v", elems * 4, OnDevice, Activations).unwrap().all(DType::F32).unwrap()
    }

    #[test]
    fn memory_is_only_counted() {
        let d = device();
        // 2^60 bytes: no machine has them.
        let big = d.alloc("big", 1 << 60, OnDevice, Activations).unwrap();
        assert_eq!(d.memory(), [(OnDevice, Activations, MemoryUse { bytes: 1 << 60, peak_bytes: 1 << 60, allocations: 1 })]);
        assert!(big.all(DType::F32).unwrap().host_ptr().is_none());
        assert!(matches!(d.alloc("w", usize::MAX, OnDevice, Activations), Err(Error::OutOfMemory { .. })));
    }

    #[test]
    fn counts_calls_flops_and_bytes() {
        let (d, n, i, o) = (device(), 6, 4, 5);
        let s = d.stream("compute").unwrap();
        let (y, x, w) = (f32s(&d, n * o), f32s(&d, n * i), f32s(&d, o * i).view().into());
        d.ops().linear(&y, Write::Set, &x, &w, None, n, i, o, &*s).unwrap();
        d.ops().linear(&y, Write::Add, &x, &w, None, n, i, o, &*s).unwrap();
        let flops = 2 * 2 * (n * i * o) as u64;
        let bytes = 4 * (3 * n * o + 2 * n * i + 2 * o * i) as u64;
        assert_eq!(d.counts().ops["linear"], OpCount { calls: 2, flops, bytes });
        assert!(d.ops().linear(&y, Write::Set, &x, &w, None, n, o, i, &*s).is_err(), "a wrong call is refused, not counted");
        s.copy(&y, &y.view()).unwrap();
        s.fill(&y, 0.0).unwrap();
        s.write(&x, "batch", Box::new(|_| Err("never run".into()))).unwrap();
        s.host(HostTask { name: "reduce".into(), reads: vec![x.view()], writes: vec![y.clone()], run: Box::new(|| unreachable!()) })
            .unwrap();
        let back = s.read(&x).unwrap();
        assert_eq!(back.f32s(LONG).unwrap(), vec![0.0; n * i]);
        let c = d.counts();
        let one = |elems: usize| MoveCount { calls: 1, bytes: 4 * elems as u64 };
        assert_eq!((c.copies, c.fills, c.writes, c.reads), (one(n * o), one(n * o), one(n * i), one(n * i)));
        assert_eq!(c.host_tasks["reduce"], one(n * i + n * o));
        assert_eq!(c.flops(), flops);
        d.reset_counts();
        assert_eq!(d.counts(), SimCounts::default());
    }

    #[test]
    fn scratch_is_sized_by_the_device_that_is_simulated() {
        let d = device();
        let s = d.stream("s").unwrap();
        let (nodes, x) = (f32s(&d, 96), f32s(&d, 100));
        let scratch = |bytes| d.alloc("scratch", bytes, OnDevice, Category::Workspace).unwrap().all(DType::U8).unwrap();
        assert!(d.ops().sum_squares(&nodes, &x, 0, &scratch(99), &*s).is_err());
        d.ops().sum_squares(&nodes, &x, 0, &scratch(100), &*s).unwrap();
    }

    #[test]
    fn events_never_block() {
        let d = device();
        let (s, e) = (d.stream("s").unwrap(), d.event().unwrap());
        s.record(&e).unwrap();
        s.wait(&e).unwrap();
        assert!(e.query());
        e.sync(Duration::ZERO).unwrap();
        s.sync().unwrap();
    }
}
