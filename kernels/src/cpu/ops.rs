//! What does a call of an operation do on the CPU? It checks the operands, takes handles to their memory, and enqueues one
//! host task that runs the function named after the maths on the pool. Nothing else happens here, so every method reads
//! alike; a task holds clones of its views until it has run.
#![allow(unsafe_code)]

use super::adapted::{BackwardHandles, ForwardHandles};
use super::operand::{Operand, Raw};
use super::pool::Pool;
use super::{adamw, attention, elementwise, embedding, linear, lora, loss, norm, norm_tree, rope, swiglu};
use crate::{
    AdamW, AdaptedLinear, Attention, DType, Dropout, Error, HostTask, LoraBackward, LoraForward, OpShape, Ops, Result, Stream, View,
    ViewMut, Weight, Write, checks,
};
use std::borrow::Cow;
use std::sync::Arc;

/// Alignment of workspace: a cache line.
const ALIGN: usize = 64;

/// The operations of a decoder on the CPU.
pub struct CpuOps {
    pool: Arc<Pool>,
}

/// Bytes that [`Ops::workspace_bytes`] answers: a function of the shape alone, whatever the threads, so that a plan made on
/// one machine holds on another.
pub fn workspace_bytes(shape: OpShape) -> usize {
    let bytes = match shape {
        OpShape::RmsNormBackward { rows, cols } => size_of::<f32>() * norm::workspace_elems(rows, cols),
        OpShape::LinearBackward { tokens, inputs, outputs } => linear::backward_workspace_bytes(tokens, inputs, outputs),
        OpShape::Lora { tokens, inputs, outputs, rank, adapters } => lora::workspace_bytes(tokens, inputs, outputs, rank, adapters),
        OpShape::Attention { tokens, shape } => size_of::<f32>() * attention::workspace_elems(tokens, shape),
        OpShape::LinearCrossEntropy { tokens, hidden, vocab } => loss::workspace_bytes(tokens, hidden, vocab),
        OpShape::EmbeddingBackward { .. } => 0,
        OpShape::SumSquares { elems } => size_of::<f32>() * norm_tree::chunks(elems),
    };
    // Room to align it, wherever the view begins.
    if bytes == 0 { 0 } else { bytes + ALIGN }
}

/// Shape of an operation on adapters of these (outputs, rank).
pub(super) fn lora_shape(tokens: usize, inputs: usize, adapters: impl ExactSizeIterator<Item = (usize, usize)>) -> OpShape {
    let count = adapters.len();
    let (outputs, rank) = adapters.fold((0, 0), |(o, r), (outputs, rank)| (outputs.max(o), rank.max(r)));
    OpShape::Lora { tokens, inputs, outputs, rank, adapters: count }
}

/// Handles to the operands of one operation.
#[derive(Clone, Copy)]
pub(super) struct Handles(pub(super) &'static str);

impl Handles {
    pub(super) fn float(self, view: &View) -> Result<Operand> {
        Operand::of(self.0, view)
    }

    pub(super) fn f32(self, view: &View) -> Result<Raw<f32>> {
        Raw::of(self.0, view)
    }

    fn i32(self, view: &View) -> Result<Raw<i32>> {
        Raw::of(self.0, view)
    }

    fn float_grad(self, grad: Option<(&ViewMut, Write)>) -> Result<Option<(Operand, Write)>> {
        grad.map(|(view, write)| Ok((self.float(view)?, write))).transpose()
    }

    fn f32_grad(self, grad: Option<(&ViewMut, Write)>) -> Result<Option<(Raw<f32>, Write)>> {
        grad.map(|(view, write)| Ok((self.f32(view)?, write))).transpose()
    }

    /// The f32 elements of workspace that [`workspace_bytes`] asked for, aligned to a cache line.
    pub(super) fn workspace(self, view: &View, bytes: usize) -> Result<Raw<f32>> {
        if bytes == 0 {
            return Ok(Raw::new(&mut []));
        }
        let address = view.host_ptr().ok_or(Error::NotHost { op: self.0 })? as usize;
        let part = view.slice(address.next_multiple_of(ALIGN) - address, bytes - ALIGN)?;
        self.f32(&part.reinterpret(DType::F32)?)
    }
}

/// The views that are there.
pub(super) fn views<const N: usize>(list: [Option<&View>; N]) -> Vec<View> {
    list.into_iter().flatten().cloned().collect()
}

/// The views that are there, to be written.
pub(super) fn written<const N: usize>(list: [Option<&ViewMut>; N]) -> Vec<ViewMut> {
    list.into_iter().flatten().cloned().collect()
}

/// The view of a gradient that is wanted.
fn of(grad: Option<(&ViewMut, Write)>) -> Option<&ViewMut> {
    grad.map(|(view, _)| view)
}

impl CpuOps {
    /// Operations that run on `pool`.
    pub fn new(pool: Arc<Pool>) -> CpuOps {
        CpuOps { pool }
    }

    /// The threads that they run on.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    pub(super) fn enqueue(
        &self,
        s: &dyn Stream,
        name: &'static str,
        writes: Vec<ViewMut>,
        reads: Vec<View>,
        f: impl FnOnce(&Pool) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        let (pool, held) = (self.pool.clone(), (writes.clone(), reads.clone()));
        let run = Box::new(move || {
            let result = f(&pool);
            // Only now may the memory behind the handles go.
            drop(held);
            result
        });
        s.host(HostTask { name: Cow::Borrowed(name), reads, writes, run })
    }
}

