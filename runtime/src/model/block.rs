//! A decoder block of the Llama family, as the paper writes it: ten operations forward, their mirror backward.
//!
//! Kept for backward: q, k, v after rotation, the attention output and its log-sum-exp, the residual stream between the
//! halves, gate and up. The outputs of the two norms and of SwiGLU are made again from them: three cheap passes
//! instead of `2C + F` numbers per token.
//!
//! Legend: `N` tokens, `C` hidden, `F` mlp, `H` heads, `K` kv heads, `D` head dim, `R` LoRA rank.

use crate::error::Result;
use crate::model::{Batch, BatchShape, Cx, Grads, Params, TensorSpec, VisitSpec};
use crate::plan::{Init, ParamKind, ParamSpec};
use zrt_kernels::{AdaptedLinear, Attention, DType, LoraBackward, LoraForward, OpShape, Ops, View, ViewMut, Write};

/// One linear layer of a block: its base weight, bias, and adapter, as indices into the unit's parameters.
#[derive(Clone, Debug)]
pub struct Linear {
    /// `I`.
    pub inputs: usize,
    /// `O`.
    pub outputs: usize,
    /// `[O, I]`.
    pub weight: usize,
    /// `[O]`.
    pub bias: Option<usize>,
    /// LoRA.
    pub adapter: Option<Adapter>,
}

/// The LoRA adapter of one linear layer.
#[derive(Clone, Debug)]
pub struct Adapter {
    /// `[R, I]`.
    pub a: usize,
    /// `[O, R]`.
    pub b: usize,
    /// `R`.
    pub rank: usize,
    /// `alpha / r` or `alpha / sqrt(r)`.
    pub scale: f32,
    /// Dropout key: unique in the model.
    pub site: u32,
    /// Index of `t [N, R]` among the activations.
    pub t: usize,
}

/// The parameters of a block under construction, in layout order.
#[derive(Default)]
pub struct ParamList(pub Vec<ParamSpec>);

impl ParamList {
    /// Adds a parameter and returns its index.
    pub fn push(&mut self, name: String, shape: &[usize], kind: ParamKind, trainable: bool, init: Init) -> usize {
        self.0.push(ParamSpec { name, shape: shape.to_vec(), kind, trainable, init });
        self.0.len() - 1
    }
}

/// Geometry and parameter indices of one block.
#[derive(Clone, Debug)]
pub struct Block {
    /// `C`.
    pub hidden: usize,
    /// `F`.
    pub mlp: usize,
    /// Heads, kv heads, head dim, window.
    pub attention: Attention,
    /// Norm epsilon.
    pub eps: f32,
    /// LoRA dropout.
    pub dropout: f32,
    /// `[C]`.
    pub norm1: usize,
    /// `[C]`.
    pub norm2: usize,
    /// `[D]` each: norms of q and k per head (Qwen3).
    pub qk_norm: Option<(usize, usize)>,
    /// Projections.
    pub q: Linear,
    /// See `q`.
    pub k: Linear,
    /// See `q`.
    pub v: Linear,
    /// See `q`.
    pub o: Linear,
    /// See `q`.
    pub gate: Linear,
    /// See `q`.
    pub up: Linear,
    /// See `q`.
    pub down: Linear,
}

/// Activations by index; LoRA's `t` follow.
mod act {
    pub const RSTD1: usize = 0; // [N]
    pub const Q: usize = 1; // [N, H*D]
    pub const K: usize = 2; // [N, K*D]
    pub const V: usize = 3; // [N, K*D]
    pub const LSE: usize = 4; // [N, H]
    pub const O: usize = 5; // [N, H*D]
    pub const X1: usize = 6; // [N, C]
    pub const RSTD2: usize = 7; // [N]
    pub const GATE: usize = 8; // [N, F]
    pub const UP: usize = 9; // [N, F]
    pub const COUNT: usize = 10;
    // With q/k norm only: their inputs and statistics.
    pub const Q0: usize = 10; // [N, H*D]
    pub const K0: usize = 11; // [N, K*D]
    pub const RSTD_Q: usize = 12; // [N*H]
    pub const RSTD_K: usize = 13; // [N*K]
    pub const COUNT_QK: usize = 14;
}

