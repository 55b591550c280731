//! How do launches reach a real GPU? Sources are compiled by the run-time compiler found there when the first of their kernels is
//! launched; all work goes to the default stream. Memory is allocated and freed at once.
#![allow(unsafe_code)]

use super::Target;
use super::checks::pattern;
use super::driver::{Driver, Function, Vendor};
use crate::rtc::Rtc;
use crate::shapes::{Fill, Memory};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use zrt_kernels::gpu::launch::{Address, Arch, Launcher, Work};
use zrt_kernels::gpu::{GpuOps, table, workspace_bytes};
use zrt_kernels::memory::Mapping;
use zrt_kernels::sim::{SimDevice, SimOptions};
use zrt_kernels::{Buffer, DType, Device, Error, OpShape, Ops, Place, Result, Stream, View, ViewMut};

/// What launcher and memory share.
struct Shared {
    driver: Driver,
    rtc: Rtc,
    arch: Arch,
    functions: Mutex<HashMap<&'static str, Function>>,
    /// Device address of each allocation, by its identity.
    bases: Mutex<HashMap<u64, u64>>,
    cell: u64,
    watch_faults: AtomicBool,
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(|e| e.into_inner())
}

fn failed(op: &'static str) -> impl Fn(String) -> Error {
    move |what| Error::Shape { op, what }
}

/// Compiles and launches.
struct GpuLauncher(Arc<Shared>);

impl GpuLauncher {
    fn function(&self, name: &'static str) -> std::result::Result<Function, String> {
        let shared = &self.0;
        let mut functions = lock(&shared.functions);
        if let Some(f) = functions.get(name) {
            return Ok(*f);
        }
        let source = table::kernel(name).ok_or_else(|| format!("{name} is in no table"))?.source;
        let names: Vec<&'static str> = table::kernels().filter(|k| k.source == source).map(|k| k.name).collect();
        let code = shared.rtc.compile(source, &shared.arch.name)?.code;
        let found = shared.driver.load(&code, &names)?;
        functions.extend(names.into_iter().zip(found));
        functions.get(name).copied().ok_or_else(|| format!("{name} is not in {source}"))
    }
}

impl Launcher for GpuLauncher {
    fn arch(&self) -> &Arch {
        &self.0.arch
    }

    fn address(&self, op: &'static str, view: &View) -> Result<Address> {
        let (id, start, _) = view.span();
        lock(&self.0.bases).get(&id).map(|base| Address(base + start as u64)).ok_or(Error::NotHost { op })
    }

    fn run(&self, work: Work, _s: &dyn Stream) -> Result<()> {
        let Shared { driver, cell, watch_faults, .. } = &*self.0;
        let fail = failed(work.op);
        let watched = work.fault.filter(|_| watch_faults.load(Ordering::Relaxed));
        if watched.is_some() {
            driver.upload(*cell, &u64::MAX.to_ne_bytes()).map_err(&fail)?;
        }
        for mut launch in work.launches {
            if let Some(at) = launch.fault_at {
                let place = launch.params.get_mut(at..at + 8).ok_or_else(|| fail("no place for the fault cell".into()))?;
                place.copy_from_slice(&cell.to_ne_bytes());
            }
            let mut data = None;
            if let Some((at, bytes)) = &launch.data {
                let address = driver.alloc(bytes.len()).map_err(&fail)?;
                data = Some(address);
                driver.upload(address, bytes).map_err(&fail)?;
                let place = launch.params.get_mut(*at..at + 8).ok_or_else(|| fail("no place for the address of data".into()))?;
                place.copy_from_slice(&address.to_ne_bytes());
            }
            let function = self.function(launch.kernel).map_err(&fail)?;
            let launched = driver.launch(function, launch.grid, launch.threads, launch.shared_bytes, &launch.params);
            launched.map_err(|e| fail(format!("{}: {e}", launch.kernel)))?;
            if let Some(address) = data {
                driver.sync().and_then(|()| driver.free(address)).map_err(&fail)?;
            }
        }
        if let Some(fault) = watched {
            let bytes = driver.download(*cell, 8).map_err(&fail)?;
            fault.check(work.op, u64::from_ne_bytes(bytes.try_into().unwrap_or([0xff; 8])))?;
        }
        Ok(())
    }
}

/// Device memory, which the host cannot touch.
struct OnDevice {
    shared: Arc<Shared>,
    address: u64,
    bytes: usize,
}