impl Ops for CpuOps {
    fn workspace_bytes(&self, shape: OpShape) -> usize {
        workspace_bytes(shape)
    }

    fn embedding(&self, y: &ViewMut, table: &View, ids: &View, hidden: usize, s: &dyn Stream) -> Result<()> {
        checks::embedding(y, table, ids, hidden)?;
        let h = Handles("embedding");
        let (to, from, rows) = (h.float(y)?, h.float(table)?, h.i32(ids)?);
        self.enqueue(s, h.0, written([Some(y)]), views([Some(table), Some(ids)]), move |pool| {
            // SAFETY: the task holds the views, and nobody writes ids meanwhile.
            embedding::forward(pool, to, from, unsafe { rows.read_all() }, hidden)
        })
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
        let vocab = dtable.elems() / hidden.max(1);
        let bytes = workspace_bytes(OpShape::EmbeddingBackward { tokens: ids.elems(), hidden, vocab });
        checks::embedding_backward(dtable, dy, ids, hidden, workspace, bytes)?;
        let h = Handles("embedding_backward");
        let (to, from, rows) = (h.f32(dtable)?, h.float(dy)?, h.i32(ids)?);
        self.enqueue(s, h.0, written([Some(dtable)]), views([Some(dy), Some(ids)]), move |pool| {
            // SAFETY: as in embedding.
            embedding::backward(pool, to, write, from, unsafe { rows.read_all() }, hidden)
        })
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
        checks::rmsnorm(y, rstd, x, weight, eps, rows, cols)?;
        let h = Handles("rmsnorm");
        let (py, pr, px, pw) = (h.float(y)?, h.f32(rstd)?, h.float(x)?, h.float(weight)?);
        self.enqueue(s, h.0, written([Some(y), Some(rstd)]), views([Some(x), Some(weight)]), move |pool| {
            norm::forward(pool, py, pr, px, pw, eps, rows, cols);
            Ok(())
        })
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
        let bytes = workspace_bytes(OpShape::RmsNormBackward { rows, cols });
        checks::rmsnorm_backward(dx, dweight, dy, x, rstd, weight, rows, cols, workspace, bytes)?;
        let h = Handles("rmsnorm_backward");
        let t = norm::Backward {
            dx: h.float_grad(dx)?,
            dweight: h.f32_grad(dweight)?,
            dy: h.float(dy)?,
            x: h.float(x)?,
            rstd: h.f32(rstd)?,
            weight: h.float(weight)?,
            partial: h.workspace(workspace, bytes)?,
        };
        let writes = written([of(dx), of(dweight), Some(workspace)]);
        self.enqueue(s, h.0, writes, views([Some(dy), Some(x), Some(rstd), Some(weight)]), move |pool| {
            norm::backward(pool, t, rows, cols);
            Ok(())
        })
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
        checks::linear(y, x, w, bias, tokens, inputs, outputs)?;
        let h = Handles("linear");
        let (py, px, pw) = (h.float(y)?, h.float(x)?, h.float(&w.view)?);
        let pb = bias.map(|view| h.float(view)).transpose()?;
        self.enqueue(s, h.0, written([Some(y)]), views([Some(x), Some(&w.view), bias]), move |pool| {
            // SAFETY: the task holds the views; the checks keep what is written apart from the rest.
            unsafe {
                let bias = pb.map(|b| b.read_all());
                linear::forward(pool, py.write_all(), write, px.read_all(), pw.read_all(), bias, tokens, inputs, outputs);
            }
            Ok(())
        })
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
        let bytes = workspace_bytes(OpShape::LinearBackward { tokens, inputs, outputs });
        checks::linear_backward(dx, dw, dbias, dy, x, w, tokens, inputs, outputs, workspace, bytes)?;
        let h = Handles("linear_backward");
        let (pdx, pdw, pdb) = (h.float_grad(dx)?, h.f32_grad(dw)?, h.f32_grad(dbias)?);
        // The input is read for the weight's gradient only.
        let x = x.filter(|_| dw.is_some());
        let (pdy, pw, px) = (h.float(dy)?, h.float(&w.view)?, x.map(|view| h.float(view)).transpose()?);
        let reads = views([Some(dy), x, Some(&w.view)]);
        self.enqueue(s, h.0, written([of(dx), of(dw), of(dbias)]), reads, move |pool| {
            // SAFETY: as in linear.
            unsafe {
                let dx = pdx.map(|(d, write)| (d.write_all(), write));
                let (dw, dbias) = (pdw.map(|(d, write)| (d.write_all(), write)), pdb.map(|(d, write)| (d.write_all(), write)));
                let (dy, x, w) = (pdy.read_all(), px.map(|x| x.read_all()), pw.read_all());
                linear::backward(pool, dx, dw, dbias, dy, x, w, tokens, inputs, outputs);
            }
            Ok(())
        })
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
        let bytes = workspace_bytes(lora_shape(tokens, inputs, adapters.iter().map(|a| (a.outputs, a.rank))));
        checks::lora(adapters, x, dropout, tokens, inputs, workspace, bytes)?;
        let h = Handles("lora");
        let (px, work) = (h.float(x)?, h.workspace(workspace, bytes)?);
        let (mut writes, mut reads, mut parts) = (written([Some(workspace)]), views([Some(x)]), Vec::new());
        for a in adapters {
            parts.push(ForwardHandles::of(h, a, &a.y, &mut writes, &mut reads)?);
        }
        self.enqueue(s, h.0, writes, reads, move |pool| {
            // SAFETY: the task holds the views; the checks keep what is written apart from the rest, of all adapters.
            let mut adapters: Vec<_> = parts.into_iter().map(|a| unsafe { a.open() }).collect();
            // SAFETY: as above.
            let (x, work) = unsafe { (px.read_all(), work.write_all()) };
            lora::forward(pool, &mut adapters, x, dropout, tokens, inputs, work);
            Ok(())
        })
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
        let bytes = workspace_bytes(lora_shape(tokens, inputs, adapters.iter().map(|a| (a.outputs, a.rank))));
        checks::lora_backward(dx, adapters, x, dropout, tokens, inputs, workspace, bytes)?;
        let h = Handles("lora_backward");
        let (pdx, px, work) = (dx.map(|view| h.float(view)).transpose()?, h.float(x)?, h.workspace(workspace, bytes)?);
        let (mut writes, mut reads, mut parts) = (written([dx, Some(workspace)]), views([Some(x)]), Vec::new());
        for a in adapters {
            parts.push(BackwardHandles::of(h, a, &mut writes, &mut reads)?);
        }
        self.enqueue(s, h.0, writes, reads, move |pool| {
            // SAFETY: as in lora.
            let mut adapters: Vec<_> = parts.into_iter().map(|a| unsafe { a.open() }).collect();
            // SAFETY: as in lora.
            let (dx, x, work) = unsafe { (pdx.map(|d| d.write_all()), px.read_all(), work.write_all()) };
            lora::backward(pool, dx, &mut adapters, x, dropout, tokens, inputs, work);
            Ok(())
        })
    }

