//! How fast are operations on this machine? Dense products and the optimizer, measured through the contract of a device, beside
//! loops that only compute or only move the same bytes ([`crate::cpu::limits`]). `zlaunch bench` prints what is measured here.

mod drill;

pub use drill::{OpRate, Sizes, drill};

use crate::cpu::pool::Pool;
use crate::cpu::{CpuDevice, CpuOptions, Mode, limits};
use crate::{AdamW, Category, DType, Device, Error, OpShape, Place, Result, Stream, ViewMut, Weight, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The CPU device with operations that run in the calling thread, and a pool of as many threads for the limits.
pub struct Bench {
    device: Arc<CpuDevice>,
    stream: Arc<dyn Stream>,
    pool: Arc<Pool>,
}

/// Seconds of one call, several times.
#[derive(Clone, Debug, Default)]
pub struct Times(Vec<f64>);

impl Times {
    /// The median; 0 without any.
    pub fn median(&self) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        sorted.get(sorted.len() / 2).copied().unwrap_or(0.0)
    }

    /// Measured calls.
    pub fn runs(&self) -> usize {
        self.0.len()
    }

    fn add(&mut self, f: impl FnOnce() -> Result<()>) -> Result<()> {
        let begun = Instant::now();
        f()?;
        self.0.push(begun.elapsed().as_secs_f64());
        Ok(())
    }
}

/// Median seconds of the three products of a linear layer.
#[derive(Clone, Copy, Debug)]
pub struct Products {
    /// `y = x W^T`.
    pub forward: f64,
    /// `dx = dy W`.
    pub dgrad: f64,
    /// `dw = dy^T x`.
    pub wgrad: f64,
}

/// Median seconds of one update of all parameters, and of a loop that only moves the same bytes, taken in turns.
#[derive(Clone, Copy, Debug)]
pub struct Updates {
    /// AdamW on f32 weights, 28 bytes a parameter.
    pub plain: f64,
    /// Its limit.
    pub plain_limit: f64,
    /// AdamW with bf16 copy-out, 30 bytes a parameter.
    pub copy: f64,
    /// Its limit.
    pub copy_limit: f64,
}

impl Bench {
    /// With operations on `threads` threads.
    ///
    /// # Errors
    /// The system gives no threads.
    pub fn new(threads: usize) -> Result<Bench> {
        let device = CpuDevice::new(CpuOptions { threads, mode: Mode::Inline, ..CpuOptions::default() })?;
        let stream = device.stream("bench")?;
        Ok(Bench { device, stream, pool: Pool::new(threads)? })
    }

    /// Name of the processor and its instruction set.
    pub fn processor(&self) -> String {
        self.device.info().name
    }

    /// See [`limits::peak_flops`].
    pub fn peak_flops(&self, dtype: DType) -> f64 {
        limits::peak_flops(&self.pool, dtype)
    }

    fn tensor(&self, elems: usize, dtype: DType, value: f32) -> Result<ViewMut> {
        let bytes = elems.checked_mul(dtype.bytes());
        let bytes = bytes.ok_or_else(|| Error::Shape { op: "bench", what: format!("{elems} elements are more than can be addressed") })?;
        let view = self.device.alloc("bench", bytes, Place::Device, Category::Workspace)?.all(dtype)?;
        self.stream.fill(&view, value)?;
        Ok(view)
    }

