//! Causal grouped-query attention over packed documents with an online softmax (Dao 2023), forward and backward, in tiles:
//! scores exist for one tile of keys and one block of queries at a time, never as an `N x N` matrix.
//!
//! Two ways: [`vectors`] for every processor and type, [`tiles`] for bf16 where pairs have instructions. Both keep scores transposed,
//! `[keys][queries]`: then keys are used as they lie in memory and the softmax needs no sums across lanes.
//!
//! A work item of forward is one (document, kv head, some of its queries), of backward one (document, kv head), which adds to the
//! gradients of its keys and values in the order of its queries. Everything an item reads and all its tile borders are relative
//! to its document, so other documents and threads change no bit.
#![allow(unsafe_code)]

#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod tiles;
mod vectors;

#[cfg(target_arch = "x86_64")]
use super::matmul::pairs::by_unit;
use super::operand::{Operand, Raw};
use super::pool::Pool;
use crate::{Attention, Error, Result};

/// Lanes of the widest instruction set.
const MAX_LANES: usize = 16;
/// Largest head dimension: what fits the scratch of a thread, and far above any model.
pub const MAX_HEAD_DIM: usize = 512;

/// Width of a row of `D` elements, padded to whole register tiles of any instruction set.
fn padded(head_dim: usize) -> usize {
    head_dim.next_multiple_of(2 * MAX_LANES)
}

/// f32 elements of workspace of [`backward`]: gradients of keys and values in f32, for each kv head. Forward needs none.
pub fn workspace_elems(tokens: usize, shape: Attention) -> usize {
    2 * tokens * shape.kv_heads * padded(shape.head_dim)
}

/// Where documents begin and end, checked: ascending from 0 to `tokens`.
fn boundaries<'a>(op: &'static str, cu_seqlens: &'a [i32], documents: usize, tokens: usize) -> Result<&'a [i32]> {
    let bounds = &cu_seqlens[..=documents];
    let fail = |i: usize, expected: String| {
        let what = format!("cu_seqlens[{i}] is {}, expected {expected} (boundaries ascend from 0 to the number of tokens)", bounds[i]);
        Err(Error::Shape { op, what })
    };
    if bounds[0] != 0 {
        return fail(0, "0".into());
    }
    if let Some(i) = bounds.windows(2).position(|w| w[0] > w[1]) {
        return fail(i + 1, format!("at least {}", bounds[i]));
    }
    if bounds[documents] as usize != tokens {
        return fail(documents, format!("{tokens}"));
    }
    Ok(bounds)
}

/// One document: its first token and its tokens.
#[derive(Clone, Copy)]
struct Document {
    start: usize,
    tokens: usize,
}

/// Every kv head of every document that has tokens.
fn groups(bounds: &[i32], shape: Attention) -> Vec<Group> {
    let documents = bounds.windows(2).map(|w| Document { start: w[0] as usize, tokens: (w[1] - w[0]) as usize }).filter(|d| d.tokens > 0);
    documents.flat_map(|document| (0..shape.kv_heads).map(move |kv_head| Group { shape, document, kv_head })).collect()
}

/// A kv head of a document, and the query heads that use it.
#[derive(Clone, Copy)]
struct Group {
    shape: Attention,
    document: Document,
    kv_head: usize,
}

impl Group {
    fn per_kv(&self) -> usize {
        self.shape.heads / self.shape.kv_heads
    }

    /// Index of a query in `lse [N, H]`; times `D` its first element in `q [N, H*D]`. `head` counts inside the group.
    #[inline(always)]
    fn query(&self, token: usize, head: usize) -> usize {
        (self.document.start + token) * self.shape.heads + self.kv_head * self.per_kv() + head
    }

    /// First element of key `j` in `k [N, K*D]`.
    #[inline(always)]
    fn key(&self, j: usize) -> usize {
        ((self.document.start + j) * self.shape.kv_heads + self.kv_head) * self.shape.head_dim
    }
}