/// Scratch by index.
mod scratch {
    pub const N: usize = 0; // [N, C] output of a norm, made again
    pub const DN: usize = 1; // [N, C] its gradient
    pub const H: usize = 2; // [N, F] SwiGLU output
    pub const DH: usize = 3; // [N, F] its gradient
    pub const DQ: usize = 4; // [N, H*D]
    pub const DK: usize = 5; // [N, K*D]
    pub const DV: usize = 6; // [N, K*D]
    pub const DO: usize = 7; // [N, H*D]
    pub const SUM: usize = 8; // f32 outputs of the layers that share an input, where adapters are added to bf16
}

impl Block {
    /// Index of the first `t` among the activations, before any adapter was added.
    pub fn first_adapter_act(qk_norm: bool) -> usize {
        if qk_norm { act::COUNT_QK } else { act::COUNT }
    }

    fn linears(&self) -> [&Linear; 7] {
        [&self.q, &self.k, &self.v, &self.o, &self.gate, &self.up, &self.down]
    }

    /// Adapters' small updates survive only if they are added before the layer's output is rounded to bf16.
    fn sums_apart(&self, compute: DType) -> bool {
        compute == DType::BF16 && self.linears().iter().any(|l| l.adapter.is_some())
    }

    /// What the block needs for one micro-batch.
    pub fn visit(&self, name: String, unit: usize, shape: BatchShape, ops: &dyn Ops) -> VisitSpec {
        let (n, c, f, t) = (shape.tokens, self.hidden, self.mlp, shape.compute);
        let (hd, kd) = (self.attention.heads * self.attention.head_dim, self.attention.kv_heads * self.attention.head_dim);
        let spec = |name, elems, dtype| TensorSpec { name, elems, dtype };
        let mut acts = vec![
            spec("rstd1", n, DType::F32),
            spec("q", n * hd, t),
            spec("k", n * kd, t),
            spec("v", n * kd, t),
            spec("lse", n * self.attention.heads, DType::F32),
            spec("o", n * hd, t),
            spec("x1", n * c, t),
            spec("rstd2", n, DType::F32),
            spec("gate", n * f, t),
            spec("up", n * f, t),
        ];
        if self.qk_norm.is_some() {
            acts.extend([
                spec("q0", n * hd, t),
                spec("k0", n * kd, t),
                spec("rstd_q", n * self.attention.heads, DType::F32),
                spec("rstd_k", n * self.attention.kv_heads, DType::F32),
            ]);
        }
        for l in self.linears() {
            acts.extend(l.adapter.as_ref().map(|a| spec("lora_t", n * a.rank, DType::F32)));
        }
        let scratch = vec![
            spec("n", n * c, t),
            spec("dn", n * c, t),
            spec("h", n * f, t),
            spec("dh", n * f, t),
            spec("dq", n * hd, t),
            spec("dk", n * kd, t),
            spec("dv", n * kd, t),
            spec("do", n * hd, t),
            spec("sum", if self.sums_apart(t) { n * (hd + 2 * kd).max(2 * f).max(c) } else { 0 }, DType::F32),
        ];
        let mut shapes = vec![
            OpShape::RmsNormBackward { rows: n, cols: c },
            OpShape::RmsNormBackward { rows: n * self.attention.heads, cols: self.attention.head_dim },
            OpShape::Attention { tokens: n, shape: self.attention },
        ];
        for l in self.linears() {
            shapes.push(OpShape::LinearBackward { tokens: n, inputs: l.inputs, outputs: l.outputs });
        }
        for group in [&[&self.q, &self.k, &self.v][..], &[&self.o], &[&self.gate, &self.up], &[&self.down]] {
            let adapters: Vec<_> = group.iter().filter_map(|l| l.adapter.as_ref().map(|a| (l, a))).collect();
            if let (Some(rank), Some(outputs)) = (adapters.iter().map(|x| x.1.rank).max(), adapters.iter().map(|x| x.0.outputs).max()) {
                shapes.push(OpShape::Lora { tokens: n, inputs: group[0].inputs, outputs, rank, adapters: adapters.len() });
            }
        }
        let weights: usize = self.linears().iter().map(|l| l.inputs * l.outputs).sum();
        // Causal: half of seq_len^2; two matmuls forward. Backward: five (Dao 2023), counted as 2.5 times forward.
        let attention = 2.0 * n as f64 * shape.seq_len as f64 * hd as f64;
        let trained_base = self.linears().iter().all(|l| l.adapter.is_none());
        let matmul = 2.0 * n as f64 * weights as f64;
        VisitSpec {
            name,
            units: vec![unit],
            input: n * c,
            output: n * c,
            in_place: true,
            acts,
            scratch,
            workspace_bytes: shapes.into_iter().map(|s| ops.workspace_bytes(s)).max().unwrap_or(0),
            recompute: true,
            flops: (matmul + attention, if trained_base { 2.0 * matmul } else { matmul } + 2.5 * attention),
        }
    }

