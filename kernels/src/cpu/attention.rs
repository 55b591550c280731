//! Causal grouped-query attention over packed documents with an online softmax (Dao 2023), forward and backward, in tiles:
//! scores exist for one tile of keys and one block of queries at a time, never as an `N x N` matrix.
//!
//! The query heads of a kv head are rows of one matrix: row `r` of a document is the query of token `r / G` in head `r % G`
//! of the group (`G = H / K`), so a tile of keys is loaded once for the whole group. Scores are kept transposed, `[keys][rows]`:
//! then keys are used as they lie in memory, only a tile's queries are transposed, and the softmax needs no sums across
//! lanes. All inner products are the register-blocked [`product`].
//!
//! A work item of forward is one (document, kv head, tile of rows), of backward one (document, kv head), which adds to the
//! gradients of its keys and values in the order of its tiles. Everything an item reads and all its tile borders are relative
//! to its document, so other documents and threads change no bit.
#![allow(unsafe_code)]

use super::operand::{Operand, Raw};
use super::pool::{Pool, SCRATCH_ELEMS};
use super::simd::{Isa, Simd, simd_fn};
use crate::{Attention, Error, Result};

/// Keys of a tile.
const KEYS: usize = 64;
/// Vectors of query rows in a block: with two vectors per register tile, three tiles of columns.
const BLOCK_VECTORS: usize = 6;
/// Blocks of query rows in a tile, for which keys and values are loaded once.
const BLOCKS: usize = 2;
/// Lanes of the widest instruction set.
const MAX_LANES: usize = 16;
/// Rows of a matrix in scratch are this much longer than their padded width, so that a column does not fall on few cache sets.
const SKEW: usize = 16;
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

fn documents_of(bounds: &[i32]) -> impl Iterator<Item = Document> {
    bounds.windows(2).map(|w| Document { start: w[0] as usize, tokens: (w[1] - w[0]) as usize }).filter(|d| d.tokens > 0)
}

/// A kv head's part of the matrices: row addresses, and which keys a row sees.
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

    /// Rows: (token, head of the group).
    fn rows(&self) -> usize {
        self.document.tokens * self.per_kv()
    }

    /// Index of row `r` in `lse [N, H]`; times `D` its first element in `q [N, H*D]`.
    #[inline(always)]
    fn row(&self, r: usize) -> usize {
        let g = self.per_kv();
        (self.document.start + r / g) * self.shape.heads + self.kv_head * g + r % g
    }

    /// First element of key `j` in `k [N, K*D]`.
    #[inline(always)]
    fn key(&self, j: usize) -> usize {
        ((self.document.start + j) * self.shape.kv_heads + self.kv_head) * self.shape.head_dim
    }

    /// Keys that rows `first..end` (not empty) see, all together.
    fn keys(&self, first: usize, end: usize) -> (usize, usize) {
        let g = self.per_kv();
        let low = self.shape.window.map_or(0, |w| (first / g + 1).saturating_sub(w));
        (low, (end - 1) / g + 1)
    }
}

/// A matrix operand of [`product`]: element (i, j) is `data[i * row + j * col]`.
#[derive(Clone, Copy)]
struct Matrix<'a> {
    data: &'a [f32],
    row: usize,
    col: usize,
}

/// `R` rows by two vectors of `C (+)= A B`, in registers.
///
/// # Safety
/// The elements that the strides address are inside the operands.
#[inline(always)]
#[allow(clippy::too_many_arguments, clippy::needless_range_loop)]
unsafe fn register_tile<S: Simd, const R: usize>(
    s: S,
    a: *const f32,
    a_row: usize,
    a_col: usize,
    b: *const f32,
    b_row: usize,
    c: *mut f32,
    c_row: usize,
    inner: usize,
    add: bool,
) {
    let mut acc = [[s.splat(0.0); 2]; R];
    // SAFETY: by contract, here and below.
    unsafe {
        if add {
            for r in 0..R {
                acc[r] = [s.load(c.add(r * c_row)), s.load(c.add(r * c_row + S::LANES))];
            }
        }
        let (mut a, mut b) = (a, b);
        for _ in 0..inner {
            let (b0, b1) = (s.load(b), s.load(b.add(S::LANES)));
            for r in 0..R {
                let x = s.splat(*a.add(r * a_row));
                acc[r][0] = s.fma(x, b0, acc[r][0]);
                acc[r][1] = s.fma(x, b1, acc[r][1]);
            }
            (a, b) = (a.wrapping_add(a_col), b.wrapping_add(b_row));
        }
        for r in 0..R {
            s.store(c.add(r * c_row), acc[r][0]);
            s.store(c.add(r * c_row + S::LANES), acc[r][1]);
        }
    }
}

