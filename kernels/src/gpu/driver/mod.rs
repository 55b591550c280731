//! A vendor's driver behind one type: whose GPU is it, what is it, and the calls that devices and streams are made of.
//!
//! Libraries are loaded at run time, by name or by the path that the configuration gives; a library, a function or a result code that is
//! missing or unknown is an error value. `table` declares the functions once for both vendors; `cuda` and `hip` are what differs.
#![allow(unsafe_code)]

pub mod blas;
mod cuda;
mod hip;
mod hip_sys;
mod library;
mod raw;
pub mod rtc;
mod table;

pub use raw::{Driver, RawEvent, RawFunction, RawStream};

use crate::gpu::launch::Arch;
use crate::{Error, Result};
use library::Symbols;
use std::ffi::{CStr, c_char, c_int};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use table::{Code, Functions, names};

/// Who made the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Vendor {
    /// CUDA: `libcuda`, NVRTC, cuBLASLt, NCCL.
    Nvidia,
    /// HIP: `libamdhip64`, hipRTC, hipBLASLt, RCCL.
    Amd,
}

impl Vendor {
    /// Both, in the order they are looked for.
    pub const ALL: [Vendor; 2] = [Vendor::Nvidia, Vendor::Amd];

    /// As [`crate::DeviceInfo::kind`] and `device.kind` in the configuration say it.
    pub fn kind(self) -> &'static str {
        match self {
            Vendor::Nvidia => "cuda",
            Vendor::Amd => "hip",
        }
    }

    /// The driver's usual name, for messages.
    pub fn driver_name(self) -> &'static str {
        match self {
            Vendor::Nvidia => "libcuda.so.1",
            Vendor::Amd => "libamdhip64.so",
        }
    }
}

/// Paths to use in place of the vendor's usual library names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Libraries {
    /// `libcuda.so.1`, `libamdhip64.so.6`.
    pub driver: Option<PathBuf>,
    /// `libnvrtc.so.12`, `libhiprtc.so.6`.
    pub compiler: Option<PathBuf>,
    /// `libcublasLt.so.12`, `libhipblaslt.so.0`.
    pub blas: Option<PathBuf>,
    /// `libnccl.so.2`, `librccl.so.1`.
    pub collectives: Option<PathBuf>,
}

/// "No device", "not initialized" as HIP says it, and "stub library", as CUDA's installers leave one.
const NO_DEVICE: [Code; 3] = [100, 101, 34];

enum Own {
    Cuda(cuda::Own),
    Hip(hip::Own),
}

/// The functions, before a device is chosen.
struct Parts {
    vendor: Vendor,
    functions: Functions,
    own: Own,
    symbols: Symbols,
}

