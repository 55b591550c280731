//! How long does a collective of the local communicator take on this machine, and what would a plain copy take?
//!
//! One loop for the command, the example and the comparison with peers (`benches/collectives/peers.c` has the same): buffers are
//! touched before; a sample is the mean of a short burst of calls; the figure is the median of the samples on the slower rank;
//! in place and apart are both measured and the faster counts. *Transport* is the call alone on the calling thread
//! ([`LocalComm::transport`]), *stream* is the same call through an inline stream of the CPU device, as a model issues it.
//!
//! The limit beside each figure is a copy: all ranks at once write as many bytes as the collective must leave in each rank's
//! memory, from memory of their own. A collective also has to read what another core wrote, so 1.0 is not reached by a long one.

use crate::{Communicator, Error, LocalComm, LocalGroup, LocalOptions, Result};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::time::{Duration, Instant};
use zrt_kernels::cpu::{CpuDevice, CpuOptions, Mode};
use zrt_kernels::{Category, DType, Device, Place, Stream, ViewMut};

/// The measured operations, in the order of the rows.
pub const OPERATIONS: [&str; 3] = ["all_reduce", "all_gather", "reduce_scatter"];

/// One length, and how often it is measured.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Bytes of the longer side: all_reduce's data, all_gather's result, reduce_scatter's source. A multiple of ranks x 4.
    pub bytes: usize,
    /// Samples; the figure is their median.
    pub samples: usize,
    /// Calls in a sample.
    pub burst: usize,
}

impl Size {
    /// The three lengths of the performance page: 1 KiB, 1 MiB, 64 MiB.
    pub const USUAL: [Size; 3] = [
        Size { bytes: 1 << 10, samples: 200, burst: 100 },
        Size { bytes: 1 << 20, samples: 200, burst: 4 },
        Size { bytes: 64 << 20, samples: 15, burst: 1 },
    ];
}

/// The time of one call; the same on all ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate {
    /// One of [`OPERATIONS`].
    pub op: &'static str,
    /// Element type.
    pub dtype: DType,
    /// Bytes of the longer side.
    pub bytes: usize,
    /// Microseconds of the call alone.
    pub transport_us: f64,
    /// Microseconds through an inline stream.
    pub stream_us: f64,
    /// Microseconds in which all ranks at once copy the bytes that the collective leaves in their memory.
    pub copy_us: f64,
}

impl Rate {
    /// Bytes of the longer side per second of the call alone, in GB/s.
    pub fn gb_per_s(&self) -> f64 {
        self.bytes as f64 / self.transport_us / 1e3
    }
}

/// Measures all of [`OPERATIONS`] at each of `sizes`. A collective: all ranks of the group call it with the same arguments, each on a thread
/// of its own. While every rank can have a core of this process's set, the calling thread is bound to one until this returns, as the
/// peers' launchers do.
///
/// Errors: memory for two buffers of the largest size, or a lost group.
pub fn measure(comm: &LocalComm, dtype: DType, sizes: &[Size]) -> Result<Vec<Rate>> {
    let bound = Bound::to_core_of(comm.rank(), comm.ranks());
    let rates = measure_here(comm, dtype, sizes);
    drop(bound);
    rates
}

/// The same on `ranks` threads of this process, made for it.
///
/// Errors: memory, or a lost group.
pub fn measure_on_threads(ranks: usize, dtype: DType, sizes: &[Size]) -> Result<Vec<Rate>> {
    let comms = LocalGroup::threads(ranks, LocalOptions::default())?;
    let all: Vec<Result<Vec<Rate>>> = std::thread::scope(|scope| {
        let threads: Vec<_> = comms.into_iter().map(|comm| scope.spawn(move || measure(&comm, dtype, sizes))).collect();
        let panicked = |_| Err(Error::Rendezvous("a rank panicked".into()));
        threads.into_iter().map(|t| t.join().unwrap_or_else(panicked)).collect()
    });
    // The same on all ranks, unless one failed.
    let all = all.into_iter().collect::<Result<Vec<_>>>()?;
    Ok(all.into_iter().next().unwrap_or_default())
}

fn measure_here(comm: &LocalComm, dtype: DType, sizes: &[Size]) -> Result<Vec<Rate>> {
    let device = CpuDevice::new(CpuOptions { threads: 1, mode: Mode::Inline, ..CpuOptions::default() })?;
    let s = device.stream("bench")?;
    let mut rates = Vec::new();
    for size in sizes {
        let view = |name: &str| device.alloc(name, size.bytes, Place::Device, Category::Slots)?.all(dtype);
        let (whole, other) = (view("whole")?, view("other")?);
        let one = Loop { comm, whole, other, size: *size, s: &*s };
        for op in OPERATIONS {
            rates.push(Rate {
                op,
                dtype,
                bytes: size.bytes,
                transport_us: one.faster(op, false)?,
                stream_us: one.faster(op, true)?,
                copy_us: one.copy(op)?,
            });
        }
    }
    Ok(rates)
}

