//! Attention of bf16 operands where pairs have instructions: tiles of 32 x 32 sums, of pairs of bf16 in f32, by AMX or by vectors.
//!
//! Queries come in **panels**: 32 tokens of one head. Panel `p` of a group holds tokens `32 (p / G)..` of head `p % G`, so panels are
//! in the order of their tokens. Keys come in chunks of [`KEYS`] from the start of the document on, in tiles of 32; a panel
//! skips the tiles of which it sees nothing. Keys, values and queries are packed once per item and chunk (`matmul::pairs::pack`),
//! zero beyond the document and beyond `D`.
//!
//! Scores are `[keys][queries]`. So keys and values are A operands as they lie; probabilities and their gradients, rounded to bf16,
//! are A operands as they are stored and B operands once neighbouring rows are interleaved; and no score is ever transposed. What
//! is summed over keys comes out as `[D][queries]` and is transposed once, at the end.
//!
//! P and dS are rounded to bf16 for the products that use them, as flash attention does on GPUs; sums, the softmax and its normalizer
//! are f32. The instructions take subnormal values as zero: below 1e-38 in P and dS, which nothing notices.

mod backward;
mod forward;

pub use backward::backward;
pub use forward::forward;

use super::{Backward, Forward, Group, MAX_HEAD_DIM};
use crate::Attention;
use crate::cpu::float::Float;
use crate::cpu::matmul::Operand as Strided;
use crate::cpu::matmul::pairs::{Rows, SIDE, STEP, STEP_ELEMS, Unit, pack};
use crate::cpu::operand::{Operand, Raw};
use crate::cpu::pool::Pool;
use crate::cpu::simd::{Isa, Simd};
use half::bf16;
use std::ops::Range;

/// Keys of a chunk.
const KEYS: usize = 128;
/// Tiles of keys in a chunk.
const TILES: usize = KEYS / SIDE;
/// Elements of `D` of all panels of an item together: what an item packs and sums stays in the second-level cache.
const ITEM_DIMS: usize = 4 * MAX_HEAD_DIM;
/// Elements of 32 x 32 sums.
const SUMS: usize = SIDE * SIDE;

/// Whether the operands and the shape are what tiles are for.
pub fn serve(operands: &[Operand], shape: Attention) -> bool {
    // The largest score is found before it is scaled.
    operands.iter().all(|x| matches!(x, Operand::Bf16(_))) && shape.scale > 0.0
}

/// `Ok` when a small case agrees with the vectors; part of the check before an instruction set is first used.
///
/// # Safety
/// The processor has the unit.
pub unsafe fn self_check<U: Unit>(isa: Isa) -> Result<(), String> {
    let shape = Attention { heads: 2, kv_heads: 1, head_dim: 40, window: None, scale: 0.15 };
    const TOKENS: usize = 45;
    let value = |i: usize| bf16::from_f32(((i * 37 % 101) as f32 - 50.0) / 32.0);
    let make = |heads: usize, from: usize| (0..TOKENS * heads * 40).map(|i| value(i * i + from)).collect::<Vec<_>>();
    let (mut q, mut k, mut v, mut dout) = (make(2, 0), make(1, 1), make(1, 2), make(2, 3));
    let pool = Pool::with_isa(1, isa).map_err(|e| e.to_string())?;
    let groups = super::groups(&[0, TOKENS as i32], shape);
    let mut run = |tiles: bool| {
        let [mut o, mut dq] = [(); 2].map(|()| vec![0f32; TOKENS * 80]);
        let [mut dk, mut dv] = [(); 2].map(|()| vec![0f32; TOKENS * 40]);
        let (mut lse, mut work) = (vec![0f32; TOKENS * 2], vec![0f32; super::workspace_elems(TOKENS, shape)]);
        let half = |x: &mut [bf16]| Operand::Bf16(Raw::new(x));
        let out = |x: &mut [f32]| Operand::F32(Raw::new(x));
        let (q, k, v, dout) = (half(&mut q), half(&mut k), half(&mut v), half(&mut dout));
        let (o, lse, work) = (&mut o, &mut lse, &mut work);
        let fw = Forward { o: out(o), lse: Raw::new(lse), q, k, v };
        let (dq, dk, dv) = (&mut dq, &mut dk, &mut dv);
        let bw = Backward { dq: out(dq), dk: out(dk), dv: out(dv), dout, q, k, v, o: fw.o, lse: fw.lse, work: Raw::new(work) };
        if tiles {
            // SAFETY: by contract; all operands that `serve` asks about are bf16.
            unsafe {
                forward::<U>(&pool, fw, &groups);
                backward::<U>(&pool, bw, TOKENS, &groups);
            }
        } else {
            super::vectors::forward(&pool, fw, &groups);
            super::vectors::backward(&pool, bw, TOKENS, &groups);
        }
        [std::mem::take(o), std::mem::take(dq), std::mem::take(dk), std::mem::take(dv)]
    };
    let (got, want) = (run(true), run(false));
    for ((name, got), want) in ["o", "dq", "dk", "dv"].iter().zip(&got).zip(&want) {
        let largest = want.iter().fold(0f32, |m, x| m.max(x.abs()));
        // P and dS are rounded to bf16, 2^-9 each; a wrong lane is off by the order of the largest.
        if let Some(i) = (0..got.len()).find(|i| got[*i].is_nan() || (got[*i] - want[*i]).abs() > 0.02 * largest) {
            return Err(format!("attention on tiles, {name} element {i}: {} instead of {}", got[i], want[i]));
        }
    }
    Ok(())
}

