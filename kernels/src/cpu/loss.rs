//! Output head and cross entropy, without the logits of all tokens ever being in memory.
//!
//! Trained tokens (label >= 0) are gathered into chunks; the others cost nothing. For a chunk: logits `x W^T` in f32, a stable
//! softmax per row whose gradient replaces the logits in place, then `dx = dlogits W` and `dw += dlogits^T x` before the next
//! chunk. Exponentials are f32 and good to about an ulp; sums over the vocabulary are collected in f64 per block and logarithms
//! taken in f64, once a row, so that a loss carries the rounding of its logits and little else. Where pairs of bf16 have instructions
//! of their own, gradients of logits of a bf16 model are rounded to bf16 for their two products, as mixed precision does.
#![allow(unsafe_code)]

use super::float::{Float, FloatMut, Shared, bf16_bits};
use super::matmul::{Operand, Product, matmul};
use super::pool::Pool;
use super::simd::simd_fn;
use crate::{Error, Result, Write};

/// Bytes of logits that a chunk may take.
const LOGITS_BYTES: usize = 48 << 20;
/// Elements whose exponentials are summed in f32 before they join the f64 total of a row.
const SUM_BLOCK: usize = 512;

/// The input of the head and where its gradient goes.
pub enum Hidden<'a> {
    /// `x [N,C]`; no gradient is asked for.
    Read(Float<'a>),
    /// `x [N,C]` and `dx [N,C]` apart.
    Gradient(Float<'a>, FloatMut<'a>),
    /// `dx` replaces `x`.
    InPlace(FloatMut<'a>),
}

impl Hidden<'_> {
    fn x(&self) -> Float<'_> {
        match self {
            Hidden::Read(x) | Hidden::Gradient(x, _) => *x,
            Hidden::InPlace(x) => x.view(),
        }
    }

    fn dx(&mut self) -> Option<FloatMut<'_>> {
        match self {
            Hidden::Read(_) => None,
            Hidden::Gradient(_, dx) | Hidden::InPlace(dx) => Some(dx.reborrow()),
        }
    }
}

/// Tokens of a chunk.
const fn chunk_tokens(tokens: usize, vocab: usize) -> usize {
    let fit = LOGITS_BYTES / (4 * if vocab == 0 { 1 } else { vocab }) / 8 * 8;
    let fit = if fit < 16 { 16 } else { fit };
    if tokens < fit { tokens } else { fit }
}

/// Bytes of the workspace of [`linear_cross_entropy`]: a chunk's logits, its rows of x and dx, and its tokens' numbers.
pub const fn workspace_bytes(tokens: usize, hidden: usize, vocab: usize) -> usize {
    4 * chunk_tokens(tokens, vocab) * (vocab + 2 * hidden + 1)
}

/// `loss [N] = -log softmax(x W^T)[label]`, 0 where the label is negative; gradients of `grad_scale * sum(loss)`: `dx` (see
/// [`Hidden`]) and `dw [V,C]`. `w [V,C]`, `labels [N]`. Fails, before anything is written, on a label that is not below `V`.
#[allow(clippy::too_many_arguments)]
pub fn linear_cross_entropy(
    pool: &Pool,
    loss: &mut [f32],
    x: Hidden<'_>,
    dw: Option<(&mut [f32], Write)>,
    w: Float<'_>,
    labels: &[i32],
    grad_scale: f32,
    tokens: usize,
    hidden: usize,
    vocab: usize,
    workspace: &mut [f32],
) -> Result<()> {
    let narrow = pool.isa().has_pairs() && matches!(w, Float::Bf16(_));
    linear_cross_entropy_as(narrow, pool, loss, x, dw, w, labels, grad_scale, tokens, hidden, vocab, workspace)
}