simd_fn! {
    /// `C (+)= A B` for small matrices: `C [rows, cols]` with rows `c_row` apart, `A [rows, inner]`, `B [inner, cols]` with
    /// rows `b_row` apart; `cols` is a multiple of two vectors. Each element is summed over `inner` in order.
    fn product[S](s: S, c: &mut [f32], c_row: usize, add: bool, a: Matrix<'_>, b: &[f32], b_row: usize, rows: usize, cols: usize, inner: usize) {
        if rows == 0 || cols == 0 || inner == 0 {
            return;
        }
        assert!(cols.is_multiple_of(2 * S::LANES) && (rows - 1) * c_row + cols <= c.len() && (inner - 1) * b_row + cols <= b.len());
        assert!((rows - 1) * a.row + (inner - 1) * a.col < a.data.len());
        let (ap, bp, cp) = (a.data.as_ptr(), b.as_ptr(), c.as_mut_ptr());
        for col in (0..cols).step_by(2 * S::LANES) {
            let mut r = 0;
            // SAFETY: rows r..r + R and two vectors from col on are inside by the assertions.
            unsafe {
                if S::LANES == MAX_LANES {
                    while r + 12 <= rows {
                        register_tile::<S, 12>(s, ap.add(r * a.row), a.row, a.col, bp.add(col), b_row, cp.add(r * c_row + col), c_row, inner, add);
                        r += 12;
                    }
                }
                while r + 6 <= rows {
                    register_tile::<S, 6>(s, ap.add(r * a.row), a.row, a.col, bp.add(col), b_row, cp.add(r * c_row + col), c_row, inner, add);
                    r += 6;
                }
                while r + 2 <= rows {
                    register_tile::<S, 2>(s, ap.add(r * a.row), a.row, a.col, bp.add(col), b_row, cp.add(r * c_row + col), c_row, inner, add);
                    r += 2;
                }
                if r < rows {
                    register_tile::<S, 1>(s, ap.add(r * a.row), a.row, a.col, bp.add(col), b_row, cp.add(r * c_row + col), c_row, inner, add);
                }
            }
        }
    }
}

/// Copies rows of `D` elements into scratch rows `ld` apart, as f32 times `factor`, zero up to the padded width.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn load_rows<S: Simd>(
    s: S,
    out: &mut [f32],
    ld: usize,
    from: Operand,
    rows: usize,
    head_dim: usize,
    factor: f32,
    address: impl Fn(usize) -> usize,
) {
    for r in 0..rows {
        let row = &mut out[r * ld..][..padded(head_dim)];
        let (row, pad) = row.split_at_mut(head_dim);
        // SAFETY: addresses are rows of the operand, which no one writes.
        unsafe { from.load(s, address(r), row) };
        if factor != 1.0 {
            row.iter_mut().for_each(|x| *x *= factor);
        }
        pad.fill(0.0);
    }
}

simd_fn! {
    /// Rows `first..first + n` of a group's queries (`queries`) or keys, from scratch rows `ld` apart.
    fn store_rows[S](s: S, to: Operand, group: Group, queries: bool, first: usize, n: usize, x: &[f32], ld: usize) {
        let d = group.shape.head_dim;
        for r in 0..n {
            let address = if queries { group.row(first + r) * d } else { group.key(first + r) };
            // SAFETY: rows of a group belong to one item.
            unsafe { to.store(s, address, &x[r * ld..][..d]) };
        }
    }
}

simd_fn! {
    /// Keys or values `first..first + n` of the group.
    fn load_keys[S](s: S, out: &mut [f32], ld: usize, from: Operand, group: Group, first: usize, n: usize) {
        load_rows(s, out, ld, from, n, group.shape.head_dim, 1.0, |j| group.key(first + j));
    }
}

