//! What do the vendors' libraries say: which are there, which devices does the driver see, and how fast did a copy and an all-reduce
//! run? The doctor gets this as a value ([`GpuProbe`]), so that it judges without a GPU too.

use super::finding::{Finding, Group, Level};
use super::pci::PciGpu;
use super::tree::bytes;
use zrt::cost::catalogue::{Catalogue, Cluster};

/// One device, as its driver describes it.
#[derive(Clone, Debug, Default)]
pub struct GpuReport {
    /// Name in the driver's words.
    pub name: String,
    /// `gfx942`, `sm_90`.
    pub arch: String,
    /// Memory.
    pub memory_bytes: u64,
    /// PCI address, as in `/sys/bus/pci/devices`.
    pub pci: String,
    /// The driver's version.
    pub driver: String,
    /// PCI addresses of the devices whose memory it can read.
    pub peers: Vec<String>,
}

/// One library that was looked for.
#[derive(Clone, Debug)]
pub struct LibraryReport {
    /// `driver`, `compiler`, `blas`, `collectives`: the keys of `[device.libraries]`.
    pub role: &'static str,
    /// Name or path that was tried.
    pub name: String,
    /// Its version, or why it cannot be used.
    pub found: Result<String, String>,
}

/// What was measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measured {
    /// Pinned host memory to a device.
    ToDevice,
    /// A device to pinned host memory.
    ToHost,
    /// A large all-reduce over all devices: bus bandwidth, as nccl-tests define it.
    AllReduce,
}

/// One measurement on devices.
#[derive(Clone, Debug)]
pub struct GpuRate {
    /// What.
    pub what: Measured,
    /// On which device, by PCI address; empty: on all.
    pub pci: String,
    /// Bytes/s, or why it was not measured.
    pub bytes_per_s: Result<f64, String>,
}

/// All that the libraries said.
#[derive(Clone, Debug, Default)]
pub struct GpuProbe {
    /// Devices, in the driver's order.
    pub devices: Vec<GpuReport>,
    /// Libraries.
    pub libraries: Vec<LibraryReport>,
    /// Measurements.
    pub rates: Vec<GpuRate>,
}

/// Share of the catalogue's figure below which something is wrong, not merely different.
const LEAST_SHARE: f64 = 0.7;

/// What follows from a probe.
pub fn findings(probe: &GpuProbe, gpus: &[PciGpu]) -> Vec<Finding> {
    let any = !gpus.is_empty() || !probe.devices.is_empty();
    let mut found: Vec<Finding> = probe.libraries.iter().map(|l| library(l, any)).collect();
    found.extend(probe.devices.iter().map(device));
    found.extend(gpus.iter().filter(|g| !probe.devices.iter().any(|d| d.pci.eq_ignore_ascii_case(&g.address))).map(unseen));
    found.extend(peers(probe));
    let cluster = expected(gpus);
    found.extend(probe.rates.iter().map(|rate| speed(rate, probe.devices.len(), cluster.as_ref())));
    found
}

/// The catalogue's machine with the GPUs of this one.
pub fn expected(gpus: &[PciGpu]) -> Option<Cluster> {
    let part = gpus.iter().find_map(PciGpu::part)?;
    // A user's file that cannot be read is told of by the commands that need it.
    Catalogue::load(None).or_else(|_| Catalogue::builtin()).ok()?.cluster(part).ok()
}

fn library(library: &LibraryReport, any_gpu: bool) -> Finding {
    let what = format!("{} library ({})", library.role, library.name);
    match &library.found {
        Ok(version) => Finding::ok(Group::Libraries, what, version),
        Err(why) if !any_gpu => Finding::new(Level::Note, Group::Libraries, what, why),
        Err(why) => {
            // Products and the compiler have replacements: our own kernels, and files compiled ahead.
            let level = if matches!(library.role, "driver" | "collectives") { Level::Problem } else { Level::Warning };
            Finding::new(level, Group::Libraries, what, why).expected("can be loaded").fix(format!(
                "install it with the vendor's packages, or say where it is: [device.libraries] {} = \"/path/to/{}\"",
                library.role, library.name
            ))
        }
    }
}

