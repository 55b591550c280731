//! How kernels see storage: a slice of `f32` or of `bf16`, read and written as `f32`.
//!
//! [`Float`] and [`FloatMut`] carry the element type as a value (what an operation gets), [`Elem`] as a type (what a kernel
//! is compiled for). Conversion to `bf16` rounds to nearest even everywhere.
#![allow(unsafe_code)]

use super::simd::Simd;
use half::bf16;
use std::marker::PhantomData;

/// Elements to read.
#[derive(Clone, Copy, Debug)]
pub enum Float<'a> {
    /// Stored as `f32`.
    F32(&'a [f32]),
    /// Stored as `bf16`.
    Bf16(&'a [bf16]),
}

/// Elements to write.
#[derive(Debug)]
pub enum FloatMut<'a> {
    /// Stored as `f32`.
    F32(&'a mut [f32]),
    /// Stored as `bf16`.
    Bf16(&'a mut [bf16]),
}

impl<'a> Float<'a> {
    /// Elements.
    pub fn elems(&self) -> usize {
        match self {
            Float::F32(x) => x.len(),
            Float::Bf16(x) => x.len(),
        }
    }

    /// Elements `start .. start + elems`.
    pub fn slice(&self, start: usize, elems: usize) -> Float<'a> {
        match self {
            Float::F32(x) => Float::F32(&x[start..start + elems]),
            Float::Bf16(x) => Float::Bf16(&x[start..start + elems]),
        }
    }

    /// Element `i` as `f32`.
    pub fn get(&self, i: usize) -> f32 {
        match self {
            Float::F32(x) => x[i],
            Float::Bf16(x) => x[i].to_f32(),
        }
    }
}

impl FloatMut<'_> {
    /// Elements.
    pub fn elems(&self) -> usize {
        self.view().elems()
    }

    /// Read access to the same elements.
    pub fn view(&self) -> Float<'_> {
        match self {
            FloatMut::F32(x) => Float::F32(x),
            FloatMut::Bf16(x) => Float::Bf16(x),
        }
    }

    /// The same elements for a shorter time.
    pub fn reborrow(&mut self) -> FloatMut<'_> {
        match self {
            FloatMut::F32(x) => FloatMut::F32(x),
            FloatMut::Bf16(x) => FloatMut::Bf16(x),
        }
    }

    /// Elements `start .. start + elems`.
    pub fn slice(&mut self, start: usize, elems: usize) -> FloatMut<'_> {
        match self {
            FloatMut::F32(x) => FloatMut::F32(&mut x[start..start + elems]),
            FloatMut::Bf16(x) => FloatMut::Bf16(&mut x[start..start + elems]),
        }
    }

    /// Sets element `i`, rounded to the storage type.
    pub fn set(&mut self, i: usize, value: f32) {
        match self {
            FloatMut::F32(x) => x[i] = value,
            FloatMut::Bf16(x) => x[i] = bf16::from_f32(value),
        }
    }
}

/// A storage type that kernels load into `f32` vectors and store from them.
pub trait Elem: bytemuck::Pod + Send + Sync {
    /// The value.
    fn to_f32(self) -> f32;
    /// Rounded to nearest even.
    fn from_f32(value: f32) -> Self;
    /// The address itself where this type is `f32`.
    fn as_f32(_p: *mut Self) -> Option<*mut f32> {
        None
    }
    /// `S::LANES` elements from `p`.
    ///
    /// # Safety
    /// `p` is valid for reading `S::LANES` elements; no alignment is needed.
    unsafe fn load<S: Simd>(s: S, p: *const Self) -> S::V;
    /// Stores `S::LANES` elements.
    ///
    /// # Safety
    /// `p` is valid for writing `S::LANES` elements; no alignment is needed.
    unsafe fn store<S: Simd>(s: S, p: *mut Self, v: S::V);

    /// Stores two vectors; as bf16 subnormal numbers may become 0, as in products of tiles.
    ///
    /// # Safety
    /// `p` is valid for writing `2 * S::LANES` elements; no alignment is needed.
    #[inline(always)]
    unsafe fn store_flushed<S: Simd>(s: S, p: *mut Self, low: S::V, high: S::V) {
        // SAFETY: passed on.
        unsafe {
            Self::store(s, p, low);
            Self::store(s, p.add(S::LANES), high);
        }
    }

