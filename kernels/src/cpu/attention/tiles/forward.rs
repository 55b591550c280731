//! Forward: `S = K Q^T`, `O^T += V^T P`.

use super::*;
use crate::cpu::attention::take;
use crate::cpu::matmul::pairs::pair_fn;
use crate::cpu::pool::SCRATCH_ELEMS;

/// [`super::super::forward`] on tiles.
///
/// # Safety
/// The unit can be made ready, and [`serve`] was true of q, k, v.
pub unsafe fn forward<U: Unit>(pool: &Pool, t: Forward, groups: &[Group]) {
    let mut items = Vec::new();
    for group in groups {
        let most = panels_of_item(group.shape.head_dim.div_ceil(STEP));
        let panels = Panel::count(group);
        items.extend((0..panels).step_by(most).map(|first| (*group, first..panels.min(first + most))));
    }
    // Late tokens see most keys: they go first, so that none is left for the end.
    items.sort_by_key(|(group, panels)| std::cmp::Reverse((Panel::new(group, panels.start).token, group.kv_head, group.document.start)));
    pool.for_each_scratch(items.len(), |i, scratch| {
        let (group, panels) = items[i].clone();
        item::<U>(pool.isa(), t, group, panels, scratch);
    });
}

pair_fn! { fn item[U: Unit] = item_body(t: Forward, group: Group, panels: Range<usize>, scratch: &mut [f32]); }

/// What a panel carries from chunk to chunk.
const STATE: usize = 2 * SIDE;

#[inline(always)]
fn item_body<S: Simd, U: Unit>(s: S, t: Forward, group: Group, panels: Range<usize>, mut scratch: &mut [f32]) {
    let steps = group.shape.head_dim.div_ceil(STEP);
    let count = panels.len();
    let panel_elems = steps * STEP_ELEMS;
    let sums_elems = steps * SUMS;
    let queries = take(&mut scratch, count * panel_elems);
    let o = take(&mut scratch, count * sums_elems);
    let state = take(&mut scratch, count * STATE);
    let (keys, values) = (take(&mut scratch, TILES * panel_elems), take(&mut scratch, TILES * panel_elems));
    let (scores, weights) = (take(&mut scratch, TILES * SUMS), take(&mut scratch, TILES * STEP_ELEMS));
    let rows = take(&mut scratch, sums_elems);

    let at = |i: usize| Panel::new(&group, panels.start + i);
    for i in 0..count {
        let panel = at(i);
        // SAFETY: inputs are not written.
        let head = unsafe { Head::of_queries(t.q, &group, panel.head) };
        head.pack_queries(s, &mut queries[i * panel_elems..], panel.range());
    }
    // SAFETY: as above.
    let (k, v) = unsafe { (Head::of_keys(t.k, &group), Head::of_keys(t.v, &group)) };
    let (first, last) = (at(0), at(count - 1));
    // Exponents are of 2.
    let scale = group.shape.scale * std::f32::consts::LOG2_E;
    // SAFETY: the caller of `forward` saw that the unit is there.
    let unit = unsafe { U::ready() };
    for chunk in chunks(&first, &last) {
        let range = chunk_keys(&group, &last, chunk);
        k.pack_rows(s, keys, range.clone());
        v.pack_columns(s, values, range);
        for i in 0..count {
            let panel = at(i);
            let tiles = panel.tiles(chunk);
            if tiles.is_empty() {
                continue;
            }
            let queries = &queries[i * panel_elems..][..panel_elems];
            for tile in tiles.clone() {
                let scores = &mut scores[tile * SUMS..][..SUMS];
                // SAFETY: operands hold `steps` steps, `scores` 32 x 32 sums.
                unsafe {
                    unit.product(s, steps, packed_rows(keys, tile * steps, steps), packed(queries, 0, steps), scores.as_mut_ptr(), true)
                };
                mask(s, scores, chunk + tile * SIDE, &panel, group.shape.window);
            }
            let (top, total) = state[i * STATE..][..STATE].split_at_mut(SIDE);
            let begins = panel.keys.0 >= chunk;
            if begins {
                top.fill(f32::NEG_INFINITY);
                total.fill(0.0);
            }
            let mut decay = [0f32; SIDE];
            let scores = &scores[tiles.start * SUMS..tiles.end * SUMS];
            softmax_step(s, scores, &mut weights[tiles.start * STEP_ELEMS..], scale, top, total, &mut decay);
            let o = &mut o[i * sums_elems..][..sums_elems];
            if !begins {
                scale_columns(s, o, &decay);
            }
            for (dims, o) in o.chunks_exact_mut(SUMS).enumerate() {
                let (a, b) = (packed_rows(values, dims * TILES + tiles.start, tiles.len()), packed(weights, tiles.start, tiles.len()));
                // SAFETY: as above.
                unsafe { unit.product(s, tiles.len(), a, b, o.as_mut_ptr(), begins) };
            }
        }
    }
    drop(unit);

    for i in 0..count {
        let panel = at(i);
        let (top, total) = state[i * STATE..][..STATE].split_at_mut(SIDE);
        for (r, (top, total)) in top.iter().zip(total.iter_mut()).take(panel.tokens).enumerate() {
            // SAFETY: a query belongs to one item.
            unsafe { t.lse.slice(group.query(panel.token + r, panel.head), 1)[0] = top * group.shape.scale + total.ln() };
        }
        total.iter_mut().for_each(|x| *x = 1.0 / *x);
        let o = &mut o[i * sums_elems..][..sums_elems];
        scale_columns(s, o, total);
        store_panel(s, t.o, &group, &panel, o, rows);
    }
}

