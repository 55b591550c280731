//! A dead, stopped, late or confused rank is named on all other ranks, and nobody hangs. Times are upper bounds that no
//! working machine comes near; nothing depends on how fast things happen.

mod common;

use common::*;
use std::os::unix::process::ExitStatusExt;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};
use zrt_collectives::{Communicator, Error, Health, LocalComm, LocalOptions, Store, Watchdog};
use zrt_kernels::cpu::Mode;
use zrt_kernels::{DType, Device, HostTask, Stream};

fn patient() -> LocalOptions {
    LocalOptions { segment_bytes: 128, init_timeout: LONG, train_timeout: LONG, heartbeat_timeout: LONG, ..LocalOptions::default() }
}

/// Issues something and expects the group to be lost; the error must be the same from the call, from later calls and from `health`.
fn lost(comm: &LocalComm, result: zrt_collectives::Result<()>) -> Error {
    let error = result.unwrap_err();
    assert_eq!(comm.health(), Health::Lost(error.clone()));
    assert_eq!(comm.barrier("later", &*inline()).unwrap_err(), error);
    error
}

type Issue = fn(&LocalComm, &dyn Stream) -> zrt_collectives::Result<()>;

fn f32s(elems: usize) -> zrt_kernels::ViewMut {
    filled(DType::F32, elems, std::iter::empty())
}

/// (what rank 2 issues, how its call reads) against `all_reduce f32[8] 'x'` of the others.
const DIFFERENT: [(Issue, &str); 6] = [
    (|c, s| c.all_reduce(&filled(DType::I32, 8, std::iter::empty()), "x", s), "all_reduce i32[8] 'x'"),
    (|c, s| c.all_reduce(&f32s(9), "x", s), "all_reduce f32[9] 'x'"),
    (|c, s| c.all_reduce(&f32s(8), "y", s), "all_reduce f32[8] 'y'"),
    (|c, s| c.barrier("x", s), "barrier 'x'"),
    (|c, s| c.broadcast(&f32s(8), 1, "x", s), "broadcast f32[8] from rank 1 'x'"),
    (|c, _| c.share_pages("x", 8).map(|_| ()), "share_pages u8[8] 'x'"),
];

fn mismatch(comm: &LocalComm, different: (Issue, &str)) {
    let s = &*inline();
    comm.barrier("first", s).unwrap();
    let issued = if comm.rank() == 2 { (different.0)(comm, s) } else { comm.all_reduce(&f32s(8), "x", s) };
    let Error::Mismatch { sequence, rank, here, other, there } = lost(comm, issued) else { panic!("no mismatch") };
    let usual = "all_reduce f32[8] 'x'";
    assert_eq!((sequence, rank), (2, comm.rank()));
    if rank == 2 {
        assert_eq!((here.as_str(), other, there.as_str()), (different.1, 0, usual));
    } else {
        assert_eq!((here.as_str(), other, there.as_str()), (usual, 2, different.1));
    }
}

#[test]
fn mismatches_name_both_ranks_on_all_sides() {
    for different in DIFFERENT {
        threads(4, patient(), |comm| mismatch(&comm, different));
    }
    for kind in 0..DIFFERENT.len() {
        Processes::start(&format!("mismatch {kind}"), 3).pass();
    }
}

#[test]
fn roots_and_long_tags_are_compared_whole() {
    let tag = |rank: usize| "x".repeat(200) + if rank == 1 { "1" } else { "0" };
    threads(2, patient(), |comm| {
        let error = lost(&comm, comm.barrier(&tag(comm.rank()), &*inline()));
        assert!(matches!(error, Error::Mismatch { .. }), "{error}");
    });
    threads(2, patient(), |comm| {
        let error = lost(&comm, comm.broadcast(&f32s(4), comm.rank(), "x", &*inline()));
        assert!(error.to_string().contains("from rank 0") && error.to_string().contains("from rank 1"), "{error}");
    });
}

#[test]
fn a_late_rank_is_named_with_what_it_did_last() {
    let options = LocalOptions { train_timeout: Duration::from_secs(2), ..patient() };
    let done = std::sync::Barrier::new(3);
    threads(3, options, |comm| {
        let s = &*inline();
        comm.barrier("layers.4", s).unwrap();
        if comm.rank() != 1 {
            let error = lost(&comm, comm.all_reduce(&f32s(8), "layers.5", s));
            let Error::Timeout { what, culprit, state, .. } = error else { panic!("{error}") };
            assert_eq!((what.as_str(), culprit), ("#2 all_reduce f32[8] 'layers.5'", 1));
            assert_eq!(state, "alive, last completed #1 barrier layers.4");
        }
        done.wait();
    });
}

