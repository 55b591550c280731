//! What is a point in a GPU stream's order? Work is issued by the stream's thread some time after it is enqueued, and runs on the device
//! some time after that: a [`Point`] is pending, then issued (the driver has an event for it), then passed.
//!
//! With a point goes what waits for it: operands that must live until then, and what is looked at then (fault cells, bytes for the host).

use super::driver::RawEvent;
use super::stream::Shared;
use crate::memory::View;
use crate::{Error, Event, Result};
use std::any::Any;
use std::borrow::Cow;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

pub(super) fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What is looked at once a point was passed.
pub(super) type Check = Box<dyn FnOnce() -> Result<()> + Send>;

/// What a stream has issued since its last point.
#[derive(Default)]
pub(super) struct Held {
    pub views: Vec<View>,
    pub checks: Vec<Check>,
    /// Points of other streams that the driver orders before.
    pub waits: Vec<Arc<Point>>,
    pub span: Span,
}

/// Which operations these were: the first, the last, how many.
#[derive(Default)]
pub(super) struct Span {
    ends: Option<(Cow<'static, str>, Cow<'static, str>)>,
    count: usize,
}

impl Span {
    pub fn add(&mut self, name: Cow<'static, str>) {
        self.count += 1;
        match &mut self.ends {
            Some((_, last)) => *last = name,
            None => self.ends = Some((name.clone(), name)),
        }
    }

    /// In words; `None`: there were none.
    fn says(&self) -> Option<String> {
        let (first, last) = self.ends.as_ref()?;
        Some(if self.count == 1 { first.to_string() } else { format!("{first} to {last} ({} operations)", self.count) })
    }

    /// A device says that something failed, not what: with what `stream` and the others were at.
    pub fn blame(&self, stream: &Shared, error: Error) -> Error {
        if matches!(error, Error::Task { .. }) {
            return error;
        }
        let others = stream.others();
        let also = if others.is_empty() { String::new() } else { format!("; also under way: {}", others.join(", ")) };
        // One operation at a time: it is the one.
        let hint = if self.count == 1 && others.is_empty() { "" } else { "; device.mode = \"inline\" names the operation" };
        let task = self.says().unwrap_or_else(|| "between operations".into());
        Error::Task { stream: stream.name.to_string(), task, why: format!("{error}{also}{hint}") }
    }
}

enum State {
    Pending,
    /// With the point before it in its stream, as long as that one may not have been passed.
    Issued(Arc<RawEvent>, Held, Option<Arc<Point>>),
    Passed(Result<()>),
}

/// See the module documentation.
pub(super) struct Point {
    stream: Arc<str>,
    owner: Weak<Shared>,
    state: Mutex<State>,
    changed: Condvar,
    /// Why its stream had failed when it was issued.
    doom: OnceLock<Error>,
}

impl Point {
    pub fn new(stream: Arc<str>, owner: Weak<Shared>) -> Arc<Point> {
        Arc::new(Point { stream, owner, state: Mutex::new(State::Pending), changed: Condvar::new(), doom: OnceLock::new() })
    }

    /// Whether it is of this stream, whose order holds anyway.
    pub fn is_of(&self, stream: &Arc<Shared>) -> bool {
        std::ptr::eq(self.owner.as_ptr(), Arc::as_ptr(stream))
    }

    /// What the device may be at before it, if that can be told without waiting.
    pub fn under_way(&self) -> Option<String> {
        match &*self.state.try_lock().ok()? {
            State::Issued(_, held, _) => held.span.says(),
            _ => None,
        }
    }

    /// Its stream failed: what should be before it was not issued. Called before [`Point::issue`].
    pub fn doom(&self, error: Error) {
        let _ = self.doom.set(error);
    }

    /// Why nothing may build on it, once it is issued.
    pub fn doomed(&self) -> Option<Error> {
        self.doom.get().cloned()
    }

    /// The driver knows it now, after `before`.
    pub fn issue(&self, event: RawEvent, held: Held, before: Option<Arc<Point>>) {
        *lock(&self.state) = State::Issued(Arc::new(event), held, before);
        self.changed.notify_all();
    }

    /// It is over; what was held is let go.
    pub fn pass(&self, outcome: Result<()>) {
        let before = std::mem::replace(&mut *lock(&self.state), State::Passed(outcome));
        self.changed.notify_all();
        drop(before);
    }

