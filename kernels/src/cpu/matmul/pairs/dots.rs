//! Blocks of sums in vector registers, by an instruction that multiplies pairs (`vdpbf16ps`): a stripe of 8 rows and two vectors at a
//! time. Sums leave the registers every [`GROUP`] steps, so that all stripes of a block pass by a part of B that stays in the first-level cache. A row
//! of A is read pair by pair, each for all lanes.

use super::{PAIRS, Rows, SIDE, STEP_ELEMS, Unit};
use crate::cpu::simd::Simd;

/// Rows whose sums are in registers at once: with two vectors, enough chains to hide the latency of two units.
const ROWS: usize = 8;
/// Steps of a stripe: 16 KiB of B and 4 of A.
const GROUP: usize = 8;

/// The vectors of the level; at levels without the instruction, two multiply-adds.
pub struct Dots;

impl Unit for Dots {
    const ROUND: usize = 32;
    const CHUNK: usize = 256;
    const ANY_ROWS: bool = true;

    unsafe fn ready() -> Dots {
        Dots
    }

    #[inline(always)]
    unsafe fn product<S: Simd>(&self, s: S, steps: usize, a: Rows, b: *const u8, c: *mut f32, first: bool) {
        let mut done = 0;
        while done < steps || (done == 0 && first) {
            let group = GROUP.min(steps - done);
            for row in (0..SIDE).step_by(ROWS) {
                for col in (0..SIDE).step_by(2 * S::LANES) {
                    // SAFETY: inside the operands by contract.
                    unsafe {
                        let a = Rows { at: a.at.add(row * a.row + done * a.step), ..a };
                        let b = b.cast::<f32>().add(done * STEP_ELEMS + col);
                        let (c, first) = (c.add(row * SIDE + col), first && done == 0);
                        match a.pair {
                            4 => stripe::<S, 4>(s, group, a, b, c, first),
                            _ => stripe::<S, { 4 * SIDE }>(s, group, a, b, c, first),
                        }
                    }
                }
            }
            done += GROUP;
        }
    }

    #[inline(always)]
    unsafe fn long_product<S: Simd>(&self, s: S, steps: usize, a: *const u8, b: *const u8, c: *mut f32, first: bool) {
        // SAFETY: passed on.
        unsafe { self.product(s, steps, Rows::packed(a), b, c, first) }
    }
}

/// [`ROWS`] rows of two vectors; pairs of A are `PAIR` bytes apart, as `a` says too.
///
/// # Safety
/// As [`Unit::product`], of the stripe's first elements.
#[inline(always)]
unsafe fn stripe<S: Simd, const PAIR: usize>(s: S, steps: usize, a: Rows, b: *const f32, c: *mut f32, first: bool) {
    let mut sums = [[s.splat(0.0); 2]; ROWS];
    let mut rows = [a.at; ROWS];
    let mut r = 0;
    while r < ROWS {
        rows[r] = a.at.wrapping_add(r * a.row);
        if !first {
            // SAFETY: two vectors of a row of `c`.
            sums[r] = unsafe { [s.load(c.add(r * SIDE)), s.load(c.add(r * SIDE + S::LANES))] };
        }
        r += 1;
    }
    for step in 0..steps {
        for pair in 0..PAIRS {
            // SAFETY: a row of 32 pairs; a pair of each row of A.
            unsafe {
                let b = b.add(step * STEP_ELEMS + pair * SIDE);
                let b = [s.load(b), s.load(b.add(S::LANES))];
                let mut r = 0;
                while r < ROWS {
                    let a = s.splat(rows[r].add(step * a.step + PAIR * pair).cast::<f32>().read_unaligned());
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
