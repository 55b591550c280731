//! How does work get to a GPU? A stream is a queue, a thread that issues what is in it, and a queue of the driver.
//!
//! Calls enqueue and return; the thread makes the driver's calls in order. It waits for the device only where the host itself has to
//! act: to run host code, and for large pieces of pageable memory. Waiting for another stream's event waits until that stream's thread
//! has issued the record, then the driver orders the two queues. A stream that failed drops later work unrun and passes later points,
//! carrying the error, so that nobody who waits hangs. Operands are held until the device has passed a point behind their use.
#![allow(unsafe_code)]

use super::code::Code;
use super::driver::{Driver, RawEvent, RawStream};
use super::event::{GpuEvent, Held, Pause, Point, lock};
use super::launch::Work;
use super::ring::{self, Ring};
use crate::cpu::trace::{Trace, TraceEvent, TraceKind};
use crate::device::HostSource;
use crate::{Error, Event, HostTask, NativeTask, Readback, Result, Stream, View, ViewMut, checks};
use std::any::Any;
use std::borrow::Cow;
use std::cell::Cell;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{JoinHandle, ThreadId};
use std::time::{Duration, Instant};

/// What a device gives to its streams.
#[derive(Clone)]
pub(super) struct Setup {
    pub driver: Arc<Driver>,
    pub code: Arc<Code>,
    /// False: work is issued in the thread that enqueues it, and waited for at once, so that an error is where it was caused.
    pub threaded: bool,
    /// Seed of random delays before tasks.
    pub chaos: Option<u64>,
    pub trace: Option<Arc<Base>>,
}

/// A timeline, and a moment that the device and the host both have a time for.
pub(super) struct Base {
    pub trace: Trace,
    pub event: RawEvent,
    pub at_ns: u64,
}

/// Issues something: on the driver's queue, or by waiting for it and acting on the host.
type Issue = Box<dyn FnOnce(&Shared, &mut Issuer) -> Result<()> + Send>;

enum Item {
    Kernels(Work),
    Task { name: Cow<'static, str>, views: Vec<View>, issue: Issue },
    Record(Arc<Point>),
    Wait(Arc<Point>),
}

#[derive(Default)]
struct Queue {
    items: VecDeque<Item>,
    sleeping: bool,
    closed: bool,
}

/// What the issuing thread keeps between items.
pub(super) struct Issuer {
    held: Held,
    /// Items since the last point.
    since: usize,
    /// The driver's queue may hold something that was not waited for.
    dirty: bool,
    ring: Ring,
    params: Vec<u64>,
}

/// Points are made at least this often, so that what is held is let go.
const ITEMS_PER_POINT: usize = 256;
/// How long the end of a stream waits for its device.
const END: Duration = Duration::from_secs(20);

/// What a stream's thread, its handle and its points share.
pub(super) struct Shared {
    id: u64,
    name: Arc<str>,
    setup: Setup,
    raw: RawStream,
    queue: Mutex<Queue>,
    wake: Condvar,
    queued: AtomicUsize,
    failed: AtomicBool,
    error: Mutex<Option<Error>>,
    /// Issued and not known to be passed, in order.
    points: Mutex<VecDeque<Arc<Point>>>,
    issuer: Mutex<Issuer>,
    /// Inline mode: who issues.
    runner: Mutex<Option<ThreadId>>,
    chaos_state: AtomicU64,
    me: std::sync::Weak<Shared>,
}

thread_local! {
    /// True in the threads of streams.
    static IS_WORKER: Cell<bool> = const { Cell::new(false) };
}

/// A stream of a GPU. Dropping it runs what is queued first.
pub(super) struct GpuStream {
    shared: Arc<Shared>,
    worker: Option<JoinHandle<()>>,
}

impl GpuStream {
    pub fn new(name: &str, setup: Setup) -> Result<GpuStream> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        setup.driver.enter()?;
        let raw = setup.driver.stream(name)?;
        let ring = Ring::new(&setup.driver, name)?;
        let issuer = Issuer { held: Held::default(), since: 0, dirty: false, ring, params: Vec::new() };
        let shared = Arc::new_cyclic(|me| Shared {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            name: name.into(),
            chaos_state: AtomicU64::new(setup.chaos.unwrap_or(0)),
            setup,
            raw,
            queue: Mutex::default(),
            wake: Condvar::new(),
            queued: AtomicUsize::new(0),
            failed: AtomicBool::new(false),
            error: Mutex::new(None),
            points: Mutex::default(),
            issuer: Mutex::new(issuer),
            runner: Mutex::new(None),
            me: me.clone(),
        });
        let worker = if shared.setup.threaded {
            let inner = shared.clone();
            let thread = std::thread::Builder::new().name(name.replace('\0', " ")).spawn(move || inner.work());
            Some(thread.map_err(|e| shared.task_error("start of its thread", e.to_string()))?)
        } else {
            None
        };
        Ok(GpuStream { shared, worker })
    }