    /// Waits until the stream's thread has issued it. The driver's event, or what came of it.
    pub fn issued(&self) -> std::result::Result<Arc<RawEvent>, Result<()>> {
        let mut state = lock(&self.state);
        loop {
            match &*state {
                State::Pending => state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                State::Issued(event, ..) => return Ok(event.clone()),
                State::Passed(outcome) => return Err(outcome.clone()),
            }
        }
    }

    /// Whether it was passed, without waiting; runs what is to be looked at then, also of the points before it in its stream, in order.
    /// Locks states of points only, later ones before earlier ones: a check may ask for points of other streams.
    pub fn settle(self: &Arc<Point>) -> Option<Result<()>> {
        let mut chain = vec![self.clone()];
        loop {
            let before = match &*lock(&chain[chain.len() - 1].state) {
                State::Issued(_, _, Some(before)) => before.clone(),
                _ => break,
            };
            chain.push(before);
        }
        let mut outcome = None;
        while let Some(point) = chain.pop() {
            outcome = Some(point.try_pass()?);
        }
        outcome
    }

    /// As [`Point::settle`], once the points before it were settled.
    pub fn try_pass(&self) -> Option<Result<()>> {
        let mut state = lock(&self.state);
        let passed = match &*state {
            State::Pending => return None,
            State::Passed(outcome) => return Some(outcome.clone()),
            State::Issued(event, ..) => event.passed(),
        };
        if passed == Ok(false) {
            return None;
        }
        let State::Issued(_, held, _) = std::mem::replace(&mut *state, State::Pending) else { return None };
        // A device fails as a whole: what was waited for comes first.
        let before = held.waits.iter().find_map(|point| point.settle()?.err());
        let own = || {
            passed.map(|_| ()).map_err(|e| match self.owner.upgrade() {
                Some(stream) => held.span.blame(&stream, e),
                None => e,
            })
        };
        let outcome = before.map_or_else(own, Err).and_then(|()| self.doomed().map_or(Ok(()), Err));
        let outcome = held.checks.into_iter().fold(outcome, |so_far, check| so_far.and_then(|()| check()));
        *state = State::Passed(outcome.clone());
        self.changed.notify_all();
        drop(state);
        Some(outcome)
    }

    /// As [`Point::settle`]; its stream learns of an error.
    fn query(self: &Arc<Point>) -> Option<Result<()>> {
        if let Some(owner) = self.owner.upgrade() {
            owner.retire();
        }
        self.settle()
    }

    /// Waits at most `deadline`.
    pub fn wait(self: &Arc<Point>, deadline: Duration) -> Result<()> {
        let end = Instant::now().checked_add(deadline);
        let mut pause = Pause::default();
        loop {
            if let Some(outcome) = self.query() {
                return outcome;
            }
            if end.is_some_and(|end| Instant::now() >= end) {
                let what = format!("event of stream '{}'", self.stream);
                return Err(Error::Deadline { what, secs: deadline.as_secs() });
            }
            pause.once();
        }
    }
}

/// Pauses of a thread that polls the driver: none at first, then longer ones.
#[derive(Default)]
pub(super) struct Pause(u32);

impl Pause {
    pub fn once(&mut self) {
        self.0 += 1;
        match self.0 {
            0..64 => std::hint::spin_loop(),
            64..256 => std::thread::yield_now(),
            n => std::thread::sleep(Duration::from_micros(u64::from(n.min(1000) / 10))),
        }
    }
}

/// A GPU's event.
#[derive(Default)]
pub(super) struct GpuEvent {
    latest: Mutex<Option<Arc<Point>>>,
}

impl GpuEvent {
    pub fn set(&self, point: Arc<Point>) {
        *lock(&self.latest) = Some(point);
    }

    pub fn latest(&self) -> Option<Arc<Point>> {
        lock(&self.latest).clone()
    }
}

impl Event for GpuEvent {
    fn query(&self) -> bool {
        self.latest().is_none_or(|point| point.query().is_some())
    }

    fn sync(&self, deadline: Duration) -> Result<()> {
        self.latest().map_or(Ok(()), |point| point.wait(deadline))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
