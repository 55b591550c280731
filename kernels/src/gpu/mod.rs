//! The operations of a decoder on GPUs: what does each launch, whoever the vendor? [`GpuOps`] is [`Ops`] over a [`Launcher`]; a
//! driver launches on a GPU, the emulator of the tests on the host. Kernels are in `kernels/gpu`, one source for all vendors.
//!
//! * [`launch`] what passes from an operation to a launcher; [`table`] all kernels and their sources; `params` how structs agree.
//! * [`driver`] the vendors' libraries behind one table of functions.
//! * one file per operation, named after its `.cu` file: checks, which kernel, which tiles, how much workspace.
#![allow(rustdoc::private_intra_doc_links)]

mod adamw;
pub mod attention;
mod calls;
mod code;
mod column_sum;
mod cross_entropy;
mod device;
pub mod driver;
mod elementwise;
mod embedding;
mod event;
mod issue;
pub mod launch;
mod linear;
pub mod lora;
mod memory;
mod norm_tree;
mod params;
pub mod probe;
mod ring;
mod rmsnorm;
mod rope;
mod stream;
mod swiglu;
pub mod table;
pub mod traffic;

pub use code::{CodeOptions, build_ahead};
pub use device::{GpuDevice, GpuLauncher, GpuOptions, Mark};

use crate::{AdamW, Attention, Dropout, LoraBackward, LoraForward, OpShape, Ops, Place, Result, Stream, View, ViewMut, Weight, Write};
use launch::{Arch, Launcher};

/// The operations of a decoder, on whatever `L` launches kernels.
pub struct GpuOps<L> {
    launcher: L,
    /// Works on operands in host memory.
    host: Option<Box<dyn Ops>>,
}

impl<L: Launcher> GpuOps<L> {
    /// Operations that `launcher` runs.
    pub fn new(launcher: L) -> GpuOps<L> {
        GpuOps { launcher, host: None }
    }

    /// As [`GpuOps::new`]; `host` does what an optimizer at home on the host needs, where the operand that is written lies there.
    pub fn with_host(launcher: L, host: Box<dyn Ops>) -> GpuOps<L> {
        GpuOps { launcher, host: Some(host) }
    }

    fn on_host(&self, written: &View) -> Option<&dyn Ops> {
        self.host.as_deref().filter(|_| written.place() != Place::Device)
    }

    /// [`Stream::fill`] as a kernel, for devices whose driver cannot set elements of every type.
    pub fn fill(&self, out: &ViewMut, value: f32, s: &dyn Stream) -> Result<()> {
        elementwise::fill(&self.launcher, out, value, s)
    }

    /// What runs them.
    pub fn launcher(&self) -> &L {
        &self.launcher
    }
}

/// A device's name for people: the vendor's, and what kernels are compiled for.
fn device_name(facts: &driver::Facts) -> String {
    format!("{} ({}, {} units)", facts.name, facts.arch.name, facts.arch.units)
}

/// Bytes that [`Ops::workspace_bytes`] answers on this machine: a function of machine and shape alone, for plans made elsewhere.
pub fn workspace_bytes(arch: &Arch, shape: OpShape) -> usize {
    match shape {
        OpShape::RmsNormBackward { rows, cols } => rmsnorm::workspace_bytes(arch, rows, cols),
        OpShape::LinearBackward { tokens, inputs, outputs } => linear::workspace_bytes(arch, tokens, inputs, outputs),
        OpShape::Lora { tokens, inputs, outputs, rank, adapters } => lora::workspace_bytes(arch, tokens, inputs, outputs, rank, adapters),
        OpShape::Attention { tokens, shape } => attention::workspace_bytes(tokens, shape),
        OpShape::LinearCrossEntropy { tokens, vocab, .. } => cross_entropy::workspace_bytes(tokens, vocab),
        OpShape::EmbeddingBackward { tokens, hidden: _, vocab } => embedding::workspace_bytes(tokens, vocab),
        // The host's own, where the state is at home there.
        OpShape::SumSquares { elems } => norm_tree::workspace_bytes(arch, elems).max(crate::cpu::ops::workspace_bytes(shape)),
    }
}

impl<L: Launcher> Ops for GpuOps<L> {
    fn workspace_bytes(&self, shape: OpShape) -> usize {
        workspace_bytes(self.launcher.arch(), shape)
    }

