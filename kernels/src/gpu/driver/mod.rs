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
pub mod rtc;
mod table;

use crate::gpu::launch::Arch;
use crate::{Error, Result};
use library::Symbols;
use std::cell::Cell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use table::{Code, Functions, Handle, names};

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
/// "Out of memory".
const OUT_OF_MEMORY: Code = 2;
/// "Not ready".
const NOT_READY: Code = 600;
/// Streams that do not wait for the default one; events without times.
const NON_BLOCKING: u32 = 1;
const NO_TIMING: u32 = 2;
/// Registered memory that every context may use.
const PORTABLE: u32 = 1;
/// Events that a driver keeps for reuse.
const SPARE_EVENTS: usize = 1024;

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
        static NEXT: AtomicUsize = AtomicUsize::new(1);
        let (facts, device) = (self.facts(ordinal)?, self.device(ordinal)?);
        let context = match &self.parts.own {
            Own::Cuda(own) => own.context(&self.parts, device)? as usize,
            Own::Hip(_) => hip::NO_CONTEXT as usize,
        };
        let driver =
            Driver { parts: self.parts, facts, device, context, id: NEXT.fetch_add(1, Ordering::Relaxed), spare: Mutex::default() };
        driver.enter()?;
        Ok(Arc::new(driver))
    }
}

thread_local! {
    /// The driver whose device is current in this thread.
    static CURRENT: Cell<usize> = const { Cell::new(0) };
}

/// One device in use.
pub struct Driver {
    parts: Parts,
    facts: Facts,
    device: c_int,
    context: usize,
    id: usize,
    /// Events that can be recorded again.
    spare: Mutex<Vec<usize>>,
}

/// A queue of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawStream(usize);

impl RawStream {
    pub(super) fn of(native: crate::NativeStream) -> RawStream {
        RawStream(native.0 as usize)
    }

    /// As the driver's libraries take it.
    pub fn native(self) -> crate::NativeStream {
        crate::NativeStream(self.0 as u64)
    }
}

/// A kernel that can be launched.
#[derive(Clone, Copy, Debug)]
pub struct RawFunction(usize);

/// A point of a queue; returned for reuse when dropped.
pub struct RawEvent {
    driver: Arc<Driver>,
    handle: usize,
    timed: bool,
}

/// Calls a function of the table and turns its result into an error.
macro_rules! call {
    ($driver:expr, $field:ident($($arg:expr),*), $($what:tt)+) => {{
        let parts = &$driver.parts;
        // SAFETY: the table's signature; handles come from this driver, addresses are valid for the lengths given, by the caller.
        let code = unsafe { (parts.functions.$field)($($arg),*) };
        parts.check(|| format!($($what)+), parts.name(names::$field), code)
    }};
}

impl Driver {
    /// Whose it is.
    pub fn vendor(&self) -> Vendor {
        self.parts.vendor
    }

    /// What the device is.
    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// Makes the device current in this thread; all other calls need it.
    ///
    /// # Errors
    /// The driver's.
    pub fn enter(&self) -> Result<()> {
        if CURRENT.get() == self.id {
            return Ok(());
        }
        match &self.parts.own {
            Own::Cuda(own) => own.enter(&self.parts, self.context as Handle)?,
            Own::Hip(own) => own.enter(&self.parts, self.device)?,
        }
        CURRENT.set(self.id);
        Ok(())
    }

    /// Bytes free and in all.
    ///
    /// # Errors
    /// The driver's.
    pub fn memory(&self) -> Result<(usize, usize)> {
        let (mut free, mut all) = (0, 0);
        call!(self, memory_info(&mut free, &mut all), "asking for free memory")?;
        Ok((free, all))
    }

    /// Memory of the device.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], with what is free; else the driver's.
    pub fn alloc(&self, name: &str, bytes: usize) -> Result<u64> {
        let mut address = 0u64;
        match call!(self, alloc(&mut address, bytes.max(1)), "allocating {bytes} bytes for {name}") {
            Err(Error::Driver { code: OUT_OF_MEMORY, call, .. }) => {
                let free = self.memory().map_or_else(|e| e.to_string(), |(free, all)| format!("{free} of {all} bytes are free"));
                let reason = format!("{call} on {}: {free}", self.facts.name);
                Err(Error::OutOfMemory { what: name.to_string(), bytes, reason })
            }
            Err(e) => Err(e),
            Ok(()) if address == 0 => {
                Err(Error::OutOfMemory { what: name.to_string(), bytes, reason: "the driver gave no address".into() })
            }
            Ok(()) => Ok(address),
        }
    }

