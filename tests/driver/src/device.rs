//! What does a process see of its GPUs? One machine: devices with their memory, streams and first error, and the objects behind
//! the handles that were given out. A handle that is not, or no longer, one is an error code and no crash.

use crate::clock::{Engines, Timeline};
use crate::faults::{Faults, Kind, code};
use crate::memory::{Memory, lock};
use crate::module::{Function, Module};
use crate::settings::Settings;
use crate::stream::{Event, Gate, Stream, next_handle};
use std::collections::HashMap;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use zrt_kernels::gpu::driver::Vendor;
use zrt_kernels::gpu::launch::Arch;
use zrt_simt::build::{Build, Kernels, Sanitizer};
use zrt_simt::launcher::Emulator;

/// Objects by handle.
pub struct Handles<T: ?Sized>(Mutex<HashMap<u64, Arc<T>>>);

impl<T: ?Sized> Default for Handles<T> {
    fn default() -> Self {
        Handles(Mutex::default())
    }
}

impl<T: ?Sized> Handles<T> {
    pub fn add(&self, object: Arc<T>) -> u64 {
        let handle = next_handle();
        self.insert(handle, object);
        handle
    }

    pub fn insert(&self, handle: u64, object: Arc<T>) {
        lock(&self.0).insert(handle, object);
    }

    pub fn get(&self, handle: u64) -> Result<Arc<T>, i32> {
        lock(&self.0).get(&handle).cloned().ok_or(code::INVALID_HANDLE)
    }

    pub fn remove(&self, handle: u64) -> Result<Arc<T>, i32> {
        lock(&self.0).remove(&handle).ok_or(code::INVALID_HANDLE)
    }

    fn all(&self) -> Vec<Arc<T>> {
        lock(&self.0).values().cloned().collect()
    }
}

/// A GPU.
#[derive(Default)]
pub struct Device {
    pub index: usize,
    pub engines: Engines,
    error: AtomicI32,
    default_stream: OnceLock<Arc<Stream>>,
    /// Streams without a handle that may still have work.
    pub closing: Mutex<Vec<Arc<Stream>>>,
}

impl Device {
    /// The first error of an operation, which every later call returns; 0: none.
    pub fn error(&self) -> i32 {
        self.error.load(Ordering::Acquire)
    }

    pub fn fail(&self, code: i32) {
        let _ = self.error.compare_exchange(0, code, Ordering::AcqRel, Ordering::Acquire);
    }
}

/// All of a process.
pub struct Machine {
    pub settings: Settings,
    pub faults: Faults,
    pub memory: Memory,
    pub devices: Vec<Device>,
    pub timeline: Option<Timeline>,
    pub gate: Gate,
    pub streams: Handles<Stream>,
    pub events: Handles<Event>,
    pub modules: Handles<Module>,
    pub functions: Handles<Function>,
    emulators: [OnceLock<Result<Emulator, String>>; 2],
}

static MACHINE: OnceLock<Result<Machine, String>> = OnceLock::new();

impl Machine {
    /// This process's.
    ///
    /// # Errors
    /// Settings that are not understood, or no memory.
    pub fn open() -> Result<&'static Machine, &'static str> {
        MACHINE.get_or_init(Machine::new).as_ref().map_err(String::as_str)
    }