    /// Enqueues the kernels of an operation.
    pub fn launch(&self, work: Work) -> Result<()> {
        self.push(Item::Kernels(work))
    }

    fn task(
        &self,
        name: Cow<'static, str>,
        views: Vec<View>,
        issue: impl FnOnce(&Shared, &mut Issuer) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        self.push(Item::Task { name, views, issue: Box::new(issue) })
    }

    fn push(&self, item: Item) -> Result<()> {
        self.shared.failure()?;
        self.shared.push(item)?;
        // In inline mode it has run.
        if self.shared.setup.threaded { Ok(()) } else { self.shared.failure() }
    }
}

impl Drop for GpuStream {
    fn drop(&mut self) {
        let shared = &self.shared;
        if let Some(worker) = self.worker.take() {
            lock(&shared.queue).closed = true;
            shared.wake.notify_all();
            // A task may hold the last handle to its own stream: its thread must not wait for itself.
            if IS_WORKER.get() {
                return;
            }
            // The worker catches all panics of tasks.
            let _ = worker.join();
        } else {
            shared.end();
        }
    }
}

/// Whether the device works in the memory of `view`, or the host.
fn on_device(op: &'static str, view: &View) -> Result<bool> {
    match (view.host_ptr(), view.address()) {
        (Some(_), _) => Ok(false),
        (None, Some(_)) => Ok(true),
        (None, None) => Err(Error::NotHost { op }),
    }
}

/// An address that goes along to the issuing thread, whose memory the item's views hold.
#[derive(Clone, Copy)]
struct At(u64);

impl At {
    fn of(op: &'static str, view: &View) -> Result<At> {
        view.address().map(At).ok_or(Error::NotHost { op })
    }

    fn host(self) -> *mut u8 {
        self.0 as usize as *mut u8
    }
}

impl Shared {
    pub fn driver(&self) -> &Arc<Driver> {
        &self.setup.driver
    }

    fn task_error(&self, task: &str, why: String) -> Error {
        Error::Task { stream: self.name.to_string(), task: task.to_string(), why }
    }

    fn failure(&self) -> Result<()> {
        if !self.failed.load(Ordering::Acquire) {
            return Ok(());
        }
        lock(&self.error).clone().map_or(Ok(()), Err)
    }

    /// Keeps the first error.
    fn fail(&self, error: Error) {
        lock(&self.error).get_or_insert(error);
        self.failed.store(true, Ordering::Release);
    }

    /// Lets go of what the device has passed.
    pub fn retire(&self) {
        if let Err(e) = self.driver().enter() {
            self.fail(e);
        }
        let mut points = lock(&self.points);
        while let Some(outcome) = points.front().and_then(|p| p.try_pass()) {
            points.pop_front();
            if let Err(e) = outcome {
                self.fail(e);
            }
        }
    }

