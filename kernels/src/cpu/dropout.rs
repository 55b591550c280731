//! Dropout of a LoRA adapter's input, recomputed wherever it is needed: which elements stay is a function of their position.
//!
//! The bits, the same on every device. The key of a step: words 0 and 1 of
//! `philox4x32([step, 0, 0, 0x64726f70], [seed low, seed high])`. Element `e = row * I + column` of the input of adapter `site` in
//! `micro_batch` uses word `e % 4` of `philox4x32([e / 4 low, e / 4 high, site, micro_batch], key)`. It is kept iff
//! `(word >> 8) / 2^24 >= p`, which is `(word >> 8) >= ceil(p * 2^24)` in integers; kept values are multiplied by
//! `1 / (1 - p)`, computed in f32.
#![allow(unsafe_code)]

use super::float::{Elem, Float, FloatMut, Shared};
use super::pool::{Pool, range_of};
use super::simd::simd_fn;
use crate::Dropout;
use crate::philox::philox4x32;

/// Elements of one work item; a multiple of [`GROUP`].
const CHUNK: usize = 16 * 1024;
/// Elements whose random words are made together: eight counters in the lanes of integer vectors.
const GROUP: usize = 32;

/// What decides about the elements of one adapter's input.
#[derive(Clone, Copy, Debug)]
pub struct Mask {
    key: [u32; 2],
    site: u32,
    micro_batch: u32,
    /// Kept iff the upper 24 bits of the word are at least this.
    least: u32,
    /// Multiplies what is kept.
    scale: f32,
}

impl Mask {
    /// The mask of adapter `site`; `None` when nothing is dropped.
    pub fn new(dropout: Option<Dropout>, site: u32) -> Option<Mask> {
        let d = dropout.filter(|d| d.p > 0.0)?;
        let words = philox4x32([d.step, 0, 0, 0x6472_6f70], [d.seed as u32, (d.seed >> 32) as u32]);
        let least = (f64::from(d.p) * 16_777_216.0).ceil() as u32;
        Some(Mask { key: [words[0], words[1]], site, micro_batch: d.micro_batch, least, scale: 1.0 / (1.0 - d.p) })
    }

    /// 0 or the scale, for element `e`: the definition that the vector code below must meet.
    pub fn factor(&self, e: u64) -> f32 {
        let group = e / 4;
        let word = philox4x32([group as u32, (group >> 32) as u32, self.site, self.micro_batch], self.key)[(e % 4) as usize];
        if word >> 8 >= self.least { self.scale } else { 0.0 }
    }
}

/// `out = x * factor`, for elements `first ..` of the adapter's input. `out`, `x` of the same length.
pub fn apply(pool: &Pool, out: &mut [f32], x: Float<'_>, mask: Mask, first: u64) {
    let (elems, isa) = (out.len(), pool.isa());
    let shared = Shared::new(out);
    pool.for_each(elems.div_ceil(CHUNK), |item| {
        let range = range_of(item, CHUNK, elems);
        // SAFETY: items have disjoint ranges.
        let out = unsafe { shared.range(range.start, range.len()) };
        match x.slice(range.start, range.len()) {
            Float::F32(x) => masked(isa, out, x, &mask, first + range.start as u64),
            Float::Bf16(x) => masked(isa, out, x, &mask, first + range.start as u64),
        }
    });
}

/// `dx += g * factor`, for elements `first ..` of the adapter's input: the backward of [`apply`], added in f32 and rounded once.
pub fn apply_backward(pool: &Pool, dx: FloatMut<'_>, g: &[f32], mask: Mask, first: u64) {
    match dx {
        FloatMut::F32(dx) => add_masked_parts(pool, dx, g, mask, first),
        FloatMut::Bf16(dx) => add_masked_parts(pool, dx, g, mask, first),
    }
}

fn add_masked_parts<E: Elem>(pool: &Pool, dx: &mut [E], g: &[f32], mask: Mask, first: u64) {
    let (elems, isa) = (dx.len(), pool.isa());
    let shared = Shared::new(dx);
    pool.for_each(elems.div_ceil(CHUNK), |item| {
        let range = range_of(item, CHUNK, elems);
        // SAFETY: items have disjoint ranges.
        let dx = unsafe { shared.range(range.start, range.len()) };
        add_masked(isa, dx, &g[range.clone()], &mask, first + range.start as u64);
    });
}

simd_fn! {
    fn masked[S, E: Elem](s: S, out: &mut [f32], x: &[E], mask: &Mask, first: u64) {
        let _ = s;
        let mut factors = [0.0f32; GROUP];
        let mut at = 0;
        while at < out.len() {
            let skip = ((first + at as u64) % GROUP as u64) as usize;
            let n = (GROUP - skip).min(out.len() - at);
            group_factors(&mut factors, mask, first + at as u64 - skip as u64);
            for ((o, x), f) in out[at..at + n].iter_mut().zip(&x[at..at + n]).zip(&factors[skip..]) {
                *o = x.to_f32() * *f;
            }
            at += n;
        }
    }
}

