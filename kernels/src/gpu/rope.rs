//! Rotary embedding. `kernels/gpu/rope.cu`.

use super::elementwise::THREADS;
use super::launch::{Address, Call, Fault, Kernel, Launcher, by_type, int, whole_16};
use super::params::params;
use crate::{Result, Stream, View, ViewMut, checks};

pub(super) const KERNELS: &[Kernel] = &[Kernel::new::<Rope>("rope_f32", "rope.cu"), Kernel::new::<Rope>("rope_bf16", "rope.cu")];

params! {
    struct Rope {
        fault: Address,
        x: Address,
        table: Address,
        positions: Address,
        tokens: i64,
        tokens_per_block: i32,
        heads: i32,
        head_dim: i32,
        rows: i32,
        vector: i32,
        sign: f32,
    }
}

#[allow(clippy::too_many_arguments)]
fn rotate<L: Launcher>(
    launcher: &L,
    op: &'static str,
    x: &ViewMut,
    table: &View,
    positions: &View,
    heads: usize,
    head_dim: usize,
    sign: f32,
    s: &dyn Stream,
) -> Result<()> {
    let mut call = Call::new(launcher, op);
    let (px, pt, pp) = (call.write(x)?, call.read(table)?, call.read(positions)?);
    let half_bytes = head_dim / 2 * x.dtype().bytes();
    let vector = whole_16(&[px.0, pt.0, half_bytes as u64]);
    let piece = if vector { 16 / x.dtype().bytes() } else { 1 };
    let per_token = int(op, "heads x head_dim", heads * head_dim)? as usize / 2 / piece;
    // Enough tokens that every thread has a piece.
    let tokens_per_block = (THREADS as usize / per_token.max(1)).max(1);
    let (tokens, limit) = (positions.elems(), table.elems() / head_dim);
    let params = Rope {
        fault: Address(0),
        x: px,
        table: pt,
        positions: pp,
        tokens: tokens as i64,
        tokens_per_block: tokens_per_block as i32,
        heads: int(op, "heads", heads)?,
        head_dim: int(op, "head_dim", head_dim)?,
        rows: int(op, "rows of the table", limit)?,
        vector: vector.into(),
        sign,
    };
    if x.elems() > 0 {
        let grid = [tokens.div_ceil(tokens_per_block), 1, 1];
        call.launch_with_fault(by_type(x.dtype(), "rope_f32", "rope_bf16"), grid, THREADS, &params, Fault { what: "position", limit })?;
    }
    call.run(s)
}

pub(super) fn forward<L: Launcher>(
    launcher: &L,
    x: &ViewMut,
    table: &View,
    positions: &View,
    heads: usize,
    head_dim: usize,
    s: &dyn Stream,
) -> Result<()> {
    checks::rope(x, table, positions, heads, head_dim)?;
    rotate(launcher, "rope", x, table, positions, heads, head_dim, 1.0, s)
}

pub(super) fn backward<L: Launcher>(
    launcher: &L,
    dx: &ViewMut,
    table: &View,
    positions: &View,
    heads: usize,
    head_dim: usize,
    s: &dyn Stream,
) -> Result<()> {
    checks::rope_backward(dx, table, positions, heads, head_dim)?;
    rotate(launcher, "rope_backward", dx, table, positions, heads, head_dim, -1.0, s)
}
