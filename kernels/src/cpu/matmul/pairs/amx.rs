//! The instructions of AMX: is the unit there, and 32 x 32 sums in its tile registers.
//!
//! Stable Rust has no intrinsics for tiles, so this is inline assembly, and nothing else in the crate is. A tile is 16 rows of 64
//! bytes. Four tiles hold sums, two hold 32 rows of A and two hold 32 columns of B: each loaded tile feeds two products, which is
//! as much reuse as eight registers allow, and loads (8 cycles each) hide behind products (16 each). Intel, "Architecture
//! Instruction Set Extensions", chapter AMX.

use super::{Rows, Unit};
use crate::cpu::simd::Simd;
use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};
use std::marker::PhantomData;

/// Operand of `ldtilecfg`: palette 1, all eight tiles of 16 rows of 64 bytes.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

static CONFIG: Config = Config {
    palette: 1,
    start_row: 0,
    reserved: [0; 14],
    row_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
    rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
};

/// Whether the processor has tiles with `bf16` products of the shape used here, and the kernel lets this process use them (asks
/// it, as Linux demands before the first use).
pub fn detect() -> bool {
    described() && permitted()
}

/// Processor and operating system, by CPUID and XCR0.
fn described() -> bool {
    if __cpuid(0).eax < 0x1d {
        return false;
    }
    let os_saves = __cpuid(1).ecx >> 27 & 1 == 1;
    let features = __cpuid_count(7, 0).edx;
    let (bf16, tiles) = (features >> 22 & 1 == 1, features >> 24 & 1 == 1);
    if !(os_saves && bf16 && tiles) {
        return false;
    }
    #[target_feature(enable = "xsave")]
    fn saved_states() -> u64 {
        // SAFETY: the caller saw that the operating system uses XSAVE.
        unsafe { _xgetbv(0) }
    }
    // SAFETY: OSXSAVE was checked above.
    let states = unsafe { saved_states() };
    let palette = __cpuid_count(0x1d, 1);
    let shape = (palette.eax >> 16, palette.ebx & 0xffff, palette.ebx >> 16, palette.ecx & 0xffff);
    // Bits of tile configuration and tile data; bytes of a tile, bytes of a row, tiles, rows.
    states >> 17 & 3 == 3 && shape.0 == 1024 && shape.1 == 64 && shape.2 >= 8 && shape.3 == 16
}

#[cfg(target_os = "linux")]
fn permitted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: takes numbers only; it enlarges what the kernel saves for this process.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn permitted() -> bool {
    false
}

/// The loop over steps, begun by the instructions given. All loads of a step stand before its products: while the core's other half
/// is busy, tile loads and products do not overlap, and this order is 10 % faster then.
macro_rules! steps {
    ($steps:expr, $a:expr, $b:expr, [$($first:literal,)*]) => {
        asm!(
            "2:",
            $($first,)*
            "tileloadd tmm4, [{a} + {row}]",
            "tileloadd tmm6, [{b} + {pairs}]",
            "tileloadd tmm7, [{b} + {pairs} + 64]",
            "tileloadd tmm5, [{half} + {row}]",
            "add {a}, {step}",
            "add {half}, {step}",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "add {b}, 2048",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "dec {left}",
            "jnz 2b",
            a = inout(reg) $a.at => _,
            half = inout(reg) $a.at.wrapping_add(16 * $a.row) => _,
            b = inout(reg) $b => _,
            left = inout(reg) $steps => _,
            row = in(reg) $a.row,
            step = in(reg) $a.step,
            pairs = in(reg) 128usize,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack, readonly)
        )
    };
}

/// The tiles of this thread, shaped for products for as long as this lives (and not to be sent to another).
pub struct Tiles(PhantomData<*const ()>);

impl Unit for Tiles {
    const ROUND: usize = 64;
    const CHUNK: usize = 512;
    const ANY_ROWS: bool = false;

    unsafe fn ready() -> Tiles {
        // SAFETY: the instruction exists by contract and reads 64 bytes.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const CONFIG, options(nostack, readonly, preserves_flags)) };
        Tiles(PhantomData)
    }

    #[inline(always)]
    unsafe fn product<S: Simd>(&self, _: S, steps: usize, a: Rows, b: *const u8, c: *mut f32, first: bool) {
        // SAFETY: tiles are configured for as long as `self` lives; operands by contract.
        unsafe {
            begin(c, first);
            if steps > 0 {
                steps!(steps, a, b, []);
            }
            end(c);
        }
    }

