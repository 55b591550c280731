//! The GPU as a device: memory, streams and operations over a vendor's driver. What is NVIDIA's and what is AMD's ends in [`super::driver`].
//!
//! Operands in host memory (an optimizer state at home on the host) are worked on by the host: [`GpuOps`] gives them to the operations of
//! the CPU device, which run in the stream's order.
#![allow(unsafe_code)]

use super::code::{Code, CodeOptions};
use super::driver::blas::Blas;
use super::driver::{Driver, Found, RawEvent, RawStream, Vendor};
use super::event::{GpuEvent, Pause, lock};
use super::launch::{Address, Arch, Launcher, Work};
use super::memory::{LOCKED, OnDevice, Pinned};
use super::stream::{Base, GpuStream, Setup};
use super::{GpuOps, device_name};
use crate::cpu::heap::{Ledger, Pages};
use crate::cpu::pool::Pool;
use crate::cpu::trace::{Trace, TraceEvent, now_ns};
use crate::cpu::{CpuOps, Mode};
use crate::memory::{Buffer, Category, Mapping, MemoryUse, Place};
use crate::{Device, DeviceInfo, Error, Event, NativeTask, Ops, Result, Stream, View};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

/// How to make a [`GpuDevice`].
#[derive(Clone, Debug)]
pub struct GpuOptions {
    /// Which device of the host.
    pub ordinal: usize,
    /// As on the CPU: threads that issue, inline (each operation is waited for), or chaos.
    pub mode: Mode,
    /// Collect a timeline, see [`GpuDevice::trace_events`].
    pub trace: bool,
    /// Threads of operations on host memory.
    pub host_threads: usize,
    /// Where compiled code is kept, and the vendor's libraries.
    pub code: CodeOptions,
}

/// A GPU.
pub struct GpuDevice {
    driver: Arc<Driver>,
    setup: Setup,
    /// For memory that is set when it is made.
    raw: RawStream,
    ledger: Arc<Ledger>,
    ops: GpuOps<GpuLauncher>,
    streams_made: AtomicU64,
    notes: Mutex<Vec<String>>,
    threads: usize,
}

/// See [`GpuDevice::mark`].
pub struct Mark(Arc<OnceLock<RawEvent>>);

impl Mark {
    /// Nanoseconds to a later mark; the stream was synchronized behind both.
    ///
    /// # Errors
    /// The driver's, or one of the two was not passed.
    pub fn ns_to(&self, later: &Mark) -> Result<u64> {
        match (self.0.get(), later.0.get()) {
            (Some(from), Some(to)) => from.ns_to(to),
            _ => Err(Error::Shape { op: "mark", what: "not passed yet".into() }),
        }
    }
}

/// Puts the kernels of operations on streams.
#[derive(Clone)]
pub struct GpuLauncher {
    arch: Arch,
    blas: bool,
}

impl GpuLauncher {
    pub(super) fn of(setup: &Setup) -> GpuLauncher {
        GpuLauncher { arch: setup.driver.facts().arch.clone(), blas: setup.blas.is_some() }
    }
}

impl Launcher for GpuLauncher {
    fn arch(&self) -> &Arch {
        &self.arch
    }

    fn has_blas(&self) -> bool {
        self.blas
    }

    fn address(&self, op: &'static str, view: &View) -> Result<Address> {
        match (view.place(), view.address()) {
            (Place::Device, Some(address)) => Ok(Address(address)),
            _ => Err(Error::NotHost { op }),
        }
    }

    fn run(&self, work: Work, s: &dyn Stream) -> Result<()> {
        let stream = s.as_any().and_then(|s| s.downcast_ref::<GpuStream>());
        let missing = || Error::NotNative { stream: s.name().to_string(), task: work.op.to_string() };
        stream.ok_or_else(missing)?.launch(work)
    }
}

impl GpuDevice {
    /// Takes a device of `found` into use.
    ///
    /// # Errors
    /// No such device, or the driver's errors.
    pub fn open(found: Found, options: GpuOptions) -> Result<Arc<GpuDevice>> {
        let driver = found.open(options.ordinal)?;
        let chaos = if let Mode::Chaos { seed } = options.mode { Some(seed) } else { None };
        let mut notes = Vec::new();
        let blas = match Blas::open(driver.vendor(), options.code.libraries.blas.as_deref())? {
            Some(blas) => Some(Arc::new(blas)),
            None => {
                let name = if driver.vendor() == Vendor::Nvidia { "cuBLASLt" } else { "hipBLASLt" };
                notes.push(format!("{name} was not found: dense products run in our own kernel, which is slower; install it or name it in [device.libraries]"));
                None
            }
        };
        let mut setup = Setup {
            blas,
            code: Arc::new(Code::new(driver.clone(), options.code)),
            driver: driver.clone(),
            threaded: options.mode != Mode::Inline,
            chaos,
            trace: None,
            streams: Arc::default(),
        };
        let raw = driver.stream("setup")?;
        if options.trace {
            let event = driver.record(raw, true)?;
            await_event(&event)?;
            setup.trace = Some(Arc::new(Base { trace: Trace::default(), event, at_ns: now_ns() }));
        }
        let host = CpuOps::new(Pool::new(options.host_threads)?);
        Ok(Arc::new(GpuDevice {
            raw,
            ops: GpuOps::with_host(GpuLauncher::of(&setup), Box::new(host)),
            ledger: Arc::default(),
            streams_made: AtomicU64::new(0),
            notes: Mutex::new(notes),
            threads: options.host_threads,
            driver,
            setup,
        }))
    }

