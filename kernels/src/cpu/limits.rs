//! What can this processor do at most? Loops that only compute, or only move bytes: the figures beside which `zlaunch bench` puts
//! those of the operations. Measured rather than derived: a clock that varies and memory that is shared have no data sheet.
#![allow(unsafe_code)]

use super::elementwise::{blocks, for_each_item};
#[cfg(target_arch = "x86_64")]
use super::matmul::pairs::{SIDE, STEP, STEP_ELEMS, Unit, amx::Tiles};
use super::operand::{Operand, Raw};
use super::pool::Pool;
#[cfg(target_arch = "x86_64")]
use super::simd::avx512::Avx512Bf16;
use super::simd::{Isa, Level, Simd, simd_fn};
use crate::{DType, Result, View, ViewMut};
use std::hint::black_box;
use std::time::Instant;

/// Independent chains: enough to hide the latency of two units.
const CHAINS: usize = 12;

/// `rounds` of multiply-adds in registers; `pairs` uses the instruction for two bf16 at a time.
#[inline(always)]
fn chains<S: Simd>(s: S, rounds: usize, pairs: bool) -> f32 {
    let (x, y) = (s.splat(black_box(0.999)), s.splat(black_box(1e-3)));
    let mut acc = [s.splat(1.0); CHAINS];
    for _ in 0..rounds {
        let mut i = 0;
        while i < CHAINS {
            acc[i] = if pairs { s.dot_pairs(x, y, acc[i]) } else { s.fma(acc[i], x, y) };
            i += 1;
        }
    }
    let mut total = 0.0;
    for v in acc {
        total += s.reduce_add(v);
    }
    total
}

simd_fn! {
    /// (a value that depends on all of it, floating-point operations)
    fn singles[S](s: S, rounds: usize) -> (f32, usize) {
        (chains(s, rounds, false), rounds * CHAINS * S::LANES * 2)
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
fn pairs(s: Avx512Bf16, rounds: usize) -> (f32, usize) {
    (chains(s, rounds, true), rounds * CHAINS * Avx512Bf16::LANES * 4)
}

/// Products of tiles whose operands stay in the first-level cache, where their loads hide behind the products.
///
/// # Safety
/// The processor has AMX, and this process may use it.
#[cfg(target_arch = "x86_64")]
unsafe fn tiles(rounds: usize) -> (f32, usize) {
    const STEPS: usize = 8;
    let (a, b, mut c) = (vec![0u32; STEPS * STEP_ELEMS], vec![0u32; STEPS * STEP_ELEMS], vec![0f32; SIDE * SIDE]);
    // SAFETY: AMX by contract; A and B hold all steps, C the sums.
    unsafe {
        let tiles = Tiles::ready();
        for _ in 0..rounds {
            tiles.long_product(Avx512Bf16::assume(), STEPS, a.as_ptr().cast(), b.as_ptr().cast(), c.as_mut_ptr(), true);
        }
    }
    (c[0], rounds * STEPS * SIDE * SIDE * STEP * 2)
}

fn work(isa: Isa, bf16: bool, rounds: usize) -> (f32, usize) {
    match isa.level() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: an `Isa` of this level exists only where the processor has these features.
        Level::Amx if bf16 => unsafe { tiles((rounds / 100).max(1)) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Level::Avx512Bf16 if bf16 => unsafe { pairs(Avx512Bf16::assume(), rounds) },
        // Without such an instruction, bf16 is widened and multiplied as f32.
        _ => singles(isa, rounds),
    }
}

/// Floating-point operations per second of multiply-adds that touch no memory, on all threads of `pool`, for operands of `dtype`.
pub fn peak_flops(pool: &Pool, dtype: DType) -> f64 {
    const ROUNDS: usize = 400_000;
    let bf16 = dtype == DType::BF16;
    // The best of several: the rest were disturbed, or ran before all threads were awake.
    let runs = (0..40).map(|_| {
        let flops = std::sync::atomic::AtomicUsize::new(0);
        let begun = Instant::now();
        pool.for_each(pool.threads(), |_| {
            let (value, count) = work(pool.isa(), bf16, black_box(ROUNDS));
            black_box(value);
            flops.fetch_add(count, std::sync::atomic::Ordering::Relaxed);
        });
        flops.into_inner() as f64 / begun.elapsed().as_secs_f64().max(1e-9)
    });
    runs.fold(0.0, f64::max)
}

/// Reads and writes in place what [`crate::Ops::adamw`] does, block by block as it does, and computes next to nothing: `param`, `m`
/// and `v` read and written, `g` read, `copy_out` (bf16) written around the caches.
///
/// # Errors
/// Memory that the host cannot touch.
pub fn move_like_adamw(pool: &Pool, param: &ViewMut, m: &ViewMut, v: &ViewMut, copy_out: Option<&ViewMut>, g: &View) -> Result<()> {
    const OP: &str = "move_like_adamw";
    let copy = copy_out.map(|c| c.reinterpret(DType::F32).and_then(|c| Operand::of(OP, &c))).transpose()?;
    let (p, m, v, g) = (Raw::<f32>::of(OP, param)?, Raw::<f32>::of(OP, m)?, Raw::<f32>::of(OP, v)?, Raw::<f32>::of(OP, g)?);
    simd_fn! { fn item[S](s: S, start: usize, end: usize, p: Raw<f32>, m: Raw<f32>, v: Raw<f32>, g: Raw<f32>, copy: Option<Operand>) {
        for (at, n) in blocks(start, end) {
            // SAFETY: in range by `for_each_item`; items are disjoint.
            let (p, m, v, g) = unsafe { (p.slice(at, n), m.slice(at, n), v.slice(at, n), g.read(at, n)) };
            let mut i = 0;
            while i + S::LANES <= n {
                let x = s.load_slice(&g[i..]);
                // One operation each, so that nothing can be left out.
                let (a, b, c) = (s.max(s.load_slice(&p[i..]), x), s.max(s.load_slice(&m[i..]), x), s.max(s.load_slice(&v[i..]), x));
                s.store_slice(&mut p[i..], a);
                s.store_slice(&mut m[i..], b);
                s.store_slice(&mut v[i..], c);
                i += S::LANES;
            }
            if let Some(Operand::F32(out)) = copy {
                // SAFETY: half as many f32 as there are bf16; items are disjoint.
                let out = unsafe { out.slice(at / 2, n / 2) };
                let aligned = (out.as_ptr() as usize).is_multiple_of(4 * S::LANES);
                let mut i = 0;
                while i + S::LANES <= out.len() {
                    // SAFETY: a whole vector is left in both, aligned where that is asked.
                    unsafe {
                        let x = s.load(p.as_ptr().add(i));
                        if aligned { s.stream(out.as_mut_ptr().add(i), x) } else { s.store(out.as_mut_ptr().add(i), x) }
                    }
                    i += S::LANES;
                }
            }
        }
        s.stream_end();
    } }
    for_each_item(pool, p.elems(), |start, end| item(pool.isa(), start, end, p, m, v, g, copy));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_instruction_set_has_a_peak() {
        for isa in Isa::available() {
            for dtype in [DType::F32, DType::BF16] {
                let (value, flops) = work(isa, dtype == DType::BF16, 10);
                assert!(value.is_finite() && flops >= 10 * CHAINS * 8 * 2, "{}", isa.name());
            }
        }
    }
}