    fn embedding(&self, y: &ViewMut, table: &View, ids: &View, hidden: usize, s: &dyn Stream) -> Result<()> {
        embedding::forward(&self.launcher, y, table, ids, hidden, s)
    }

    fn embedding_backward(
        &self,
        dtable: &ViewMut,
        write: Write,
        dy: &View,
        ids: &View,
        hidden: usize,
        workspace: &ViewMut,
        s: &dyn Stream,
    ) -> Result<()> {
        embedding::backward(&self.launcher, dtable, write, dy, ids, hidden, workspace, s)
    }

    fn rmsnorm(
        &self,
        y: &ViewMut,
        rstd: &ViewMut,
        x: &View,
        weight: &View,
        eps: f32,
        rows: usize,
        cols: usize,
        s: &dyn Stream,
    ) -> Result<()> {
        rmsnorm::forward(&self.launcher, y, rstd, x, weight, eps, rows, cols, s)
    }

    fn rmsnorm_backward(
        &self,
        dx: Option<(&ViewMut, Write)>,
        dweight: Option<(&ViewMut, Write)>,
        dy: &View,
        x: &View,
        rstd: &View,
        weight: &View,
        rows: usize,
        cols: usize,
        workspace: &ViewMut,
        s: &dyn Stream,
    ) -> Result<()> {
        rmsnorm::backward(&self.launcher, dx, dweight, dy, x, rstd, weight, rows, cols, workspace, s)
    }

    fn linear(
        &self,
        y: &ViewMut,
        write: Write,
        x: &View,
        w: &Weight,
        bias: Option<&View>,
        tokens: usize,
        inputs: usize,
        outputs: usize,
        s: &dyn Stream,
    ) -> Result<()> {
        linear::forward(&self.launcher, y, write, x, w, bias, tokens, inputs, outputs, s)
    }

    fn linear_backward(
        &self,
        dx: Option<(&ViewMut, Write)>,
        dw: Option<(&ViewMut, Write)>,
        dbias: Option<(&ViewMut, Write)>,
        dy: &View,
        x: Option<&View>,
        w: &Weight,
        tokens: usize,
        inputs: usize,
        outputs: usize,
        workspace: &ViewMut,
        s: &dyn Stream,
    ) -> Result<()> {
        linear::backward(&self.launcher, dx, dw, dbias, dy, x, w, tokens, inputs, outputs, workspace, s)
    }

    fn lora(
        &self,
        adapters: &[LoraForward],
        x: &View,
        dropout: Option<Dropout>,
        tokens: usize,
        inputs: usize,
        workspace: &ViewMut,
        s: &dyn Stream,
    ) -> Result<()> {
        lora::forward(&self.launcher, adapters, x, dropout, tokens, inputs, workspace, s)
    }

    fn lora_backward(
        &self,
        dx: Option<&ViewMut>,
        adapters: &[LoraBackward],
        x: &View,
        dropout: Option<Dropout>,
        tokens: usize,
        inputs: usize,
        workspace: &ViewMut,
        s: &dyn Stream,
    ) -> Result<()> {
        lora::backward(&self.launcher, dx, adapters, x, dropout, tokens, inputs, workspace, s)
    }

    fn rope(&self, x: &ViewMut, table: &View, positions: &View, heads: usize, head_dim: usize, s: &dyn Stream) -> Result<()> {
        rope::forward(&self.launcher, x, table, positions, heads, head_dim, s)
    }

    fn rope_backward(&self, dx: &ViewMut, table: &View, positions: &View, heads: usize, head_dim: usize, s: &dyn Stream) -> Result<()> {
        rope::backward(&self.launcher, dx, table, positions, heads, head_dim, s)
    }

    fn attention(
        &self,
        o: &ViewMut,
        lse: &ViewMut,
        q: &View,
        k: &View,
        v: &View,
        cu_seqlens: &View,
        documents: usize,
        tokens: usize,
        shape: Attention,
        workspace: &ViewMut,
        s: &dyn Stream,
    ) -> Result<()> {
        attention::forward(&self.launcher, o, lse, q, k, v, cu_seqlens, documents, tokens, shape, workspace, s)
    }

    fn attention_backward(
        &self,
        dq: &ViewMut,
        dk: &ViewMut,
        dv: &ViewMut,
        dout: &View,
        q: &View,
        k: &View,
        v: &View,
        o: &View,
        lse: &View,
        cu_seqlens: &View,
        documents: usize,
        tokens: usize,
        shape: Attention,
        workspace: &ViewMut,
        s: &dyn Stream,
    ) -> Result<()> {
        attention::backward(&self.launcher, dq, dk, dv, dout, q, k, v, o, lse, cu_seqlens, documents, tokens, shape, workspace, s)
    }

