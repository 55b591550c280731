//! Does an instruction set compute what it should on this very processor?
//!
//! Run once per process before an instruction set is used. Most of these paths never ran where they were written, and a wrong
//! number in training is worse than a slow one.
#![allow(unsafe_code)]

use super::{Isa, simd_fn};
use crate::cpu::float::Elem;
use half::bf16;

/// `Ok` when every vector operation of `isa` agrees with plain scalar code, and small products and attention with other paths.
pub fn self_check(isa: Isa) -> Result<(), String> {
    if isa == Isa::PORTABLE {
        return Ok(());
    }
    vector_check(isa)?;
    crate::cpu::matmul::self_check(isa)?;
    crate::cpu::attention::self_check(isa)
}

const LEN: usize = 64;
const RESULTS: usize = 16;

/// Aligned for streaming stores.
#[repr(align(64))]
struct Narrow([[bf16; LEN]; 2]);

simd_fn! {
    /// Every operation of the trait over `LEN` elements, one row of `out` each.
    fn every_op[S](s: S, a: &[f32; LEN], b: &[f32; LEN], h: &[bf16; LEN], out: &mut [[f32; LEN]; RESULTS], narrow: &mut Narrow) {
        let mut i = 0;
        while i < LEN {
            let (x, y) = (s.load_slice(&a[i..]), s.load_slice(&b[i..]));
            // SAFETY: LEN is a multiple of the lanes, so whole vectors lie inside the arrays.
            let w = unsafe { <bf16 as Elem>::load(s, h.as_ptr().add(i)) };
            // SAFETY: as above; the arrays are aligned to 64 bytes and whole vectors follow each other.
            unsafe {
                <bf16 as Elem>::store(s, narrow.0[0].as_mut_ptr().add(i), x);
                // Two vectors at a time; the second of a pair is written with the first.
                if (i / S::LANES).is_multiple_of(2) {
                    s.stream_bf16(narrow.0[1].as_mut_ptr().add(i).cast(), x, s.load(a.as_ptr().add(i + S::LANES)));
                }
            }
            let small = s.mul(y, s.splat(0.25));
            s.store_slice(&mut out[0][i..], s.add(x, y));
            s.store_slice(&mut out[1][i..], s.sub(x, y));
            s.store_slice(&mut out[2][i..], s.mul(x, y));
            s.store_slice(&mut out[3][i..], s.div(x, y));
            s.store_slice(&mut out[4][i..], s.fma(x, y, w));
            s.store_slice(&mut out[5][i..], s.sqrt(s.mul(x, x)));
            s.store_slice(&mut out[6][i..], s.max(x, y));
            s.store_slice(&mut out[7][i..], s.min(x, y));
            s.store_slice(&mut out[8][i..], s.select_gt(x, y, w, small));
            s.store_slice(&mut out[9][i..], s.exp(x));
            s.store_slice(&mut out[10][i..], w);
            out[11][i] = s.reduce_add(x);
            out[12][i] = s.reduce_max(x);
            // SAFETY: at least three elements follow.
            s.store_slice(&mut out[13][i..], unsafe { <f32 as Elem>::load_part(s, a.as_ptr().add(i), 3) });
            s.store_slice(&mut out[14][i..], s.exp2(x));
            let pairs = s.narrow_pairs(s.splat(3.0), w);
            s.store_slice(&mut out[15][i..], s.sub(s.pair_high(pairs), s.pair_low(pairs)));
            i += S::LANES;
        }
        s.stream_end();
    }
}

fn vector_check(isa: Isa) -> Result<(), String> {
    let (mut a, mut b, mut h) = ([0.0f32; LEN], [0.0f32; LEN], [bf16::ZERO; LEN]);
    for i in 0..LEN {
        a[i] = ((i * 37 % 64) as f32 - 31.5) * 0.37;
        b[i] = ((i * 23 % 64) as f32 - 30.25) * 0.61;
        h[i] = bf16::from_f32(((i * 11 % 64) as f32 - 20.0) * 1.7);
    }
    let (mut out, mut narrow) = ([[0.0f32; LEN]; RESULTS], Narrow([[bf16::ZERO; LEN]; 2]));
    every_op(isa, &a, &b, &h, &mut out, &mut narrow);
    let lanes = lanes_of(isa);
    for i in 0..LEN {
        let (x, y, w) = (f64::from(a[i]), f64::from(b[i]), h[i].to_f64());
        let start = i / lanes * lanes;
        let first = i == start;
        let vector = &a[start..start + lanes];
        let sum: f64 = vector.iter().map(|v| f64::from(*v)).sum();
        let top = vector.iter().fold(f32::MIN, |m, v| m.max(*v));
        let want = [
            x + y,
            x - y,
            x * y,
            x / y,
            x * y + w,
            x.abs(),
            x.max(y),
            x.min(y),
            if x > y { w } else { y * 0.25 },
            x.exp(),
            w,
            if first { sum } else { 0.0 },
            if first { f64::from(top) } else { 0.0 },
            if i - start < 3 { x } else { 0.0 },
            x.exp2(),
            w - 3.0,
        ];
        for (op, want) in want.into_iter().enumerate() {
            let got = f64::from(out[op][i]);
            // A few roundings of f32 on values up to 250; a wrong lane or operation is off by far more.
            let close = (got - want).abs() <= 1e-6 * want.abs() + 1e-4;
            if !close {
                return Err(format!("vector operation {op}, element {i}: {got} instead of {want}"));
            }
        }
        for (how, narrow) in ["stored", "streamed"].iter().zip(&narrow.0) {
            if narrow[i] != bf16::from_f32(a[i]) {
                return Err(format!("rounding to bf16, {how}, element {i}: {} instead of {}", narrow[i], bf16::from_f32(a[i])));
            }
        }
    }
    Ok(())
}

