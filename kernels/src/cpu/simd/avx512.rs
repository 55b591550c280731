//! Sixteen lanes of AVX-512 (F, BW, DQ, VL): Intel since Skylake-SP, AMD since Zen 4.
//!
//! Each method is one intrinsic where that is possible, since the developers' machines cannot run it.
#![allow(unsafe_code)]

use super::Simd;
use super::avx2::Avx2;
use crate::cpu::float::Elem;
use core::arch::x86_64::*;

/// Proof of AVX-512 F, BW, DQ, VL (and AVX2, FMA).
#[derive(Clone, Copy, Debug)]
pub struct Avx512(());

/// Proof of the same and of AVX512-BF16: the same vectors, with a matmul instruction for pairs of bf16.
#[derive(Clone, Copy, Debug)]
pub struct Avx512Bf16(());

impl Avx512 {
    /// # Safety
    /// The processor has AVX-512 F, BW, DQ and VL.
    #[inline(always)]
    pub unsafe fn assume() -> Avx512 {
        Avx512(())
    }
}

impl Avx512Bf16 {
    /// # Safety
    /// The processor has AVX-512 F, BW, DQ, VL and BF16.
    #[inline(always)]
    pub unsafe fn assume() -> Avx512Bf16 {
        Avx512Bf16(())
    }
}

/// Bits of the lanes as bf16, rounded to nearest even; NaN stays NaN.
///
/// # Safety
/// The processor has AVX-512 F, BW, DQ and VL.
#[inline(always)]
unsafe fn rounded(v: __m512) -> __m256i {
    // SAFETY: by contract.
    unsafe {
        let bits = _mm512_castps_si512(v);
        let upper = _mm512_srli_epi32::<16>(bits);
        let odd = _mm512_and_si512(upper, _mm512_set1_epi32(1));
        let rounded = _mm512_srli_epi32::<16>(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))));
        let quiet = _mm512_or_si512(upper, _mm512_set1_epi32(0x40));
        let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v, v);
        _mm512_cvtepi32_epi16(_mm512_mask_blend_epi32(nan, rounded, quiet))
    }
}

/// Words of two vectors in turn: word `i` of the first is `i`, of the second `32 + i`.
static INTERLEAVED: [u16; 64] = {
    let mut order = [0; 64];
    let mut i = 0;
    while i < 32 {
        (order[2 * i], order[2 * i + 1]) = (i as u16, 32 + i as u16);
        i += 1;
    }
    order
};