/// The elements of an operand that [`serve`] accepted.
fn halves(x: Operand) -> Raw<bf16> {
    match x {
        Operand::Bf16(x) => x,
        Operand::F32(_) => unreachable!("`serve` accepts bf16 alone"),
    }
}

/// One head's rows in a document: row `t` is `x[t * stride..][..D]`.
#[derive(Clone, Copy)]
struct Head<'a> {
    x: &'a [bf16],
    stride: usize,
    head_dim: usize,
}

impl<'a> Head<'a> {
    /// # Safety
    /// No one writes the head's rows.
    unsafe fn new(x: Raw<bf16>, first: usize, stride: usize, group: &Group) -> Head<'a> {
        let head_dim = group.shape.head_dim;
        // SAFETY: by contract; the last row ends inside the operand.
        Head { x: unsafe { x.read(first, (group.document.tokens - 1) * stride + head_dim) }, stride, head_dim }
    }

    /// Query head `head` of the group.
    ///
    /// # Safety
    /// As [`Head::new`].
    unsafe fn of_queries(x: Operand, group: &Group, head: usize) -> Head<'a> {
        let d = group.shape.head_dim;
        // SAFETY: passed on.
        unsafe { Head::new(halves(x), group.query(0, head) * d, group.shape.heads * d, group) }
    }

    /// The group's kv head.
    ///
    /// # Safety
    /// As [`Head::new`].
    unsafe fn of_keys(x: Operand, group: &Group) -> Head<'a> {
        // SAFETY: passed on.
        unsafe { Head::new(halves(x), group.key(0), group.shape.kv_heads * group.shape.head_dim, group) }
    }

    fn steps(&self) -> usize {
        self.head_dim.div_ceil(STEP)
    }

    /// Packs rows as A, for sums over `D`: `out [tile of 32 tokens][steps of D]`.
    #[inline(always)]
    fn pack_rows<S: Simd>(&self, s: S, out: &mut [f32], tokens: Range<usize>) {
        let (steps, from) = (self.steps(), Strided::k_inner(Float::Bf16(self.x), self.stride));
        assert!(out.len() >= tokens.len().div_ceil(SIDE) * steps * STEP_ELEMS);
        for (tile, first) in tokens.clone().step_by(SIDE).enumerate() {
            let rows = first..tokens.end.min(first + SIDE);
            // SAFETY: rows are inside the head, and there is room for each tile.
            unsafe { pack::pack_a(s, out.as_mut_ptr().add(tile * steps * STEP_ELEMS), self.x, &from, rows, 0..self.head_dim) };
        }
    }

    /// Packs the transpose as A, for sums over tokens: `out [32 of D][TILES of 32 tokens]`.
    #[inline(always)]
    fn pack_columns<S: Simd>(&self, s: S, out: &mut [f32], tokens: Range<usize>) {
        let from = Strided::k_outer(Float::Bf16(self.x), self.stride);
        assert!(out.len() >= self.steps() * TILES * STEP_ELEMS && tokens.len() <= KEYS);
        for (tile, first) in (0..self.head_dim).step_by(SIDE).enumerate() {
            let dims = first..self.head_dim.min(first + SIDE);
            // SAFETY: as above.
            unsafe { pack::pack_a(s, out.as_mut_ptr().add(tile * TILES * STEP_ELEMS), self.x, &from, dims, tokens.clone()) };
        }
    }

    /// Packs the transpose of at most 32 rows as B, for sums over `D`: `out [steps of D]`.
    #[inline(always)]
    fn pack_queries<S: Simd>(&self, s: S, out: &mut [f32], tokens: Range<usize>) {
        let from = Strided::k_inner(Float::Bf16(self.x), self.stride);
        assert!(out.len() >= self.steps() * STEP_ELEMS && tokens.len() <= SIDE);
        // SAFETY: as above.
        unsafe { pack::pack_b(s, out.as_mut_ptr(), self.steps() * STEP_ELEMS, self.x, &from, tokens, 0..self.head_dim) };
    }

    /// Packs at most 32 rows as B, for sums over tokens: 32 of `D` are `distance` elements after those before.
    #[inline(always)]
    fn pack_pairs<S: Simd>(&self, s: S, out: &mut [f32], distance: usize, tokens: Range<usize>) {
        let from = Strided::k_outer(Float::Bf16(self.x), self.stride);
        assert!(out.len() >= (self.steps() - 1) * distance + STEP_ELEMS && tokens.len() <= SIDE);
        // SAFETY: as above.
        unsafe { pack::pack_b(s, out.as_mut_ptr(), distance, self.x, &from, 0..self.head_dim, tokens) };
    }
}

