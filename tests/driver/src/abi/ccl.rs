//! NCCL and RCCL, whose functions have the same names.
#![allow(non_snake_case)]

use super::{export, put};
use crate::api;
use crate::ccl::bootstrap::{self, ID_BYTES};
use crate::ccl::calls::{Call, What, enqueue};
use crate::ccl::comm::Comm;
use crate::ccl::reduce::Op;
use crate::ccl::result;
use crate::device::{Handles, Machine};
use std::cell::{Cell, RefCell};
use std::ffi::{c_char, c_int};
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};

/// ncclUniqueId, passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId([u8; ID_BYTES]);

/// The beginning of ncclConfig_t.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Config {
    bytes: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
}

const MAGIC: u32 = 0xcafe_beef;

fn comms() -> &'static Handles<Comm> {
    static COMMS: OnceLock<Handles<Comm>> = OnceLock::new();
    COMMS.get_or_init(Handles::default)
}

fn comm(handle: u64) -> Result<Arc<Comm>, i32> {
    comms().get(handle).map_err(|_| result::INVALID_ARGUMENT)
}

thread_local! {
    static DEPTH: Cell<u32> = const { Cell::new(0) };
    static CALLS: RefCell<Vec<(u64, u64, Call)>> = const { RefCell::new(Vec::new()) };
    static INITS: RefCell<Vec<Arc<Comm>>> = const { RefCell::new(Vec::new()) };
}

/// Begins to make a communicator; waits for it if it is a blocking one outside a group.
///
/// # Safety
/// `out` and `config` are null or the caller's.
unsafe fn init(out: *mut u64, ranks: c_int, id: UniqueId, rank: c_int, config: *const Config) -> Result<(), i32> {
    api::start().map_err(|_| result::SYSTEM)?;
    let (ranks, rank) = (usize::try_from(ranks).unwrap_or(0), usize::try_from(rank).unwrap_or(usize::MAX));
    // SAFETY: the caller's.
    let config = unsafe { config.as_ref() };
    if rank >= ranks || config.is_some_and(|c| c.magic != MAGIC || c.bytes < size_of::<Config>()) {
        return Err(result::INVALID_ARGUMENT);
    }
    let blocking = config.is_none_or(|c| c.blocking != 0);
    let device = &Machine::get().devices[api::current_index()];
    let comm = Comm::start(id.0, ranks, rank, device, blocking).map_err(|_| result::SYSTEM)?;
    // SAFETY: the caller's.
    unsafe { put(out, comms().add(comm.clone())) }.map_err(|_| result::INVALID_ARGUMENT)?;
    if DEPTH.get() > 0 {
        INITS.with_borrow_mut(|inits| inits.push(comm));
        return Ok(());
    }
    settle(&comm)
}

/// The result of making a communicator: now for one that blocks, later for another.
fn settle(comm: &Comm) -> Result<(), i32> {
    if !comm.blocking {
        return Err(result::IN_PROGRESS);
    }
    match comm.joined() {
        0 => Ok(()),
        error => Err(error),
    }
}

fn call(handle: u64, stream: u64, what: What, from: u64, to: u64, count: usize, dtype: c_int) -> Result<(), i32> {
    let comm = comm(handle)?;
    match comm.state() {
        0 => {}
        result::IN_PROGRESS => return Err(result::INVALID_USAGE),
        error => return Err(error),
    }
    let call = Call { what, from, to, count, dtype };
    call.check(&comm)?;
    CALLS.with_borrow_mut(|calls| calls.push((handle, stream, call)));
    if DEPTH.get() == 0 { run_calls() } else { Ok(()) }
}

/// Enqueues the calls that were made, those of one communicator and stream together.
fn run_calls() -> Result<(), i32> {
    let mut calls = CALLS.take();
    let mut in_progress = false;
    while let Some((handle, stream, _)) = calls.first().copied() {
        let (these, others): (Vec<_>, Vec<_>) = calls.into_iter().partition(|(h, s, _)| (*h, *s) == (handle, stream));
        calls = others;
        let comm = comm(handle)?;
        let on = Machine::get().stream_of(comm.device, stream).map_err(|_| result::INVALID_ARGUMENT)?;
        let these: Vec<Call> = these.into_iter().map(|(_, _, call)| call).collect();
        enqueue(&comm, &on, &these);
        in_progress |= comm.first_time.load(Ordering::Acquire);
    }
    if in_progress { Err(result::IN_PROGRESS) } else { Ok(()) }
}

fn op(number: c_int) -> Result<Op, i32> {
    Op::of(number).ok_or(result::INVALID_ARGUMENT)
}

fn rank(number: c_int) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