simd_fn! {
    /// Query rows `first..first + n` of the group, times `factor`.
    fn load_queries[S](s: S, out: &mut [f32], ld: usize, from: Operand, group: Group, first: usize, n: usize, factor: f32) {
        let d = group.shape.head_dim;
        load_rows(s, out, ld, from, n, d, factor, |r| group.row(first + r) * d);
    }
}

simd_fn! {
    /// `out [D][ld] = x^T` for `rows` rows of `x`, `x_row` apart; columns from `rows` to `ld` become zero.
    fn transpose[S](_s: S, out: &mut [f32], ld: usize, x: &[f32], x_row: usize, rows: usize, head_dim: usize) {
        for r in 0..rows {
            let row = &x[r * x_row..][..head_dim];
            for (d, x) in row.iter().enumerate() {
                out[d * ld + r] = *x;
            }
        }
        if rows < ld {
            for d in 0..head_dim {
                out[d * ld + rows..(d + 1) * ld].fill(0.0);
            }
        }
    }
}

/// Positions of a block's rows and the borders behind which they see nothing, relative to `base`, so that small numbers
/// stay exact in f32.
struct Visible {
    base: usize,
    /// Last key that each row sees, relative.
    last: [f32; BLOCK_VECTORS * MAX_LANES],
    /// Keys below are seen by all rows of the block.
    all_below: usize,
    /// Keys from here on are inside the window of all rows.
    all_from: usize,
    window: Option<usize>,
}

impl Visible {
    /// For `width` rows from `first` on; `rows` of them exist, the rest repeat the last one.
    fn new(group: &Group, first: usize, rows: usize, width: usize) -> Visible {
        let g = group.per_kv();
        let base = first / g;
        let mut last = [0f32; BLOCK_VECTORS * MAX_LANES];
        for (r, last) in last[..width].iter_mut().enumerate() {
            *last = ((first + r.min(rows - 1)) / g - base) as f32;
        }
        let top = (first + rows - 1) / g;
        let window = group.shape.window;
        Visible { base, last, all_below: base + 1, all_from: window.map_or(0, |w| (top + 1).saturating_sub(w)), window }
    }
}

simd_fn! {
    /// Replaces scores that a row does not see by `hidden`. `scores [keys][width]` for keys from `first` on.
    fn mask[S](s: S, scores: &mut [f32], width: usize, keys: usize, first: usize, visible: &Visible, hidden: f32) {
        let hidden = s.splat(hidden);
        for j in 0..keys {
            let key = first + j;
            if key < visible.all_below && key >= visible.all_from {
                continue;
            }
            let row = &mut scores[j * width..][..width];
            // Differences of tokens inside a block and a window edge: far below 2^24 wherever they decide.
            let at = s.splat((key as f64 - visible.base as f64) as f32);
            // A row at position p sees p - window < key, so it sees key while p < key + window.
            let beyond = visible.window.map(|w| s.splat((key as f64 + w as f64 - visible.base as f64) as f32));
            for i in (0..width).step_by(S::LANES) {
                let position = s.load_slice(&visible.last[i..]);
                let mut x = s.select_gt(at, position, hidden, s.load_slice(&row[i..]));
                if let Some(beyond) = beyond {
                    x = s.select_gt(beyond, position, x, hidden);
                }
                s.store_slice(&mut row[i..], x);
            }
        }
    }
}

simd_fn! {
    /// One step of the online softmax over `scores [keys][width]`, in place: running maximum `top`, running sum `total`, and
    /// in `decay` the factor for what was accumulated before.
    fn softmax_step[S](s: S, scores: &mut [f32], width: usize, keys: usize, top: &mut [f32], total: &mut [f32], decay: &mut [f32]) {
        let zero = s.splat(0.0);
        for i in (0..width).step_by(S::LANES) {
            let before = s.load_slice(&top[i..]);
            let mut m = before;
            for j in 0..keys {
                m = s.max(m, s.load_slice(&scores[j * width + i..]));
            }
            // A row that saw no key yet has maximum -inf; any finite reference gives it weights of exactly 0.
            let reference = s.select_gt(s.splat(f32::MIN), m, zero, m);
            let factor = s.exp(s.sub(before, reference));
            let mut sum = s.mul(s.load_slice(&total[i..]), factor);
            for j in 0..keys {
                let p = s.exp(s.sub(s.load_slice(&scores[j * width + i..]), reference));
                sum = s.add(sum, p);
                s.store_slice(&mut scores[j * width + i..], p);
            }
            s.store_slice(&mut top[i..], m);
            s.store_slice(&mut total[i..], sum);
            s.store_slice(&mut decay[i..], factor);
        }
    }
}

