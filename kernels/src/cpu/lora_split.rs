//! LoRA where pairs of bf16 have instructions of their own (AVX512-BF16, AMX): the f32 adapters, and what lies between their two
//! products, are split into sums of two bf16, `v = hi + lo` with an error of at most 2^-17 |v|, and every product runs on bf16
//! operands alone. Parts stand side by side, so that a product of parts is one product: `t = x [hi; lo]^T` is folded in f32, and
//! `y += t B^T` has the columns `[t_hi, t_lo, t_hi]` against `[B_hi, B_hi, B_lo]` (what `t_lo B_lo` would add is below the rest's
//! rounding). Sums stay in f32 and in the order of the tokens, as in [`super::lora`], which chooses between the two.
#![allow(unsafe_code)]

use super::float::{Float, FloatMut, bf16_bits};
use super::lora::{Backward, Forward, product};
use super::matmul::{MAX_TERMS, Operand, Product, matmul, matmul_terms};
use super::pool::Pool;
use super::simd::simd_fn;
use crate::Write;
use half::bf16;

/// f32 elements of a part of the workspace: whole cache lines.
const fn line(elems: usize) -> usize {
    elems.next_multiple_of(16)
}

/// The same for a part of bf16.
const fn half_line(elems: usize) -> usize {
    line(elems.div_ceil(2))
}

/// f32 elements of workspace of [`forward`] and [`backward`]; `outputs` and `rank` are the largest, all parts exist at once.
pub const fn workspace_elems(tokens: usize, inputs: usize, outputs: usize, rank: usize, adapters: usize) -> usize {
    let ranks = rank * adapters;
    let forward = half_line(2 * ranks * inputs) + line(2 * tokens * ranks) + half_line(3 * tokens * rank) + half_line(3 * outputs * rank);
    let per_adapter = half_line(2 * tokens * rank)
        + line(2 * outputs * rank)
        + half_line(2 * outputs * rank)
        + line(2 * tokens * rank)
        + line(tokens * rank);
    let backward = per_adapter + half_line(3 * tokens * ranks) + line(2 * ranks * inputs) + half_line(3 * ranks * inputs);
    if forward > backward { forward } else { backward }
}

/// Cuts f32 off the front of the workspace.
fn take<'a>(work: &mut &'a mut [f32], elems: usize) -> &'a mut [f32] {
    let (front, rest) = std::mem::take(work).split_at_mut(line(elems));
    *work = rest;
    &mut front[..elems]
}

/// Cuts bf16 off the front of the workspace.
fn take_half<'a>(work: &mut &'a mut [f32], elems: usize) -> &'a mut [bf16] {
    &mut bytemuck::cast_slice_mut(take(work, half_line(elems)))[..elems]
}

simd_fn! {
    /// The parts of `factor * from [rows, cols]` in rows `stride` apart: the upper at each of the offsets `hi`, the lower at each of `lo`.
    fn split[S](s: S, out: &mut [bf16], stride: usize, hi: &[usize], lo: &[usize], factor: f32, from: &[f32], rows: usize, cols: usize) {
        let _ = s;
        for r in 0..rows {
            let from = &from[r * cols..][..cols];
            for h in hi {
                for (o, v) in out[r * stride + h..][..cols].iter_mut().zip(from) {
                    *o = bf16::from_bits(bf16_bits(factor * *v));
                }
            }
            for l in lo {
                for (o, v) in out[r * stride + l..][..cols].iter_mut().zip(from) {
                    let v = factor * *v;
                    let upper = f32::from_bits(u32::from(bf16_bits(v)) << 16);
                    *o = bf16::from_bits(bf16_bits(v - upper));
                }
            }
        }
    }
}

simd_fn! {
    /// `out [cols, rows]` receives the sum of the parts of `from`: its rows from 0 and from `rows` on, transposed.
    fn fold_transposed[S](s: S, out: &mut [f32], write: Write, from: &[f32], rows: usize, cols: usize) {
        let _ = s;
        let (hi, lo) = from.split_at(rows * cols);
        for (c, out) in out[..rows * cols].chunks_exact_mut(rows.max(1)).enumerate() {
            for (r, o) in out.iter_mut().enumerate() {
                let v = hi[r * cols + c] + lo[r * cols + c];
                *o = if matches!(write, Write::Add) { *o + v } else { v };
            }
        }
    }
}