macro_rules! sixteen_lanes {
    ($token:ident, { $($more:tt)* }) => {
    impl Simd for $token {
        type V = __m512;
        const LANES: usize = 16;
        const TILE_ROWS: usize = 8;
        const TILE_VECTORS: usize = 3;

        #[inline(always)]
        fn splat(self, x: f32) -> __m512 {
            // SAFETY: `self` proves AVX-512.
            unsafe { _mm512_set1_ps(x) }
        }
        #[inline(always)]
        unsafe fn load(self, p: *const f32) -> __m512 {
            // SAFETY: `self` proves AVX-512; `p` by contract.
            unsafe { _mm512_loadu_ps(p) }
        }
        #[inline(always)]
        unsafe fn store(self, p: *mut f32, v: __m512) {
            // SAFETY: `self` proves AVX-512; `p` by contract.
            unsafe { _mm512_storeu_ps(p, v) }
        }
        #[inline(always)]
        unsafe fn load_bf16(self, p: *const u16) -> __m512 {
            // SAFETY: `self` proves AVX-512; `p` by contract.
            unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast())))) }
        }
        #[inline(always)]
        unsafe fn store_bf16(self, p: *mut u16, v: __m512) {
            // SAFETY: `self` proves AVX-512; `p` by contract.
            unsafe { _mm256_storeu_si256(p.cast(), rounded(v)) }
        }
        #[inline(always)]
        unsafe fn stream(self, p: *mut f32, v: __m512) {
            // SAFETY: `self` proves AVX-512; `p` and its alignment by contract.
            unsafe { _mm512_stream_ps(p, v) }
        }
        #[inline(always)]
        unsafe fn stream_bf16(self, p: *mut u16, low: __m512, high: __m512) {
            // SAFETY: `self` proves AVX-512; `p` and its alignment by contract.
            unsafe {
                let both = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(rounded(low)), rounded(high));
                _mm512_stream_si512(p.cast(), both);
            }
        }
        #[inline(always)]
        fn stream_end(self) {
            // SAFETY: every x86-64 has it; `self` proves AVX-512.
            unsafe { _mm_sfence() };
        }
        #[inline(always)]
        fn add(self, a: __m512, b: __m512) -> __m512 {
            // SAFETY: `self` proves AVX-512.
            unsafe { _mm512_add_ps(a, b) }
        }
        #[inline(always)]
        fn sub(self, a: __m512, b: __m512) -> __m512 {
            // SAFETY: `self` proves AVX-512.
            unsafe { _mm512_sub_ps(a, b) }
        }
        #[inline(always)]
        fn mul(self, a: __m512, b: __m512) -> __m512 {
            // SAFETY: `self` proves AVX-512.
            unsafe { _mm512_mul_ps(a, b) }
        }
        #[inline(always)]
        fn div(self, a: __m512, b: __m512) -> __m512 {
            // SAFETY: `self` proves AVX-512.
            unsafe { _mm512_div_ps(a, b) }
        }
        #[inline(always)]
        fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
            // SAFETY: `self` proves AVX-512.
            unsafe { _mm512_fmadd_ps(a, b, c) }
        }
        #[inline(always)]
        fn sqrt(self, a: __m512) -> __m512 {
            // SAFETY: `self` proves AVX-512.
            unsafe { _mm512_sqrt_ps(a) }
        }
        #[inline(always)]
        fn max(self, a: __m512, b: __m512) -> __m512 {
            // SAFETY: `self` proves AVX-512.
            unsafe { _mm512_max_ps(a, b) }
        }
        #[inline(always)]
        fn min(self, a: __m512, b: __m512) -> __m512 {
            // SAFETY: `self` proves AVX-512.
            unsafe { _mm512_min_ps(a, b) }
        }
        #[inline(always)]
        fn select_gt(self, a: __m512, b: __m512, x: __m512, y: __m512) -> __m512 {
            // SAFETY: `self` proves AVX-512.
            unsafe { _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_GT_OQ>(a, b), y, x) }
        }
        #[inline(always)]
        fn shl23(self, a: __m512) -> __m512 {
            // SAFETY: `self` proves AVX-512.
            unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<23>(_mm512_castps_si512(a))) }
        }
        #[inline(always)]
        fn scale2(self, a: __m512, n: __m512) -> __m512 {
            // SAFETY: `self` proves AVX-512.
            unsafe { _mm512_scalef_ps(a, n) }
        }
        #[inline(always)]
        fn reduce_add(self, a: __m512) -> f32 {
            let mut v = [0.0f32; 16];
            // SAFETY: `self` proves AVX-512; sixteen lanes fit.
            unsafe { _mm512_storeu_ps(v.as_mut_ptr(), a) };
            // Halves are added until one lane is left, written out so that the order does not hang on a library's choice.
            let mut half = 8;
            while half > 0 {
                let mut i = 0;
                while i < half {
                    v[i] += v[i + half];
                    i += 1;
                }
                half /= 2;
            }
            v[0]
        }
        #[inline(always)]
        fn reduce_max(self, a: __m512) -> f32 {
            // SAFETY: `self` proves AVX-512.
            unsafe { _mm512_reduce_max_ps(a) }
        }
        #[inline(always)]
        unsafe fn transpose8<E: Elem>(self, src: *const E, stride: usize, dst: *mut f32, dst_stride: usize) {
            // SAFETY: AVX-512 comes with AVX2 and FMA; both blocks are valid by contract.
            unsafe { Avx2::assume().transpose8(src, stride, dst, dst_stride) }
        }
        #[inline(always)]
        unsafe fn load_pairs(self, low: *const u16, high: *const u16) -> __m512 {
            // SAFETY: `self` proves AVX-512; both addresses by contract.
            unsafe {
                let (low, high) = (_mm256_loadu_si256(low.cast()), _mm256_loadu_si256(high.cast()));
                let high = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(high));
                _mm512_castsi512_ps(_mm512_or_si512(_mm512_cvtepu16_epi32(low), high))
            }
        }
        #[inline(always)]
        unsafe fn load_two_of_pairs(self, low: *const u16, high: *const u16) -> [__m512; 2] {
            // SAFETY: `self` proves AVX-512; both addresses by contract.
            unsafe {
                let (low, high) = (_mm512_loadu_si512(low.cast()), _mm512_loadu_si512(high.cast()));
                let [first, second] = [&INTERLEAVED[..32], &INTERLEAVED[32..]].map(|i| _mm512_loadu_si512(i.as_ptr().cast()));
                [_mm512_permutex2var_epi16(low, first, high), _mm512_permutex2var_epi16(low, second, high)].map(|x| _mm512_castsi512_ps(x))
            }
        }
        #[inline(always)]
        fn pair_low(self, a: __m512) -> __m512 {
            // SAFETY: `self` proves AVX-512.
            unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_castps_si512(a))) }
        }
        #[inline(always)]
        fn pair_high(self, a: __m512) -> __m512 {
            // SAFETY: `self` proves AVX-512.
            unsafe { _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(0xffff_0000u32 as i32))) }
        }
            $($more)*
        }
    };
}

sixteen_lanes!(Avx512, {});
sixteen_lanes!(Avx512Bf16, {
    #[inline(always)]
    fn dot_pairs(self, a: __m512, b: __m512, acc: __m512) -> __m512 {
        // SAFETY: `self` proves AVX512-BF16; both types are 64 bytes of plain bits.
        unsafe { _mm512_dpbf16_ps(acc, std::mem::transmute::<__m512, __m512bh>(a), std::mem::transmute::<__m512, __m512bh>(b)) }
    }
    #[inline(always)]
    fn narrow(self, low: __m512, high: __m512) -> __m512 {
        // SAFETY: as above.
        unsafe { std::mem::transmute::<__m512bh, __m512>(_mm512_cvtne2ps_pbh(high, low)) }
    }
    #[inline(always)]
    fn narrow_pairs(self, low: __m512, high: __m512) -> __m512 {
        // SAFETY: as above.
        unsafe {
            let both = _mm512_castps_si512(self.narrow(low, high));
            // Word 2i is word i, word 2i + 1 is word 16 + i.
            let order = _mm512_add_epi32(
                _mm512_set1_epi32(0x0010_0000),
                _mm512_mullo_epi32(_mm512_set1_epi32(0x0001_0001), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)),
            );
            _mm512_castsi512_ps(_mm512_permutexvar_epi16(order, both))
        }
    }
});
