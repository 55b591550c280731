//! How long does each operation of a training step take on this machine? Every operation is called as a decoder block calls it, one
//! after the other and round by round, so that caches hold what they would hold in a step; what it must compute and move is what the
//! simulated device counts for the very same call.

use super::Times;
use crate::cpu::{CpuDevice, CpuOptions, Mode};
use crate::ops::SUM_SQUARES_NODES;
use crate::sim::{SimDevice, SimOptions};
use crate::{
    AdamW, Attention, Category, DType, Device, LoraBackward, LoraForward, OpShape, Ops, Place, Result, Stream, ViewMut, Weight, Write,
};
use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};

/// Sizes of the block whose operations are called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// `N`.
    pub tokens: usize,
    /// Documents of equal length that the tokens are; divides `tokens`.
    pub documents: usize,
    /// `C`.
    pub hidden: usize,
    /// `H`.
    pub heads: usize,
    /// `K`.
    pub kv_heads: usize,
    /// `D`.
    pub head_dim: usize,
    /// `F`.
    pub mlp: usize,
    /// `V`.
    pub vocab: usize,
    /// `R`.
    pub rank: usize,
    /// Type of activations and weights.
    pub dtype: DType,
}

/// One call of an operation.
#[derive(Clone, Debug, PartialEq)]
pub struct OpRate {
    /// Its name in [`Ops`]; `linear_backward` is told apart as `linear_dgrad` and `linear_wgrad`, `copy` is [`Stream::copy`].
    pub op: &'static str,
    /// Type of activations and weights.
    pub dtype: DType,
    /// Of products `[N, O, I]` of their layer, in whichever direction. Elsewhere `[elements, 1, 1]`.
    pub shape: [usize; 3],
    /// Floating-point operations as [`crate::sim::OpCount`] counts them.
    pub flops: f64,
    /// Bytes of operands as [`crate::sim::OpCount`] counts them.
    pub bytes: f64,
    /// Median seconds; of several ranks at once, the mean of theirs.
    pub secs: f64,
}

type Run = Box<dyn Fn(&dyn Ops, &dyn Stream) -> Result<()>>;

struct Call {
    op: &'static str,
    shape: [usize; 3],
    run: Run,
}

/// Calls every operation on `ranks` devices of `threads` threads at once, for about `budget` and at least once after a call to warm.
///
/// # Errors
/// Not enough memory or threads.
pub fn drill(sizes: Sizes, ranks: usize, threads: usize, budget: Duration) -> Result<Vec<OpRate>> {
    let together = Barrier::new(ranks);
    let all: Mutex<Vec<Vec<f64>>> = Mutex::default();
    let one = || -> Result<()> {
        let made = CpuDevice::new(CpuOptions { threads, mode: Mode::Inline, ..CpuOptions::default() })
            .and_then(|device| device.stream("drill").map(|s| (device, s)))
            .and_then(|(device, s)| calls(&*device, &*s, sizes).map(|c| (device, s, c)));
        // Met before an error returns, so that no rank waits for one that left.
        together.wait();
        let (device, s, calls) = made?;
        let mut times = vec![Times::default(); calls.len()];
        let begun = Instant::now();
        for round in 0.. {
            for (call, times) in calls.iter().zip(&mut times) {
                if round == 1 {
                    *times = Times::default();
                }
                times.add(|| (call.run)(device.ops(), &*s))?;
            }
            if round > 0 && (begun.elapsed() >= budget || round > 1000) {
                break;
            }
        }
        all.lock().unwrap_or_else(|e| e.into_inner()).push(times.iter().map(Times::median).collect());
        Ok(())
    };
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..ranks).map(|_| scope.spawn(one)).collect();
        let panicked = |_| Err(crate::Error::Task { stream: "drill".into(), task: "drill".into(), why: "a rank panicked".into() });
        ranks.into_iter().try_for_each(|rank| rank.join().unwrap_or_else(panicked))
    })?;
    let all = all.into_inner().unwrap_or_else(|e| e.into_inner());
    let sim = SimDevice::new(SimOptions { threads })?;
    let s = sim.stream("drill")?;
    let counted = calls(&*sim, &*s, sizes)?;
    let mut rates = Vec::with_capacity(counted.len());
    for (i, call) in counted.iter().enumerate() {
        sim.reset_counts();
        (call.run)(sim.ops(), &*s)?;
        let counts = sim.counts();
        let (flops, ops_bytes) = counts.ops.values().fold((0, 0), |(f, b), o| (f + o.flops, b + o.bytes));
        let bytes = ops_bytes + counts.copies.bytes;
        let secs = all.iter().map(|rank| rank[i]).sum::<f64>() / all.len().max(1) as f64;
        rates.push(OpRate { op: call.op, dtype: sizes.dtype, shape: call.shape, flops: flops as f64, bytes: bytes as f64, secs });
    }
    Ok(rates)
}

