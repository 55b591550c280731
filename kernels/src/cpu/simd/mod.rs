//! One generic body per kernel, compiled for every instruction set and chosen at run time.
//!
//! [`Simd`] is a vector of `f32` lanes; its implementations are thin wrappers of intrinsics ([`avx512`], [`avx2`]) or arrays
//! that the compiler vectorizes ([`portable`]). A value of such a type is the proof that the processor has the instructions:
//! only [`simd_fn!`](crate::simd_fn) makes one, from an [`Isa`] that [`Isa::detect`] or [`Isa::available`] handed out. What
//! cannot be run on the developers' machines is checked on the user's: an instruction set is used only after it has
//! reproduced the portable results once per process ([`check`]). Tiles (AMX) are no vectors: that level has the vectors of AVX-512 and
//! its own products in `matmul` and `attention`.
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
pub mod avx2;
#[cfg(target_arch = "x86_64")]
pub mod avx512;
mod check;
pub mod portable;

use crate::cpu::float::Elem;
use std::sync::OnceLock;

/// An instruction set that this processor has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Isa(Level);

#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    Portable,
    Avx2,
    Avx512,
    Avx512Bf16,
    Amx,
}

struct Detected {
    best: Isa,
    notes: Vec<String>,
}

impl Isa {
    /// What the compiler makes of plain arrays: runs everywhere.
    pub const PORTABLE: Isa = Isa(Level::Portable);

    /// The best instruction set that passed its self-check; the check runs once per process, at the first call.
    pub fn detect() -> Isa {
        detected().best
    }

    /// Why a better instruction set that the processor claims to have is not used; empty in the ordinary case.
    pub fn notes() -> &'static [String] {
        &detected().notes
    }

    /// Every instruction set that the processor claims to have, from portable to best, checked or not.
    pub fn available() -> Vec<Isa> {
        let mut all = vec![Isa::PORTABLE];
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                all.push(Isa(Level::Avx2));
                if is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                {
                    all.push(Isa(Level::Avx512));
                    if is_x86_feature_detected!("avx512bf16") {
                        all.push(Isa(Level::Avx512Bf16));
                        if crate::cpu::matmul::pairs::amx::detect() {
                            all.push(Isa(Level::Amx));
                        }
                    }
                }
            }
        }
        all
    }

    /// Name for people.
    pub fn name(self) -> &'static str {
        match self.0 {
            Level::Portable => "portable",
            Level::Avx2 => "avx2",
            Level::Avx512 => "avx512",
            Level::Avx512Bf16 => "avx512-bf16",
            Level::Amx => "avx512-amx",
        }
    }

    /// Whether pairs of bf16 are multiplied by instructions of their own (AVX512-BF16 or AMX), faster than f32.
    pub fn has_pairs(self) -> bool {
        self.0 >= Level::Avx512Bf16
    }

    #[doc(hidden)]
    pub fn level(self) -> Level {
        self.0
    }
}

fn detected() -> &'static Detected {
    static DETECTED: OnceLock<Detected> = OnceLock::new();
    DETECTED.get_or_init(|| {
        let mut notes = Vec::new();
        for isa in Isa::available().into_iter().rev() {
            match check::self_check(isa) {
                Ok(()) => return Detected { best: isa, notes },
                Err(why) => notes.push(format!("{} is not used, its self-check failed: {why}", isa.name())),
            }
        }
        Detected { best: Isa::PORTABLE, notes }
    })
}

/// Asks for the cache line at `p`, an address that need not be valid: where hardware does not foresee an access.
#[inline(always)]
pub(crate) fn prefetch<T>(p: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 has the instruction, and it never faults.
    unsafe {
        core::arch::x86_64::_mm_prefetch::<{ core::arch::x86_64::_MM_HINT_T0 }>(p.cast())
    };
    #[cfg(not(target_arch = "x86_64"))]
    let _ = p;
}

