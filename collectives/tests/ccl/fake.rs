//! A library of collectives within this process, with NCCL's functions: ranks are threads, memory is the host's. A call does its work
//! before it returns, and then says "in progress" for a while, as a communicator that is not blocking may. It adds in an order of its own.
#![allow(non_upper_case_globals)]
// The functions are as unsafe as a library's: pointers and counts are the caller's promise, and the caller is what is tested.
#![allow(unsafe_op_in_unsafe_fn)]

use half::bf16;
use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::*};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;
use zrt_collectives::ccl::{Api, sys::*};

/// What one rank brings to a call: (what it is, bytes for each receiver; one for all where the call has none).
type Brought = (String, Vec<(usize, Vec<u8>)>);

#[derive(Default)]
struct World {
    joined: AtomicU32,
    rounds: Mutex<HashMap<u64, Vec<Option<Arc<Brought>>>>>,
    changed: Condvar,
}

struct Comm {
    world: Arc<World>,
    rank: usize,
    ranks: usize,
    round: AtomicU64,
    aborted: AtomicBool,
    /// Times that the state is still "in progress".
    busy: AtomicU32,
}

static WORLDS: Mutex<Option<HashMap<u64, Arc<World>>>> = Mutex::new(None);
static NEXT: AtomicU64 = AtomicU64::new(1);
/// Communicators that were destroyed, and aborted.
pub static DESTROYED: AtomicU32 = AtomicU32::new(0);
pub static ABORTED: AtomicU32 = AtomicU32::new(0);

struct Part {
    peer: usize,
    send: Option<Vec<u8>>,
    recv: Option<(*mut u8, usize)>,
    comm: ncclComm_t,
}

thread_local! {
    static GROUP: RefCell<Vec<Part>> = const { RefCell::new(Vec::new()) };
}

fn comm<'a>(comm: ncclComm_t) -> &'a Comm {
    // SAFETY: handles are leaked boxes.
    unsafe { &*comm.cast::<Comm>() }
}

impl Comm {
    /// Brings and gets what all brought; `None` when aborted. Ranks that call different things wait for ever.
    fn meet(&self, what: String, bring: Vec<(usize, Vec<u8>)>) -> Option<Vec<Arc<Brought>>> {
        let round = self.round.fetch_add(1, Relaxed);
        let mut rounds = self.world.rounds.lock().unwrap();
        rounds.entry(round).or_insert_with(|| vec![None; self.ranks])[self.rank] = Some(Arc::new((what, bring)));
        self.world.changed.notify_all();
        loop {
            let all: Vec<_> = rounds[&round].iter().flatten().cloned().collect();
            if all.len() == self.ranks && all.iter().all(|one| one.0 == all[0].0) {
                self.busy.store(2, Relaxed);
                return Some(all);
            }
            if self.aborted.load(Relaxed) {
                return None;
            }
            rounds = self.world.changed.wait_timeout(rounds, Duration::from_millis(5)).unwrap().0;
        }
    }
}

fn bytes_of(dtype: ncclDataType_t) -> usize {
    match dtype {
        ncclUint8 => 1,
        ncclBfloat16 => 2,
        _ => 4,
    }
}

unsafe fn take(src: *const c_void, bytes: usize) -> Vec<u8> {
    std::slice::from_raw_parts(src.cast(), bytes).to_vec()
}

unsafe fn give(dst: *mut c_void, bytes: &[u8]) {
    std::ptr::copy_nonoverlapping(bytes.as_ptr(), dst.cast(), bytes.len())
}

/// Last rank first, rounded at each step: not our tree.
fn sum(parts: &[&[u8]], dtype: ncclDataType_t) -> Vec<u8> {
    let four = |bytes: &[u8], i: usize| [bytes[i], bytes[i + 1], bytes[i + 2], bytes[i + 3]];
    let mut total = parts[parts.len() - 1].to_vec();
    for part in parts.iter().rev().skip(1) {
        for i in (0..total.len()).step_by(bytes_of(dtype)) {
            match dtype {
                ncclFloat32 => {
                    let sum = f32::from_le_bytes(four(&total, i)) + f32::from_le_bytes(four(part, i));
                    total[i..i + 4].copy_from_slice(&sum.to_le_bytes());
                }
                ncclInt32 => {
                    let sum = i32::from_le_bytes(four(&total, i)).wrapping_add(i32::from_le_bytes(four(part, i)));
                    total[i..i + 4].copy_from_slice(&sum.to_le_bytes());
                }
                _ => {
                    let value = |bytes: &[u8]| bf16::from_le_bytes([bytes[i], bytes[i + 1]]).to_f32();
                    let sum = bf16::from_f32(value(&total) + value(part));
                    total[i..i + 2].copy_from_slice(&sum.to_le_bytes());
                }
            }
        }
    }
    total
}

