//! Eight lanes as an array: what the compiler vectorizes for any processor, and the reference of every other path.

#![allow(unsafe_code)]
use super::Simd;
use crate::cpu::float::{Elem, bf16_bits};

/// Lanes in an array.
#[derive(Clone, Copy, Debug)]
pub struct Portable;

const N: usize = 8;

macro_rules! lanes {
    ($i:ident => $value:expr) => {{
        let mut out = [0.0f32; N];
        let mut $i = 0;
        while $i < N {
            out[$i] = $value;
            $i += 1;
        }
        out
    }};
}

impl Simd for Portable {
    type V = [f32; N];
    const LANES: usize = N;
    const TILE_ROWS: usize = 4;
    const TILE_VECTORS: usize = 1;

    #[inline(always)]
    fn splat(self, x: f32) -> [f32; N] {
        [x; N]
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> [f32; N] {
        // SAFETY: N elements are readable by contract.
        unsafe { p.cast::<[f32; N]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: [f32; N]) {
        // SAFETY: N elements are writable by contract.
        unsafe { p.cast::<[f32; N]>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> [f32; N] {
        // SAFETY: N elements are readable by contract.
        let bits = unsafe { p.cast::<[u16; N]>().read_unaligned() };
        lanes!(i => f32::from_bits(u32::from(bits[i]) << 16))
    }
    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u16, v: [f32; N]) {
        let mut bits = [0u16; N];
        let mut i = 0;
        while i < N {
            bits[i] = bf16_bits(v[i]);
            i += 1;
        }
        // SAFETY: N elements are writable by contract.
        unsafe { p.cast::<[u16; N]>().write_unaligned(bits) }
    }
    #[inline(always)]
    fn add(self, a: [f32; N], b: [f32; N]) -> [f32; N] {
        lanes!(i => a[i] + b[i])
    }
    #[inline(always)]
    fn sub(self, a: [f32; N], b: [f32; N]) -> [f32; N] {
        lanes!(i => a[i] - b[i])
    }
    #[inline(always)]
    fn mul(self, a: [f32; N], b: [f32; N]) -> [f32; N] {
        lanes!(i => a[i] * b[i])
    }
    #[inline(always)]
    fn div(self, a: [f32; N], b: [f32; N]) -> [f32; N] {
        lanes!(i => a[i] / b[i])
    }
    #[inline(always)]
    fn fma(self, a: [f32; N], b: [f32; N], c: [f32; N]) -> [f32; N] {
        // Without the instruction, mul_add is a slow library call.
        if cfg!(any(target_arch = "aarch64", target_feature = "fma")) {
            lanes!(i => a[i].mul_add(b[i], c[i]))
        } else {
            lanes!(i => a[i] * b[i] + c[i])
        }
    }
    #[inline(always)]
    fn sqrt(self, a: [f32; N]) -> [f32; N] {
        lanes!(i => a[i].sqrt())
    }
    #[inline(always)]
    fn max(self, a: [f32; N], b: [f32; N]) -> [f32; N] {
        lanes!(i => if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn min(self, a: [f32; N], b: [f32; N]) -> [f32; N] {
        lanes!(i => if a[i] < b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn select_gt(self, a: [f32; N], b: [f32; N], x: [f32; N], y: [f32; N]) -> [f32; N] {
        lanes!(i => if a[i] > b[i] { x[i] } else { y[i] })
    }
    #[inline(always)]
    fn shl23(self, a: [f32; N]) -> [f32; N] {
        lanes!(i => f32::from_bits(a[i].to_bits() << 23))
    }
    #[inline(always)]
    fn reduce_add(self, a: [f32; N]) -> f32 {
        let b = [a[0] + a[4], a[1] + a[5], a[2] + a[6], a[3] + a[7]];
        (b[0] + b[2]) + (b[1] + b[3])
    }
    #[inline(always)]
    fn reduce_max(self, a: [f32; N]) -> f32 {
        let mut m = a[0];
        let mut i = 1;
        while i < N {
            m = if a[i] > m { a[i] } else { m };
            i += 1;
        }
        m
    }
    #[inline(always)]
    unsafe fn transpose8<E: Elem>(self, src: *const E, stride: usize, dst: *mut f32, dst_stride: usize) {
        for k in 0..8 {
            for j in 0..8 {
                // SAFETY: both blocks are valid by contract.
                unsafe { *dst.add(k * dst_stride + j) = src.add(j * stride + k).read_unaligned().to_f32() };
            }
        }
    }
    #[inline(always)]
    unsafe fn load_pairs(self, low: *const u16, high: *const u16) -> [f32; N] {
        // SAFETY: N elements are readable by contract.
        let (low, high) = unsafe { (low.cast::<[u16; N]>().read_unaligned(), high.cast::<[u16; N]>().read_unaligned()) };
        lanes!(i => f32::from_bits(u32::from(low[i]) | u32::from(high[i]) << 16))
    }
    #[inline(always)]
    fn pair_low(self, a: [f32; N]) -> [f32; N] {
        lanes!(i => f32::from_bits(a[i].to_bits() << 16))
    }
    #[inline(always)]
    fn pair_high(self, a: [f32; N]) -> [f32; N] {
        lanes!(i => f32::from_bits(a[i].to_bits() & 0xffff_0000))
    }
}
