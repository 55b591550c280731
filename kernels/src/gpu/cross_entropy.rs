//! Output head and cross entropy, in chunks of tokens whose logits are in the workspace: logits by a GEMM in f32, the softmax and its
//! gradient by `kernels/gpu/cross_entropy.cu`, then `dw` and `dx` by two more products before the next chunk. The gradient of the logits
//! has the type of x, so that all products run on matrix cores; all tokens are computed, trained or not: which are, only the GPU knows.

use super::launch::{Address, Call, Dense, Fault, Form, Kernel, Launcher, by_type, workspace_of};
use super::linear::gemm;
use super::params::params;
use crate::{DType, Error, OpShape, Result, Stream, View, ViewMut, Weight, Write, checks};

pub(super) const KERNELS: &[Kernel] = &[
    Kernel::new::<CrossEntropy>("cross_entropy_f32", "cross_entropy.cu"),
    Kernel::new::<CrossEntropy>("cross_entropy_bf16", "cross_entropy.cu"),
];

params! {
    struct CrossEntropy {
        fault: Address,
        loss: Address,
        labels: Address,
        logits: Address,
        dlogits: Address,
        first: i64,
        vocab: i32,
        ld: i32,
        grad_scale: f32,
        unused: i32,
    }
}

const THREADS: u32 = 512;
/// Bytes of f32 logits that a chunk may take: 512 tokens of a vocabulary of 128 k, enough for the products to be limited by arithmetic.
const LOGITS_BYTES: usize = 256 << 20;
/// Rows of a tile of the products, of which a chunk has whole ones.
const TILE: usize = 128;

/// Elements between rows of logits: rows begin at multiples of 16 bytes, whatever the vocabulary.
fn row(vocab: usize) -> usize {
    vocab.next_multiple_of(8)
}

fn chunk_tokens(tokens: usize, vocab: usize) -> usize {
    let fit = LOGITS_BYTES / (4 * row(vocab).max(1)) / TILE * TILE;
    tokens.min(fit.max(TILE))
}

/// Bytes of a chunk's logits, and of their gradient where it is bf16.
fn scratch(tokens: usize, vocab: usize) -> [usize; 2] {
    let elems = chunk_tokens(tokens, vocab) * row(vocab);
    [elems * size_of::<f32>(), elems * size_of::<u16>()]
}

/// Bytes of the workspace of [`linear_cross_entropy`].
pub(super) fn workspace_bytes(tokens: usize, vocab: usize) -> usize {
    workspace_of(&scratch(tokens, vocab))
}

#[allow(clippy::too_many_arguments)]
pub(super) fn linear_cross_entropy<L: Launcher>(
    launcher: &L,
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
    const OP: &str = "linear_cross_entropy";
    let arch = launcher.arch();
    let bytes = super::workspace_bytes(arch, OpShape::LinearCrossEntropy { tokens, hidden, vocab });
    checks::linear_cross_entropy(loss, dx, dw, x, w, labels, tokens, hidden, vocab, workspace, bytes)?;
    if !grad_scale.is_finite() {
        return Err(Error::Shape { op: OP, what: format!("grad_scale is {grad_scale}, expected a finite number") });
    }
    let mut call = Call::new(launcher, OP);
    call.workspace(workspace)?;
    let [logit_bytes, gradient_bytes] = scratch(tokens, vocab);
    let (logits, gradient) = (call.part(logit_bytes)?, call.part(gradient_bytes)?);
    let (ploss, plabels) = (call.write(loss)?, call.read(labels)?);
    let pdx = call.write_some(dx)?;
    let pdw = call.write_some(dw.map(|d| d.0))?;
    let (px, pw) = (call.read(x)?, call.read(&w.view)?);
    let dtype = x.dtype();
    let dlogits = match (dx.is_some() || dw.is_some(), dtype) {
        (false, _) => Address(0),
        (true, DType::F32) => logits,
        (true, _) => gradient,
    };
    let ld = row(vocab);
    let product = |form: Form, c, c_dtype, a, b, (m, n, k): (usize, usize, usize), lda, ldc, write| Dense {
        form,
        dtype,
        c_dtype,
        c,
        a,
        b,
        bias: Address(0),
        m,
        n,
        k,
        lda,
        ldb: form.row_of_b(n, k),
        ldc,
        add: write == Write::Add,
    };
    let mut write = dw.map_or(Write::Set, |d| d.1);
    let chunk = chunk_tokens(tokens, vocab).max(1);
    for first in (0..tokens).step_by(chunk) {
        let rows = chunk.min(tokens - first);
        let skip = |base: Address, bytes: usize| if base.0 == 0 { base } else { base.offset(first * bytes) };
        let xs = skip(px, hidden * dtype.bytes());
        let p = product(Form::Nt, logits, DType::F32, xs, pw, (rows, vocab, hidden), hidden, ld, Write::Set);
        gemm(&mut call, OP, arch, p, 1)?;
        let params = CrossEntropy {
            fault: Address(0),
            loss: skip(ploss, size_of::<f32>()),
            labels: skip(plabels, size_of::<i32>()),
            logits,
            dlogits,
            first: first as i64,
            vocab: vocab as i32,
            ld: ld as i32,
            grad_scale,
            unused: 0,
        };
        let kernel = by_type(dtype, "cross_entropy_f32", "cross_entropy_bf16");
        call.launch_with_fault(kernel, [rows, 1, 1], THREADS, &params, Fault { what: "label", limit: vocab })?;
        // Before dx, which may replace x.
        if pdw.0 != 0 {
            let p = product(Form::Tn, pdw, DType::F32, dlogits, xs, (vocab, hidden, rows), ld, hidden, write);
            gemm(&mut call, OP, arch, p, 1)?;
            write = Write::Add;
        }
        if pdx.0 != 0 {
            let to = skip(pdx, hidden * dtype.bytes());
            let p = product(Form::Nn, to, dtype, dlogits, pw, (rows, hidden, vocab), ld, hidden, Write::Set);
            gemm(&mut call, OP, arch, p, 1)?;
        }
    }
    // Of no tokens: zero, which an empty product writes.
    if tokens == 0 && pdw.0 != 0 && write == Write::Set {
        let p = product(Form::Tn, pdw, DType::F32, px, px, (vocab, hidden, 0), vocab, hidden, write);
        gemm(&mut call, OP, arch, p, 1)?;
    }
    call.run(s)
}
