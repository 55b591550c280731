//! What is an emulated GPU to a program? A [`Device`] like the others: memory, streams and events are those of the CPU device, so
//! that its access tracker and its chaos work here too; the operations are the GPU's, on the emulator.
#![allow(unsafe_code)]

use crate::build::{Build, Kernels, Sanitizer};
use crate::launcher::{Counters, Emulator, Order, SimtLauncher};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use zrt_kernels::cpu::{CpuDevice, CpuOptions, Mode};
use zrt_kernels::device::{Device, DeviceInfo, Event, Stream};
use zrt_kernels::gpu::GpuOps;
use zrt_kernels::gpu::launch::Arch;
use zrt_kernels::memory::Mapping;
use zrt_kernels::{Buffer, Category, Error, MemoryUse, Ops, Place, Result};

/// How to make a [`SimtDevice`].
#[derive(Clone, Debug)]
pub struct SimtOptions {
    /// The machine that is emulated, by its compiler's name: see [`Arch::known`].
    pub arch: &'static str,
    /// Compute units in place of the machine's: with few of them, blocks of small operands have long loops too.
    pub units: Option<u32>,
    /// Order of threads.
    pub order: Order,
    /// Host threads that share the blocks of a launch.
    pub workers: u32,
    /// Fill the counters: costs about three times the time.
    pub count: bool,
    /// Sanitizer of the kernels.
    pub sanitizer: Sanitizer,
    /// Changes of the kernels' sources.
    pub mutations: Vec<crate::Mutation>,
    /// Allocations have exactly the bytes asked for, not whole pages, so that a sanitizer knows where they end.
    pub exact: bool,
    /// How tasks of streams run.
    pub mode: Mode,
}

impl Default for SimtOptions {
    fn default() -> Self {
        SimtOptions {
            arch: "sm_90",
            units: None,
            order: Order::Forward,
            workers: 1,
            count: false,
            sanitizer: Sanitizer::None,
            mutations: Vec::new(),
            exact: false,
            mode: Mode::Threaded,
        }
    }
}

/// See the module documentation.
pub struct SimtDevice {
    inner: Arc<CpuDevice>,
    emulator: Arc<Emulator>,
    launcher: SimtLauncher,
    arch: Arch,
    exact: bool,
}

impl SimtDevice {
    /// An emulated GPU.
    ///
    /// # Errors
    /// An unknown machine, or sources that cannot be prepared. A missing compiler shows at the first operation.
    pub fn new(options: SimtOptions) -> Result<Arc<SimtDevice>> {
        let shape = |what: String| Error::Shape { op: "simt device", what };
        let mut arch = Arch::known(options.arch).ok_or_else(|| shape(format!("unknown machine {}", options.arch)))?;
        arch.units = options.units.unwrap_or(arch.units);
        let gfx950 = options.arch == "gfx950";
        let build = Build { lanes: arch.lanes, gfx950, sanitizer: options.sanitizer, mutations: options.mutations };
        let emulator = Arc::new(Emulator {
            kernels: Kernels::of(&build).map_err(shape)?,
            order: options.order,
            workers: options.workers,
            count: options.count,
            counters: Mutex::default(),
        });
        let launcher = SimtLauncher::new(arch.clone(), emulator.clone());
        let ops = Box::new(GpuOps::new(launcher.clone()));
        let cpu = CpuOptions { threads: 1, mode: options.mode, track: true, trace: false };
        let inner = CpuDevice::with_ops(cpu, ops)?;
        Ok(Arc::new(SimtDevice { inner, emulator, launcher, arch, exact: options.exact }))
    }

    /// The machine that is emulated.
    pub fn arch(&self) -> &Arch {
        &self.arch
    }

    /// What launches kernels, for tests of single ones.
    pub fn launcher(&self) -> &SimtLauncher {
        &self.launcher
    }

    /// Takes what was counted since the last call, by kernel. Streams must be synchronized.
    pub fn take_counters(&self) -> BTreeMap<&'static str, Counters> {
        std::mem::take(&mut self.emulator.counters.lock().unwrap_or_else(|e| e.into_inner()))
    }
}

/// Memory from the allocator, whose end a sanitizer guards.
struct Exact {
    base: *mut u8,
    layout: std::alloc::Layout,
}

// SAFETY: plain memory without thread affinity; access is governed by the contract of views.
unsafe impl Send for Exact {}
// SAFETY: as above.
unsafe impl Sync for Exact {}

// SAFETY: `base` is an allocation of `layout.size()` bytes until drop.
unsafe impl Mapping for Exact {
    fn base(&self) -> *mut u8 {
        self.base
    }
    fn bytes(&self) -> usize {
        self.layout.size()
    }
}

impl Drop for Exact {
    fn drop(&mut self) {
        if self.layout.size() > 0 {
            // SAFETY: allocated with this layout.
            unsafe { std::alloc::dealloc(self.base, self.layout) };
        }
    }
}

impl Device for SimtDevice {
    fn info(&self) -> DeviceInfo {
        DeviceInfo { kind: "simt", name: format!("emulated {}", self.arch.name), ..self.inner.info() }
    }

    fn alloc(&self, name: &str, bytes: usize, place: Place, category: Category) -> Result<Buffer> {
        if !self.exact {
            return self.inner.alloc(name, bytes, place, category);
        }
        let fail = |reason: &str| Error::OutOfMemory { what: name.into(), bytes, reason: reason.into() };
        let layout = std::alloc::Layout::from_size_align(bytes, 256).map_err(|_| fail("too large"))?;
        let base = if bytes == 0 {
            std::ptr::without_provenance_mut(256)
        } else {
            // SAFETY: the layout has a size.
            unsafe { std::alloc::alloc_zeroed(layout) }
        };
        if base.is_null() {
            return Err(fail("the allocator has none"));
        }
        self.inner.adopt(Buffer::from_mapping(name, place, Box::new(Exact { base, layout })), category)
    }

    fn adopt(&self, buffer: Buffer, category: Category) -> Result<Buffer> {
        self.inner.adopt(buffer, category)
    }

    fn stream(&self, name: &str) -> Result<Arc<dyn Stream>> {
        self.inner.stream(name)
    }

    fn event(&self) -> Result<Arc<dyn Event>> {
        self.inner.event()
    }

    fn memory(&self) -> Vec<(Place, Category, MemoryUse)> {
        self.inner.memory()
    }

    fn ops(&self) -> &dyn Ops {
        self.inner.ops()
    }
}