// SAFETY: the base is null: the host cannot touch it.
unsafe impl Mapping for OnDevice {
    fn base(&self) -> *mut u8 {
        std::ptr::null_mut()
    }
    fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for OnDevice {
    fn drop(&mut self) {
        lock(&self.shared.bases).retain(|_, base| *base != self.address);
        // Frees after all launches that use it; a device that failed has said so already.
        let _ = self.shared.driver.free(self.address);
    }
}

/// A GPU.
pub struct Gpu {
    shared: Arc<Shared>,
    ops: GpuOps<GpuLauncher>,
    stream: Arc<dyn Stream>,
}

impl Gpu {
    /// The first GPU of this machine; `None`: there is none that a driver speaks for.
    ///
    /// # Errors
    /// A driver that fails, a GPU without a run-time compiler, or of a kind that kernels are not for.
    pub fn find() -> std::result::Result<Option<Gpu>, String> {
        let driver = match Driver::open(Vendor::Nvidia)? {
            Some(driver) => Some(driver),
            None => Driver::open(Vendor::Amd)?,
        };
        let Some(driver) = driver else { return Ok(None) };
        let (lanes, libraries): (u32, &[&str]) = match driver.vendor() {
            Vendor::Nvidia => (32, &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]),
            Vendor::Amd if driver.arch.starts_with("gfx9") => (64, &["libhiprtc.so.7", "libhiprtc.so.6", "libhiprtc.so"]),
            Vendor::Amd => return Err(format!("{}: kernels are for 64 lanes (gfx90a, gfx942, gfx950)", driver.arch)),
        };
        let open = |name: &&str| if lanes == 32 { Rtc::nvidia(name) } else { Rtc::amd(name) };
        let rtc = libraries.iter().find_map(|name| open(name).ok());
        let rtc = rtc.ok_or_else(|| format!("{}: no run-time compiler ({}); set LD_LIBRARY_PATH to it", driver.name, libraries[0]))?;
        let arch = Arch { name: driver.arch.clone(), lanes, shared_bytes: driver.shared_bytes, units: driver.units };
        let cell = driver.alloc(8)?;
        let (functions, bases) = (Mutex::default(), Mutex::default());
        let shared = Arc::new(Shared { driver, rtc, arch, functions, bases, cell, watch_faults: AtomicBool::new(true) });
        let stream = SimDevice::new(SimOptions { threads: 1 }).and_then(|d| d.stream("bench")).map_err(|e| e.to_string())?;
        Ok(Some(Gpu { ops: GpuOps::new(GpuLauncher(shared.clone())), shared, stream }))
    }

    /// The driver.
    pub fn driver(&self) -> &Driver {
        &self.shared.driver
    }

    /// The machine.
    pub fn arch(&self) -> &Arch {
        &self.shared.arch
    }

    /// The compiler.
    pub fn rtc(&self) -> &Rtc {
        &self.shared.rtc
    }

    /// Whether each call waits to see that it found no fault in its data: on for checks, off for times.
    pub fn watch_faults(&self, on: bool) {
        self.shared.watch_faults.store(on, Ordering::Relaxed);
    }

    /// Where an operand lies.
    ///
    /// # Errors
    /// It is not this device's.
    pub fn address(&self, view: &View) -> Result<u64> {
        GpuLauncher(self.shared.clone()).address("bench", view).map(|a| a.0)
    }
}

impl Memory for Gpu {
    fn tensor(&self, elems: usize, dtype: DType, fill: Fill) -> Result<ViewMut> {
        let bytes = elems * dtype.bytes();
        let driver = &self.shared.driver;
        let no_memory = |reason: String| Error::OutOfMemory { what: "operand".into(), bytes, reason };
        let address = driver.alloc(bytes).map_err(no_memory)?;
        let buffer = Buffer::from_mapping("operand", Place::Device, Box::new(OnDevice { shared: self.shared.clone(), address, bytes }));
        let view = buffer.all(dtype)?;
        lock(&self.shared.bases).insert(view.span().0, address);
        // The pattern once, then what is there, twice as much each time.
        let start = pattern(&fill, elems, dtype);
        let mut done = start.len();
        driver.upload(address, &start).map_err(failed("upload"))?;
        while done < bytes {
            let more = done.min(bytes - done);
            driver.copy(address + done as u64, address, more).map_err(failed("copy"))?;
            done += more;
        }
        Ok(view)
    }

    fn workspace_bytes(&self, shape: OpShape) -> usize {
        workspace_bytes(&self.shared.arch, shape)
    }
}

impl Target for Gpu {
    fn ops(&self) -> &dyn Ops {
        &self.ops
    }

    fn stream(&self) -> &dyn Stream {
        &*self.stream
    }

    fn read(&self, view: &View) -> Result<Vec<u8>> {
        let fail = failed("read");
        self.shared.driver.sync().map_err(&fail)?;
        self.shared.driver.download(self.address(view)?, view.bytes()).map_err(&fail)
    }
}
