//! Dense products: the linear layer and its gradients, each one launch of a GEMM, and the launch itself for whoever else has a
//! product to make. `kernels/gpu/gemm.cu`.
//!
//! A gradient of a weight has few tiles and a long sum over tokens: where its grid would leave compute units without work, the sum is
//! cut into parts, whose results [`column_sum`] adds in order.

use super::column_sum::column_sum;
use super::launch::{Address, Arch, Call, Dense, Form, Kernel, Launcher, by_type, whole_16, workspace_of};
use super::params::params;
use crate::{DType, Error, OpShape, Result, Stream, View, ViewMut, Weight, Write, checks};

pub(super) const KERNELS: &[Kernel] = &[
    Kernel::new::<Gemm>("gemm_nt_f32", "gemm.cu"),
    Kernel::new::<Gemm>("gemm_nn_f32", "gemm.cu"),
    Kernel::new::<Gemm>("gemm_tn_f32", "gemm.cu"),
    Kernel::new::<Gemm>("gemm_nt_bf16", "gemm.cu"),
    Kernel::new::<Gemm>("gemm_nn_bf16", "gemm.cu"),
    Kernel::new::<Gemm>("gemm_tn_bf16", "gemm.cu"),
    Kernel::new::<RowSums>("row_sums_f32", "gemm.cu"),
    Kernel::new::<RowSums>("row_sums_bf16", "gemm.cu"),
];

params! {
    struct Gemm {
        c: Address,
        c_f32: Address,
        a: Address,
        b: Address,
        bias: Address,
        lda: i64,
        ldb: i64,
        ldc: i64,
        m: i32,
        n: i32,
        k: i32,
        k_split: i32,
        vector: i32,
        vector_c: i32,
        add: i32,
        unused: i32,
    }
    struct RowSums {
        partial: Address,
        dy: Address,
        rows: i64,
        rows_per_group: i64,
        cols: i64,
    }
}

const THREADS: u32 = 256;
/// Rows and columns of a block's results.
const TILE: usize = 128;
/// Bytes of K that a step takes of each row, and steps in shared memory, with and without a copy engine.
const STEP_BYTES: usize = 64;
const STAGES: [usize; 2] = [4, 2];
/// Parts that a long sum is cut into at most, and tokens that a part has at least.
const MOST_PARTS: usize = 16;
const PART_TOKENS: usize = 512;
/// Rows of a block in sums of rows.
const GROUP_ROWS: usize = 64;

/// Adds the launch of a product, in `parts` parts of K; of more than one, c is f32, `[parts, M, N]`.
pub(super) fn gemm<L: Launcher>(call: &mut Call<'_, L>, op: &'static str, arch: &Arch, p: Dense, parts: usize) -> Result<()> {
    // A tile may reach past the end, in 32 bits.
    if [p.m, p.n, p.k].iter().any(|n| *n > i32::MAX as usize - 4096) {
        return Err(Error::Shape { op, what: format!("a product of {} x {} x {} is more than 32 bits can count", p.m, p.n, p.k) });
    }
    let (bytes, c_bytes) = (p.dtype.bytes(), p.c_dtype.bytes());
    let (lda, ldb) = (p.lda, p.ldb);
    let step = STEP_BYTES / bytes;
    let wide = p.c_dtype == DType::F32;
    let params = Gemm {
        c: if wide { Address(0) } else { p.c },
        c_f32: if wide { p.c } else { Address(0) },
        a: p.a,
        b: p.b,
        bias: p.bias,
        lda: lda as i64,
        ldb: ldb as i64,
        ldc: p.ldc as i64,
        m: p.m as i32,
        n: p.n as i32,
        k: p.k as i32,
        k_split: p.k.div_ceil(parts).next_multiple_of(step) as i32,
        vector: whole_16(&[p.a.0, p.b.0, (lda * bytes) as u64, (ldb * bytes) as u64]).into(),
        vector_c: whole_16(&[p.c.0, (p.ldc * c_bytes) as u64]).into(),
        add: p.add.into(),
        unused: 0,
    };
    let kernel = match p.form {
        Form::Nt => by_type(p.dtype, "gemm_nt_f32", "gemm_nt_bf16"),
        Form::Nn => by_type(p.dtype, "gemm_nn_f32", "gemm_nn_bf16"),
        Form::Tn => by_type(p.dtype, "gemm_tn_f32", "gemm_tn_bf16"),
    };
    let stages = STAGES[usize::from(arch.lanes == 64)];
    let grid = [p.m.div_ceil(TILE) * p.n.div_ceil(TILE), 1, parts];
    let shared_bytes = stages * 2 * TILE * STEP_BYTES;
    if parts > 1 {
        return call.launch(kernel, grid, THREADS, shared_bytes, &params);
    }
    call.launch_dense(kernel, grid, THREADS, shared_bytes, &params, p)
}

