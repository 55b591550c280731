//! How does a GPU see another's memory, when another process owns it? The driver gives a handle for an allocation, which travels as bytes, and
//! maps it on the other side.
#![allow(unsafe_code)]

use super::copies::{HANDLE_BYTES, PeerMemory};
use super::library::function;
use std::ffi::{c_int, c_uint};
use std::sync::Arc;
use zrt_kernels::gpu::GpuDevice;
use zrt_kernels::gpu::driver::Vendor;
use zrt_kernels::memory::Mapping;
use zrt_kernels::{Buffer, DType, Error, Place, Result};

/// `CUipcMemHandle`, `hipIpcMemHandle_t`: passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
struct Handle([u8; HANDLE_BYTES]);

/// The flag that both vendors want: access to the other device is made possible when it is needed.
const LAZY_PEER_ACCESS: c_uint = 1;

type Get = unsafe extern "C" fn(*mut Handle, u64) -> c_int;
type Open = unsafe extern "C" fn(*mut u64, Handle, c_uint) -> c_int;
type Close = unsafe extern "C" fn(u64) -> c_int;

/// The three functions, with their names.
struct Calls {
    device: Arc<GpuDevice>,
    get: (&'static str, Get),
    open: (&'static str, Open),
    close: (&'static str, Close),
}

/// The memory of GPUs as processes of one host share it.
pub struct GpuMemory(Arc<Calls>);

impl GpuMemory {
    /// For the driver of `device`.
    ///
    /// # Errors
    /// [`Error::Library`]: it lacks a function.
    pub fn of(device: Arc<GpuDevice>) -> Result<GpuMemory> {
        let name = device.driver().facts().library.clone();
        let missing = |why: String| Error::Library { library: name.clone(), why };
        let [get, open, close] = match device.driver().vendor() {
            Vendor::Nvidia => ["cuIpcGetMemHandle", "cuIpcOpenMemHandle_v2", "cuIpcCloseMemHandle"],
            Vendor::Amd => ["hipIpcGetMemHandle", "hipIpcOpenMemHandle", "hipIpcCloseMemHandle"],
        };
        // SAFETY: the driver that is loaded already and stays so: this only counts one more user, and its initializers have run.
        let library = unsafe { libloading::Library::new(&name) }.map_err(|e| missing(e.to_string()))?;
        // SAFETY: the vendors' documentation has these signatures under these names; addresses are 64 bits.
        let calls = unsafe {
            Calls {
                get: (get, function(&library, get).map_err(missing)?),
                open: (open, function(&library, open).map_err(missing)?),
                close: (close, function(&library, close).map_err(missing)?),
                device,
            }
        };
        std::mem::forget(library);
        Ok(GpuMemory(Arc::new(calls)))
    }
}

fn check(what: &str, call: &'static str, code: c_int) -> Result<()> {
    match code {
        0 => Ok(()),
        code => Err(Error::Driver { what: what.to_string(), call, code, text: "the driver does not share memory here".to_string() }),
    }
}

impl PeerMemory for GpuMemory {
    fn export(&self, buffer: &Buffer) -> Result<[u8; HANDLE_BYTES]> {
        let calls = &self.0;
        calls.device.driver().enter()?;
        // A handle is of a whole allocation, and so is a buffer.
        let address = buffer.all(DType::U8)?.address().unwrap_or(0);
        let mut handle = Handle([0; HANDLE_BYTES]);
        // SAFETY: the device is current in this thread; an address that is none of the device's is an error.
        check(&format!("sharing {buffer:?}"), calls.get.0, unsafe { (calls.get.1)(&mut handle, address) })?;
        Ok(handle.0)
    }

    fn import(&self, name: &str, handle: [u8; HANDLE_BYTES], bytes: usize) -> Result<Buffer> {
        let calls = &self.0;
        calls.device.driver().enter()?;
        let mut address = 0;
        // SAFETY: as above; bytes that are no handle are an error.
        let code = unsafe { (calls.open.1)(&mut address, Handle(handle), LAZY_PEER_ACCESS) };
        check(&format!("mapping {name}"), calls.open.0, code)?;
        Ok(Buffer::from_mapping(name, Place::Device, Box::new(Opened { calls: calls.clone(), address, bytes })))
    }
}

/// Another process's memory, until it is dropped.
struct Opened {
    calls: Arc<Calls>,
    address: u64,
    bytes: usize,
}

// SAFETY: the host cannot touch it; the device can until it is closed, on drop.
unsafe impl Mapping for Opened {
    fn base(&self) -> *mut u8 {
        std::ptr::null_mut()
    }
    fn bytes(&self) -> usize {
        self.bytes
    }
    fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        let calls = &self.calls;
        // Should it fail, the mapping stays until the process ends.
        if calls.device.driver().enter().is_ok() {
            // SAFETY: streams hold the buffer until the device has passed its use, so nobody uses it any more.
            let _ = unsafe { (calls.close.1)(self.address) };
        }
    }
}
