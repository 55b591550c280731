//! How does a launch run on the host? As a task of a stream: the addresses that the operation declared become the ranges that the
//! emulator allows, the kernel's entry point is called for the whole grid, and what it counted is kept by operation.
#![allow(unsafe_code)]

use crate::build::Kernels;
use libloading::Library;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_void};
use std::sync::{Arc, Mutex};
use zrt_kernels::gpu::launch::{Address, Arch, Kernel, Launch, Launcher, Work};
use zrt_kernels::gpu::table;
use zrt_kernels::{Error, HostTask, Result, Stream, View};

/// In which order threads, warps and blocks run, between the points where they must wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// From the first to the last.
    #[default]
    Forward,
    /// From the last to the first.
    Reverse,
    /// At random, a function of the seed.
    Random(u64),
}

/// What launches did. Sectors are 32 bytes of device memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Counters {
    /// Bytes that threads read from device memory.
    pub read_bytes: u64,
    /// Bytes that threads wrote to it.
    pub write_bytes: u64,
    /// Sectors read, once per access of a warp: traffic of the first cache.
    pub read_sectors: u64,
    /// Sectors written, once per access of a warp.
    pub write_sectors: u64,
    /// Sectors that a launch read at all before it wrote them: what comes from memory where caches hold the rest.
    pub distinct_reads: u64,
    /// Sectors that a launch wrote at all.
    pub distinct_writes: u64,
    /// Accesses of warps to shared memory.
    pub shared_accesses: u64,
    /// Cycles of the banks that they took.
    pub shared_cycles: u64,
    /// Most cycles of one phase of an access; 1 is free of conflicts.
    pub worst_ways: u64,
    /// Matrix instructions of warps.
    pub matrix: u64,
    /// Shuffles of warps.
    pub shuffles: u64,
    /// Barriers of blocks.
    pub barriers: u64,
    /// Blocks.
    pub blocks: u64,
}

impl Counters {
    /// Adds what others did.
    pub fn add(&mut self, c: &Counters) {
        let worst = self.worst_ways.max(c.worst_ways);
        let (to, from): (&mut [u64], &[u64]) =
            (bytemuck::cast_slice_mut(std::slice::from_mut(self)), bytemuck::cast_slice(std::slice::from_ref(c)));
        to.iter_mut().zip(from).for_each(|(t, f)| *t += f);
        self.worst_ways = worst;
    }
}

/// Bytes of memory that a launch may touch.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Range {
    begin: u64,
    end: u64,
    writable: u32,
    unused: u32,
}

impl Range {
    /// From `begin` up to `end`.
    pub fn new(begin: u64, end: u64, writable: bool) -> Range {
        Range { begin, end, writable: writable.into(), unused: 0 }
    }
}

/// `emu::Run` of emu_core.h.
#[repr(C)]
struct Run {
    grid: [u32; 3],
    threads: u32,
    shared_bytes: u32,
    order: u32,
    workers: u32,
    count: u32,
    seed: u64,
    ranges: *const Range,
    n_ranges: u32,
    error_bytes: u32,
    sorted: u32,
    unused: u32,
    counters: *mut Counters,
    error: *mut c_char,
}

type Entry = unsafe extern "C" fn(*const c_void, *const Run) -> c_int;
type Bytes = unsafe extern "C" fn() -> u32;

/// What is shared by an emulated device and its operations.
pub struct Emulator {
    pub(crate) kernels: Arc<Kernels>,
    pub(crate) order: Order,
    pub(crate) workers: u32,
    pub(crate) count: bool,
    /// By kernel.
    pub(crate) counters: Mutex<BTreeMap<&'static str, Counters>>,
}

