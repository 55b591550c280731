//! What do tests of kernels share? A [`Rig`] to call operations with, the same on the CPU and on emulated GPUs; [`on_all`], which
//! runs a case on both lane counts in three orders of threads and demands the same bits; and comparison with `f64` references.

use crate::{Order, SimtDevice, SimtOptions, build};
use half::bf16;
use std::sync::Arc;
use std::time::Duration;
use zrt_kernels::cpu::{CpuDevice, CpuOptions, Mode};
use zrt_kernels::philox::{normal_pair, philox4x32};
use zrt_kernels::{Category, DType, Device, OpShape, Ops, Place, Result, Stream, View, ViewMut};

/// A deadline that only a hang misses: an emulated kernel takes seconds at most, on a busy machine some more.
const DEADLINE: Duration = Duration::from_secs(300);

/// The machines that cases run on: 32 and 64 lanes, and the one with wider matrix instructions.
pub const ARCHS: [&str; 3] = ["sm_90", "gfx942", "gfx950"];

/// Whether kernels can be compiled here; says "not run" otherwise.
pub fn can_run() -> bool {
    let found = build::compiler().is_some();
    if !found {
        println!("not run: no C++ compiler (g++ or clang++) on PATH");
    }
    found
}

/// A device, a stream, and operands.
pub struct Rig {
    device: Arc<dyn Device>,
    stream: Arc<dyn Stream>,
    skew: usize,
}

impl Rig {
    /// A rig on this device.
    pub fn new(device: Arc<dyn Device>) -> Rig {
        let stream = device.stream("test").expect("a stream");
        Rig { device, stream, skew: 0 }
    }

    /// A rig on the CPU.
    pub fn cpu() -> Rig {
        let options = CpuOptions { threads: 1, mode: Mode::Threaded, track: false, trace: false };
        Rig::new(CpuDevice::new(options).expect("a CPU device"))
    }

    /// The same, with operands that begin so many elements behind a multiple of 256 bytes.
    pub fn skewed(&self, elems: usize) -> Rig {
        Rig { device: self.device.clone(), stream: self.stream.clone(), skew: elems }
    }

    /// The operations.
    pub fn ops(&self) -> &dyn Ops {
        self.device.ops()
    }

    /// The stream that operations go to.
    pub fn stream(&self) -> &dyn Stream {
        &*self.stream
    }

    /// The device.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    fn write(&self, bytes: Vec<u8>, dtype: DType) -> ViewMut {
        let offset = self.skew * dtype.bytes();
        let buffer = self.device.alloc("operand", bytes.len() + offset, Place::Device, Category::Workspace).expect("memory");
        let view = buffer.view_mut(dtype, offset, bytes.len() / dtype.bytes()).expect("a view");
        let source = Box::new(move |to: &mut [u8]| {
            to.copy_from_slice(&bytes);
            Ok(())
        });
        // A stream that has failed refuses it, and says why when results are read.
        let _ = self.stream.write(&view, "test data", source);
        view
    }

    /// An operand of its own memory, exactly as long.
    pub fn tensor(&self, values: &[f32], dtype: DType) -> ViewMut {
        let bytes = match dtype {
            DType::BF16 => values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
            _ => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        };
        self.write(bytes, dtype)
    }

    /// An operand of i32.
    pub fn ints(&self, values: &[i32]) -> ViewMut {
        self.write(values.iter().flat_map(|v| v.to_le_bytes()).collect(), DType::I32)
    }

    /// An operand of NaN, so that what is not written shows.
    pub fn empty(&self, elems: usize, dtype: DType) -> ViewMut {
        self.write(vec![0xff; elems * dtype.bytes()], dtype)
    }

    /// A workspace of exactly the bytes asked for, all 0xff.
    pub fn workspace(&self, shape: OpShape) -> ViewMut {
        self.write(vec![0xff; self.ops().workspace_bytes(shape)], DType::U8)
    }

    /// The elements, once all work has run, as f32. Panics with the stream's error.
    pub fn read(&self, view: &View) -> Vec<f32> {
        self.try_read(view).unwrap_or_else(|e| panic!("{e}"))
    }

    /// The elements, or the stream's error.
    pub fn try_read(&self, view: &View) -> Result<Vec<f32>> {
        let bytes = self.stream.read(view)?.bytes(DEADLINE)?;
        Ok(match view.dtype() {
            DType::BF16 => bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
            DType::I32 => bytes.chunks_exact(4).map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]]) as f32).collect(),
            _ => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
        })
    }
}

