//! LoRA (Hu et al. 2021) of the adapters that share one input: `t = drop(x) A^T`, `y += scale t B^T`, and the gradients.
//!
//! The adapters' A matrices are stacked in the workspace, so that one product makes the `t` of all (x is read once), and in
//! backward one product makes the `dA` of all and one adds to `dx`. Dropout gives every adapter an input of its own: then each is
//! computed by itself, over blocks of tokens, with the dropped input in the workspace. Sums over tokens run in the order of the
//! tokens either way. Where pairs of bf16 have instructions of their own, adapters are split instead ([`super::lora_split`]).
#![allow(unsafe_code)]

use super::dropout::{self, Mask};
use super::float::{Float, FloatMut, Shared};
use super::lora_split;
use super::matmul::{Operand, Product, matmul};
use super::pool::{Pool, range_of};
use crate::{Dropout, Write};

/// Tokens whose dropped input is in the workspace at once.
const DROP_TOKENS: usize = 256;

/// One adapter of [`forward`]; fields as in [`crate::LoraForward`].
pub struct Forward<'a> {
    /// `[N, O]`, added to.
    pub y: FloatMut<'a>,
    /// `[N, R]`, overwritten.
    pub t: &'a mut [f32],
    /// `[R, I]`.
    pub a: &'a [f32],
    /// `[O, R]`.
    pub b: &'a [f32],
    /// Multiplies the adapter's output.
    pub scale: f32,
    /// `O`.
    pub outputs: usize,
    /// `R`.
    pub rank: usize,
    /// Dropout key.
    pub site: u32,
}

/// One adapter of [`backward`]; fields as in [`crate::LoraBackward`].
pub struct Backward<'a> {
    /// `[R, I]`.
    pub da: &'a mut [f32],
    /// `[O, R]`.
    pub db: &'a mut [f32],
    /// How both are written.
    pub write: Write,
    /// `[N, O]`.
    pub dy: Float<'a>,
    /// `[N, R]` from forward.
    pub t: &'a [f32],
    /// `[R, I]`.
    pub a: &'a [f32],
    /// `[O, R]`.
    pub b: &'a [f32],
    /// As in forward.
    pub scale: f32,
    /// `O`.
    pub outputs: usize,
    /// `R`.
    pub rank: usize,
    /// As in forward.
    pub site: u32,
}

/// Bytes of the workspace of [`forward`] and [`backward`], with or without dropout, on any instruction set: stacked A and dA
/// `[sum R, I]`, stacked t or dt `[N, sum R]`, and a block of dropped input; or the parts of split adapters. `outputs` and `rank` are the largest.
pub const fn workspace_bytes(tokens: usize, inputs: usize, outputs: usize, rank: usize, adapters: usize) -> usize {
    let (ranks, block) = (rank * adapters, if tokens < DROP_TOKENS { tokens } else { DROP_TOKENS });
    let whole = 2 * ranks * inputs + tokens * ranks + block * inputs;
    let split = lora_split::workspace_elems(tokens, inputs, outputs, rank, adapters);
    4 * if whole > split { whole } else { split }
}

pub(super) fn product(m: usize, n: usize, k: usize, alpha: f32, write: Write) -> Product<'static> {
    Product { m, n, k, alpha, bias: None, write }
}

/// Whether f32 adapters are split to bf16 for products with bf16 activations.
pub(super) fn splits(pool: &Pool) -> bool {
    pool.isa().has_pairs()
}