    fn adapted_linear(
        &self,
        layers: &[AdaptedLinear],
        x: &View,
        dropout: Option<Dropout>,
        tokens: usize,
        inputs: usize,
        workspace: &ViewMut,
        s: &dyn Stream,
    ) -> Result<()> {
        self.adapted(layers, x, dropout, tokens, inputs, workspace, s)
    }

    fn adapted_linear_backward(
        &self,
        dx: Option<(&ViewMut, Write)>,
        layers: &[(Weight, LoraBackward)],
        x: &View,
        dropout: Option<Dropout>,
        tokens: usize,
        inputs: usize,
        workspace: &ViewMut,
        s: &dyn Stream,
    ) -> Result<()> {
        self.adapted_backward(dx, layers, x, dropout, tokens, inputs, workspace, s)
    }

    fn rope(&self, x: &ViewMut, table: &View, positions: &View, heads: usize, head_dim: usize, s: &dyn Stream) -> Result<()> {
        checks::rope(x, table, positions, heads, head_dim)?;
        self.rotate("rope", x, table, positions, heads, head_dim, 1.0, s)
    }

    fn rope_backward(&self, dx: &ViewMut, table: &View, positions: &View, heads: usize, head_dim: usize, s: &dyn Stream) -> Result<()> {
        checks::rope_backward(dx, table, positions, heads, head_dim)?;
        self.rotate("rope_backward", dx, table, positions, heads, head_dim, -1.0, s)
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
        let h = Handles("attention");
        let bytes = workspace_bytes(OpShape::Attention { tokens, shape });
        checks::attention(o, lse, q, k, v, cu_seqlens, documents, tokens, shape, workspace, bytes)?;
        head_fits(h.0, shape)?;
        let t = attention::Forward { o: h.float(o)?, lse: h.f32(lse)?, q: h.float(q)?, k: h.float(k)?, v: h.float(v)? };
        let bounds = h.i32(cu_seqlens)?;
        let reads = views([Some(q), Some(k), Some(v), Some(cu_seqlens)]);
        self.enqueue(s, h.0, written([Some(o), Some(lse)]), reads, move |pool| {
            // SAFETY: the task holds the views, and nobody writes boundaries meanwhile.
            attention::forward(pool, t, unsafe { bounds.read_all() }, documents, tokens, shape)
        })
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
        let h = Handles("attention_backward");
        let bytes = workspace_bytes(OpShape::Attention { tokens, shape });
        checks::attention_backward(dq, dk, dv, dout, q, k, v, o, lse, cu_seqlens, documents, tokens, shape, workspace, bytes)?;
        head_fits(h.0, shape)?;
        let t = attention::Backward {
            dq: h.float(dq)?,
            dk: h.float(dk)?,
            dv: h.float(dv)?,
            dout: h.float(dout)?,
            q: h.float(q)?,
            k: h.float(k)?,
            v: h.float(v)?,
            o: h.float(o)?,
            lse: h.f32(lse)?,
            work: h.workspace(workspace, bytes)?,
        };
        let bounds = h.i32(cu_seqlens)?;
        let writes = written([Some(dq), Some(dk), Some(dv), Some(workspace)]);
        let reads = views([Some(dout), Some(q), Some(k), Some(v), Some(o), Some(lse), Some(cu_seqlens)]);
        self.enqueue(s, h.0, writes, reads, move |pool| {
            // SAFETY: as in attention.
            attention::backward(pool, t, unsafe { bounds.read_all() }, documents, tokens, shape)
        })
    }

