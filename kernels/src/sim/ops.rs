//! What does each operation cost? Every method checks its operands as a real device does, then adds a call, FLOPs and bytes
//! to the counters. `N` tokens, `C` hidden, `I` inputs, `O` outputs, `R` LoRA rank, `V` vocabulary.

use super::Counters;
use super::work::{Kind, Work, forms};
use crate::ops::OpShape;
use crate::{AdamW, Attention, Dropout, LoraBackward, LoraForward, Ops, Result, Stream, View, ViewMut, Weight, Write, checks};
use std::sync::Arc;

/// Answers [`Ops::workspace_bytes`].
pub(super) type Sizes = dyn Fn(OpShape) -> usize + Send + Sync;

/// Operations that are counted and not executed.
pub struct SimOps {
    sizes: Box<Sizes>,
    counters: Arc<Counters>,
}

impl SimOps {
    pub(crate) fn new(sizes: Box<Sizes>, counters: Arc<Counters>) -> SimOps {
        SimOps { sizes, counters }
    }

    fn op(&self, work: Work, s: &dyn Stream) {
        self.counters.work(s.index(), work, "");
    }
}

/// Bytes moved for an output: an addition reads it too.
fn out(view: &View, write: Write) -> usize {
    match write {
        Write::Set => view.bytes(),
        Write::Add => 2 * view.bytes(),
    }
}

fn grad(g: Option<(&ViewMut, Write)>) -> usize {
    g.map_or(0, |(v, w)| out(v, w))
}

fn bytes(views: &[&View]) -> usize {
    views.iter().map(|v| v.bytes()).sum()
}

/// `2 m n k`, the multiplications and additions of a matrix product.
fn matmul(m: usize, n: usize, k: usize) -> u64 {
    2 * m as u64 * n as u64 * k as u64
}

fn each(per_elem: u64, elems: usize) -> u64 {
    per_elem * elems as u64
}

/// (query, key) pairs that the causal mask and the window leave, per head, for documents of one length.
fn pairs(tokens: usize, documents: usize, window: Option<usize>) -> u64 {
    let (tokens, documents) = (tokens as u64, documents.max(1) as u64);
    let per_doc = tokens.div_ceil(documents);
    let seen = window.map_or(per_doc, |w| (w as u64).min(per_doc));
    // The first `seen` queries see 1, 2, ... keys, the others `seen` each.
    documents * (seen * (seen + 1) / 2 + (per_doc - seen) * seen)
}

fn lora_shape(tokens: usize, inputs: usize, adapters: impl ExactSizeIterator<Item = (usize, usize)>) -> OpShape {
    let count = adapters.len();
    let (outputs, rank) = adapters.fold((0, 0), |(o, r), (outputs, rank)| (outputs.max(o), rank.max(r)));
    OpShape::Lora { tokens, inputs, outputs, rank, adapters: count }
}

impl Ops for SimOps {
    fn workspace_bytes(&self, shape: OpShape) -> usize {
        (self.sizes)(shape)
    }

