//! What is NVIDIA's own in the table of driver functions: the library through cudarc, contexts, attributes, leave for large shared memory.
#![allow(unsafe_code)]

use super::Parts;
use super::library::Symbols;
use super::table::{Code, Handle};
use crate::gpu::launch::Arch;
use crate::{Error, Result};
use cudarc::driver::sys::{CUdevice_attribute_enum as Attribute, CUfunction_attribute_enum as FunctionAttribute};
use std::ffi::{c_char, c_int, c_uint};
use std::path::Path;

/// The driver at `path`, else as cudarc finds it; `None`: there is none.
pub(super) fn open(path: Option<&Path>) -> Result<Option<Symbols>> {
    if path.is_some() {
        return Symbols::open(path, &[]);
    }
    // SAFETY: probes for the library by name and lets go of it.
    if !unsafe { cudarc::driver::sys::is_culib_present() } {
        return Ok(None);
    }
    // SAFETY: it was there a moment ago.
    let library = unsafe { cudarc::driver::sys::culib() };
    Ok(Some(Symbols::Cudarc { library, name: "libcuda.so.1" }))
}

/// NVRTC as cudarc finds it.
pub(super) fn open_compiler() -> Result<Symbols> {
    // SAFETY: probes for the library by name and lets go of it.
    if !unsafe { cudarc::nvrtc::sys::is_culib_present() } {
        return Err(Error::Library { library: "libnvrtc.so".into(), why: format!("not found; {}", super::rtc::NO_COMPILER) });
    }
    // SAFETY: it was there a moment ago.
    Ok(Symbols::Cudarc { library: unsafe { cudarc::nvrtc::sys::culib() }, name: "libnvrtc.so" })
}

/// cuBLASLt at `path`, else as cudarc finds it; `None`: there is none.
pub(super) fn open_blas(path: Option<&Path>) -> Result<Option<Symbols>> {
    // SAFETY: probes for the library by name and lets go of it.
    if path.is_some() || !unsafe { cudarc::cublaslt::sys::is_culib_present() } {
        return Symbols::open(path, &[]);
    }
    // SAFETY: it was there a moment ago.
    Ok(Some(Symbols::Cudarc { library: unsafe { cudarc::cublaslt::sys::culib() }, name: "libcublasLt.so" }))
}

/// Functions that only this vendor has.
pub(super) struct Own {
    set_current: unsafe extern "C" fn(Handle) -> Code,
    retain: unsafe extern "C" fn(*mut Handle, c_int) -> Code,
    allow: unsafe extern "C" fn(Handle, c_int, c_int) -> Code,
    error_name: unsafe extern "C" fn(Code, *mut *const c_char) -> Code,
    error_text: unsafe extern "C" fn(Code, *mut *const c_char) -> Code,
}

impl Own {
    pub fn load(symbols: &Symbols) -> Result<Own> {
        // SAFETY: cuda.h documents these signatures under these names.
        unsafe {
            Ok(Own {
                set_current: symbols.get("cuCtxSetCurrent")?,
                retain: symbols.get("cuDevicePrimaryCtxRetain")?,
                allow: symbols.get("cuFuncSetAttribute")?,
                error_name: symbols.get("cuGetErrorName")?,
                error_text: symbols.get("cuGetErrorString")?,
            })
        }
    }

    pub fn error(&self, code: Code) -> String {
        let text = |f: unsafe extern "C" fn(Code, *mut *const c_char) -> Code| {
            let mut text: *const c_char = std::ptr::null();
            // SAFETY: writes a static text, or null for a code that it does not know.
            unsafe { f(code, &mut text) };
            super::c_text(text)
        };
        format!("{}: {}", text(self.error_name), text(self.error_text))
    }

    /// Makes a device's primary context.
    pub fn context(&self, parts: &Parts, device: c_int) -> Result<Handle> {
        let mut context: Handle = std::ptr::null_mut();
        // SAFETY: a place to write to, and a device that the driver gave.
        parts
            .check(|| format!("context of device {device}"), "cuDevicePrimaryCtxRetain", unsafe { (self.retain)(&mut context, device) })?;
        Ok(context)
    }

    /// Makes a context current in this thread.
    pub fn enter(&self, parts: &Parts, context: Handle) -> Result<()> {
        // SAFETY: a context of this driver, which is kept for the process's life.
        parts.check(|| "current context".into(), "cuCtxSetCurrent", unsafe { (self.set_current)(context) })
    }

    /// Lets a kernel have more dynamic shared memory than 48 KiB.
    pub fn allow_shared(&self, parts: &Parts, function: Handle, bytes: u32) -> Result<()> {
        let attribute = FunctionAttribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as c_int;
        // SAFETY: a function of a module that is loaded.
        parts.check(|| format!("{bytes} bytes of shared memory"), "cuFuncSetAttribute", unsafe {
            (self.allow)(function, attribute, bytes as c_int)
        })
    }
}

/// What the kernels' host side must know of a device.
pub(super) fn arch(parts: &Parts, device: c_int) -> Result<Arch> {
    let attribute = |a: Attribute| parts.attribute(device, a as c_int);
    let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    Ok(Arch {
        name: format!("sm_{major}{minor}"),
        lanes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_WARP_SIZE)?,
        shared_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        units: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
    })
}

/// `cuInit` and `cuDeviceGetCount`.
pub(super) fn count(symbols: &Symbols) -> Result<(Code, c_int)> {
    let mut count: c_int = 0;
    // SAFETY: cuda.h documents these signatures under these names.
    let code = unsafe {
        let init = symbols.get::<unsafe extern "C" fn(c_uint) -> Code>("cuInit")?;
        let get = symbols.get::<unsafe extern "C" fn(*mut c_int) -> Code>("cuDeviceGetCount")?;
        match init(0) {
            0 => get(&mut count),
            failed => failed,
        }
    };
    Ok((code, count))
}
