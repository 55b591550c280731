//! The communicator of GPUs on a library within this process: every collective against its definition, and every fault as a named error.

#[path = "../common/mod.rs"]
mod common;
mod fake;
mod native;

use common::{LONG, compare_all, filled};
use fake::api;
use native::NativeDevice;
use std::sync::Arc;
use std::time::{Duration, Instant};
use zrt_collectives::ccl::{Api, CopyOptions, CopyWhen, Library, PeerMemory};
use zrt_collectives::{CclComm, CclOptions, Communicator, Error, Health, MemoryStore, Result};
use zrt_kernels::cpu::{CpuDevice, CpuOptions, Mode};
use zrt_kernels::gpu::driver::Vendor;
use zrt_kernels::{DType, Device, Stream};

/// No fault may take longer to become an error.
const SOON: Duration = Duration::from_secs(5);

fn options() -> CclOptions {
    CclOptions { init_timeout: LONG, train_timeout: LONG, scratch_bytes: 0, ..CclOptions::new(Vendor::Nvidia) }
}

/// Runs `body` for every rank on its own thread, with its device; `api(rank)` is the rank's library.
fn ranks_on<T: Send>(
    ranks: usize,
    options: &CclOptions,
    api: impl Fn(usize) -> Api + Sync,
    body: impl Fn(Result<CclComm>, &NativeDevice) -> T + Sync,
) -> Vec<T> {
    let store = Arc::new(MemoryStore::default());
    std::thread::scope(|scope| {
        let one = |rank: usize| {
            let (store, api, body) = (store.clone(), &api, &body);
            scope.spawn(move || {
                // A use of scratch memory that no event orders is an error of its call.
                let cpu = CpuDevice::new(CpuOptions { threads: 1, track: true, ..CpuOptions::default() }).unwrap();
                let device = Arc::new(NativeDevice(cpu));
                let library = Library::from_table(api(rank), "fake").unwrap();
                body(CclComm::join_with(library, store, rank, ranks, device.clone(), options.clone()), &device)
            })
        };
        let threads: Vec<_> = (0..ranks).map(one).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// The same with one stream.
fn ranks<T: Send>(
    ranks: usize,
    options: &CclOptions,
    api: impl Fn(usize) -> Api + Sync,
    body: impl Fn(Result<CclComm>, Arc<dyn Stream>) -> T + Sync,
) -> Vec<T> {
    ranks_on(ranks, options, api, |comm, device| body(comm, device.stream("comm").unwrap()))
}

#[test]
fn every_collective_equals_its_definition() {
    for n in [1, 2, 3, 4, 5] {
        // No scratch beyond the least: sums take several rounds.
        for scratch_bytes in [0, 1 << 20] {
            ranks(
                n,
                &CclOptions { scratch_bytes, ..options() },
                |_| api(),
                |comm, s| {
                    let comm = comm.unwrap();
                    for dtype in [DType::F32, DType::BF16, DType::I32, DType::U8] {
                        for part in [1, 7, 1000, 9000] {
                            compare_all(&comm, &*s, dtype, part);
                        }
                    }
                    assert_eq!(comm.health(), Health::Good);
                },
            );
        }
    }
}

#[test]
fn empty_operands_are_fine() {
    ranks(
        3,
        &options(),
        |_| api(),
        |comm, s| {
            let comm = comm.unwrap();
            compare_all(&comm, &*s, DType::F32, 0);
        },
    );
}

#[test]
fn library_sums_are_close_without_deterministic() {
    ranks(
        3,
        &CclOptions { deterministic: false, ..options() },
        |_| api(),
        |comm, s| {
            let comm = comm.unwrap();
            let data = filled(DType::F32, 5, (0..5).map(|i| (i as f32 + comm.rank() as f32).to_bits()));
            comm.all_reduce(&data, "sum", &*s).unwrap();
            s.sync().unwrap();
            // Small integers: exact in any order.
            let sums: Vec<f32> = common::get(&data).into_iter().map(f32::from_bits).collect();
            assert_eq!(sums, [3.0, 6.0, 9.0, 12.0, 15.0]);
        },
    );
}

#[test]
fn several_streams_keep_the_order_of_calls_and_share_scratch() {
    ranks_on(
        2,
        &options(),
        |_| api(),
        |comm, device| {
            let comm = comm.unwrap();
            let streams =
                ["first", "second"].map(|name| (device.stream(name).unwrap(), filled(DType::BF16, 3000, (0..3000).map(|i| i & 0xff))));
            for call in 0..50 {
                let (s, data) = &streams[usize::from(call % 3 == 0)];
                comm.all_reduce(data, "sum", &**s).unwrap();
                comm.barrier("meet", &*streams[0].0).unwrap();
            }
            streams.iter().for_each(|(s, _)| s.sync().unwrap());
        },
    );
}

#[test]
fn a_library_without_init_config_works() {
    let old = |_| Api { ncclCommInitRankConfig: None, ncclCommFinalize: None, ..api() };
    ranks(2, &options(), old, |comm, s| compare_all(&comm.unwrap(), &*s, DType::F32, 10));
}

#[test]
fn gathers_by_copies_equal_their_definition() {
    // Slots far shorter than the parts: several rounds, and slots are used again.
    let copies = CopyOptions { when: CopyWhen::Possible, slot_bytes: 512, least_bytes: 100 };
    let store = MemoryStore::default();
    for n in [2, 3] {
        ranks_on(
            n,
            &CclOptions { name: format!("copies {n}"), ..options() },
            |_| api(),
            |comm, device| {
                let mut comm = comm.unwrap();
                assert!(comm.use_copies(&store, &native::Mapped, &copies).unwrap());
                let s = device.stream("comm").unwrap();
                for part in [1, 100, 1000, 3001] {
                    compare_all(&comm, &*s, DType::BF16, part);
                    compare_all(&comm, &*s, DType::F32, part);
                }
            },
        );
    }
}

#[test]
fn gathers_stay_with_the_library_where_memory_cannot_be_mapped() {
    let store = MemoryStore::default();
    ranks_on(
        2,
        &options(),
        |_| api(),
        |comm, device| {
            let mut comm = comm.unwrap();
            // One rank cannot: both know.
            let memory: &dyn PeerMemory = if comm.rank() == 0 { &native::Mapped } else { &native::Unmapped };
            assert!(!comm.use_copies(&store, memory, &CopyOptions { when: CopyWhen::Possible, ..CopyOptions::default() }).unwrap());
            compare_all(&comm, &*device.stream("comm").unwrap(), DType::F32, 300_000);
        },
    );
}

/// Waits until the group is lost, and says why and after how long.
fn lost(comm: &CclComm) -> (Error, Duration) {
    let begun = Instant::now();
    loop {
        if let Health::Lost(error) = comm.health() {
            return (error, begun.elapsed());
        }
        assert!(begun.elapsed() < LONG, "rank {} waits for ever", comm.rank());
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn different_collectives_are_named_on_both_sides() {
    type Issue = fn(&CclComm, &dyn Stream) -> Result<()>;
    let cases: [(Issue, Issue, &str, &str); 3] = [
        (|c, s| c.barrier("layers.3", s), |c, s| c.barrier("layers.4", s), "barrier 'layers.3'", "barrier 'layers.4'"),
        (
            |c, s| c.all_reduce(&filled(DType::F32, 8, [].into_iter()), "sum", s),
            |c, s| c.all_reduce(&filled(DType::F32, 9, [].into_iter()), "sum", s),
            "all_reduce f32[8] 'sum'",
            "all_reduce f32[9] 'sum'",
        ),
        (
            |c, s| c.broadcast(&filled(DType::U8, 8, [].into_iter()), 0, "x", s),
            |c, s| c.barrier("x", s),
            "broadcast u8[8] from rank 0 'x'",
            "barrier 'x'",
        ),
    ];
    for (zero, one, here, there) in cases {
        ranks(
            2,
            &options(),
            |_| api(),
            |comm, s| {
                let comm = comm.unwrap();
                comm.barrier("same", &*s).unwrap();
                let issued = if comm.rank() == 0 { zero(&comm, &*s) } else { one(&comm, &*s) };
                let (error, after) = lost(&comm);
                assert!(after < SOON);
                let Error::Mismatch { sequence: 2, rank, here: a, there: b, .. } = &error else { panic!("{error}") };
                let (zero, one) = if *rank == 0 { (a, b) } else { (b, a) };
                assert_eq!((&zero[..], &one[..]), (here, there));
                if let Err(error) = issued {
                    assert!(matches!(error, Error::Mismatch { .. }), "{error}");
                }
                // Not the silence of a stream that was let go.
                let _ = s.sync();
                assert!(comm.barrier("later", &*s).is_err());
            },
        );
    }
}

#[test]
fn a_rank_far_ahead_still_finds_the_difference() {
    ranks(
        2,
        &options(),
        |_| api(),
        |comm, s| {
            let comm = comm.unwrap();
            for call in 0..3000 {
                let tag = if call == 20 && comm.rank() == 1 { "other" } else { "same" };
                if comm.barrier(tag, &*s).is_err() {
                    break;
                }
                if comm.rank() == 1 && call == 19 {
                    // Rank 0 goes on meanwhile, far beyond what is kept in shared memory.
                    std::thread::sleep(Duration::from_millis(300));
                }
                if comm.rank() == 1 && call == 20 {
                    break;
                }
            }
            let (error, after) = lost(&comm);
            assert!(after < SOON && matches!(error, Error::Mismatch { sequence: 21, .. }), "{error}");
            let _ = s.sync();
        },
    );
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    let options = CclOptions { train_timeout: Duration::from_secs(1), ..options() };
    let errors = ranks(
        3,
        &options,
        |_| api(),
        |comm, s| {
            let comm = comm.unwrap();
            comm.barrier("first", &*s).unwrap();
            if comm.rank() != 1 {
                comm.barrier("layers.7", &*s).unwrap();
            }
            let (error, after) = lost(&comm);
            assert!(after < SOON);
            error
        },
    );
    for error in errors {
        let text = error.to_string();
        assert!(matches!(error, Error::Timeout { culprit: 1, .. }), "{text}");
        assert!(text.contains("barrier 'layers.7'") && text.contains("did not issue it"), "{text}");
    }
}

#[test]
fn a_call_that_hangs_is_given_up() {
    let options = CclOptions { train_timeout: Duration::from_secs(1), ..options() };
    let hanging = |_| Api { ncclAllGather: fake::hanging_all_gather, ..api() };
    ranks(2, &options, hanging, |comm, s| {
        let comm = comm.unwrap();
        let (dst, src) = (filled(DType::F32, 8, [].into_iter()), filled(DType::F32, 4, [].into_iter()));
        comm.all_gather(&dst, &src, "layers.3", &*s).unwrap();
        let (error, after) = lost(&comm);
        assert!(after < SOON && error.to_string().contains("all_gather f32[8] 'layers.3'"), "{error}");
        let failed = s.sync().unwrap_err().to_string();
        assert!(failed.contains("all_gather"), "{failed}");
    });
}

#[test]
fn a_call_that_hangs_on_an_inline_stream_is_given_up() {
    let device = Arc::new(NativeDevice(common::device(Mode::Inline)));
    let library = Library::from_table(Api { ncclAllGather: fake::hanging_all_gather, ..api() }, "fake").unwrap();
    let options = CclOptions { train_timeout: Duration::from_secs(1), ..options() };
    let comm = CclComm::join_with(library, Arc::new(MemoryStore::default()), 0, 1, device.clone(), options).unwrap();
    let data = filled(DType::F32, 4, [].into_iter());
    let error = comm.all_gather(&data, &data, "layers.3", &*device.stream("comm").unwrap()).unwrap_err();
    assert!(matches!(error, Error::Timeout { culprit: 0, .. }) && error.to_string().contains("layers.3"), "{error}");
}

#[test]
fn a_rank_that_left_is_named() {
    ranks(
        2,
        &options(),
        |_| api(),
        |comm, s| {
            let comm = comm.unwrap();
            comm.barrier("first", &*s).unwrap();
            s.sync().unwrap();
            if comm.rank() == 1 {
                return;
            }
            comm.barrier("second", &*s).unwrap();
            let (error, after) = lost(&comm);
            let text = error.to_string();
            assert!(after < SOON && matches!(error, Error::Timeout { culprit: 1, .. }) && text.contains("left the group"), "{text}");
        },
    );
}

#[test]
fn abort_reaches_all_ranks() {
    ranks(
        2,
        &options(),
        |_| api(),
        |comm, s| {
            let comm = comm.unwrap();
            if comm.rank() == 0 {
                comm.barrier("alone", &*s).unwrap();
            } else {
                std::thread::sleep(Duration::from_millis(50));
                comm.abort("the disk is full");
            }
            let (error, after) = lost(&comm);
            assert!(after < SOON);
            assert_eq!(error, Error::Aborted { rank: comm.rank(), by: 1, reason: "the disk is full".to_string() });
            let _ = s.sync();
        },
    );
}

#[test]
fn unknown_results_are_errors_with_their_number() {
    let unknown = |_| Api { ncclAllGather: fake::unknown_all_gather, ..api() };
    ranks(1, &options(), unknown, |comm, s| {
        let comm = comm.unwrap();
        let data = filled(DType::F32, 4, [].into_iter());
        comm.all_gather(&data, &data, "x", &*s).unwrap();
        let failed = s.sync().unwrap_err().to_string();
        assert!(failed.contains("ncclAllGather returned 12345 (unknown result code)") && failed.contains("fake 2.18.3"), "{failed}");
        assert!(lost(&comm).0.to_string().contains("12345"));
    });
}

#[test]
fn asynchronous_errors_end_the_group() {
    // Ready once, then timed out: init must see one good state.
    static CALLS: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    unsafe extern "C" fn state(
        comm: zrt_collectives::ccl::sys::ncclComm_t,
        state: *mut zrt_collectives::ccl::sys::ncclResult_t,
    ) -> zrt_collectives::ccl::sys::ncclResult_t {
        // SAFETY: as the caller promises.
        unsafe {
            if CALLS.fetch_add(1, std::sync::atomic::Ordering::Relaxed) < 4 { *state = 0 } else { return fake::timed_out(comm, state) }
        }
        0
    }
    ranks(
        1,
        &options(),
        |_| Api { ncclCommGetAsyncError: state, ..api() },
        |comm, _| {
            let (error, after) = lost(&comm.unwrap());
            assert!(after < SOON && error.to_string().contains("returned 8"), "{error}");
        },
    );
}

#[test]
fn init_ends_by_its_deadline_and_names_what_failed() {
    let brief = CclOptions { init_timeout: Duration::from_secs(1), ..options() };
    let never = |_| Api { ncclCommGetAsyncError: fake::never_ready, ..api() };
    let begun = Instant::now();
    for error in ranks(2, &brief, never, |comm, _| comm.err().unwrap().to_string()) {
        assert!(error.contains("deadline"), "{error}");
    }
    assert!(begun.elapsed() < SOON + brief.init_timeout);

    // One rank's device fails: all learn it, long before the deadline.
    let begun = Instant::now();
    let failing =
        |rank| Api { ncclCommInitRankConfig: if rank == 1 { Some(fake::failing_init) } else { api().ncclCommInitRankConfig }, ..api() };
    for error in ranks(2, &options(), failing, |comm, _| comm.err().unwrap().to_string()) {
        assert!(error.contains("returned 1 (unhandled device error)"), "{error}");
    }
    assert!(begun.elapsed() < SOON);

    // Nobody else comes.
    let store = Arc::new(MemoryStore::default());
    let device = Arc::new(NativeDevice(common::device(Default::default())));
    let library = Library::from_table(api(), "fake").unwrap();
    let error = CclComm::join_with(library, store, 0, 2, device, brief).err().unwrap().to_string();
    assert!(error.contains("[1] did not join"), "{error}");
}
