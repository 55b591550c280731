//! Eight lanes of AVX2 with FMA: Intel since Haswell, AMD since Zen.
#![allow(unsafe_code)]

use super::Simd;
use crate::cpu::float::Elem;
use core::arch::x86_64::*;

/// Proof of AVX2 and FMA.
#[derive(Clone, Copy, Debug)]
pub struct Avx2(());

impl Avx2 {
    /// # Safety
    /// The processor has AVX2 and FMA.
    #[inline(always)]
    pub unsafe fn assume() -> Avx2 {
        Avx2(())
    }
}

/// Each lane rounded to bf16, to nearest even, in its lower half; NaN stays NaN.
#[inline(always)]
fn rounded(_proof: Avx2, v: __m256) -> __m256i {
    // SAFETY: the proof.
    unsafe {
        let bits = _mm256_castps_si256(v);
        let upper = _mm256_srli_epi32::<16>(bits);
        let odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
        let rounded = _mm256_srli_epi32::<16>(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))));
        let quiet = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
        let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(v, v));
        _mm256_blendv_epi8(rounded, quiet, nan)
    }
}

impl Simd for Avx2 {
    type V = __m256;
    const LANES: usize = 8;
    const TILE_ROWS: usize = 6;
    const TILE_VECTORS: usize = 2;