/// For each adapter `t = drop(x) A^T`, `y += scale * t B^T`. `x [N,I]`.
pub fn forward(
    pool: &Pool,
    adapters: &mut [Forward<'_>],
    x: Float<'_>,
    dropout: Option<Dropout>,
    tokens: usize,
    inputs: usize,
    workspace: &mut [f32],
) {
    forward_as(splits(pool), pool, adapters, x, dropout, tokens, inputs, workspace)
}

/// [`forward`], with the choice of the machine made for it.
#[allow(clippy::too_many_arguments)]
pub(super) fn forward_as(
    split: bool,
    pool: &Pool,
    adapters: &mut [Forward<'_>],
    x: Float<'_>,
    dropout: Option<Dropout>,
    tokens: usize,
    inputs: usize,
    workspace: &mut [f32],
) {
    if let (true, Float::Bf16(x), None) = (split, x, dropout.filter(|d| d.p > 0.0)) {
        return lora_split::forward(pool, adapters, None, x, tokens, inputs, workspace);
    }
    let ranks: usize = adapters.iter().map(|a| a.rank).sum();
    if let Some(d) = dropout.filter(|d| d.p > 0.0) {
        for adapter in adapters.iter_mut() {
            let Some(mask) = Mask::new(Some(d), adapter.site) else { continue };
            let r = adapter.rank;
            for rows in (0..tokens.div_ceil(DROP_TOKENS)).map(|i| range_of(i, DROP_TOKENS, tokens)) {
                let dropped = drop_rows(pool, workspace, x, mask, rows.clone(), inputs);
                let t = FloatMut::F32(&mut adapter.t[rows.start * r..rows.end * r]);
                let (x, a) = (Operand::k_inner(dropped, inputs), Operand::k_inner(Float::F32(adapter.a), inputs));
                matmul(pool, t, r, x, a, product(rows.len(), r, inputs, 1.0, Write::Set));
            }
        }
    } else if let [one] = adapters {
        let (x, a) = (Operand::k_inner(x, inputs), Operand::k_inner(Float::F32(one.a), inputs));
        matmul(pool, FloatMut::F32(one.t), one.rank, x, a, product(tokens, one.rank, inputs, 1.0, Write::Set));
    } else {
        let (stacked, rest) = workspace.split_at_mut(ranks * inputs);
        let all = &mut rest[..tokens * ranks];
        let mut top = 0;
        for adapter in adapters.iter() {
            stacked[top * inputs..(top + adapter.rank) * inputs].copy_from_slice(&adapter.a[..adapter.rank * inputs]);
            top += adapter.rank;
        }
        let (x, a) = (Operand::k_inner(x, inputs), Operand::k_inner(Float::F32(stacked), inputs));
        matmul(pool, FloatMut::F32(all), ranks, x, a, product(tokens, ranks, inputs, 1.0, Write::Set));
        let mut left = 0;
        for adapter in adapters.iter_mut() {
            let r = adapter.rank;
            for (t, row) in adapter.t.chunks_exact_mut(r.max(1)).zip(all.chunks_exact(ranks.max(1))) {
                t.copy_from_slice(&row[left..left + r]);
            }
            left += r;
        }
    }
    for adapter in adapters.iter_mut() {
        let (r, o) = (adapter.rank, adapter.outputs);
        let (t, b) = (Operand::k_inner(Float::F32(adapter.t), r), Operand::k_inner(Float::F32(adapter.b), r));
        matmul(pool, adapter.y.reborrow(), o, t, b, product(tokens, o, r, adapter.scale, Write::Add));
    }
}

/// For each adapter `db = scale * dy^T t`, `dt = scale * dy B`, `da = dt^T drop(x)`, `dx += drop'(dt A)`. `x, dx [N,I]`.
#[allow(clippy::too_many_arguments)]
pub fn backward(
    pool: &Pool,
    dx: Option<FloatMut<'_>>,
    adapters: &mut [Backward<'_>],
    x: Float<'_>,
    dropout: Option<Dropout>,
    tokens: usize,
    inputs: usize,
    workspace: &mut [f32],
) {
    backward_as(splits(pool), pool, dx, adapters, x, dropout, tokens, inputs, workspace)
}

/// [`backward`], with the choice of the machine made for it.
#[allow(clippy::too_many_arguments)]
pub(super) fn backward_as(
    split: bool,
    pool: &Pool,
    mut dx: Option<FloatMut<'_>>,
    adapters: &mut [Backward<'_>],
    x: Float<'_>,
    dropout: Option<Dropout>,
    tokens: usize,
    inputs: usize,
    workspace: &mut [f32],
) {
    if let (true, Float::Bf16(x), None) = (split, x, dropout.filter(|d| d.p > 0.0))
        && adapters.iter().all(|a| matches!(a.dy, Float::Bf16(_)))
    {
        let dx = dx.map(|dx| (dx, Write::Add));
        return lora_split::backward(pool, dx, adapters, None, x, tokens, inputs, workspace);
    }
    let ranks: usize = adapters.iter().map(|a| a.rank).sum();
    let (stacked_a, rest) = workspace.split_at_mut(ranks * inputs);
    let (stacked_da, rest) = rest.split_at_mut(ranks * inputs);
    let (dt, block) = rest.split_at_mut(tokens * ranks);
    let mut left = 0;
    for adapter in adapters.iter_mut() {
        let (r, o) = (adapter.rank, adapter.outputs);
        let dy = adapter.dy;
        let t = Operand::k_outer(Float::F32(adapter.t), r);
        matmul(pool, FloatMut::F32(adapter.db), r, Operand::k_outer(dy, o), t, product(o, r, tokens, adapter.scale, adapter.write));
        let b = Operand::k_outer(Float::F32(adapter.b), r);
        let columns = FloatMut::F32(&mut dt[left..]);
        matmul(pool, columns, ranks, Operand::k_inner(dy, o), b, product(tokens, r, o, adapter.scale, Write::Set));
        left += r;
    }
    let dt = &*dt;
    if let Some(d) = dropout.filter(|d| d.p > 0.0) {
        let mut left = 0;
        for adapter in adapters.iter_mut() {
            let Some(mask) = Mask::new(Some(d), adapter.site) else { continue };
            let r = adapter.rank;
            for rows in (0..tokens.div_ceil(DROP_TOKENS)).map(|i| range_of(i, DROP_TOKENS, tokens)) {
                let write = if rows.start == 0 { adapter.write } else { Write::Add };
                let dropped = drop_rows(pool, block, x, mask, rows.clone(), inputs);
                let part = Float::F32(&dt[rows.start * ranks + left..]);
                let p = product(r, inputs, rows.len(), 1.0, write);
                matmul(pool, FloatMut::F32(adapter.da), inputs, Operand::k_outer(part, ranks), Operand::k_outer(dropped, inputs), p);
                if let Some(dx) = &mut dx {
                    let g = &mut block[..rows.len() * inputs];
                    let a = Operand::k_outer(Float::F32(adapter.a), inputs);
                    let p = product(rows.len(), inputs, r, 1.0, Write::Set);
                    matmul(pool, FloatMut::F32(g), inputs, Operand::k_inner(part, ranks), a, p);
                    let first = rows.start * inputs;
                    dropout::apply_backward(pool, dx.slice(first, rows.len() * inputs), g, mask, first as u64);
                }
            }
            left += r;
        }
        return;
    }
    let p = product(ranks, inputs, tokens, 1.0, Write::Set);
    let (rows, cols) = (Operand::k_outer(Float::F32(dt), ranks), Operand::k_outer(x, inputs));
    matmul(pool, FloatMut::F32(stacked_da), inputs, rows, cols, p);
    let mut top = 0;
    for adapter in adapters.iter_mut() {
        let own = top * inputs..(top + adapter.rank) * inputs;
        write_f32(pool, &mut adapter.da[..own.len()], adapter.write, &stacked_da[own.clone()]);
        stacked_a[own.clone()].copy_from_slice(&adapter.a[..own.len()]);
        top += adapter.rank;
    }
    if let Some(dx) = dx {
        let a = Operand::k_outer(Float::F32(stacked_a), inputs);
        let p = product(tokens, inputs, ranks, 1.0, Write::Add);
        matmul(pool, dx, inputs, Operand::k_inner(Float::F32(dt), ranks), a, p);
    }
}

/// The dropped input of tokens `rows`, in `block`.
fn drop_rows<'a>(pool: &Pool, block: &'a mut [f32], x: Float<'_>, mask: Mask, rows: std::ops::Range<usize>, inputs: usize) -> Float<'a> {
    let (first, elems) = (rows.start * inputs, rows.len() * inputs);
    let out = &mut block[..elems];
    dropout::apply(pool, out, x.slice(first, elems), mask, first as u64);
    Float::F32(out)
}

/// `out = v` or `out += v`.
fn write_f32(pool: &Pool, out: &mut [f32], write: Write, v: &[f32]) {
    const CHUNK: usize = 16 * 1024;
    let (elems, out) = (out.len(), Shared::new(out));
    pool.for_each(elems.div_ceil(CHUNK), |item| {
        let range = range_of(item, CHUNK, elems);
        // SAFETY: items have disjoint ranges.
        let out = unsafe { out.range(range.start, range.len()) };
        match write {
            Write::Set => out.copy_from_slice(&v[range]),
            Write::Add => out.iter_mut().zip(&v[range]).for_each(|(o, v)| *o += v),
        }
    });
}
