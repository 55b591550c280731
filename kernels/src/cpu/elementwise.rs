//! Operations on elements one by one, and sums of them: sum, add, add_into, scale, cast, count_nonfinite. All are bound by
//! memory, so they are plain loops over blocks that the compiler vectorizes. Work items have a fixed number of elements,
//! whatever the threads, and sums follow one order.
#![allow(unsafe_code)]

use super::operand::{BLOCK, Operand, Raw};
use super::pool::Pool;
use super::simd::simd_fn;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Elements of a work item: enough to pay for handing it out, few enough to share small tensors.
const GRAIN: usize = 64 * BLOCK;

/// Runs `f(start, elems)` for all blocks of `elems` elements; `item` wraps the loop over one item's blocks.
pub fn for_each_item(pool: &Pool, elems: usize, item: impl Fn(usize, usize) + Sync) {
    pool.for_each(elems.div_ceil(GRAIN), |i| item(i * GRAIN, ((i + 1) * GRAIN).min(elems)));
}

/// `[start, end)` in blocks: (first element, elements).
#[inline(always)]
pub fn blocks(start: usize, end: usize) -> impl Iterator<Item = (usize, usize)> {
    (start..end).step_by(BLOCK).map(move |at| (at, BLOCK.min(end - at)))
}

/// [`crate::Ops::sum`]: in `f64` over 8 interleaved lanes, rounded once. Serial, since losses are few.
pub fn sum(x: &[f32]) -> f32 {
    let mut lanes = [0f64; 8];
    for eight in x.chunks(8) {
        for (lane, x) in lanes.iter_mut().zip(eight) {
            *lane += f64::from(*x);
        }
    }
    lanes.iter().sum::<f64>() as f32
}

/// [`crate::Ops::add`] over `f32`; `out` may be `a` or `b`.
pub fn add(pool: &Pool, out: Operand, a: Operand, b: Operand) {
    simd_fn! { fn item[S](s: S, start: usize, end: usize, out: Operand, a: Operand, b: Operand) {
        let (mut x, mut y) = ([0f32; BLOCK], [0f32; BLOCK]);
        for (at, n) in blocks(start, end) {
            let (x, y) = (&mut x[..n], &mut y[..n]);
            // SAFETY: in range by `for_each_item`; items are disjoint, and aliases are read before they are written.
            unsafe {
                a.load(s, at, x);
                b.load(s, at, y);
                for (x, y) in x.iter_mut().zip(&*y) {
                    *x += *y;
                }
                out.store(s, at, x);
            }
        }
    } }
    for_each_item(pool, out.elems(), |start, end| item(pool.isa(), start, end, out, a, b));
}

/// [`crate::Ops::add_into`]: `y += x`.
pub fn add_into(pool: &Pool, y: Operand, x: Operand) {
    add(pool, y, y, x);
}

/// [`crate::Ops::scale`]: `x *= factor`.
pub fn scale(pool: &Pool, x: Operand, factor: f32) {
    simd_fn! { fn item[S](s: S, start: usize, end: usize, x: Operand, factor: f32) {
        let mut block = [0f32; BLOCK];
        for (at, n) in blocks(start, end) {
            // SAFETY: in range by `for_each_item`; items are disjoint.
            unsafe {
                x.load(s, at, &mut block[..n]);
                block.iter_mut().for_each(|x| *x *= factor);
                x.store(s, at, &block[..n]);
            }
        }
    } }
    for_each_item(pool, x.elems(), |start, end| item(pool.isa(), start, end, x, factor));
}

/// [`crate::Ops::cast`].
pub fn cast(pool: &Pool, dst: Operand, src: Operand) {
    simd_fn! { fn item[S](s: S, start: usize, end: usize, dst: Operand, src: Operand) {
        let mut block = [0f32; BLOCK];
        for (at, n) in blocks(start, end) {
            // SAFETY: in range by `for_each_item`; items are disjoint.
            unsafe {
                src.load(s, at, &mut block[..n]);
                dst.store(s, at, &block[..n]);
            }
        }
    } }
    for_each_item(pool, dst.elems(), |start, end| item(pool.isa(), start, end, dst, src));
}