impl Parts {
    /// An error of `call`, if `code` is one; `what` was being done.
    fn check(&self, what: impl FnOnce() -> String, call: &'static str, code: Code) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let text = match &self.own {
            Own::Cuda(own) => own.error(code),
            Own::Hip(own) => own.error(code),
        };
        Err(Error::Driver { what: what(), call, code, text })
    }

    fn attribute(&self, device: c_int, number: c_int) -> Result<u32> {
        let mut value: c_int = 0;
        // SAFETY: a place to write to.
        let code = unsafe { (self.functions.device_attribute)(&mut value, number, device) };
        self.check(|| format!("attribute {number} of device {device}"), self.name(names::device_attribute), code)?;
        u32::try_from(value).map_err(|_| Error::Shape { op: "gpu", what: format!("attribute {number} of device {device} is {value}") })
    }

    fn name(&self, names: [&'static str; 2]) -> &'static str {
        names[usize::from(self.vendor == Vendor::Amd)]
    }
}

/// What a driver is and how many devices it has.
pub struct Found {
    parts: Parts,
    count: usize,
}

/// Looks for a driver of this vendor and its devices; `None`: no driver, or one without devices.
///
/// # Errors
/// [`Error::Library`]: a path that was given does not load, or a function is missing. [`Error::Driver`]: the driver fails otherwise.
pub fn find(vendor: Vendor, libraries: &Libraries) -> Result<Option<Found>> {
    let path = libraries.driver.as_deref();
    let symbols = match vendor {
        Vendor::Nvidia => cuda::open(path)?,
        Vendor::Amd => hip::open(path)?,
    };
    let Some(symbols) = symbols else { return Ok(None) };
    let (code, count) = match vendor {
        Vendor::Nvidia => cuda::count(&symbols)?,
        Vendor::Amd => hip::count(&symbols)?,
    };
    if NO_DEVICE.contains(&code) || (code == 0 && count <= 0) {
        return Ok(None);
    }
    let functions = Functions::load(vendor, &symbols)?;
    let own = match vendor {
        Vendor::Nvidia => Own::Cuda(cuda::Own::load(&symbols)?),
        Vendor::Amd => Own::Hip(hip::Own::load(&symbols)?),
    };
    let parts = Parts { vendor, functions, own, symbols };
    let call = if vendor == Vendor::Nvidia { "cuDeviceGetCount" } else { "hipGetDeviceCount" };
    parts.check(|| format!("looking for devices by {}", parts.symbols.name()), call, code)?;
    Ok(Some(Found { parts, count: usize::try_from(count).unwrap_or(0) }))
}

/// A device, as far as it can be told without using it.
#[derive(Clone, Debug)]
pub struct Facts {
    /// The vendor's name for it.
    pub name: String,
    /// What kernels are compiled for.
    pub arch: Arch,
    /// All of its memory, in bytes.
    pub memory_bytes: u64,
    /// `0000:01:00.0`.
    pub pci: String,
    /// As the driver counts: 12040, 60443484.
    pub driver_version: i32,
    /// The library that answered.
    pub library: String,
}

impl Found {
    /// Devices.
    pub fn count(&self) -> usize {
        self.count
    }

    /// What device `ordinal` is.
    ///
    /// # Errors
    /// The driver's.
    pub fn facts(&self, ordinal: usize) -> Result<Facts> {
        let (p, f) = (&self.parts, &self.parts.functions);
        let device = self.device(ordinal)?;
        let mut text = [0 as c_char; 256];
        let (mut bytes, mut driver_version) = (0usize, 0);
        let what = || format!("asking what device {ordinal} is");
        // SAFETY (these four): places to write to, of the lengths given.
        p.check(what, p.name(names::device_name), unsafe { (f.device_name)(text.as_mut_ptr(), 255, device) })?;
        let name = c_text(text.as_ptr());
        p.check(what, p.name(names::device_memory), unsafe { (f.device_memory)(&mut bytes, device) })?;
        p.check(what, p.name(names::driver_version), unsafe { (f.driver_version)(&mut driver_version) })?;
        text = [0; 256];
        p.check(what, p.name(names::pci_bus_id), unsafe { (f.pci_bus_id)(text.as_mut_ptr(), 255, device) })?;
        let pci = c_text(text.as_ptr()).to_lowercase();
        let arch = match &p.own {
            Own::Cuda(_) => cuda::arch(p, device)?,
            Own::Hip(own) => own.arch(p, device)?,
        };
        Ok(Facts { name, arch, memory_bytes: bytes as u64, pci, driver_version, library: p.symbols.name().to_string() })
    }

    /// The devices whose memory device `ordinal` can read.
    ///
    /// # Errors
    /// The driver's; [`Error::Library`]: it has no such function.
    pub fn peers(&self, ordinal: usize) -> Result<Vec<usize>> {
        let call = if self.parts.vendor == Vendor::Nvidia { "cuDeviceCanAccessPeer" } else { "hipDeviceCanAccessPeer" };
        // SAFETY: both vendors document this signature under these names.
        let ask = unsafe { self.parts.symbols.get::<unsafe extern "C" fn(*mut c_int, c_int, c_int) -> Code>(call)? };
        let device = self.device(ordinal)?;
        let mut out = Vec::new();
        for peer in (0..self.count).filter(|p| *p != ordinal) {
            let (to, mut can) = (self.device(peer)?, 0);
            // SAFETY: a place to write to.
            let code = unsafe { ask(&mut can, device, to) };
            self.parts.check(|| format!("whether device {ordinal} reads device {peer}"), call, code)?;
            out.extend((can != 0).then_some(peer));
        }
        Ok(out)
    }

    fn device(&self, ordinal: usize) -> Result<c_int> {
        if ordinal >= self.count {
            let what = format!(
                "rank's device {ordinal} of {}: start at most as many ranks on this host as it has devices, or see CUDA_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES",
                self.count
            );
            return Err(Error::Shape { op: "gpu", what });
        }
        let (p, mut device) = (&self.parts, 0);
        // SAFETY: a place to write to.
        let code = unsafe { (p.functions.device_get)(&mut device, ordinal as c_int) };
        p.check(|| format!("device {ordinal}"), p.name(names::device_get), code)?;
        Ok(device)
    }

    /// Takes device `ordinal` into use.
    ///
    /// # Errors
    /// The driver's; no such device.
    pub fn open(self, ordinal: usize) -> Result<Arc<Driver>> {
        let (facts, device) = (self.facts(ordinal)?, self.device(ordinal)?);
        let context = match &self.parts.own {
            Own::Cuda(own) => own.context(&self.parts, device)? as usize,
            Own::Hip(_) => hip::NO_CONTEXT as usize,
        };
        let driver = Driver::new(self.parts, facts, device, context);
        driver.enter()?;
        Ok(Arc::new(driver))
    }
}

/// A C text, also none.
fn c_text(text: *const c_char) -> String {
    if text.is_null() {
        return "unknown".into();
    }
    // SAFETY: the driver's texts end by 0, and our buffers are longer than what was written to them.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// The library at `path`, else the first of `names`: for the vendor's other libraries.
///
/// # Errors
/// [`Error::Library`]: none of them loads.
fn open_library(path: Option<&Path>, names: &[&str], fix: &str) -> Result<Symbols> {
    let missing = || Error::Library { library: names.join(", "), why: format!("not found; {fix}") };
    Symbols::open(path, names)?.ok_or_else(missing)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_a_driver_is_no_error() {
        for vendor in Vendor::ALL {
            if let Some(found) = find(vendor, &Libraries::default()).expect("a driver that works, or none") {
                println!("this machine has {:?}", found.facts(0));
            }
        }
    }

    #[test]
    fn a_path_that_leads_nowhere_is_named() {
        let libraries = Libraries { driver: Some("/nowhere/libcuda.so".into()), ..Libraries::default() };
        let error = find(Vendor::Nvidia, &libraries).map(|_| ()).unwrap_err();
        assert!(error.to_string().starts_with("/nowhere/libcuda.so: "), "{error}");
        assert!(error.to_string().ends_with("check the path in [device.libraries]"), "{error}");
    }

    #[test]
    fn a_library_that_is_no_driver_is_named() {
        for vendor in Vendor::ALL {
            let libraries = Libraries { driver: Some("libc.so.6".into()), ..Libraries::default() };
            let error = find(vendor, &libraries).map(|_| ()).unwrap_err();
            assert!(matches!(error, Error::Library { .. }) && error.to_string().contains("has no function"), "{error}");
        }
    }
}