#[allow(clippy::too_many_arguments)]
pub(super) fn forward<L: Launcher>(
    launcher: &L,
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
    const OP: &str = "linear";
    checks::linear(y, x, w, bias, tokens, inputs, outputs)?;
    let mut call = Call::new(launcher, OP);
    let product = Dense {
        form: Form::Nt,
        dtype: x.dtype(),
        c_dtype: y.dtype(),
        c: call.write(y)?,
        a: call.read(x)?,
        b: call.read(&w.view)?,
        bias: call.read_some(bias)?,
        m: tokens,
        n: outputs,
        k: inputs,
        lda: inputs,
        ldb: inputs,
        ldc: outputs,
        add: write == Write::Add,
    };
    gemm(&mut call, OP, launcher.arch(), product, 1)?;
    call.run(s)
}

/// Parts of the sum over tokens of a weight's gradient.
fn parts(arch: &Arch, tokens: usize, inputs: usize, outputs: usize) -> usize {
    let tiles = inputs.div_ceil(TILE) * outputs.div_ceil(TILE);
    let wanted = (2 * arch.units as usize).div_ceil(tiles.max(1));
    wanted.min(tokens / PART_TOKENS).clamp(1, MOST_PARTS)
}

/// Bytes of partial gradients of a weight, and of a bias.
fn scratch(arch: &Arch, tokens: usize, inputs: usize, outputs: usize) -> [usize; 2] {
    let parts = parts(arch, tokens, inputs, outputs);
    let weight = if parts > 1 { parts * inputs * outputs * size_of::<f32>() } else { 0 };
    [weight, groups(tokens).0 * outputs * size_of::<f32>()]
}

/// Groups of rows of a bias's gradient, and rows of each; a grid has 65,535 rows.
fn groups(tokens: usize) -> (usize, usize) {
    let rows = GROUP_ROWS.max(tokens.div_ceil(65_535));
    (tokens.div_ceil(rows), rows)
}

/// Bytes of the workspace of [`backward`].
pub(super) fn workspace_bytes(arch: &Arch, tokens: usize, inputs: usize, outputs: usize) -> usize {
    workspace_of(&scratch(arch, tokens, inputs, outputs))
}

#[allow(clippy::too_many_arguments)]
pub(super) fn backward<L: Launcher>(
    launcher: &L,
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
    const OP: &str = "linear_backward";
    let arch = launcher.arch();
    let bytes = super::workspace_bytes(arch, OpShape::LinearBackward { tokens, inputs, outputs });
    checks::linear_backward(dx, dw, dbias, dy, x, w, tokens, inputs, outputs, workspace, bytes)?;
    let mut call = Call::new(launcher, OP);
    call.workspace(workspace)?;
    let [weight_bytes, bias_bytes] = scratch(arch, tokens, inputs, outputs);
    let (dtype, pdy) = (dy.dtype(), call.read(dy)?);
    if let Some((dx, write)) = dx {
        let (c, b) = (call.write(dx)?, call.read(&w.view)?);
        let (m, n, k) = (tokens, inputs, outputs);
        let (form, bias) = (Form::Nn, Address(0));
        let (ldb, add) = (form.row_of_b(n, k), write == Write::Add);
        let product = Dense { form, dtype, c_dtype: dtype, c, a: pdy, b, bias, m, n, k, lda: outputs, ldb, ldc: inputs, add };
        gemm(&mut call, OP, arch, product, 1)?;
    }
    if let (Some((dw, write)), Some(x)) = (dw, x) {
        let (out, b) = (call.write(dw)?, call.read(x)?);
        let parts = if launcher.has_blas() { 1 } else { parts(arch, tokens, inputs, outputs) };
        let (m, n, k) = (outputs, inputs, tokens);
        let (c, set) = if parts > 1 { (call.part(weight_bytes)?, Write::Set) } else { (out, write) };
        let (form, c_dtype, bias) = (Form::Tn, DType::F32, Address(0));
        let (ldb, add) = (form.row_of_b(n, k), set == Write::Add);
        let product = Dense { form, dtype, c_dtype, c, a: pdy, b, bias, m, n, k, lda: outputs, ldb, ldc: inputs, add };
        gemm(&mut call, OP, arch, product, parts)?;
        if parts > 1 {
            column_sum(&mut call, out, write, c, parts, m * n)?;
        }
    }
    if let Some((dbias, write)) = dbias {
        let (out, partial) = (call.write(dbias)?, call.part(bias_bytes)?);
        let (groups, rows_per_group) = groups(tokens);
        let params = RowSums { partial, dy: pdy, rows: tokens as i64, rows_per_group: rows_per_group as i64, cols: outputs as i64 };
        let kernel = by_type(dtype, "row_sums_f32", "row_sums_bf16");
        call.launch(kernel, [outputs.div_ceil(THREADS as usize), groups, 1], THREADS, 0, &params)?;
        column_sum(&mut call, out, write, partial, groups, outputs)?;
    }
    call.run(s)
}
