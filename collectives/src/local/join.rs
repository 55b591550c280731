//! How do ranks come to share one piece of memory? Threads are handed it; processes open it through `/proc/<pid>/fd/<n>` as
//! rank 0 announces in the store. Nothing is named in a file system, so nothing is left behind.

use super::monitor::{self, Monitor};
use super::shared::{Page, Shared};
use super::wait::ring;
use super::{Group, LocalComm, LocalOptions};
use crate::store::Store;
use crate::{Error, Result};
use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering::*;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Makes groups whose ranks are threads of this process.
pub struct LocalGroup;

impl LocalGroup {
    /// One communicator per rank, in rank order; give each to its own thread.
    pub fn threads(ranks: usize, options: LocalOptions) -> Result<Vec<Arc<LocalComm>>> {
        let (shared, _) = Shared::create(ranks, &options)?;
        (0..ranks).for_each(|rank| sit_down(shared.page(rank)));
        let group = Arc::new(Group { shared: Arc::new(shared), options, pages: Mutex::default(), threads: true, _monitor: None });
        Ok((0..ranks).map(|rank| Arc::new(LocalComm::new(group.clone(), rank))).collect())
    }
}

fn sit_down(page: &Page) {
    let pid = std::process::id();
    page.pid.store(pid, Relaxed);
    page.start_time.store(monitor::start_time(pid).unwrap_or(0), Relaxed);
    // Where the kernel does not say, all ranks count together as one core: they do not spin.
    let cores = rustix::thread::sched_getaffinity(None).unwrap_or_else(|_| rustix::thread::CpuSet::new());
    for core in (0..64 * page.cores.len()).filter(|core| cores.is_set(*core)) {
        page.cores[core / 64].fetch_or(1 << (core % 64), Relaxed);
    }
    page.joined.store(1, Release);
    ring(page);
}

fn fail<T>(what: String) -> Result<T> {
    Err(Error::Rendezvous(what))
}

pub(super) fn processes(store: &dyn Store, rank: usize, ranks: usize, options: LocalOptions) -> Result<LocalComm> {
    if rank >= ranks {
        return fail(format!("rank {rank} of {ranks} ranks; expected a rank below {ranks}"));
    }
    let until = crate::store::from_now(options.init_timeout);
    let key = format!("local/{}/memory", options.name);
    let (shared, memory) = if rank == 0 {
        let (shared, fd) = Shared::create(ranks, &options)?;
        let pid = std::process::id();
        let start = monitor::start_time(pid).unwrap_or(0);
        store.set(&key, format!("{pid} {start} {}", fd.as_raw_fd()).as_bytes())?;
        (shared, Some(fd))
    } else {
        let announced = store.get(&key, options.init_timeout)?;
        let text = String::from_utf8_lossy(&announced).into_owned();
        let numbers: Vec<u64> = text.split(' ').filter_map(|n| n.parse().ok()).collect();
        let [pid, start, fd] = numbers[..] else {
            return fail(format!("'{key}' says '{text}', expected three numbers; do all ranks run the same version?"));
        };
        if monitor::start_time(pid as u32) != Some(start) {
            return fail(format!("rank 0 announced process {pid}, which is gone or on another host; local ranks share one host"));
        }
        (Shared::open(pid as u32, fd as u32, ranks, &options)?, None)
    };
    let page = shared.page(rank);
    if page.joined.compare_exchange(0, 2, AcqRel, Acquire).is_err() {
        return fail(format!("rank {rank} joined group '{}' twice; is RANK the same for two processes?", options.name));
    }
    sit_down(page);
    meet(&shared, rank, until, options.init_timeout)?;
    // All have opened the memory: the descriptor may go, the mappings keep it.
    drop(memory);
    let shared = Arc::new(shared);
    let monitor = Monitor::start(shared.clone(), rank, &options)?;
    let group = Group { shared, options, pages: Mutex::default(), threads: false, _monitor: monitor };
    Ok(LocalComm::new(Arc::new(group), rank))
}

/// Waits until all ranks have joined.
fn meet(shared: &Shared, rank: usize, until: Instant, deadline: Duration) -> Result<()> {
    loop {
        if let Some(error) = shared.header().lost.get(rank, None) {
            return Err(error);
        }
        let missing: Vec<usize> = (0..shared.ranks).filter(|r| shared.page(*r).joined.load(Acquire) != 1).collect();
        if missing.is_empty() {
            return Ok(());
        }
        for other in (0..shared.ranks).filter(|r| *r != rank && !missing.contains(r)) {
            let (pid, start) = (shared.page(other).pid.load(Relaxed), shared.page(other).start_time.load(Relaxed));
            if monitor::start_time(pid) != Some(start) {
                return fail(format!("rank {other} (process {pid}) joined and died before ranks {missing:?} came"));
            }
        }
        if Instant::now() >= until {
            return fail(format!("rank {rank}: ranks {missing:?} did not join within {:.1} s", deadline.as_secs_f64()));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}