    /// The first `n < S::LANES` elements; the other lanes are 0.
    ///
    /// # Safety
    /// `p` is valid for reading `n` elements.
    #[inline(always)]
    unsafe fn load_part<S: Simd>(s: S, p: *const Self, n: usize) -> S::V {
        let mut lanes = [0.0f32; 16];
        for (i, lane) in lanes[..n].iter_mut().enumerate() {
            // SAFETY: i < n elements are readable.
            *lane = unsafe { *p.add(i) }.to_f32();
        }
        // SAFETY: no vector has more than 16 lanes.
        unsafe { s.load(lanes.as_ptr()) }
    }

    /// Stores the first `n < S::LANES` lanes.
    ///
    /// # Safety
    /// `p` is valid for writing `n` elements.
    #[inline(always)]
    unsafe fn store_part<S: Simd>(s: S, p: *mut Self, v: S::V, n: usize) {
        let mut lanes = [0.0f32; 16];
        // SAFETY: no vector has more than 16 lanes.
        unsafe { s.store(lanes.as_mut_ptr(), v) };
        for (i, lane) in lanes[..n].iter().enumerate() {
            // SAFETY: i < n elements are writable.
            unsafe { *p.add(i) = Self::from_f32(*lane) };
        }
    }
}

impl Elem for f32 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline(always)]
    fn from_f32(value: f32) -> f32 {
        value
    }
    #[inline(always)]
    fn as_f32(p: *mut f32) -> Option<*mut f32> {
        Some(p)
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const f32) -> S::V {
        // SAFETY: passed on.
        unsafe { s.load(p) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(s: S, p: *mut f32, v: S::V) {
        // SAFETY: passed on.
        unsafe { s.store(p, v) }
    }
}

impl Elem for bf16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
    #[inline(always)]
    fn from_f32(value: f32) -> bf16 {
        bf16::from_bits(bf16_bits(value))
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const bf16) -> S::V {
        // SAFETY: passed on; bf16 is a transparent u16.
        unsafe { s.load_bf16(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(s: S, p: *mut bf16, v: S::V) {
        // SAFETY: passed on; bf16 is a transparent u16.
        unsafe { s.store_bf16(p.cast(), v) }
    }
    #[inline(always)]
    unsafe fn store_flushed<S: Simd>(s: S, p: *mut bf16, low: S::V, high: S::V) {
        // SAFETY: passed on; as many bytes as one vector of f32.
        unsafe { s.store(p.cast(), s.narrow(low, high)) }
    }
}

/// Upper half of `value`, rounded to nearest even; NaN stays NaN.
#[inline(always)]
pub fn bf16_bits(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    ((bits.wrapping_add(0x7fff + ((bits >> 16) & 1))) >> 16) as u16
}

/// A mutable slice that the work items of one operation share, each touching elements of its own.
///
/// Slices cannot say "these items write disjoint tiles of one matrix"; this hands out parts on the caller's word.
pub struct Shared<'a, T> {
    base: *mut T,
    elems: usize,
    life: PhantomData<&'a mut [T]>,
}

// SAFETY: access goes through `range`, whose contract is that no two items overlap; T itself may move between threads.
unsafe impl<T: Send> Sync for Shared<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    /// Shares `slice` for as long as it is borrowed.
    pub fn new(slice: &'a mut [T]) -> Self {
        Shared { base: slice.as_mut_ptr(), elems: slice.len(), life: PhantomData }
    }

    /// Elements.
    pub fn elems(&self) -> usize {
        self.elems
    }

    /// Address of the first element; valid for `elems` elements.
    pub fn ptr(&self) -> *mut T {
        self.base
    }

    /// Elements `start .. start + elems`; panics when they leave the slice.
    ///
    /// # Safety
    /// No other part that is alive at the same time overlaps these elements.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn range(&self, start: usize, elems: usize) -> &mut [T] {
        assert!(start <= self.elems && elems <= self.elems - start, "part {start}+{elems} leaves {} elements", self.elems);
        // SAFETY: in bounds by the assertion; exclusive by contract.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(start), elems) }
    }
}