#[test]
fn a_rank_that_left_is_named() {
    threads(2, patient(), |comm| {
        comm.barrier("first", &*inline()).unwrap();
        if comm.rank() == 0 {
            let error = lost(&comm, comm.barrier("second", &*inline()));
            assert!(error.to_string().contains("left the group; last completed #1 barrier first"), "{error}");
        }
    });
}

#[test]
fn abort_from_another_thread_ends_all_waits() {
    threads(3, patient(), |comm| {
        if comm.rank() == 1 {
            let other = comm.clone();
            std::thread::spawn(move || other.abort("loss is NaN")).join().unwrap();
            comm.abort("a later reason");
        }
        let error = lost(&comm, comm.barrier("wait", &*inline()));
        assert_eq!(error, Error::Aborted { rank: comm.rank(), by: 1, reason: "loss is NaN".to_string() });
    });
    Processes::start("abort", 3).pass();
}

#[test]
fn a_collective_that_never_runs_ends_the_group() {
    threads(2, patient(), |comm| {
        let error = if comm.rank() == 0 {
            let device = device(Mode::Threaded);
            let failing = device.stream("failing").unwrap();
            let (go, wait) = mpsc::channel::<()>();
            let run = Box::new(move || {
                wait.recv().unwrap();
                Err(zrt_kernels::Error::Race("a test".to_string()))
            });
            failing.host(HostTask { name: "fails".into(), reads: vec![], writes: vec![], run }).unwrap();
            comm.barrier("lost", &*failing).unwrap();
            go.send(()).unwrap();
            assert!(failing.sync().is_err());
            lost(&comm, comm.barrier("next", &*inline()))
        } else {
            lost(&comm, comm.barrier("lost", &*inline()))
        };
        assert!(matches!(&error, Error::Aborted { by: 0, reason, .. } if reason.contains("#1 barrier 'lost' was issued")), "{error}");
    });
}

/// Two streams of random speed: without numbering, ranks would meet in different orders.
#[test]
fn calls_run_in_the_order_they_were_issued_over_streams() {
    threads(2, patient(), |comm| {
        let device = device(Mode::Chaos { seed: comm.rank() as u64 });
        let (gather, reduce) = (device.stream("gather").unwrap(), device.stream("reduce").unwrap());
        let sums: Vec<_> = (0..20).map(|i| filled(DType::I32, 50, (0..50).map(move |j| i + j))).collect();
        let wholes: Vec<_> = (0..20).map(|_| filled(DType::I32, 100, std::iter::empty())).collect();
        for (sum, whole) in sums.iter().zip(&wholes) {
            comm.all_reduce(sum, "grad", &*reduce).unwrap();
            comm.all_gather(whole, &filled(DType::I32, 50, 7..57), "weights", &*gather).unwrap();
        }
        gather.sync().unwrap();
        reduce.sync().unwrap();
        for (i, sum) in sums.iter().enumerate() {
            assert_eq!(get(sum), (0..50).map(|j| 2 * (i as u32 + j)).collect::<Vec<_>>());
        }
        assert!(wholes.iter().all(|w| get(w) == (7..57).chain(7..57).collect::<Vec<_>>()));
        assert_eq!(comm.health(), Health::Good);
    });
}

#[test]
fn the_watchdog_calls_once() {
    threads(2, patient(), |comm| {
        let (send, receive) = mpsc::channel();
        let calls = Arc::new(AtomicUsize::new(0));
        let counted = calls.clone();
        let watchdog = Watchdog::start(&comm, Duration::from_millis(5), move |error| {
            counted.fetch_add(1, SeqCst);
            send.send(error).unwrap();
        });
        if comm.rank() == 0 {
            comm.abort("enough");
        }
        let error = receive.recv_timeout(LONG).unwrap();
        assert_eq!(error, Error::Aborted { rank: comm.rank(), by: 0, reason: "enough".to_string() });
        drop(watchdog);
        assert_eq!(calls.load(SeqCst), 1);
    });
    let quiet = zrt_collectives::LocalGroup::threads(1, patient()).unwrap();
    drop(Watchdog::start(&quiet[0], LONG, |_| panic!("nothing was lost")));
}

fn signal(child: &std::process::Child, signal: i32) {
    // SAFETY: takes numbers only.
    assert_eq!(unsafe { libc::kill(child.id() as i32, signal) }, 0);
}