/// What a case gave on one emulated machine.
pub struct OnGpu {
    /// The machine.
    pub arch: &'static str,
    /// The case's outputs.
    pub outputs: Vec<Vec<f32>>,
}

/// Runs a case on the CPU and on all emulated machines, forward, reverse, at random twice. On one machine all bits must agree.
pub fn on_all(case: impl Fn(&Rig) -> Vec<Vec<f32>>) -> (Vec<Vec<f32>>, Vec<OnGpu>) {
    on(&ARCHS, case)
}

/// As [`on_all`], on some machines: those of one lane count each are enough where there are no matrix instructions.
pub fn on(archs: &[&'static str], case: impl Fn(&Rig) -> Vec<Vec<f32>>) -> (Vec<Vec<f32>>, Vec<OnGpu>) {
    let orders = [Order::Forward, Order::Reverse, Order::Random(7), Order::Random(7)];
    let gpus = archs.iter().map(|arch| {
        let mut first: Option<Vec<Vec<f32>>> = None;
        for order in orders {
            let device = SimtDevice::new(SimtOptions { arch, order, exact: true, ..Default::default() });
            let outputs = case(&Rig::new(device.unwrap_or_else(|e| panic!("{e}"))));
            if let Some(first) = &first {
                for (i, (a, b)) in first.iter().zip(&outputs).enumerate() {
                    let differ = a.iter().zip(b).position(|(a, b)| a.to_bits() != b.to_bits());
                    assert!(
                        a.len() == b.len() && differ.is_none(),
                        "{arch}, {order:?}: output {i} differs from the first order's at {differ:?}"
                    );
                }
            } else {
                first = Some(outputs);
            }
        }
        OnGpu { arch, outputs: first.unwrap_or_default() }
    });
    let gpus = gpus.collect();
    (case(&Rig::cpu()), gpus)
}

/// Standard normal values, rounded to the type that will store them.
pub fn normal(elems: usize, dtype: DType, seed: u32) -> Vec<f32> {
    let value = |i: usize| {
        let w = philox4x32([i as u32, 0, 0, 0], [seed, 1]);
        let x = normal_pair(w[0], w[1]).0;
        if dtype == DType::BF16 { bf16::from_f32(x).to_f32() } else { x }
    };
    (0..elems).map(value).collect()
}

/// As f64.
pub fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|x| f64::from(*x)).collect()
}

/// `|got - want|` in L2 over `|want|`.
pub fn distance(got: &[f32], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let d: f64 = got.iter().zip(want).map(|(g, w)| (f64::from(*g) - w).powi(2)).sum();
    let n: f64 = want.iter().map(|w| w * w).sum();
    if n == 0.0 { d.sqrt() } else { (d / n).sqrt() }
}

/// Panics unless the distance is at most `tolerance`, and each element is off by at most 16 times that of its size or the mean size.
pub fn assert_close(what: &str, got: &[f32], want: &[f64], tolerance: f64) {
    let d = distance(got, want);
    assert!(d <= tolerance, "{what}: off by {d:e}, at most {tolerance:e}");
    let mean = (want.iter().map(|w| w * w).sum::<f64>() / want.len().max(1) as f64).sqrt();
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        let (off, most) = ((f64::from(*g) - w).abs(), 16.0 * tolerance * (w.abs() + mean));
        assert!(off <= most, "{what}: element {i} is {g}, expected {w}: off by {off:e}, at most {most:e}");
    }
}

/// Relative error that one rounding to the storage type makes at most: half a unit in the last place.
pub fn rounding(dtype: DType) -> f64 {
    if dtype == DType::BF16 { 1.0 / 256.0 } else { 1e-6 }
}

/// Panics unless both have the same bits.
pub fn assert_bits(what: &str, got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len(), "{what}: length");
    if let Some(i) = got.iter().zip(want).position(|(g, w)| g.to_bits() != w.to_bits()) {
        panic!("{what}: element {i} is {} ({:08x}), expected {} ({:08x})", got[i], got[i].to_bits(), want[i], want[i].to_bits());
    }
}