export! {
    fn ncclGetVersion(version: *mut c_int) {
        put(version, 22_703)
    }

    fn ncclGetUniqueId(id: *mut UniqueId) {
        put(id, UniqueId(bootstrap::unique_id().map_err(|_| result::SYSTEM)?))
    }

    fn ncclCommInitRank(out: *mut u64, ranks: c_int, id: UniqueId, rank: c_int) {
        init(out, ranks, id, rank, std::ptr::null())
    }

    fn ncclCommInitRankConfig(out: *mut u64, ranks: c_int, id: UniqueId, rank: c_int, config: *const Config) {
        init(out, ranks, id, rank, config)
    }

    fn ncclCommGetAsyncError(handle: u64, error: *mut c_int) {
        let comm = comm(handle)?;
        let state = comm.state();
        let first = state == 0 && comm.first_time.swap(false, Ordering::AcqRel);
        put(error, if first { result::IN_PROGRESS } else { state })
    }

    fn ncclCommFinalize(handle: u64) {
        let comm = comm(handle)?;
        if comm.blocking {
            comm.finish();
            return Ok(());
        }
        comm.begin_finish().map_err(|_| result::SYSTEM)?;
        Err(result::IN_PROGRESS)
    }

    fn ncclCommDestroy(handle: u64) {
        let comm = comms().remove(handle).map_err(|_| result::INVALID_ARGUMENT)?;
        comm.destroy();
        Ok(())
    }

    fn ncclCommAbort(handle: u64) {
        let comm = comms().remove(handle).map_err(|_| result::INVALID_ARGUMENT)?;
        comm.abort();
        Ok(())
    }

    fn ncclCommCount(handle: u64, count: *mut c_int) {
        put(count, comm(handle)?.ranks as c_int)
    }

    fn ncclCommUserRank(handle: u64, rank: *mut c_int) {
        put(rank, comm(handle)?.rank as c_int)
    }

    fn ncclCommCuDevice(handle: u64, device: *mut c_int) {
        put(device, comm(handle)?.device.index as c_int)
    }

    fn ncclAllGather(from: u64, to: u64, count: usize, dtype: c_int, comm: u64, stream: u64) {
        call(comm, stream, What::AllGather, from, to, count, dtype)
    }

    fn ncclReduceScatter(from: u64, to: u64, count: usize, dtype: c_int, kind: c_int, comm: u64, stream: u64) {
        call(comm, stream, What::ReduceScatter(op(kind)?), from, to, count, dtype)
    }

    fn ncclAllReduce(from: u64, to: u64, count: usize, dtype: c_int, kind: c_int, comm: u64, stream: u64) {
        call(comm, stream, What::AllReduce(op(kind)?), from, to, count, dtype)
    }

    fn ncclBroadcast(from: u64, to: u64, count: usize, dtype: c_int, root: c_int, comm: u64, stream: u64) {
        call(comm, stream, What::Broadcast(rank(root)), from, to, count, dtype)
    }

    fn ncclSend(from: u64, count: usize, dtype: c_int, peer: c_int, comm: u64, stream: u64) {
        call(comm, stream, What::Send(rank(peer)), from, 0, count, dtype)
    }

    fn ncclRecv(to: u64, count: usize, dtype: c_int, peer: c_int, comm: u64, stream: u64) {
        call(comm, stream, What::Recv(rank(peer)), 0, to, count, dtype)
    }

    fn ncclGroupStart() {
        DEPTH.set(DEPTH.get() + 1);
        Ok(())
    }

    fn ncclGroupEnd() {
        let depth = DEPTH.get().checked_sub(1).ok_or(result::INVALID_USAGE)?;
        DEPTH.set(depth);
        if depth > 0 {
            return Ok(());
        }
        let made = INITS.take().iter().map(|comm| settle(comm)).fold(Ok(()), Result::and);
        made.and(run_calls())
    }
}

/// A sentence for a code.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetErrorString(code: c_int) -> *const c_char {
    match code {
        0 => c"no error",
        1 => c"unhandled driver error",
        result::SYSTEM => c"unhandled system error",
        3 => c"internal error",
        result::INVALID_ARGUMENT => c"invalid argument",
        result::INVALID_USAGE => c"invalid usage",
        result::REMOTE => c"remote process exited or there was a network error",
        result::IN_PROGRESS => c"operation in progress",
        _ => c"unknown result code",
    }
    .as_ptr()
}

/// What the last error of a communicator was about.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetLastError(handle: u64) -> *const c_char {
    match comm(handle).map(|c| c.state()) {
        Ok(result::REMOTE) => c"emulated: a peer closed its connection",
        _ => c"",
    }
    .as_ptr()
}