    /// Gives memory back.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// `address` is of [`Driver::alloc`], and nothing that is queued or will be queued uses it.
    pub unsafe fn free(&self, address: u64) -> Result<()> {
        call!(self, free(address), "freeing memory")
    }

    /// Lets the device copy from and to host memory asynchronously.
    ///
    /// # Errors
    /// The driver's, for instance that the limit of locked memory is reached.
    ///
    /// # Safety
    /// The memory stays mapped until [`Driver::unregister`].
    pub unsafe fn register(&self, base: *mut u8, bytes: usize) -> Result<()> {
        call!(self, register(base.cast(), bytes, PORTABLE), "locking {bytes} bytes of host memory")
    }

    /// Ends [`Driver::register`].
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// No copy that is queued uses the memory.
    pub unsafe fn unregister(&self, base: *mut u8) -> Result<()> {
        call!(self, unregister(base.cast()), "unlocking host memory")
    }

    /// Enqueues a copy from the host.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// Both ranges are valid until the copy has run.
    pub unsafe fn to_device(&self, s: RawStream, dst: u64, src: *const u8, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        call!(self, to_device(dst, src.cast(), bytes, s.0 as Handle), "copying {bytes} bytes to the device")
    }

    /// Enqueues a copy to the host.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// As [`Driver::to_device`].
    pub unsafe fn to_host(&self, s: RawStream, dst: *mut u8, src: u64, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        call!(self, to_host(dst.cast(), src, bytes, s.0 as Handle), "copying {bytes} bytes to the host")
    }

    /// Enqueues a copy in device memory.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// As [`Driver::to_device`].
    pub unsafe fn on_device(&self, s: RawStream, dst: u64, src: u64, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        call!(self, on_device(dst, src, bytes, s.0 as Handle), "copying {bytes} bytes on the device")
    }

    /// Enqueues setting bytes.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// As [`Driver::to_device`].
    pub unsafe fn set_bytes(&self, s: RawStream, dst: u64, value: u8, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        call!(self, set_bytes(dst, value, bytes, s.0 as Handle), "setting {bytes} bytes")
    }

    /// Enqueues setting words of 32 bits.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// As [`Driver::to_device`].
    pub unsafe fn set_words(&self, s: RawStream, dst: u64, value: u32, words: usize) -> Result<()> {
        if words == 0 {
            return Ok(());
        }
        call!(self, set_words(dst, value, words, s.0 as Handle), "setting {words} words")
    }

    /// A new queue.
    ///
    /// # Errors
    /// The driver's.
    pub fn stream(&self, name: &str) -> Result<RawStream> {
        let mut handle: Handle = std::ptr::null_mut();
        call!(self, stream_create(&mut handle, NON_BLOCKING), "making stream '{name}'")?;
        Ok(RawStream(handle as usize))
    }

    /// Ends a queue.
    ///
    /// # Errors
    /// The driver's.
    pub fn end_stream(&self, s: RawStream) -> Result<()> {
        call!(self, stream_destroy(s.0 as Handle), "ending a stream")
    }

    /// Makes a queue wait for a point.
    ///
    /// # Errors
    /// The driver's.
    pub fn wait(&self, s: RawStream, event: &RawEvent) -> Result<()> {
        call!(self, stream_wait(s.0 as Handle, event.handle as Handle, 0), "waiting for an event")
    }

    /// The point after all that is in the queue. `timed` points have a time.
    ///
    /// # Errors
    /// The driver's.
    pub fn record(self: &Arc<Self>, s: RawStream, timed: bool) -> Result<RawEvent> {
        let spare = if timed { None } else { self.spare().pop() };
        let event = match spare {
            Some(handle) => RawEvent { driver: self.clone(), handle, timed },
            None => {
                let mut handle: Handle = std::ptr::null_mut();
                call!(self, event_create(&mut handle, if timed { 0 } else { NO_TIMING }), "making an event")?;
                RawEvent { driver: self.clone(), handle: handle as usize, timed }
            }
        };
        call!(self, event_record(event.handle as Handle, s.0 as Handle), "recording an event")?;
        Ok(event)
    }