/// Vectors of `f32`. A value is the proof that the instructions exist, so arithmetic is safe; loads and stores take addresses.
///
/// Kernels written over it must be `#[inline(always)]` down to here and free of closures that carry vectors: code that is not
/// inlined into the `#[target_feature]` entry point is compiled without the instructions.
pub trait Simd: Copy + Send + Sync + 'static {
    /// `LANES` values.
    type V: Copy;
    /// Values in a vector: 8 or 16.
    const LANES: usize;
    /// Rows of a matmul tile: with [`Simd::TILE_VECTORS`] chosen so that the accumulators nearly fill the registers.
    const TILE_ROWS: usize;
    /// Vectors in a row of a matmul tile.
    const TILE_VECTORS: usize;

    /// All lanes `x`.
    fn splat(self, x: f32) -> Self::V;
    /// Lanes from `p`, of any alignment.
    ///
    /// # Safety
    /// `p` is valid for reading `LANES` elements.
    unsafe fn load(self, p: *const f32) -> Self::V;
    /// Lanes to `p`, of any alignment.
    ///
    /// # Safety
    /// `p` is valid for writing `LANES` elements.
    unsafe fn store(self, p: *mut f32, v: Self::V);
    /// `LANES` bf16 values from their bits.
    ///
    /// # Safety
    /// `p` is valid for reading `LANES` elements.
    unsafe fn load_bf16(self, p: *const u16) -> Self::V;
    /// Bits of the lanes rounded to bf16, nearest even; NaN stays NaN.
    ///
    /// # Safety
    /// `p` is valid for writing `LANES` elements.
    unsafe fn store_bf16(self, p: *mut u16, v: Self::V);
    /// As [`Simd::store`], around the caches where the processor can: for what is not read again soon. Whole cache lines should
    /// be written in a row; [`Simd::stream_end`] must follow before another thread is told of them.
    ///
    /// # Safety
    /// As [`Simd::store`], and `p` is a multiple of `4 * LANES` bytes.
    #[inline(always)]
    unsafe fn stream(self, p: *mut f32, v: Self::V) {
        // SAFETY: passed on.
        unsafe { self.store(p, v) }
    }
    /// As [`Simd::stream`], two vectors rounded to bf16: as many bytes as one of `f32`, so that stores are as wide.
    ///
    /// # Safety
    /// `p` is valid for writing `2 * LANES` elements, and a multiple of `4 * LANES` bytes.
    #[inline(always)]
    unsafe fn stream_bf16(self, p: *mut u16, low: Self::V, high: Self::V) {
        // SAFETY: passed on.
        unsafe {
            self.store_bf16(p, low);
            self.store_bf16(p.add(Self::LANES), high);
        }
    }
    /// Orders what [`Simd::stream`] and [`Simd::stream_bf16`] wrote before all later stores.
    #[inline(always)]
    fn stream_end(self) {}
    /// `a + b`.
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a - b`.
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b`.
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a / b`, correctly rounded.
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`: fused where the instruction set has it, two roundings in the portable path without it.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// Correctly rounded square root.
    fn sqrt(self, a: Self::V) -> Self::V;
    /// The larger of each pair; `b` where either is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// The smaller of each pair; `b` where either is NaN.
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    /// `x` where `a > b`, else `y`.
    fn select_gt(self, a: Self::V, b: Self::V, x: Self::V, y: Self::V) -> Self::V;
    /// The bits of each lane shifted left by 23: moves a small integer into the exponent.
    fn shl23(self, a: Self::V) -> Self::V;
    /// Sum of the lanes: halves are added until one is left, so the order is fixed.
    fn reduce_add(self, a: Self::V) -> f32;
    /// Largest lane, of lanes without NaN.
    fn reduce_max(self, a: Self::V) -> f32;

    /// Writes the transpose of an 8 x 8 block: `dst[k * dst_stride + j] = src[j * stride + k]`.
    ///
    /// # Safety
    /// All 64 elements of both blocks are valid; no alignment is needed.
    unsafe fn transpose8<E: Elem>(self, src: *const E, stride: usize, dst: *mut f32, dst_stride: usize);

    /// Every lane holds the bits of two bf16: `acc + a.low * b.low + a.high * b.high`. A matmul instruction where there is one.
    #[inline(always)]
    fn dot_pairs(self, a: Self::V, b: Self::V, acc: Self::V) -> Self::V {
        let acc = self.fma(self.pair_low(a), self.pair_low(b), acc);
        self.fma(self.pair_high(a), self.pair_high(b), acc)
    }
    /// Bits of two bf16 in every lane: `low[i]` below `high[i]`.
    ///
    /// # Safety
    /// Both are valid for reading `LANES` elements.
    unsafe fn load_pairs(self, low: *const u16, high: *const u16) -> Self::V;
    /// [`Simd::load_pairs`] of twice as many.
    ///
    /// # Safety
    /// Both are valid for reading `2 * LANES` elements.
    #[inline(always)]
    unsafe fn load_two_of_pairs(self, low: *const u16, high: *const u16) -> [Self::V; 2] {
        // SAFETY: passed on.
        unsafe { [self.load_pairs(low, high), self.load_pairs(low.add(Self::LANES), high.add(Self::LANES))] }
    }
    /// The lower of each lane's two bf16.
    fn pair_low(self, a: Self::V) -> Self::V;
    /// The upper of each lane's two bf16.
    fn pair_high(self, a: Self::V) -> Self::V;

    /// `LANES` values from the front of `p`; panics when there are fewer.
    #[inline(always)]
    fn load_slice(self, p: &[f32]) -> Self::V {
        assert!(p.len() >= Self::LANES);
        // SAFETY: long enough.
        unsafe { self.load(p.as_ptr()) }
    }

    /// `LANES` values to the front of `p`; panics when there is less room.
    #[inline(always)]
    fn store_slice(self, p: &mut [f32], v: Self::V) {
        assert!(p.len() >= Self::LANES);
        // SAFETY: long enough.
        unsafe { self.store(p.as_mut_ptr(), v) }
    }

    /// `e^a` within 1.5 units in the last place; 0 below -104, infinity above 88.73, NaN for NaN, subnormal results exact to their spacing.
    #[inline(always)]
    fn exp(self, a: Self::V) -> Self::V {
        // x = n ln2 + r with |r| <= ln2/2; adding 1.5 * 2^23 rounds to an integer and leaves it in the low mantissa bits.
        let magic = self.splat(12_582_912.0);
        let x = self.min(self.splat(89.0), self.max(self.splat(-105.0), a));
        let n = self.sub(self.fma(x, self.splat(std::f32::consts::LOG2_E), magic), magic);
        let r = self.fma(n, self.splat(-0.693_359_4), x);
        let r = self.fma(n, self.splat(2.121_944_4e-4), r);
        // Taylor terms to r^7: the remainder is below 6e-9 relative on |r| <= 0.347.
        let mut p = self.splat(1.0 / 5040.0);
        p = self.fma(p, r, self.splat(1.0 / 720.0));
        p = self.fma(p, r, self.splat(1.0 / 120.0));
        p = self.fma(p, r, self.splat(1.0 / 24.0));
        p = self.fma(p, r, self.splat(1.0 / 6.0));
        p = self.fma(p, r, self.splat(0.5));
        p = self.fma(self.mul(p, r), r, r);
        p = self.add(p, self.splat(1.0));
        self.scale2(p, n)
    }

    /// `2^a` within 3 units in the last place, for `a <= 127`; 0 below -126, NaN for NaN. Larger values give no more than "too large".
    #[inline(always)]
    #[expect(clippy::approx_constant, reason = "the coefficient near ln 2 is a little less")]
    fn exp2(self, a: Self::V) -> Self::V {
        // As in `exp`, where `n` needs no rounded multiple of ln2.
        let magic = self.splat(12_582_912.0);
        let least = self.splat(-126.0);
        let x = self.max(least, a);
        let n = self.sub(self.add(x, magic), magic);
        let r = self.sub(x, n);
        // The polynomial of degree 5 through 1 with the least relative error on |r| <= 0.5: 1.1e-7 (Remez).
        let mut p = self.splat(0.001_326_472_8);
        p = self.fma(p, r, self.splat(0.009_671_514));
        p = self.fma(p, r, self.splat(0.055_507_336));
        p = self.fma(p, r, self.splat(0.240_222_42));
        p = self.fma(p, r, self.splat(0.693_147));
        p = self.fma(p, r, self.splat(1.0));
        // No result is subnormal, which would cost a hundred times the rest: hidden scores come here as -inf.
        self.select_gt(least, a, self.splat(0.0), self.scale2(p, n))
    }

    /// `a * 2^n` for whole `n` from -152 to 128 and `a` near 1, rounded once.
    #[inline(always)]
    fn scale2(self, a: Self::V, n: Self::V) -> Self::V {
        // Two factors, since one exponent field reaches neither 2^128 nor subnormals.
        let magic = self.splat(12_582_912.0);
        let half = self.sub(self.fma(n, self.splat(0.5), magic), magic);
        let rest = self.sub(n, half);
        let bias = self.splat(12_582_912.0 + 127.0);
        let scale_a = self.shl23(self.add(half, bias));
        let scale_b = self.shl23(self.add(rest, bias));
        self.mul(self.mul(a, scale_a), scale_b)
    }

    /// Bits of `low` and then of `high` as bf16, for products that take subnormals as zero: those may be zero here already.
    #[inline(always)]
    fn narrow(self, low: Self::V, high: Self::V) -> Self::V {
        let mut bits = [0u16; 32];
        // SAFETY: two vectors of at most 16 values fit.
        unsafe {
            self.store_bf16(bits.as_mut_ptr(), low);
            self.store_bf16(bits.as_mut_ptr().add(Self::LANES), high);
            self.load(bits.as_ptr().cast())
        }
    }

    /// As [`Simd::narrow`], `low[i]` below `high[i]` in every lane.
    #[inline(always)]
    fn narrow_pairs(self, low: Self::V, high: Self::V) -> Self::V {
        let (mut l, mut h) = ([0u16; 16], [0u16; 16]);
        // SAFETY: a vector has at most 16 values.
        unsafe {
            self.store_bf16(l.as_mut_ptr(), low);
            self.store_bf16(h.as_mut_ptr(), high);
            self.load_pairs(l.as_ptr(), h.as_ptr())
        }
    }
}

