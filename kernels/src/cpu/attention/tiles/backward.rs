//! Backward: `S = K Q^T` and `dP = V dO^T` again, then `dV += P dO`, `dK += dS Q` and `dQ^T += K^T dS`, with P and dS `[keys][queries]`.
//!
//! Sums of dK and dV lie in the workspace in blocks of 32 keys x 32 of `D`, those of a document's last, incomplete tile of keys in
//! scratch. They take the products of [`BLOCK`] panels at once, so that loading and storing them costs little.

use super::*;
use crate::cpu::attention::take;
use crate::cpu::matmul::pairs::pair_fn;
use crate::cpu::pool::SCRATCH_ELEMS;
use std::f32::consts::LOG2_E;

/// Panels whose products are added to dK and dV at once.
const BLOCK: usize = 4;

/// [`super::super::backward`] on tiles.
///
/// # Safety
/// The unit can be made ready, and [`serve`] was true of dout, q, k, v.
pub unsafe fn backward<U: Unit>(pool: &Pool, t: Backward, tokens: usize, groups: &[Group]) {
    pool.for_each_scratch(groups.len(), |i, scratch| item::<U>(pool.isa(), t, tokens, groups[i], scratch));
}

pair_fn! { fn item[U: Unit] = item_body(t: Backward, tokens: usize, group: Group, scratch: &mut [f32]); }

/// A gradient of keys or values as f32 sums, `[tile of keys][32 of D][32 keys][32 of D]`.
struct Sums<'a> {
    whole: &'a mut [f32],
    /// The last tile of keys, when it is not whole.
    last: &'a mut [f32],
    steps: usize,
}

impl Sums<'_> {
    fn tile(&mut self, tile: usize) -> &mut [f32] {
        let elems = self.steps * SUMS;
        match self.whole.get_mut(tile * elems..(tile + 1) * elems) {
            Some(sums) => sums,
            None => &mut self.last[..elems],
        }
    }

    /// Writes all keys of the group, times `factor`.
    #[inline(always)]
    fn store<S: Simd>(&mut self, s: S, to: Operand, group: &Group, factor: f32) {
        let (d, tokens, factor) = (group.shape.head_dim, group.document.tokens, s.splat(factor));
        for tile in 0..tokens.div_ceil(SIDE) {
            for (dims, x) in self.tile(tile).chunks_exact_mut(SUMS).enumerate() {
                for (j, row) in x.chunks_exact_mut(SIDE).take(tokens - tile * SIDE).enumerate() {
                    for i in (0..SIDE).step_by(S::LANES) {
                        let x = s.mul(s.load_slice(&row[i..]), factor);
                        s.store_slice(&mut row[i..], x);
                    }
                    // SAFETY: keys of a group belong to one item.
                    unsafe { to.store(s, group.key(tile * SIDE + j) + dims * SIDE, &row[..SIDE.min(d - dims * SIDE)]) };
                }
            }
        }
    }
}

/// Probabilities and their gradients of a chunk and a block of panels, in bf16.
struct Weights<'a> {
    /// P as A: `[tile][panel]`.
    p: &'a mut [f32],
    /// dS as A.
    ds: &'a mut [f32],
    /// dS of one panel as B: `[tile]`.
    pairs: &'a mut [f32],
}