    #[inline(always)]
    unsafe fn long_product<S: Simd>(&self, _: S, steps: usize, a: *const u8, b: *const u8, c: *mut f32, first: bool) {
        // SAFETY: as above.
        unsafe {
            begin(c, first);
            multiply(steps, Rows::packed(a), b);
            end(c);
        }
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: exists where `configure` ran. Tiles in their initial state cost nothing when threads are switched.
        unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) };
    }
}

/// Begins a block of 32 x 32 sums with zero, or with `c` (contiguous) unless this is its first round.
///
/// # Safety
/// `c` has 1024 elements; tiles are configured.
#[inline(always)]
unsafe fn begin(c: *const f32, first: bool) {
    // SAFETY: addresses are inside `c` by contract.
    unsafe {
        if first {
            asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                options(nostack, nomem, preserves_flags)
            );
        } else {
            asm!(
                "tileloadd tmm0, [{c} + {row}]",
                "tileloadd tmm1, [{c} + {row} + 64]",
                "tileloadd tmm2, [{c} + {row} + 2048]",
                "tileloadd tmm3, [{c} + {row} + 2112]",
                c = in(reg) c,
                row = in(reg) 128usize,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                options(nostack, readonly, preserves_flags)
            );
        }
    }
}

/// Adds `a [32, 32*steps] b [32*steps, 32]` to the sums that [`begin`] began, for long sums: both operands come from the second-level cache, so A is asked for two steps ahead.
///
/// # Safety
/// `a` and `b` hold `steps` steps; tiles are configured.
#[inline(always)]
#[rustfmt::skip]
unsafe fn multiply(steps: usize, a: Rows, b: *const u8) {
    if steps == 0 {
        return;
    }
    // SAFETY: all addresses are inside the operands by contract; prefetching beyond them has no effect.
    unsafe {
        steps!(steps, a, b, [
            "prefetcht0 [{a} + 4096]",
            "prefetcht0 [{a} + 4160]",
            "prefetcht0 [{a} + 4224]",
            "prefetcht0 [{a} + 4288]",
            "prefetcht0 [{a} + 4352]",
            "prefetcht0 [{a} + 4416]",
            "prefetcht0 [{a} + 4480]",
            "prefetcht0 [{a} + 4544]",
            "prefetcht0 [{a} + 4608]",
            "prefetcht0 [{a} + 4672]",
            "prefetcht0 [{a} + 4736]",
            "prefetcht0 [{a} + 4800]",
            "prefetcht0 [{a} + 4864]",
            "prefetcht0 [{a} + 4928]",
            "prefetcht0 [{a} + 4992]",
            "prefetcht0 [{a} + 5056]",
            "prefetcht0 [{a} + 5120]",
            "prefetcht0 [{a} + 5184]",
            "prefetcht0 [{a} + 5248]",
            "prefetcht0 [{a} + 5312]",
            "prefetcht0 [{a} + 5376]",
            "prefetcht0 [{a} + 5440]",
            "prefetcht0 [{a} + 5504]",
            "prefetcht0 [{a} + 5568]",
            "prefetcht0 [{a} + 5632]",
            "prefetcht0 [{a} + 5696]",
            "prefetcht0 [{a} + 5760]",
            "prefetcht0 [{a} + 5824]",
            "prefetcht0 [{a} + 5888]",
            "prefetcht0 [{a} + 5952]",
            "prefetcht0 [{a} + 6016]",
            "prefetcht0 [{a} + 6080]",
        ]);
    }
}

/// Writes the sums to `c`, contiguous.
///
/// # Safety
/// `c` has 1024 elements; tiles are configured.
#[inline(always)]
unsafe fn end(c: *mut f32) {
    // SAFETY: addresses are inside `c` by contract.
    unsafe {
        asm!(
            "tilestored [{c} + {row}], tmm0",
            "tilestored [{c} + {row} + 64], tmm1",
            "tilestored [{c} + {row} + 2048], tmm2",
            "tilestored [{c} + {row} + 2112], tmm3",
            c = in(reg) c,
            row = in(reg) 128usize,
            options(nostack, preserves_flags)
        );
    }
}