    #[inline(always)]
    fn splat(self, x: f32) -> __m256 {
        // SAFETY: `self` proves AVX2 and FMA.
        unsafe { _mm256_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> __m256 {
        // SAFETY: `self` proves AVX2 and FMA; `p` by contract.
        unsafe { _mm256_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: __m256) {
        // SAFETY: `self` proves AVX2 and FMA; `p` by contract.
        unsafe { _mm256_storeu_ps(p, v) }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> __m256 {
        // SAFETY: `self` proves AVX2 and FMA; `p` by contract.
        unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast())))) }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u16, v: __m256) {
        // SAFETY: `self` proves AVX2 and FMA; `p` by contract.
        unsafe {
            let out = rounded(self, v);
            let pairs = _mm256_permute4x64_epi64::<0b00_00_10_00>(_mm256_packus_epi32(out, out));
            _mm_storeu_si128(p.cast(), _mm256_castsi256_si128(pairs));
        }
    }
    #[inline(always)]
    unsafe fn stream(self, p: *mut f32, v: __m256) {
        // SAFETY: `self` proves AVX2 and FMA; `p` and its alignment by contract.
        unsafe { _mm256_stream_ps(p, v) }
    }
    #[inline(always)]
    unsafe fn stream_bf16(self, p: *mut u16, low: __m256, high: __m256) {
        // SAFETY: `self` proves AVX2 and FMA; `p` and its alignment by contract.
        unsafe {
            let both = _mm256_packus_epi32(rounded(self, low), rounded(self, high));
            _mm256_stream_si256(p.cast(), _mm256_permute4x64_epi64::<0b11_01_10_00>(both));
        }
    }
    #[inline(always)]
    fn stream_end(self) {
        // SAFETY: every x86-64 has it; `self` proves AVX2 and FMA.
        unsafe { _mm_sfence() };
    }
    #[inline(always)]
    fn add(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: `self` proves AVX2 and FMA.
        unsafe { _mm256_add_ps(a, b) }
    }
    #[inline(always)]
    fn sub(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: `self` proves AVX2 and FMA.
        unsafe { _mm256_sub_ps(a, b) }
    }
    #[inline(always)]
    fn mul(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: `self` proves AVX2 and FMA.
        unsafe { _mm256_mul_ps(a, b) }
    }
    #[inline(always)]
    fn div(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: `self` proves AVX2 and FMA.
        unsafe { _mm256_div_ps(a, b) }
    }
    #[inline(always)]
    fn fma(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        // SAFETY: `self` proves AVX2 and FMA.
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    fn sqrt(self, a: __m256) -> __m256 {
        // SAFETY: `self` proves AVX2 and FMA.
        unsafe { _mm256_sqrt_ps(a) }
    }
    #[inline(always)]
    fn max(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: `self` proves AVX2 and FMA.
        unsafe { _mm256_max_ps(a, b) }
    }
    #[inline(always)]
    fn min(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: `self` proves AVX2 and FMA.
        unsafe { _mm256_min_ps(a, b) }
    }
    #[inline(always)]
    fn select_gt(self, a: __m256, b: __m256, x: __m256, y: __m256) -> __m256 {
        // SAFETY: `self` proves AVX2 and FMA.
        unsafe { _mm256_blendv_ps(y, x, _mm256_cmp_ps::<_CMP_GT_OQ>(a, b)) }
    }
    #[inline(always)]
    fn shl23(self, a: __m256) -> __m256 {
        // SAFETY: `self` proves AVX2 and FMA.
        unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_castps_si256(a))) }
    }
    #[inline(always)]
    fn reduce_add(self, a: __m256) -> f32 {
        // SAFETY: `self` proves AVX2 and FMA.
        unsafe {
            let b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let c = _mm_add_ps(b, _mm_movehl_ps(b, b));
            _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps::<1>(c, c)))
        }
    }
    #[inline(always)]
    fn reduce_max(self, a: __m256) -> f32 {
        // SAFETY: `self` proves AVX2 and FMA.
        unsafe {
            let b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let c = _mm_max_ps(b, _mm_movehl_ps(b, b));
            _mm_cvtss_f32(_mm_max_ss(c, _mm_shuffle_ps::<1>(c, c)))
        }
    }
    #[inline(always)]
    unsafe fn transpose8<E: Elem>(self, src: *const E, stride: usize, dst: *mut f32, dst_stride: usize) {
        // SAFETY: `self` proves AVX2 and FMA; both blocks are valid by contract.
        unsafe {
            let r0 = E::load(self, src);
            let r1 = E::load(self, src.add(stride));
            let r2 = E::load(self, src.add(2 * stride));
            let r3 = E::load(self, src.add(3 * stride));
            let r4 = E::load(self, src.add(4 * stride));
            let r5 = E::load(self, src.add(5 * stride));
            let r6 = E::load(self, src.add(6 * stride));
            let r7 = E::load(self, src.add(7 * stride));
            let (a0, a1) = (_mm256_unpacklo_ps(r0, r1), _mm256_unpackhi_ps(r0, r1));
            let (a2, a3) = (_mm256_unpacklo_ps(r2, r3), _mm256_unpackhi_ps(r2, r3));
            let (a4, a5) = (_mm256_unpacklo_ps(r4, r5), _mm256_unpackhi_ps(r4, r5));
            let (a6, a7) = (_mm256_unpacklo_ps(r6, r7), _mm256_unpackhi_ps(r6, r7));
            let (b0, b1) = (_mm256_shuffle_ps::<0x44>(a0, a2), _mm256_shuffle_ps::<0xee>(a0, a2));
            let (b2, b3) = (_mm256_shuffle_ps::<0x44>(a1, a3), _mm256_shuffle_ps::<0xee>(a1, a3));
            let (b4, b5) = (_mm256_shuffle_ps::<0x44>(a4, a6), _mm256_shuffle_ps::<0xee>(a4, a6));
            let (b6, b7) = (_mm256_shuffle_ps::<0x44>(a5, a7), _mm256_shuffle_ps::<0xee>(a5, a7));
            _mm256_storeu_ps(dst, _mm256_permute2f128_ps::<0x20>(b0, b4));
            _mm256_storeu_ps(dst.add(dst_stride), _mm256_permute2f128_ps::<0x20>(b1, b5));
            _mm256_storeu_ps(dst.add(2 * dst_stride), _mm256_permute2f128_ps::<0x20>(b2, b6));
            _mm256_storeu_ps(dst.add(3 * dst_stride), _mm256_permute2f128_ps::<0x20>(b3, b7));
            _mm256_storeu_ps(dst.add(4 * dst_stride), _mm256_permute2f128_ps::<0x31>(b0, b4));
            _mm256_storeu_ps(dst.add(5 * dst_stride), _mm256_permute2f128_ps::<0x31>(b1, b5));
            _mm256_storeu_ps(dst.add(6 * dst_stride), _mm256_permute2f128_ps::<0x31>(b2, b6));
            _mm256_storeu_ps(dst.add(7 * dst_stride), _mm256_permute2f128_ps::<0x31>(b3, b7));
        }
    }
    #[inline(always)]
    unsafe fn load_pairs(self, low: *const u16, high: *const u16) -> __m256 {
        // SAFETY: `self` proves AVX2 and FMA; both addresses by contract.
        unsafe {
            let (low, high) = (_mm_loadu_si128(low.cast()), _mm_loadu_si128(high.cast()));
            let high = _mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(high));
            _mm256_castsi256_ps(_mm256_or_si256(_mm256_cvtepu16_epi32(low), high))
        }
    }
    #[inline(always)]
    fn pair_low(self, a: __m256) -> __m256 {
        // SAFETY: `self` proves AVX2 and FMA.
        unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_castps_si256(a))) }
    }
    #[inline(always)]
    fn pair_high(self, a: __m256) -> __m256 {
        // SAFETY: `self` proves AVX2 and FMA.
        unsafe { _mm256_and_ps(a, _mm256_castsi256_ps(_mm256_set1_epi32(0xffff_0000u32 as i32))) }
    }
}