    fn swiglu(&self, y: &ViewMut, gate: &View, up: &View, s: &dyn Stream) -> Result<()> {
        checks::swiglu(y, gate, up)?;
        let h = Handles("swiglu");
        let (py, pg, pu) = (h.float(y)?, h.float(gate)?, h.float(up)?);
        self.enqueue(s, h.0, written([Some(y)]), views([Some(gate), Some(up)]), move |pool| {
            swiglu::forward(pool, py, pg, pu);
            Ok(())
        })
    }

    fn swiglu_backward(&self, dgate: &ViewMut, dup: &ViewMut, dh: &View, gate: &View, up: &View, s: &dyn Stream) -> Result<()> {
        checks::swiglu_backward(dgate, dup, dh, gate, up)?;
        let h = Handles("swiglu_backward");
        let (pdg, pdu, pdh, pg, pu) = (h.float(dgate)?, h.float(dup)?, h.float(dh)?, h.float(gate)?, h.float(up)?);
        self.enqueue(s, h.0, written([Some(dgate), Some(dup)]), views([Some(dh), Some(gate), Some(up)]), move |pool| {
            swiglu::backward(pool, pdg, pdu, pdh, pg, pu);
            Ok(())
        })
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
        let bytes = workspace_bytes(OpShape::LinearCrossEntropy { tokens, hidden, vocab });
        checks::linear_cross_entropy(loss, dx, dw, x, w, labels, tokens, hidden, vocab, workspace, bytes)?;
        let h = Handles("linear_cross_entropy");
        let (ploss, pdx, pdw) = (h.f32(loss)?, dx.map(|view| h.float(view)).transpose()?, h.f32_grad(dw)?);
        let (px, pw, rows, work) = (h.float(x)?, h.float(&w.view)?, h.i32(labels)?, h.workspace(workspace, bytes)?);
        let in_place = dx.is_some_and(|dx| dx.span() == x.span());
        let writes = written([Some(loss), dx, of(dw), Some(workspace)]);
        self.enqueue(s, h.0, writes, views([Some(x), Some(&w.view), Some(labels)]), move |pool| {
            // SAFETY: the task holds the views; the checks keep what is written apart from the rest, but dx, which may be x:
            // then only one slice is made of both.
            unsafe {
                let hidden_rows = match pdx {
                    None => loss::Hidden::Read(px.read_all()),
                    Some(dx) if in_place => loss::Hidden::InPlace(dx.write_all()),
                    Some(dx) => loss::Hidden::Gradient(px.read_all(), dx.write_all()),
                };
                let dw = pdw.map(|(d, write)| (d.write_all(), write));
                let (loss, w, labels, work) = (ploss.write_all(), pw.read_all(), rows.read_all(), work.write_all());
                loss::linear_cross_entropy(pool, loss, hidden_rows, dw, w, labels, grad_scale, tokens, hidden, vocab, work)
            }
        })
    }

