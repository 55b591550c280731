//! Do the emulated NCCL and RCCL compute what they should, in threads and in processes, and fail as the real ones do?

mod common;

use common::{Gpu, PATIENCE, child, finish, inside, is_inside};
use half::bf16;
use std::ffi::{c_int, c_void};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::time::{Duration, Instant};

const F32: c_int = 7;
const BF16: c_int = 9;
const SUM: c_int = 0;
const REMOTE: i32 = 6;
const IN_PROGRESS: i32 = 7;

#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId([u8; 128]);

/// ncclConfig_t as of 2.17.
#[repr(C)]
struct Config {
    bytes: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    others: [c_int; 3],
    name: *const c_void,
    split: c_int,
}

/// A rank's communicator and stream.
struct Rank<'a> {
    gpu: &'a Gpu,
    comm: u64,
    stream: u64,
    rank: usize,
}

macro_rules! ccl {
    ($gpu:expr, $name:literal, ($($type:ty),*), ($($arg:expr),*)) => { call!($gpu, $name, $name, ($($type),*), ($($arg),*)) };
}

fn unique_id(gpu: &Gpu) -> UniqueId {
    let mut id = UniqueId([0; 128]);
    assert_eq!(ccl!(gpu, "ncclGetUniqueId", (*mut UniqueId), (&mut id)), 0);
    id
}