/// Operands of [`forward`].
#[derive(Clone, Copy)]
pub struct Forward {
    /// `[N, H*D]` out.
    pub o: Operand,
    /// `[N, H]` out.
    pub lse: Raw<f32>,
    /// `[N, H*D]`.
    pub q: Operand,
    /// `[N, K*D]`.
    pub k: Operand,
    /// `[N, K*D]`.
    pub v: Operand,
}

/// Cuts the front off the scratch.
fn take<'a>(scratch: &mut &'a mut [f32], elems: usize) -> &'a mut [f32] {
    // Whole cache lines, so that all parts stay aligned.
    let (front, rest) = std::mem::take(scratch).split_at_mut(elems.next_multiple_of(16));
    *scratch = rest;
    &mut front[..elems]
}

/// Operands of [`backward`].
#[derive(Clone, Copy)]
pub struct Backward {
    /// `[N, H*D]` out.
    pub dq: Operand,
    /// `[N, K*D]` out.
    pub dk: Operand,
    /// `[N, K*D]` out.
    pub dv: Operand,
    /// `[N, H*D]`.
    pub dout: Operand,
    /// `[N, H*D]`.
    pub q: Operand,
    /// `[N, K*D]`.
    pub k: Operand,
    /// `[N, K*D]`.
    pub v: Operand,
    /// `[N, H*D]` of forward.
    pub o: Operand,
    /// `[N, H]` of forward.
    pub lse: Raw<f32>,
    /// See [`workspace_elems`].
    pub work: Raw<f32>,
}

/// [`crate::Ops::attention`].
pub fn forward(pool: &Pool, t: Forward, cu_seqlens: &[i32], documents: usize, tokens: usize, shape: Attention) -> Result<()> {
    let groups = groups(boundaries("attention", cu_seqlens, documents, tokens)?, shape);
    #[cfg(target_arch = "x86_64")]
    if pool.isa().has_pairs() && tiles::serve(&[t.q, t.k, t.v], shape) {
        // SAFETY: an `Isa` of this level exists only where the unit was detected.
        by_unit!(pool.isa(), U => unsafe { tiles::forward::<U>(pool, t, &groups) });
        return Ok(());
    }
    vectors::forward(pool, t, &groups);
    Ok(())
}

/// [`crate::Ops::attention_backward`]. With `P = exp(S - lse)`: `dV = P^T dO`, `dS = P * (dO V^T - rowsum(dO * O))`,
/// `dQ = scale dS K`, `dK = scale dS^T Q`.
pub fn backward(pool: &Pool, t: Backward, cu_seqlens: &[i32], documents: usize, tokens: usize, shape: Attention) -> Result<()> {
    let mut groups = groups(boundaries("attention_backward", cu_seqlens, documents, tokens)?, shape);
    // Long documents first, so that none is left for the end.
    groups.sort_by_key(|group| std::cmp::Reverse((group.document.tokens, group.document.start, group.kv_head)));
    #[cfg(target_arch = "x86_64")]
    if pool.isa().has_pairs() && tiles::serve(&[t.dout, t.q, t.k, t.v], shape) {
        // SAFETY: as in forward.
        by_unit!(pool.isa(), U => unsafe { tiles::backward::<U>(pool, t, tokens, &groups) });
        return Ok(());
    }
    vectors::backward(pool, t, tokens, &groups);
    Ok(())
}

/// `Ok` when attention on `isa` agrees with its vectors; part of the check before first use.
pub(crate) fn self_check(isa: super::simd::Isa) -> std::result::Result<(), String> {
    #[cfg(target_arch = "x86_64")]
    if isa.has_pairs() {
        // SAFETY: an `Isa` of this level exists only where the unit was detected.
        return by_unit!(isa, U => unsafe { tiles::self_check::<U>(isa) });
    }
    let _ = isa;
    Ok(())
}