simd_fn! {
    /// `rows` rows of `x`, `ld` apart and `width` wide, times `factor[r]`.
    fn scale_rows[S](_s: S, x: &mut [f32], ld: usize, width: usize, rows: usize, factor: &[f32]) {
        for r in 0..rows {
            if factor[r] != 1.0 {
                x[r * ld..][..width].iter_mut().for_each(|x| *x *= factor[r]);
            }
        }
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

/// Lanes of a vector of `isa`.
fn lanes(isa: Isa) -> usize {
    simd_fn! { fn of[S](_s: S) -> usize { S::LANES } }
    of(isa)
}

/// [`crate::Ops::attention`].
pub fn forward(pool: &Pool, t: Forward, cu_seqlens: &[i32], documents: usize, tokens: usize, shape: Attention) -> Result<()> {
    let bounds = boundaries("attention", cu_seqlens, documents, tokens)?;
    let tile = BLOCKS * BLOCK_VECTORS * lanes(pool.isa());
    // (kv head, document, first row of the tile); long tiles, the last of a document, first, so that none is left for the end.
    let mut items = Vec::new();
    for document in documents_of(bounds) {
        for kv_head in 0..shape.kv_heads {
            let group = Group { shape, document, kv_head };
            items.extend((0..group.rows()).step_by(tile).map(|first| (group, first)));
        }
    }
    items.sort_by_key(|(group, first)| std::cmp::Reverse((first / group.per_kv(), group.kv_head, group.document.start)));
    pool.for_each_scratch(items.len(), |i, scratch| {
        let (group, first) = items[i];
        forward_tile(pool.isa(), t, group, first, (group.rows() - first).min(tile), scratch);
    });
    Ok(())
}

/// Rows `first..first + rows` of a group against all keys they see.
fn forward_tile(isa: Isa, t: Forward, group: Group, first: usize, rows: usize, mut scratch: &mut [f32]) {
    let d = group.shape.head_dim;
    let (width, wide) = (BLOCK_VECTORS * lanes(isa), padded(d));
    let (tile, ld) = (BLOCKS * width, wide + SKEW);
    let q = take(&mut scratch, tile * ld);
    let qt = take(&mut scratch, d * tile);
    let (k, v) = (take(&mut scratch, KEYS * ld), take(&mut scratch, KEYS * ld));
    let scores = take(&mut scratch, KEYS * width);
    let (top, total, decay) = (take(&mut scratch, tile), take(&mut scratch, tile), take(&mut scratch, width));

    load_queries(isa, q, ld, t.q, group, first, rows, group.shape.scale);
    transpose(isa, qt, tile, q, ld, rows, d);
    // The queries are in qt now; their place takes the output.
    let o = q;
    o.fill(0.0);
    top.fill(f32::NEG_INFINITY);
    total.fill(0.0);

    let (low, high) = group.keys(first, first + rows);
    for key in (low..high).step_by(KEYS) {
        let keys = KEYS.min(high - key);
        load_keys(isa, k, ld, t.k, group, key, keys);
        load_keys(isa, v, ld, t.v, group, key, keys);
        for at in (0..rows).step_by(width) {
            let n = width.min(rows - at);
            let (block_low, block_high) = group.keys(first + at, first + at + n);
            let (from, to) = (block_low.max(key), block_high.min(key + keys));
            if from >= to {
                continue;
            }
            let (skip, keys) = (from - key, to - from);
            let visible = Visible::new(&group, first + at, n, width);
            // [keys, rows] = [keys, D] [D, rows]
            let a = Matrix { data: &k[skip * ld..], row: ld, col: 1 };
            product(isa, scores, width, false, a, &qt[at..], tile, keys, width, d);
            mask(isa, scores, width, keys, from, &visible, f32::NEG_INFINITY);
            softmax_step(isa, scores, width, keys, &mut top[at..at + width], &mut total[at..at + width], decay);
            scale_rows(isa, &mut o[at * ld..], ld, wide, n, decay);
            // [rows, D] += [rows, keys] [keys, D]
            let a = Matrix { data: scores, row: 1, col: width };
            product(isa, &mut o[at * ld..], ld, true, a, &v[skip * ld..], ld, n, wide, keys);
        }
    }

    for r in 0..rows {
        let total = total[r];
        o[r * ld..][..d].iter_mut().for_each(|x| *x /= total);
        // SAFETY: rows belong to one item.
        unsafe { t.lse.slice(group.row(first + r), 1)[0] = top[r] + total.ln() };
    }
    store_rows(isa, t.o, group, true, first, rows, o, ld);
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

/// [`crate::Ops::attention_backward`]. With `P = exp(S - lse)`: `dV = P^T dO`, `dS = P * (dO V^T - rowsum(dO * O))`,
/// `dQ = scale dS K`, `dK = scale dS^T Q`.
pub fn backward(pool: &Pool, t: Backward, cu_seqlens: &[i32], documents: usize, tokens: usize, shape: Attention) -> Result<()> {
    let bounds = boundaries("attention_backward", cu_seqlens, documents, tokens)?;
    let mut items: Vec<Group> =
        documents_of(bounds).flat_map(|document| (0..shape.kv_heads).map(move |kv_head| Group { shape, document, kv_head })).collect();
    // Long documents first, so that none is left for the end.
    items.sort_by_key(|group| std::cmp::Reverse((group.document.tokens, group.document.start, group.kv_head)));
    pool.for_each_scratch(items.len(), |i, scratch| backward_group(pool.isa(), t, tokens, items[i], scratch));
    Ok(())
}

fn backward_group(isa: Isa, t: Backward, tokens: usize, group: Group, mut scratch: &mut [f32]) {
    let d = group.shape.head_dim;
    let (width, wide) = (BLOCK_VECTORS * lanes(isa), padded(d));
    let (tile, ld) = (BLOCKS * width, wide + SKEW);
    let (q, dout, dq) = (take(&mut scratch, tile * ld), take(&mut scratch, tile * ld), take(&mut scratch, tile * ld));
    let (qt, doutt) = (take(&mut scratch, d * tile), take(&mut scratch, d * tile));
    let (k, v) = (take(&mut scratch, KEYS * ld), take(&mut scratch, KEYS * ld));
    let (p, ds) = (take(&mut scratch, KEYS * width), take(&mut scratch, KEYS * width));
    let (lse, delta) = (take(&mut scratch, tile), take(&mut scratch, tile));
    // f32 gradients of this group's keys and values, `[tokens of the document][wide]`.
    let elems = group.document.tokens * wide;
    let at = (group.kv_head * tokens + group.document.start) * wide;
    // SAFETY: a (kv head, token) belongs to one item; the second half of the workspace is for values.
    let (dk, dv) = unsafe { (t.work.slice(at, elems), t.work.slice(group.shape.kv_heads * tokens * wide + at, elems)) };
    dk.fill(0.0);
    dv.fill(0.0);

    for first in (0..group.rows()).step_by(tile) {
        let rows = tile.min(group.rows() - first);
        // dq's place holds the forward output until delta is known.
        load_queries(isa, dq, ld, t.o, group, first, rows, 1.0);
        load_queries(isa, dout, ld, t.dout, group, first, rows, 1.0);
        load_queries(isa, q, ld, t.q, group, first, rows, group.shape.scale);
        // Rows that do not exist have queries and output gradients of zero, hence add zero.
        lse.fill(0.0);
        delta.fill(0.0);
        for r in 0..rows {
            // SAFETY: written by forward.
            lse[r] = unsafe { t.lse.read(group.row(first + r), 1)[0] };
            delta[r] = dq[r * ld..][..d].iter().zip(&dout[r * ld..][..d]).map(|(o, g)| o * g).sum();
        }
        transpose(isa, qt, tile, q, ld, rows, d);
        transpose(isa, doutt, tile, dout, ld, rows, d);
        dq.fill(0.0);

        let (low, high) = group.keys(first, first + rows);
        for key in (low..high).step_by(KEYS) {
            let keys = KEYS.min(high - key);
            load_keys(isa, k, ld, t.k, group, key, keys);
            load_keys(isa, v, ld, t.v, group, key, keys);
            for at in (0..rows).step_by(width) {
                let n = width.min(rows - at);
                let (block_low, block_high) = group.keys(first + at, first + at + n);
                let (from, to) = (block_low.max(key), block_high.min(key + keys));
                if from >= to {
                    continue;
                }
                let (skip, keys) = (from - key, to - from);
                let visible = Visible::new(&group, first + at, n, width);
                // S^T = K Q^T and dP^T = V dO^T, both [keys, rows].
                let rows_of = |data| Matrix { data, row: ld, col: 1 };
                product(isa, p, width, false, rows_of(&k[skip * ld..]), &qt[at..], tile, keys, width, d);
                product(isa, ds, width, false, rows_of(&v[skip * ld..]), &doutt[at..], tile, keys, width, d);
                mask(isa, p, width, keys, from, &visible, f32::NEG_INFINITY);
                softmax_backward(isa, p, ds, width, keys, &lse[at..], &delta[at..]);
                // [keys, D] += [keys, rows] [rows, D]
                let by_key = |data| Matrix { data, row: width, col: 1 };
                product(isa, &mut dv[from * wide..], wide, true, by_key(&p[..]), &dout[at * ld..], ld, keys, wide, n);
                product(isa, &mut dk[from * wide..], wide, true, by_key(&ds[..]), &q[at * ld..], ld, keys, wide, n);
                // [rows, D] += [rows, keys] [keys, D]
                let by_row = Matrix { data: &ds[..], row: 1, col: width };
                product(isa, &mut dq[at * ld..], ld, true, by_row, &k[skip * ld..], ld, n, wide, keys);
            }
        }
        for row in dq.chunks_mut(ld).take(rows) {
            row[..d].iter_mut().for_each(|x| *x *= group.shape.scale);
        }
        store_rows(isa, t.dq, group, true, first, rows, dq, ld);
    }
    store_rows(isa, t.dk, group, false, 0, group.document.tokens, dk, wide);
    store_rows(isa, t.dv, group, false, 0, group.document.tokens, dv, wide);
}

simd_fn! {
    /// `p = exp(p - lse)`, `ds = p * (ds - delta)`, both `[keys][width]`.
    fn softmax_backward[S](s: S, p: &mut [f32], ds: &mut [f32], width: usize, keys: usize, lse: &[f32], delta: &[f32]) {
        for i in (0..width).step_by(S::LANES) {
            let (lse, delta) = (s.load_slice(&lse[i..]), s.load_slice(&delta[i..]));
            for j in 0..keys {
                let at = j * width + i;
                let x = s.exp(s.sub(s.load_slice(&p[at..]), lse));
                s.store_slice(&mut p[at..], x);
                let slope = s.mul(x, s.sub(s.load_slice(&ds[at..]), delta));
                s.store_slice(&mut ds[at..], slope);
            }
        }
    }
}

/// The scratch of a thread holds the tiles of backward, the larger ones, for the largest head.
const _: () = {
    let (width, wide) = (BLOCK_VECTORS * MAX_LANES, MAX_HEAD_DIM);
    let (tile, ld) = (BLOCKS * width, wide + SKEW);
    assert!(3 * tile * ld + 2 * wide * tile + 2 * KEYS * ld + 2 * KEYS * width + 2 * tile + 9 * 16 <= SCRATCH_ELEMS);
};

#[cfg(test)]
mod tests {
    use super::super::reference::{self, Values};
    use super::*;

    struct Case {
        documents: Vec<usize>,
        shape: Attention,
    }

    impl Case {
        fn new(documents: &[usize], heads: usize, kv_heads: usize, head_dim: usize, window: Option<usize>) -> Case {
            let scale = 1.0 / (head_dim as f32).sqrt();
            Case { documents: documents.to_vec(), shape: Attention { heads, kv_heads, head_dim, window, scale } }
        }

        fn tokens(&self) -> usize {
            self.documents.iter().sum()
        }

        fn bounds(&self) -> Vec<i32> {
            let mut bounds = vec![0];
            bounds.extend(self.documents.iter().scan(0, |at, n| {
                *at += *n as i32;
                Some(*at)
            }));
            // What lies behind the last boundary is ignored.
            bounds.resize(self.tokens() + 1, -7);
            bounds
        }
    }

    /// Inputs q, k, v, dout of a case in one storage type, as stored.
    struct Inputs {
        q: Values,
        k: Values,
        v: Values,
        dout: Values,
    }

    fn inputs(case: &Case, bf16: bool, seed: u32) -> Inputs {
        let n = case.tokens() * case.shape.head_dim;
        let make = |heads: usize, seed| Values::random(n * heads, bf16, seed);
        let (h, k) = (case.shape.heads, case.shape.kv_heads);
        Inputs { q: make(h, seed), k: make(k, seed + 1), v: make(k, seed + 2), dout: make(h, seed + 3) }
    }

    /// Results as stored, converted to f32: o, lse, dq, dk, dv.
    fn run(pool: &Pool, case: &Case, x: &mut Inputs) -> Vec<Vec<f32>> {
        let (tokens, shape) = (case.tokens(), case.shape);
        let (mut o, mut dq, mut dk, mut dv) = (x.q.like(), x.q.like(), x.k.like(), x.k.like());
        let mut lse = vec![f32::NAN; tokens * shape.heads];
        let mut work = vec![f32::NAN; workspace_elems(tokens, shape)];
        let bounds = case.bounds();
        let (q, k, v) = (x.q.operand(), x.k.operand(), x.v.operand());
        let fw = Forward { o: o.operand(), lse: Raw::new(&mut lse), q, k, v };
        forward(pool, fw, &bounds, case.documents.len(), tokens, shape).unwrap();
        let bw = Backward {
            dq: dq.operand(),
            dk: dk.operand(),
            dv: dv.operand(),
            dout: x.dout.operand(),
            q,
            k,
            v,
            o: o.operand(),
            lse: Raw::new(&mut lse),
            work: Raw::new(&mut work),
        };
        backward(pool, bw, &bounds, case.documents.len(), tokens, shape).unwrap();
        vec![o.f32s(), lse, dq.f32s(), dk.f32s(), dv.f32s()]
    }

    /// Naive attention in f64, document by document, row by row: o, lse.
    fn naive(case: &Case, q: &[f64], k: &[f64], v: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let Attention { heads, kv_heads, head_dim: d, window, scale } = case.shape;
        let (mut o, mut lse) = (vec![0.0; q.len()], vec![0.0; case.tokens() * heads]);
        let mut start = 0;
        for n in &case.documents {
            for i in 0..*n {
                for h in 0..heads {
                    let row = ((start + i) * heads + h) * d;
                    let key = |j: usize| ((start + j) * kv_heads + h / (heads / kv_heads)) * d;
                    let low = window.map_or(0, |w| (i + 1).saturating_sub(w));
                    let s: Vec<f64> =
                        (low..=i).map(|j| f64::from(scale) * (0..d).map(|c| q[row + c] * k[key(j) + c]).sum::<f64>()).collect();
                    let top = s.iter().fold(f64::MIN, |a, b| a.max(*b));
                    let total: f64 = s.iter().map(|s| (s - top).exp()).sum();
                    lse[(start + i) * heads + h] = top + total.ln();
                    for (j, s) in (low..=i).zip(&s) {
                        for c in 0..d {
                            o[row + c] += (s - top).exp() / total * v[key(j) + c];
                        }
                    }
                }
            }
            start += n;
        }
        (o, lse)
    }

    /// Against the naive function and its differences.
    fn check(case: &Case, bf16: bool) {
        let mut x = inputs(case, bf16, 7);
        let (q, k, v, dout) = (x.q.f64s(), x.k.f64s(), x.v.f64s(), x.dout.f64s());
        let (o, lse) = naive(case, &q, &k, &v);
        let mut first: Option<Vec<Vec<f32>>> = None;
        for got in reference::on_every_pool(|pool| run(pool, case, &mut x)) {
            let [got_o, got_lse, dq, dk, dv] = &got[..] else { unreachable!() };
            // f32: sums of up to 200 products in f32. bf16: one rounding of the output, 2^-9.
            let close = if bf16 { 4e-3 } else { 2e-6 };
            reference::assert_close("o", got_o, &o, close);
            // lse is f32 whatever the storage.
            reference::assert_close("lse", got_lse, &lse, 2e-6);
            // Differences of the slow function once; the other instruction sets are compared with the first.
            let Some(first) = &first else {
                // In bf16 the forward output, from which backward starts, is rounded too.
                let tolerance = if bf16 { 3e-2 } else { 2e-5 };
                for (name, grad, which) in [("dq", dq, 0), ("dk", dk, 1), ("dv", dv, 2)] {
                    reference::assert_gradient(name, grad, [&q, &k, &v][which], tolerance, |moved| {
                        let mut at: [&[f64]; 3] = [&q, &k, &v];
                        at[which] = moved;
                        naive(case, at[0], at[1], at[2]).0.iter().zip(&dout).map(|(o, g)| o * g).sum()
                    });
                }
                first = Some(got);
                continue;
            };
            for (name, i) in [("dq", 2), ("dk", 3), ("dv", 4)] {
                // As the outputs, with one more level of sums; noise of gradients that vanish is of the order of 1e-6.
                let want: Vec<f64> = first[i].iter().map(|x| f64::from(*x)).collect();
                let largest = want.iter().fold(1f64, |m, x| m.max(x.abs()));
                for (got, want) in got[i].iter().zip(&want) {
                    assert!(
                        (f64::from(*got) - want).abs() <= if bf16 { 2e-2 } else { 1e-5 } * largest,
                        "{name} by another instruction set"
                    );
                }
            }
        }
    }

    #[test]
    fn matches_the_naive_function_and_its_differences() {
        for bf16 in [false, true] {
            check(&Case::new(&[1], 2, 1, 16, None), bf16);
            check(&Case::new(&[33, 1, 70], 3, 1, 18, None), bf16);
            check(&Case::new(&[130, 5], 3, 1, 64, None), bf16);
            check(&Case::new(&[90, 41], 4, 4, 32, Some(17)), bf16);
            check(&Case::new(&[80], 2, 1, 20, Some(1)), bf16);
            check(&Case::new(&[75], 4, 2, 130, Some(64)), bf16);
        }
    }

    #[test]
    fn documents_do_not_know_of_each_other() {
        let pool = Pool::new(2).unwrap();
        let case = Case::new(&[37, 140, 3], 6, 3, 64, None);
        let mut x = inputs(&case, true, 3);
        let together = run(&pool, &case, &mut x);
        let mut start = 0;
        for n in &case.documents {
            let alone = Case { documents: vec![*n], shape: case.shape };
            let cut = |v: &Values, heads: usize| v.cut(start * heads * 64, n * heads * 64);
            let mut y = Inputs { q: cut(&x.q, 6), k: cut(&x.k, 3), v: cut(&x.v, 3), dout: cut(&x.dout, 6) };
            let apart = run(&pool, &alone, &mut y);
            for ((a, b), width) in together.iter().zip(&apart).zip([6 * 64, 6, 6 * 64, 3 * 64, 3 * 64]) {
                assert!(a[start * width..(start + n) * width].iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits()));
            }
            start += n;
        }
        // Another first document, even one that is not a number, changes no bit of the second.
        for v in [&mut x.q, &mut x.k, &mut x.v, &mut x.dout] {
            v.poison(0, 37 * 3 * 64);
        }
        let poisoned = run(&pool, &case, &mut x);
        for ((a, b), width) in together.iter().zip(&poisoned).zip([6 * 64, 6, 6 * 64, 3 * 64, 3 * 64]) {
            assert!(b[..width].iter().all(|x| x.is_nan()));
            assert!(a[37 * width..].iter().zip(&b[37 * width..]).all(|(a, b)| a.to_bits() == b.to_bits()));
        }
    }

    #[test]
    fn a_later_token_changes_no_earlier_output() {
        let pool = Pool::new(1).unwrap();
        let case = Case::new(&[100], 3, 1, 32, None);
        let mut x = inputs(&case, false, 5);
        let before = run(&pool, &case, &mut x);
        x.k.set(60 * 32, 1e3);
        x.v.set(60 * 32, -1e3);
        let after = run(&pool, &case, &mut x);
        let same = |n: usize| before[0][..n].iter().zip(&after[0]).all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(same(60 * 3 * 32) && !same(61 * 3 * 32));
    }

    #[test]
    fn wrong_boundaries_are_named() {
        assert!(boundaries("attention", &[0, 3, 5], 2, 5).is_ok());
        assert!(boundaries("attention", &[0, 5, -1], 1, 5).is_ok());
        for (bounds, part) in
            [(vec![1, 5], "[0] is 1"), (vec![0, 4], "[1] is 4, expected 5"), (vec![0, 6, 5], "[2] is 5, expected at least 6")]
        {
            let error = boundaries("attention", &bounds, bounds.len() - 1, 5).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}