impl<'a> Rank<'a> {
    fn new(gpu: &'a Gpu, ranks: c_int, id: UniqueId, rank: usize, device: c_int) -> Rank<'a> {
        gpu.use_device(device);
        let mut comm = 0u64;
        assert_eq!(ccl!(gpu, "ncclCommInitRank", (*mut u64, c_int, UniqueId, c_int), (&mut comm, ranks, id, rank as c_int)), 0);
        Rank { gpu, comm, stream: gpu.stream(), rank }
    }

    fn begin(gpu: &'a Gpu, ranks: c_int, id: UniqueId, rank: usize) -> Rank<'a> {
        let config = Config {
            bytes: 48,
            magic: 0xcafe_beef,
            version: 21_700,
            blocking: 0,
            others: [c_int::MIN; 3],
            name: std::ptr::null(),
            split: c_int::MIN,
        };
        let mut comm = 0u64;
        let code = ccl!(
            gpu,
            "ncclCommInitRankConfig",
            (*mut u64, c_int, UniqueId, c_int, *const Config),
            (&mut comm, ranks, id, rank as c_int, &config)
        );
        assert_eq!(code, IN_PROGRESS);
        Rank { gpu, comm, stream: gpu.stream(), rank }
    }

    fn state(&self) -> i32 {
        let mut state = 0;
        assert_eq!(ccl!(self.gpu, "ncclCommGetAsyncError", (u64, *mut c_int), (self.comm, &mut state)), 0);
        state
    }

    /// Polls until the communicator is in another state than `from`.
    fn leaves(&self, from: i32) -> i32 {
        let until = Instant::now() + PATIENCE;
        while self.state() == from {
            assert!(Instant::now() < until, "still {from}");
            std::thread::sleep(Duration::from_millis(1));
        }
        self.state()
    }

    fn all_reduce(&self, from: u64, to: u64, count: usize, dtype: c_int) -> i32 {
        type I = c_int;
        ccl!(self.gpu, "ncclAllReduce", (u64, u64, usize, I, I, u64, u64), (from, to, count, dtype, SUM, self.comm, self.stream))
    }

    fn all_gather(&self, from: u64, to: u64, count: usize) -> i32 {
        ccl!(self.gpu, "ncclAllGather", (u64, u64, usize, c_int, u64, u64), (from, to, count, F32, self.comm, self.stream))
    }

    fn abort(&self) {
        assert_eq!(ccl!(self.gpu, "ncclCommAbort", (u64), (self.comm)), 0);
    }

    fn destroy(&self) {
        match ccl!(self.gpu, "ncclCommFinalize", (u64), (self.comm)) {
            IN_PROGRESS => assert_eq!(self.leaves(IN_PROGRESS), 0),
            done => assert_eq!(done, 0),
        }
        assert_eq!(ccl!(self.gpu, "ncclCommDestroy", (u64), (self.comm)), 0);
    }

    /// Every collective once, on numbers whose sums are exact.
    fn everything(&self, ranks: usize) {
        let (gpu, s, n) = (self.gpu, self.stream, 3000);
        let value = |rank: usize, i: usize| (rank * 7 + i % 13) as f32;
        let mine: Vec<f32> = (0..n).map(|i| value(self.rank, i)).collect();
        let sum = |i: usize| (0..ranks).map(|r| value(r, i)).sum::<f32>();
        let x = gpu.put(&mine, s);

        let y = gpu.alloc(4 * n);
        assert_eq!(self.all_reduce(x, y, n, F32), 0);
        assert_eq!(gpu.take::<f32>(y, n, s), (0..n).map(sum).collect::<Vec<_>>());

        let all = gpu.alloc(4 * n * ranks);
        assert_eq!(self.all_gather(x, all, n), 0);
        let gathered: Vec<f32> = (0..ranks).flat_map(|r| (0..n).map(move |i| value(r, i))).collect();
        assert_eq!(gpu.take::<f32>(all, n * ranks, s), gathered);

        let part = n / ranks;
        type I = c_int;
        let code = ccl!(gpu, "ncclReduceScatter", (u64, u64, usize, I, I, u64, u64), (x, y, part, F32, SUM, self.comm, s));
        assert_eq!(code, 0);
        assert_eq!(gpu.take::<f32>(y, part, s), (0..part).map(|i| sum(self.rank * part + i)).collect::<Vec<_>>());

        let root = ranks - 1;
        let code = ccl!(gpu, "ncclBroadcast", (u64, u64, usize, I, I, u64, u64), (x, y, n, F32, root as I, self.comm, s));
        assert_eq!(code, 0);
        assert_eq!(gpu.take::<f32>(y, n, s), (0..n).map(|i| value(root, i)).collect::<Vec<_>>());

        // A ring, which would wait for itself without a group.
        let (next, before) = ((self.rank + 1) % ranks, (self.rank + ranks - 1) % ranks);
        assert_eq!(ccl!(gpu, "ncclGroupStart", (), ()), 0);
        assert_eq!(ccl!(gpu, "ncclRecv", (u64, usize, I, I, u64, u64), (y, n, F32, before as I, self.comm, s)), 0);
        assert_eq!(ccl!(gpu, "ncclSend", (u64, usize, I, I, u64, u64), (x, n, F32, next as I, self.comm, s)), 0);
        assert_eq!(ccl!(gpu, "ncclGroupEnd", (), ()), 0);
        assert_eq!(gpu.take::<f32>(y, n, s), (0..n).map(|i| value(before, i)).collect::<Vec<_>>());

        // In place.
        let code = gpu.upload(all + (4 * n * self.rank) as u64, mine.as_ptr().cast(), 4 * n, s);
        assert_eq!(code, 0);
        assert_eq!(self.all_gather(all + (4 * n * self.rank) as u64, all, n), 0);
        assert_eq!(gpu.take::<f32>(all, n * ranks, s), gathered);
    }
}

fn on_threads(gpu: &Gpu, ranks: usize, body: impl Fn(Rank) + Sync) {
    let id = unique_id(gpu);
    std::thread::scope(|scope| {
        for rank in 0..ranks {
            let body = &body;
            scope.spawn(move || body(Rank::new(gpu, ranks as c_int, id, rank, rank as c_int)));
        }
    });
}

#[test]
fn ranks_in_threads() {
    if !inside("ranks_in_threads", "devices=3;jitter=5") {
        return;
    }
    for amd in [false, true] {
        on_threads(&Gpu::open(amd), 3, |rank| {
            rank.everything(3);
            rank.destroy();
        });
    }
}

#[test]
fn orders_of_sums_follow_the_seed_and_are_the_same_for_all_ranks() {
    if !inside("orders_of_sums_follow_the_seed_and_are_the_same_for_all_ranks", "devices=4;reduce_seed=11") {
        return;
    }
    let results = std::sync::Mutex::new(Vec::new());
    on_threads(&Gpu::open(true), 4, |rank| {
        let n = 20_000;
        let mine: Vec<bf16> = (0..n).map(|i| bf16::from_f32(1.0 + ((i * 31 + rank.rank * 17) % 101) as f32 / 7.0)).collect();
        let x = rank.gpu.put(&mine, rank.stream);
        let mut rounds = Vec::new();
        for _ in 0..2 {
            let y = rank.gpu.alloc(2 * n);
            assert_eq!(rank.all_reduce(x, y, n, BF16), 0);
            rounds.push(rank.gpu.take::<u16>(y, n, rank.stream));
        }
        assert_ne!(rounds[0], rounds[1], "the second call adds in another order");
        results.lock().expect("no panic").push(rounds);
        rank.destroy();
    });
    let results = results.into_inner().expect("no panic");
    assert!(results.iter().all(|r| *r == results[0]), "ranks have different results");
}

/// Two processes; the first makes the id and writes it to a file. What rank 1's process ended with.
fn two_processes(test: &str, settings: &str) -> std::process::Output {
    let folder = tempfile::tempdir().expect("a folder");
    let id = folder.path().join("id").to_str().expect("a name").to_string();
    let start = |rank: &str| child(test, settings, &[("RANK", rank), ("ID_FILE", &id)]);
    let (zero, one) = (start("0"), start("1"));
    let (zero, one) = (finish(zero, PATIENCE), finish(one, PATIENCE));
    let text = String::from_utf8_lossy(&zero.stderr);
    assert!(zero.status.success(), "rank 0: {}{text}", String::from_utf8_lossy(&zero.stdout));
    one
}

/// Rank and id in such a process.
fn joined(gpu: &Gpu) -> (usize, UniqueId) {
    let rank = std::env::var("RANK").expect("a rank").parse().expect("a number");
    let path = std::env::var("ID_FILE").expect("a file");
    let path = Path::new(&path);
    if rank == 0 {
        let id = unique_id(gpu);
        std::fs::write(path.with_extension("new"), id.0).expect("written");
        std::fs::rename(path.with_extension("new"), path).expect("renamed");
        return (0, id);
    }
    let until = Instant::now() + PATIENCE;
    while !path.is_file() {
        assert!(Instant::now() < until, "no id");
        std::thread::sleep(Duration::from_millis(1));
    }
    (rank, UniqueId(std::fs::read(path).expect("an id").try_into().expect("128 bytes")))
}

#[test]
fn ranks_in_processes() {
    let test = "ranks_in_processes";
    if !is_inside(test) {
        let one = two_processes(test, "in_progress=1");
        assert!(one.status.success(), "{}", String::from_utf8_lossy(&one.stderr));
        return;
    }
    let gpu = Gpu::open(false);
    let (rank, id) = joined(&gpu);
    gpu.use_device(rank as c_int);
    let rank = Rank::begin(&gpu, 2, id, rank);
    // Once more for the settings' sake.
    assert_eq!((rank.leaves(IN_PROGRESS), rank.leaves(IN_PROGRESS)), (0, 0));
    rank.everything(2);
    rank.destroy();
}

#[test]
fn a_dead_peer_is_an_asynchronous_error_and_abort_ends_the_wait() {
    let test = "a_dead_peer_is_an_asynchronous_error_and_abort_ends_the_wait";
    if !is_inside(test) {
        let one = two_processes(test, "fault=dead:1:3");
        assert_eq!(one.status.signal(), Some(9), "{}", String::from_utf8_lossy(&one.stderr));
        return;
    }
    let gpu = Gpu::open(true);
    let (rank, id) = joined(&gpu);
    let rank = Rank::new(&gpu, 2, id, rank, rank as c_int);
    let x = gpu.put(&[1.0f32; 8], rank.stream);
    // All three are enqueued before the peer can have ended.
    gpu.hold(true);
    for _ in 0..3 {
        assert_eq!(rank.all_reduce(x, x, 8, F32), 0);
    }
    gpu.hold(false);
    assert_eq!(rank.leaves(0), REMOTE);
    assert_eq!(call!(gpu, "cuStreamQuery", "hipStreamQuery", (u64), (rank.stream)), 600, "its operation still waits");
    rank.abort();
    assert_eq!(gpu.sync(rank.stream), 0);
    assert_eq!(gpu.take::<f32>(x, 8, rank.stream), [4.0; 8], "the third has no result");
}

#[test]
fn a_silent_or_mismatched_peer_is_waited_for_until_an_abort() {
    for (test, settings) in [("silent", "fault=silent:1:2"), ("mismatched", "fault=mismatch:1:2")] {
        let name = "a_silent_or_mismatched_peer_is_waited_for_until_an_abort";
        if !is_inside(name) {
            let out = finish(child(name, settings, &[]), PATIENCE);
            assert!(out.status.success(), "{test}: {}", String::from_utf8_lossy(&out.stderr));
            continue;
        }
        on_threads(&Gpu::open(false), 2, |rank| {
            let x = rank.gpu.put(&[1.0f32; 8], rank.stream);
            assert_eq!(rank.all_reduce(x, x, 8, F32), 0);
            assert_eq!(rank.gpu.sync(rank.stream), 0);
            assert_eq!(rank.all_reduce(x, x, 8, F32), 0);
            // Not a matter of time: nothing but an abort ends it.
            std::thread::sleep(Duration::from_millis(50));
            assert_eq!(call!(rank.gpu, "cuStreamQuery", "hipStreamQuery", (u64), (rank.stream)), 600);
            rank.abort();
            assert_eq!(rank.gpu.sync(rank.stream), 0);
        });
        return;
    }
}

#[test]
fn a_peer_that_never_joins_is_waited_for_until_an_abort() {
    if !inside("a_peer_that_never_joins_is_waited_for_until_an_abort", "") {
        return;
    }
    let gpu = Gpu::open(false);
    let rank = Rank::begin(&gpu, 2, unique_id(&gpu), 0);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(rank.state(), IN_PROGRESS);
    let x = gpu.put(&[1.0f32; 8], rank.stream);
    assert_eq!(rank.all_reduce(x, x, 8, F32), 5, "too early");
    rank.abort();
}

#[test]
fn memory_of_another_process_can_be_copied_from() {
    let test = "memory_of_another_process_can_be_copied_from";
    if !is_inside(test) {
        let one = two_processes(test, "");
        assert!(one.status.success(), "{}", String::from_utf8_lossy(&one.stderr));
        return;
    }
    let gpu = Gpu::open(true);
    let (rank, id) = joined(&gpu);
    let rank = Rank::new(&gpu, 2, id, rank, rank as c_int);
    let s = rank.stream;
    let mine = gpu.put(&[rank.rank as f32; 100], s);
    assert_eq!(gpu.sync(s), 0);
    let mut handle = [0u64; 8];
    assert_eq!(call!(gpu, "cuIpcGetMemHandle", "hipIpcGetMemHandle", (*mut [u64; 8], u64), (&mut handle, mine)), 0);
    // The handles go through a collective: 16 numbers of four bytes.
    let (x, all) = (gpu.put(&handle, s), gpu.alloc(128));
    assert_eq!(rank.all_gather(x, all, 16), 0);
    let handles = gpu.take::<u64>(all, 16, s);
    let peer = 1 - rank.rank;
    let other: [u64; 8] = handles[peer * 8..][..8].try_into().expect("64 bytes");
    #[repr(C)]
    struct Handle([u64; 8]);
    let mut at = 0u64;
    let code = call!(gpu, "cuIpcOpenMemHandle_v2", "hipIpcOpenMemHandle", (*mut u64, Handle, u32), (&mut at, Handle(other), 1));
    assert_eq!(code, 0);
    let copy = gpu.alloc(400);
    let code = call!(gpu, "cuMemcpyDtoDAsync_v2", "hipMemcpyDtoDAsync", (u64, u64, usize, u64), (copy, at, 400, s));
    assert_eq!((code, gpu.take::<f32>(copy, 100, s)), (0, vec![peer as f32; 100]));
    // The peer's process must not end before this one has opened its memory.
    assert_eq!(rank.all_gather(x, all, 16), 0);
    assert_eq!(gpu.sync(s), 0);
    assert_eq!(call!(gpu, "cuIpcCloseMemHandle", "hipIpcCloseMemHandle", (u64), (at)), 0);
    rank.destroy();
}
