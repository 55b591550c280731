//! Which calls does training make, and of which sizes? The operations of a decoder block with LoRA adapters, bf16, in the order of
//! the trainer (`runtime/src/model/block.rs`), for models of 8 and 70 billion parameters: what the page of kernels predicts
//! and what the bench on a real GPU measures. A [`Case`] makes its operands in any [`Memory`], and is called on any operations.
//!
//! Legend: `N` tokens, `C` hidden, `F` mlp, `H` heads, `K` kv heads, `D` head dim, `V` vocabulary, `R` rank.

use zrt_kernels::DType::{BF16, F32, I32, U8};
use zrt_kernels::{AdamW, Attention, DType, LoraBackward, LoraForward, OpShape, Ops, Result, Stream, View, ViewMut, Weight, Write};

/// Sizes of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Model {
    /// For people.
    pub name: &'static str,
    /// `C`, which is also `H D`.
    pub hidden: usize,
    /// `H`.
    pub heads: usize,
    /// `K`.
    pub kv_heads: usize,
    /// `F`.
    pub mlp: usize,
    /// `V`.
    pub vocab: usize,
}

/// Llama 3 of 8 billion parameters.
pub const B8: Model = Model { name: "8B", hidden: 4096, heads: 32, kv_heads: 8, mlp: 14_336, vocab: 128_256 };
/// Llama 3 of 70 billion parameters.
pub const B70: Model = Model { name: "70B", hidden: 8192, heads: 64, kv_heads: 8, mlp: 28_672, vocab: 128_256 };
/// Small and odd: for the emulator.
pub const TINY: Model = Model { name: "tiny", hidden: 64, heads: 2, kv_heads: 1, mlp: 88, vocab: 130 };
/// Many tiles of every kernel, not all of them full.
pub const MIDDLE: Model = Model { name: "middle", hidden: 1024, heads: 8, kv_heads: 2, mlp: 2816, vocab: 4099 };

/// What operands hold at first.
#[derive(Clone, Debug, PartialEq)]
pub enum Fill {
    /// Zeros.
    Zeros,
    /// Normal numbers of this standard deviation; the seed makes operands differ.
    Normal(f32, u32),
    /// These numbers, i32.
    Ints(Vec<i32>),
}

/// Where operands come from.
pub trait Memory {
    /// An operand of so many elements.
    ///
    /// # Errors
    /// No memory.
    fn tensor(&self, elems: usize, dtype: DType, fill: Fill) -> Result<ViewMut>;
    /// Bytes of scratch that the operations ask for.
    fn workspace_bytes(&self, shape: OpShape) -> usize;
}

/// Makes a call on operations and a stream.
pub type Run = Box<dyn Fn(&dyn Ops, &dyn Stream) -> Result<()>>;

/// A call with its operands.
pub struct Call {
    /// Makes it, on operations of the device that the operands are in.
    pub run: Run,
    /// What it writes or changes, workspace aside.
    pub outputs: Vec<View>,
}

type Prepare = Box<dyn Fn(&dyn Memory) -> Result<Call>>;

/// One operation of given sizes.
pub struct Case {
    /// Its name in [`Ops`].
    pub op: &'static str,
    /// Its sizes, for people.
    pub sizes: String,
    /// How often a block makes this call, forward and backward; 0: it is not part of a block.
    pub times: usize,
    /// Makes operands.
    pub prepare: Prepare,
}

impl Model {
    /// `D`.
    pub fn head_dim(&self) -> usize {
        self.hidden / self.heads
    }

    /// `K D`.
    pub fn kv(&self) -> usize {
        self.kv_heads * self.head_dim()
    }

