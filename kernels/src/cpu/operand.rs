//! How does a work item reach its part of an operand? Operations may work in place (the output is an input) and many items
//! write one output, so Rust slices of whole operands would alias. A kernel here holds copyable handles instead, cuts short
//! slices of [`Raw`] memory that no other item touches, or moves blocks of an [`Operand`] through small `f32` buffers,
//! which also makes two storage types one code path.
#![allow(unsafe_code)]

use super::float::{Elem, Float, FloatMut};
use super::simd::Simd;
use crate::{DType, Error, Result, View};
use half::bf16;

/// Elements of the stack buffers through which blocks are moved.
pub const BLOCK: usize = 256;

/// Memory that several work items use, each its own part.
pub struct Raw<T> {
    base: *mut T,
    elems: usize,
}

impl<T> Clone for Raw<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Raw<T> {}

// SAFETY: a handle is an address; every access goes through an unsafe method whose caller promises exclusive use.
unsafe impl<T: Send> Send for Raw<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Raw<T> {}

impl<T: bytemuck::Pod> Raw<T> {
    /// A handle to `x`. The slice must not be used while items run.
    pub fn new(x: &mut [T]) -> Raw<T> {
        Raw { base: x.as_mut_ptr(), elems: x.len() }
    }

    /// A handle to a view's elements; `T` must have the size of its type. Fails in memory that the host cannot touch.
    pub fn of(op: &'static str, view: &View) -> Result<Raw<T>> {
        debug_assert_eq!(size_of::<T>(), view.dtype().bytes());
        if view.elems() == 0 {
            return Ok(Raw { base: std::ptr::NonNull::dangling().as_ptr(), elems: 0 });
        }
        let base = view.host_ptr().ok_or(Error::NotHost { op })?;
        Ok(Raw { base: base.cast(), elems: view.elems() })
    }

    /// Elements.
    pub fn elems(self) -> usize {
        self.elems
    }

    /// All elements for reading.
    ///
    /// # Safety
    /// As [`Raw::read`].
    pub unsafe fn read_all<'a>(self) -> &'a [T] {
        // SAFETY: by contract.
        unsafe { self.read(0, self.elems) }
    }

    /// All elements for writing.
    ///
    /// # Safety
    /// As [`Raw::slice`].
    pub unsafe fn write_all<'a>(self) -> &'a mut [T] {
        // SAFETY: by contract.
        unsafe { self.slice(0, self.elems) }
    }

    /// Elements `start..start + elems` for writing.
    ///
    /// # Safety
    /// Inside the memory, which is alive for `'a`, and no one else uses them meanwhile.
    #[inline(always)]
    pub unsafe fn slice<'a>(self, start: usize, elems: usize) -> &'a mut [T] {
        debug_assert!(start + elems <= self.elems);
        // SAFETY: in bounds, alive and exclusive by contract; aligned since views are.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(start), elems) }
    }

    /// Elements `start..start + elems` for reading.
    ///
    /// # Safety
    /// Inside the memory, which is alive for `'a`, and no one writes them meanwhile.
    #[inline(always)]
    pub unsafe fn read<'a>(self, start: usize, elems: usize) -> &'a [T] {
        debug_assert!(start + elems <= self.elems);
        // SAFETY: in bounds, alive and not written by contract; aligned since views are.
        unsafe { std::slice::from_raw_parts(self.base.add(start), elems) }
    }
}

/// An operand of one of the storage types.
#[derive(Clone, Copy)]
pub enum Operand {
    /// Stored as `f32`.
    F32(Raw<f32>),
    /// Stored as `bf16`.
    Bf16(Raw<bf16>),
}

impl Operand {
    /// A handle to a view of `f32` or `bf16`.
    pub fn of(op: &'static str, view: &View) -> Result<Operand> {
        match view.dtype() {
            DType::F32 => Raw::of(op, view).map(Operand::F32),
            DType::BF16 => Raw::of(op, view).map(Operand::Bf16),
            got => Err(Error::Type { op, operand: "operand", expected: "f32 or bf16", got }),
        }
    }

    /// Elements.
    pub fn elems(self) -> usize {
        match self {
            Operand::F32(x) => x.elems(),
            Operand::Bf16(x) => x.elems(),
        }
    }

    /// All elements, for functions on slices.
    ///
    /// # Safety
    /// As [`Raw::read`].
    pub unsafe fn read_all<'a>(self) -> Float<'a> {
        // SAFETY: by contract.
        unsafe {
            match self {
                Operand::F32(x) => Float::F32(x.read_all()),
                Operand::Bf16(x) => Float::Bf16(x.read_all()),
            }
        }
    }