/// [`linear_cross_entropy`], with the choice of the machine made for it: `narrow` rounds gradients of logits to bf16.
#[allow(clippy::too_many_arguments)]
pub(super) fn linear_cross_entropy_as(
    narrow: bool,
    pool: &Pool,
    loss: &mut [f32],
    mut x: Hidden<'_>,
    mut dw: Option<(&mut [f32], Write)>,
    w: Float<'_>,
    labels: &[i32],
    grad_scale: f32,
    tokens: usize,
    hidden: usize,
    vocab: usize,
    workspace: &mut [f32],
) -> Result<()> {
    if let Some((n, label)) = labels[..tokens].iter().enumerate().find(|(_, l)| **l >= 0 && **l as usize >= vocab) {
        return Err(Error::Shape {
            op: "linear_cross_entropy",
            what: format!("label {label} of token {n} is not below the vocabulary of {vocab}; does the tokenizer belong to the model?"),
        });
    }
    let most = chunk_tokens(tokens, vocab);
    let (logits, rest) = workspace.split_at_mut(most * vocab);
    let (x_rows, rest) = rest.split_at_mut(most * hidden);
    let (dx_rows, numbers) = rest.split_at_mut(most * hidden);
    let numbers: &mut [u32] = bytemuck::cast_slice_mut(&mut numbers[..most]);
    let gradient = dw.is_some() || x.dx().is_some();
    for n in (0..tokens).filter(|n| labels[*n] < 0) {
        loss[n] = 0.0;
        if let Some(mut dx) = x.dx() {
            zero(dx.slice(n * hidden, hidden));
        }
    }
    let mut trained = (0..tokens).filter(|n| labels[*n] >= 0);
    loop {
        let mut rows = 0;
        for (slot, n) in numbers.iter_mut().zip(&mut trained) {
            *slot = n as u32;
            rows += 1;
        }
        if rows == 0 {
            break;
        }
        let numbers = &numbers[..rows];
        let logits = &mut logits[..rows * vocab];
        let x_chunk = gather(x_rows, x.x(), numbers, hidden);
        let product = |m, n, k, write| Product { m, n, k, alpha: 1.0, bias: None, write };
        let (xs, ws) = (Operand::k_inner(x_chunk, hidden), Operand::k_inner(w, hidden));
        matmul(pool, FloatMut::F32(logits), vocab, xs, ws, product(rows, vocab, hidden, Write::Set));
        softmax(pool, loss, logits, labels, numbers, grad_scale, gradient, narrow, vocab);
        // Narrow rows fill the first half of their place.
        let (dlogits, stride) = match narrow {
            true => (Float::Bf16(bytemuck::cast_slice(logits)), 2 * vocab),
            false => (Float::F32(logits), vocab),
        };
        if let Some((dw, write)) = &mut dw {
            let (d, xs) = (Operand::k_outer(dlogits, stride), Operand::k_outer(x_chunk, hidden));
            matmul(pool, FloatMut::F32(dw), hidden, d, xs, product(vocab, hidden, rows, *write));
            *write = Write::Add;
        }
        if let Some(mut dx) = x.dx() {
            let out = match dx {
                FloatMut::F32(_) => FloatMut::F32(&mut dx_rows[..rows * hidden]),
                FloatMut::Bf16(_) => FloatMut::Bf16(&mut bytemuck::cast_slice_mut(dx_rows)[..rows * hidden]),
            };
            let (d, ws) = (Operand::k_inner(dlogits, stride), Operand::k_outer(w, hidden));
            matmul(pool, out, hidden, d, ws, product(rows, hidden, vocab, Write::Set));
            scatter(&mut dx, dx_rows, numbers, hidden);
        }
    }
    // No token was trained: the gradient is zero, and nothing has written it.
    if let Some((dw, Write::Set)) = dw {
        dw[..vocab * hidden].fill(0.0);
    }
    Ok(())
}

fn zero(x: FloatMut<'_>) {
    match x {
        FloatMut::F32(x) => x.fill(0.0),
        FloatMut::Bf16(x) => x.fill(half::bf16::ZERO),
    }
}

/// Rows `numbers` of `x`, side by side in `out`.
fn gather<'a>(out: &'a mut [f32], x: Float<'_>, numbers: &[u32], hidden: usize) -> Float<'a> {
    fn rows<E: Copy>(out: &mut [E], x: &[E], numbers: &[u32], hidden: usize) {
        for (o, n) in out.chunks_exact_mut(hidden.max(1)).zip(numbers) {
            o.copy_from_slice(&x[*n as usize * hidden..][..hidden]);
        }
    }
    match x {
        Float::F32(x) => {
            rows(out, x, numbers, hidden);
            Float::F32(out)
        }
        Float::Bf16(x) => {
            let out = bytemuck::cast_slice_mut(out);
            rows(out, x, numbers, hidden);
            Float::Bf16(out)
        }
    }
}

/// The reverse of [`gather`].
fn scatter(dx: &mut FloatMut<'_>, rows: &[f32], numbers: &[u32], hidden: usize) {
    fn put<E: Copy>(dx: &mut [E], rows: &[E], numbers: &[u32], hidden: usize) {
        for (row, n) in rows.chunks_exact(hidden.max(1)).zip(numbers) {
            dx[*n as usize * hidden..][..hidden].copy_from_slice(row);
        }
    }
    match dx {
        FloatMut::F32(dx) => put(dx, rows, numbers, hidden),
        FloatMut::Bf16(dx) => put(dx, bytemuck::cast_slice(rows), numbers, hidden),
    }
}