/// Views of one block and one micro-batch, and the calls on them.
struct Maker<'a> {
    device: &'a dyn Device,
    stream: &'a dyn Stream,
    sizes: Sizes,
    calls: Vec<Call>,
}

impl Maker<'_> {
    fn view(&self, elems: usize, dtype: DType) -> Result<ViewMut> {
        let view = self.device.alloc("drill", (elems * dtype.bytes()).max(64), Place::Device, Category::Workspace)?;
        let view = view.view_mut(dtype, 0, elems)?;
        if dtype != DType::I32 && dtype != DType::U8 {
            self.stream.fill(&view, 0.01)?;
        }
        Ok(view)
    }

    /// A view of the block's type.
    fn float(&self, elems: usize) -> Result<ViewMut> {
        self.view(elems, self.sizes.dtype)
    }

    fn work(&self, shape: OpShape) -> Result<ViewMut> {
        self.view(self.device.ops().workspace_bytes(shape).max(64), DType::U8)
    }

    fn ints(&self, values: impl Iterator<Item = i32>) -> Result<ViewMut> {
        let values: Vec<i32> = values.collect();
        let view = self.view(values.len(), DType::I32)?;
        let fill = move |dst: &mut [u8]| {
            dst.copy_from_slice(bytemuck::cast_slice(&values));
            Ok(())
        };
        self.stream.write(&view, "drill", Box::new(fill))?;
        Ok(view)
    }

    fn call(&mut self, op: &'static str, shape: [usize; 3], run: impl Fn(&dyn Ops, &dyn Stream) -> Result<()> + 'static) {
        self.calls.push(Call { op, shape, run: Box::new(run) });
    }

    /// The three products of a layer, and those of the adapters of `layers` of them that share the input.
    fn linear(&mut self, inputs: usize, outputs: usize, layers: usize) -> Result<()> {
        let (n, rank) = (self.sizes.tokens, self.sizes.rank);
        let work = self.work(OpShape::LinearBackward { tokens: n, inputs, outputs })?;
        let (x, dx, y) = (self.float(n * inputs)?, self.float(n * inputs)?, self.float(n * outputs)?);
        let (w, dw) = (Weight::from(self.float(inputs * outputs)?.view()), self.view(inputs * outputs, DType::F32)?);
        let (a, b, c) = (x.clone(), y.clone(), w.clone());
        self.call("linear", [n, outputs, inputs], move |ops, s| ops.linear(&b, Write::Set, &a, &c, None, n, inputs, outputs, s));
        let (a, b, c, d) = (y.clone(), dx.clone(), w.clone(), work.clone());
        self.call("linear_dgrad", [n, outputs, inputs], move |ops, s| {
            ops.linear_backward(Some((&b, Write::Set)), None, None, &a, None, &c, n, inputs, outputs, &d, s)
        });
        let (a, b) = (y.clone(), x.clone());
        self.call("linear_wgrad", [n, outputs, inputs], move |ops, s| {
            ops.linear_backward(None, Some((&dw, Write::Set)), None, &a, Some(&b), &w, n, inputs, outputs, &work, s)
        });
        let work = self.work(OpShape::Lora { tokens: n, inputs, outputs, rank, adapters: layers })?;
        let mut forward = Vec::new();
        let mut backward = Vec::new();
        for site in 0..layers as u32 {
            let (t, a, b) =
                (self.view(n * rank, DType::F32)?, self.view(rank * inputs, DType::F32)?, self.view(outputs * rank, DType::F32)?);
            let (da, db) = (self.view(rank * inputs, DType::F32)?, self.view(outputs * rank, DType::F32)?);
            // The base layer's output is a f32 sum while adapters are added.
            let y = self.view(n * outputs, DType::F32)?;
            forward.push(LoraForward { y, t: t.clone(), a: a.view(), b: b.view(), scale: 2.0, outputs, rank, site });
            let dy = self.float(n * outputs)?.view();
            let (t, a, b) = (t.view(), a.view(), b.view());
            backward.push(LoraBackward { da, db, write: Write::Set, dy, t, a, b, scale: 2.0, outputs, rank, site });
        }
        let shape = [n, layers * outputs, inputs];
        let (a, w) = (x.clone(), work.clone());
        self.call("lora", shape, move |ops, s| ops.lora(&forward, &a, None, n, inputs, &w, s));
        self.call("lora_backward", shape, move |ops, s| ops.lora_backward(Some(&dx), &backward, &x, None, n, inputs, &work, s));
        Ok(())
    }

    fn attention(&mut self) -> Result<()> {
        let Sizes { tokens: n, documents, heads, kv_heads, head_dim, .. } = self.sizes;
        let shape = Attention { heads, kv_heads, head_dim, window: None, scale: 1.0 / (head_dim as f32).sqrt() };
        let (hd, kd) = (n * heads * head_dim, n * kv_heads * head_dim);
        let bounds = self.ints((0..=n).map(|i| (i.min(documents) * (n / documents)) as i32))?;
        let (q, k, v, o) = (self.float(hd)?, self.float(kd)?, self.float(kd)?, self.float(hd)?);
        let (dq, dk, dv, dout) = (self.float(hd)?, self.float(kd)?, self.float(kd)?, self.float(hd)?);
        let (lse, work) = (self.view(n * heads, DType::F32)?, self.work(OpShape::Attention { tokens: n, shape })?);
        let sizes = [n, documents, heads * head_dim];
        {
            let (q, k, v, o, lse, work, bounds) = (q.clone(), k.clone(), v.clone(), o.clone(), lse.clone(), work.clone(), bounds.clone());
            self.call("attention", sizes, move |ops, s| ops.attention(&o, &lse, &q, &k, &v, &bounds, documents, n, shape, &work, s));
        }
        self.call("attention_backward", sizes, move |ops, s| {
            ops.attention_backward(&dq, &dk, &dv, &dout, &q, &k, &v, &o, &lse, &bounds, documents, n, shape, &work, s)
        });
        let (positions, table) = (self.ints((0..n).map(|i| (i % (n / documents)) as i32))?, self.view(n * head_dim, DType::F32)?);
        let x = self.float(hd)?;
        let (a, b, c) = (x.clone(), table.clone(), positions.clone());
        self.call("rope", [hd, 1, 1], move |ops, s| ops.rope(&a, &b, &c, heads, head_dim, s));
        self.call("rope_backward", [hd, 1, 1], move |ops, s| ops.rope_backward(&x, &table, &positions, heads, head_dim, s));
        Ok(())
    }

    /// Operations whose time is that of their bytes.
    fn rows(&mut self) -> Result<()> {
        let Sizes { tokens: n, hidden: c, mlp, .. } = self.sizes;
        let (y, x, dx, weight) = (self.float(n * c)?, self.float(n * c)?, self.float(n * c)?, self.float(c)?);
        let (rstd, work) = (self.view(n, DType::F32)?, self.work(OpShape::RmsNormBackward { rows: n, cols: c })?);
        {
            let (y, x, rstd, weight) = (y.clone(), x.clone(), rstd.clone(), weight.clone());
            self.call("rmsnorm", [n * c, 1, 1], move |ops, s| ops.rmsnorm(&y, &rstd, &x, &weight, 1e-5, n, c, s));
        }
        {
            let (x, y) = (x.clone(), y.clone());
            self.call("rmsnorm_backward", [n * c, 1, 1], move |ops, s| {
                ops.rmsnorm_backward(Some((&dx, Write::Add)), None, &y, &x, &rstd, &weight, n, c, &work, s)
            });
        }
        let (gate, up, h) = (self.float(n * mlp)?, self.float(n * mlp)?, self.float(n * mlp)?);
        {
            let (gate, up, h) = (gate.clone(), up.clone(), h.clone());
            self.call("swiglu", [n * mlp, 1, 1], move |ops, s| ops.swiglu(&h, &gate, &up, s));
        }
        {
            // In place, as a block does; what is computed of it stays finite, since its inputs are small.
            let (gate, up) = (gate.clone(), up.clone());
            self.call("swiglu_backward", [n * mlp, 1, 1], move |ops, s| ops.swiglu_backward(&gate, &up, &h, &gate, &up, s));
        }
        let sum = self.view(n * mlp.max(c), DType::F32)?;
        let part = sum.slice(0, n * c)?;
        let (a, b) = (y.clone(), part.clone());
        self.call("add_into", [n * c, 1, 1], move |ops, s| ops.add_into(&a, &b, s));
        let whole = sum.slice(0, n * mlp)?;
        self.call("cast", [n * mlp, 1, 1], move |ops, s| ops.cast(&gate, &whole, s));
        self.call("copy", [n * c, 1, 1], move |_, s| s.copy(&y, &x));
        Ok(())
    }

    /// Embedding and head.
    fn ends(&mut self) -> Result<()> {
        let Sizes { tokens: n, hidden, vocab, .. } = self.sizes;
        let (y, table) = (self.float(n * hidden)?, self.float(vocab * hidden)?);
        // Rows far apart, as tokens are.
        let ids = self.ints((0..n).map(|i| (i * 7919 % vocab) as i32))?;
        let (a, b, c) = (y.clone(), table.clone(), ids.clone());
        self.call("embedding", [n * hidden, 1, 1], move |ops, s| ops.embedding(&a, &b, &c, hidden, s));
        let (loss, dx, weight) = (self.view(n, DType::F32)?, self.float(n * hidden)?, Weight::from(table.view()));
        let work = self.work(OpShape::LinearCrossEntropy { tokens: n, hidden, vocab })?;
        self.call("linear_cross_entropy", [n, vocab, hidden], move |ops, s| {
            ops.linear_cross_entropy(&loss, Some(&dx), None, &y, &weight, &ids, 1.0, n, hidden, vocab, &work, s)
        });
        Ok(())
    }

    /// What is done with gradients; elements as of one block's adapters and more.
    fn updates(&mut self) -> Result<()> {
        let elems = self.sizes.hidden * self.sizes.mlp;
        let f32s = |elems| self.view(elems, DType::F32);
        let (a, b, c, d) = (f32s(elems)?, f32s(elems)?, f32s(elems)?, f32s(elems)?);
        let (nodes, one) = (f32s(SUM_SQUARES_NODES)?, f32s(1)?);
        let (work, copy) = (self.work(OpShape::SumSquares { elems })?, self.view(elems, DType::BF16)?);
        {
            let (a, b, c) = (a.clone(), b.clone(), c.clone());
            self.call("add", [elems, 1, 1], move |ops, s| ops.add(&a, &b, &c, s));
        }
        {
            let a = a.clone();
            self.call("sum_squares", [elems, 1, 1], move |ops, s| ops.sum_squares(&nodes, &a, 0, &work, s));
        }
        let hp = AdamW { lr: 1e-4, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0, step: 1 };
        self.call("adamw", [elems, 1, 1], move |ops, s| ops.adamw(&a, &b, &c, Some(&copy), &d, &one, hp, s));
        Ok(())
    }
}