/// Kernels that only tests launch: five addresses each.
const TEST_KERNELS: &[Kernel] = &[
    Kernel::new::<[u64; 5]>("fragments_f32_64", "fragments.cu"),
    Kernel::new::<[u64; 5]>("fragments_bf16_64", "fragments.cu"),
    Kernel::new::<[u64; 5]>("fragments_f32_24", "fragments.cu"),
    Kernel::new::<[u64; 5]>("fragments_bf16_96", "fragments.cu"),
    Kernel::new::<[u64; 5]>("loads_16", "fragments.cu"),
    Kernel::new::<[u64; 5]>("loads_32", "fragments.cu"),
    Kernel::new::<[u64; 5]>("loads_40", "fragments.cu"),
    Kernel::new::<[u64; 5]>("loads_64", "fragments.cu"),
    Kernel::new::<[u64; 5]>("loads_96", "fragments.cu"),
    Kernel::new::<[u64; 5]>("loads_128", "fragments.cu"),
    Kernel::new::<[u64; 5]>("loads_256", "fragments.cu"),
];

/// Launches on the emulator.
#[derive(Clone)]
pub struct SimtLauncher {
    arch: Arch,
    emulator: Arc<Emulator>,
}

impl SimtLauncher {
    pub(crate) fn new(arch: Arch, emulator: Arc<Emulator>) -> SimtLauncher {
        SimtLauncher { arch, emulator }
    }
}

/// A kernel, compiled for the host and loaded.
#[derive(Clone)]
pub struct Prepared {
    kernel: &'static Kernel,
    entry: Entry,
    // Behind the function that it owns.
    _library: Arc<Library>,
}

/// Where and how large a launch is.
#[derive(Clone, Copy, Debug)]
pub struct Extent {
    /// Blocks in three dimensions.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Bytes of dynamic shared memory.
    pub shared_bytes: u32,
}

impl Emulator {
    /// Launches of these kernels, in order, without counters.
    pub fn new(kernels: Arc<Kernels>, workers: u32) -> Emulator {
        Emulator { kernels, order: Order::Forward, workers, count: false, counters: Mutex::default() }
    }

    /// The kernel of this name, which is compiled if nobody did so before.
    ///
    /// # Errors
    /// No such kernel, no compiler, or what the compiler says.
    pub fn prepare(&self, name: &str) -> std::result::Result<Prepared, String> {
        let kernel = table::kernel(name).or_else(|| TEST_KERNELS.iter().find(|k| k.name == name));
        let kernel = kernel.ok_or_else(|| format!("{name} is in no table"))?;
        let library = self.kernels.library(kernel.source)?;
        let symbol = |prefix: &str| format!("{prefix}_{}", kernel.name);
        let missing = |e: libloading::Error| format!("{} in {}: {e}", kernel.name, kernel.source);
        // SAFETY: the emulator's macro gives both symbols these types.
        let (entry, bytes) = unsafe {
            let entry = library.get::<Entry>(symbol("emu_launch").as_bytes()).map_err(missing)?;
            (*entry, *library.get::<Bytes>(symbol("emu_bytes").as_bytes()).map_err(missing)?)
        };
        // SAFETY: a function without arguments.
        let expected = unsafe { bytes() } as usize;
        if kernel.params_bytes != expected {
            return Err(format!("{} takes {expected} bytes of parameters, the table says {}", kernel.name, kernel.params_bytes));
        }
        Ok(Prepared { kernel, entry, _library: library })
    }

    /// Runs a kernel with these parameters, a whole number of words. `ranges` are disjoint and ascend.
    ///
    /// # Errors
    /// What the kernel did wrong.
    pub fn run(&self, kernel: &Prepared, extent: Extent, params: &[u64], ranges: &[Range]) -> std::result::Result<(), String> {
        self.execute(kernel, extent, params, ranges, true)
    }