/// All functions.
pub fn api() -> Api {
    Api {
        ncclGetVersion: version,
        ncclGetUniqueId: unique_id,
        ncclCommInitRank: init_blocking,
        ncclCommGetAsyncError: async_error,
        ncclCommDestroy: destroy,
        ncclCommAbort: abort,
        ncclCommCount: count,
        ncclAllGather: all_gather,
        ncclReduceScatter: reduce_scatter,
        ncclAllReduce: all_reduce,
        ncclBroadcast: broadcast,
        ncclSend: send,
        ncclRecv: recv,
        ncclGroupStart: group_start,
        ncclGroupEnd: group_end,
        ncclGetErrorString: error_string,
        ncclCommInitRankConfig: Some(init),
        ncclCommFinalize: Some(finalize),
        ncclGetLastError: None,
    }
}

/// A call that never comes back before the communicator is aborted.
pub unsafe extern "C" fn hanging_all_gather(
    _: *const c_void,
    _: *mut c_void,
    _: usize,
    _: ncclDataType_t,
    of: ncclComm_t,
    _: cudaStream_t,
) -> ncclResult_t {
    while !comm(of).aborted.load(Relaxed) {
        std::thread::sleep(Duration::from_millis(1));
    }
    ncclSystemError
}

/// A result that nobody knows.
pub unsafe extern "C" fn unknown_all_gather(
    _: *const c_void,
    _: *mut c_void,
    _: usize,
    _: ncclDataType_t,
    _: ncclComm_t,
    _: cudaStream_t,
) -> ncclResult_t {
    12345
}

/// A state that older headers do not name.
pub unsafe extern "C" fn timed_out(_: ncclComm_t, state: *mut ncclResult_t) -> ncclResult_t {
    *state = 8;
    ncclSuccess
}

/// A state that never ends.
pub unsafe extern "C" fn never_ready(_: ncclComm_t, state: *mut ncclResult_t) -> ncclResult_t {
    *state = ncclInProgress;
    ncclSuccess
}

/// An init that fails.
pub unsafe extern "C" fn failing_init(_: *mut ncclComm_t, _: c_int, _: ncclUniqueId, _: c_int, _: *mut ncclConfig_t) -> ncclResult_t {
    ncclUnhandledCudaError
}

unsafe extern "C" fn version(version: *mut c_int) -> ncclResult_t {
    *version = 21803;
    ncclSuccess
}

unsafe extern "C" fn unique_id(id: *mut ncclUniqueId) -> ncclResult_t {
    let number = NEXT.fetch_add(1, Relaxed);
    for (at, byte) in number.to_le_bytes().into_iter().enumerate() {
        (*id).internal[at] = byte as c_char;
    }
    ncclSuccess
}

unsafe fn enter(out: *mut ncclComm_t, ranks: c_int, id: ncclUniqueId, rank: c_int) {
    let number = u64::from_le_bytes(std::array::from_fn(|at| id.internal[at] as u8));
    let world = WORLDS.lock().unwrap().get_or_insert_default().entry(number).or_default().clone();
    world.joined.fetch_add(1, Relaxed);
    let comm = Comm {
        world,
        rank: rank as usize,
        ranks: ranks as usize,
        round: AtomicU64::new(0),
        aborted: AtomicBool::new(false),
        busy: AtomicU32::new(0),
    };
    *out = Box::into_raw(Box::new(comm)).cast();
}

unsafe extern "C" fn init(out: *mut ncclComm_t, ranks: c_int, id: ncclUniqueId, rank: c_int, config: *mut ncclConfig_t) -> ncclResult_t {
    let config = &*config;
    assert_eq!((config.size, config.magic, config.version, config.blocking), (size_of::<ncclConfig_t>(), 0xcafebeef, 21700, 0));
    enter(out, ranks, id, rank);
    ncclInProgress
}

unsafe extern "C" fn init_blocking(out: *mut ncclComm_t, ranks: c_int, id: ncclUniqueId, rank: c_int) -> ncclResult_t {
    let mut handle = std::ptr::null_mut();
    enter(&mut handle, ranks, id, rank);
    while comm(handle).world.joined.load(Relaxed) < ranks as u32 {
        std::thread::sleep(Duration::from_millis(1));
    }
    *out = handle;
    ncclSuccess
}

unsafe extern "C" fn async_error(of: ncclComm_t, state: *mut ncclResult_t) -> ncclResult_t {
    let comm = comm(of);
    let busy = comm.busy.fetch_update(Relaxed, Relaxed, |n| n.checked_sub(1)).is_ok();
    let ready = !busy && comm.world.joined.load(Relaxed) >= comm.ranks as u32;
    *state = if ready { ncclSuccess } else { ncclInProgress };
    ncclSuccess
}

unsafe extern "C" fn finalize(of: ncclComm_t) -> ncclResult_t {
    comm(of).busy.store(3, Relaxed);
    ncclInProgress
}

unsafe extern "C" fn destroy(_: ncclComm_t) -> ncclResult_t {
    DESTROYED.fetch_add(1, Relaxed);
    ncclSuccess
}

unsafe extern "C" fn abort(of: ncclComm_t) -> ncclResult_t {
    comm(of).aborted.store(true, Relaxed);
    ABORTED.fetch_add(1, Relaxed);
    ncclSuccess
}