    fn push(&self, item: Item) -> Result<()> {
        if !self.setup.threaded {
            let me = std::thread::current().id();
            if lock(&self.runner).replace(me) == Some(me) {
                return Err(self.task_error("issue", "a task of an inline stream enqueues on its own stream".into()));
            }
            let mut issuer = lock(&self.issuer);
            self.run(item, &mut issuer);
            if let Err(e) = self.drain(&mut issuer) {
                self.fail(e);
            }
            *lock(&self.runner) = None;
            return Ok(());
        }
        let mut queue = lock(&self.queue);
        queue.items.push_back(item);
        self.queued.fetch_add(1, Ordering::Release);
        if queue.sleeping {
            queue.sleeping = false;
            drop(queue);
            self.wake.notify_one();
        }
        Ok(())
    }

    fn work(&self) {
        IS_WORKER.set(true);
        if let Err(e) = self.driver().enter() {
            self.fail(e);
        }
        let mut issuer = lock(&self.issuer);
        loop {
            let mut spins = 0;
            while self.queued.load(Ordering::Acquire) == 0 && spins < 200 {
                std::hint::spin_loop();
                spins += 1;
            }
            let mut queue = lock(&self.queue);
            while queue.items.is_empty() {
                if queue.closed {
                    drop(queue);
                    drop(issuer);
                    self.end();
                    return;
                }
                queue.sleeping = true;
                queue = self.wake.wait(queue).unwrap_or_else(PoisonError::into_inner);
            }
            queue.sleeping = false;
            let batch = std::mem::take(&mut queue.items);
            drop(queue);
            self.queued.fetch_sub(batch.len(), Ordering::AcqRel);
            batch.into_iter().for_each(|item| self.run(item, &mut issuer));
        }
    }

    /// Waits for the device and gives the driver's queue back; one that does not end stays with the driver.
    fn end(&self) {
        let mut issuer = lock(&self.issuer);
        let (until, mut pause) = (Instant::now() + END, Pause::default());
        let last = self.point(&mut issuer);
        while Instant::now() < until {
            self.retire();
            if last.try_pass().is_some() {
                // Errors were reported where they mattered.
                let _ = self.driver().end_stream(self.raw);
                return;
            }
            pause.once();
        }
        // Memory that the device may still use must not be freed.
        std::mem::forget(std::mem::take(&mut *lock(&self.points)));
    }

    fn run(&self, item: Item, issuer: &mut Issuer) {
        match item {
            Item::Record(point) => self.issue_point(&point, issuer),
            Item::Wait(point) => self.wait(&point, issuer),
            Item::Kernels(work) => {
                let (op, views) = (work.op, work.reads.iter().cloned().chain(work.writes.iter().map(|w| w.view())).collect());
                self.run_task(Cow::Borrowed(op), views, issuer, |shared, issuer| shared.kernels(work, issuer));
            }
            Item::Task { name, views, issue } => self.run_task(name, views, issuer, issue),
        }
    }

    fn run_task(
        &self,
        name: Cow<'static, str>,
        views: Vec<View>,
        issuer: &mut Issuer,
        issue: impl FnOnce(&Shared, &mut Issuer) -> Result<()>,
    ) {
        if self.failed.load(Ordering::Acquire) {
            // What a closure captured may panic when dropped; the thread must live on to pass later points.
            let _ = catch_unwind(AssertUnwindSafe(|| drop(issue)));
            return;
        }
        self.delay();
        let started = self.setup.trace.clone().map(|base| (base, self.driver().record(self.raw, true)));
        match catch_unwind(AssertUnwindSafe(|| issue(self, issuer))) {
            Ok(Ok(())) => {}
            Ok(Err(e @ (Error::Task { .. } | Error::OutOfMemory { .. }))) => self.fail(e),
            Ok(Err(e)) => self.fail(self.task_error(&name, e.to_string())),
            Err(panic) => {
                let text = panic.downcast_ref::<&str>().map(|s| s.to_string()).or_else(|| panic.downcast_ref::<String>().cloned());
                self.fail(self.task_error(&name, format!("panicked: {}", text.unwrap_or_else(|| "no message".into()))));
            }
        }
        if let Some((base, begun)) = started {
            self.note(name, base, begun, issuer);
        }
        issuer.held.views.extend(views);
        issuer.since += 1;
        if issuer.since >= ITEMS_PER_POINT {
            self.point(issuer);
        }
    }

