//! Attention in vectors of f32, for every processor and storage type.
//!
//! The query heads of a kv head are rows of one matrix: row `r` of a document is the query of token `r / G` in head `r % G`
//! of the group (`G = H / K`), so a tile of keys is loaded once for the whole group, and only a tile's queries are transposed.
//! All inner products are the register-blocked [`product`].
#![allow(unsafe_code)]

use super::{Backward, Forward, Group, MAX_HEAD_DIM, MAX_LANES, padded, take};
use crate::cpu::operand::Operand;
use crate::cpu::pool::{Pool, SCRATCH_ELEMS};
use crate::cpu::simd::{Isa, Simd, simd_fn};

/// Keys of a tile.
const KEYS: usize = 64;
/// Vectors of query rows in a block: with two vectors per register tile, three tiles of columns.
const BLOCK_VECTORS: usize = 6;
/// Blocks of query rows in a tile, for which keys and values are loaded once.
const BLOCKS: usize = 2;
/// Rows of a matrix in scratch are this much longer than their padded width, so that a column does not fall on few cache sets.
const SKEW: usize = 16;

impl Group {
    /// Rows: (token, head of the group).
    fn rows(&self) -> usize {
        self.document.tokens * self.per_kv()
    }

    /// Index of row `r` in `lse [N, H]`; times `D` its first element in `q [N, H*D]`.
    #[inline(always)]
    fn row(&self, r: usize) -> usize {
        let g = self.per_kv();
        self.query(r / g, r % g)
    }

    /// Keys that rows `first..end` (not empty) see, all together.
    fn keys(&self, first: usize, end: usize) -> (usize, usize) {
        let g = self.per_kv();
        let low = self.shape.window.map_or(0, |w| (first / g + 1).saturating_sub(w));
        (low, (end - 1) / g + 1)
    }
}

/// Lanes of a vector of `isa`.
fn lanes(isa: Isa) -> usize {
    simd_fn! { fn of[S](_s: S) -> usize { S::LANES } }
    of(isa)
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

/// [`super::forward`].
pub fn forward(pool: &Pool, t: Forward, groups: &[Group]) {
    let tile = BLOCKS * BLOCK_VECTORS * lanes(pool.isa());
    // (kv head, document, first row of the tile); long tiles, the last of a document, first, so that none is left for the end.
    let mut items: Vec<_> = groups.iter().flat_map(|group| (0..group.rows()).step_by(tile).map(move |first| (*group, first))).collect();
    items.sort_by_key(|(group, first)| std::cmp::Reverse((first / group.per_kv(), group.kv_head, group.document.start)));
    pool.for_each_scratch(items.len(), |i, scratch| {
        let (group, first) = items[i];
        forward_tile(pool.isa(), t, group, first, (group.rows() - first).min(tile), scratch);
    });
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

/// [`super::backward`].
pub fn backward(pool: &Pool, t: Backward, tokens: usize, groups: &[Group]) {
    pool.for_each_scratch(groups.len(), |i, scratch| backward_group(pool.isa(), t, tokens, groups[i], scratch));
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