simd_fn! {
    fn add_masked[S, E: Elem](s: S, dx: &mut [E], g: &[f32], mask: &Mask, first: u64) {
        let _ = s;
        let mut factors = [0.0f32; GROUP];
        let mut at = 0;
        while at < dx.len() {
            let skip = ((first + at as u64) % GROUP as u64) as usize;
            let n = (GROUP - skip).min(dx.len() - at);
            group_factors(&mut factors, mask, first + at as u64 - skip as u64);
            for ((d, g), f) in dx[at..at + n].iter_mut().zip(&g[at..at + n]).zip(&factors[skip..]) {
                *d = E::from_f32(d.to_f32() + g * *f);
            }
            at += n;
        }
    }
}

/// [`Mask::factor`] of elements `e .. e + 32`, `e` a multiple of 32: eight counters at once, in arrays that become vectors.
#[inline(always)]
fn group_factors(out: &mut [f32; GROUP], mask: &Mask, e: u64) {
    const N: usize = GROUP / 4;
    let (mut c0, mut c1, mut c2, mut c3) = ([0u32; N], [0u32; N], [mask.site; N], [mask.micro_batch; N]);
    for i in 0..N {
        let group = e / 4 + i as u64;
        (c0[i], c1[i]) = (group as u32, (group >> 32) as u32);
    }
    let mut key = mask.key;
    for _ in 0..10 {
        for i in 0..N {
            let p0 = u64::from(c0[i]) * 0xD251_1F53;
            let p1 = u64::from(c2[i]) * 0xCD9E_8D57;
            c0[i] = (p1 >> 32) as u32 ^ c1[i] ^ key[0];
            c1[i] = p1 as u32;
            c2[i] = (p0 >> 32) as u32 ^ c3[i] ^ key[1];
            c3[i] = p0 as u32;
        }
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    for i in 0..N {
        for (j, word) in [c0[i], c1[i], c2[i], c3[i]].into_iter().enumerate() {
            out[4 * i + j] = if word >> 8 >= mask.least { mask.scale } else { 0.0 };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::simd::Isa;
    use half::bf16;

    #[test]
    fn vector_code_meets_the_definition_at_any_offset() {
        let dropout = Dropout { p: 0.3, seed: 0x1234_5678_9abc_def0, step: 7, micro_batch: 3 };
        let mask = Mask::new(Some(dropout), 11).unwrap();
        let x: Vec<f32> = (0..CHUNK + 77).map(|i| i as f32 * 0.25 - 100.0).collect();
        for isa in Isa::available() {
            let pool = Pool::with_isa(2, isa).unwrap();
            for first in [0u64, 1, 31, 4 * 0xffff_ffff - 40] {
                let mut out = vec![0.0; x.len()];
                apply(&pool, &mut out, Float::F32(&x), mask, first);
                let mut dx = vec![1.0f32; x.len()];
                apply_backward(&pool, FloatMut::F32(&mut dx), &x, mask, first);
                let mut dxh = vec![bf16::ONE; x.len()];
                apply_backward(&pool, FloatMut::Bf16(&mut dxh), &x, mask, first);
                for (i, x) in x.iter().enumerate() {
                    let want = x * mask.factor(first + i as u64);
                    assert_eq!(out[i], want);
                    // One rounding or two: a fused multiply-add is not asked for and not forbidden by the portable definition.
                    assert!((dx[i] - (1.0 + want)).abs() <= 1e-6 * want.abs());
                    assert_eq!(dxh[i], bf16::from_f32(dx[i]));
                }
            }
        }
    }

    #[test]
    fn keeps_the_share_it_should_and_depends_on_every_key() {
        let d = Dropout { p: 0.25, seed: 1, step: 2, micro_batch: 3 };
        let kept = |d: Dropout, site| -> Vec<bool> { (0..20_000).map(|e| Mask::new(Some(d), site).unwrap().factor(e) > 0.0).collect() };
        let base = kept(d, 5);
        let share = base.iter().filter(|k| **k).count() as f64 / base.len() as f64;
        // Standard deviation of the share is 0.003.
        assert!((share - 0.75).abs() < 0.015, "{share}");
        for other in
            [kept(d, 6), kept(Dropout { seed: 2, ..d }, 5), kept(Dropout { step: 3, ..d }, 5), kept(Dropout { micro_batch: 4, ..d }, 5)]
        {
            assert_ne!(base, other);
        }
        assert!(Mask::new(Some(Dropout { p: 0.0, ..d }), 5).is_none());
        assert!(Mask::new(None, 5).is_none());
    }
}
