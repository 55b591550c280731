//! RMSNorm: which kernel for which width, and how many blocks share the rows of the backward. `kernels/gpu/rmsnorm.cu`.

use super::column_sum::column_sum;
use super::launch::{Address, Arch, Call, Kernel, Launcher, by_type, int, whole_16, workspace_of};
use super::params::params;
use crate::{OpShape, Result, Stream, View, ViewMut, Write, checks};

pub(super) const KERNELS: &[Kernel] = &[
    Kernel::new::<RmsNorm>("rmsnorm_f32", "rmsnorm.cu"),
    Kernel::new::<RmsNorm>("rmsnorm_bf16", "rmsnorm.cu"),
    Kernel::new::<RmsNorm>("rmsnorm_wide_f32", "rmsnorm.cu"),
    Kernel::new::<RmsNorm>("rmsnorm_wide_bf16", "rmsnorm.cu"),
    Kernel::new::<RmsNorm>("rmsnorm_warp_f32", "rmsnorm.cu"),
    Kernel::new::<RmsNorm>("rmsnorm_warp_bf16", "rmsnorm.cu"),
    Kernel::new::<RmsNormBackward>("rmsnorm_backward_f32", "rmsnorm.cu"),
    Kernel::new::<RmsNormBackward>("rmsnorm_backward_bf16", "rmsnorm.cu"),
    Kernel::new::<RmsNormBackward>("rmsnorm_backward_wide_f32", "rmsnorm.cu"),
    Kernel::new::<RmsNormBackward>("rmsnorm_backward_wide_bf16", "rmsnorm.cu"),
    Kernel::new::<RmsNormBackward>("rmsnorm_backward_warp_f32", "rmsnorm.cu"),
    Kernel::new::<RmsNormBackward>("rmsnorm_backward_warp_bf16", "rmsnorm.cu"),
];

params! {
    struct RmsNorm {
        y: Address,
        rstd: Address,
        x: Address,
        weight: Address,
        rows: i64,
        cols: i32,
        vector: i32,
        eps: f32,
        unused: i32,
    }
    struct RmsNormBackward {
        dx: Address,
        partial: Address,
        dy: Address,
        x: Address,
        rstd: Address,
        weight: Address,
        rows: i64,
        rows_per_block: i64,
        cols: i32,
        vector: i32,
        add: i32,
        unused: i32,
    }
}

const THREADS: u32 = 256;
const WIDE_THREADS: u32 = 512;
/// Elements of a row that a thread of a warp, and of a block, holds.
const WARP_HELD: usize = 8;
const BLOCK_HELD: usize = 16;

/// Who takes a row.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Width {
    Warp,
    Block,
    Wide,
}

fn width(arch: &Arch, cols: usize) -> Width {
    if cols <= WARP_HELD * arch.lanes as usize {
        Width::Warp
    } else if cols <= BLOCK_HELD * THREADS as usize {
        Width::Block
    } else {
        Width::Wide
    }
}

/// Blocks of the backward, each with a row of partial sums: two for each compute unit, where there are rows for them.
fn groups(arch: &Arch, rows: usize) -> (usize, usize) {
    let per_block = rows.div_ceil(2 * arch.units as usize).max(1);
    (rows.div_ceil(per_block), per_block)
}

/// Bytes for the partial sums of the weight's gradient.
pub(super) fn workspace_bytes(arch: &Arch, rows: usize, cols: usize) -> usize {
    workspace_of(&[groups(arch, rows).0 * cols * size_of::<f32>()])
}

#[allow(clippy::too_many_arguments)]
pub(super) fn forward<L: Launcher>(
    launcher: &L,
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
    let mut call = Call::new(launcher, "rmsnorm");
    let (py, pr, px, pw) = (call.write(y)?, call.write(rstd)?, call.read(x)?, call.read(weight)?);
    let vector = whole_16(&[py.0, px.0, pw.0, (cols * x.dtype().bytes()) as u64]);
    let params = RmsNorm {
        y: py,
        rstd: pr,
        x: px,
        weight: pw,
        rows: rows as i64,
        cols: int("rmsnorm", "cols", cols)?,
        vector: vector.into(),
        eps,
        unused: 0,
    };
    let t = x.dtype();
    let (kernel, blocks, threads) = match width(launcher.arch(), cols) {
        Width::Warp => {
            (by_type(t, "rmsnorm_warp_f32", "rmsnorm_warp_bf16"), rows.div_ceil((THREADS / launcher.arch().lanes) as usize), THREADS)
        }
        Width::Block => (by_type(t, "rmsnorm_f32", "rmsnorm_bf16"), rows, THREADS),
        Width::Wide => (by_type(t, "rmsnorm_wide_f32", "rmsnorm_wide_bf16"), rows, WIDE_THREADS),
    };
    call.launch(kernel, [blocks, 1, 1], threads, 0, &params)?;
    call.run(s)
}

#[allow(clippy::too_many_arguments)]
pub(super) fn backward<L: Launcher>(
    launcher: &L,
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
    let arch = launcher.arch();
    let bytes = super::workspace_bytes(arch, OpShape::RmsNormBackward { rows, cols });
    checks::rmsnorm_backward(dx, dweight, dy, x, rstd, weight, rows, cols, workspace, bytes)?;
    if dx.is_none() && dweight.is_none() {
        return Ok(());
    }
    let mut call = Call::new(launcher, "rmsnorm_backward");
    let (blocks, rows_per_block) = groups(arch, rows);
    let pdx = call.write_some(dx.map(|d| d.0))?;
    let (pdy, px, pr, pw) = (call.read(dy)?, call.read(x)?, call.read(rstd)?, call.read(weight)?);
    let mut partial = Address(0);
    if dweight.is_some() {
        call.workspace(workspace)?;
        partial = call.part(blocks * cols * size_of::<f32>())?;
    }
    let vector = whole_16(&[pdx.0, pdy.0, px.0, pw.0, (cols * x.dtype().bytes()) as u64]);
    let params = RmsNormBackward {
        dx: pdx,
        partial,
        dy: pdy,
        x: px,
        rstd: pr,
        weight: pw,
        rows: rows as i64,
        rows_per_block: rows_per_block as i64,
        cols: int("rmsnorm_backward", "cols", cols)?,
        vector: vector.into(),
        add: dx.is_some_and(|d| d.1 == Write::Add).into(),
        unused: 0,
    };
    let t = x.dtype();
    let (kernel, threads, shared) = match width(arch, cols) {
        Width::Warp => {
            let warps = (THREADS / arch.lanes) as usize;
            (by_type(t, "rmsnorm_backward_warp_f32", "rmsnorm_backward_warp_bf16"), THREADS, warps * cols * size_of::<f32>())
        }
        Width::Block => (by_type(t, "rmsnorm_backward_f32", "rmsnorm_backward_bf16"), THREADS, 0),
        Width::Wide => (by_type(t, "rmsnorm_backward_wide_f32", "rmsnorm_backward_wide_bf16"), WIDE_THREADS, 0),
    };
    call.launch(kernel, [blocks, 1, 1], threads, shared, &params)?;
    if let Some((dweight, write)) = dweight {
        let out = call.write(dweight)?;
        column_sum(&mut call, out, write, partial, blocks, cols)?;
    }
    call.run(s)
}
