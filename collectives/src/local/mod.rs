//! The communicator of one host: ranks as threads or as processes, through one piece of shared memory.
//!
//! Which file answers what: `shared` what lies in the memory; `join` how ranks come to share it; `wait` how one waits for
//! another; `steps` the entry, mail and steps of a collective; `ops` what each collective moves; `copy` how bytes are stored; `monitor` who is alive;
//! `lost` why the group ended; `control` what other communicators use of all this; `pages` memory that all ranks map; `transport` calls without a stream. This file holds the communicator: it numbers calls as they are issued
//! and runs them in that order, whatever streams they are on, so that all ranks agree on the sequence.
#![allow(unsafe_code)]

mod control;
mod copy;
mod join;
mod lost;
mod monitor;
mod ops;
mod pages;
mod shared;
mod steps;
mod transport;
mod wait;

pub(crate) use control::Control;
pub use join::LocalGroup;
pub(crate) use shared::Text;
pub use transport::Transport;
pub(crate) use wait::Patience;

use crate::operands::{Call, Check, Counters};
use crate::store::Store;
use crate::{Communicator, Counts, Error, Health, Result};
use ops::Operands;
use shared::{Page, Shared};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::*};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;
use steps::Pass;
use wait::{SLICE, ring};
use zrt_kernels::{Buffer, HostTask, Stream, View, ViewMut};

/// How a local group behaves. All ranks must use the same values.
#[derive(Clone, Debug)]
pub struct LocalOptions {
    /// Names the group in the store, so that a job may have several.
    pub name: String,
    /// Time for all ranks to meet.
    pub init_timeout: Duration,
    /// Time without any progress of a rank that is alive and waited for.
    pub train_timeout: Duration,
    /// Time without a sign of life after which a process counts as lost (stopped, or its host is far too busy). At least 0.5 s.
    pub heartbeat_timeout: Duration,
    /// Bytes of a staging slot; each rank has two. Messages above 2 KiB travel in pieces of at most this length, or 128 KiB while every rank can
    /// have a core; a piece of a reduce_scatter or an all_to_all takes its length for every rank.
    pub segment_bytes: usize,
    /// Looks at a rank's entry before sleeping on it; its steps get 16 times as many. Only used while every rank can have a core: the cores
    /// that the ranks' processes may run on, counted when they meet.
    pub spin: u32,
    /// Whether `share_pages` shares, or returns `None`.
    pub share_pages: bool,
}

impl Default for LocalOptions {
    fn default() -> Self {
        LocalOptions {
            name: "world".to_string(),
            init_timeout: Duration::from_secs(300),
            train_timeout: Duration::from_secs(100),
            heartbeat_timeout: Duration::from_secs(10),
            segment_bytes: 1 << 20,
            spin: 1000,
            share_pages: true,
        }
    }
}

impl LocalOptions {
    /// Shared bytes that a group of `ranks` takes on its host, for plans: control pages and staging slots.
    pub fn shared_bytes(&self, ranks: usize) -> Result<usize> {
        shared::layout_bytes(ranks, self)
    }
}

/// What the ranks of this process hold together.
pub(crate) struct Group {
    shared: Arc<Shared>,
    options: LocalOptions,
    /// Mappings on their way from rank 0 to the other threads, by sequence number.
    pages: Mutex<std::collections::HashMap<u64, Arc<shared::Mapped>>>,
    /// True where ranks are threads of this process.
    threads: bool,
    _monitor: Option<monitor::Monitor>,
}

/// How staging memory is cut into slots, the same on all ranks.
#[derive(Clone, Copy)]
struct Ring {
    /// A power of two, at least 2: steps are counted beyond the range of their counter.
    slots: usize,
    slot_bytes: usize,
}

impl Ring {
    /// The longest piece for each rank while every rank has a core. The first piece is staged before anything can be taken, so short
    /// is good; a step costs a trip between cores, and the processor copies long blocks faster than short ones.
    const PIECE_BYTES: usize = 128 << 10;
    /// Until a slot is used again its lines have left the other core's first-level cache, so that storing to it does not have to take
    /// them away.
    const SLOTS: usize = 8;

    /// Ranks that share cores use whole halves of their staging memory: there a step costs a switch.
    fn new(segment_bytes: usize, ranks: usize, crowded: bool) -> Ring {
        if crowded {
            return Ring { slots: 2, slot_bytes: segment_bytes };
        }
        let slot_bytes = (Self::PIECE_BYTES * ranks).min(segment_bytes) & !63;
        let fitting = 2 * segment_bytes / slot_bytes;
        Ring { slots: Self::SLOTS.min(1 << fitting.ilog2()), slot_bytes }
    }
}

/// One rank's place in a group; queued tasks keep it alive. Dropping it is leaving in order.
struct Seat {
    group: Arc<Group>,
    rank: usize,
    spin: u32,
    /// More ranks than cores; the same on all ranks.
    crowded: bool,
    ring: Ring,
    /// The sequence number whose turn it is.
    turn: AtomicU64,
    /// Threads that wait for another's turn to end; nobody to wake costs no system call.
    queued: AtomicU32,
    /// Whether `error` is set, to be seen without the lock.
    failed: AtomicBool,
    /// This rank's first error.
    error: Mutex<Option<Error>>,
    turned: Condvar,
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.page().left.store(1, Release);
        ring(self.page());
    }
}

