//! What is here, and how fast does it copy? Asks one vendor's driver, compiler and library of products, device by device, and measures
//! copies from and to locked host memory. Whatever fails is an answer too: nothing here returns an error.

use super::code::CodeOptions;
use super::device::{GpuDevice, GpuOptions};
use super::driver::blas::Blas;
use super::driver::rtc::Rtc;
use super::driver::{Facts, Found, Libraries, Vendor, find};
use crate::cpu::Mode;
use crate::{Category, DType, Device, Error, Place, Result, Stream, View, ViewMut};
use std::path::Path;
use std::time::{Duration, Instant};

/// Bytes of a measured copy: long enough that its start does not count.
const COPY_BYTES: usize = 64 << 20;
/// Copies each way; the best counts.
const COPIES: usize = 4;

/// One library.
#[derive(Clone, Debug)]
pub struct LibraryProbe {
    /// `driver`, `compiler`, `blas`: the keys of `[device.libraries]`.
    pub role: &'static str,
    /// Name or path that was tried.
    pub name: String,
    /// Its version, or why it cannot be used.
    pub found: std::result::Result<String, String>,
}

/// Bytes per second of copies of one device.
#[derive(Clone, Copy, Debug)]
pub struct Copies {
    /// From locked host memory.
    pub to_device: f64,
    /// To locked host memory.
    pub to_host: f64,
}

/// One device.
#[derive(Clone, Debug)]
pub struct DeviceProbe {
    /// What its driver says.
    pub facts: Facts,
    /// PCI addresses of the devices whose memory it can read, or why that is not known.
    pub peers: std::result::Result<Vec<String>, String>,
    /// How fast it copies, or why that was not measured.
    pub copies: std::result::Result<Copies, String>,
}

/// What one vendor's libraries say.
#[derive(Clone, Debug, Default)]
pub struct Probe {
    /// Libraries: the driver alone where it has no devices.
    pub libraries: Vec<LibraryProbe>,
    /// Devices, in the driver's order.
    pub devices: Vec<DeviceProbe>,
}

/// Asks, and measures for about `budget` over all devices.
pub fn probe(vendor: Vendor, libraries: &Libraries, budget: Duration) -> Probe {
    let driver = |found| library("driver", libraries.driver.as_deref(), vendor.driver_name(), found);
    let found = match find(vendor, libraries) {
        Ok(Some(found)) => found,
        Ok(None) => return Probe { libraries: vec![driver(Err("not found, or it sees no device".into()))], devices: Vec::new() },
        Err(e) => return Probe { libraries: vec![driver(Err(said(e)))], devices: Vec::new() },
    };
    let all: Result<Vec<Facts>> = (0..found.count()).map(|i| found.facts(i)).collect();
    let all = match all {
        Ok(all) => all,
        Err(e) => return Probe { libraries: vec![driver(Err(said(e)))], devices: Vec::new() },
    };
    let share = budget / all.len().max(1) as u32;
    let peers = |i: usize| Ok(found.peers(i)?.into_iter().filter_map(|p| all.get(p)).map(|f| f.pci.clone()).collect());
    let device = |(i, facts): (usize, &Facts)| DeviceProbe {
        facts: facts.clone(),
        peers: peers(i).map_err(said),
        copies: copies(vendor, libraries, i, share).map_err(said),
    };
    let devices: Vec<DeviceProbe> = all.iter().enumerate().map(device).collect();
    let version = all.first().map_or_else(String::new, |f| driver_version(vendor, f.driver_version));
    Probe { libraries: vec![driver(Ok(version)), compiler(vendor, libraries), blas(vendor, libraries)], devices }
}

fn library(role: &'static str, path: Option<&Path>, usual: &str, found: std::result::Result<String, String>) -> LibraryProbe {
    LibraryProbe { role, name: path.map_or_else(|| usual.into(), |p| p.display().to_string()), found }
}

/// The error without the library's name, which stands beside it.
fn said(error: Error) -> String {
    match error {
        Error::Library { why, .. } => why,
        other => other.to_string(),
    }
}