unsafe extern "C" fn count(of: ncclComm_t, count: *mut c_int) -> ncclResult_t {
    *count = comm(of).ranks as c_int;
    ncclSuccess
}

unsafe extern "C" fn error_string(code: ncclResult_t) -> *const c_char {
    match code {
        ncclUnhandledCudaError => c"unhandled device error".as_ptr(),
        _ => c"unknown result code".as_ptr(),
    }
}

unsafe extern "C" fn all_gather(
    src: *const c_void,
    dst: *mut c_void,
    elems: usize,
    dtype: ncclDataType_t,
    of: ncclComm_t,
    _: cudaStream_t,
) -> ncclResult_t {
    let bytes = elems * bytes_of(dtype);
    let Some(all) = comm(of).meet(format!("all_gather {bytes}"), vec![(0, take(src, bytes))]) else { return ncclInternalError };
    for (rank, one) in all.iter().enumerate() {
        give(dst.byte_add(rank * bytes), &one.1[0].1);
    }
    ncclInProgress
}

unsafe extern "C" fn reduce_scatter(
    src: *const c_void,
    dst: *mut c_void,
    elems: usize,
    dtype: ncclDataType_t,
    op: ncclRedOp_t,
    of: ncclComm_t,
    _: cudaStream_t,
) -> ncclResult_t {
    assert_eq!(op, ncclSum);
    let (comm, bytes) = (comm(of), elems * bytes_of(dtype));
    let whole = take(src, bytes * comm.ranks);
    let Some(all) = comm.meet(format!("reduce_scatter {bytes}"), vec![(0, whole)]) else { return ncclInternalError };
    let part = comm.rank * bytes..(comm.rank + 1) * bytes;
    let parts: Vec<&[u8]> = all.iter().map(|one| &one.1[0].1[part.clone()]).collect();
    give(dst, &sum(&parts, dtype));
    ncclInProgress
}

unsafe extern "C" fn all_reduce(
    src: *const c_void,
    dst: *mut c_void,
    elems: usize,
    dtype: ncclDataType_t,
    op: ncclRedOp_t,
    of: ncclComm_t,
    _: cudaStream_t,
) -> ncclResult_t {
    assert_eq!(op, ncclSum);
    let bytes = elems * bytes_of(dtype);
    let Some(all) = comm(of).meet(format!("all_reduce {bytes}"), vec![(0, take(src, bytes))]) else { return ncclInternalError };
    let parts: Vec<&[u8]> = all.iter().map(|one| &one.1[0].1[..]).collect();
    give(dst, &sum(&parts, dtype));
    ncclInProgress
}

unsafe extern "C" fn broadcast(
    src: *const c_void,
    dst: *mut c_void,
    elems: usize,
    dtype: ncclDataType_t,
    root: c_int,
    of: ncclComm_t,
    _: cudaStream_t,
) -> ncclResult_t {
    let bytes = elems * bytes_of(dtype);
    let Some(all) = comm(of).meet(format!("broadcast {bytes}"), vec![(0, take(src, bytes))]) else { return ncclInternalError };
    give(dst, &all[root as usize].1[0].1);
    ncclInProgress
}

unsafe extern "C" fn send(
    src: *const c_void,
    elems: usize,
    dtype: ncclDataType_t,
    peer: c_int,
    comm: ncclComm_t,
    _: cudaStream_t,
) -> ncclResult_t {
    let send = Some(take(src, elems * bytes_of(dtype)));
    GROUP.with_borrow_mut(|group| group.push(Part { peer: peer as usize, send, recv: None, comm }));
    ncclSuccess
}

unsafe extern "C" fn recv(
    dst: *mut c_void,
    elems: usize,
    dtype: ncclDataType_t,
    peer: c_int,
    comm: ncclComm_t,
    _: cudaStream_t,
) -> ncclResult_t {
    let recv = Some((dst.cast(), elems * bytes_of(dtype)));
    GROUP.with_borrow_mut(|group| group.push(Part { peer: peer as usize, send: None, recv, comm }));
    ncclSuccess
}

unsafe extern "C" fn group_start() -> ncclResult_t {
    assert!(GROUP.take().is_empty(), "a group was left open");
    ncclSuccess
}

unsafe extern "C" fn group_end() -> ncclResult_t {
    let group = GROUP.take();
    let Some(first) = group.first() else { return ncclSuccess };
    let comm = comm(first.comm);
    let sends = group.iter().filter_map(|part| part.send.clone().map(|bytes| (part.peer, bytes))).collect();
    let Some(all) = comm.meet("exchange".to_string(), sends) else { return ncclInternalError };
    for part in &group {
        if let Some((dst, bytes)) = part.recv {
            let sent = &all[part.peer].1.iter().find(|(to, _)| *to == comm.rank).unwrap().1;
            assert_eq!(sent.len(), bytes);
            give(dst.cast(), sent);
        }
    }
    ncclInProgress
}