    /// Puts a task on the timeline once the device has passed it.
    fn note(&self, name: Cow<'static, str>, base: Arc<Base>, begun: Result<RawEvent>, issuer: &mut Issuer) {
        let (Ok(begun), Ok(ended)) = (begun, self.driver().record(self.raw, true)) else { return };
        let (stream_id, stream) = (self.id, self.name.clone());
        issuer.held.checks.push(Box::new(move || {
            let at = |event: &RawEvent| Ok::<u64, Error>(base.at_ns + base.event.ns_to(event)?);
            let (name, start_ns, end_ns, kind) = (name.into_owned(), at(&begun)?, at(&ended)?, TraceKind::Task);
            base.trace.push(TraceEvent { stream_id, stream, name, start_ns, end_ns, kind });
            Ok(())
        }));
    }

    /// Makes a point behind everything issued so far.
    fn point(&self, issuer: &mut Issuer) -> Arc<Point> {
        let point = Point::new(self.name.clone(), self.me.clone());
        self.issue_point(&point, issuer);
        point
    }

    fn issue_point(&self, point: &Arc<Point>, issuer: &mut Issuer) {
        issuer.since = 0;
        let held = std::mem::take(&mut issuer.held);
        match self.driver().record(self.raw, false) {
            // A failed stream's points carry its error once the device has passed what was issued before.
            Ok(event) => {
                let mut held = held;
                if let Err(e) = self.failure() {
                    held.checks.push(Box::new(move || Err(e)));
                }
                let mut points = lock(&self.points);
                point.issue(event, held, points.back().cloned());
                points.push_back(point.clone());
            }
            Err(e) => {
                self.fail(e.clone());
                // Whatever the device still does with these: it has failed.
                point.pass(Err(self.failure().err().unwrap_or(e)));
                drop(held);
            }
        }
        self.retire();
    }

    fn wait(&self, point: &Arc<Point>, issuer: &mut Issuer) {
        if self.failed.load(Ordering::Acquire) {
            return;
        }
        match point.issued() {
            Ok(event) => {
                issuer.dirty = true;
                if let Err(e) = self.driver().wait(self.raw, &event) {
                    self.fail(e);
                }
                // What that stream finds out when the point is passed concerns this one too.
                let point = point.clone();
                issuer.held.checks.push(Box::new(move || point.settle().unwrap_or(Ok(()))));
            }
            Err(Ok(())) => {}
            Err(Err(e)) => self.fail(e),
        }
    }

    /// Waits until the device has passed everything issued so far.
    fn drain(&self, issuer: &mut Issuer) -> Result<()> {
        if !issuer.dirty {
            return self.failure();
        }
        let point = self.point(issuer);
        let mut pause = Pause::default();
        loop {
            self.retire();
            if let Some(outcome) = point.try_pass() {
                issuer.dirty = false;
                return outcome;
            }
            pause.once();
        }
    }

    /// Makes room for pieces of these bytes that are used together.
    fn reserve(&self, pieces: impl Iterator<Item = usize>, issuer: &mut Issuer) -> Result<()> {
        if issuer.ring.is_full(pieces.map(ring::room).sum()) {
            let behind = self.point(issuer);
            if let Some(before) = issuer.ring.turn(behind) {
                before.wait(Duration::MAX)?;
            }
        }
        Ok(())
    }

    /// A piece of staging memory.
    fn piece(&self, bytes: usize, issuer: &mut Issuer) -> Result<ring::Piece> {
        self.reserve(std::iter::once(bytes), issuer)?;
        issuer.ring.take(bytes)
    }