/// [`crate::Ops::count_nonfinite`]. A count needs no order.
pub fn count_nonfinite(pool: &Pool, x: Operand) -> usize {
    simd_fn! { fn item[S](s: S, start: usize, end: usize, x: Operand, count: &AtomicUsize) {
        let mut block = [0f32; BLOCK];
        let mut bad = 0usize;
        for (at, n) in blocks(start, end) {
            // SAFETY: in range by `for_each_item`; no one writes.
            unsafe { x.load(s, at, &mut block[..n]) };
            // All exponent bits set: NaN or infinite.
            bad += block[..n].iter().map(|x| u32::from(x.to_bits() & 0x7f80_0000 == 0x7f80_0000)).sum::<u32>() as usize;
        }
        count.fetch_add(bad, Ordering::Relaxed);
    } }
    let count = AtomicUsize::new(0);
    for_each_item(pool, x.elems(), |start, end| item(pool.isa(), start, end, x, &count));
    count.into_inner()
}

/// Sets all elements to zero.
pub fn clear(pool: &Pool, x: Raw<f32>) {
    for_each_item(pool, x.elems(), |start, end| {
        // SAFETY: items are disjoint.
        unsafe { x.slice(start, end - start) }.fill(0.0);
    });
}

#[cfg(test)]
mod tests {
    use super::super::reference::{Values, on_every_pool};
    use super::*;
    use half::bf16;

    #[test]
    fn each_element_is_rounded_once() {
        for (elems, bf16) in [(1, false), (GRAIN + 259, false), (3 * GRAIN + 5, true)] {
            let (mut x, y) = (Values::random(elems, bf16, 1), Values::random(elems, bf16, 2));
            let stored = |v: Vec<f32>| Values::new(v, bf16).f32s();
            let sum = stored(x.f32s().iter().zip(y.f32s()).map(|(x, y)| x + y).collect());
            let scaled = stored(x.f32s().iter().map(|x| x * 0.3).collect());
            for got in on_every_pool(|pool| {
                let (mut a, mut b) = (y.clone(), x.clone());
                add_into(pool, a.operand(), x.operand());
                scale(pool, b.operand(), 0.3);
                let (mut narrow, mut wide) = (Values::new(vec![0.0; elems], true), Values::new(vec![0.0; elems], false));
                cast(pool, narrow.operand(), x.operand());
                cast(pool, wide.operand(), x.operand());
                vec![a.f32s(), b.f32s(), narrow.f32s(), wide.f32s()]
            }) {
                assert_eq!((&got[0], &got[1]), (&sum, &scaled));
                assert_eq!(got[2], Values::new(x.f32s(), true).f32s());
                assert_eq!(got[3], x.f32s());
            }
        }
    }

    #[test]
    fn sums_are_exact_to_one_rounding() {
        let x = Values::random(10_001, false, 3).f32s();
        let exact: f64 = x.iter().map(|x| f64::from(*x)).sum();
        assert_eq!(sum(&x), exact as f32);
        assert_eq!(sum(&[]).to_bits(), 0);
    }

    #[test]
    fn what_is_not_finite_is_counted() {
        let mut x = vec![f32::MAX; GRAIN + 700];
        for (i, bad) in [(0, f32::NAN), (GRAIN - 1, f32::INFINITY), (GRAIN + 699, f32::NEG_INFINITY), (300, -f32::NAN)] {
            x[i] = bad;
        }
        let mut y: Vec<bf16> = x.iter().map(|x| bf16::from_f32(if *x == f32::MAX { 1.0 } else { *x })).collect();
        for threads in [1, 3] {
            let pool = Pool::new(threads).unwrap();
            assert_eq!(count_nonfinite(&pool, Operand::F32(Raw::new(&mut x))), 4);
            assert_eq!(count_nonfinite(&pool, Operand::Bf16(Raw::new(&mut y))), 4);
        }
    }
}
