//! A device in use: memory, queues, points in them, code and launches, each one call of the driver, an error value where it fails.
#![allow(unsafe_code)]

use super::table::{Code, Handle, names};
use super::{Facts, Own, Parts, Vendor};
use crate::{Error, Result};
use std::cell::Cell;
use std::ffi::{CString, c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

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
pub struct RawStream(pub(super) usize);

impl RawStream {
    pub(crate) fn of(native: crate::NativeStream) -> RawStream {
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
    pub(super) fn new(parts: Parts, facts: Facts, device: c_int, context: usize) -> Driver {
        static NEXT: AtomicUsize = AtomicUsize::new(1);
        Driver { parts, facts, device, context, id: NEXT.fetch_add(1, Ordering::Relaxed), spare: Mutex::default() }
    }

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