simd_fn! {
    /// `out [rows, cols]` receives the sum of the parts of `from`, rows `stride` apart: its columns from 0 and from `lo` on.
    fn fold[S](s: S, out: &mut [f32], write: Write, from: &[f32], stride: usize, lo: usize, rows: usize, cols: usize) {
        let _ = s;
        for (r, out) in out[..rows * cols].chunks_exact_mut(cols.max(1)).enumerate() {
            let (hi, lo) = (&from[r * stride..][..cols], &from[r * stride + lo..][..cols]);
            for ((o, h), l) in out.iter_mut().zip(hi).zip(lo) {
                *o = if matches!(write, Write::Add) { *o + (h + l) } else { h + l };
            }
        }
    }
}

/// The frozen layer of an adapter: its weight `[O,I]`, its bias `[O]`, and how the sum of both is written.
#[derive(Clone, Copy)]
pub struct Base<'a> {
    /// `[O, I]`.
    pub w: &'a [bf16],
    /// `[O]`.
    pub bias: Option<Float<'a>>,
    /// How `y` is written.
    pub write: Write,
}

/// As [`super::lora::forward`] without dropout, of bf16 `x`. With `bases`, one for each adapter, `y` receives layer and adapter in one sum.
pub fn forward(
    pool: &Pool,
    adapters: &mut [Forward<'_>],
    bases: Option<&[Base<'_>]>,
    x: &[bf16],
    tokens: usize,
    inputs: usize,
    mut work: &mut [f32],
) {
    let isa = pool.isa();
    let ranks = adapters.iter().map(|a| a.rank).sum::<usize>();
    // [2 sum R, I] and [N, 2 sum R], upper parts first.
    let (a2, t2) = (take_half(&mut work, 2 * ranks * inputs), take(&mut work, 2 * tokens * ranks));
    let mut top = 0;
    for adapter in adapters.iter() {
        split(isa, &mut a2[top * inputs..], inputs, &[0], &[ranks * inputs], 1.0, adapter.a, adapter.rank, inputs);
        top += adapter.rank;
    }
    let (x, a) = (Operand::k_inner(Float::Bf16(x), inputs), Operand::k_inner(Float::Bf16(a2), inputs));
    matmul(pool, FloatMut::F32(t2), 2 * ranks, x, a, product(tokens, 2 * ranks, inputs, 1.0, Write::Set));
    let mut left = 0;
    for (i, adapter) in adapters.iter_mut().enumerate() {
        let (r, o) = (adapter.rank, adapter.outputs);
        fold(isa, adapter.t, Write::Set, &t2[left..], 2 * ranks, ranks, tokens, r);
        let mut rest = &mut *work;
        let (t3, b3) = (take_half(&mut rest, 3 * tokens * r), take_half(&mut rest, 3 * o * r));
        split(isa, t3, 3 * r, &[0, 2 * r], &[r], adapter.scale, adapter.t, tokens, r);
        split(isa, b3, 3 * r, &[0, r], &[2 * r], 1.0, adapter.b, o, r);
        let low_rank = (Operand::k_inner(Float::Bf16(t3), 3 * r), Operand::k_inner(Float::Bf16(b3), 3 * r), 3 * r);
        let y = adapter.y.reborrow();
        match bases.map(|b| b[i]) {
            None => sum(pool, y, o, &[low_rank], product(tokens, o, 0, 1.0, Write::Add)),
            Some(base) => {
                let w = Operand::k_inner(Float::Bf16(base.w), inputs);
                let p = Product { bias: base.bias, ..product(tokens, o, 0, 1.0, base.write) };
                sum(pool, y, o, &[(x, w, inputs), low_rank], p);
            }
        }
        left += r;
    }
}

/// [`matmul_terms`] of either type of result.
fn sum(pool: &Pool, c: FloatMut<'_>, stride: usize, terms: &[(Operand<'_>, Operand<'_>, usize)], p: Product<'_>) {
    if !pool.isa().has_pairs() {
        // Tests run this path on any machine: one product after the other.
        let mut c = c;
        for (i, (a, b, k)) in terms.iter().enumerate() {
            let p = if i == 0 { Product { k: *k, ..p } } else { Product { k: *k, bias: None, write: Write::Add, ..p } };
            matmul(pool, c.reborrow(), stride, *a, *b, p);
        }
        return;
    }
    match c {
        FloatMut::F32(c) => matmul_terms(pool, c, stride, terms, p),
        FloatMut::Bf16(c) => matmul_terms(pool, c, stride, terms, p),
    }
}

/// As [`super::lora::backward`] without dropout, of bf16 `x` and `dy`. With `weights`, one `[O,I]` for each adapter (at most
/// [`MAX_LAYERS`]), `dx` receives the gradients through layers and adapters in one sum.
#[allow(clippy::too_many_arguments)]
pub fn backward(
    pool: &Pool,
    dx: Option<(FloatMut<'_>, Write)>,
    adapters: &mut [Backward<'_>],
    weights: Option<&[&[bf16]]>,
    x: &[bf16],
    tokens: usize,
    inputs: usize,
    mut work: &mut [f32],
) {
    let isa = pool.isa();
    let ranks = adapters.iter().map(|a| a.rank).sum::<usize>();
    // [N, 3 sum R]: dt as upper, lower and upper parts; the first two thirds are also the parts for dA.
    let dt3 = take_half(&mut work, 3 * tokens * ranks);
    let mut left = 0;
    for adapter in adapters.iter_mut() {
        let (r, o, dy) = (adapter.rank, adapter.outputs, adapter.dy);
        let mut rest = &mut *work;
        let (t2, db2) = (take_half(&mut rest, 2 * tokens * r), take(&mut rest, 2 * o * r));
        split(isa, t2, 2 * r, &[0], &[r], 1.0, adapter.t, tokens, r);
        // dB^T = t^T dy: dy, the larger, is packed as it lies.
        let (rows, cols) = (Operand::k_outer(Float::Bf16(t2), 2 * r), Operand::k_outer(dy, o));
        matmul(pool, FloatMut::F32(db2), o, rows, cols, product(2 * r, o, tokens, adapter.scale, Write::Set));
        fold_transposed(isa, adapter.db, adapter.write, db2, r, o);
        let (b2, dt2, dt) = (take_half(&mut rest, 2 * o * r), take(&mut rest, 2 * tokens * r), take(&mut rest, tokens * r));
        split(isa, b2, 2 * r, &[0], &[r], 1.0, adapter.b, o, r);
        let (rows, cols) = (Operand::k_inner(dy, o), Operand::k_outer(Float::Bf16(b2), 2 * r));
        matmul(pool, FloatMut::F32(dt2), 2 * r, rows, cols, product(tokens, 2 * r, o, adapter.scale, Write::Set));
        fold(isa, dt, Write::Set, dt2, 2 * r, r, tokens, r);
        split(isa, &mut dt3[left..], 3 * ranks, &[0, 2 * ranks], &[ranks], 1.0, dt, tokens, r);
        left += r;
    }
    let (da2, a3) = (take(&mut work, 2 * ranks * inputs), take_half(&mut work, 3 * ranks * inputs));
    let (rows, cols) = (Operand::k_outer(Float::Bf16(dt3), 3 * ranks), Operand::k_outer(Float::Bf16(x), inputs));
    matmul(pool, FloatMut::F32(da2), inputs, rows, cols, product(2 * ranks, inputs, tokens, 1.0, Write::Set));
    let mut top = 0;
    for adapter in adapters.iter_mut() {
        let (r, at) = (adapter.rank, top * inputs);
        fold(isa, adapter.da, adapter.write, &da2[at..], inputs, ranks * inputs, r, inputs);
        split(isa, &mut a3[at..], inputs, &[0, ranks * inputs], &[2 * ranks * inputs], 1.0, adapter.a, r, inputs);
        top += r;
    }
    let Some((dx, write)) = dx else { return };
    let low_rank = (Operand::k_inner(Float::Bf16(dt3), 3 * ranks), Operand::k_outer(Float::Bf16(a3), inputs), 3 * ranks);
    let mut terms = [low_rank; MAX_TERMS];
    let layers = weights.map_or(0, <[_]>::len);
    for ((term, w), adapter) in terms.iter_mut().zip(weights.unwrap_or_default()).zip(adapters.iter()) {
        let o = adapter.outputs;
        *term = (Operand::k_inner(adapter.dy, o), Operand::k_outer(Float::Bf16(w), inputs), o);
    }
    sum(pool, dx, inputs, &terms[..=layers], product(tokens, inputs, 0, 1.0, write));
}

/// Layers of one [`backward`].
pub const MAX_LAYERS: usize = MAX_TERMS - 1;