    fn sum(&self, out: &ViewMut, x: &View, s: &dyn Stream) -> Result<()> {
        checks::sum(out, x)?;
        let h = Handles("sum");
        let (to, from) = (h.f32(out)?, h.f32(x)?);
        self.enqueue(s, h.0, written([Some(out)]), views([Some(x)]), move |_| {
            // SAFETY: the task holds the views, which the checks keep apart.
            unsafe { to.slice(0, 1)[0] = elementwise::sum(from.read_all()) };
            Ok(())
        })
    }

    fn add(&self, out: &ViewMut, a: &View, b: &View, s: &dyn Stream) -> Result<()> {
        checks::add(out, a, b)?;
        let h = Handles("add");
        let (to, pa, pb) = (h.float(out)?, h.float(a)?, h.float(b)?);
        self.enqueue(s, h.0, written([Some(out)]), views([Some(a), Some(b)]), move |pool| {
            elementwise::add(pool, to, pa, pb);
            Ok(())
        })
    }

    fn add_into(&self, y: &ViewMut, x: &View, s: &dyn Stream) -> Result<()> {
        checks::add_into(y, x)?;
        let h = Handles("add_into");
        let (py, px) = (h.float(y)?, h.float(x)?);
        self.enqueue(s, h.0, written([Some(y)]), views([Some(x)]), move |pool| {
            elementwise::add(pool, py, py, px);
            Ok(())
        })
    }

    fn scale(&self, x: &ViewMut, factor: f32, s: &dyn Stream) -> Result<()> {
        checks::scale(x)?;
        let h = Handles("scale");
        let px = h.float(x)?;
        self.enqueue(s, h.0, written([Some(x)]), Vec::new(), move |pool| {
            elementwise::scale(pool, px, factor);
            Ok(())
        })
    }

    fn cast(&self, dst: &ViewMut, src: &View, s: &dyn Stream) -> Result<()> {
        checks::cast(dst, src)?;
        let h = Handles("cast");
        let (to, from) = (h.float(dst)?, h.float(src)?);
        self.enqueue(s, h.0, written([Some(dst)]), views([Some(src)]), move |pool| {
            elementwise::cast(pool, to, from);
            Ok(())
        })
    }