/// Losses of the tokens `numbers`; with `gradient`, their logits become `grad_scale * (softmax - onehot)`, as bf16 in the first
/// half of each row if `narrow`.
#[allow(clippy::too_many_arguments)]
fn softmax(
    pool: &Pool,
    loss: &mut [f32],
    logits: &mut [f32],
    labels: &[i32],
    numbers: &[u32],
    grad_scale: f32,
    gradient: bool,
    narrow: bool,
    vocab: usize,
) {
    let (loss, logits, isa) = (Shared::new(loss), Shared::new(logits), pool.isa());
    pool.for_each(numbers.len(), |item| {
        let n = numbers[item] as usize;
        // SAFETY: an item has a row and a token of its own.
        let (row, loss) = unsafe { (logits.range(item * vocab, vocab), loss.range(n, 1)) };
        let label = labels[n] as usize;
        let chosen = row[label];
        let max = row_max(isa, row);
        let sum = row_exp(isa, row, max, gradient);
        loss[0] = (sum.ln() + f64::from(max) - f64::from(chosen)) as f32;
        if gradient {
            let probability = f64::from(row[label]) / sum;
            row_scale(isa, row, (f64::from(grad_scale) / sum) as f32, narrow);
            let chosen = (f64::from(grad_scale) * (probability - 1.0)) as f32;
            if narrow {
                bytemuck::cast_slice_mut::<f32, u16>(row)[label] = bf16_bits(chosen);
            } else {
                row[label] = chosen;
            }
        }
    });
}

simd_fn! {
    /// Largest element. A NaN may get lost here; it reaches the loss through the sum of exponentials.
    fn row_max[S](s: S, row: &[f32]) -> f32 {
        let mut most = s.splat(f32::NEG_INFINITY);
        let mut i = 0;
        while i + S::LANES <= row.len() {
            most = s.max(most, s.load_slice(&row[i..]));
            i += S::LANES;
        }
        let mut top = s.reduce_max(most);
        while i < row.len() {
            top = if row[i] > top { row[i] } else { top };
            i += 1;
        }
        top
    }
}

simd_fn! {
    /// Sum of `exp(x - max)`; with `store` the exponentials replace the row.
    fn row_exp[S](s: S, row: &mut [f32], max: f32, store: bool) -> f64 {
        let shift = s.splat(max);
        let mut total = 0.0f64;
        let mut i = 0;
        while i < row.len() {
            let end = (i + SUM_BLOCK).min(row.len());
            let mut sum = s.splat(0.0);
            while i + S::LANES <= end {
                let e = s.exp(s.sub(s.load_slice(&row[i..]), shift));
                sum = s.add(sum, e);
                if store {
                    s.store_slice(&mut row[i..], e);
                }
                i += S::LANES;
            }
            total += f64::from(s.reduce_add(sum));
            if i < end {
                // The tail of the last block: one padded vector, whose other lanes are exp(-inf) = 0.
                let mut lanes = [f32::NEG_INFINITY; 16];
                let n = end - i;
                lanes[..n].copy_from_slice(&row[i..end]);
                let e = s.exp(s.sub(s.load_slice(&lanes), shift));
                s.store_slice(&mut lanes, e);
                for (x, e) in row[i..end].iter_mut().zip(&lanes[..n]) {
                    total += f64::from(*e);
                    if store {
                        *x = *e;
                    }
                }
                i = end;
            }
        }
        total
    }
}

simd_fn! {
    /// Multiplies a row; with `narrow` it is rounded to bf16, into the first half of its place.
    fn row_scale[S](s: S, row: &mut [f32], factor: f32, narrow: bool) {
        if !narrow {
            for x in row {
                *x *= factor;
            }
            return;
        }
        let (at, by) = (row.as_mut_ptr(), s.splat(factor));
        let whole = row.len() / S::LANES * S::LANES;
        for i in (0..whole).step_by(S::LANES) {
            // SAFETY: inside the row; a vector is read before the halves of vectors before it are overwritten.
            unsafe { s.store_bf16(at.cast::<u16>().add(i), s.mul(s.load(at.add(i)), by)) };
        }
        for i in whole..row.len() {
            // SAFETY: as above.
            unsafe { at.cast::<u16>().add(i).write(bf16_bits(at.add(i).read() * factor)) };
        }
    }
}
