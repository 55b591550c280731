//! Who notices that a collective will not end? One thread per rank: it looks how far the device has come, compares what all ranks issued, asks
//! the library for asynchronous errors, and gives the communicator up when the group is lost.
//!
//! Dead and stopped processes are found by the heartbeats of the local group.

use super::board::Board;
use super::link::Link;
use crate::local::Patience;
use crate::operands::Call;
use crate::{Error, Result};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering::*};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;
use zrt_kernels::{Device, Event};

/// The least that ranks' devices move in a second while all of them are in a collective: far below any link between GPUs.
const LEAST_BYTES_PER_S: f64 = 100e6;

/// Time between looks.
const TICK: Duration = Duration::from_millis(50);

/// A collective between its two events.
struct Mark {
    sequence: u64,
    call: Call<'static>,
    begun: Arc<dyn Event>,
    done: Arc<dyn Event>,
    /// `done` has been recorded: before, it says nothing.
    enqueued: Arc<AtomicBool>,
}

#[derive(Default)]
struct Marks {
    /// In the order of their numbers.
    open: VecDeque<Mark>,
    completed: Option<(u64, Call<'static>)>,
    free: Vec<Arc<dyn Event>>,
}

impl Marks {
    fn advance(&mut self) {
        while self.open.front().is_some_and(|mark| mark.enqueued.load(Acquire) && mark.done.query()) {
            if let Some(mark) = self.open.pop_front() {
                self.free.extend([mark.begun, mark.done]);
                self.completed = Some((mark.sequence, mark.call));
            }
        }
    }

    /// The collective that the device is in.
    fn current(&self) -> Option<&Mark> {
        self.open.front().filter(|mark| mark.begun.query())
    }
}

/// What the thread that issues and the thread that watches share.
pub(super) struct Watched {
    board: Mutex<Board>,
    marks: Mutex<Marks>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

impl Watched {
    pub fn new(board: Board) -> Watched {
        Watched { board: Mutex::new(board), marks: Mutex::default() }
    }

    /// See [`Board::post`].
    pub fn post(&self, call: &Call) -> Result<u64> {
        lock(&self.board).post(call)
    }

    /// See [`Board::look`].
    pub fn look(&self) -> Option<Error> {
        lock(&self.board).look()
    }

    /// Two events for a collective.
    pub fn events(&self, device: &dyn Device) -> Result<(Arc<dyn Event>, Arc<dyn Event>)> {
        let mut marks = lock(&self.marks);
        if marks.free.len() < 2 {
            marks.advance();
        }
        let mut event = || marks.free.pop().map_or_else(|| device.event(), Ok);
        Ok((event()?, event()?))
    }

    /// Watches a collective from `begun` on, which was recorded; set what is returned when `done` was, too.
    pub fn follow(&self, sequence: u64, call: Call<'static>, begun: Arc<dyn Event>, done: Arc<dyn Event>) -> Arc<AtomicBool> {
        let enqueued = Arc::new(AtomicBool::new(false));
        lock(&self.marks).open.push_back(Mark { sequence, call, begun, done, enqueued: enqueued.clone() });
        enqueued
    }

    /// See [`Board::unmapped`].
    pub fn unmapped(&self) {
        lock(&self.board).unmapped();
    }

    /// See [`Board::all_unmapped`].
    pub fn all_unmapped(&self) -> bool {
        lock(&self.board).all_unmapped()
    }

    /// Whether the device has passed all collectives.
    pub fn idle(&self) -> bool {
        let mut marks = lock(&self.marks);
        marks.advance();
        marks.open.is_empty()
    }
}

/// The thread.
pub(super) struct Watch {
    stop: Arc<(Mutex<bool>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    /// Gives up a collective that this device has been in for `train_timeout`, and one that the devices of all ranks have been in for `stall`
    /// beside the time that its bytes take.
    pub fn start(link: Arc<Link>, watched: Arc<Watched>, train_timeout: Duration, stall: Duration) -> Result<Watch> {
        let stop = Arc::new((Mutex::new(false), Condvar::new()));
        let stopped = stop.clone();
        let (stuck, together) = (Patience::new(), Patience::new());
        let mut round = Round { link, watched, train_timeout, stall, stuck, together, at: None };
        let spawned = std::thread::Builder::new().name("ccl watch".into()).spawn(move || {
            loop {
                if let Some(error) = round.look() {
                    round.link.control.lose(error);
                    return round.link.abort();
                }
                let wait = stopped.1.wait_timeout_while(lock(&stopped.0), TICK, |stop| !*stop);
                if *wait.unwrap_or_else(|e| e.into_inner()).0 {
                    return;
                }
            }
        });
        match spawned {
            Ok(thread) => Ok(Watch { stop, thread: Some(thread) }),
            Err(e) => Err(Error::Rendezvous(format!("starting the thread that watches collectives: {e}"))),
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        *lock(&self.stop.0) = true;
        self.stop.1.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Round {
    link: Arc<Link>,
    watched: Arc<Watched>,
    train_timeout: Duration,
    stall: Duration,
    /// Time in the collective `at`.
    stuck: Patience,
    /// Time since all ranks are in it.
    together: Patience,
    at: Option<u64>,
}

impl Round {
    /// One look; the reason to give up.
    fn look(&mut self) -> Option<Error> {
        if let Some(error) = self.link.control.error() {
            return Some(error);
        }
        if let Some(error) = self.watched.look() {
            return Some(error);
        }
        if let Some(error) = self.link.trouble(Duration::ZERO) {
            return Some(error);
        }
        self.progress()
    }

    fn progress(&mut self) -> Option<Error> {
        let mut marks = lock(&self.watched.marks);
        marks.advance();
        let current = marks.current().map(|mark| (mark.sequence, &mark.call));
        self.link.control.show(marks.completed.as_ref().map(|(sequence, call)| (*sequence, call)), current);
        let here = current.map(|(sequence, _)| sequence);
        if here != self.at || here.is_none() {
            self.at = here;
            self.stuck.reset();
            self.together.reset();
            return None;
        }
        let (sequence, call) = current?;
        let secs = self.stuck.spend();
        let control = &self.link.control;
        let mut stalled = false;
        if control.peers().all(|peer| control.progress(peer).1 >= sequence) {
            // Nobody waits for a rank any more: what is left is the library's own work.
            stalled = self.together.spend() >= self.stall + Duration::from_secs_f64(call.bytes() as f64 / LEAST_BYTES_PER_S);
        } else {
            self.together.reset();
        }
        if !stalled && secs < self.train_timeout {
            return None;
        }
        let (culprit, state) = self.culprit(sequence);
        Some(Error::Timeout { rank: self.link.control.rank(), what: format!("#{sequence} {call}"), culprit, state, secs: secs.as_secs() })
    }

    /// Who keeps this rank waiting in `sequence`: the rank that is furthest behind.
    fn culprit(&self, sequence: u64) -> (usize, String) {
        let control = &self.link.control;
        let culprit = control.peers().min_by_key(|peer| control.progress(*peer)).unwrap_or(control.rank());
        let reached = match control.progress(culprit) {
            (_, here) if here >= sequence => "in it too: the library, or a link between GPUs, hangs",
            _ if lock(&self.watched.board).posted(culprit) >= sequence => "issued it, but its device has not come to it",
            _ => "did not issue it",
        };
        (culprit, format!("alive, {reached}; {}", control.whereabouts(culprit)))
    }
}