fn device(device: &GpuReport) -> Finding {
    let text = format!("{}, {}, {}, driver {}", device.name, device.arch, bytes(device.memory_bytes), device.driver);
    Finding::ok(Group::Devices, format!("device at {}", device.pci), text)
}

fn unseen(gpu: &PciGpu) -> Finding {
    let what = format!("device at {}", gpu.address);
    Finding::new(Level::Note, Group::Devices, what, "on the PCI bus, and not seen by the vendor's library")
        .expected("seen, unless hidden on purpose")
        .fix("look at HIP_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES, CUDA_VISIBLE_DEVICES and at what the container was given")
}

fn peers(probe: &GpuProbe) -> Option<Finding> {
    const WHAT: &str = "access to peers";
    let count = probe.devices.len();
    if count < 2 {
        return None;
    }
    let reaches = |d: &GpuReport| probe.devices.iter().filter(|o| o.pci != d.pci && d.peers.contains(&o.pci)).count();
    let reached: usize = probe.devices.iter().map(reaches).sum();
    let all = count * (count - 1);
    if reached == all {
        return Some(Finding::ok(Group::Links, WHAT, format!("each of {count} devices reads the memory of all others")));
    }
    Some(
        Finding::new(Level::Warning, Group::Links, WHAT, format!("{reached} of {all} ordered pairs: the rest goes through the host"))
            .expected("all")
            .fix("start the kernel with iommu=pt; firmware setup: Above 4G Decoding on, ACS off; virtual machines: ask their host for it"),
    )
}

fn speed(rate: &GpuRate, devices: usize, cluster: Option<&Cluster>) -> Finding {
    let (name, fix) = match rate.what {
        Measured::ToDevice => ("copy to the device", "look at PCIe lanes, locked memory and NUMA above"),
        Measured::ToHost => ("copy to the host", "look at PCIe lanes, locked memory and NUMA above"),
        Measured::AllReduce => (
            "all-reduce (bus bandwidth)",
            "look at links, peers, IOMMU and NUMA balancing above; NCCL_DEBUG=INFO shows channels and transport; fewer than 8 MI300: NCCL_MIN_NCHANNELS=32",
        ),
    };
    let what = if rate.pci.is_empty() { name.to_string() } else { format!("{name}, {}", rate.pci) };
    let bytes_per_s = match &rate.bytes_per_s {
        Ok(bytes_per_s) => *bytes_per_s,
        Err(why) => return Finding::new(Level::Note, Group::Speed, what, format!("not measured: {why}")),
    };
    let found = format!("{:.1} GB/s", bytes_per_s / 1e9);
    let limit = cluster.and_then(|c| {
        let link = c.part.host_link.as_ref();
        match rate.what {
            Measured::ToDevice => link.map(|l| l.to_device.value),
            Measured::ToHost => link.map(|l| l.to_host.value),
            Measured::AllReduce => c.machine.links.bus.iter().find(|b| b.ranks == devices).map(|b| b.bandwidth.value),
        }
    });
    let Some(limit) = limit else {
        return Finding::new(Level::Note, Group::Speed, what, format!("{found}; the hardware catalogue has no figure to compare with"));
    };
    let expected = format!("{:.1} GB/s, of which {:.0} % is usual", limit / 1e9, 100.0 * LEAST_SHARE);
    let share = bytes_per_s / limit;
    let found = format!("{found}, {:.0} % of what the hardware gives", 100.0 * share);
    if share >= LEAST_SHARE {
        return Finding::ok(Group::Speed, what, found).expected(expected);
    }
    Finding::new(Level::Warning, Group::Speed, what, found).expected(expected).fix(fix)
}
