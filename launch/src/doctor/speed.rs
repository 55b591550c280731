//! How fast is the host? Copies in its memory and an all-reduce of two ranks (threads), within a second, each beside what it should be:
//! the catalogue's figure for the machine, or a plain copy of the same bytes.

use super::finding::{Finding, Group, Level};
use super::pci::PciGpu;
use super::tree::{Tree, kib};
use std::time::{Duration, Instant};
use zrt::cost::catalogue::{CALIBRATED, Catalogue};
use zrt_collectives::bench::{Size, measure_on_threads};
use zrt_kernels::DType;

/// Time for copies; the first round runs in any case.
const BUDGET: Duration = Duration::from_millis(400);
/// Bytes of each thread's two buffers: above what the caches of a core hold.
const BUFFER_BYTES: usize = 32 << 20;
/// More threads than this are not needed to see that something is wrong.
const MOST_THREADS: usize = 32;
/// All-reduce of so many bytes.
const REDUCE: Size = Size { bytes: 8 << 20, samples: 3, burst: 1 };
/// An all-reduce of two ranks takes 2 to 5 times as long as a copy by both; more than this is a host that is busy
/// or that shares its cores.
const MOST_COPIES: f64 = 8.0;

/// Measures.
pub fn findings(tree: &Tree, gpus: &[PciGpu]) -> Vec<Finding> {
    let available = tree.read("/proc/meminfo").ok().and_then(|text| kib(&text, "MemAvailable")).unwrap_or(0);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let room = (available / 8) as usize / (2 * BUFFER_BYTES);
    let threads = cores.min(MOST_THREADS).min(room);
    let mut found = Vec::new();
    if threads == 0 {
        found.push(Finding::new(Level::Note, Group::Speed, COPY, "not measured: too little memory is free"));
    } else {
        found.push(judge_copy(copy_bytes_per_s(threads), threads, limit(gpus)));
    }
    found.push(all_reduce(cores));
    found
}

const COPY: &str = "copies in host memory";
const REDUCED: &str = "all-reduce of 2 ranks on the CPU";

/// (bytes/s, whose figure) that the catalogue has for this host.
fn limit(gpus: &[PciGpu]) -> Option<(f64, String)> {
    let catalogue = Catalogue::load(None).ok()?;
    if catalogue.knows_this_host() {
        return Some((catalogue.cluster(CALIBRATED).ok()?.machine.host.bandwidth.value, "zlaunch calibrate measured here".into()));
    }
    let cluster = super::gpu::expected(gpus)?;
    Some((cluster.machine.host.bandwidth.value, format!("a usual {} host has", cluster.machine.name)))
}

/// Bytes read and written per second, by all threads together; the best round.
fn copy_bytes_per_s(threads: usize) -> f64 {
    let start = std::sync::Barrier::new(threads);
    let one = || {
        // Written, so that the pages are there.
        let (from, mut to) = (vec![1u8; BUFFER_BYTES], vec![2u8; BUFFER_BYTES]);
        start.wait();
        let (begun, mut best) = (Instant::now(), f64::INFINITY);
        while best.is_infinite() || begun.elapsed() < BUDGET {
            let round = Instant::now();
            to.copy_from_slice(std::hint::black_box(&from));
            std::hint::black_box(&to);
            best = best.min(round.elapsed().as_secs_f64());
        }
        2.0 * BUFFER_BYTES as f64 / best.max(1e-9)
    };
    std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(one)).collect();
        running.into_iter().map(|t| t.join().unwrap_or(0.0)).sum()
    })
}

fn judge_copy(bytes_per_s: f64, threads: usize, limit: Option<(f64, String)>) -> Finding {
    /// Few threads do not reach all channels, and a copy has its cost: only far less is a sign of something.
    const LEAST_SHARE: f64 = 0.25;
    let found = format!("{:.1} GB/s read and written by {threads} threads", bytes_per_s / 1e9);
    let Some((limit, whose)) = limit else {
        return Finding::ok(Group::Speed, COPY, format!("{found}; zlaunch calibrate keeps a figure to compare with"));
    };
    let expected = format!("{whose} {:.0} GB/s", limit / 1e9);
    if bytes_per_s >= LEAST_SHARE * limit {
        return Finding::ok(Group::Speed, COPY, found).expected(expected);
    }
    Finding::new(Level::Note, Group::Speed, COPY, found).expected(expected).fix(
        "few cores reach few memory channels: see nproc; are all channels populated (sudo dmidecode -t memory), is another job running?",
    )
}

fn all_reduce(cores: usize) -> Finding {
    let measured = measure_on_threads(2, DType::F32, &[REDUCE]);
    let rate = match measured.map(|rates| rates.into_iter().find(|r| r.op == "all_reduce")) {
        Ok(Some(rate)) => rate,
        Ok(None) => return Finding::new(Level::Note, Group::Speed, REDUCED, "not measured"),
        Err(e) => {
            return Finding::new(Level::Problem, Group::Speed, REDUCED, e.to_string()).fix("free memory, and look at limits above");
        }
    };
    judge_all_reduce(rate.gb_per_s(), rate.transport_us / rate.copy_us.max(1e-3), cores)
}

fn judge_all_reduce(gb_per_s: f64, copies: f64, cores: usize) -> Finding {
    let found = format!("{gb_per_s:.1} GB/s, {copies:.1} times as long as a copy of the same bytes");
    if copies <= MOST_COPIES {
        return Finding::ok(Group::Speed, REDUCED, found);
    }
    let fix = if cores < 2 {
        "two ranks share one core here: give the machine two"
    } else {
        "is another job running (top)? give this one cores of its own"
    };
    Finding::new(Level::Note, Group::Speed, REDUCED, found).expected(format!("at most {MOST_COPIES} times")).fix(fix)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_judged_by_what_is_known() {
        let known = || Some((100e9, "measured here".to_string()));
        assert_eq!(judge_copy(30e9, 2, known()).level, Level::Ok);
        assert_eq!(judge_copy(20e9, 2, known()).level, Level::Note);
        assert_eq!(judge_copy(1.0, 2, None).level, Level::Ok);
        assert_eq!(judge_all_reduce(3.0, 2.0, 2).level, Level::Ok);
        assert!(judge_all_reduce(0.1, 50.0, 1).fix.contains("one core"));
        assert!(judge_all_reduce(0.1, 50.0, 2).fix.contains("another job"));
    }
}