    fn count_nonfinite(&self, out: &ViewMut, x: &View, s: &dyn Stream) -> Result<()> {
        checks::count_nonfinite(out, x)?;
        let h = Handles("count_nonfinite");
        let (to, from) = (h.f32(out)?, h.float(x)?);
        self.enqueue(s, h.0, written([Some(out)]), views([Some(x)]), move |pool| {
            let count = elementwise::count_nonfinite(pool, from);
            // SAFETY: the task holds the view, and nobody else uses it meanwhile.
            unsafe { to.slice(0, 1)[0] = count as f32 };
            Ok(())
        })
    }

    fn sum_squares(&self, nodes: &ViewMut, x: &View, first_chunk: usize, workspace: &ViewMut, s: &dyn Stream) -> Result<()> {
        let bytes = workspace_bytes(OpShape::SumSquares { elems: x.elems() });
        checks::sum_squares(nodes, x, first_chunk, workspace, bytes)?;
        let h = Handles("sum_squares");
        let (to, from, work) = (h.f32(nodes)?, h.f32(x)?, h.workspace(workspace, bytes)?);
        self.enqueue(s, h.0, written([Some(nodes), Some(workspace)]), views([Some(x)]), move |pool| {
            // SAFETY: the task holds the views, which the checks keep apart.
            let (nodes, x, work) = unsafe { (to.write_all(), from.read_all(), work.write_all()) };
            norm_tree::sum_squares(pool, nodes, x, first_chunk, work);
            Ok(())
        })
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
        checks::clip_scale(norm, scale, nodes, ranges, ranks, segments, max_norm)?;
        norm_tree::check_disjoint(ranges, ranks, segments)?;
        let h = Handles("clip_scale");
        let (to_norm, to_scale, from, ranges) = (h.f32(norm)?, h.f32(scale)?, h.f32(nodes)?, ranges.to_vec());
        self.enqueue(s, h.0, written([Some(norm), Some(scale)]), views([Some(nodes)]), move |_| {
            // SAFETY: the task holds the views, which the checks keep apart.
            let nodes = unsafe { from.read_all() };
            let (norm, scale) = norm_tree::clip_scale(nodes, &ranges, ranks, segments, max_norm);
            // SAFETY: as above.
            unsafe {
                to_norm.slice(0, 1)[0] = norm;
                to_scale.slice(0, 1)[0] = scale;
            }
            Ok(())
        })
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
        checks::adamw(param, m, v, copy_out, g, scale, hp)?;
        let h = Handles("adamw");
        let t = adamw::State {
            param: h.f32(param)?,
            m: h.f32(m)?,
            v: h.f32(v)?,
            copy_out: copy_out.map(|view| h.float(view)).transpose()?,
            g: h.f32(g)?,
        };
        let factor = h.f32(scale)?;
        let writes = written([Some(param), Some(m), Some(v), copy_out]);
        self.enqueue(s, h.0, writes, views([Some(g), Some(scale)]), move |pool| {
            // SAFETY: the task holds the view, and nobody writes it meanwhile.
            adamw::update(pool, t, unsafe { factor.read(0, 1)[0] }, hp);
            Ok(())
        })
    }
}

impl CpuOps {
    /// Both directions of the rotary embedding, after their checks.
    #[allow(clippy::too_many_arguments)]
    fn rotate(
        &self,
        name: &'static str,
        x: &ViewMut,
        table: &View,
        positions: &View,
        heads: usize,
        head_dim: usize,
        sign: f32,
        s: &dyn Stream,
    ) -> Result<()> {
        let h = Handles(name);
        let (px, pt, rows) = (h.float(x)?, h.f32(table)?, h.i32(positions)?);
        self.enqueue(s, name, written([Some(x)]), views([Some(table), Some(positions)]), move |pool| {
            // SAFETY: the task holds the views, and nobody writes positions meanwhile.
            rope::rotate(name, pool, px, pt, unsafe { rows.read_all() }, heads, head_dim, sign)
        })
    }
}

fn head_fits(op: &'static str, shape: Attention) -> Result<()> {
    if shape.head_dim <= attention::MAX_HEAD_DIM {
        return Ok(());
    }
    Err(Error::Shape { op, what: format!("head_dim is {}, expected at most {}", shape.head_dim, attention::MAX_HEAD_DIM) })
}