    /// `x2 = x1 + down(silu(gate(n2)) * up(n2))`, `n2 = norm(x1)`, `x1 = x + o(attention(q, k, v))`, `q, k, v` of `n1 = norm(x)`.
    pub fn forward(&self, cx: &Cx, w: &Params, y: &ViewMut, x: &View, acts: &[ViewMut], batch: &Batch) -> Result<()> {
        let (ops, s) = (cx.ops, cx.stream);
        let (c, at) = (self.hidden, &self.attention);
        let n = batch.ids.elems();
        let n1 = &cx.scratch[scratch::N];
        ops.rmsnorm(n1, &acts[act::RSTD1], x, w.get(0, self.norm1)?, self.eps, n, c, s)?;
        let (q0, k0) = if self.qk_norm.is_some() { (act::Q0, act::K0) } else { (act::Q, act::K) };
        self.project(cx, w, &[(&self.q, &acts[q0]), (&self.k, &acts[k0]), (&self.v, &acts[act::V])], Write::Set, n1, acts, batch)?;
        if let Some((qn, kn)) = self.qk_norm {
            ops.rmsnorm(&acts[act::Q], &acts[act::RSTD_Q], &acts[act::Q0], w.get(0, qn)?, self.eps, n * at.heads, at.head_dim, s)?;
            ops.rmsnorm(&acts[act::K], &acts[act::RSTD_K], &acts[act::K0], w.get(0, kn)?, self.eps, n * at.kv_heads, at.head_dim, s)?;
        }
        ops.rope(&acts[act::Q], &cx.tables[0], &batch.positions, at.heads, at.head_dim, s)?;
        ops.rope(&acts[act::K], &cx.tables[0], &batch.positions, at.kv_heads, at.head_dim, s)?;
        let (q, k, v, docs) = (&acts[act::Q], &acts[act::K], &acts[act::V], batch.documents);
        ops.attention(&acts[act::O], &acts[act::LSE], q, k, v, &batch.cu_seqlens, docs, n, *at, &cx.workspace, s)?;
        let x1 = &acts[act::X1];
        s.copy(x1, x)?;
        self.project(cx, w, &[(&self.o, x1)], Write::Add, &acts[act::O], acts, batch)?;

        let n2 = &cx.scratch[scratch::N];
        ops.rmsnorm(n2, &acts[act::RSTD2], x1, w.get(0, self.norm2)?, self.eps, n, c, s)?;
        self.project(cx, w, &[(&self.gate, &acts[act::GATE]), (&self.up, &acts[act::UP])], Write::Set, n2, acts, batch)?;
        let h = &cx.scratch[scratch::H];
        ops.swiglu(h, &acts[act::GATE], &acts[act::UP], s)?;
        s.copy(y, x1)?;
        self.project(cx, w, &[(&self.down, y)], Write::Add, h, acts, batch)
    }