    /// The driver.
    pub fn driver(&self) -> &Arc<Driver> {
        &self.driver
    }

    /// A moment of the device's clock, behind what is on `s` so far; for benches.
    ///
    /// # Errors
    /// A stream of another device.
    pub fn mark(&self, s: &dyn Stream) -> Result<Mark> {
        let (cell, driver) = (Arc::new(OnceLock::new()), self.driver.clone());
        let set = cell.clone();
        let run = Box::new(move |native| {
            let _ = set.set(driver.record(RawStream::of(native), true)?);
            Ok(())
        });
        s.native(NativeTask { name: "mark".into(), reads: Vec::new(), writes: Vec::new(), run })?;
        Ok(Mark(cell))
    }

    /// Takes the timeline collected since the last call; empty unless [`GpuOptions::trace`] was set.
    pub fn trace_events(&self) -> Vec<TraceEvent> {
        self.setup.trace.as_ref().map(|base| base.trace.take()).unwrap_or_default()
    }

    /// Takes what a user should know: a library that is missing, host memory that could not be locked.
    pub fn take_notes(&self) -> Vec<String> {
        std::mem::take(&mut lock(&self.notes))
    }

    fn device_memory(&self, name: &str, bytes: usize) -> Result<OnDevice> {
        let memory = OnDevice::new(&self.driver, name, bytes)?;
        let value = if self.setup.chaos.is_some() { 0xFF } else { 0 };
        // SAFETY: the allocation just made.
        unsafe { self.driver.set_bytes(self.raw, memory.address(), value, bytes)? };
        // Streams do not wait for this one.
        await_event(&self.driver.record(self.raw, false)?)?;
        Ok(memory)
    }
}

/// Floating-point operations per second of dense bf16 products by the data sheet of the usual part of this machine (MI355X of gfx950,
/// one die of an MI250X of gfx90a), in proportion to the units that this one has; 0: not known.
fn peak_flops_bf16(arch: &Arch) -> f64 {
    let usual = match arch.name.as_str() {
        "sm_80" => 312e12,
        "sm_90" => 989e12,
        "gfx90a" => 191.5e12,
        "gfx942" => 1307e12,
        "gfx950" => 2516e12,
        _ => return 0.0,
    };
    Arch::known(&arch.name).map_or(usual, |known| usual * f64::from(arch.units) / f64::from(known.units))
}

/// Waits for an event of the device's own queue, where nothing waits for anything else.
fn await_event(event: &RawEvent) -> Result<()> {
    let mut pause = Pause::default();
    while !event.passed()? {
        pause.once();
    }
    Ok(())
}

impl Device for GpuDevice {
    fn info(&self) -> DeviceInfo {
        let facts = self.driver.facts();
        DeviceInfo {
            kind: self.driver.vendor().kind(),
            name: device_name(facts),
            threads: self.threads,
            memory_bytes: facts.memory_bytes,
            peak_flops_f32: 0.0,
            peak_flops_bf16: peak_flops_bf16(&facts.arch),
        }
    }

    fn alloc(&self, name: &str, bytes: usize, place: Place, category: Category) -> Result<Buffer> {
        let poison = self.setup.chaos.is_some();
        let mapping: Box<dyn Mapping> = match place {
            Place::Device => Box::new(self.device_memory(name, bytes)?),
            Place::Pageable => Box::new(Pages::map(name, bytes, poison)?),
            Place::Pinned => {
                let (memory, note) = Pinned::new(&self.driver, name, bytes, poison)?;
                // One is enough to act on.
                let mut notes = lock(&self.notes);
                if !notes.iter().any(|n| n.contains(LOCKED)) {
                    notes.extend(note);
                }
                Box::new(memory)
            }
        };
        Ok(Buffer::from_mapping(name, place, self.ledger.count(mapping, place, category)))
    }

    fn adopt(&self, buffer: Buffer, category: Category) -> Result<Buffer> {
        Ok(self.ledger.adopt(buffer, category))
    }

    fn stream(&self, name: &str) -> Result<Arc<dyn Stream>> {
        let number = self.streams_made.fetch_add(1, Ordering::Relaxed);
        // Any odd factor keeps the seeds of a device's streams apart.
        let chaos = self.setup.chaos.map(|seed| seed ^ number.wrapping_mul(0xA076_1D64_78BD_642F));
        Ok(Arc::new(GpuStream::new(name, Setup { chaos, ..self.setup.clone() })?))
    }

    fn event(&self) -> Result<Arc<dyn Event>> {
        Ok(Arc::new(GpuEvent::default()))
    }

    fn memory(&self) -> Vec<(Place, Category, MemoryUse)> {
        self.ledger.report()
    }

    fn ops(&self) -> &dyn Ops {
        &self.ops
    }
}

impl Drop for GpuDevice {
    fn drop(&mut self) {
        if self.driver.enter().is_ok() {
            // Nobody is left to tell.
            let _ = self.driver.end_stream(self.raw);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_fewer_units_have_their_own_peak() {
        let of = |name: &str, units: u32| {
            let known = Arch::known(name).expect("a known machine");
            peak_flops_bf16(&Arch { units, ..known }) / 1e12
        };
        // MI300X, MI300A (981 by its data sheet), MI210 (181).
        assert_eq!(of("gfx942", 304), 1307.0);
        assert!((of("gfx942", 228) - 981.0).abs() < 1.0 && (of("gfx90a", 104) - 181.0).abs() < 1.0);
        let unknown = Arch { name: "gfx1100".into(), ..Arch::known("gfx942").expect("a known machine") };
        assert_eq!(peak_flops_bf16(&unknown), 0.0);
    }
}