/// `x [_][32] *= factor [32]`.
#[inline(always)]
fn scale_columns<S: Simd>(s: S, x: &mut [f32], factor: &[f32]) {
    for row in x.chunks_exact_mut(SIDE) {
        for i in (0..SIDE).step_by(S::LANES) {
            let x = s.mul(s.load_slice(&row[i..]), s.load_slice(&factor[i..]));
            s.store_slice(&mut row[i..], x);
        }
    }
}

/// One step of the online softmax: `weights = 2^(scale (scores - top))` in pairs of keys, with the running maximum `top` and sum
/// `total`; `decay` is the factor for what was accumulated before. `scores [keys][32]`, keys a multiple of 32.
#[inline(always)]
fn softmax_step<S: Simd>(s: S, scores: &[f32], weights: &mut [f32], scale: f32, top: &mut [f32], total: &mut [f32], decay: &mut [f32]) {
    assert!(scores.len().is_multiple_of(SUMS) && weights.len() >= scores.len() / 2);
    assert!(top.len() == SIDE && total.len() == SIDE && decay.len() == SIDE);
    let (zero, scale) = (s.splat(0.0), s.splat(scale));
    for i in (0..SIDE).step_by(S::LANES) {
        let before = s.load_slice(&top[i..]);
        let mut most = [before; 4];
        for rows in scores.chunks_exact(4 * SIDE) {
            for (j, most) in most.iter_mut().enumerate() {
                *most = s.max(s.load_slice(&rows[j * SIDE + i..]), *most);
            }
        }
        let m = s.max(s.max(most[0], most[1]), s.max(most[2], most[3]));
        // A query that saw no key yet has maximum -inf; any finite reference gives it weights of exactly 0.
        let reference = s.mul(s.select_gt(s.splat(f32::MIN), m, zero, m), scale);
        let minus = s.sub(zero, reference);
        let factor = s.exp2(s.fma(before, scale, minus));
        let (mut even, mut odd) = (s.mul(s.load_slice(&total[i..]), factor), zero);
        for (rows, weights) in scores.chunks_exact(2 * SIDE).zip(weights.chunks_exact_mut(SIDE)) {
            let a = s.exp2(s.fma(s.load_slice(&rows[i..]), scale, minus));
            let b = s.exp2(s.fma(s.load_slice(&rows[SIDE + i..]), scale, minus));
            even = s.add(even, a);
            odd = s.add(odd, b);
            s.store_slice(&mut weights[i..], s.narrow_pairs(a, b));
        }
        s.store_slice(&mut top[i..], m);
        s.store_slice(&mut total[i..], s.add(even, odd));
        s.store_slice(&mut decay[i..], factor);
    }
}

/// The scratch of a thread holds an item of the largest head.
const _: () = {
    let panel = MAX_HEAD_DIM / STEP * STEP_ELEMS;
    let items = ITEM_DIMS / STEP * (STEP_ELEMS + SUMS) + ITEM_DIMS / STEP * STATE;
    assert!(items + 2 * TILES * panel + TILES * (SUMS + STEP_ELEMS) + MAX_HEAD_DIM * SIDE + 7 * 16 <= SCRATCH_ELEMS);
};
