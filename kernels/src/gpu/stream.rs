//! How does work get to a GPU? A stream is a queue, a thread that issues what is in it, and a queue of the driver.
//!
//! Calls enqueue and return; the thread makes the driver's calls in order. It waits for the device only where the host itself has to
//! act: to run host code, and for large pieces of pageable memory. Waiting for another stream's event waits until that stream's thread
//! has issued the record, then the driver orders the two queues. A stream that failed drops later work unrun and passes later points,
//! carrying the error, so that nobody who waits hangs. Operands are held until the device has passed a point behind their use.
#![allow(unsafe_code)]

use super::code::Code;
use super::driver::blas::Blas;
use super::driver::{Driver, RawEvent, RawStream};
use super::event::{Held, Pause, Point, lock};
use super::launch::Work;
use super::memory::OnDevice;
use super::ring::Ring;
use crate::cpu::trace::{Trace, TraceEvent, TraceKind};
use crate::{Error, Result, View};
use std::borrow::Cow;
use std::cell::Cell;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::thread::{JoinHandle, ThreadId};
use std::time::{Duration, Instant};

/// What a device gives to its streams.
#[derive(Clone)]
pub(super) struct Setup {
    pub driver: Arc<Driver>,
    pub code: Arc<Code>,
    /// Dense products by the vendor's library.
    pub blas: Option<Arc<Blas>>,
    /// False: work is issued in the thread that enqueues it, and waited for at once, so that an error is where it was caused.
    pub threaded: bool,
    /// Seed of random delays before tasks.
    pub chaos: Option<u64>,
    pub trace: Option<Arc<Base>>,
    /// All of the device.
    pub streams: Arc<Mutex<Vec<Weak<Shared>>>>,
}

/// A timeline, and a moment that the device and the host both have a time for.
pub(super) struct Base {
    pub trace: Trace,
    pub event: RawEvent,
    pub at_ns: u64,
}

/// Issues something: on the driver's queue, or by waiting for it and acting on the host.
type Issue = Box<dyn FnOnce(&Shared, &mut Issuer) -> Result<()> + Send>;

pub(super) enum Item {
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
    pub held: Held,
    /// Items since the last point.
    since: usize,
    /// The driver's queue may hold something that was not waited for.
    pub dirty: bool,
    pub ring: Ring,
    pub params: Vec<u64>,
    /// Of the vendor's products, made when the first of them comes.
    pub workspace: Option<OnDevice>,
}

/// Points are made at least this often, so that what is held is let go.
const ITEMS_PER_POINT: usize = 256;
/// How long the end of a stream waits for its device.
const END: Duration = Duration::from_secs(20);

/// What a stream's thread, its handle and its points share.
pub(super) struct Shared {
    id: u64,
    pub(super) name: Arc<str>,
    pub(super) setup: Setup,
    pub(super) raw: RawStream,
    queue: Mutex<Queue>,
    wake: Condvar,
    queued: AtomicUsize,
    failed: AtomicBool,
    error: Mutex<Option<Error>>,
    /// Issued and not known to be passed, in order.
    points: Mutex<VecDeque<Arc<Point>>>,
    issuer: Mutex<Issuer>,
    /// Inline mode: who issues.
    pub(super) runner: Mutex<Option<ThreadId>>,
    chaos_state: AtomicU64,
    pub(super) me: Weak<Shared>,
}

thread_local! {
    /// True in the threads of streams.
    static IS_WORKER: Cell<bool> = const { Cell::new(false) };
}

/// A stream of a GPU. Dropping it runs what is queued first.
pub(super) struct GpuStream {
    pub(super) shared: Arc<Shared>,
    pub(super) worker: Option<JoinHandle<()>>,
}

impl GpuStream {
    pub fn new(name: &str, setup: Setup) -> Result<GpuStream> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        setup.driver.enter()?;
        let raw = setup.driver.stream(name)?;
        let ring = Ring::new(&setup.driver, name)?;
        let issuer = Issuer { held: Held::default(), since: 0, dirty: false, ring, params: Vec::new(), workspace: None };
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
        lock(&shared.setup.streams).push(shared.me.clone());
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

    pub(super) fn task(
        &self,
        name: Cow<'static, str>,
        views: Vec<View>,
        issue: impl FnOnce(&Shared, &mut Issuer) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        self.push(Item::Task { name, views, issue: Box::new(issue) })
    }

    pub(super) fn push(&self, item: Item) -> Result<()> {
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

impl Shared {
    pub fn driver(&self) -> &Arc<Driver> {
        &self.setup.driver
    }

    pub(super) fn task_error(&self, task: &str, why: String) -> Error {
        Error::Task { stream: self.name.to_string(), task: task.to_string(), why }
    }

    pub(super) fn failure(&self) -> Result<()> {
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

    /// What the other streams of the device are at, as far as that can be told without waiting.
    pub(super) fn others(&self) -> Vec<String> {
        let Ok(mut streams) = self.setup.streams.try_lock() else { return Vec::new() };
        streams.retain(|s| s.strong_count() > 0);
        let at = |s: Arc<Shared>| {
            let span = s.points.try_lock().ok()?.iter().find_map(|p| p.under_way())?;
            Some(format!("{span} on '{}'", s.name))
        };
        streams.iter().filter(|s| !s.ptr_eq(&self.me)).filter_map(|s| at(s.upgrade()?)).collect()
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

    pub(super) fn push(&self, item: Item) -> Result<()> {
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
        issuer.held.span.add(name.clone());
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
    pub(super) fn point(&self, issuer: &mut Issuer) -> Arc<Point> {
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
                if let Err(e) = self.failure() {
                    point.doom(e);
                }
                let mut points = lock(&self.points);
                point.issue(event, held, points.back().cloned());
                points.push_back(point.clone());
            }
            Err(e) => {
                let e = held.span.blame(self, e);
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
                // Work of that stream was left out: what builds on it must be left out too.
                if let Some(e) = point.doomed() {
                    return self.fail(e);
                }
                if let Err(e) = self.driver().wait(self.raw, &event) {
                    self.fail(self.task_error("waiting for another stream", e.to_string()));
                }
                // What that stream finds out when the point is passed concerns this one too.
                issuer.held.waits.push(point.clone());
            }
            Err(Ok(())) => {}
            Err(Err(e)) => self.fail(e),
        }
    }

    /// Waits until the device has passed everything issued so far.
    pub(super) fn drain(&self, issuer: &mut Issuer) -> Result<()> {
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

    /// Chaos: nothing, a yield, or up to 300 microseconds of sleep, by a generator that only this stream draws from.
    fn delay(&self) {
        if self.setup.chaos.is_some() {
            crate::cpu::stream::chaos_pause(&self.chaos_state);
        }
    }
}
