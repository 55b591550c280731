//! The simulated device: what would this program allocate, compute and move? It runs the trainer unchanged, executes
//! nothing and touches no memory: buffers are address ranges in the ledger that the CPU device uses too, operations are
//! checked and counted, copies and host tasks counted, read-backs are zeros. This is how a run is sized before step 0.
//!
//! [`SimDevice::record`] keeps what is enqueued as a [`tape::Tape`]: works on streams, ordered by events. A [`clock`] plays it at the
//! speed of any machine, so that one recording answers for many.

pub mod clock;
mod ops;
pub mod tape;
pub mod work;

pub use ops::SimOps;
pub use work::{Kind, Work};

use crate::cpu::heap::{AddressRange, Ledger};
use crate::device::{Device, DeviceInfo, Event, HostSource, HostTask, Readback, Stream};
use crate::memory::{Buffer, Category, Mapping, MemoryUse, Place, View, ViewMut};
use crate::{Error, OpShape, Ops, Result, checks, cpu};
use std::any::Any;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tape::{Recorder, Tape};

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
pub(crate) struct Counters {
    state: Mutex<State>,
    events: AtomicU32,
    lanes: Mutex<Vec<String>>,
}

/// What one lock guards: an operation takes it once.
struct State {
    kinds: [OpCount; Kind::ALL.len()],
    host_tasks: BTreeMap<String, MoveCount>,
    recorder: Recorder,
}

const NO_COUNTS: [OpCount; Kind::ALL.len()] = [OpCount { calls: 0, flops: 0, bytes: 0 }; Kind::ALL.len()];

impl Default for State {
    fn default() -> State {
        State { kinds: NO_COUNTS, host_tasks: BTreeMap::new(), recorder: Recorder::default() }
    }
}

impl Counters {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Counts `work`, and records it on stream `lane`; `tag` names what it is about, or nothing.
    fn work(&self, lane: usize, work: Work, tag: &str) {
        let mut state = self.lock();
        let count = &mut state.kinds[work.kind as usize];
        count.calls += 1;
        count.flops += work.flops;
        count.bytes += work.bytes + work.host_bytes;
        state.recorder.work(lane, work, tag);
    }
}

impl State {
    fn counts(&self) -> SimCounts {
        let moved = |kind: Kind| MoveCount { calls: self.kinds[kind as usize].calls, bytes: self.kinds[kind as usize].bytes };
        let ops = Kind::ALL.iter().filter(|k| k.is_op()).map(|&k| (k.name(), self.kinds[k as usize]));
        SimCounts {
            ops: ops.filter(|(_, count)| count.calls > 0).collect(),
            copies: moved(Kind::Copy),
            fills: moved(Kind::Fill),
            writes: moved(Kind::Write),
            reads: moved(Kind::Read),
            host_tasks: self.host_tasks.clone(),
        }
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
        self.counters.lock().counts()
    }

    /// Starts counting anew, to look at one step or one phase.
    pub fn reset_counts(&self) {
        let mut state = self.counters.lock();
        state.kinds = NO_COUNTS;
        state.host_tasks.clear();
    }

    /// Starts a new tape. `items` are made room for.
    pub fn record(&self, items: usize) {
        let lanes = self.counters.lanes.lock().unwrap_or_else(|e| e.into_inner()).clone();
        self.counters.lock().recorder.start(&lanes, items);
    }

    /// Marks this place of the first stream: `mark` 0 begins what is repeated, 1 ends it.
    pub fn mark(&self, mark: u32) {
        self.counters.lock().recorder.mark(mark, 0);
    }

    /// Ends the tape. What lies between the marks stands for `repeats` times itself.
    pub fn take_tape(&self, repeats: u64) -> Tape {
        let mut state = self.counters.lock();
        state.recorder.repeats(repeats);
        state.recorder.take()
    }

    /// For a communicator that simulates the ranks of this device.
    pub fn link(&self) -> SimLink {
        SimLink(self.counters.clone())
    }
}

/// Where a simulated communicator notes its collectives.
#[derive(Clone)]
pub struct SimLink(Arc<Counters>);

impl SimLink {
    /// A collective of `bytes` (of its longer operand) of `dtype` on stream `s`.
    pub fn collective(&self, kind: Kind, dtype: crate::DType, bytes: usize, tag: &str, s: &dyn Stream) {
        let work = Work { kind, dtype, forms: 0, crosses: false, dims: [0; 3], flops: 0, bytes: bytes as u64, host_bytes: 0 };
        self.0.work(s.index(), work, tag);
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
        let mut lanes = self.counters.lanes.lock().unwrap_or_else(|e| e.into_inner());
        lanes.push(name.to_string());
        Ok(Arc::new(SimStream { name: name.to_string(), index: lanes.len() - 1, counters: self.counters.clone() }))
    }

    fn event(&self) -> Result<Arc<dyn Event>> {
        Ok(Arc::new(SimEvent::new(&self.counters)))
    }

    fn memory(&self) -> Vec<(Place, Category, MemoryUse)> {
        self.ledger.report()
    }

    fn ops(&self) -> &dyn Ops {
        &self.ops
    }
}

/// Always passed: nothing runs, so nothing is ever pending. Remembers where on the tape it was recorded last.
struct SimEvent {
    number: u32,
    /// Recording and item, each 32 bits.
    recorded: AtomicU64,
    counters: Arc<Counters>,
}

impl SimEvent {
    fn new(counters: &Arc<Counters>) -> SimEvent {
        SimEvent { number: counters.events.fetch_add(1, Relaxed), recorded: AtomicU64::new(0), counters: counters.clone() }
    }

