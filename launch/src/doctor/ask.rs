//! Who asks the vendors' libraries? A thread of its own, for a limited time: a driver that hangs ends up in the report and not in the
//! doctor. Devices are measured one after the other, then together by an all-reduce, each rank a thread with a device of its own.

use super::gpu::{GpuProbe, GpuRate, GpuReport, LibraryReport, Measured};
use super::pci::PciGpu;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;
use zrt_collectives::ccl::{Library, recommended_env};
use zrt_collectives::{CclComm, CclOptions, Communicator, Error, MemoryStore};
use zrt_kernels::gpu::driver::{Libraries, Vendor};
use zrt_kernels::gpu::probe::{self, DeviceProbe, LibraryProbe, Probe};
use zrt_kernels::{Category, DType, Device, Place};

/// Time for all that is asked: contexts of many devices take seconds.
const DEADLINE: Duration = Duration::from_secs(90);
/// Time for copies of all devices of a vendor.
const COPIES: Duration = Duration::from_millis(1500);
/// Time for ranks to meet in the collective library.
const MEET: Duration = Duration::from_secs(30);
/// Bytes of the all-reduce: long enough that links are full.
const REDUCE_BYTES: usize = 128 << 20;
/// All-reduces that are timed together.
const REDUCES: u32 = 3;

/// Starts the doctor again with the variables that RCCL reads at its start, where it will be measured and they are not set: it may hang
/// without them, and training runs have them.
pub fn with_environment(gpus: &[PciGpu], only: Option<Vendor>) {
    let count = gpus.iter().filter(|g| g.vendor == Vendor::Amd).count();
    let mut missing = recommended_env(Vendor::Amd, count);
    missing.retain(|(name, _)| std::env::var_os(name).is_none());
    if missing.is_empty() || (count == 0 && only != Some(Vendor::Amd)) {
        return;
    }
    let error = Command::new("/proc/self/exe").args(std::env::args_os().skip(1)).envs(missing).exec();
    tracing::warn!("the doctor cannot be started again with RCCL's variables: {error}");
}

/// Asks both vendors' libraries, or the one that `only` names. On a host without any GPU the answer says what was looked for.
pub fn probe(gpus: &[PciGpu], libraries: Libraries, only: Option<Vendor>) -> GpuProbe {
    let vendors = Vendor::ALL.into_iter().filter(|v| only.is_none_or(|o| o == *v));
    let mut all: Vec<(Vendor, GpuProbe)> = vendors.map(|v| (v, within_deadline(v, libraries.clone()))).collect();
    // Where there are GPUs of one vendor, nobody misses the other's driver.
    let expected = |(vendor, probe): &(Vendor, GpuProbe)| !probe.devices.is_empty() || gpus.iter().any(|g| g.vendor == *vendor);
    if all.iter().any(expected) {
        all.retain(expected);
    }
    all.into_iter().fold(GpuProbe::default(), |mut sum, (_, probe)| {
        sum.devices.extend(probe.devices);
        sum.libraries.extend(probe.libraries);
        sum.rates.extend(probe.rates);
        sum
    })
}

fn within_deadline(vendor: Vendor, libraries: Libraries) -> GpuProbe {
    let (send, answer) = channel();
    let name = libraries.driver.as_ref().map_or_else(|| vendor.driver_name().to_string(), |p| p.display().to_string());
    let thread = std::thread::Builder::new().name("probe".into()).spawn(move || send.send(ask(vendor, &libraries)));
    let why = match thread {
        Ok(_) => match answer.recv_timeout(DEADLINE) {
            Ok(probe) => return probe,
            Err(_) => format!("did not answer within {} s: read dmesg, and look for processes that hang in it", DEADLINE.as_secs()),
        },
        Err(e) => format!("was not asked: {e}"),
    };
    GpuProbe { libraries: vec![LibraryReport { role: "driver", name, found: Err(why) }], ..GpuProbe::default() }
}