/// `12090` is CUDA 12.9; `60443484` is HIP 6.4.43484.
fn driver_version(vendor: Vendor, number: i32) -> String {
    match vendor {
        Vendor::Nvidia => format!("CUDA {}.{}", number / 1000, number % 1000 / 10),
        Vendor::Amd => format!("HIP {}.{}.{}", number / 10_000_000, number / 100_000 % 100, number % 100_000),
    }
}

fn compiler(vendor: Vendor, libraries: &Libraries) -> LibraryProbe {
    let usual = if vendor == Vendor::Nvidia { "libnvrtc.so" } else { "libhiprtc.so" };
    let path = libraries.compiler.as_deref();
    library("compiler", path, usual, Rtc::open(vendor, path).map(|c| c.version()).map_err(said))
}

/// It starts only where a device is current, as one is when its copies were measured.
fn blas(vendor: Vendor, libraries: &Libraries) -> LibraryProbe {
    let usual = if vendor == Vendor::Nvidia { "libcublasLt.so" } else { "libhipblaslt.so" };
    let path = libraries.blas.as_deref();
    let found = match Blas::open(vendor, path) {
        Ok(Some(blas)) => Ok(blas.version()),
        Ok(None) => Err("not found: dense products run in our own kernel, which is slower".into()),
        Err(e) => Err(said(e)),
    };
    library("blas", path, usual, found)
}

/// Opens device `ordinal` for measurements: no compiled code is kept.
///
/// # Errors
/// The driver's, or it is gone.
pub fn open(vendor: Vendor, libraries: &Libraries, ordinal: usize) -> Result<std::sync::Arc<GpuDevice>> {
    let gone = || Error::Shape { op: "probe", what: format!("{} has no device {ordinal} any more", vendor.driver_name()) };
    let found: Found = find(vendor, libraries)?.ok_or_else(gone)?;
    let code = CodeOptions { folder: None, libraries: libraries.clone() };
    GpuDevice::open(found, GpuOptions { ordinal, mode: Mode::Threaded, trace: false, host_threads: 1, code })
}

fn copies(vendor: Vendor, libraries: &Libraries, ordinal: usize, budget: Duration) -> Result<Copies> {
    let device = open(vendor, libraries, ordinal)?;
    let bytes = |place| device.alloc("probe", COPY_BYTES, place, Category::Workspace)?.all(DType::U8);
    let (host, there) = (bytes(Place::Pinned)?, bytes(Place::Device)?);
    let stream = device.stream("probe")?;
    let best = |to: &ViewMut, from: &View| -> Result<f64> {
        // The first also maps pages.
        stream.copy(to, from)?;
        let (begun, mut ns) = (Instant::now(), u64::MAX);
        for _ in 0..COPIES {
            ns = ns.min(ns_of(&device, &*stream, || stream.copy(to, from))?);
            if begun.elapsed() > budget / 2 {
                break;
            }
        }
        Ok(COPY_BYTES as f64 * 1e9 / ns.max(1) as f64)
    };
    Ok(Copies { to_device: best(&there, &host)?, to_host: best(&host, &there)? })
}

/// Nanoseconds of the device's clock that `run` takes on `stream`.
fn ns_of(device: &GpuDevice, stream: &dyn Stream, run: impl FnOnce() -> Result<()>) -> Result<u64> {
    let from = device.mark(stream)?;
    run()?;
    let to = device.mark(stream)?;
    stream.sync()?;
    from.ns_to(&to)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_an_answer() {
        for vendor in Vendor::ALL {
            let libraries = Libraries { driver: Some("/nowhere/driver.so".into()), ..Libraries::default() };
            let probe = probe(vendor, &libraries, Duration::ZERO);
            assert!(probe.devices.is_empty() && probe.libraries.len() == 1, "{probe:?}");
            let driver = &probe.libraries[0];
            assert_eq!((driver.role, driver.name.as_str()), ("driver", "/nowhere/driver.so"));
            assert!(
                driver.found.as_ref().is_err_and(|why| !why.starts_with("/nowhere") && why.contains("[device.libraries]")),
                "{probe:?}"
            );
        }
    }

    #[test]
    fn versions_read_as_the_vendors_print_them() {
        assert_eq!(driver_version(Vendor::Nvidia, 12_040), "CUDA 12.4");
        assert_eq!(driver_version(Vendor::Amd, 60_443_484), "HIP 6.4.43484");
    }
}