struct Loop<'a> {
    comm: &'a LocalComm,
    whole: ViewMut,
    other: ViewMut,
    size: Size,
    s: &'a dyn Stream,
}

impl Loop<'_> {
    /// The median on the slower rank, of the faster of in place and apart.
    fn faster(&self, op: &str, stream: bool) -> Result<f64> {
        let (comm, s, whole) = (self.comm, self.s, &self.whole);
        let part = whole.elems() / comm.ranks();
        let transport = comm.transport();
        let own = whole.slice(comm.rank() * part, part)?;
        let apart = self.other.slice(0, part)?;
        // Sums of zeros: doubling anything else some hundred times ends at infinity.
        s.fill(whole, 0.0)?;
        s.fill(&self.other, 0.0)?;
        let mut best = f64::INFINITY;
        for short in [&own, &apart] {
            let run = || match (op, stream) {
                ("all_reduce", false) => transport.all_reduce(whole, "bench"),
                ("all_gather", false) => transport.all_gather(whole, short, "bench"),
                (_, false) => transport.reduce_scatter(short, whole, "bench"),
                ("all_reduce", true) => comm.all_reduce(whole, "bench", s),
                ("all_gather", true) => comm.all_gather(whole, short, "bench", s),
                (_, true) => comm.reduce_scatter(short, whole, "bench", s),
            };
            best = best.min(self.median(run)?);
        }
        Ok(best)
    }

    fn copy(&self, op: &str) -> Result<f64> {
        let elems = if op == "reduce_scatter" { self.whole.elems() / self.comm.ranks() } else { self.whole.elems() };
        let (to, from) = (self.whole.slice(0, elems)?, self.other.slice(0, elems)?);
        self.median(|| Ok(self.s.copy(&to, &from)?))
    }

    fn median(&self, run: impl Fn() -> Result<()>) -> Result<f64> {
        let Size { samples, burst, .. } = self.size;
        for _ in 0..samples / 10 + 2 {
            run()?;
        }
        self.comm.transport().barrier("start")?;
        let mut us = Vec::with_capacity(samples);
        for _ in 0..samples.max(1) {
            let begun = Instant::now();
            for _ in 0..burst.max(1) {
                run()?;
            }
            us.push(begun.elapsed().as_secs_f64() * 1e6 / burst.max(1) as f64);
        }
        us.sort_by(f64::total_cmp);
        self.slowest(us[us.len() / 2])
    }

    /// The largest of the ranks' values, on all ranks.
    fn slowest(&self, us: f64) -> Result<f64> {
        let all = self.other.reinterpret(DType::F32)?.slice(0, self.comm.ranks())?;
        let mine = all.slice(self.comm.rank(), 1)?;
        self.s.fill(&mine, us as f32)?;
        self.comm.transport().all_gather(&all, &mine, "slowest")?;
        let values = self.s.read(&all)?.f32s(Duration::from_secs(1))?;
        self.s.fill(&all, 0.0)?;
        Ok(values.into_iter().fold(0.0, |most, v| most.max(v as f64)))
    }
}

/// Binds the calling thread to one core until it is dropped.
struct Bound {
    before: CpuSet,
}

impl Bound {
    /// To the core number `rank` of those that this thread may use; `None` when there are fewer than ranks, or the kernel refuses.
    fn to_core_of(rank: usize, ranks: usize) -> Option<Bound> {
        let before = sched_getaffinity(None).ok()?;
        let cores: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|core| before.is_set(*core)).collect();
        if cores.len() < ranks {
            return None;
        }
        let mut one = CpuSet::new();
        one.set(cores[rank]);
        sched_setaffinity(None, &one).ok()?;
        Some(Bound { before })
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        let _ = sched_setaffinity(None, &self.before);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_ranks_report_the_same_rows() {
        let size = Size { bytes: 1 << 12, samples: 3, burst: 2 };
        let comms = LocalGroup::threads(2, LocalOptions::default()).unwrap();
        let run = |comm: &LocalComm| measure(comm, DType::BF16, &[size]).unwrap();
        let rows: Vec<Vec<Rate>> = std::thread::scope(|scope| {
            let handles: Vec<_> = comms.iter().map(|comm| scope.spawn(move || run(comm))).collect();
            handles.into_iter().map(|h| h.join().unwrap()).collect()
        });
        assert_eq!(rows[0], rows[1]);
        assert_eq!(rows[0].iter().map(|r| r.op).collect::<Vec<_>>(), OPERATIONS);
        assert!(rows[0].iter().all(|r| r.bytes == 1 << 12 && r.transport_us > 0.0 && r.stream_us > 0.0 && r.copy_us > 0.0));
    }
}
