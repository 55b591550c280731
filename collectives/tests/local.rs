//! The local communicator: every collective, type and odd length gives the bits of its definition, with ranks as threads and as processes.

mod common;

use common::*;
use proptest::prelude::*;
use zrt_collectives::{Communicator, Error, LocalComm, LocalOptions, SoloComm};
use zrt_kernels::cpu::Mode;
use zrt_kernels::{DType, Device, Stream};

const DTYPES: [DType; 4] = [DType::F32, DType::BF16, DType::I32, DType::U8];

/// Segments of two cache lines: short messages already take many steps.
fn tiny() -> LocalOptions {
    LocalOptions { segment_bytes: 128, init_timeout: LONG, train_timeout: LONG, heartbeat_timeout: LONG, ..LocalOptions::default() }
}

fn body(comm: &dyn Communicator) {
    let s = &*inline();
    for dtype in DTYPES {
        for part in [0, 1, 3, 17, 64, 333] {
            compare_all(comm, s, dtype, part);
        }
    }
    // Above the length from which shares are summed: many segments of two kinds of steps.
    compare_all(comm, s, DType::F32, 5003);
    shared_pages(comm, s);
}

/// Each rank writes its stripe; after a barrier all see all.
fn shared_pages(comm: &dyn Communicator, s: &dyn Stream) {
    let (rank, ranks) = (comm.rank(), comm.ranks());
    for round in 0..3 {
        let elems = 1000 * ranks;
        let pages = comm.share_pages(&format!("pages {round}"), elems * 4).unwrap().unwrap();
        assert_eq!(pages.bytes(), elems * 4);
        let all = pages.all(DType::I32).unwrap();
        assert!(get(&all.slice(rank * 1000, 1000).unwrap()).iter().all(|v| *v == 0), "zeroed");
        put(&all.slice(rank * 1000, 1000).unwrap(), (0..1000).map(|i| (rank * 10_000 + i + round) as u32));
        comm.barrier("written", s).unwrap();
        let wanted: Vec<u32> = (0..ranks).flat_map(|r| (0..1000).map(move |i| (r * 10_000 + i + round) as u32)).collect();
        assert_eq!(get(&all), wanted);
    }
    assert!(comm.share_pages("empty", 0).unwrap().is_some());
}

#[test]
fn a_group_of_one_needs_no_library() {
    let s = inline();
    let comm = SoloComm::new();
    for dtype in [DType::F32, DType::BF16, DType::I32, DType::U8] {
        compare_all(&comm, &*s, dtype, 100);
    }
    comm.abort("enough");
    assert!(matches!(comm.barrier("later", &*s), Err(Error::Aborted { by: 0, .. })));
}

#[test]
fn threads_match_the_definition() {
    for ranks in [1, 2, 3, 4, 5, 8] {
        threads(ranks, tiny(), |comm| body(&*comm));
    }
}

#[test]
fn processes_match_the_definition() {
    for ranks in [1, 2, 3, 4, 8] {
        Processes::start("body", ranks).pass();
    }
}

#[test]
fn default_segments_match_the_definition() {
    let options = LocalOptions::default();
    threads(3, options, |comm| compare_all(&*comm, &*inline(), DType::BF16, 100_003));
}

/// Two ranks with a core each: mail, pieces of the usual length and, where one is asked for, results that are stored around the caches.
fn two_ranks(comm: &dyn Communicator, longest: usize) {
    let s = &*inline();
    for dtype in DTYPES {
        for part in [1, 111, 140, 259, 513, 16_385, 100_003] {
            compare_all(comm, s, dtype, part);
        }
    }
    compare_all(comm, s, DType::F32, longest);
}

#[test]
fn two_ranks_with_default_segments_match_the_definition() {
    threads(2, LocalOptions::default(), |comm| two_ranks(&*comm, 1_100_003));
    Processes::start("two ranks", 2).pass();
}

/// Streams of their own threads, with random delays: the host runs far ahead of the collectives.
#[test]
fn asynchronous_streams_match_the_definition() {
    for mode in [Mode::Threaded, Mode::Chaos { seed: 7 }] {
        threads(3, tiny(), |comm| {
            let device = device(mode);
            compare_all(&*comm, &*device.stream("comm").unwrap(), DType::F32, 33);
        });
    }
}