#[inline(always)]
fn item_body<S: Simd, U: Unit>(s: S, t: Backward, tokens: usize, group: Group, mut scratch: &mut [f32]) {
    let steps = group.shape.head_dim.div_ceil(STEP);
    let wide = steps * STEP;
    let (panel_elems, sums_elems) = (steps * STEP_ELEMS, steps * SUMS);
    let all = Panel::count(&group);
    let most = panels_of_item(steps).min(all);
    // Queries and output gradients as B, for sums over D: [panel][step]; for sums over queries: [32 of D][panel].
    let (queries, douts) = (take(&mut scratch, most * panel_elems), take(&mut scratch, most * panel_elems));
    let (query_pairs, dout_pairs) = (take(&mut scratch, most * panel_elems), take(&mut scratch, most * panel_elems));
    let dq = take(&mut scratch, most * sums_elems);
    let (minus_lse, delta) = (take(&mut scratch, most * SIDE), take(&mut scratch, most * SIDE));
    let (keys, values) = (take(&mut scratch, TILES * panel_elems), take(&mut scratch, TILES * panel_elems));
    let key_columns = take(&mut scratch, TILES * panel_elems);
    let (p, dp) = (take(&mut scratch, SUMS), take(&mut scratch, SUMS));
    let mut weights = Weights {
        p: take(&mut scratch, TILES * BLOCK * STEP_ELEMS),
        ds: take(&mut scratch, TILES * BLOCK * STEP_ELEMS),
        pairs: take(&mut scratch, TILES * STEP_ELEMS),
    };
    let rows = take(&mut scratch, 2 * sums_elems);
    // f32 gradients of this group's keys and values.
    let whole = group.document.tokens / SIDE * SIDE * wide;
    let at = (group.kv_head * tokens + group.document.start) * wide;
    // SAFETY: a (kv head, token) belongs to one item; the second half of the workspace is for values.
    let (dk, dv) = unsafe { (t.work.slice(at, whole), t.work.slice(group.shape.kv_heads * tokens * wide + at, whole)) };
    let mut dk = Sums { whole: dk, last: take(&mut scratch, sums_elems), steps };
    let mut dv = Sums { whole: dv, last: take(&mut scratch, sums_elems), steps };

    // SAFETY: inputs are not written.
    let (k, v) = unsafe { (Head::of_keys(t.k, &group), Head::of_keys(t.v, &group)) };
    // SAFETY: the caller of `backward` saw that the unit is there.
    let unit = unsafe { U::ready() };
    for start in (0..all).step_by(most) {
        let count = most.min(all - start);
        let at = |i: usize| Panel::new(&group, start + i);
        for i in 0..count {
            let panel = at(i);
            // SAFETY: as above.
            let (q, dout) = unsafe { (Head::of_queries(t.q, &group, panel.head), Head::of_queries(t.dout, &group, panel.head)) };
            q.pack_queries(s, &mut queries[i * panel_elems..], panel.range());
            q.pack_pairs(s, &mut query_pairs[i * STEP_ELEMS..], most * STEP_ELEMS, panel.range());
            dout.pack_queries(s, &mut douts[i * panel_elems..], panel.range());
            dout.pack_pairs(s, &mut dout_pairs[i * STEP_ELEMS..], most * STEP_ELEMS, panel.range());
            let part = i * SIDE..(i + 1) * SIDE;
            row_sums(s, &t, &group, &panel, &mut minus_lse[part.clone()], &mut delta[part], rows);
        }
        let (first, last) = (at(0), at(count - 1));
        for chunk in chunks(&first, &last) {
            let range = chunk_keys(&group, &last, chunk);
            k.pack_rows(s, keys, range.clone());
            v.pack_rows(s, values, range.clone());
            k.pack_columns(s, key_columns, range);
            for block in (0..count).step_by(BLOCK) {
                let panels = block..count.min(block + BLOCK);
                for i in panels.clone() {
                    let panel = at(i);
                    let tiles = panel.tiles(chunk);
                    if tiles.is_empty() {
                        continue;
                    }
                    let part = i * SIDE..(i + 1) * SIDE;
                    for tile in tiles.clone() {
                        let of = |x: &[f32]| packed(&x[i * panel_elems..], 0, steps);
                        // SAFETY: operands hold `steps` steps, `p` and `dp` 32 x 32 sums.
                        unsafe {
                            unit.product(s, steps, packed_rows(keys, tile * steps, steps), of(queries), p.as_mut_ptr(), true);
                            unit.product(s, steps, packed_rows(values, tile * steps, steps), of(douts), dp.as_mut_ptr(), true);
                        }
                        mask(s, p, chunk + tile * SIDE, &panel, group.shape.window);
                        let scale = group.shape.scale * LOG2_E;
                        softmax_backward(s, &mut weights, (tile, i - block), p, dp, scale, &minus_lse[part.clone()], &delta[part.clone()]);
                    }
                    let begins = panel.keys.0 >= chunk;
                    for (dims, dq) in dq[i * sums_elems..][..sums_elems].chunks_exact_mut(SUMS).enumerate() {
                        let a = packed_rows(key_columns, dims * TILES + tiles.start, tiles.len());
                        // SAFETY: as above.
                        unsafe {
                            unit.product(s, tiles.len(), a, packed(weights.pairs, tiles.start, tiles.len()), dq.as_mut_ptr(), begins)
                        };
                    }
                }
                for tile in 0..TILES {
                    // Panels that see the tile are neighbours, since they are in the order of their tokens.
                    let mut seeing = panels.clone().filter(|i| at(*i).tiles(chunk).contains(&tile));
                    let Some(from) = seeing.next() else { continue };
                    let n = 1 + seeing.count();
                    let key_tile = chunk / SIDE + tile;
                    // The first panel that sees a tile of keys is that of the same tokens in the first head.
                    let begins = start + from == key_tile * group.per_kv();
                    let a = tile * BLOCK + from - block;
                    for (sums, weights, other) in
                        [(dv.tile(key_tile), &*weights.p, &*dout_pairs), (dk.tile(key_tile), &*weights.ds, &*query_pairs)]
                    {
                        for (dims, sums) in sums.chunks_exact_mut(SUMS).enumerate() {
                            let b = packed(other, dims * most + from, n);
                            // SAFETY: as above.
                            unsafe { unit.product(s, n, packed_rows(weights, a, n), b, sums.as_mut_ptr(), begins) };
                        }
                    }
                }
            }
        }
        for i in 0..count {
            let dq = &mut dq[i * sums_elems..][..sums_elems];
            dq.iter_mut().for_each(|x| *x *= group.shape.scale);
            store_panel(s, t.dq, &group, &at(i), dq, rows);
        }
    }
    drop(unit);
    dk.store(s, t.dk, &group, group.shape.scale);
    dv.store(s, t.dv, &group, 1.0);
}

