//! The simulated group: refuses what the real one refuses, counts what the real one counts, touches nothing.

use zrt_collectives::{Communicator, Error, Health, LocalGroup, LocalOptions, SimComm};
use zrt_kernels::sim::{SimDevice, SimOptions};
use zrt_kernels::{Category, DType, Device, Place};

#[test]
fn counts_equal_the_local_group_and_nothing_runs() {
    let device = SimDevice::new(SimOptions { threads: 1 }).unwrap();
    let s = device.stream("comm").unwrap();
    let comm = SimComm::new(4).with_rank(3);
    assert_eq!((comm.rank(), comm.ranks()), (3, 4));
    let memory = |elems: usize| device.alloc("x", elems * 4, Place::Device, Category::Slots).unwrap().all(DType::F32).unwrap();
    let (whole, part) = (memory(1024), memory(256));
    comm.all_gather(&whole, &part, "a", &*s).unwrap();
    comm.reduce_scatter(&part, &whole, "a", &*s).unwrap();
    comm.all_reduce(&whole, "a", &*s).unwrap();
    comm.all_to_all(&whole, &memory(1024), "a", &*s).unwrap();
    comm.broadcast(&whole, 3, "a", &*s).unwrap();
    comm.barrier("a", &*s).unwrap();
    let counts = comm.counts();
    assert_eq!((counts.all_gather, counts.reduce_scatter, counts.all_reduce), (1, 1, 1));
    assert_eq!((counts.all_to_all, counts.broadcast, counts.barrier), (1, 1, 1));
    // 4096 bytes x 3/4: once for each of four, twice for the all_reduce.
    assert_eq!(counts.bytes, 6 * 3072);

    let error = comm.all_gather(&part, &whole, "wrong", &*s).unwrap_err();
    let local = LocalGroup::threads(1, LocalOptions::default()).unwrap();
    assert!(matches!(error, Error::Operand { rank: 3, op: "all_gather", .. }), "{error}");
    // Simulated memory has no bytes for a real group.
    assert!(local[0].all_reduce(&whole, "sim", &*s).unwrap_err().to_string().contains("not in host memory"));
    assert_eq!(comm.counts(), counts);
}

#[test]
fn shared_pages_as_chosen_and_abort() {
    assert!(SimComm::new(2).share_pages("x", 100).unwrap().is_none());
    let comm = SimComm::new(2).with_shared_pages(true);
    let pages = comm.share_pages("x", 100).unwrap().unwrap();
    assert_eq!(pages.bytes(), 100);
    assert!(pages.all(DType::U8).unwrap().host_ptr().is_none());
    comm.abort("enough");
    comm.abort("again");
    assert_eq!(comm.health(), Health::Lost(Error::Aborted { rank: 0, by: 0, reason: "enough".to_string() }));
}
