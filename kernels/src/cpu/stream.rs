//! How does work run later, in order, and what happens when it fails? A queue and a thread per stream; in inline mode the
//! queue is drained by whoever puts something in.
//!
//! Three kinds of item: a task, a record, a wait. A failed task leaves its error in the stream: later tasks are dropped
//! unrun, later records are still passed, carrying the error, so that nobody who waits hangs. An item is dropped, with the
//! views it holds, before the next one starts, so a record that was passed means that the memory before it is released.
#![allow(unsafe_code)]

use super::event::{CpuEvent, Point, lock, spin};
use super::trace::{Trace, TraceEvent, TraceKind, now_ns};
use super::tracker::Tracker;
use crate::device::HostSource;
use crate::{DType, Error, Event, HostTask, Readback, Result, Stream, View, ViewMut, checks};
use half::bf16;
use std::borrow::Cow;
use std::cell::Cell;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{JoinHandle, ThreadId};
use std::time::Duration;

/// What a device gives to its streams.
#[derive(Clone)]
pub(crate) struct Setup {
    /// False: inline.
    pub threaded: bool,
    /// Seed of random delays before tasks.
    pub chaos: Option<u64>,
    pub tracker: Option<Arc<Tracker>>,
    pub trace: Option<Arc<Trace>>,
}

enum Item {
    Task(HostTask),
    Record(Arc<Point>),
    Wait(Arc<Point>),
}

#[derive(Default)]
struct Queue {
    items: VecDeque<Item>,
    /// The worker waits on `wake`.
    sleeping: bool,
    /// The stream was dropped; the worker ends when the queue is empty.
    closed: bool,
    /// Inline mode: who drains the queue.
    runner: Option<ThreadId>,
}

struct Shared {
    id: u64,
    name: Arc<str>,
    setup: Setup,
    queue: Mutex<Queue>,
    wake: Condvar,
    /// Items in the queue, to be spun on without the lock.
    queued: AtomicUsize,
    failed: AtomicBool,
    error: Mutex<Option<Error>>,
    chaos_state: AtomicU64,
}

thread_local! {
    /// True in the threads of streams.
    static IS_WORKER: Cell<bool> = const { Cell::new(false) };
}

/// A stream of the CPU device. Dropping it runs what is queued first.
pub(crate) struct CpuStream {
    shared: Arc<Shared>,
    worker: Option<JoinHandle<()>>,
}

impl CpuStream {
    pub fn new(name: &str, setup: Setup) -> Result<CpuStream> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let shared = Arc::new(Shared {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            name: name.into(),
            chaos_state: AtomicU64::new(setup.chaos.unwrap_or(0)),
            setup,
            queue: Mutex::default(),
            wake: Condvar::new(),
            queued: AtomicUsize::new(0),
            failed: AtomicBool::new(false),
            error: Mutex::new(None),
        });
        let worker = if shared.setup.threaded {
            let inner = shared.clone();
            let thread = std::thread::Builder::new().name(name.replace('\0', " ")).spawn(move || inner.work());
            Some(thread.map_err(|e| shared.task_error("start of its thread", e.to_string()))?)
        } else {
            None
        };
        Ok(CpuStream { shared, worker })
    }

    fn task(&self, name: &'static str, reads: Vec<View>, writes: Vec<ViewMut>, run: Box<dyn FnOnce() -> Result<()> + Send>) -> Result<()> {
        self.host(HostTask { name: Cow::Borrowed(name), reads, writes, run })
    }

    /// A point after all work so far. Enqueued even if the stream failed: it then carries the error.
    fn point(&self) -> Arc<Point> {
        let s = &self.shared;
        let clock = s.setup.tracker.as_ref().map(|t| t.record(s.id)).unwrap_or_default();
        Point::new(s.id, s.name.clone(), clock)
    }
}

impl Drop for CpuStream {
    fn drop(&mut self) {
        if let Some(worker) = self.worker.take() {
            lock(&self.shared.queue).closed = true;
            self.shared.wake.notify_all();
            // A task may hold the last handle to its own stream, or to one that waits for an event behind the task: its
            // thread must not wait here. The stream then ends by itself once its queue is empty.
            if IS_WORKER.get() {
                return;
            }
            // The worker catches all panics of tasks.
            let _ = worker.join();
        }
        if let Some(tracker) = &self.shared.setup.tracker {
            tracker.ended(self.shared.id);
        }
    }
}

impl Shared {
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

    fn push(&self, item: Item) {
        let mut queue = lock(&self.queue);
        queue.items.push_back(item);
        if self.setup.threaded {
            self.queued.fetch_add(1, Ordering::Release);
            if queue.sleeping {
                queue.sleeping = false;
                drop(queue);
                self.wake.notify_one();
            }
            return;
        }
        // Inline: drain the queue here, unless this very thread does so already further up (a task that enqueues on its
        // own stream); wait for another thread that does.
        let me = std::thread::current().id();
        loop {
            match queue.runner {
                Some(id) if id == me => return,
                Some(_) => queue = self.wake.wait(queue).unwrap_or_else(|e| e.into_inner()),
                None => break,
            }
        }
        queue.runner = Some(me);
        while let Some(item) = queue.items.pop_front() {
            drop(queue);
            self.run(item);
            queue = lock(&self.queue);
        }
        queue.runner = None;
        self.wake.notify_all();
    }