    fn place(&self) -> tape::Place {
        let place = self.recorded.load(Relaxed);
        ((place >> 32) as u32, place as u32)
    }

    fn record(&self, lane: usize) {
        if let Some((epoch, item)) = self.counters.lock().recorder.record(lane, self.number) {
            self.recorded.store(u64::from(epoch) << 32 | u64::from(item), Relaxed);
        }
    }
}

impl Event for SimEvent {
    fn query(&self) -> bool {
        true
    }
    fn sync(&self, _deadline: Duration) -> Result<()> {
        self.counters.lock().recorder.host_wait(self.place());
        Ok(())
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Counts and records.
struct SimStream {
    name: String,
    index: usize,
    counters: Arc<Counters>,
}

impl Stream for SimStream {
    fn name(&self) -> &str {
        &self.name
    }

    fn index(&self) -> usize {
        self.index
    }

    fn record(&self, event: &Arc<dyn Event>) -> Result<()> {
        if let Some(event) = event.as_any().downcast_ref::<SimEvent>() {
            event.record(self.index);
        }
        Ok(())
    }

    fn wait(&self, event: &Arc<dyn Event>) -> Result<()> {
        if let Some(event) = event.as_any().downcast_ref::<SimEvent>() {
            self.counters.lock().recorder.wait(self.index, event.number, event.place());
        }
        Ok(())
    }

    fn copy(&self, dst: &ViewMut, src: &View) -> Result<()> {
        checks::copy(dst, src)?;
        let both = dst.bytes() + src.bytes();
        let mut work = Work::between(Kind::Copy, dst, 0, both, src, src.bytes());
        // Counted once, as the bytes that arrive; reading them is told by `crosses`.
        (work.bytes, work.host_bytes) = if dst.place() == Place::Device { (dst.bytes() as u64, 0) } else { (0, dst.bytes() as u64) };
        self.counters.work(self.index, work, src.name());
        Ok(())
    }

    fn fill(&self, dst: &ViewMut, _value: f32) -> Result<()> {
        self.counters.work(self.index, Work::moving(Kind::Fill, dst, 0, dst.bytes()), "");
        Ok(())
    }

    fn write(&self, dst: &ViewMut, what: &str, _source: HostSource) -> Result<()> {
        self.counters.work(self.index, Work::moving(Kind::Write, dst, 0, dst.bytes()), what);
        Ok(())
    }

    fn read(&self, src: &View) -> Result<Readback> {
        self.counters.work(self.index, Work::moving(Kind::Read, src, 0, src.bytes()), src.name());
        let event = SimEvent::new(&self.counters);
        event.record(self.index);
        Ok(Readback::new(Arc::new(event), Arc::new(Mutex::new(vec![0; src.bytes()]))))
    }

    fn host(&self, task: HostTask) -> Result<()> {
        let bytes: usize = task.reads.iter().map(View::bytes).chain(task.writes.iter().map(|v| v.bytes())).sum();
        let work = Work {
            kind: Kind::Host,
            dtype: crate::DType::U8,
            forms: 0,
            crosses: false,
            dims: [0; 3],
            flops: 0,
            bytes: 0,
            host_bytes: bytes as u64,
        };
        self.counters.work(self.index, work, &task.name);
        let mut state = self.counters.lock();
        match state.host_tasks.get_mut(&*task.name) {
            Some(count) => count.add(bytes),
            None => state.host_tasks.entry(task.name.into_owned()).or_default().add(bytes),
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
    fn a_tape_keeps_works_and_their_order_and_costs_little() {
        use tape::What;
        let d = device();
        let (compute, comm) = (d.stream("compute").unwrap(), d.stream("comm").unwrap());
        let (e, f) = (d.event().unwrap(), d.event().unwrap());
        let x = f32s(&d, 8);
        compute.record(&f).unwrap();
        d.record(64);
        comm.wait(&f).unwrap();
        for _ in 0..2 {
            d.ops().scale(&x, 2.0, &*compute).unwrap();
        }
        d.link().collective(Kind::AllReduce, DType::F32, 32, "layers.0", &*comm);
        comm.record(&e).unwrap();
        compute.wait(&e).unwrap();
        let back = compute.read(&x).unwrap();
        back.f32s(LONG).unwrap();
        compute.record(&f).unwrap();
        let t = d.take_tape(1);
        assert_eq!((t.lanes.len(), t.works.len()), (2, 3));
        let what: Vec<What> = t.items.iter().map(|i| i.what).collect();
        assert_eq!(what[0], What::WaitBefore { record: 9 }, "recorded before this step: the step before, so its last record here");
        assert_eq!((what[1], what[2]), (What::Work { work: 0, tag: 0 }, What::Work { work: 0, tag: 0 }));
        assert!(matches!(what[3], What::Work { work: 1, tag } if t.names[tag as usize] == "layers.0"));
        assert_eq!((what[5], what[8]), (What::Wait { record: 4 }, What::HostWait { record: 7 }));
        // At most 250 ns an operation is asked for on a quiet machine; what is bounded here is that nothing grows.
        d.record(100_000);
        let start = std::time::Instant::now();
        for _ in 0..100_000 {
            d.ops().scale(&x, 2.0, &*compute).unwrap();
        }
        println!("{:.0} ns per simulated operation", start.elapsed().as_secs_f64() * 1e9 / 1e5);
        let t = d.take_tape(1);
        assert_eq!((t.items.len(), t.items.capacity(), t.works.len()), (100_000, 100_000, 1), "no allocation while recording");
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
