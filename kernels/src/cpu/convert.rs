//! Conversion of whole slices between f32 and bf16 on the calling thread, for who moves values outside of a stream: loading,
//! saving. (In a stream it is [`crate::Ops::cast`].) Rounding is to nearest even; NaN stays NaN.
#![allow(unsafe_code)]

use super::float::Elem;
use super::simd::{Isa, simd_fn};
use half::bf16;

simd_fn! {
    fn narrow_with[S](s: S, dst: &mut [bf16], src: &[f32]) {
        let n = dst.len().min(src.len());
        let mut i = 0;
        while i + S::LANES <= n {
            // SAFETY: a whole vector is left in both.
            unsafe { bf16::store(s, dst.as_mut_ptr().add(i), s.load(src.as_ptr().add(i))) };
            i += S::LANES;
        }
        for (d, x) in dst[i..n].iter_mut().zip(&src[i..n]) {
            *d = Elem::from_f32(*x);
        }
    }
}

simd_fn! {
    fn widen_with[S](s: S, dst: &mut [f32], src: &[bf16]) {
        let n = dst.len().min(src.len());
        let mut i = 0;
        while i + S::LANES <= n {
            // SAFETY: a whole vector is left in both.
            unsafe { s.store(dst.as_mut_ptr().add(i), bf16::load(s, src.as_ptr().add(i))) };
            i += S::LANES;
        }
        for (d, x) in dst[i..n].iter_mut().zip(&src[i..n]) {
            *d = Elem::to_f32(*x);
        }
    }
}

/// `dst = src`, rounded; as many elements as the shorter has.
pub fn narrow(dst: &mut [bf16], src: &[f32]) {
    narrow_with(Isa::detect(), dst, src);
}

/// `dst = src`, exactly; as many elements as the shorter has.
pub fn widen(dst: &mut [f32], src: &[bf16]) {
    widen_with(Isa::detect(), dst, src);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conversions_are_those_of_half() {
        for elems in [0, 1, 7, 8, 16, 77] {
            let x: Vec<f32> = (0..elems as u32).map(|i| f32::from_bits(i.wrapping_mul(0x9E37_79B9))).collect();
            for isa in Isa::available() {
                let (mut h, mut back) = (vec![bf16::ZERO; elems], vec![0f32; elems]);
                narrow_with(isa, &mut h, &x);
                widen_with(isa, &mut back, &h);
                assert!(h.iter().zip(&x).all(|(h, x)| h.to_bits() == bf16::from_f32(*x).to_bits()));
                assert!(back.iter().zip(&h).all(|(b, h)| b.to_bits() == h.to_f32().to_bits()));
            }
        }
    }
}
