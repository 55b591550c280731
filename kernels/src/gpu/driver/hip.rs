//! What is AMD's own in the table of driver functions: the library's names, the current device, the properties that name the machine.
#![allow(unsafe_code)]

use super::Parts;
use super::hip_sys as sys;
use super::library::Symbols;
use super::table::{Code, Handle};
use crate::gpu::launch::Arch;
use crate::{Error, Result};
use std::ffi::{c_char, c_int, c_uint};
use std::path::Path;

/// The driver at `path`, else by its names, the newest first; `None`: there is none.
pub(super) fn open(path: Option<&Path>) -> Result<Option<Symbols>> {
    Symbols::open(path, &["libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"])
}

/// Room for the struct of later versions of HIP.
const SPARE_BYTES: usize = 1024;

/// The properties of a device, in HIP 6.0's layout (R0600).
#[repr(C)]
struct Properties {
    known: sys::hipDeviceProp_tR0600,
    spare: [u8; SPARE_BYTES],
}

/// Functions that only this vendor has.
pub(super) struct Own {
    set_device: unsafe extern "C" fn(c_int) -> Code,
    properties: unsafe extern "C" fn(*mut Properties, c_int) -> Code,
    error_name: unsafe extern "C" fn(Code) -> *const c_char,
    error_text: unsafe extern "C" fn(Code) -> *const c_char,
}

impl Own {
    pub fn load(symbols: &Symbols) -> Result<Own> {
        // SAFETY: hip_runtime_api.h documents these signatures under these names.
        unsafe {
            Ok(Own {
                set_device: symbols.get("hipSetDevice")?,
                properties: symbols.get("hipGetDevicePropertiesR0600")?,
                error_name: symbols.get("hipGetErrorName")?,
                error_text: symbols.get("hipGetErrorString")?,
            })
        }
    }

    pub fn error(&self, code: Code) -> String {
        // SAFETY: both return a static text for any code.
        let (name, text) = unsafe { ((self.error_name)(code), (self.error_text)(code)) };
        format!("{}: {}", super::c_text(name), super::c_text(text))
    }

    /// Makes a device current in this thread.
    pub fn enter(&self, parts: &Parts, device: c_int) -> Result<()> {
        // SAFETY: takes a number.
        parts.check(|| format!("current device {device}"), "hipSetDevice", unsafe { (self.set_device)(device) })
    }

    /// What the kernels' host side must know of a device.
    pub fn arch(&self, parts: &Parts, device: c_int) -> Result<Arch> {
        // SAFETY: numbers and addresses, for which zero is a value.
        let mut properties: Properties = unsafe { std::mem::zeroed() };
        // SAFETY: more room than the struct of any version of this function has.
        let code = unsafe { (self.properties)(&mut properties, device) };
        parts.check(|| format!("properties of device {device}"), "hipGetDevicePropertiesR0600", code)?;
        let name: Vec<u8> = properties.known.gcnArchName.iter().map(|c| *c as u8).take_while(|b| *b != 0).collect();
        // `gfx942:sramecc+:xnack-`: the compiler's name and what is switched on.
        let name = String::from_utf8_lossy(&name).split(':').next().unwrap_or_default().to_string();
        let lanes = parts.attribute(device, number(sys::hipDeviceAttributeWarpSize))?;
        if lanes != 64 {
            let what = format!("{name} has {lanes} lanes; kernels are for the 64 of gfx90a, gfx942 and gfx950");
            return Err(Error::Shape { op: "gpu", what });
        }
        let shared_bytes = parts.attribute(device, number(sys::hipDeviceAttributeMaxSharedMemoryPerBlock))?;
        Ok(Arch { name, lanes, shared_bytes, units: parts.attribute(device, number(sys::hipDeviceAttributeMultiprocessorCount))? })
    }
}

/// An attribute as the table's function takes it.
fn number(attribute: sys::hipDeviceAttribute_t) -> c_int {
    attribute as c_int
}

/// `hipInit` and `hipGetDeviceCount`.
pub(super) fn count(symbols: &Symbols) -> Result<(Code, c_int)> {
    let mut count: c_int = 0;
    // SAFETY: hip_runtime_api.h documents these signatures under these names.
    let code = unsafe {
        let init = symbols.get::<unsafe extern "C" fn(c_uint) -> Code>("hipInit")?;
        let get = symbols.get::<unsafe extern "C" fn(*mut c_int) -> Code>("hipGetDeviceCount")?;
        match init(0) {
            0 => get(&mut count),
            failed => failed,
        }
    };
    Ok((code, count))
}

/// HIP has a current device, not contexts.
pub(super) const NO_CONTEXT: Handle = std::ptr::null_mut();