/// Sends `number` to rank `victim` while all ranks are inside or between collectives; the others must name it.
fn strike(case: &str, victim: usize, number: i32, words: &str) {
    let ranks = 3;
    let mut job = Processes::start(case, ranks);
    let store = job.server.store();
    for rank in 0..ranks {
        store.get(&format!("running {rank}"), LONG).unwrap();
    }
    std::thread::sleep(Duration::from_millis(20));
    signal(&job.children[victim], number);
    let struck = Instant::now();
    for rank in (0..ranks).filter(|r| *r != victim) {
        let text = String::from_utf8(store.get(&format!("lost {rank}"), LONG).unwrap()).unwrap();
        assert!(text.contains(&format!("for rank {victim} (")), "{case}: {text}");
        assert!(text.contains(words), "{case}: {text}");
        assert!(text.contains("last completed #"), "{case}: {text}");
        assert!(job.children[rank].wait().unwrap().success());
    }
    // Generous for a busy machine; what matters is that it is not the train_timeout of two minutes.
    assert!(struck.elapsed() < Duration::from_secs(60), "{case}: named after {:?}", struck.elapsed());
    let _ = job.children[victim].kill();
    assert_eq!(job.children[victim].wait().unwrap().signal(), Some(libc::SIGKILL));
}

#[test]
fn a_killed_rank_is_named() {
    for victim in [0, 2] {
        strike("loop", victim, libc::SIGKILL, "is gone");
    }
    // The victim is not in a collective: the others wait for it at the entry.
    strike("wait for 1", 1, libc::SIGKILL, "is gone");
}

#[test]
fn a_stopped_rank_is_named() {
    strike("loop", 1, libc::SIGSTOP, "is stopped");
    strike("wait for 0", 0, libc::SIGSTOP, "is stopped");
}

#[test]
fn a_rank_that_never_comes_is_named_at_the_start() {
    let store = zrt_collectives::MemoryStore::new();
    let options = LocalOptions { init_timeout: Duration::from_millis(200), ..patient() };
    let error = LocalComm::join(&store, 0, 3, options.clone()).err().unwrap().to_string();
    assert!(error.contains("ranks [1, 2] did not join"), "{error}");
    let error = LocalComm::join(&zrt_collectives::MemoryStore::new(), 1, 2, options.clone()).err().unwrap().to_string();
    assert!(error.contains("was not set within"), "{error}");
    let error = LocalComm::join(&store, 3, 3, options).err().unwrap().to_string();
    assert!(error.contains("rank 3 of 3"), "{error}");
}

#[test]
fn ranks_with_different_options_do_not_meet() {
    let store = zrt_collectives::MemoryStore::new();
    std::thread::scope(|scope| {
        let quick = LocalOptions { init_timeout: Duration::from_secs(5), ..patient() };
        let other = LocalOptions { segment_bytes: 1 << 20, ..quick.clone() };
        let zero = scope.spawn(|| LocalComm::join(&store, 0, 2, quick).map(|_| ()));
        let error = LocalComm::join(&store, 1, 2, other).err().unwrap().to_string();
        assert!(error.contains("expected"), "{error}");
        assert!(zero.join().unwrap().is_err());
    });
}

/// Not a test of its own: what a rank process runs when another test starts one.
#[test]
#[ignore = "started by other tests, as a rank"]
fn child_rank() {
    let Some((case, rank, ranks, store)) = told() else { return };
    let heartbeat_timeout = Duration::from_secs(2);
    let options = LocalOptions { heartbeat_timeout, segment_bytes: 4096, ..patient() };
    let comm = LocalComm::join(&store, rank, ranks, options).unwrap();
    let s = &*inline();
    if let Some(kind) = case.strip_prefix("mismatch ") {
        return mismatch(&comm, DIFFERENT[kind.parse::<usize>().unwrap()]);
    }
    if case == "abort" {
        // An abort that finds another rank still joining ends its join.
        store.set(&format!("joined {rank}"), &[]).unwrap();
        if rank == 1 {
            (0..ranks).for_each(|r| {
                store.get(&format!("joined {r}"), LONG).unwrap();
            });
            comm.abort("loss is NaN");
        }
        let error = lost(&comm, comm.barrier("wait", s));
        assert_eq!(error, Error::Aborted { rank, by: 1, reason: "loss is NaN".to_string() });
        return;
    }
    comm.barrier("first", s).unwrap();
    store.set(&format!("running {rank}"), &[]).unwrap();
    if case == format!("wait for {rank}") {
        std::thread::sleep(LONG);
    }
    let data = f32s(100_000);
    let error = loop {
        if let Err(error) = comm.all_reduce(&data, "grad", s) {
            break lost(&comm, Err(error));
        }
    };
    store.set(&format!("lost {rank}"), error.to_string().as_bytes()).unwrap();
}