/// A packed operand, from step `first` on.
fn packed(x: &[f32], first: usize, steps: usize) -> *const u8 {
    x[first * STEP_ELEMS..][..steps * STEP_ELEMS].as_ptr().cast()
}

/// As [`packed`], of rows.
fn packed_rows(x: &[f32], first: usize, steps: usize) -> Rows {
    Rows::packed(packed(x, first, steps))
}

/// 32 queries of one head.
#[derive(Clone, Copy)]
struct Panel {
    head: usize,
    /// First token, a multiple of 32.
    token: usize,
    /// Those that exist.
    tokens: usize,
    /// First key that a query sees, and the end of the keys.
    keys: (usize, usize),
}

impl Panel {
    fn new(group: &Group, index: usize) -> Panel {
        let (token, head) = (index / group.per_kv() * SIDE, index % group.per_kv());
        let tokens = SIDE.min(group.document.tokens - token);
        let low = group.shape.window.map_or(0, |w| (token + 1).saturating_sub(w));
        Panel { head, token, tokens, keys: (low, token + tokens) }
    }

    fn count(group: &Group) -> usize {
        group.document.tokens.div_ceil(SIDE) * group.per_kv()
    }

    fn range(&self) -> Range<usize> {
        self.token..self.token + self.tokens
    }

    /// Tiles of the chunk from key `chunk` on of which the panel sees something.
    fn tiles(&self, chunk: usize) -> Range<usize> {
        let tile = |key: usize| key.saturating_sub(chunk).min(KEYS);
        tile(self.keys.0) / SIDE..tile(self.keys.1).div_ceil(SIDE)
    }
}

/// Panels of an item for heads of `steps` steps.
fn panels_of_item(steps: usize) -> usize {
    ITEM_DIMS / (steps * STEP)
}

/// The chunk of keys that begins at `chunk`, as far as there are keys and panels up to `last` see any.
fn chunk_keys(group: &Group, last: &Panel, chunk: usize) -> Range<usize> {
    chunk..(chunk + KEYS).min(last.keys.1.next_multiple_of(SIDE)).min(group.document.tokens)
}

/// Chunks that panels `first..=last` see.
fn chunks(first: &Panel, last: &Panel) -> impl Iterator<Item = usize> + use<> {
    (first.keys.0 / KEYS * KEYS..last.keys.1).step_by(KEYS)
}

/// Hides the scores of keys from `key` on that a query of the panel does not see: `scores [32 keys][32 queries]`.
#[inline(always)]
fn mask<S: Simd>(s: S, scores: &mut [f32], key: usize, panel: &Panel, window: Option<usize>) {
    let seen_by_first = panel.token + 1 >= key + SIDE;
    let seen_by_last = window.is_none_or(|w| panel.token + SIDE <= key + w);
    if seen_by_first && seen_by_last {
        return;
    }
    let hidden = s.splat(f32::NEG_INFINITY);
    let positions: [f32; SIDE] = std::array::from_fn(|i| i as f32);
    for (j, row) in scores.chunks_exact_mut(SIDE).take(SIDE).enumerate() {
        // Relative to the panel's first token. Query i sees the key when relative <= i < relative + window; where that decides,
        // numbers are small and exact in f32.
        let relative = (key + j) as i64 - panel.token as i64;
        let at = s.splat(relative as f32);
        let beyond = window.map(|w| s.splat((relative + w as i64) as f32));
        for i in (0..SIDE).step_by(S::LANES) {
            let position = s.load_slice(&positions[i..]);
            let mut x = s.select_gt(at, position, hidden, s.load_slice(&row[i..]));
            if let Some(beyond) = beyond {
                x = s.select_gt(beyond, position, x, hidden);
            }
            s.store_slice(&mut row[i..], x);
        }
    }
}

/// Writes a panel's `[32 of D][32 of D][32 queries]` as rows of queries; `rows` is room for 32 of them.
#[inline(always)]
fn store_panel<S: Simd>(s: S, to: Operand, group: &Group, panel: &Panel, x: &[f32], rows: &mut [f32]) {
    let d = group.shape.head_dim;
    let wide = d.next_multiple_of(SIDE);
    assert!(x.len() >= wide * SIDE && rows.len() >= wide * SIDE);
    for (tile, x) in x[..wide * SIDE].chunks_exact(SUMS).enumerate() {
        for dim in (0..SIDE).step_by(8) {
            for query in (0..SIDE).step_by(8) {
                // SAFETY: blocks of 8 x 8 inside both.
                unsafe {
                    let to = rows.as_mut_ptr().add(query * wide + tile * SIDE + dim);
                    s.transpose8(x.as_ptr().add(dim * SIDE + query), SIDE, to, wide);
                }
            }
        }
    }
    for (i, row) in rows.chunks_exact(wide).take(panel.tokens).enumerate() {
        // SAFETY: a query belongs to one item.
        unsafe { to.store(s, group.query(panel.token + i, panel.head) * d, &row[..d]) };
    }
}