    /// This process's, which was opened: only objects of it call this.
    pub fn get() -> &'static Machine {
        match Machine::open() {
            Ok(machine) => machine,
            Err(why) => unreachable!("the machine was opened before: {why}"),
        }
    }

    fn new() -> Result<Machine, String> {
        let settings = Settings::of_process()?;
        stay_loaded();
        let memory = Memory::new(settings.devices, settings.memory, settings.poison).ok_or("no memory file can be made")?;
        let open = |path: &std::path::PathBuf| Timeline::open(path).map_err(|e| format!("{}: {e}", path.display()));
        let timeline = settings.timeline.as_ref().map(open).transpose()?;
        if timeline.is_some() {
            // SAFETY: a function of this library, which stays loaded.
            unsafe { libc::atexit(flush_timeline) };
        }
        Ok(Machine {
            faults: Faults::new(settings.faults.clone(), settings.fault_log.clone()),
            memory,
            devices: (0..settings.devices).map(|index| Device { index, ..Device::default() }).collect(),
            timeline,
            gate: Gate::default(),
            streams: Handles::default(),
            events: Handles::default(),
            modules: Handles::default(),
            functions: Handles::default(),
            emulators: Default::default(),
            settings,
        })
    }

    /// The machine that kernels are for, by its vendor's compiler.
    pub fn arch(&self, vendor: Vendor) -> Arch {
        let (default, prefix) = match vendor {
            Vendor::Nvidia => ("sm_90", "sm_"),
            Vendor::Amd => ("gfx942", "gfx"),
        };
        let named = self.settings.arch.as_deref().filter(|a| a.starts_with(prefix)).and_then(Arch::known);
        named.or_else(|| Arch::known(default)).unwrap_or_else(|| unreachable!("{default} is known"))
    }

    /// What runs kernels.
    pub fn emulator(&self, vendor: Vendor) -> Result<&Emulator, String> {
        let make = || {
            let kernels = Kernels::of(&build(&self.arch(vendor)))?;
            Ok(Emulator::new(kernels, self.settings.workers))
        };
        self.emulators[usize::from(vendor == Vendor::Amd)].get_or_init(make).as_ref().map_err(Clone::clone)
    }

    /// A new stream of a device.
    pub fn stream(&self, device: &'static Device, blocking: bool) -> Result<Arc<Stream>, i32> {
        let stream = Stream::start(next_handle(), device, blocking).map_err(|_| code::OUT_OF_MEMORY)?;
        self.streams.insert(stream.id, stream.clone());
        Ok(stream)
    }

    /// The stream behind a handle, for work of `device`. 0, 1 and 2 are the default one, which waits for all blocking streams and they for it.
    pub fn stream_of(&self, device: &'static Device, handle: u64) -> Result<Arc<Stream>, i32> {
        if handle > 2 {
            let stream = self.streams.get(handle)?;
            if stream.blocking
                && let Some(default) = device.default_stream.get().filter(|d| !d.idle())
            {
                stream.wait_for(default.record());
            }
            return Ok(stream);
        }
        let default = match device.default_stream.get() {
            Some(default) => default.clone(),
            None => {
                let made = Stream::start(handle, device, false).map_err(|_| code::OUT_OF_MEMORY)?;
                device.default_stream.get_or_init(|| made).clone()
            }
        };
        for other in self.streams.all() {
            if other.blocking && std::ptr::eq(other.device, device) && !other.idle() {
                default.wait_for(other.record());
            }
        }
        Ok(default)
    }

    /// Waits for all streams of a device.
    pub fn synchronize(&self, device: &'static Device) {
        let closing = lock(&device.closing).clone();
        for stream in self.streams.all().iter().chain(device.default_stream.get()).chain(&closing) {
            if std::ptr::eq(stream.device, device) {
                stream.synchronize();
            }
        }
    }

    /// Counts a call of an exported function; the code that it returns instead, if it must fail.
    pub fn call_fault(&self, function: &str) -> Option<i32> {
        if self.settings.faults.is_empty() {
            return None;
        }
        self.faults.hit(|kind| match kind {
            Kind::Call(name, code) if name == function => Some(*code),
            _ => None,
        })
    }
}

/// How kernels are compiled for a machine.
pub fn build(arch: &Arch) -> Build {
    Build { lanes: arch.lanes, gfx950: arch.name == "gfx950", sanitizer: Sanitizer::None, mutations: Vec::new() }
}

extern "C" fn flush_timeline() {
    if let Some(timeline) = Machine::open().ok().and_then(|m| m.timeline.as_ref()) {
        timeline.flush();
    }
}

/// Threads run this library's code until the process ends, so it must not be unloaded.
fn stay_loaded() {
    // SAFETY: asks for the file of a function of ours, and loads that file once more, for good.
    unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        if libc::dladdr(stay_loaded as *const libc::c_void, &mut info) != 0 && !info.dli_fname.is_null() {
            libc::dlopen(info.dli_fname, libc::RTLD_NOW | libc::RTLD_NOLOAD | libc::RTLD_NODELETE);
        }
    }
}
