//! How is the library called, so that nothing waits for ever? One call at a time, none after the communicator was given up, and every wait for an
//! asynchronous result ends when the group is lost.
//!
//! The library's communicator is not blocking: a call says "in progress" and is asked again until it is done, so that the gate is held for
//! moments only. Should a call hang all the same, abort comes without the gate: the library ends its own waits then.
#![allow(unsafe_code)]

use super::library::{Library, Outcome};
use super::sys::{self, ncclComm_t};
use crate::local::Control;
use crate::{Error, Result};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering::*};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

/// The longest sleep without a look around.
const SLICE: Duration = Duration::from_millis(50);
/// When a peer dies the library may notice before our heartbeats do, and cannot name it: time for them to.
const NAMING: Duration = Duration::from_millis(400);
/// How long an orderly end, and an abort, may take before it is left behind.
const ENDING: Duration = Duration::from_secs(5);
/// How long abort waits for a call that is running.
const GATE: Duration = Duration::from_millis(500);

/// A rank's handle of the library's communicator; tasks on streams and the watchdog share it.
pub(super) struct Link {
    pub library: Arc<Library>,
    pub control: Arc<Control>,
    /// Written by the library, which may do so after the call of init has returned.
    comm: AtomicPtr<sys::ncclComm>,
    /// Whoever sets it destroys the communicator, and nobody calls any more.
    ended: AtomicBool,
    /// Set when abort has returned.
    aborted: AtomicBool,
    gate: Mutex<()>,
    turns: Turns,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

impl Link {
    pub fn new(library: Arc<Library>, control: Arc<Control>) -> Link {
        Link {
            library,
            control,
            comm: AtomicPtr::default(),
            ended: AtomicBool::new(false),
            aborted: AtomicBool::new(false),
            gate: Mutex::new(()),
            turns: Turns::default(),
        }
    }

    /// Asks the library for a communicator. Run it where the rank's device is current. It is not ready before [`Link::settle`] says so.
    pub fn init(&self, id: sys::ncclUniqueId) -> Result<()> {
        let (rank, ranks) = (self.control.rank() as i32, self.control.ranks() as i32);
        let undefined = i32::MIN;
        // The oldest layout that newer libraries take: they read `size` bytes and choose the rest themselves.
        let mut config = sys::ncclConfig_t {
            size: size_of::<sys::ncclConfig_t>(),
            magic: 0xcafe_beef,
            version: 21_700,
            blocking: 0,
            cgaClusterSize: undefined,
            minCTAs: undefined,
            maxCTAs: undefined,
            netName: std::ptr::null(),
            splitShare: undefined,
        };
        let comm = self.comm.as_ptr();
        // SAFETY: the place of the handle lives as long as this value, which every task and thread that uses it holds; the configuration is
        // read during the call.
        let outcome = unsafe {
            match self.library.api.ncclCommInitRankConfig {
                Some(init) => ("ncclCommInitRankConfig", init(comm, ranks, id, rank, &mut config)),
                None => ("ncclCommInitRank", (self.library.api.ncclCommInitRank)(comm, ranks, id, rank)),
            }
        };
        if outcome.1 == sys::ncclInProgress {
            return Ok(());
        }
        Ok(self.library.check("init", outcome, std::ptr::null_mut())?)
    }

    /// The gate, unless a call holds it for longer than `patience`.
    fn pass_gate(&self, patience: Duration) -> Option<MutexGuard<'_, ()>> {
        let begun = Instant::now();
        loop {
            match self.gate.try_lock() {
                Ok(gate) => return Some(gate),
                Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
                Err(TryLockError::WouldBlock) if begun.elapsed() < patience => std::thread::sleep(Duration::from_micros(100)),
                Err(TryLockError::WouldBlock) => return None,
            }
        }
    }

    fn comm(&self) -> Option<ncclComm_t> {
        let comm = self.comm.load(Acquire);
        (!self.ended.load(Acquire) && !comm.is_null()).then_some(comm)
    }