impl Seat {
    fn new(group: Arc<Group>, rank: usize) -> Seat {
        let crowded = group.shared.ranks > group.shared.cores();
        let spin = if crowded { 0 } else { group.options.spin };
        let ring = Ring::new(group.shared.segment_bytes, group.shared.ranks, crowded);
        Seat {
            group,
            rank,
            spin,
            crowded,
            ring,
            turn: AtomicU64::new(1),
            queued: AtomicU32::new(0),
            failed: AtomicBool::new(false),
            error: Mutex::new(None),
            turned: Condvar::new(),
        }
    }

    fn shared(&self) -> &Shared {
        &self.group.shared
    }

    fn options(&self) -> &LocalOptions {
        &self.group.options
    }

    fn page(&self) -> &Page {
        self.shared().page(self.rank)
    }

    fn first_error(&self) -> MutexGuard<'_, Option<Error>> {
        self.error.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// This rank's own first error, else the group's.
    fn error(&self) -> Option<Error> {
        let own = if self.failed.load(Acquire) { self.first_error().clone() } else { None };
        own.or_else(|| self.shared().header().lost.get(self.rank, None))
    }

    /// Ends the group for `error`, if nothing ended it before. Returns what this rank reports from now on.
    fn lose(&self, error: Error) -> Error {
        end_group(self.shared(), self.rank, &error);
        let first = self.first_error().get_or_insert(error).clone();
        self.failed.store(true, Release);
        self.turned.notify_all();
        first
    }

    /// Runs `work` as number `sequence`, after all earlier numbers of this rank.
    fn in_turn<T>(&self, sequence: u64, call: &Call, work: impl FnOnce(&Pass) -> Result<T>) -> Result<T> {
        if self.failed.load(Acquire) || self.turn.load(Acquire) != sequence {
            self.await_turn(sequence, call)?;
        }
        let done = work(&Pass::new(self, sequence, call)).map_err(|error| self.lose(error));
        // SeqCst here and in `await_turn`: either this sees who waits, or who waits sees its turn.
        self.turn.store(sequence + 1, SeqCst);
        if self.queued.load(SeqCst) != 0 {
            // Under the lock: who has just looked is asleep by now.
            let _error = self.first_error();
            self.turned.notify_all();
        }
        done
    }

    fn await_turn(&self, sequence: u64, call: &Call) -> Result<()> {
        let mut error = self.first_error();
        self.queued.fetch_add(1, SeqCst);
        let outcome = loop {
            if let Some(error) = &*error {
                break Err(error.clone());
            }
            if self.turn.load(SeqCst) == sequence {
                break Ok(());
            }
            if self.shared().header().lost.is_set() {
                drop(error);
                self.queued.fetch_sub(1, SeqCst);
                let what = format!("#{sequence} {call}");
                let lost = self.shared().header().lost.get(self.rank, Some((&what, 0)));
                return Err(self.lose(lost.unwrap_or_else(|| Error::Rendezvous("the group is lost".to_string()))));
            }
            error = self.turned.wait_timeout(error, SLICE).unwrap_or_else(|e| e.into_inner()).0;
        };
        self.queued.fetch_sub(1, SeqCst);
        outcome
    }
}

/// Writes the group's first error and wakes everyone.
fn end_group(shared: &Shared, by: usize, error: &Error) {
    if shared.header().lost.set(by, error) {
        (0..shared.ranks).for_each(|rank| ring(shared.page(rank)));
    }
}

/// A collective that was given a number. If its stream ends without running it, the others would wait for it: then the group ends.
struct Ticket {
    seat: Arc<Seat>,
    sequence: u64,
    call: Call<'static>,
    ran: bool,
}

impl Ticket {
    fn finish(&mut self) {
        self.ran = true;
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if !self.ran {
            // A stream that failed because the group is lost loses what was queued on it: that is not the cause.
            if let Some(error) = self.seat.error() {
                self.seat.lose(error);
                return;
            }
            let reason = format!("#{} {} was issued but its stream failed or ended before running it", self.sequence, self.call);
            let rank = self.seat.rank;
            self.seat.lose(Error::Aborted { rank, by: rank, reason });
        }
    }
}

/// Addresses on their way to the stream's thread, with the views that keep them alive.
struct Pinned {
    operands: Operands,
    _views: (Option<View>, Option<ViewMut>),
}

// SAFETY: the addresses point into allocations that the views keep alive, and are used by one stream's thread in the stream's order.
unsafe impl Send for Pinned {}

impl Pinned {
    fn run(&self, ticket: &Ticket) -> Result<()> {
        ticket.seat.in_turn(ticket.sequence, &ticket.call, |pass| {
            // SAFETY: lengths were checked against the views when the call was issued; exclusive use is the views' promise.
            unsafe { pass.perform(self.operands) }
        })
    }
}

