//! The first GPU of this machine as a target of the bench.

use super::Target;
use super::checks::Host;
use crate::shapes::{Fill, Memory};
use std::sync::Arc;
use std::time::Duration;
use zrt_kernels::cpu::Mode;
use zrt_kernels::gpu::driver::{Facts, Libraries, Vendor, find};
use zrt_kernels::gpu::{CodeOptions, GpuDevice, GpuOptions, workspace_bytes};
use zrt_kernels::{DType, OpShape, Ops, Result, Stream, View, ViewMut};

/// A GPU.
pub struct Gpu {
    device: Arc<GpuDevice>,
    host: Host,
}

impl Gpu {
    /// The first GPU; `None`: there is none that a driver speaks for.
    ///
    /// # Errors
    /// A driver that fails.
    pub fn find() -> Result<Option<Gpu>> {
        for vendor in Vendor::ALL {
            let Some(found) = find(vendor, &Libraries::default())? else { continue };
            let options = GpuOptions { ordinal: 0, mode: Mode::Threaded, trace: false, host_threads: 1, code: CodeOptions::default() };
            let device = GpuDevice::open(found, options)?;
            return Ok(Some(Gpu { host: Host::new(device.clone())?, device }));
        }
        Ok(None)
    }

    /// The product's own device.
    pub fn device(&self) -> &GpuDevice {
        &self.device
    }

    /// What it is.
    pub fn facts(&self) -> &Facts {
        self.device.driver().facts()
    }

    /// Seconds of the device's clock that `runs` calls of `run` take, one behind the other.
    ///
    /// # Errors
    /// Of `run`, or of the device.
    pub fn secs(&self, runs: u32, run: &dyn Fn() -> Result<()>) -> Result<f64> {
        let from = self.device.mark(self.stream())?;
        (0..runs).try_for_each(|_| run())?;
        let to = self.device.mark(self.stream())?;
        self.stream().sync()?;
        Ok(from.ns_to(&to)? as f64 / 1e9)
    }
}

impl Memory for Gpu {
    fn tensor(&self, elems: usize, dtype: DType, fill: Fill) -> Result<ViewMut> {
        self.host.tensor(elems, dtype, fill)
    }

    fn workspace_bytes(&self, shape: OpShape) -> usize {
        workspace_bytes(&self.facts().arch, shape)
    }
}

impl Target for Gpu {
    fn ops(&self) -> &dyn Ops {
        self.host.ops()
    }

    fn stream(&self) -> &dyn Stream {
        self.host.stream()
    }

    fn read(&self, view: &View) -> Result<Vec<u8>> {
        self.host.read(view)
    }
}

/// How long the host takes to enqueue and issue one operation: the mean of many small ones, in nanoseconds of the host's clock.
///
/// # Errors
/// The device's.
pub fn overhead_ns(device: &GpuDevice, calls: u32) -> Result<f64> {
    use zrt_kernels::{Category, Device, Place};
    let stream = device.stream("overhead")?;
    let x = device.alloc("overhead", 4096, Place::Device, Category::Workspace)?.all(DType::F32)?;
    let run = |n: u32| -> Result<Duration> {
        let begun = std::time::Instant::now();
        (0..n).try_for_each(|_| device.ops().scale(&x, 1.0, &*stream))?;
        stream.sync()?;
        Ok(begun.elapsed())
    };
    run(calls / 10 + 1)?;
    Ok(run(calls)?.as_nanos() as f64 / f64::from(calls.max(1)))
}