fn calls(device: &dyn Device, stream: &dyn Stream, sizes: Sizes) -> Result<Vec<Call>> {
    let mut m = Maker { device, stream, sizes, calls: Vec::new() };
    let Sizes { hidden, mlp, heads, kv_heads, head_dim, .. } = sizes;
    m.rows()?;
    m.linear(hidden, heads * head_dim, 1)?;
    m.linear(hidden, kv_heads * head_dim, 3)?;
    m.attention()?;
    m.linear(hidden, mlp, 2)?;
    m.linear(mlp, hidden, 1)?;
    m.ends()?;
    m.updates()?;
    Ok(m.calls)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_operation_runs_and_is_counted() {
        for dtype in [DType::F32, DType::BF16] {
            let sizes =
                Sizes { tokens: 8, documents: 2, hidden: 16, heads: 4, kv_heads: 2, head_dim: 4, mlp: 32, vocab: 40, rank: 4, dtype };
            let rates = drill(sizes, 2, 1, Duration::ZERO).unwrap();
            assert!(rates.iter().all(|r| r.secs > 0.0 && r.bytes > 0.0 && r.dtype == dtype), "{rates:?}");
            let linear: Vec<_> = rates.iter().filter(|r| r.op.starts_with("linear_") || r.op == "linear").collect();
            let flops = |r: &OpRate| 2.0 * r.shape.iter().product::<usize>() as f64;
            // The head's backward product is a part of its call.
            assert!(linear.iter().all(|r| r.flops == flops(r) * if r.op == "linear_cross_entropy" { 2.0 } else { 1.0 }), "{linear:?}");
        }
    }
}