    /// All elements to write, for functions on slices.
    ///
    /// # Safety
    /// As [`Raw::slice`].
    pub unsafe fn write_all<'a>(self) -> FloatMut<'a> {
        // SAFETY: by contract.
        unsafe {
            match self {
                Operand::F32(x) => FloatMut::F32(x.write_all()),
                Operand::Bf16(x) => FloatMut::Bf16(x.write_all()),
            }
        }
    }

    /// Reads `out.len()` elements from `start` on.
    ///
    /// # Safety
    /// As [`Raw::read`].
    #[inline(always)]
    pub unsafe fn load<S: Simd>(self, s: S, start: usize, out: &mut [f32]) {
        match self {
            // SAFETY: by contract.
            Operand::F32(x) => out.copy_from_slice(unsafe { x.read(start, out.len()) }),
            Operand::Bf16(x) => {
                // SAFETY: by contract.
                let x = unsafe { x.read(start, out.len()) };
                let mut i = 0;
                while i + S::LANES <= x.len() {
                    // SAFETY: a whole vector is left in both.
                    unsafe { s.store(out.as_mut_ptr().add(i), bf16::load(s, x.as_ptr().add(i))) };
                    i += S::LANES;
                }
                for (o, x) in out[i..].iter_mut().zip(&x[i..]) {
                    *o = Elem::to_f32(*x);
                }
            }
        }
    }

    /// Writes `x` from element `start` on, rounding to nearest even.
    ///
    /// # Safety
    /// As [`Raw::slice`].
    #[inline(always)]
    pub unsafe fn store<S: Simd>(self, s: S, start: usize, x: &[f32]) {
        match self {
            // SAFETY: by contract.
            Operand::F32(y) => unsafe { y.slice(start, x.len()) }.copy_from_slice(x),
            Operand::Bf16(y) => {
                // SAFETY: by contract.
                let y = unsafe { y.slice(start, x.len()) };
                let mut i = 0;
                while i + S::LANES <= x.len() {
                    // SAFETY: a whole vector is left in both.
                    unsafe { bf16::store(s, y.as_mut_ptr().add(i), s.load(x.as_ptr().add(i))) };
                    i += S::LANES;
                }
                for (y, x) in y[i..].iter_mut().zip(&x[i..]) {
                    *y = Elem::from_f32(*x);
                }
            }
        }
    }

    /// As [`Operand::store`], bf16 around the caches: for what is not read again soon. [`Simd::stream_end`] must follow.
    ///
    /// # Safety
    /// As [`Raw::slice`].
    #[inline(always)]
    pub unsafe fn stream<S: Simd>(self, s: S, start: usize, x: &[f32]) {
        if let Operand::Bf16(y) = self {
            // SAFETY: by contract.
            let y = unsafe { y.slice(start, x.len()) };
            if (y.as_ptr() as usize).is_multiple_of(4 * S::LANES) && x.len().is_multiple_of(2 * S::LANES) {
                let mut i = 0;
                while i < x.len() {
                    // SAFETY: two whole vectors in both, aligned.
                    unsafe {
                        let from = x.as_ptr().add(i);
                        s.stream_bf16(y.as_mut_ptr().add(i).cast(), s.load(from), s.load(from.add(S::LANES)));
                    }
                    i += 2 * S::LANES;
                }
                return;
            }
        }
        // SAFETY: by contract.
        unsafe { self.store(s, start, x) };
    }
}

#[cfg(test)]
mod tests {
    use super::super::simd::{Isa, simd_fn};
    use super::*;
    use proptest::prelude::*;

    simd_fn! {
        fn there_and_back[S](s: S, to: Operand, from: Operand, x: &mut [f32]) {
            // SAFETY: as many elements in all three.
            unsafe {
                from.load(s, 0, x);
                to.store(s, 0, x);
            }
        }
    }

    proptest! {
        /// `half` is the reference for the conversion, of vectors and of what is left behind them.
        #[test]
        fn conversions_are_those_of_half(bits in prop::collection::vec(any::<u32>(), 0..50)) {
            let mut x: Vec<f32> = bits.iter().map(|b| f32::from_bits(*b)).collect();
            let want: Vec<bf16> = x.iter().map(|x| bf16::from_f32(*x)).collect();
            let same = |a: &[bf16]| a.iter().zip(&want).all(|(a, b)| a.to_bits() == b.to_bits());
            for isa in Isa::available() {
                let (mut narrow, mut again, mut buffer) = (vec![bf16::ZERO; x.len()], vec![bf16::ZERO; x.len()], vec![0f32; x.len()]);
                let handle = Operand::Bf16(Raw::new(&mut narrow));
                there_and_back(isa, handle, Operand::F32(Raw::new(&mut x)), &mut buffer);
                there_and_back(isa, Operand::Bf16(Raw::new(&mut again)), handle, &mut buffer);
                prop_assert!(same(&narrow) && same(&again));
                prop_assert!(buffer.iter().zip(&want).all(|(a, b)| a.to_bits() == b.to_f32().to_bits()));
            }
        }
    }
}