fn ask(vendor: Vendor, libraries: &Libraries) -> GpuProbe {
    let Probe { libraries: found, devices } = probe::probe(vendor, libraries, COPIES);
    let version = found.first().and_then(|l| l.found.clone().ok()).unwrap_or_default();
    let report = |l: LibraryProbe| LibraryReport { role: l.role, name: l.name, found: l.found };
    let mut out = GpuProbe { libraries: found.into_iter().map(report).collect(), ..GpuProbe::default() };
    out.rates.extend(devices.iter().flat_map(copies));
    if !devices.is_empty() {
        out.libraries.push(collectives(vendor, libraries));
    }
    if devices.len() > 1 {
        let bytes_per_s = all_reduce(vendor, libraries, devices.len()).map_err(|e| e.to_string());
        out.rates.push(GpuRate { what: Measured::AllReduce, pci: String::new(), bytes_per_s });
    }
    out.devices.extend(devices.into_iter().map(|d| device(d, &version)));
    out
}

fn device(found: DeviceProbe, version: &str) -> GpuReport {
    let f = found.facts;
    GpuReport {
        name: f.name,
        arch: f.arch.name,
        memory_bytes: f.memory_bytes,
        pci: f.pci,
        driver: version.into(),
        // A driver that cannot say has no access to offer.
        peers: found.peers.unwrap_or_default(),
    }
}

fn copies(device: &DeviceProbe) -> [GpuRate; 2] {
    [Measured::ToDevice, Measured::ToHost].map(|what| {
        let rate = device.copies.as_ref().map(|c| if what == Measured::ToDevice { c.to_device } else { c.to_host });
        GpuRate { what, pci: device.facts.pci.clone(), bytes_per_s: rate.map_err(Clone::clone) }
    })
}

fn collectives(vendor: Vendor, libraries: &Libraries) -> LibraryReport {
    let usual = if vendor == Vendor::Nvidia { "libnccl.so.2" } else { "librccl.so.1" };
    let name = libraries.collectives.as_ref().map_or_else(|| usual.to_string(), |p| p.display().to_string());
    let found = match Library::load(vendor, libraries.collectives.as_deref()) {
        Ok(library) => Ok(library.name().trim_start_matches(&name).trim().to_string()),
        Err(zrt_kernels::Error::Library { why, .. }) => Err(why),
        Err(e) => Err(e.to_string()),
    };
    LibraryReport { role: "collectives", name, found }
}

/// Bus bandwidth, as nccl-tests define it: what each link carries, whatever the number of ranks.
fn all_reduce(vendor: Vendor, libraries: &Libraries, ranks: usize) -> Result<f64, Error> {
    let store = Arc::new(MemoryStore::new());
    let rank = |rank: usize| -> Result<u64, Error> {
        let device = probe::open(vendor, libraries, rank)?;
        // The library's own sums: the fixed tree would be measured otherwise.
        let options = CclOptions {
            library: libraries.collectives.clone(),
            name: "doctor".into(),
            init_timeout: MEET,
            train_timeout: MEET,
            deterministic: false,
            scratch_bytes: 1 << 20,
            ..CclOptions::new(vendor)
        };
        let comm = CclComm::join(store.clone(), rank, ranks, device.clone(), options)?;
        let data = device.alloc("probe", REDUCE_BYTES, Place::Device, Category::Workspace)?.all(DType::F32)?;
        let stream = device.stream("probe")?;
        stream.fill(&data, 0.0)?;
        comm.all_reduce(&data, "doctor", &*stream)?;
        let from = device.mark(&*stream)?;
        for _ in 0..REDUCES {
            comm.all_reduce(&data, "doctor", &*stream)?;
        }
        let to = device.mark(&*stream)?;
        stream.sync()?;
        Ok(from.ns_to(&to)?)
    };
    let all: Result<Vec<u64>, Error> = std::thread::scope(|scope| {
        let rank = &rank;
        let threads: Vec<_> = (0..ranks).map(|r| scope.spawn(move || rank(r))).collect();
        threads.into_iter().map(|t| t.join().unwrap_or_else(|_| Err(Error::Rendezvous("a rank panicked".into())))).collect()
    });
    let ns = all?.into_iter().max().unwrap_or(0).max(1) as f64 / f64::from(REDUCES);
    Ok(2.0 * (ranks - 1) as f64 / ranks as f64 * REDUCE_BYTES as f64 * 1e9 / ns)
}
