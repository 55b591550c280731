//! What has been passed? An event holds its latest record, a [`Point`]: made when `record` is called, passed when the
//! recording stream gets there. A wait takes the point, not the event, so recording again never moves a wait already made.

use super::tracker::{Clock, Tracker};
use crate::{Error, Event, Result};
use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// How long a waiting thread spins before it sleeps: about the cost of being woken.
pub(crate) const SPIN: Duration = Duration::from_micros(4);

pub(crate) fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    // What our locks protect is valid at every moment, also if a thread died while it held one.
    m.lock().unwrap_or_else(|e| e.into_inner())
}

/// Spins at most [`SPIN`] for `done`; true when it came.
pub(crate) fn spin(done: impl Fn() -> bool) -> bool {
    let start = Instant::now();
    loop {
        for _ in 0..16 {
            if done() {
                return true;
            }
            std::hint::spin_loop();
        }
        if start.elapsed() > SPIN {
            return done();
        }
    }
}

/// One record: a place in one stream's order.
pub(crate) struct Point {
    /// Unique in the process; joins record and wait in traces.
    pub id: u64,
    /// The recording stream.
    pub stream_id: u64,
    /// Its name.
    pub stream: Arc<str>,
    /// What the recording stream is ordered after, for the access tracker.
    pub clock: Clock,
    passed: AtomicBool,
    outcome: Mutex<Option<Result<()>>>,
    changed: Condvar,
}

impl Point {
    pub fn new(stream_id: u64, stream: Arc<str>, clock: Clock) -> Arc<Point> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        Arc::new(Point { id, stream_id, stream, clock, passed: AtomicBool::new(false), outcome: Mutex::new(None), changed: Condvar::new() })
    }

    /// The stream got here. What its tasks wrote before is visible to whoever sees the point passed (Release, or the lock).
    pub fn pass(&self, outcome: Result<()>) {
        *lock(&self.outcome) = Some(outcome);
        self.passed.store(true, Ordering::Release);
        self.changed.notify_all();
    }

    pub fn passed(&self) -> bool {
        self.passed.load(Ordering::Acquire)
    }

    /// Passed, and the stream had not failed.
    pub fn passed_well(&self) -> bool {
        self.passed() && matches!(*lock(&self.outcome), Some(Ok(())))
    }

    /// Blocks until passed; `None` has no deadline. The stream's error, if it failed before.
    pub fn wait(&self, deadline: Option<Duration>) -> Result<()> {
        spin(|| self.passed());
        // A deadline beyond what the clock can tell is none.
        let end = deadline.and_then(|d| Instant::now().checked_add(d));
        let mut outcome = lock(&self.outcome);
        loop {
            if let Some(result) = &*outcome {
                return result.clone();
            }
            outcome = match end {
                None => self.changed.wait(outcome).unwrap_or_else(|e| e.into_inner()),
                Some(end) => {
                    let left = end.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        let what = format!("event of stream '{}'", self.stream);
                        return Err(Error::Deadline { what, secs: deadline.unwrap_or_default().as_secs() });
                    }
                    self.changed.wait_timeout(outcome, left).unwrap_or_else(|e| e.into_inner()).0
                }
            };
        }
    }
}

/// The CPU device's event.
pub(crate) struct CpuEvent {
    latest: Mutex<Option<Arc<Point>>>,
    tracker: Option<Arc<Tracker>>,
}

impl CpuEvent {
    pub fn new(tracker: Option<Arc<Tracker>>) -> CpuEvent {
        CpuEvent { latest: Mutex::new(None), tracker }
    }

    pub fn set(&self, point: Arc<Point>) {
        *lock(&self.latest) = Some(point);
    }

    pub fn latest(&self) -> Option<Arc<Point>> {
        lock(&self.latest).clone()
    }

    /// The host saw the point passed: whatever it enqueues from now on comes after.
    fn seen(&self, point: &Point) {
        if let Some(tracker) = &self.tracker {
            tracker.host_joins(&point.clock);
        }
    }
}

impl Event for CpuEvent {
    fn query(&self) -> bool {
        let Some(point) = self.latest() else { return true };
        let passed = point.passed();
        if passed {
            self.seen(&point);
        }
        passed
    }

    fn sync(&self, deadline: Duration) -> Result<()> {
        let Some(point) = self.latest() else { return Ok(()) };
        point.wait(Some(deadline))?;
        self.seen(&point);
        Ok(())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
