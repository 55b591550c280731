//! Blocks of sums in vector registers, by an instruction that multiplies pairs (`vdpbf16ps`): a stripe of 8 rows and two vectors at a
//! time, for as long as the sum is. A row of A is read pair by pair, each for all lanes.

use super::{SIDE, STEP, STEP_ELEMS, Unit};
use crate::cpu::simd::Simd;

/// Rows whose sums are in registers at once: with two vectors, enough chains to hide the latency of two units.
const ROWS: usize = 8;
/// Pairs of a step.
const PAIRS: usize = STEP / 2;

/// The vectors of the level; at levels without the instruction, two multiply-adds.
pub struct Dots;

impl Unit for Dots {
    const ROUND: usize = 32;

    unsafe fn ready() -> Dots {
        Dots
    }

    #[inline(always)]
    unsafe fn product<S: Simd>(&self, s: S, steps: usize, a: *const u8, b: *const u8, c: *mut f32, first: bool) {
        let (a, b) = (a.cast::<f32>(), b.cast::<f32>());
        for row in (0..SIDE).step_by(ROWS) {
            for col in (0..SIDE).step_by(2 * S::LANES) {
                // SAFETY: inside the operands by contract.
                unsafe { stripe(s, steps, a.add(row * PAIRS), b.add(col), c.add(row * SIDE + col), first) };
            }
        }
    }

    #[inline(always)]
    unsafe fn long_product<S: Simd>(&self, s: S, steps: usize, a: *const u8, b: *const u8, c: *mut f32, first: bool) {
        // SAFETY: passed on.
        unsafe { self.product(s, steps, a, b, c, first) }
    }
}

/// [`ROWS`] rows of two vectors.
///
/// # Safety
/// As [`Unit::product`], of the stripe's first elements.
#[inline(always)]
unsafe fn stripe<S: Simd>(s: S, steps: usize, a: *const f32, b: *const f32, c: *mut f32, first: bool) {
    let mut sums = [[s.splat(0.0); 2]; ROWS];
    if !first {
        let mut r = 0;
        while r < ROWS {
            // SAFETY: two vectors of a row of `c`.
            sums[r] = unsafe { [s.load(c.add(r * SIDE)), s.load(c.add(r * SIDE + S::LANES))] };
            r += 1;
        }
    }
    for step in 0..steps {
        // SAFETY: a step of each operand.
        let (a, b) = unsafe { (a.add(step * STEP_ELEMS), b.add(step * STEP_ELEMS)) };
        for pair in 0..PAIRS {
            // SAFETY: a row of 32 pairs; a pair of each row of A.
            unsafe {
                let b = [s.load(b.add(pair * SIDE)), s.load(b.add(pair * SIDE + S::LANES))];
                let mut r = 0;
                while r < ROWS {
                    let a = s.splat(*a.add(r * PAIRS + pair));
                    sums[r] = [s.dot_pairs(a, b[0], sums[r][0]), s.dot_pairs(a, b[1], sums[r][1])];
                    r += 1;
                }
            }
        }
    }
    let mut r = 0;
    while r < ROWS {
        // SAFETY: as above.
        unsafe {
            s.store(c.add(r * SIDE), sums[r][0]);
            s.store(c.add(r * SIDE + S::LANES), sums[r][1]);
        }
        r += 1;
    }
}
