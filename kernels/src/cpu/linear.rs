//! The linear layer: `y = x W^T + bias` and its three gradients, all one product each.
#![allow(unsafe_code)]

use super::float::{Elem, Float, FloatMut, Shared};
use super::matmul::{Operand, Product, matmul};
use super::pool::{Pool, range_of};
use super::simd::simd_fn;
use crate::Write;

/// Columns of one item of the bias gradient.
const BIAS_COLS: usize = 64;
/// Rows that are summed before they join the total, which keeps rounding errors of long sums small.
const BIAS_ROWS: usize = 64;

/// `y = x W^T + bias`, set or added. `y [N,O]`, `x [N,I]`, `w [O,I]`, `bias [O]`.
#[allow(clippy::too_many_arguments)]
pub fn forward(
    pool: &Pool,
    y: FloatMut<'_>,
    write: Write,
    x: Float<'_>,
    w: Float<'_>,
    bias: Option<Float<'_>>,
    tokens: usize,
    inputs: usize,
    outputs: usize,
) {
    let p = Product { m: tokens, n: outputs, k: inputs, alpha: 1.0, bias, write };
    matmul(pool, y, outputs, Operand::k_inner(x, inputs), Operand::k_inner(w, inputs), p);
}

/// `dx = dy W` `[N,I]`, `dw = dy^T x` `[O,I]`, `dbias = sum_n dy` `[O]`, each if asked for. `x` is needed for `dw` only; without
/// it `dw` is left alone.
#[allow(clippy::too_many_arguments)]
pub fn backward(
    pool: &Pool,
    dx: Option<(FloatMut<'_>, Write)>,
    dw: Option<(&mut [f32], Write)>,
    dbias: Option<(&mut [f32], Write)>,
    dy: Float<'_>,
    x: Option<Float<'_>>,
    w: Float<'_>,
    tokens: usize,
    inputs: usize,
    outputs: usize,
) {
    let product = |m, n, k, write| Product { m, n, k, alpha: 1.0, bias: None, write };
    if let Some((dx, write)) = dx {
        let p = product(tokens, inputs, outputs, write);
        matmul(pool, dx, inputs, Operand::k_inner(dy, outputs), Operand::k_outer(w, inputs), p);
    }
    if let (Some((dw, write)), Some(x)) = (dw, x) {
        let p = product(outputs, inputs, tokens, write);
        matmul(pool, FloatMut::F32(dw), inputs, Operand::k_outer(dy, outputs), Operand::k_outer(x, inputs), p);
    }
    if let Some((dbias, write)) = dbias {
        bias_backward(pool, dbias, write, dy, tokens, outputs);
    }
}

/// Scratch bytes of [`backward`]: none, packing uses the pool's.
pub const fn backward_workspace_bytes(_tokens: usize, _inputs: usize, _outputs: usize) -> usize {
    0
}

/// `dbias = sum_n dy[n]`: rows in order within groups of 64, groups in order.
fn bias_backward(pool: &Pool, dbias: &mut [f32], write: Write, dy: Float<'_>, tokens: usize, outputs: usize) {
    let out = Shared::new(&mut dbias[..outputs]);
    pool.for_each(outputs.div_ceil(BIAS_COLS), |item| {
        let cols = range_of(item, BIAS_COLS, outputs);
        let mut total = [0.0f32; BIAS_COLS];
        for first in (0..tokens).step_by(BIAS_ROWS) {
            let mut group = [0.0f32; BIAS_COLS];
            for n in first..(first + BIAS_ROWS).min(tokens) {
                match dy.slice(n * outputs + cols.start, cols.len()) {
                    Float::F32(row) => add_row(pool.isa(), &mut group, row),
                    Float::Bf16(row) => add_row(pool.isa(), &mut group, row),
                }
            }
            add_row(pool.isa(), &mut total, &group);
        }
        // SAFETY: items have disjoint columns.
        let out = unsafe { out.range(cols.start, cols.len()) };
        for (o, t) in out.iter_mut().zip(total) {
            *o = if write == Write::Add { *o + t } else { t };
        }
    });
}

simd_fn! {
    fn add_row[S, E: Elem](s: S, sum: &mut [f32; BIAS_COLS], row: &[E]) {
        let _ = s;
        for (t, v) in sum.iter_mut().zip(row) {
            *t += v.to_f32();
        }
    }
}