    fn kernels(&self, work: Work, issuer: &mut Issuer) -> Result<()> {
        let (driver, s) = (self.driver().clone(), self.raw);
        issuer.dirty = true;
        let pieces = work.launches.iter().filter_map(|l| l.data.as_ref()).map(|(_, bytes)| bytes.len());
        self.reserve(pieces.chain(work.fault.map(|_| 8)), issuer)?;
        let cell = match &work.fault {
            Some(_) => Some(self.piece(8, issuer)?),
            None => None,
        };
        if let Some(cell) = cell {
            // SAFETY: eight bytes of the ring.
            unsafe { driver.set_bytes(s, cell.device, 0xFF, 8)? };
        }
        for launch in work.launches {
            let data = match &launch.data {
                Some((at, bytes)) => Some((*at, self.upload(bytes, issuer)?)),
                None => None,
            };
            let function = self.setup.code.function(launch.kernel, launch.shared_bytes)?;
            issuer.params.clear();
            issuer.params.resize(launch.params.len().div_ceil(8), 0);
            let params: &mut [u8] = bytemuck::cast_slice_mut(&mut issuer.params);
            params[..launch.params.len()].copy_from_slice(&launch.params);
            for (at, address) in [launch.fault_at.zip(cell.map(|c| c.device)), data].into_iter().flatten() {
                let place = params.get_mut(at..at + 8);
                place
                    .ok_or_else(|| Error::Shape { op: work.op, what: format!("{}: no place for an address", launch.kernel) })?
                    .copy_from_slice(&address.to_ne_bytes());
            }
            // SAFETY: the operation built the struct of this kernel; views of its memory are held until a point behind it.
            let launched = unsafe { driver.launch(s, function, launch.grid, launch.threads, launch.shared_bytes, &mut issuer.params) };
            launched.map_err(|e| self.task_error(work.op, format!("{}: {e}", launch.kernel)))?;
        }
        if let (Some(cell), Some(fault)) = (cell, work.fault) {
            // SAFETY: eight bytes of the ring.
            unsafe { driver.to_host(s, cell.host, cell.device, 8)? };
            let (at, op, stream) = (At(cell.host as u64), work.op, self.name.to_string());
            issuer.held.checks.push(Box::new(move || {
                // SAFETY: the copy to these bytes of the ring has run, and they are not used again before this point was passed.
                let cell = unsafe { at.host().cast::<u64>().read_volatile() };
                fault.check(op, cell).map_err(|e| Error::Task { stream, task: op.to_string(), why: e.to_string() })
            }));
        }
        Ok(())
    }

    /// Bytes on the device, behind what was issued so far.
    fn upload(&self, bytes: &[u8], issuer: &mut Issuer) -> Result<u64> {
        if bytes.len() > ring::MOST_BYTES {
            return Err(Error::Shape { op: "upload", what: format!("{} bytes for one launch, at most {}", bytes.len(), ring::MOST_BYTES) });
        }
        let piece = self.piece(bytes.len(), issuer)?;
        // SAFETY: a piece of the ring of this length, not in use.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), piece.host, bytes.len());
            self.driver().to_device(self.raw, piece.device, piece.host, bytes.len())?;
        }
        Ok(piece.device)
    }

    /// Chaos: nothing, a yield, or up to 300 microseconds of sleep, by a generator that only this stream draws from.
    fn delay(&self) {
        if self.setup.chaos.is_some() {
            crate::cpu::stream::chaos_pause(&self.chaos_state);
        }
    }
}

fn gpu_event<'a>(op: &'static str, event: &'a Arc<dyn Event>) -> Result<&'a GpuEvent> {
    let what = || Error::Shape { op, what: "the event belongs to another kind of device, expected one made by a GPU".into() };
    event.as_any().downcast_ref::<GpuEvent>().ok_or_else(what)
}

impl Stream for GpuStream {
    fn name(&self) -> &str {
        &self.shared.name
    }

    fn as_any(&self) -> Option<&dyn Any> {
        Some(self)
    }

    fn record(&self, event: &Arc<dyn Event>) -> Result<()> {
        let event = gpu_event("record", event)?;
        let point = Point::new(self.shared.name.clone(), self.shared.me.clone());
        // Set before it can pass: a concurrent wait sees this record or the one before, never a gap.
        event.set(point.clone());
        self.shared.push(Item::Record(point))?;
        self.shared.failure()
    }

