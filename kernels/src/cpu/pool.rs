//! Who runs the parts of an operation: a fixed set of threads over independent work items.
//!
//! An operation is cut into items that write disjoint outputs, each in a fixed order, so a result never depends on which
//! thread ran what or on how many there are. Packing scratch belongs to the threads and is allocated once, here: operations
//! themselves never allocate. Streams may share a pool; their items interleave. Items must not start other items.
#![allow(unsafe_code)]

use super::heap::Pages;
use super::simd::Isa;
use crate::memory::Mapping;
use crate::{Error, Result};
use rayon::prelude::*;
use std::sync::{Arc, Mutex};

/// `f32` elements of scratch that every item of [`Pool::for_each_scratch`] may use.
pub const SCRATCH_ELEMS: usize = 642 * 1024;

/// The scratch of one thread, on huge pages: what is packed there is read many times, and should neither miss in the table of pages
/// nor fall on few sets of the caches.
struct Scratch(Pages);

impl Scratch {
    fn elems(&mut self) -> &mut [f32] {
        // SAFETY: mapped for so many bytes and aligned to a page; borrowed as this is.
        unsafe { std::slice::from_raw_parts_mut(self.0.base().cast(), SCRATCH_ELEMS) }
    }
}

/// One per worker and one for the calling thread; without workers only the latter.
fn scratch_slots(threads: usize) -> usize {
    if threads <= 1 { 1 } else { threads + 1 }
}

/// Bytes of scratch that a pool of `threads` threads holds, so that a plan counts them without making one.
pub fn scratch_bytes(threads: usize) -> usize {
    scratch_slots(threads) * SCRATCH_ELEMS * size_of::<f32>()
}

/// Threads, their scratch, and the instruction set that kernels use.
pub struct Pool {
    workers: Option<rayon::ThreadPool>,
    threads: usize,
    isa: Isa,
    /// One per worker and one for the calling thread.
    scratch: Vec<Mutex<Scratch>>,
}

impl Pool {
    /// A pool of `threads` threads (at least 1) with the best instruction set that passed its self-check.
    /// With one thread all items run on the calling thread. Fails when the system gives no threads.
    pub fn new(threads: usize) -> Result<Arc<Pool>> {
        Pool::with_isa(threads, Isa::detect())
    }

    /// As [`Pool::new`] with a chosen instruction set, for tests and comparisons.
    pub fn with_isa(threads: usize, isa: Isa) -> Result<Arc<Pool>> {
        let threads = threads.max(1);
        let workers = match threads {
            1 => None,
            _ => {
                let built = rayon::ThreadPoolBuilder::new().num_threads(threads).thread_name(|i| format!("zrt-cpu-{i}")).build();
                Some(built.map_err(|e| Error::Shape {
                    op: "pool",
                    what: format!("cannot start {threads} threads ({e}); lower the number of threads per rank"),
                })?)
            }
        };
        let slots = scratch_slots(threads);
        let one = || Ok(Mutex::new(Scratch(Pages::map("scratch of a thread", SCRATCH_ELEMS * size_of::<f32>(), false)?)));
        let scratch = (0..slots).map(|_| one()).collect::<Result<_>>()?;
        Ok(Arc::new(Pool { workers, threads, isa, scratch }))
    }

    /// Threads that run items.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// The instruction set of this pool's kernels.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Bytes of scratch held, for the plan's `libraries` row.
    pub fn scratch_bytes(&self) -> usize {
        scratch_bytes(self.threads)
    }

    /// Runs `work(0..items)`, each once, in any order and on any thread, and waits for all.
    pub fn for_each(&self, items: usize, work: impl Fn(usize) + Sync + Send) {
        match &self.workers {
            Some(pool) if items > 1 => pool.install(|| (0..items).into_par_iter().with_max_len(1).for_each(work)),
            _ => (0..items).for_each(work),
        }
    }

    /// As [`Pool::for_each`]; every item also gets [`SCRATCH_ELEMS`] elements of scratch, 64-byte aligned, contents arbitrary.
    pub fn for_each_scratch(&self, items: usize, work: impl Fn(usize, &mut [f32]) + Sync + Send) {
        self.for_each(items, |item| {
            let own = rayon_index(&self.workers).unwrap_or(self.scratch.len() - 1);
            let mut scratch = self.scratch[own].lock().unwrap_or_else(|e| e.into_inner());
            work(item, scratch.elems());
        });
    }
}

/// Which worker of `workers` this thread is; `None` for any other thread.
fn rayon_index(workers: &Option<rayon::ThreadPool>) -> Option<usize> {
    workers.as_ref().and_then(|pool| pool.current_thread_index())
}

/// Cuts `elems` into items of at most `chunk` elements: the range of item `item`.
pub fn range_of(item: usize, chunk: usize, elems: usize) -> std::ops::Range<usize> {
    (item * chunk).min(elems)..((item + 1) * chunk).min(elems)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn every_item_runs_once_with_aligned_scratch() {
        for threads in [1, 2, 3] {
            let pool = Pool::new(threads).unwrap();
            let runs: Vec<AtomicUsize> = (0..97).map(|_| AtomicUsize::new(0)).collect();
            pool.for_each_scratch(runs.len(), |i, scratch| {
                assert_eq!(scratch.len(), SCRATCH_ELEMS);
                assert_eq!(scratch.as_ptr() as usize % 64, 0);
                scratch[i] = i as f32;
                runs[i].fetch_add(1, Ordering::Relaxed);
            });
            assert!(runs.iter().all(|r| r.load(Ordering::Relaxed) == 1));
            assert_eq!(pool.threads(), threads);
        }
    }

    #[test]
    fn ranges_cover_without_overlap() {
        let ranges: Vec<_> = (0..4).map(|i| range_of(i, 3, 10)).collect();
        assert_eq!(ranges, [0..3, 3..6, 6..9, 9..10]);
    }
}
