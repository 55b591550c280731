//! How do ranks' values become one sum, with the same bits on every rank and in every collective?
//!
//! Over a fixed binary tree of ranks: pairs (0,1), (2,3), then pairs of pairs; a missing right sibling passes up
//! unchanged. Sums are taken in f32 (i32 wraps) and rounded once, at the root. The tree is walked as a binary counter over
//! small blocks, so that scratch stays in the first-level cache and every inner loop is a plain element-wise one.
#![allow(unsafe_code)]

use half::bf16;

/// Elements of one block: six levels (64 ranks) of f32 take 8 KiB of stack.
const BLOCK: usize = 256;
/// Levels above the pairs for 64 ranks, and one to spare.
const LEVELS: usize = 6;

/// The largest group that the tree's scratch is sized for.
pub(crate) const MAX_RANKS: usize = 64;

/// A storage type that can be summed.
pub(crate) trait Leaf: bytemuck::Pod {
    /// What partial sums are kept in.
    type Sum: Copy + Default;
    /// Exact conversion to the sum's type.
    fn up(self) -> Self::Sum;
    /// One addition.
    fn add(a: Self::Sum, b: Self::Sum) -> Self::Sum;
    /// The one rounding.
    fn down(sum: Self::Sum) -> Self;
}

impl Leaf for f32 {
    type Sum = f32;
    #[inline(always)]
    fn up(self) -> f32 {
        self
    }
    #[inline(always)]
    fn add(a: f32, b: f32) -> f32 {
        a + b
    }
    #[inline(always)]
    fn down(sum: f32) -> f32 {
        sum
    }
}

impl Leaf for i32 {
    type Sum = i32;
    #[inline(always)]
    fn up(self) -> i32 {
        self
    }
    #[inline(always)]
    fn add(a: i32, b: i32) -> i32 {
        a.wrapping_add(b)
    }
    #[inline(always)]
    fn down(sum: i32) -> i32 {
        sum
    }
}

impl Leaf for bf16 {
    type Sum = f32;
    #[inline(always)]
    fn up(self) -> f32 {
        f32::from_bits((self.to_bits() as u32) << 16)
    }
    #[inline(always)]
    fn add(a: f32, b: f32) -> f32 {
        a + b
    }
    /// Round to nearest even without a branch, so that the loop vectorizes; the same bits as `bf16::from_f32`.
    #[inline(always)]
    fn down(sum: f32) -> bf16 {
        let bits = sum.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        let quiet = (bits >> 16) | 0x40;
        bf16::from_bits(if sum.is_nan() { quiet } else { rounded } as u16)
    }
}

/// `out[i]` = tree sum of `leaves[r][i]` over ranks `r` in order. Every leaf has at least `out`'s elements.
pub(crate) fn sum<E: Leaf>(out: &mut [E], leaves: &[&[E]]) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2. It changes the width of the loops, not the operations: the bits stay the same.
        unsafe { sum_avx2(out, leaves) };
        return;
    }
    sum_body(out, leaves);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn sum_avx2<E: Leaf>(out: &mut [E], leaves: &[&[E]]) {
    sum_body(out, leaves);
}

/// The sum of two ranks in place: `out[i]` = `out[i]` + `other[i]`, or the other way round where `out` is not the `first` rank's.
pub(crate) fn add<E: Leaf>(out: &mut [E], other: &[E], first: bool) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: as in `sum`.
        unsafe { add_avx2(out, other, first) };
        return;
    }
    add_body(out, other, first);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn add_avx2<E: Leaf>(out: &mut [E], other: &[E], first: bool) {
    add_body(out, other, first);
}

#[inline(always)]
fn add_body<E: Leaf>(out: &mut [E], other: &[E], first: bool) {
    if first {
        out.iter_mut().zip(other).for_each(|(o, b)| *o = E::down(E::add(o.up(), b.up())));
    } else {
        out.iter_mut().zip(other).for_each(|(o, a)| *o = E::down(E::add(a.up(), o.up())));
    }
}

#[inline(always)]
fn sum_body<E: Leaf>(out: &mut [E], leaves: &[&[E]]) {
    match leaves {
        [] => {}
        [one] => out.copy_from_slice(&one[..out.len()]),
        [a, b] => {
            for ((o, a), b) in out.iter_mut().zip(a.iter()).zip(b.iter()) {
                *o = E::down(E::add(a.up(), b.up()));
            }
        }
        _ => {
            let elems = out.len();
            for start in (0..elems).step_by(BLOCK) {
                let end = elems.min(start + BLOCK);
                sum_block(&mut out[start..end], leaves, start, end);
            }
        }
    }
}