    fn work(&self) {
        IS_WORKER.set(true);
        loop {
            spin(|| self.queued.load(Ordering::Acquire) > 0);
            let mut queue = lock(&self.queue);
            while queue.items.is_empty() {
                if queue.closed {
                    return;
                }
                queue.sleeping = true;
                queue = self.wake.wait(queue).unwrap_or_else(|e| e.into_inner());
            }
            queue.sleeping = false;
            let batch = std::mem::take(&mut queue.items);
            drop(queue);
            self.queued.fetch_sub(batch.len(), Ordering::AcqRel);
            batch.into_iter().for_each(|item| self.run(item));
        }
    }

    fn run(&self, item: Item) {
        match item {
            Item::Task(task) => self.run_task(task),
            Item::Record(point) => {
                let at = self.setup.trace.as_ref().map(|_| now_ns());
                point.pass(self.failure());
                if let Some(at) = at {
                    self.note(String::new(), at, TraceKind::Record(point.id));
                }
            }
            Item::Wait(point) => {
                if self.failed.load(Ordering::Acquire) {
                    return;
                }
                let start = self.setup.trace.as_ref().map(|_| now_ns());
                if let Err(e) = point.wait(None) {
                    self.fail(e);
                }
                if let Some(start) = start {
                    self.note(point.stream.to_string(), start, TraceKind::Wait(point.id));
                }
            }
        }
    }

    fn run_task(&self, task: HostTask) {
        let HostTask { name, reads, writes, run } = task;
        if self.failed.load(Ordering::Acquire) {
            // What a closure captured may panic when dropped; the thread must live on to pass later records.
            let _ = catch_unwind(AssertUnwindSafe(|| drop(run)));
            return;
        }
        self.delay();
        let start = self.setup.trace.as_ref().map(|_| now_ns());
        match catch_unwind(AssertUnwindSafe(run)) {
            Ok(Ok(())) => {}
            Ok(Err(e @ Error::Task { .. })) => self.fail(e),
            Ok(Err(e)) => self.fail(self.task_error(&name, e.to_string())),
            Err(panic) => {
                let text = panic.downcast_ref::<&str>().map(|s| s.to_string()).or_else(|| panic.downcast_ref::<String>().cloned());
                self.fail(self.task_error(&name, format!("panicked: {}", text.unwrap_or_else(|| "no message".into()))));
            }
        }
        if let Some(start) = start {
            self.note(name.into_owned(), start, TraceKind::Task);
        }
        drop((reads, writes));
    }

    fn note(&self, name: String, start_ns: u64, kind: TraceKind) {
        if let Some(trace) = &self.setup.trace {
            let end_ns = if matches!(kind, TraceKind::Record(_)) { start_ns } else { now_ns() };
            trace.push(TraceEvent { stream_id: self.id, stream: self.name.clone(), name, start_ns, end_ns, kind });
        }
    }

    /// Chaos: nothing, a yield, or up to 300 microseconds of sleep, by a generator that only this stream draws from.
    fn delay(&self) {
        if self.setup.chaos.is_none() {
            return;
        }
        chaos_pause(&self.chaos_state);
    }
}

/// Nothing, a yield, or up to 300 microseconds of sleep, by a generator of its own state.
pub(crate) fn chaos_pause(state: &AtomicU64) {
    // splitmix64 (Steele et al. 2014).
    let x = state.fetch_add(0x9E37_79B9_7F4A_7C15, Ordering::Relaxed);
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    let x = x ^ (x >> 31);
    match x % 4 {
        0 => {}
        1 => std::thread::yield_now(),
        _ => std::thread::sleep(Duration::from_nanos((x >> 8) % 300_000)),
    }
}

/// Sets all of `to`, from a task that declared the write.
pub(crate) fn set_all(to: &ViewMut, value: f32) -> Result<()> {
    fn set<T: bytemuck::Pod>(to: &ViewMut, value: T) -> Result<()> {
        // SAFETY: runs as the stream's task that declared this write; `T` is chosen by the view's type.
        unsafe { to.as_mut_slice::<T>() }.ok_or(Error::NotHost { op: "fill" })?.fill(value);
        Ok(())
    }
    match to.dtype() {
        DType::F32 => set(to, value),
        DType::BF16 => set(to, bf16::from_f32(value)),
        DType::I32 => set(to, value as i32),
        DType::U8 => set(to, value as u8),
    }
}

impl Stream for CpuStream {
    fn name(&self) -> &str {
        &self.shared.name
    }