/// A panel's normalizers, negative and for exponents of 2, and `delta = rowsum(dO * O)`; zero for queries that do not exist: with
/// queries and output gradients of zero they add nothing. `rows` is room for two rows.
#[inline(always)]
fn row_sums<S: Simd>(s: S, t: &Backward, group: &Group, panel: &Panel, minus_lse: &mut [f32], delta: &mut [f32], rows: &mut [f32]) {
    let d = group.shape.head_dim;
    let (o, dout) = rows.split_at_mut(d);
    minus_lse.fill(0.0);
    delta.fill(0.0);
    for i in 0..panel.tokens {
        let query = group.query(panel.token + i, panel.head);
        // SAFETY: inputs are not written.
        unsafe {
            minus_lse[i] = -LOG2_E * t.lse.read(query, 1)[0];
            t.o.load(s, query * d, o);
            t.dout.load(s, query * d, &mut dout[..d]);
        }
        let mut sum = s.splat(0.0);
        let whole = d / S::LANES * S::LANES;
        for j in (0..whole).step_by(S::LANES) {
            sum = s.fma(s.load_slice(&o[j..]), s.load_slice(&dout[j..]), sum);
        }
        delta[i] = s.reduce_add(sum) + o[whole..].iter().zip(&dout[whole..d]).map(|(o, g)| o * g).sum::<f32>();
    }
}

/// `P = 2^(scale S + minus_lse)` and `dS = P * (dP - delta)` of one tile, rounded to bf16; `at` is the tile and the panel in the block.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn softmax_backward<S: Simd>(
    s: S,
    weights: &mut Weights<'_>,
    at: (usize, usize),
    scores: &[f32],
    dp: &[f32],
    scale: f32,
    minus_lse: &[f32],
    delta: &[f32],
) {
    let own = (at.0 * BLOCK + at.1) * STEP_ELEMS..(at.0 * BLOCK + at.1 + 1) * STEP_ELEMS;
    let (p, ds) = (&mut weights.p[own.clone()], &mut weights.ds[own]);
    let pairs = &mut weights.pairs[at.0 * STEP_ELEMS..][..STEP_ELEMS];
    assert!(scores.len() == SUMS && dp.len() == SUMS && minus_lse.len() == SIDE && delta.len() == SIDE);
    let scale = s.splat(scale);
    for i in (0..SIDE).step_by(2 * S::LANES) {
        let minus_lse = [s.load_slice(&minus_lse[i..]), s.load_slice(&minus_lse[i + S::LANES..])];
        let delta = [s.load_slice(&delta[i..]), s.load_slice(&delta[i + S::LANES..])];
        for j in (0..SIDE).step_by(2) {
            let mut x = [[s.splat(0.0); 2]; 2];
            let mut slope = x;
            for r in 0..2 {
                for c in 0..2 {
                    let at = (j + r) * SIDE + i + c * S::LANES;
                    x[r][c] = s.exp2(s.fma(s.load_slice(&scores[at..]), scale, minus_lse[c]));
                    slope[r][c] = s.mul(x[r][c], s.sub(s.load_slice(&dp[at..]), delta[c]));
                }
                // A row of 32 values in bf16 takes the room of 16.
                let at = (j + r) * SIDE / 2 + i / 2;
                s.store_slice(&mut p[at..], s.narrow(x[r][0], x[r][1]));
                s.store_slice(&mut ds[at..], s.narrow(slope[r][0], slope[r][1]));
            }
            for c in 0..2 {
                s.store_slice(&mut pairs[j / 2 * SIDE + i + c * S::LANES..], s.narrow_pairs(slope[0][c], slope[1][c]));
            }
        }
    }
}

/// The scratch of a thread holds an item of the largest head.
const _: () = {
    let panel = MAX_HEAD_DIM / STEP * STEP_ELEMS;
    let items = ITEM_DIMS / STEP * (4 * STEP_ELEMS + SUMS + 2 * SIDE);
    let weights = TILES * (2 * BLOCK + 1) * STEP_ELEMS;
    assert!(items + 3 * TILES * panel + 2 * SUMS + weights + 4 * MAX_HEAD_DIM * SIDE + 18 * 16 <= SCRATCH_ELEMS);
};