/// One rank of a local group. See [`LocalGroup::threads`] and [`LocalComm::join`].
pub struct LocalComm {
    seat: Arc<Seat>,
    check: Check,
    next: AtomicU64,
    counters: Counters,
}

impl LocalComm {
    fn new(group: Arc<Group>, rank: usize) -> LocalComm {
        let check = Check { rank, ranks: group.shared.ranks };
        LocalComm { seat: Arc::new(Seat::new(group, rank)), check, next: AtomicU64::new(1), counters: Counters::default() }
    }

    /// Joins a group of processes of this host. Rank 0 makes the memory and announces it in `store`; the others open it.
    /// Blocks until all ranks have joined, at most `options.init_timeout`; the error names who is missing.
    pub fn join(store: &dyn Store, rank: usize, ranks: usize, options: LocalOptions) -> Result<LocalComm> {
        join::processes(store, rank, ranks, options)
    }

    /// The same collectives without a stream: each is done when the call returns.
    pub fn transport(&self) -> Transport<'_> {
        Transport(self)
    }

    fn enqueue(&self, call: Call, src: Option<&View>, dst: Option<&ViewMut>, s: &dyn Stream) -> Result<()> {
        if let Some(error) = self.seat.error() {
            return Err(error);
        }
        let operands = self.operands(&call, src, dst)?;
        self.counters.add(&call, self.check.ranks);
        let name = call.task_name();
        let sequence = self.next.fetch_add(1, Relaxed);
        let mut ticket = Ticket { seat: self.seat.clone(), sequence, call: call.into_owned(), ran: false };
        let pinned = Pinned { operands, _views: (src.cloned(), dst.cloned()) };
        let (stream, task) = (s.name().to_string(), name.clone());
        let run = move || {
            let done = pinned.run(&ticket);
            // Not before: a panic on the way drops the ticket as one that never ran.
            ticket.finish();
            done.map_err(|error| zrt_kernels::Error::Task { stream, task, why: error.to_string() })
        };
        let (reads, writes) = (src.into_iter().cloned().collect(), dst.into_iter().cloned().collect());
        s.host(HostTask { name: name.into(), reads, writes, run: Box::new(run) }).map_err(|error| {
            // An inline stream has run it already, and a failed one has dropped it: say what happened in the group.
            self.seat.first_error().clone().unwrap_or(Error::Device(error))
        })
    }

    fn operands(&self, call: &Call, src: Option<&View>, dst: Option<&ViewMut>) -> Result<Operands> {
        let address = |view: Option<&View>| match view {
            None => Ok(std::ptr::NonNull::dangling().as_ptr()),
            Some(view) => view.host_ptr().ok_or_else(|| Error::Operand {
                rank: self.check.rank,
                op: call.op.name(),
                tag: call.tag.to_string(),
                what: format!("{view:?} is not in host memory; expected memory of the CPU device"),
            }),
        };
        let dst = address(dst.map(|d| &**d))?;
        Ok(Operands { dst, src: if src.is_some() { address(src)? } else { dst } })
    }
}

impl Communicator for LocalComm {
    fn rank(&self) -> usize {
        self.check.rank
    }
    fn ranks(&self) -> usize {
        self.check.ranks
    }
    fn all_gather(&self, dst: &ViewMut, src: &View, tag: &str, s: &dyn Stream) -> Result<()> {
        self.enqueue(self.check.all_gather(dst, src, tag)?, Some(src), Some(dst), s)
    }
    fn reduce_scatter(&self, dst: &ViewMut, src: &View, tag: &str, s: &dyn Stream) -> Result<()> {
        self.enqueue(self.check.reduce_scatter(dst, src, tag)?, Some(src), Some(dst), s)
    }
    fn all_reduce(&self, data: &ViewMut, tag: &str, s: &dyn Stream) -> Result<()> {
        self.enqueue(self.check.all_reduce(data, tag)?, Some(data), Some(data), s)
    }
    fn all_to_all(&self, dst: &ViewMut, src: &View, tag: &str, s: &dyn Stream) -> Result<()> {
        self.enqueue(self.check.all_to_all(dst, src, tag)?, Some(src), Some(dst), s)
    }
    fn broadcast(&self, data: &ViewMut, root: usize, tag: &str, s: &dyn Stream) -> Result<()> {
        self.enqueue(self.check.broadcast(data, root, tag)?, Some(data), Some(data), s)
    }
    fn barrier(&self, tag: &str, s: &dyn Stream) -> Result<()> {
        self.enqueue(self.check.barrier(tag), None, None, s)
    }
    fn share_pages(&self, name: &str, bytes: usize) -> Result<Option<Buffer>> {
        if !self.seat.options().share_pages {
            return Ok(None);
        }
        pages::share(&self.seat, self.next.fetch_add(1, Relaxed), name, bytes).map(Some)
    }
    fn health(&self) -> Health {
        self.seat.error().map_or(Health::Good, Health::Lost)
    }
    fn abort(&self, reason: &str) {
        let rank = self.check.rank;
        end_group(self.seat.shared(), rank, &Error::Aborted { rank, by: rank, reason: reason.to_string() });
        self.seat.turned.notify_all();
    }
    fn counts(&self) -> Counts {
        self.counters.get()
    }
}