    fn wait(&self, event: &Arc<dyn Event>) -> Result<()> {
        match gpu_event("wait", event)?.latest() {
            Some(point) if !point.is_of(&self.shared) => self.push(Item::Wait(point)),
            _ => self.shared.failure(),
        }
    }

    fn copy(&self, dst: &ViewMut, src: &View) -> Result<()> {
        checks::copy(dst, src)?;
        let (to, from, bytes) = (At::of("copy", dst)?, At::of("copy", src)?, src.bytes());
        let (to_gpu, from_gpu) = (on_device("copy", dst)?, on_device("copy", src)?);
        self.task("copy".into(), vec![dst.view(), src.clone()], move |shared, issuer| {
            let (driver, s) = (shared.driver(), shared.raw);
            // SAFETY (these four): both ranges lie in live allocations, which the item's views hold until the copy has run; exclusive
            // by the contract of views.
            match (to_gpu, from_gpu) {
                (true, true) => unsafe { driver.on_device(s, to.0, from.0, bytes)? },
                (true, false) => unsafe { driver.to_device(s, to.0, from.host(), bytes)? },
                (false, true) => unsafe { driver.to_host(s, to.host(), from.0, bytes)? },
                (false, false) => {
                    shared.drain(issuer)?;
                    unsafe { std::ptr::copy(from.host(), to.host(), bytes) };
                    return Ok(());
                }
            }
            issuer.dirty = true;
            Ok(())
        })
    }

    fn fill(&self, dst: &ViewMut, value: f32) -> Result<()> {
        use crate::DType::{BF16, F32, I32, U8};
        let (to, bytes, dtype) = (At::of("fill", dst)?, dst.bytes(), dst.dtype());
        let half = half::bf16::from_f32(value).to_bits();
        // Halves are set in pairs; an odd one at either end is left to the kernel.
        let pairs = to.0.is_multiple_of(4) && bytes.is_multiple_of(4);
        let word = match dtype {
            F32 => Some(value.to_bits()),
            I32 => Some(value as i32 as u32),
            BF16 if pairs => Some(u32::from(half) << 16 | u32::from(half)),
            BF16 | U8 => None,
        };
        if !on_device("fill", dst)? {
            let target = dst.clone();
            return self.task("fill".into(), vec![dst.view()], move |shared, issuer| {
                shared.drain(issuer)?;
                crate::cpu::stream::set_all(&target, value)
            });
        }
        match word {
            None if dtype == BF16 => {
                let launcher = super::device::GpuLauncher::of(&self.shared.setup);
                super::elementwise::fill(&launcher, dst, value, self)
            }
            _ => self.task("fill".into(), vec![dst.view()], move |shared, issuer| {
                issuer.dirty = true;
                // SAFETY: the range lies in a live allocation, which the item's view holds.
                match word {
                    Some(word) => unsafe { shared.driver().set_words(shared.raw, to.0, word, bytes / 4) },
                    None => unsafe { shared.driver().set_bytes(shared.raw, to.0, value as u8, bytes) },
                }
            }),
        }
    }

    fn write(&self, dst: &ViewMut, what: &str, source: HostSource) -> Result<()> {
        let (to, bytes, gpu, task) = (At::of("write", dst)?, dst.bytes(), on_device("write", dst)?, format!("write {what}"));
        let name = Cow::Owned(task.clone());
        self.task(name, vec![dst.view()], move |shared, issuer| {
            let failed = |why: String| shared.task_error(&task, why);
            if !gpu {
                shared.drain(issuer)?;
                if bytes == 0 {
                    return source(&mut []).map_err(failed);
                }
                // SAFETY: host memory that the item's view holds; exclusive by the contract of views.
                return source(unsafe { std::slice::from_raw_parts_mut(to.host(), bytes) }).map_err(failed);
            }
            if bytes <= ring::MOST_BYTES {
                let piece = shared.piece(bytes, issuer)?;
                issuer.dirty = true;
                // SAFETY: a piece of the ring of this length, not in use, initialized when it was mapped.
                source(unsafe { std::slice::from_raw_parts_mut(piece.host, bytes) }).map_err(failed)?;
                // SAFETY: the piece, and device memory that the item's view holds.
                return unsafe { shared.driver().to_device(shared.raw, to.0, piece.host, bytes) };
            }
            let mut staging = vec![0u8; bytes];
            source(&mut staging).map_err(failed)?;
            issuer.dirty = true;
            // SAFETY: both live until the device has passed the copy, which is waited for here.
            unsafe { shared.driver().to_device(shared.raw, to.0, staging.as_ptr(), bytes)? };
            shared.drain(issuer)
        })
    }