    /// Why calls are over.
    pub fn over(&self) -> Error {
        let rank = self.control.rank();
        let left = || Error::Aborted { rank, by: rank, reason: "the communicator was dropped".to_string() };
        self.control.error().unwrap_or_else(left)
    }

    /// Calls the library and waits until what was asked for is done or enqueued.
    pub fn call(&self, what: &str, work: impl FnOnce(ncclComm_t) -> Outcome) -> Result<()> {
        self.call_until(what, None, work)
    }

    fn call_until(&self, what: &str, deadline: Option<Instant>, work: impl FnOnce(ncclComm_t) -> Outcome) -> Result<()> {
        let gate = lock(&self.gate);
        let Some(comm) = self.comm().filter(|_| self.control.error().is_none()) else { return Err(self.over()) };
        let (name, code) = work(comm);
        drop(gate);
        self.settle(what, name, code, deadline)
    }

    /// Waits while `code` is "in progress", at most until `deadline` and as long as the group is good.
    pub fn settle(&self, what: &str, name: &'static str, mut code: sys::ncclResult_t, deadline: Option<Instant>) -> Result<()> {
        let mut nap = Duration::from_micros(5);
        loop {
            if self.control.error().is_some() || self.ended.load(Acquire) {
                return Err(self.over());
            }
            if code == sys::ncclSuccess {
                return Ok(());
            }
            if code != sys::ncclInProgress {
                let comm = self.comm().unwrap_or(std::ptr::null_mut());
                return Err(self.explain(self.library.check(what, (name, code), comm).err()));
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Err(Error::Rendezvous(format!(
                    "{}: {what}: {name} is still in progress at its deadline; raise comm.init_timeout_seconds if it only needs longer, NCCL_DEBUG=INFO shows what it waits for",
                    self.library.name()
                )));
            }
            std::thread::sleep(nap);
            nap = (nap * 2).min(Duration::from_millis(5));
            code = match self.state(Duration::ZERO) {
                Ok(Some(state)) => state,
                Ok(None) => sys::ncclInProgress,
                Err(error) => return Err(error),
            };
        }
    }

    /// What went wrong in the library, as far as it is known now. `patience` is for a call that is running; where something is wrong it
    /// takes a little longer, to learn who is the cause.
    pub fn trouble(&self, patience: Duration) -> Option<Error> {
        match self.state(patience) {
            Ok(None | Some(sys::ncclSuccess | sys::ncclInProgress)) => None,
            // To a library, a peer that has ended is an error; whether it is missed, the board knows.
            Ok(Some(_)) if self.control.peers().any(|peer| self.control.left(peer)) => None,
            Ok(Some(code)) => {
                let outcome = ("ncclCommGetAsyncError", code);
                Some(self.explain(self.library.check("asynchronous error", outcome, self.comm().unwrap_or(std::ptr::null_mut())).err()))
            }
            Err(error) => Some(error),
        }
    }

    /// The communicator's asynchronous result; `None` while another call runs, or before there is a communicator.
    fn state(&self, patience: Duration) -> Result<Option<sys::ncclResult_t>> {
        let Some(_gate) = self.pass_gate(patience) else { return Ok(None) };
        let Some(comm) = self.comm() else { return Ok(None) };
        let mut state = sys::ncclSuccess;
        // SAFETY: the communicator is alive while the gate is held and it has not ended.
        let code = unsafe { (self.library.api.ncclCommGetAsyncError)(comm, &mut state) };
        self.library.check("asking for the state", ("ncclCommGetAsyncError", code), comm)?;
        Ok(Some(state))
    }

    /// The library's error, or that of the group where a peer is known to be the cause.
    pub fn explain(&self, error: Option<zrt_kernels::Error>) -> Error {
        let until = Instant::now() + NAMING;
        while Instant::now() < until && self.control.error().is_none() {
            std::thread::sleep(Duration::from_millis(5));
        }
        self.control.error().or(error.map(Error::Device)).unwrap_or_else(|| self.over())
    }

    /// How many ranks the library counts.
    pub fn count(&self) -> Result<usize> {
        let mut count = 0;
        // SAFETY: `call` gives a communicator that is alive; writes one int.
        self.call("counting ranks", |comm| unsafe { ("ncclCommCount", (self.library.api.ncclCommCount)(comm, &mut count)) })?;
        Ok(count as usize)
    }