    fn spare(&self) -> std::sync::MutexGuard<'_, Vec<usize>> {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Loads compiled code and finds its kernels; it stays loaded.
    ///
    /// # Errors
    /// The driver's: an image of another machine, a kernel that is not in it.
    pub fn load(&self, source: &str, code: &[u8], kernels: &[&'static str]) -> Result<Vec<RawFunction>> {
        let mut module: Handle = std::ptr::null_mut();
        call!(self, module_load(&mut module, code.as_ptr().cast::<c_void>()), "loading {source} on {}", self.facts.name)?;
        let function = |name: &&'static str| {
            let text = CString::new(*name).map_err(|e| Error::Shape { op: "load module", what: e.to_string() })?;
            let mut out: Handle = std::ptr::null_mut();
            call!(self, module_function(&mut out, module, text.as_ptr()), "finding {name} in {source}")?;
            Ok(RawFunction(out as usize))
        };
        let found = kernels.iter().map(function).collect::<Result<Vec<_>>>();
        if found.is_err() {
            // The first error says what happened.
            let _ = call!(self, module_unload(module), "unloading {source}");
        }
        found
    }

    /// Lets a kernel have this much dynamic shared memory, where the driver asks for leave.
    ///
    /// # Errors
    /// The driver's.
    pub fn allow_shared(&self, f: RawFunction, bytes: u32) -> Result<()> {
        match &self.parts.own {
            Own::Cuda(own) => own.allow_shared(&self.parts, f.0 as Handle, bytes),
            Own::Hip(_) => Ok(()),
        }
    }

    /// Enqueues a kernel, whose one parameter is the struct that `params` holds.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// `params` is the kernel's struct, aligned for it; the memory it names is valid until the kernel has run.
    pub unsafe fn launch(
        &self,
        s: RawStream,
        f: RawFunction,
        grid: [u32; 3],
        threads: u32,
        shared_bytes: u32,
        params: &mut [u64],
    ) -> Result<()> {
        let mut pointers: [Handle; 1] = [params.as_mut_ptr().cast()];
        let [x, y, z] = grid;
        let none: *mut Handle = std::ptr::null_mut();
        call!(
            self,
            launch(f.0 as Handle, x, y, z, threads, 1, 1, shared_bytes, s.0 as Handle, pointers.as_mut_ptr(), none),
            "launching {x} x {y} x {z} blocks of {threads} threads"
        )
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        // The context stays for the process's life; its events need not.
        let spare = std::mem::take(&mut *self.spare());
        for handle in spare {
            let _ = call!(self, event_destroy(handle as Handle), "ending an event");
        }
    }
}

impl RawEvent {
    /// Whether the queue has passed it.
    ///
    /// # Errors
    /// The driver's, among them the first error of work that ran before.
    pub fn passed(&self) -> Result<bool> {
        self.driver.enter()?;
        match call!(self.driver, event_query(self.handle as Handle), "asking whether an event has passed") {
            Err(Error::Driver { code: NOT_READY, .. }) => Ok(false),
            other => other.map(|()| true),
        }
    }

    /// Nanoseconds from `self` to `later`, both timed and passed.
    ///
    /// # Errors
    /// The driver's.
    pub fn ns_to(&self, later: &RawEvent) -> Result<u64> {
        let mut ms = 0f32;
        call!(self.driver, event_elapsed(&mut ms, self.handle as Handle, later.handle as Handle), "asking for a time between events")?;
        Ok((f64::from(ms) * 1e6).max(0.0) as u64)
    }
}

impl Drop for RawEvent {
    fn drop(&mut self) {
        let mut spare = self.driver.spare();
        if !self.timed && spare.len() < SPARE_EVENTS {
            spare.push(self.handle);
            return;
        }
        drop(spare);
        if self.driver.enter().is_ok() {
            // Nobody is left to tell.
            let _ = call!(self.driver, event_destroy(self.handle as Handle), "ending an event");
        }
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