#[test]
fn many_ranks() {
    threads(64, tiny(), |comm| compare_all(&*comm, &*inline(), DType::F32, 5));
    threads(33, tiny(), |comm| compare_all(&*comm, &*inline(), DType::BF16, 130));
    // Beside the slots there are pages: one for all, some for each rank.
    let pages = |ranks: usize, slots: usize, segment_bytes: usize| {
        let bytes = LocalOptions { segment_bytes, ..tiny() }.shared_bytes(ranks).unwrap() - slots;
        assert_eq!(bytes % 4096, 0);
        bytes / 4096
    };
    let each = pages(1, 2 * 192, 192) - 1;
    assert_eq!(pages(3, 6 * 192, 128), 1 + 3 * each, "slots are raised to a cache line per rank");
    assert_eq!(pages(1, 2 * 1024, 1000), 1 + each, "and to whole cache lines");
    let error = zrt_collectives::LocalGroup::threads(65, tiny()).err().unwrap();
    assert!(error.to_string().contains("expected 1 to 64"), "{error}");
}

#[test]
fn no_pages_when_turned_off() {
    let options = LocalOptions { share_pages: false, ..tiny() };
    threads(2, options, |comm| assert!(comm.share_pages("x", 100).unwrap().is_none()));
}

#[test]
fn counts_are_the_minimum_of_the_algorithms() {
    threads(4, tiny(), |comm| {
        let s = &*inline();
        let whole = filled(DType::F32, 400, std::iter::empty());
        let part = filled(DType::F32, 100, std::iter::empty());
        comm.all_gather(&whole, &part, "", s).unwrap();
        comm.reduce_scatter(&part, &whole, "", s).unwrap();
        comm.all_reduce(&whole, "", s).unwrap();
        comm.barrier("", s).unwrap();
        let counts = comm.counts();
        assert_eq!((counts.all_gather, counts.reduce_scatter, counts.all_reduce, counts.barrier), (1, 1, 1, 1));
        // 1600 bytes x 3/4, once, once, and twice.
        assert_eq!(counts.bytes, 4 * 1200);
    });
}

#[test]
fn operands_that_do_not_fit_are_refused() {
    threads(1, tiny(), |comm| {
        let s = &*inline();
        let four = filled(DType::F32, 4, std::iter::empty());
        let three = filled(DType::F32, 3, std::iter::empty());
        let short = filled(DType::BF16, 4, std::iter::empty());
        let text = |r: zrt_collectives::Result<()>| r.unwrap_err().to_string();
        assert!(text(comm.all_gather(&four, &three, "t", s)).contains("dst has 4 elements, expected 1 ranks x 3 of src"));
        assert!(text(comm.reduce_scatter(&four, &short, "t", s)).contains("dst is f32, src is bf16"));
        assert!(text(comm.all_to_all(&four, &three, "t", s)).contains("expected equal"));
        assert!(text(comm.broadcast(&four, 1, "t", s)).contains("root is 1, expected a rank below 1"));
        let (a, b) = (four.slice(0, 3).unwrap(), four.slice(1, 3).unwrap());
        assert!(text(comm.all_gather(&a, &b, "t", s)).contains("overlap"));
        assert_eq!(comm.counts(), Default::default(), "a refused call is not a call");
        comm.barrier("still good", s).unwrap();
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn any_length_any_segment(ranks in 1usize..=9, part in 0usize..700, segment_bytes in 1usize..5000, kind in 0usize..4) {
        threads(ranks, LocalOptions { segment_bytes, ..tiny() }, |comm| compare_all(&*comm, &*inline(), DTYPES[kind], part));
    }
}

/// Not a test of its own: what a rank process runs when another test starts one.
#[test]
#[ignore = "started by other tests, as a rank"]
fn child_rank() {
    let Some((case, rank, ranks, store)) = told() else { return };
    if case == "two ranks" {
        return two_ranks(&LocalComm::join(&store, rank, ranks, LocalOptions::default()).unwrap(), 200_003);
    }
    assert_eq!(case, "body");
    let comm = LocalComm::join(&store, rank, ranks, tiny()).unwrap();
    body(&comm);
}