/// Defines a function over [`Simd`] once and compiles it for every instruction set.
///
/// `simd_fn! { pub fn name[S](s: S, x: &[f32]) -> f32 { body } }` makes `pub fn name(isa: Isa, x: &[f32]) -> f32`.
/// Further generic parameters follow `S`: `name[S, E: Elem]`.
#[macro_export]
macro_rules! simd_fn {
    ($(#[$meta:meta])* $vis:vis fn $name:ident[$S:ident $(, $G:ident : $bound:path)*]($s:ident: $S2:ident $(, $arg:ident: $ty:ty)* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name<$($G: $bound),*>(isa: $crate::cpu::simd::Isa $(, $arg: $ty)*) $(-> $ret)? {
            use $crate::cpu::simd::Level;
            #[inline(always)]
            #[allow(clippy::too_many_arguments)]
            fn body<$S: $crate::cpu::simd::Simd $(, $G: $bound)*>($s: $S $(, $arg: $ty)*) $(-> $ret)? $body
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            #[allow(clippy::too_many_arguments)]
            fn avx2<$($G: $bound),*>(token: $crate::cpu::simd::avx2::Avx2 $(, $arg: $ty)*) $(-> $ret)? {
                body::<_ $(, $G)*>(token $(, $arg)*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")]
            #[allow(clippy::too_many_arguments)]
            fn avx512<$($G: $bound),*>(token: $crate::cpu::simd::avx512::Avx512 $(, $arg: $ty)*) $(-> $ret)? {
                body::<_ $(, $G)*>(token $(, $arg)*)
            }
            match isa.level() {
                // SAFETY: an `Isa` of this level exists only where the processor has these features.
                #[cfg(target_arch = "x86_64")]
                Level::Avx512 | Level::Avx512Bf16 | Level::Amx => unsafe {
                    avx512::<$($G),*>($crate::cpu::simd::avx512::Avx512::assume() $(, $arg)*)
                },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                Level::Avx2 => unsafe { avx2::<$($G),*>($crate::cpu::simd::avx2::Avx2::assume() $(, $arg)*) },
                _ => body::<_ $(, $G)*>($crate::cpu::simd::portable::Portable $(, $arg)*),
            }
        }
    };
}
pub use crate::simd_fn;