    fn embedding(&self, y: &ViewMut, table: &View, ids: &View, hidden: usize, s: &dyn Stream) -> Result<()> {
        checks::embedding(y, table, ids, hidden)?;
        self.op(Work::moving(Kind::Embedding, y, 0, 2 * y.bytes() + ids.bytes()), s);
        Ok(())
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
        let vocab = dtable.elems().checked_div(hidden).unwrap_or(0);
        let needed = self.workspace_bytes(OpShape::EmbeddingBackward { tokens: ids.elems(), hidden, vocab });
        checks::embedding_backward(dtable, dy, ids, hidden, workspace, needed)?;
        let cleared = if write == Write::Set { dtable.bytes() } else { 0 };
        // Rows are read and written where they are hit: f32, one for each token.
        self.op(Work::moving(Kind::EmbeddingBackward, dtable, each(1, dy.elems()), cleared + 8 * dy.elems() + bytes(&[dy, ids])), s);
        Ok(())
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
        self.op(Work::moving(Kind::RmsNorm, y, each(4, x.elems()), bytes(&[y, rstd, x, weight])), s);
        Ok(())
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
        let needed = self.workspace_bytes(OpShape::RmsNormBackward { rows, cols });
        checks::rmsnorm_backward(dx, dweight, dy, x, rstd, weight, rows, cols, workspace, needed)?;
        let per_elem = 8 * u64::from(dx.is_some()) + 3 * u64::from(dweight.is_some());
        let moved = grad(dx) + grad(dweight) + bytes(&[dy, x, rstd, weight]);
        self.op(Work::moving(Kind::RmsNormBackward, dy, each(per_elem, x.elems()), moved), s);
        Ok(())
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
        let moved = out(y, write) + bytes(&[x, &w.view]) + bias.map_or(0, View::bytes);
        let work = Work::moving(Kind::Linear, x, matmul(tokens, outputs, inputs), moved);
        self.op(work.products(forms::FORWARD, [tokens, outputs, inputs]), s);
        Ok(())
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
        let needed = self.workspace_bytes(OpShape::LinearBackward { tokens, inputs, outputs });
        checks::linear_backward(dx, dw, dbias, dy, x, w, tokens, inputs, outputs, workspace, needed)?;
        let products = u64::from(dx.is_some()) + u64::from(dw.is_some());
        let flops = products * matmul(tokens, outputs, inputs) + dbias.map_or(0, |_| each(1, dy.elems()));
        let weight = dx.map_or(0, |_| w.view.bytes());
        let input = dw.and(x).map_or(0, View::bytes);
        let moved = grad(dx) + grad(dw) + grad(dbias) + dy.bytes() + weight + input;
        let which = if dx.is_some() { forms::DX } else { 0 } | if dw.is_some() { forms::DW } else { 0 };
        self.op(Work::moving(Kind::LinearBackward, dy, flops, moved).products(which, [tokens, outputs, inputs]), s);
        Ok(())
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
        let needed = self.workspace_bytes(lora_shape(tokens, inputs, adapters.iter().map(|a| (a.outputs, a.rank))));
        checks::lora(adapters, x, dropout, tokens, inputs, workspace, needed)?;
        let flops = adapters.iter().map(|a| matmul(tokens, a.rank, inputs) + matmul(tokens, a.outputs, a.rank)).sum();
        let moved: usize = adapters.iter().map(|a| out(&a.y, Write::Add) + bytes(&[&a.t, &a.a, &a.b])).sum();
        let outputs = adapters.iter().map(|a| a.outputs).sum();
        self.op(Work::moving(Kind::Lora, x, flops, moved + x.bytes()).products(forms::FORWARD, [tokens, outputs, inputs]), s);
        Ok(())
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
        let needed = self.workspace_bytes(lora_shape(tokens, inputs, adapters.iter().map(|a| (a.outputs, a.rank))));
        checks::lora_backward(dx, adapters, x, dropout, tokens, inputs, workspace, needed)?;
        // db and dt cost N O R each, da and dx N R I each.
        let over_inputs = 1 + u64::from(dx.is_some());
        let flops = adapters.iter().map(|a| 2 * matmul(tokens, a.outputs, a.rank) + over_inputs * matmul(tokens, a.rank, inputs)).sum();
        let per = |a: &LoraBackward| out(&a.da, a.write) + out(&a.db, a.write) + bytes(&[&a.dy, &a.t, &a.a, &a.b]);
        let moved = adapters.iter().map(per).sum::<usize>() + x.bytes() + dx.map_or(0, |v| out(v, Write::Add));
        let outputs = adapters.iter().map(|a| a.outputs).sum();
        self.op(Work::moving(Kind::LoraBackward, x, flops, moved).products(forms::DX, [tokens, outputs, inputs]), s);
        Ok(())
    }

    fn rope(&self, x: &ViewMut, table: &View, positions: &View, heads: usize, head_dim: usize, s: &dyn Stream) -> Result<()> {
        checks::rope(x, table, positions, heads, head_dim)?;
        let rows = positions.elems() * head_dim * 4;
        self.op(Work::moving(Kind::Rope, x, each(3, x.elems()), 2 * x.bytes() + rows + positions.bytes()), s);
        Ok(())
    }

    fn rope_backward(&self, dx: &ViewMut, table: &View, positions: &View, heads: usize, head_dim: usize, s: &dyn Stream) -> Result<()> {
        checks::rope_backward(dx, table, positions, heads, head_dim)?;
        let rows = positions.elems() * head_dim * 4;
        self.op(Work::moving(Kind::RopeBackward, dx, each(3, dx.elems()), 2 * dx.bytes() + rows + positions.bytes()), s);
        Ok(())
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
        let needed = self.workspace_bytes(OpShape::Attention { tokens, shape });
        checks::attention(o, lse, q, k, v, cu_seqlens, documents, tokens, shape, workspace, needed)?;
        // Scores and their product with v: two products of `D` a pair.
        let flops = 4 * (shape.heads * shape.head_dim) as u64 * pairs(tokens, documents, shape.window);
        let width = shape.heads * shape.head_dim;
        self.op(
            Work::moving(Kind::Attention, o, flops, bytes(&[o, lse, q, k, v])).products(0, [tokens, width, tokens / documents.max(1)]),
            s,
        );
        Ok(())
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
        let needed = self.workspace_bytes(OpShape::Attention { tokens, shape });
        checks::attention_backward(dq, dk, dv, dout, q, k, v, o, lse, cu_seqlens, documents, tokens, shape, workspace, needed)?;
        // Scores again, dv, dp, dq, dk: five products of `D` a pair.
        let flops = 10 * (shape.heads * shape.head_dim) as u64 * pairs(tokens, documents, shape.window);
        let (width, moved) = (shape.heads * shape.head_dim, bytes(&[dq, dk, dv, dout, q, k, v, o, lse]));
        self.op(Work::moving(Kind::AttentionBackward, dq, flops, moved).products(0, [tokens, width, tokens / documents.max(1)]), s);
        Ok(())
    }

