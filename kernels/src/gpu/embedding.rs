//! Embedding rows and their gradient: clears what is overwritten, links the tokens of each id, sums. `kernels/gpu/embedding.cu`.

use super::elementwise::{THREADS, fill_launch};
use super::launch::{Address, Call, Fault, Kernel, Launcher, by_type, int, whole_16, workspace_of};
use super::params::params;
use crate::{DType, OpShape, Result, Stream, View, ViewMut, Write, checks};

const SOURCE: &str = "embedding.cu";
pub(super) const KERNELS: &[Kernel] = &[
    Kernel::new::<Embedding>("embedding_f32", SOURCE),
    Kernel::new::<Embedding>("embedding_bf16", SOURCE),
    Kernel::new::<EmbeddingLinks>("embedding_links_chunk", SOURCE),
    Kernel::new::<EmbeddingLinks>("embedding_links_join", SOURCE),
    Kernel::new::<EmbeddingBackward>("embedding_backward_f32", SOURCE),
    Kernel::new::<EmbeddingBackward>("embedding_backward_bf16", SOURCE),
];

params! {
    struct Embedding {
        fault: Address,
        y: Address,
        table: Address,
        ids: Address,
        tokens: i64,
        hidden: i64,
        vocab: i32,
        vector: i32,
    }
    struct EmbeddingLinks {
        fault: Address,
        next: Address,
        first: Address,
        heads: Address,
        ids: Address,
        tokens: i64,
        vocab: i32,
        unused: i32,
    }
    struct EmbeddingBackward {
        dtable: Address,
        dy: Address,
        ids: Address,
        next: Address,
        first: Address,
        hidden: i64,
        vector: i32,
        unused: i32,
    }
}

/// Tokens that one block links.
const CHUNK: usize = 1024;

/// `next [N]`, `first [N]`, `heads [V]`, all i32.
fn parts(tokens: usize, vocab: usize) -> [usize; 3] {
    [tokens, tokens, vocab].map(|n| n * size_of::<i32>())
}

/// Bytes for the links.
pub(super) fn workspace_bytes(tokens: usize, vocab: usize) -> usize {
    workspace_of(&parts(tokens, vocab))
}

pub(super) fn forward<L: Launcher>(launcher: &L, y: &ViewMut, table: &View, ids: &View, hidden: usize, s: &dyn Stream) -> Result<()> {
    checks::embedding(y, table, ids, hidden)?;
    let mut call = Call::new(launcher, "embedding");
    let (py, pt, pi) = (call.write(y)?, call.read(table)?, call.read(ids)?);
    let (tokens, limit) = (ids.elems(), table.elems() / hidden);
    let vector = whole_16(&[py.0, pt.0, (hidden * y.dtype().bytes()) as u64]).into();
    let vocab = int("embedding", "vocab", limit)?;
    let params = Embedding { fault: Address(0), y: py, table: pt, ids: pi, tokens: tokens as i64, hidden: hidden as i64, vocab, vector };
    let kernel = by_type(y.dtype(), "embedding_f32", "embedding_bf16");
    call.launch_with_fault(kernel, [tokens, 1, 1], THREADS, &params, Fault { what: "id", limit })?;
    call.run(s)
}

#[allow(clippy::too_many_arguments)]
pub(super) fn backward<L: Launcher>(
    launcher: &L,
    dtable: &ViewMut,
    write: Write,
    dy: &View,
    ids: &View,
    hidden: usize,
    workspace: &ViewMut,
    s: &dyn Stream,
) -> Result<()> {
    const OP: &str = "embedding_backward";
    let (tokens, limit) = (ids.elems(), dtable.elems() / hidden.max(1));
    let bytes = super::workspace_bytes(launcher.arch(), OpShape::EmbeddingBackward { tokens, hidden, vocab: limit });
    checks::embedding_backward(dtable, dy, ids, hidden, workspace, bytes)?;
    int(OP, "tokens", tokens)?;
    let mut call = Call::new(launcher, OP);
    let (pdt, pdy, pi) = (call.write(dtable)?, call.read(dy)?, call.read(ids)?);
    call.workspace(workspace)?;
    let [next, first, heads] = parts(tokens, limit);
    let (next, first, heads) = (call.part(next)?, call.part(first)?, call.part(heads)?);
    if write == Write::Set {
        fill_launch(&mut call, launcher.arch(), pdt, DType::F32, dtable.elems(), 0.0)?;
    }
    if tokens > 0 {
        fill_launch(&mut call, launcher.arch(), heads, DType::I32, limit, -1.0)?;
        let vocab = int(OP, "vocab", limit)?;
        let links = EmbeddingLinks { fault: Address(0), next, first, heads, ids: pi, tokens: tokens as i64, vocab, unused: 0 };
        let fault = Fault { what: "id", limit };
        call.launch_with_fault("embedding_links_chunk", [tokens.div_ceil(CHUNK), 1, 1], CHUNK as u32, &links, fault)?;
        call.launch("embedding_links_join", [1, 1, 1], CHUNK as u32, 0, &links)?;
        let vector = whole_16(&[pdt.0, pdy.0, (hidden * dy.dtype().bytes()) as u64]);
        let piece = if vector { 16 / dy.dtype().bytes() } else { 1 };
        let shares = hidden.div_ceil(THREADS as usize * piece).min(64);
        let params =
            EmbeddingBackward { dtable: pdt, dy: pdy, ids: pi, next, first, hidden: hidden as i64, vector: vector.into(), unused: 0 };
        let kernel = by_type(dy.dtype(), "embedding_backward_f32", "embedding_backward_bf16");
        call.launch(kernel, [tokens, shares, 1], THREADS, 0, &params)?;
    }
    call.run(s)
}