    /// Input and outputs of the groups of adapters that share an input: q/k/v, o, gate/up, down.
    pub fn adapters(&self) -> [(&'static str, usize, Vec<usize>); 4] {
        let (c, f) = (self.hidden, self.mlp);
        [("q/k/v", c, vec![c, self.kv(), self.kv()]), ("o", c, vec![c]), ("gate/up", c, vec![f, f]), ("down", f, vec![c])]
    }
}

fn case<F, R>(op: &'static str, sizes: String, times: usize, prepare: F) -> Case
where
    F: Fn(&dyn Memory) -> Result<(Vec<View>, R)> + 'static,
    R: Fn(&dyn Ops, &dyn Stream) -> Result<()> + 'static,
{
    let prepare = move |m: &dyn Memory| prepare(m).map(|(outputs, run)| Call { run: Box::new(run), outputs });
    Case { op, sizes, times, prepare: Box::new(prepare) }
}

fn normal(m: &dyn Memory, elems: usize, dtype: DType, seed: u32) -> Result<ViewMut> {
    m.tensor(elems, dtype, Fill::Normal(1.0, seed))
}

fn zeros(m: &dyn Memory, elems: usize, dtype: DType) -> Result<ViewMut> {
    m.tensor(elems, dtype, Fill::Zeros)
}

/// A weight `[outputs, inputs]`, small enough that products stay near 1.
fn weight(m: &dyn Memory, inputs: usize, outputs: usize, dtype: DType, seed: u32) -> Result<ViewMut> {
    m.tensor(inputs * outputs, dtype, Fill::Normal(1.0 / (inputs as f32).sqrt(), seed))
}

fn scratch(m: &dyn Memory, shape: OpShape) -> Result<ViewMut> {
    zeros(m, m.workspace_bytes(shape), U8)
}

fn ints(m: &dyn Memory, n: usize, value: impl Fn(usize) -> i32) -> Result<ViewMut> {
    m.tensor(n, I32, Fill::Ints((0..n).map(value).collect()))
}

/// RMSNorm and its backward, whose weight is frozen.
fn norms(n: usize, c: usize) -> [Case; 2] {
    let sizes = format!("{n} x {c}");
    let forward = case("rmsnorm", sizes.clone(), 4, move |m| {
        let (y, rstd) = (zeros(m, n * c, BF16)?, zeros(m, n, F32)?);
        let (x, w) = (normal(m, n * c, BF16, 1)?, normal(m, c, BF16, 2)?);
        let outputs = vec![y.view(), rstd.view()];
        Ok((outputs, move |ops: &dyn Ops, s: &dyn Stream| ops.rmsnorm(&y, &rstd, &x, &w, 1e-5, n, c, s)))
    });
    let backward = case("rmsnorm_backward", sizes, 2, move |m| {
        let (dx, dy, x, w) = (normal(m, n * c, BF16, 3)?, normal(m, n * c, BF16, 4)?, normal(m, n * c, BF16, 1)?, normal(m, c, BF16, 2)?);
        let (rstd, ws) = (m.tensor(n, F32, Fill::Normal(1.0, 5))?, scratch(m, OpShape::RmsNormBackward { rows: n, cols: c })?);
        let outputs = vec![dx.view()];
        let run =
            move |ops: &dyn Ops, s: &dyn Stream| ops.rmsnorm_backward(Some((&dx, Write::Add)), None, &dy, &x, &rstd, &w, n, c, &ws, s);
        Ok((outputs, run))
    });
    [forward, backward]
}

/// A linear layer with frozen weight: forward to an f32 sum, backward to dx.
fn linears(n: usize, i: usize, o: usize, times: usize) -> [Case; 2] {
    let sizes = format!("{n} x {i} to {o}");
    let forward = case("linear", sizes.clone(), times, move |m| {
        let (y, x, w) = (zeros(m, n * o, F32)?, normal(m, n * i, BF16, 1)?, weight(m, i, o, BF16, 2)?);
        let w = Weight::from(w.view());
        Ok((vec![y.view()], move |ops: &dyn Ops, s: &dyn Stream| ops.linear(&y, Write::Set, &x, &w, None, n, i, o, s)))
    });
    let backward = case("linear_backward", sizes, times, move |m| {
        let (dx, dy, w) = (zeros(m, n * i, BF16)?, normal(m, n * o, BF16, 3)?, weight(m, i, o, BF16, 2)?);
        let (w, ws) = (Weight::from(w.view()), scratch(m, OpShape::LinearBackward { tokens: n, inputs: i, outputs: o })?);
        let outputs = vec![dx.view()];
        let run =
            move |ops: &dyn Ops, s: &dyn Stream| ops.linear_backward(Some((&dx, Write::Set)), None, None, &dy, None, &w, n, i, o, &ws, s);
        Ok((outputs, run))
    });
    [forward, backward]
}

/// Adapters that share an input.
fn loras(n: usize, name: &str, inputs: usize, outputs: &[usize], rank: usize, times: usize) -> [Case; 2] {
    let sizes = format!("{n} x {inputs}, {name}, rank {rank}");
    let shape = OpShape::Lora { tokens: n, inputs, outputs: outputs.iter().copied().max().unwrap_or(0), rank, adapters: outputs.len() };
    let (of_forward, of_backward) = (outputs.to_vec(), outputs.to_vec());
    let forward = case("lora", sizes.clone(), times, move |m| {
        let one = |(site, o): (usize, &usize)| {
            let (y, t) = (normal(m, n * o, F32, 6)?, zeros(m, n * rank, F32)?);
            let (a, b) = (weight(m, inputs, rank, F32, 7)?, weight(m, rank, *o, F32, 8)?);
            Ok(LoraForward { y, t, a: a.view(), b: b.view(), scale: 2.0, outputs: *o, rank, site: site as u32 })
        };
        let adapters = of_forward.iter().enumerate().map(one).collect::<Result<Vec<_>>>()?;
        let (x, ws) = (normal(m, n * inputs, BF16, 1)?, scratch(m, shape)?);
        let out = adapters.iter().flat_map(|a| [a.t.view(), a.y.view()]).collect();
        Ok((out, move |ops: &dyn Ops, s: &dyn Stream| ops.lora(&adapters, &x, None, n, inputs, &ws, s)))
    });
    let backward = case("lora_backward", sizes, times, move |m| {
        let one = |(site, o): (usize, &usize)| {
            let (da, db) = (zeros(m, rank * inputs, F32)?, zeros(m, o * rank, F32)?);
            let (a, b) = (weight(m, inputs, rank, F32, 7)?.view(), weight(m, rank, *o, F32, 8)?.view());
            let (dy, t) = (normal(m, n * o, BF16, 9)?.view(), normal(m, n * rank, F32, 10)?.view());
            Ok(LoraBackward { da, db, write: Write::Set, dy, t, a, b, scale: 2.0, outputs: *o, rank, site: site as u32 })
        };
        let adapters = of_backward.iter().enumerate().map(one).collect::<Result<Vec<_>>>()?;
        let (dx, x, ws) = (normal(m, n * inputs, BF16, 11)?, normal(m, n * inputs, BF16, 1)?, scratch(m, shape)?);
        let out = adapters.iter().flat_map(|a| [a.da.view(), a.db.view()]).chain([dx.view()]).collect();
        Ok((out, move |ops: &dyn Ops, s: &dyn Stream| ops.lora_backward(Some(&dx), &adapters, &x, None, n, inputs, &ws, s)))
    });
    [forward, backward]
}

/// One document of `n` tokens.
fn attentions(n: usize, model: Model) -> [Case; 2] {
    let Model { heads, kv_heads, hidden, .. } = model;
    let (head_dim, kv) = (model.head_dim(), model.kv());
    let shape = Attention { heads, kv_heads, head_dim, window: None, scale: 1.0 / (head_dim as f32).sqrt() };
    let sizes = format!("{n} tokens, {heads}/{kv_heads} heads of {head_dim}");
    let bounds = move |m: &dyn Memory| ints(m, n + 1, move |i| if i == 0 { 0 } else { n as i32 });
    let forward = case("attention", sizes.clone(), 1, move |m| {
        let (o, lse, q) = (zeros(m, n * hidden, BF16)?, zeros(m, n * heads, F32)?, normal(m, n * hidden, BF16, 1)?);
        let (k, v, cu) = (normal(m, n * kv, BF16, 2)?, normal(m, n * kv, BF16, 3)?, bounds(m)?);
        let ws = scratch(m, OpShape::Attention { tokens: n, shape })?;
        let outputs = vec![o.view(), lse.view()];
        Ok((outputs, move |ops: &dyn Ops, s: &dyn Stream| ops.attention(&o, &lse, &q, &k, &v, &cu, 1, n, shape, &ws, s)))
    });
    let backward = case("attention_backward", sizes, 1, move |m| {
        let (o, lse, q) = (zeros(m, n * hidden, BF16)?, zeros(m, n * heads, F32)?, normal(m, n * hidden, BF16, 1)?);
        let (k, v, cu) = (normal(m, n * kv, BF16, 2)?, normal(m, n * kv, BF16, 3)?, bounds(m)?);
        let (dq, dk, dv) = (zeros(m, n * hidden, BF16)?, zeros(m, n * kv, BF16)?, zeros(m, n * kv, BF16)?);
        let (dout, ws) = (normal(m, n * hidden, BF16, 4)?, scratch(m, OpShape::Attention { tokens: n, shape })?);
        let outputs = vec![dq.view(), dk.view(), dv.view()];
        let run = move |ops: &dyn Ops, s: &dyn Stream| {
            ops.attention_backward(&dq, &dk, &dv, &dout, &q, &k, &v, &o, &lse, &cu, 1, n, shape, &ws, s)
        };
        Ok((outputs, run))
    });
    [forward, backward]
}

fn ropes(n: usize, heads: usize, head_dim: usize) -> [Case; 2] {
    let prepare = move |m: &dyn Memory| {
        let x = normal(m, n * heads * head_dim, BF16, 1)?;
        Ok((x, normal(m, n * head_dim, F32, 2)?, ints(m, n, |i| i as i32)?))
    };
    let sizes = format!("{n} x {heads} heads of {head_dim}");
    let forward = case("rope", sizes.clone(), 1, move |m| {
        let (x, table, positions): (ViewMut, ViewMut, ViewMut) = prepare(m)?;
        Ok((vec![x.view()], move |ops: &dyn Ops, s: &dyn Stream| ops.rope(&x, &table, &positions, heads, head_dim, s)))
    });
    let backward = case("rope_backward", sizes, 1, move |m| {
        let (x, table, positions): (ViewMut, ViewMut, ViewMut) = prepare(m)?;
        Ok((vec![x.view()], move |ops: &dyn Ops, s: &dyn Stream| ops.rope_backward(&x, &table, &positions, heads, head_dim, s)))
    });
    [forward, backward]
}

fn swiglus(n: usize, f: usize) -> [Case; 2] {
    let sizes = format!("{n} x {f}");
    let forward = case("swiglu", sizes.clone(), 2, move |m| {
        let (h, gate, up) = (zeros(m, n * f, BF16)?, normal(m, n * f, BF16, 1)?, normal(m, n * f, BF16, 2)?);
        Ok((vec![h.view()], move |ops: &dyn Ops, s: &dyn Stream| ops.swiglu(&h, &gate, &up, s)))
    });
    let backward = case("swiglu_backward", sizes, 1, move |m| {
        let (dgate, dup) = (zeros(m, n * f, BF16)?, zeros(m, n * f, BF16)?);
        let (dh, gate, up) = (normal(m, n * f, BF16, 3)?, normal(m, n * f, BF16, 1)?, normal(m, n * f, BF16, 2)?);
        let outputs = vec![dgate.view(), dup.view()];
        Ok((outputs, move |ops: &dyn Ops, s: &dyn Stream| ops.swiglu_backward(&dgate, &dup, &dh, &gate, &up, s)))
    });
    [forward, backward]
}

/// An f32 sum becomes bf16, or is added to the residual.
fn narrow(n: usize, c: usize, times: usize) -> Case {
    case("cast", format!("{n} x {c}, f32 to bf16"), times, move |m| {
        let (y, x) = (zeros(m, n * c, BF16)?, normal(m, n * c, F32, 1)?);
        Ok((vec![y.view()], move |ops: &dyn Ops, s: &dyn Stream| ops.cast(&y, &x, s)))
    })
}

fn add_into(n: usize, c: usize) -> Case {
    case("add_into", format!("{n} x {c}, f32 into bf16"), 2, move |m| {
        let (y, x) = (normal(m, n * c, BF16, 1)?, normal(m, n * c, F32, 2)?);
        Ok((vec![y.view()], move |ops: &dyn Ops, s: &dyn Stream| ops.add_into(&y, &x, s)))
    })
}

/// The calls of a block, forward and backward; `rank` of its adapters.
pub fn block(model: Model, n: usize, rank: usize) -> Vec<Case> {
    let (c, f, kv, d) = (model.hidden, model.mlp, model.kv(), model.head_dim());
    let mut out = Vec::new();
    out.extend(norms(n, c));
    for (i, o, times) in [(c, c, 2), (c, kv, 2), (c, f, 2), (f, c, 1)] {
        out.extend(linears(n, i, o, times));
    }
    for (name, inputs, outputs) in model.adapters() {
        out.extend(loras(n, name, inputs, &outputs, rank, 1));
    }
    out.extend([narrow(n, c, 1), narrow(n, kv, 2), narrow(n, f, 2), add_into(n, c)]);
    out.extend(ropes(n, model.heads, d));
    out.extend(ropes(n, model.kv_heads, d));
    out.extend(attentions(n, model));
    out.extend(swiglus(n, f));
    out
}

/// Adapters of another rank, beside a block's.
pub fn adapters(model: Model, n: usize, rank: usize) -> Vec<Case> {
    model.adapters().iter().flat_map(|(name, inputs, outputs)| loras(n, name, *inputs, outputs, rank, 0)).collect()
}

/// What is outside of blocks: embedding, output head, optimizer. `adapted` is the number of elements that are trained.
pub fn ends(model: Model, n: usize, adapted: usize) -> Vec<Case> {
    let (c, v) = (model.hidden, model.vocab);
    let embedding = case("embedding", format!("{n} x {c}"), 0, move |m| {
        let (y, table) = (zeros(m, n * c, BF16)?, normal(m, v * c, BF16, 1)?);
        let ids = ints(m, n, move |i| (i * 7919 % v) as i32)?;
        Ok((vec![y.view()], move |ops: &dyn Ops, s: &dyn Stream| ops.embedding(&y, &table, &ids, c, s)))
    });
    let head = case("linear_cross_entropy", format!("{n} x {c} to {v}, loss and dx"), 0, move |m| {
        let (loss, dx, x) = (zeros(m, n, F32)?, zeros(m, n * c, BF16)?, normal(m, n * c, BF16, 1)?);
        let (w, labels) = (weight(m, c, v, BF16, 2)?, ints(m, n, move |i| (i * 104_729 % v) as i32)?);
        let (w, ws) = (Weight::from(w.view()), scratch(m, OpShape::LinearCrossEntropy { tokens: n, hidden: c, vocab: v })?);
        let scale = 1.0 / n as f32;
        let outputs = vec![loss.view(), dx.view()];
        let run =
            move |ops: &dyn Ops, s: &dyn Stream| ops.linear_cross_entropy(&loss, Some(&dx), None, &x, &w, &labels, scale, n, c, v, &ws, s);
        Ok((outputs, run))
    });
    let adamw = case("adamw", format!("{adapted} elements"), 0, move |m| {
        let (p, moment, v) = (normal(m, adapted, F32, 1)?, zeros(m, adapted, F32)?, zeros(m, adapted, F32)?);
        let (g, one) = (normal(m, adapted, F32, 2)?, normal(m, 1, F32, 3)?);
        let hp = AdamW { lr: 1e-4, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01, step: 1 };
        let outputs = vec![p.view(), moment.view(), v.view()];
        Ok((outputs, move |ops: &dyn Ops, s: &dyn Stream| ops.adamw(&p, &moment, &v, None, &g, &one, hp, s)))
    });
    let squares = case("sum_squares", format!("{adapted} elements"), 0, move |m| {
        let (nodes, x) = (zeros(m, 96, F32)?, normal(m, adapted, F32, 1)?);
        let ws = scratch(m, OpShape::SumSquares { elems: adapted })?;
        Ok((vec![nodes.view()], move |ops: &dyn Ops, s: &dyn Stream| ops.sum_squares(&nodes, &x, 0, &ws, s)))
    });
    vec![embedding, head, adamw, squares]
}

/// The clipping factor of two segments on two ranks, whose ranges travel with the launch.
pub fn clip() -> Case {
    let ranges = [(0, 2), (0, 1), (2, 1), (1, 3)];
    case("clip_scale", "2 ranks, 2 segments".into(), 0, move |m| {
        let (norm, scale, nodes) = (zeros(m, 1, F32)?, zeros(m, 1, F32)?, zeros(m, 4 * 96, F32)?);
        let outputs = vec![norm.view(), scale.view()];
        let run = move |ops: &dyn Ops, s: &dyn Stream| ops.clip_scale(&norm, &scale, &nodes, &ranges, 2, 2, Some(1.0), s);
        Ok((outputs, run))
    })
}

/// Elements of a block's adapters.
pub fn adapted(model: Model, rank: usize) -> usize {
    model.adapters().iter().flat_map(|(_, inputs, outputs)| outputs.iter().map(move |o| rank * (inputs + o))).sum()
}