    /// The layers that share `x`, adapters included, set or added to their outputs with one rounding.
    #[allow(clippy::too_many_arguments)]
    fn project(
        &self,
        cx: &Cx,
        w: &Params,
        layers: &[(&Linear, &ViewMut)],
        write: Write,
        x: &View,
        acts: &[ViewMut],
        batch: &Batch,
    ) -> Result<()> {
        let n = batch.ids.elems();
        let (mut at, mut adapted) = (0, Vec::with_capacity(layers.len()));
        for (l, y) in layers {
            let Some(ad) = &l.adapter else {
                self.linear(cx, w, l, y, write, x, n)?;
                continue;
            };
            let sum = if self.sums_apart(x.dtype()) { cx.scratch[scratch::SUM].slice(at, n * l.outputs)? } else { (*y).clone() };
            at += n * l.outputs;
            adapted.push(AdaptedLinear {
                y: (*y).clone(),
                write,
                w: w.get(0, l.weight)?.clone().into(),
                bias: l.bias.map(|b| w.get(0, b).cloned()).transpose()?,
                lora: LoraForward {
                    y: sum,
                    t: acts[ad.t].clone(),
                    a: w.get(0, ad.a)?.clone(),
                    b: w.get(0, ad.b)?.clone(),
                    scale: ad.scale,
                    outputs: l.outputs,
                    rank: ad.rank,
                    site: ad.site,
                },
            });
        }
        if adapted.is_empty() {
            return Ok(());
        }
        let dropout = cx.dropout(self.dropout, batch);
        Ok(cx.ops.adapted_linear(&adapted, x, dropout, n, layers[0].0.inputs, &cx.workspace, cx.stream)?)
    }

    /// Turns `d`, the gradient of the block's output, into that of its input (when `want_dx`).
    #[allow(clippy::too_many_arguments)]
    pub fn backward(
        &self,
        cx: &Cx,
        w: &Params,
        grads: &Grads,
        d: &ViewMut,
        want_dx: bool,
        x: &View,
        acts: &[ViewMut],
        batch: &Batch,
    ) -> Result<()> {
        let (ops, s, ws) = (cx.ops, cx.stream, &cx.workspace);
        let (c, at) = (self.hidden, &self.attention);
        let n = batch.ids.elems();
        let (dn, h, dh) = (&cx.scratch[scratch::DN], &cx.scratch[scratch::H], &cx.scratch[scratch::DH]);

        // MLP half: d [N,C] is the gradient of x2.
        ops.swiglu(h, &acts[act::GATE], &acts[act::UP], s)?;
        self.project_backward(cx, w, grads, &[(&self.down, d)], Some(dh), h, acts, batch)?;
        ops.swiglu_backward(&acts[act::GATE], &acts[act::UP], dh, &acts[act::GATE], &acts[act::UP], s)?;
        let (dgate, dup) = (&acts[act::GATE], &acts[act::UP]);
        let n2 = &cx.scratch[scratch::N];
        ops.rmsnorm(n2, &acts[act::RSTD2], &acts[act::X1], w.get(0, self.norm2)?, self.eps, n, c, s)?;
        self.project_backward(cx, w, grads, &[(&self.gate, dgate), (&self.up, dup)], Some(dn), n2, acts, batch)?;
        ops.rmsnorm_backward(
            Some((d, Write::Add)),
            grads.get(0, self.norm2),
            dn,
            &acts[act::X1],
            &acts[act::RSTD2],
            w.get(0, self.norm2)?,
            n,
            c,
            ws,
            s,
        )?;

        // Attention half: d is the gradient of x1.
        let (dq, dk, dv, d_o) = (&cx.scratch[scratch::DQ], &cx.scratch[scratch::DK], &cx.scratch[scratch::DV], &cx.scratch[scratch::DO]);
        self.project_backward(cx, w, grads, &[(&self.o, d)], Some(d_o), &acts[act::O], acts, batch)?;
        ops.attention_backward(
            dq,
            dk,
            dv,
            d_o,
            &acts[act::Q],
            &acts[act::K],
            &acts[act::V],
            &acts[act::O],
            &acts[act::LSE],
            &batch.cu_seqlens,
            batch.documents,
            n,
            *at,
            ws,
            s,
        )?;
        ops.rope_backward(dq, &cx.tables[0], &batch.positions, at.heads, at.head_dim, s)?;
        ops.rope_backward(dk, &cx.tables[0], &batch.positions, at.kv_heads, at.head_dim, s)?;
        if let Some((qn, kn)) = self.qk_norm {
            let parts = [(dq, qn, act::Q0, act::RSTD_Q, at.heads), (dk, kn, act::K0, act::RSTD_K, at.kv_heads)];
            for (dz, weight, z0, rstd, heads) in parts {
                let (dx, wv) = (Some((dz, Write::Set)), w.get(0, weight)?);
                ops.rmsnorm_backward(dx, grads.get(0, weight), dz, &acts[z0], &acts[rstd], wv, n * heads, at.head_dim, ws, s)?;
            }
        }
        let n1 = &cx.scratch[scratch::N];
        ops.rmsnorm(n1, &acts[act::RSTD1], x, w.get(0, self.norm1)?, self.eps, n, c, s)?;
        let parts = [(&self.q, dq), (&self.k, dk), (&self.v, dv)];
        // Nothing before this block is trained and its own norm is frozen: the chain ends here.
        let chain = want_dx || grads.get(0, self.norm1).is_some();
        self.project_backward(cx, w, grads, &parts, chain.then_some(dn), n1, acts, batch)?;
        if chain {
            let dx = want_dx.then_some((d, Write::Add));
            ops.rmsnorm_backward(dx, grads.get(0, self.norm1), dn, x, &acts[act::RSTD1], w.get(0, self.norm1)?, n, c, ws, s)?;
        }
        Ok(())
    }