simd_fn! {
    fn lanes_of[S](s: S) -> usize {
        let _ = s;
        S::LANES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_available_set_passes_and_portable_agrees() {
        for isa in Isa::available() {
            self_check(isa).unwrap();
        }
        assert!(Isa::notes().is_empty(), "{:?}", Isa::notes());
        assert_eq!(Some(&Isa::detect()), Isa::available().last());
    }

    simd_fn! {
        fn exp_all[S](s: S, x: &[f32], y: &mut [f32]) {
            let mut i = 0;
            while i + S::LANES <= x.len() {
                s.store_slice(&mut y[i..], s.exp(s.load_slice(&x[i..])));
                i += S::LANES;
            }
        }
    }

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        let x: Vec<f32> = (0..1 << 20).map(|i| -104.0 + 192.5 * (i as f32 / (1 << 20) as f32)).collect();
        for isa in Isa::available() {
            let mut y = vec![0.0f32; x.len()];
            exp_all(isa, &x, &mut y);
            let mut worst = 0.0f64;
            for (x, y) in x.iter().zip(&y) {
                let want = f64::from(*x).exp();
                // Spacing of f32 at the result, and of subnormals below the smallest normal number.
                let ulp = 2f64.powi(want.log2().floor() as i32 - 23).max(2f64.powi(-149));
                worst = worst.max((f64::from(*y) - want).abs() / ulp);
            }
            // Fused: 0.5 of the final rounding and at most 1 of the polynomial. Two roundings instead of one cost one more.
            assert!(worst < 2.0, "{}: {worst}", isa.name());
            let special = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, -200.0, 200.0, 88.722, -0.0];
            let x: Vec<f32> = special.iter().copied().chain([0.0; 8]).collect();
            let mut y = vec![9.0f32; 16];
            exp_all(isa, &x, &mut y);
            assert!(y[0].is_nan());
            assert_eq!([y[1], y[2], y[3], y[4], y[5], y[7]], [f32::INFINITY, 0.0, 1.0, 0.0, f32::INFINITY, 1.0]);
            assert!(y[6].is_finite());
        }
    }

    simd_fn! {
        fn exp2_all[S](s: S, x: &[f32], y: &mut [f32]) {
            for (x, y) in x.chunks_exact(S::LANES).zip(y.chunks_exact_mut(S::LANES)) {
                s.store_slice(y, s.exp2(s.load_slice(x)));
            }
        }
    }

    #[test]
    fn exp2_is_within_three_units_in_the_last_place() {
        let x: Vec<f32> = (0..1 << 20).map(|i| -126.0 + 253.0 * (i as f32 / (1 << 20) as f32)).collect();
        for isa in Isa::available() {
            let mut y = vec![0.0f32; x.len()];
            exp2_all(isa, &x, &mut y);
            for (x, y) in x.iter().zip(&y) {
                let want = f64::from(*x).exp2();
                let ulp = 2f64.powi(want.log2().floor() as i32 - 23);
                // 1.8 of the polynomial at most, 1 of its last steps.
                assert!((f64::from(*y) - want).abs() < 3.0 * ulp, "{} 2^{x}: {y}", isa.name());
            }
            let mut y = vec![9.0f32; 16];
            let mut x = vec![0.0f32; 16];
            x[..5].copy_from_slice(&[f32::NAN, f32::NEG_INFINITY, -1e30, 3.0, -126.5]);
            exp2_all(isa, &x, &mut y);
            assert!(y[0].is_nan());
            assert_eq!(y[1..6], [0.0, 0.0, 8.0, 0.0, 1.0]);
        }
    }

    simd_fn! {
        fn round_all[S](s: S, x: &[f32], y: &mut [bf16]) {
            let mut i = 0;
            while i + S::LANES <= x.len() {
                // SAFETY: a whole vector is left in both.
                unsafe { <bf16 as Elem>::store(s, y.as_mut_ptr().add(i), s.load(x.as_ptr().add(i))) };
                i += S::LANES;
            }
        }
    }

    #[test]
    fn rounding_to_bf16_is_that_of_half() {
        let mut bits: Vec<u32> = (0..1 << 16).map(|i: u32| i.wrapping_mul(0x9E37_79B9)).collect();
        bits.extend([0x3f80_8000, 0x3f81_8000, 0x7f7f_ffff, 0x7f80_0000, 0x7f80_0001, 0xffff_ffff, 0x8000_0000, 1]);
        bits.resize(bits.len().next_multiple_of(16), 0);
        let x: Vec<f32> = bits.iter().map(|b| f32::from_bits(*b)).collect();
        for isa in Isa::available() {
            let mut y = vec![bf16::ZERO; x.len()];
            round_all(isa, &x, &mut y);
            for (x, y) in x.iter().zip(&y) {
                let want = bf16::from_f32(*x);
                assert!(y.to_bits() == want.to_bits() || (y.is_nan() && want.is_nan()), "{x}: {y} instead of {want}");
            }
        }
    }
}