    fn swiglu(&self, h: &ViewMut, gate: &View, up: &View, s: &dyn Stream) -> Result<()> {
        swiglu::forward(&self.launcher, h, gate, up, s)
    }

    fn swiglu_backward(&self, dgate: &ViewMut, dup: &ViewMut, dh: &View, gate: &View, up: &View, s: &dyn Stream) -> Result<()> {
        swiglu::backward(&self.launcher, dgate, dup, dh, gate, up, s)
    }

    fn linear_cross_entropy(
        &self,
        loss: &ViewMut,
        dx: Option<&ViewMut>,
        dw: Option<(&ViewMut, Write)>,
        x: &View,
        w: &Weight,
        labels: &View,
        grad_scale: f32,
        tokens: usize,
        hidden: usize,
        vocab: usize,
        workspace: &ViewMut,
        s: &dyn Stream,
    ) -> Result<()> {
        cross_entropy::linear_cross_entropy(&self.launcher, loss, dx, dw, x, w, labels, grad_scale, tokens, hidden, vocab, workspace, s)
    }

    fn sum(&self, out: &ViewMut, x: &View, s: &dyn Stream) -> Result<()> {
        if let Some(host) = self.on_host(out) {
            return host.sum(out, x, s);
        }
        elementwise::sum(&self.launcher, out, x, s)
    }

    fn add(&self, out: &ViewMut, a: &View, b: &View, s: &dyn Stream) -> Result<()> {
        if let Some(host) = self.on_host(out) {
            return host.add(out, a, b, s);
        }
        elementwise::add(&self.launcher, out, a, b, s)
    }

    fn add_into(&self, y: &ViewMut, x: &View, s: &dyn Stream) -> Result<()> {
        if let Some(host) = self.on_host(y) {
            return host.add_into(y, x, s);
        }
        elementwise::add_into(&self.launcher, y, x, s)
    }

    fn scale(&self, x: &ViewMut, factor: f32, s: &dyn Stream) -> Result<()> {
        if let Some(host) = self.on_host(x) {
            return host.scale(x, factor, s);
        }
        elementwise::scale(&self.launcher, x, factor, s)
    }

    fn cast(&self, dst: &ViewMut, src: &View, s: &dyn Stream) -> Result<()> {
        if let Some(host) = self.on_host(dst) {
            return host.cast(dst, src, s);
        }
        elementwise::cast(&self.launcher, dst, src, s)
    }

    fn count_nonfinite(&self, out: &ViewMut, x: &View, s: &dyn Stream) -> Result<()> {
        if let Some(host) = self.on_host(out) {
            return host.count_nonfinite(out, x, s);
        }
        elementwise::count_nonfinite(&self.launcher, out, x, s)
    }

    fn sum_squares(&self, nodes: &ViewMut, x: &View, first_chunk: usize, workspace: &ViewMut, s: &dyn Stream) -> Result<()> {
        if let Some(host) = self.on_host(nodes) {
            return host.sum_squares(nodes, x, first_chunk, workspace, s);
        }
        norm_tree::sum_squares(&self.launcher, nodes, x, first_chunk, workspace, s)
    }

    fn clip_scale(
        &self,
        norm: &ViewMut,
        scale: &ViewMut,
        nodes: &View,
        ranges: &[(u64, u64)],
        ranks: usize,
        segments: usize,
        max_norm: Option<f32>,
        s: &dyn Stream,
    ) -> Result<()> {
        if let Some(host) = self.on_host(norm) {
            return host.clip_scale(norm, scale, nodes, ranges, ranks, segments, max_norm, s);
        }
        norm_tree::clip_scale(&self.launcher, norm, scale, nodes, ranges, ranks, segments, max_norm, s)
    }

    fn adamw(
        &self,
        param: &ViewMut,
        m: &ViewMut,
        v: &ViewMut,
        copy_out: Option<&ViewMut>,
        g: &View,
        scale: &View,
        hp: AdamW,
        s: &dyn Stream,
    ) -> Result<()> {
        if let Some(host) = self.on_host(param) {
            return host.adamw(param, m, v, copy_out, g, scale, hp, s);
        }
        adamw::update(&self.launcher, param, m, v, copy_out, g, scale, hp, s)
    }
}