    fn read(&self, src: &View) -> Result<Readback> {
        let (from, bytes, gpu) = (At::of("read", src)?, src.bytes(), on_device("read", src)?);
        let out = Arc::new(Mutex::new(Vec::new()));
        let arrived = out.clone();
        self.task("read".into(), vec![src.clone()], move |shared, issuer| {
            if gpu && bytes <= ring::MOST_BYTES {
                let piece = shared.piece(bytes, issuer)?;
                issuer.dirty = true;
                // SAFETY: the piece, and device memory that the item's view holds.
                unsafe { shared.driver().to_host(shared.raw, piece.host, from.0, bytes)? };
                let at = At(piece.host as u64);
                issuer.held.checks.push(Box::new(move || {
                    // SAFETY: the copy to these bytes of the ring has run, and they are not used again before this point was passed.
                    lock(&arrived).extend_from_slice(unsafe { std::slice::from_raw_parts(at.host(), bytes) });
                    Ok(())
                }));
                return Ok(());
            }
            let mut whole = vec![0u8; bytes];
            if gpu {
                issuer.dirty = true;
                // SAFETY: both live until the device has passed the copy, which is waited for here.
                unsafe { shared.driver().to_host(shared.raw, whole.as_mut_ptr(), from.0, bytes)? };
                shared.drain(issuer)?;
            } else {
                shared.drain(issuer)?;
                // SAFETY: host memory that the item's view holds; no writer by the contract of views.
                unsafe { std::ptr::copy_nonoverlapping(from.host(), whole.as_mut_ptr(), bytes) };
            }
            *lock(&arrived) = whole;
            Ok(())
        })?;
        let event: Arc<dyn Event> = Arc::new(GpuEvent::default());
        // If the stream failed meanwhile, the event carries the error to whoever asks for the bytes.
        let _ = self.record(&event);
        Ok(Readback::new(event, out))
    }

    fn host(&self, task: HostTask) -> Result<()> {
        let HostTask { name, reads, writes, run } = task;
        let on_host = |v: &View| v.host_ptr().is_some();
        if !reads.iter().all(on_host) || !writes.iter().all(|v| on_host(v)) {
            let op = if let Cow::Borrowed(name) = name { name } else { "host task" };
            return Err(Error::NotHost { op });
        }
        let views = reads.into_iter().chain(writes.iter().map(|w| w.view())).collect();
        self.task(name, views, move |shared, issuer| {
            shared.drain(issuer)?;
            run()
        })
    }

    fn native(&self, task: NativeTask) -> Result<()> {
        let NativeTask { name, reads, writes, run } = task;
        let views = reads.into_iter().chain(writes.iter().map(|w| w.view())).collect();
        self.task(name, views, move |shared, issuer| {
            issuer.dirty = true;
            run(shared.raw.native())
        })
    }

    fn sync(&self) -> Result<()> {
        let inside = match &self.worker {
            Some(worker) => worker.thread().id() == std::thread::current().id(),
            None => *lock(&self.shared.runner) == Some(std::thread::current().id()),
        };
        if inside {
            return Err(self.shared.task_error("sync", "called from a task of the same stream, which would wait for itself".into()));
        }
        let event: Arc<dyn Event> = Arc::new(GpuEvent::default());
        let _ = self.record(&event);
        event.sync(Duration::MAX)?;
        self.shared.failure()
    }
}