    /// Runs one launch. `cell` is the fault cell.
    fn launch(&self, launch: &Launch, mut ranges: Vec<Range>, cell: &u64) -> std::result::Result<(), String> {
        let prepared = self.prepare(launch.kernel)?;
        // Aligned as the kernel's struct.
        let mut params = vec![0u64; launch.params.len().div_ceil(8)];
        bytemuck::cast_slice_mut(&mut params)[..launch.params.len()].copy_from_slice(&launch.params);
        if let Some(at) = launch.fault_at {
            let address = std::ptr::from_ref(cell) as u64;
            bytemuck::cast_slice_mut::<u64, u8>(&mut params)[at..at + 8].copy_from_slice(&address.to_ne_bytes());
        }
        let mut data = Vec::new();
        if let Some((at, bytes)) = &launch.data {
            data.resize(bytes.len().div_ceil(8), 0u64);
            bytemuck::cast_slice_mut(&mut data)[..bytes.len()].copy_from_slice(bytes);
            let begin = data.as_ptr() as u64;
            bytemuck::cast_slice_mut::<u64, u8>(&mut params)[*at..at + 8].copy_from_slice(&begin.to_ne_bytes());
            ranges.push(Range::new(begin, begin + bytes.len() as u64, false));
        }
        let Launch { grid, threads, shared_bytes, .. } = *launch;
        let bytes = launch.params.len();
        if bytes != prepared.kernel.params_bytes {
            return Err(format!("{} takes {} bytes of parameters, got {bytes}", launch.kernel, prepared.kernel.params_bytes));
        }
        self.execute(&prepared, Extent { grid, threads, shared_bytes }, &params, &ranges, false)
    }

    fn execute(
        &self,
        kernel: &Prepared,
        extent: Extent,
        params: &[u64],
        ranges: &[Range],
        sorted: bool,
    ) -> std::result::Result<(), String> {
        let Prepared { kernel, entry, .. } = kernel;
        if params.len() != kernel.params_bytes.div_ceil(8) {
            return Err(format!("{} takes {} bytes of parameters, got {} words", kernel.name, kernel.params_bytes, params.len()));
        }
        let (order, seed) = match self.order {
            Order::Forward => (0, 0),
            Order::Reverse => (1, 0),
            Order::Random(seed) => (2, seed),
        };
        let mut counters = Counters::default();
        let mut error = vec![0u8; 1024];
        let run = Run {
            grid: extent.grid,
            threads: extent.threads,
            shared_bytes: extent.shared_bytes,
            order,
            workers: self.workers,
            count: self.count.into(),
            seed,
            ranges: ranges.as_ptr(),
            n_ranges: ranges.len() as u32,
            error_bytes: error.len() as u32,
            sorted: sorted.into(),
            unused: 0,
            counters: &mut counters,
            error: error.as_mut_ptr().cast(),
        };
        // SAFETY: the parameters have the kernel's size; its accesses are checked against the ranges, which the task holds.
        let failed = unsafe { entry(params.as_ptr().cast(), &run) } != 0;
        self.counters.lock().unwrap_or_else(|e| e.into_inner()).entry(kernel.name).or_default().add(&counters);
        if failed {
            let end = error.iter().position(|b| *b == 0).unwrap_or(error.len());
            return Err(String::from_utf8_lossy(&error[..end]).into_owned());
        }
        Ok(())
    }
}

fn range(view: &View, writable: bool) -> Option<Range> {
    let begin = view.host_ptr()? as u64;
    Some(Range::new(begin, begin + view.bytes() as u64, writable))
}

impl Launcher for SimtLauncher {
    fn arch(&self) -> &Arch {
        &self.arch
    }

    fn address(&self, op: &'static str, view: &View) -> Result<Address> {
        view.host_ptr().map(|p| Address(p as u64)).ok_or(Error::NotHost { op })
    }

    fn run(&self, work: Work, s: &dyn Stream) -> Result<()> {
        let Work { op, launches, reads, writes, fault } = work;
        let emulator = self.emulator.clone();
        let held = (reads.clone(), writes.clone());
        let run = Box::new(move || {
            let (reads, writes) = &held;
            let cell = u64::MAX;
            let ranges = writes.iter().map(|v| range(v, true)).chain(reads.iter().map(|v| range(v, false)));
            let mut ranges: Vec<Range> = ranges.flatten().collect();
            let at = std::ptr::from_ref(&cell) as u64;
            ranges.push(Range::new(at, at + 8, true));
            for launch in &launches {
                emulator.launch(launch, ranges.clone(), &cell).map_err(|what| Error::Shape { op, what })?;
                if let Some(fault) = &fault {
                    // SAFETY: a number on this stack; kernels changed it behind the compiler's back.
                    fault.check(op, unsafe { std::ptr::read_volatile(&cell) })?;
                }
            }
            Ok(())
        });
        s.host(HostTask { name: Cow::Borrowed(op), reads, writes, run })
    }
}