    fn record(&self, event: &Arc<dyn Event>) -> Result<()> {
        let event = cpu_event("record", event)?;
        let point = self.point();
        // Set before it can pass: a concurrent wait sees this record or the one before, never a gap.
        event.set(point.clone());
        self.shared.push(Item::Record(point));
        self.shared.failure()
    }

    fn wait(&self, event: &Arc<dyn Event>) -> Result<()> {
        let s = &self.shared;
        s.failure()?;
        let Some(point) = cpu_event("wait", event)?.latest() else { return Ok(()) };
        if point.stream_id == s.id {
            return Ok(());
        }
        if let Some(tracker) = &s.setup.tracker {
            tracker.wait(s.id, &point.clock);
        }
        // A point that was passed well holds nobody up; a timeline still wants to show the wait.
        if s.setup.trace.is_some() || !point.passed_well() {
            s.push(Item::Wait(point));
        }
        Ok(())
    }

    fn copy(&self, dst: &ViewMut, src: &View) -> Result<()> {
        checks::copy(dst, src)?;
        let (to, from) = (dst.clone(), src.clone());
        self.task(
            "copy",
            vec![src.clone()],
            vec![dst.clone()],
            Box::new(move || {
                let (Some(to), Some(from), bytes) = (to.host_ptr(), from.host_ptr(), from.bytes()) else {
                    return Err(Error::NotHost { op: "copy" });
                };
                // SAFETY: both ranges lie in live allocations, which the views hold; `copy` allows overlap; exclusive by
                // the contract of views.
                unsafe { std::ptr::copy(from, to, bytes) };
                Ok(())
            }),
        )
    }

    fn fill(&self, dst: &ViewMut, value: f32) -> Result<()> {
        let to = dst.clone();
        self.task("fill", vec![], vec![dst.clone()], Box::new(move || set_all(&to, value)))
    }

    fn write(&self, dst: &ViewMut, what: &str, source: HostSource) -> Result<()> {
        let (to, what, stream) = (dst.clone(), format!("write {what}"), self.shared.name.clone());
        let name = Cow::Owned(what.clone());
        let run = move || {
            let to = to.reinterpret(DType::U8)?;
            // SAFETY: runs as the stream's task that declared this write, on a view of bytes.
            let bytes = unsafe { to.as_mut_slice::<u8>() }.ok_or(Error::NotHost { op: "write" })?;
            source(bytes).map_err(|why| Error::Task { stream: stream.to_string(), task: what, why })
        };
        self.host(HostTask { name, reads: vec![], writes: vec![dst.clone()], run: Box::new(run) })
    }

    fn read(&self, src: &View) -> Result<Readback> {
        let bytes = Arc::new(Mutex::new(Vec::new()));
        let (from, to) = (src.clone(), bytes.clone());
        let run = move || {
            let from = from.reinterpret(DType::U8)?;
            // SAFETY: runs as the stream's task that declared this read, on a view of bytes.
            let slice = unsafe { from.as_slice::<u8>() }.ok_or(Error::NotHost { op: "read" })?;
            lock(&to).extend_from_slice(slice);
            Ok(())
        };
        self.task("read", vec![src.clone()], vec![], Box::new(run))?;
        let event: Arc<dyn Event> = Arc::new(CpuEvent::new(self.shared.setup.tracker.clone()));
        // If the stream failed meanwhile, the event carries the error to whoever asks for the bytes.
        let _ = self.record(&event);
        Ok(Readback::new(event, bytes))
    }

    fn host(&self, task: HostTask) -> Result<()> {
        let s = &self.shared;
        s.failure()?;
        let simulated = |v: &View| v.host_ptr().is_none();
        if task.reads.iter().any(simulated) || task.writes.iter().any(|v| simulated(v)) {
            let op = if let Cow::Borrowed(name) = task.name { name } else { "host task" };
            return Err(Error::NotHost { op });
        }
        if let Some(tracker) = &s.setup.tracker {
            tracker.task(s.id, &s.name, &task.name, &task.reads, &task.writes)?;
        }
        s.push(Item::Task(task));
        // In inline mode the task has run.
        if s.setup.threaded { Ok(()) } else { s.failure() }
    }

    fn sync(&self) -> Result<()> {
        let s = &self.shared;
        let inside = match &self.worker {
            Some(worker) => worker.thread().id() == std::thread::current().id(),
            None => lock(&s.queue).runner == Some(std::thread::current().id()),
        };
        if inside {
            return Err(s.task_error("sync", "called from a task of the same stream, which would wait for itself".into()));
        }
        let point = self.point();
        s.push(Item::Record(point.clone()));
        point.wait(None)?;
        if let Some(tracker) = &s.setup.tracker {
            tracker.host_joins(&point.clock);
        }
        Ok(())
    }
}

fn cpu_event<'a>(op: &'static str, event: &'a Arc<dyn Event>) -> Result<&'a CpuEvent> {
    let what = || Error::Shape { op, what: "the event belongs to another kind of device, expected one made by a CPU device".into() };
    event.as_any().downcast_ref::<CpuEvent>().ok_or_else(what)
}