/// Three and more leaves, at most `BLOCK` elements: a binary counter whose digits are sums of 2, 4, 8, ... ranks.
#[inline(always)]
fn sum_block<E: Leaf>(out: &mut [E], leaves: &[&[E]], start: usize, end: usize) {
    let elems = end - start;
    let mut digits = [[E::Sum::default(); BLOCK]; LEVELS];
    let mut full = 0u32;
    let mut carry = [E::Sum::default(); BLOCK];
    for pair in leaves.chunks(2) {
        match pair {
            [a, b] => {
                for ((c, a), b) in carry[..elems].iter_mut().zip(&a[start..end]).zip(&b[start..end]) {
                    *c = E::add(a.up(), b.up());
                }
            }
            _ => {
                for (c, a) in carry[..elems].iter_mut().zip(&pair[0][start..end]) {
                    *c = a.up();
                }
            }
        }
        let mut level = 0;
        while full & (1 << level) != 0 {
            add_left::<E>(&digits[level], &mut carry, elems);
            full &= !(1 << level);
            level += 1;
        }
        digits[level] = carry;
        full |= 1 << level;
    }
    // What is left are subtrees without a right sibling: the smallest passes up until it meets the next larger.
    let lowest = full.trailing_zeros() as usize;
    carry = digits[lowest];
    for (level, digit) in digits.iter().enumerate().skip(lowest + 1) {
        if full & (1 << level) != 0 {
            add_left::<E>(digit, &mut carry, elems);
        }
    }
    for (o, c) in out.iter_mut().zip(&carry[..elems]) {
        *o = E::down(*c);
    }
}

#[inline(always)]
fn add_left<E: Leaf>(left: &[E::Sum; BLOCK], right: &mut [E::Sum; BLOCK], elems: usize) {
    for (r, l) in right[..elems].iter_mut().zip(&left[..elems]) {
        *r = E::add(*l, *r);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The definition, one element at a time, level by level.
    fn reference(mut level: Vec<f32>) -> f32 {
        while level.len() > 1 {
            level = level.chunks(2).map(|p| if p.len() == 2 { p[0] + p[1] } else { p[0] }).collect();
        }
        level[0]
    }

    proptest! {
        #[test]
        fn bits_equal_the_level_by_level_tree(ranks in prop_oneof![1usize..=MAX_RANKS, Just(2)], elems in 0usize..600, seed in any::<u32>()) {
            let value = |r: usize, i: usize| {
                let x = (r as u32).wrapping_mul(2654435761).wrapping_add(i as u32).wrapping_mul(seed | 1) ^ seed;
                (x as f32 - 2e9) * f32::powi(2.0, (x % 40) as i32 - 20)
            };
            let full: Vec<Vec<f32>> = (0..ranks).map(|r| (0..elems).map(|i| value(r, i)).collect()).collect();
            let short: Vec<Vec<bf16>> = full.iter().map(|v| v.iter().map(|x| bf16::from_f32(*x)).collect()).collect();
            let ints: Vec<Vec<i32>> = full.iter().map(|v| v.iter().map(|x| x.to_bits() as i32).collect()).collect();
            let mut out = vec![0f32; elems];
            sum(&mut out, &full.iter().map(|v| &v[..]).collect::<Vec<_>>());
            let mut out16 = vec![bf16::ZERO; elems];
            sum(&mut out16, &short.iter().map(|v| &v[..]).collect::<Vec<_>>());
            let mut out32 = vec![0i32; elems];
            sum(&mut out32, &ints.iter().map(|v| &v[..]).collect::<Vec<_>>());
            for i in 0..elems {
                prop_assert_eq!(out[i].to_bits(), reference(full.iter().map(|v| v[i]).collect()).to_bits());
                let wide = reference(short.iter().map(|v| v[i].to_f32()).collect());
                prop_assert_eq!(out16[i].to_bits(), bf16::from_f32(wide).to_bits());
                prop_assert_eq!(out32[i], ints.iter().fold(0i32, |s, v| s.wrapping_add(v[i])));
            }
            if ranks == 2 {
                for first in [true, false] {
                    let (own, other) = if first { (0, 1) } else { (1, 0) };
                    let (mut a, mut b, mut c) = (full[own].clone(), short[own].clone(), ints[own].clone());
                    add(&mut a, &full[other], first);
                    add(&mut b, &short[other], first);
                    add(&mut c, &ints[other], first);
                    prop_assert!(a.iter().zip(&out).all(|(a, o)| a.to_bits() == o.to_bits()));
                    prop_assert!(b.iter().zip(&out16).all(|(a, o)| a.to_bits() == o.to_bits()));
                    prop_assert_eq!(&c, &out32);
                }
            }
        }

        #[test]
        fn rounding_equals_the_half_crate(bits in any::<u32>()) {
            let x = f32::from_bits(bits);
            prop_assert_eq!(<bf16 as Leaf>::down(x).to_bits(), bf16::from_f32(x).to_bits());
        }
    }
}