    /// Gives the communicator up, from any thread, and returns at once: calls that run come back, kernels on the device end.
    pub fn abort(self: &Arc<Self>) {
        if self.ended.swap(true, AcqRel) {
            return;
        }
        let link = self.clone();
        // Abort waits for the device; where no thread can be made, the communicator is left to the end of the process.
        let _ = std::thread::Builder::new().name("ccl abort".into()).spawn(move || {
            let gate = link.pass_gate(GATE);
            link.destroy(|comm| {
                // SAFETY: this is the communicator's only end. A call may be running: the library ends it, and no other begins.
                unsafe { (link.library.api.ncclCommAbort)(comm) };
            });
            drop(gate);
            link.aborted.store(true, Release);
        });
    }

    fn destroy(&self, with: impl FnOnce(ncclComm_t)) {
        let comm = self.comm.load(Acquire);
        if !comm.is_null() {
            with(comm);
        }
    }

    /// Ends in order what is not ended yet, and otherwise aborts. Never waits much longer than `ENDING`.
    pub fn finish(self: &Arc<Self>) {
        if self.control.error().is_none() {
            // Before the library tells the others.
            self.control.leave();
            if self.finalize() {
                return;
            }
        }
        self.abort();
        let until = Instant::now() + ENDING;
        while !self.aborted.load(Acquire) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Flushes and destroys; false when it must be aborted instead.
    fn finalize(self: &Arc<Self>) -> bool {
        let (done, wait) = std::sync::mpsc::channel();
        let link = self.clone();
        let until = Instant::now() + ENDING;
        // On its own thread: an old library may block in it.
        let spawned = std::thread::Builder::new().name("ccl end".into()).spawn(move || {
            let flushed = match link.library.api.ncclCommFinalize {
                // SAFETY: `call_until` gives a communicator that is alive.
                Some(finalize) => link.call_until("ending", Some(until), |comm| unsafe { ("ncclCommFinalize", finalize(comm)) }).is_ok(),
                None => link.comm().is_some(),
            };
            if flushed && !link.ended.swap(true, AcqRel) {
                let _gate = lock(&link.gate);
                link.destroy(|comm| {
                    // SAFETY: nobody calls with it any more, since it has ended; this is its only end.
                    unsafe { (link.library.api.ncclCommDestroy)(comm) };
                });
                let _ = done.send(());
            }
        });
        spawned.is_ok() && wait.recv_timeout(ENDING).is_ok()
    }

    /// Runs `work` when all collectives before number `sequence` have been handed to the library.
    pub fn in_turn(&self, sequence: u64) -> Result<()> {
        self.turns.wait(sequence, || self.control.error())
    }

    /// The next collective may go to the library.
    pub fn turn_over(&self, sequence: u64) {
        self.turns.finish(sequence);
    }
}

/// Whose turn it is: collectives go to the library in the order of their numbers, on whatever streams they are.
#[derive(Default)]
struct Turns {
    state: Mutex<Finished>,
    changed: Condvar,
}

#[derive(Default)]
struct Finished {
    /// All numbers up to this one have been handed over.
    through: u64,
    /// What was finished before its turn: on a stream that failed.
    early: BTreeSet<u64>,
}

impl Turns {
    fn wait(&self, sequence: u64, interrupted: impl Fn() -> Option<Error>) -> Result<()> {
        let mut state = lock(&self.state);
        while state.through + 1 < sequence {
            if let Some(error) = interrupted() {
                return Err(error);
            }
            state = self.changed.wait_timeout(state, SLICE).unwrap_or_else(|e| e.into_inner()).0;
        }
        Ok(())
    }

    fn finish(&self, sequence: u64) {
        let mut state = lock(&self.state);
        state.early.insert(sequence);
        while state.early.first() == Some(&(state.through + 1)) {
            state.early.pop_first();
            state.through += 1;
        }
        self.changed.notify_all();
    }
}
