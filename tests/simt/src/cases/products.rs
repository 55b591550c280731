//! Small cases of the operations on matrix cores: linear layers, LoRA, attention, the output head.

use super::{Case, case, read, rounded};
use crate::testing::normal;
use zrt_kernels::{Attention, DType, Dropout, LoraBackward, LoraForward, OpShape, ViewMut, Weight, Write};

pub(super) fn linear(name: &'static str, dtype: DType, tokens: usize, inputs: usize, outputs: usize) -> Case {
    case(name, rounded(dtype), move |rig| {
        let (ops, s) = (rig.ops(), rig.stream());
        let [x, w, dy] = [(tokens * inputs, 1), (outputs * inputs, 2), (tokens * outputs, 3)]
            .map(|(n, seed)| rig.tensor(&normal(n, dtype, seed), dtype));
        let (w, bias) = (Weight::from(w.view()), rig.tensor(&normal(outputs, dtype, 4), dtype));
        let (y, dx) = (rig.empty(tokens * outputs, dtype), rig.empty(tokens * inputs, dtype));
        let (dw, db) = (rig.empty(outputs * inputs, DType::F32), rig.empty(outputs, DType::F32));
        ops.linear(&y, Write::Set, &x, &w, Some(&bias), tokens, inputs, outputs, s)?;
        let work = rig.workspace(OpShape::LinearBackward { tokens, inputs, outputs });
        let set = |v| Some((v, Write::Set));
        ops.linear_backward(set(&dx), set(&dw), set(&db), &dy, Some(&x), &w, tokens, inputs, outputs, &work, s)?;
        read(rig, &[&y, &dx, &dw, &db])
    })
}

/// Adapters (outputs, rank) that share an input, forward and backward.
pub(super) fn lora(
    name: &'static str,
    dtype: DType,
    tokens: usize,
    inputs: usize,
    adapters: &'static [(usize, usize)],
    dropout: Option<Dropout>,
) -> Case {
    // Both sides split numbers to 2^-17, or round bf16 results.
    let tolerance = rounded(dtype).max(5e-6);
    case(name, tolerance, move |rig| {
        let (ops, s, f) = (rig.ops(), rig.stream(), DType::F32);
        let rank = adapters.iter().map(|a| a.1).max().unwrap_or(0);
        let outputs = adapters.iter().map(|a| a.0).max().unwrap_or(0);
        let work = rig.workspace(OpShape::Lora { tokens, inputs, outputs, rank, adapters: adapters.len() });
        let x = rig.tensor(&normal(tokens * inputs, dtype, 1), dtype);
        let (mut forward, mut backward) = (Vec::new(), Vec::new());
        for (&(outputs, rank), site) in adapters.iter().zip(0u32..) {
            let make = |n, dtype, seed| rig.tensor(&normal(n, dtype, 10 * site + seed), dtype);
            let (a, b) = (make(rank * inputs, f, 2).view(), make(outputs * rank, f, 3).view());
            let (y, t) = (make(tokens * outputs, dtype, 4), rig.empty(tokens * rank, f));
            let (da, db, dy) = (rig.empty(rank * inputs, f), rig.empty(outputs * rank, f), make(tokens * outputs, dtype, 5).view());
            let (scale, write) = (0.5, Write::Set);
            backward.push(LoraBackward { da, db, write, dy, t: t.view(), a: a.clone(), b: b.clone(), scale, outputs, rank, site });
            forward.push(LoraForward { y, t, a, b, scale, outputs, rank, site });
        }
        ops.lora(&forward, &x, dropout, tokens, inputs, &work, s)?;
        let dx = rig.tensor(&normal(tokens * inputs, dtype, 6), dtype);
        ops.lora_backward(Some(&dx), &backward, &x, dropout, tokens, inputs, &work, s)?;
        let of = forward.iter().zip(&backward).flat_map(|(f, b)| [&f.t, &f.y, &b.da, &b.db]);
        read(rig, &of.chain([&dx]).collect::<Vec<&ViewMut>>())
    })
}

pub(super) fn attention(name: &'static str, dtype: DType, documents: &'static [usize], head_dim: usize, window: Option<usize>) -> Case {
    // Probabilities and their gradients are rounded to bf16, and in f32 differ by the error of an exponent of about 10.
    let tolerance = if dtype == DType::BF16 { 1.6e-2 } else { 1e-5 };
    case(name, tolerance, move |rig| {
        let (ops, s) = (rig.ops(), rig.stream());
        let (tokens, heads, kv_heads) = (documents.iter().sum::<usize>(), 4, 2);
        let shape = Attention { heads, kv_heads, head_dim, window, scale: 1.0 / (head_dim as f32).sqrt() };
        let mut bounds = vec![0];
        bounds.extend(documents.iter().scan(0, |at, n| {
            *at += *n as i32;
            Some(*at)
        }));
        bounds.resize(tokens + 1, tokens as i32);
        let (bounds, n, k) = (rig.ints(&bounds), tokens * heads * head_dim, tokens * kv_heads * head_dim);
        let [q, dout, k_in, v_in] = [(n, 1), (n, 2), (k, 3), (k, 4)].map(|(n, seed)| rig.tensor(&normal(n, dtype, seed), dtype));
        let [o, dq, dk, dv] = [n, n, k, k].map(|n| rig.empty(n, dtype));
        let (lse, work) = (rig.empty(tokens * heads, DType::F32), rig.workspace(OpShape::Attention { tokens, shape }));
        let d = documents.len();
        ops.attention(&o, &lse, &q, &k_in, &v_in, &bounds, d, tokens, shape, &work, s)?;
        ops.attention_backward(&dq, &dk, &dv, &dout, &q, &k_in, &v_in, &o, &lse, &bounds, d, tokens, shape, &work, s)?;
        read(rig, &[&o, &lse, &dq, &dk, &dv])
    })
}

pub(super) fn cross_entropy(name: &'static str, dtype: DType) -> Case {
    // Gradients of bf16 logits are rounded, and dx again.
    case(name, 2.0 * rounded(dtype), move |rig| {
        let (tokens, hidden, vocab) = (19, 24, 133);
        let (x, w) = (rig.tensor(&normal(tokens * hidden, dtype, 1), dtype), rig.tensor(&normal(vocab * hidden, dtype, 2), dtype));
        let labels: Vec<i32> = (0..tokens).map(|n| if n % 5 == 3 { -100 } else { (n * 37 % vocab) as i32 }).collect();
        let (loss, dx, dw) = (rig.empty(tokens, DType::F32), rig.empty(tokens * hidden, dtype), rig.empty(vocab * hidden, DType::F32));
        let work = rig.workspace(OpShape::LinearCrossEntropy { tokens, hidden, vocab });
        let (dw_set, labels, w) = (Some((&dw, Write::Set)), rig.ints(&labels), Weight::from(w.view()));
        rig.ops().linear_cross_entropy(&loss, Some(&dx), dw_set, &x, &w, &labels, 0.1, tokens, hidden, vocab, &work, rig.stream())?;
        read(rig, &[&loss, &dx, &dw])
    })
}