    /// The products of a layer `[outputs, inputs]` over `tokens` rows. Each is run until `budget` is used up, at least twice (once to warm).
    ///
    /// # Errors
    /// Not enough memory.
    pub fn products(&self, dtype: DType, tokens: usize, inputs: usize, outputs: usize, budget: Duration) -> Result<Products> {
        let (ops, s) = (self.device.ops(), &*self.stream);
        let x = self.tensor(tokens * inputs, dtype, 0.02)?;
        let y = self.tensor(tokens * outputs, dtype, 0.01)?;
        let w = Weight::from(self.tensor(inputs * outputs, dtype, 0.03)?.view());
        let dw = self.tensor(inputs * outputs, DType::F32, 0.0)?;
        let shape = OpShape::LinearBackward { tokens, inputs, outputs };
        let work =
            self.device.alloc("workspace", ops.workspace_bytes(shape).max(64), Place::Device, Category::Workspace)?.all(DType::U8)?;
        let median = |f: &dyn Fn() -> Result<()>| -> Result<f64> {
            f()?;
            let (mut times, begun) = (Times::default(), Instant::now());
            while times.runs() == 0 || (begun.elapsed() < budget && times.runs() < 10_000) {
                times.add(f)?;
            }
            Ok(times.median())
        };
        let backward = |dx: Option<&ViewMut>, dw: Option<&ViewMut>| {
            let set = |v| (v, Write::Set);
            ops.linear_backward(dx.map(set), dw.map(set), None, &y.view(), Some(&x.view()), &w, tokens, inputs, outputs, &work, s)
        };
        let forward = median(&|| ops.linear(&y, Write::Set, &x.view(), &w, None, tokens, inputs, outputs, s))?;
        // From here on `y` is a gradient; what it holds does not matter, nor what becomes of `dx`.
        let dx = self.tensor(tokens * inputs, dtype, 0.0)?;
        Ok(Products { forward, dgrad: median(&|| backward(Some(&dx), None))?, wgrad: median(&|| backward(None, Some(&dw)))? })
    }

    /// AdamW over `elems` parameters, `rounds` times after one to warm.
    ///
    /// # Errors
    /// Not enough memory.
    pub fn updates(&self, elems: usize, rounds: usize) -> Result<Updates> {
        let (p, m, v) =
            (self.tensor(elems, DType::F32, 0.02)?, self.tensor(elems, DType::F32, 1e-3)?, self.tensor(elems, DType::F32, 1e-6)?);
        let (g, scale) = (self.tensor(elems, DType::F32, 1e-3)?, self.tensor(1, DType::F32, 0.5)?);
        // Even, since the limit writes it as half as many f32.
        let out = self.tensor(elems.next_multiple_of(2), DType::BF16, 0.0)?;
        let copy = out.slice(0, elems)?;
        let hp = |step| AdamW { lr: 1e-4, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01, step };
        let update = |copy: Option<&ViewMut>, step: usize| {
            self.device.ops().adamw(&p, &m, &v, copy, &g.view(), &scale.view(), hp(step as u64 + 1), &*self.stream)
        };
        let mut times: [Times; 4] = Default::default();
        for round in 0..=rounds {
            if round == 1 {
                times = Default::default();
            }
            times[0].add(|| update(None, round))?;
            times[1].add(|| limits::move_like_adamw(&self.pool, &p, &m, &v, None, &g.view()))?;
            times[2].add(|| update(Some(&copy), round))?;
            times[3].add(|| limits::move_like_adamw(&self.pool, &p, &m, &v, Some(&out), &g.view()))?;
        }
        let [plain, plain_limit, copy, copy_limit] = times.map(|t| t.median());
        Ok(Updates { plain, plain_limit, copy, copy_limit })
    }
}

/// Seconds that an operation costs beside its work: many tiny ones through a stream's thread.
///
/// # Errors
/// The system gives no threads.
pub fn task_secs() -> Result<f64> {
    const TASKS: u32 = 2000;
    let device = CpuDevice::new(CpuOptions { threads: 1, ..CpuOptions::default() })?;
    let stream = device.stream("tasks")?;
    let x = device.alloc("tasks", 64, Place::Device, Category::Workspace)?.all(DType::F32)?;
    let mut times = Times::default();
    for _ in 0..5 {
        times.add(|| {
            for _ in 0..TASKS {
                device.ops().scale(&x, 1.0, &*stream)?;
            }
            stream.sync()
        })?;
    }
    Ok(times.median() / f64::from(TASKS))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_measurement_runs() {
        let bench = Bench::new(2).unwrap();
        let p = bench.products(DType::BF16, 3, 16, 8, Duration::ZERO).unwrap();
        let u = bench.updates(1001, 1).unwrap();
        assert!([p.forward, p.dgrad, p.wgrad, u.plain, u.plain_limit, u.copy, u.copy_limit].iter().all(|s| *s > 0.0));
        assert!(bench.tensor(usize::MAX, DType::F32, 0.0).is_err());
        assert!(task_secs().unwrap() > 0.0);
    }
}