    #[allow(clippy::too_many_arguments)]
    fn linear(&self, cx: &Cx, w: &Params, l: &Linear, y: &ViewMut, write: Write, x: &View, n: usize) -> Result<()> {
        let bias = l.bias.map(|b| w.get(0, b)).transpose()?;
        cx.ops.linear(y, write, x, &w.get(0, l.weight)?.clone().into(), bias, n, l.inputs, l.outputs, cx.stream)?;
        Ok(())
    }

    #[allow(clippy::too_many_arguments)]
    fn linear_backward(
        &self,
        cx: &Cx,
        w: &Params,
        grads: &Grads,
        l: &Linear,
        dx: Option<(&ViewMut, Write)>,
        dy: &View,
        x: &View,
        n: usize,
    ) -> Result<()> {
        let (dw, db) = (grads.get(0, l.weight), l.bias.and_then(|b| grads.get(0, b)));
        if dx.is_none() && dw.is_none() && db.is_none() {
            return Ok(());
        }
        let weight = w.get(0, l.weight)?.clone().into();
        cx.ops.linear_backward(dx, dw, db, dy, Some(x), &weight, n, l.inputs, l.outputs, &cx.workspace, cx.stream)?;
        Ok(())
    }

    /// Gradients of [`Block::project`]: `dx`, if it is asked for, is set.
    #[allow(clippy::too_many_arguments)]
    fn project_backward(
        &self,
        cx: &Cx,
        w: &Params,
        grads: &Grads,
        layers: &[(&Linear, &ViewMut)],
        dx: Option<&ViewMut>,
        x: &View,
        acts: &[ViewMut],
        batch: &Batch,
    ) -> Result<()> {
        let n = batch.ids.elems();
        let (mut adapted, mut write) = (Vec::with_capacity(layers.len()), Write::Set);
        for (l, dy) in layers {
            if let Some(ad) = &l.adapter
                && let (Some((da, write)), Some((db, _))) = (grads.get(0, ad.a), grads.get(0, ad.b))
            {
                // Of the layer itself, if it is trained too.
                self.linear_backward(cx, w, grads, l, None, dy, x, n)?;
                let lora = LoraBackward {
                    da: da.clone(),
                    db: db.clone(),
                    write,
                    dy: dy.view(),
                    t: acts[ad.t].view(),
                    a: w.get(0, ad.a)?.clone(),
                    b: w.get(0, ad.b)?.clone(),
                    scale: ad.scale,
                    outputs: l.outputs,
                    rank: ad.rank,
                    site: ad.site,
                };
                adapted.push((w.get(0, l.weight)?.clone().into(), lora));
            } else {
                self.linear_backward(cx, w, grads, l, dx.map(|dx| (dx, write)), dy, x, n)?;
                write = Write::Add;
            }
        }
        if adapted.is_empty() {
            return Ok(());
        }
        let dropout = cx.dropout(self.dropout, batch);
        let dx = dx.map(|dx| (dx, write));
        Ok(cx.ops.adapted_linear_backward(dx, &adapted, x, dropout, n, layers[0].0.inputs, &cx.workspace, cx.stream)?)
    }
}