    fn swiglu(&self, h: &ViewMut, gate: &View, up: &View, s: &dyn Stream) -> Result<()> {
        checks::swiglu(h, gate, up)?;
        self.op(Work::moving(Kind::Swiglu, h, each(5, h.elems()), bytes(&[h, gate, up])), s);
        Ok(())
    }

    fn swiglu_backward(&self, dgate: &ViewMut, dup: &ViewMut, dh: &View, gate: &View, up: &View, s: &dyn Stream) -> Result<()> {
        checks::swiglu_backward(dgate, dup, dh, gate, up)?;
        self.op(Work::moving(Kind::SwigluBackward, dgate, each(11, dh.elems()), bytes(&[dgate, dup, dh, gate, up])), s);
        Ok(())
    }

    fn linear_cross_entropy(
        &self,
        loss: &ViewMut,
        dx: Option<&ViewMut>,
        dw: Option<(&ViewMut, Write)>,
        x: &View,
        w: &Weight,
        labels: &View,
        _grad_scale: f32,
        tokens: usize,
        hidden: usize,
        vocab: usize,
        workspace: &ViewMut,
        s: &dyn Stream,
    ) -> Result<()> {
        let needed = self.workspace_bytes(OpShape::LinearCrossEntropy { tokens, hidden, vocab });
        checks::linear_cross_entropy(loss, dx, dw, x, w, labels, tokens, hidden, vocab, workspace, needed)?;
        let products = 1 + u64::from(dx.is_some()) + u64::from(dw.is_some());
        let moved = bytes(&[loss, x, &w.view, labels]) + dx.map_or(0, |v| v.bytes()) + grad(dw);
        let which = forms::FORWARD | if dx.is_some() { forms::DX } else { 0 } | if dw.is_some() { forms::DW } else { 0 };
        let work = Work::moving(Kind::LinearCrossEntropy, x, products * matmul(tokens, vocab, hidden), moved);
        self.op(work.products(which, [tokens, vocab, hidden]), s);
        Ok(())
    }

    fn sum(&self, out: &ViewMut, x: &View, s: &dyn Stream) -> Result<()> {
        checks::sum(out, x)?;
        self.op(Work::moving(Kind::Sum, x, each(1, x.elems()), bytes(&[out, x])), s);
        Ok(())
    }

    fn add(&self, out: &ViewMut, a: &View, b: &View, s: &dyn Stream) -> Result<()> {
        checks::add(out, a, b)?;
        self.op(Work::between(Kind::Add, out, each(1, out.elems()), bytes(&[out, a, b]), b, b.bytes()), s);
        Ok(())
    }

    fn add_into(&self, y: &ViewMut, x: &View, s: &dyn Stream) -> Result<()> {
        checks::add_into(y, x)?;
        self.op(Work::moving(Kind::AddInto, y, each(1, y.elems()), 2 * y.bytes() + x.bytes()), s);
        Ok(())
    }

    fn scale(&self, x: &ViewMut, _factor: f32, s: &dyn Stream) -> Result<()> {
        checks::scale(x)?;
        self.op(Work::moving(Kind::Scale, x, each(1, x.elems()), 2 * x.bytes()), s);
        Ok(())
    }

    fn cast(&self, dst: &ViewMut, src: &View, s: &dyn Stream) -> Result<()> {
        checks::cast(dst, src)?;
        self.op(Work::between(Kind::Cast, src, 0, bytes(&[dst, src]), dst, dst.bytes()), s);
        Ok(())
    }

    fn count_nonfinite(&self, out: &ViewMut, x: &View, s: &dyn Stream) -> Result<()> {
        checks::count_nonfinite(out, x)?;
        self.op(Work::moving(Kind::CountNonfinite, x, 0, bytes(&[out, x])), s);
        Ok(())
    }

    fn sum_squares(&self, nodes: &ViewMut, x: &View, first_chunk: usize, workspace: &ViewMut, s: &dyn Stream) -> Result<()> {
        let needed = self.workspace_bytes(OpShape::SumSquares { elems: x.elems() });
        checks::sum_squares(nodes, x, first_chunk, workspace, needed)?;
        self.op(Work::between(Kind::SumSquares, x, each(2, x.elems()), bytes(&[nodes, x]), nodes, nodes.bytes()), s);
        Ok(())
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
        self.op(Work::moving(Kind::ClipScale, nodes, each(1, nodes.elems()), bytes(&[norm, scale, nodes])), s);
        Ok(())
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
        let moved = 2 * bytes(&[param, m, v]) + bytes(&[g, scale]) + copy_out.map_or(0, |c| c.bytes());
        self.counters.work(s.index(), Work::moving(Kind::AdamW, param, each(16, param.elems()), moved), param.name());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::pairs;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn pairs_are_those_of_the_mask(per_doc in 1usize..40, documents in 1usize..5, window in prop::option::of(1usize..50)) {
            let one: usize = (0..per_doc).map(|q| (0..=q).filter(|k| window.is_none_or(|w| q - k < w)).count()).sum();
            prop_assert_eq!(pairs(per_doc * documents, documents, window), (one * documents) as u64);
        }
    }
}
