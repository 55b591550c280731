//! The instructions of AMX: is the unit there, and 32 x 32 sums in its tile registers.
//!
//! Stable Rust has no intrinsics for tiles, so this is inline assembly, and nothing else in the crate is. A tile is 16 rows of 64
//! bytes. Four tiles hold sums, two hold 32 rows of A and two hold 32 columns of B: each loaded tile feeds two products, which is
//! as much reuse as eight registers allow, and loads (8 cycles each) hide behind products (16 each). Intel, "Architecture
//! Instruction Set Extensions", chapter AMX.

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};
use std::marker::PhantomData;

/// Rows and columns of the sums of one [`product`].
pub const SIDE: usize = 32;
/// Values of `k` per step: a row of a tile is 32 `bf16`.
pub const STEP: usize = 32;
/// Elements of 32 bits in a step of a packed panel: 32 rows (or columns) of 16 pairs.
pub const STEP_ELEMS: usize = SIDE * STEP / 2;

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

/// The tiles of this thread, shaped for [`product`] for as long as this lives (and not to be sent to another).
pub struct Tiles(PhantomData<*const ()>);

impl Tiles {
    /// # Safety
    /// [`detect`] was true, or a test emulates the instructions.
    pub unsafe fn configure() -> Tiles {
        // SAFETY: the instruction exists by contract and reads 64 bytes.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const CONFIG, options(nostack, readonly, preserves_flags)) };
        Tiles(PhantomData)
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: exists where `configure` ran. Tiles in their initial state cost nothing when threads are switched.
        unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) };
    }
}

/// Where 32 rows of A are: row `r < 16` of step `s` is at `base + r * row_bytes + s * step_bytes`, row `16 + r` is `half_bytes` on.
#[derive(Clone, Copy)]
pub struct Rows {
    /// First row.
    pub base: *const u8,
    /// Distance of rows.
    pub row_bytes: usize,
    /// Distance of the two halves.
    pub half_bytes: usize,
    /// Distance of steps.
    pub step_bytes: usize,
}

/// `c [32,32] = a [32, 32*steps] b [32*steps, 32] (+ c, unless first)`; `c` is contiguous. `b` holds 32 pairs side by
/// side for every two values of `k`. Products of pairs are added to the sums in the order of `k`, so cutting a sum into several calls
/// does not change it.
///
/// # Safety
/// `a` and `b` hold `steps` steps; `c` has 1024 elements; tiles are configured.
pub unsafe fn product(_: &Tiles, steps: usize, a: Rows, b: *const u8, c: *mut f32, first: bool) {
    let c = c.cast::<u8>();
    // SAFETY: all addresses are inside the operands by contract.
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
        if steps > 0 {
            asm!(
                "2:",
                "tileloadd tmm4, [{a0} + {row}]",
                "tileloadd tmm6, [{b} + {pairs}]",
                "tileloadd tmm7, [{b} + {pairs} + 64]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm5, [{a1} + {row}]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "add {a0}, {step}",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "add {a1}, {step}",
                "add {b}, 2048",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "dec {left}",
                "jnz 2b",
                a0 = inout(reg) a.base => _,
                a1 = inout(reg) a.base.wrapping_add(a.half_bytes) => _,
                b = inout(reg) b => _,
                left = inout(reg) steps => _,
                row = in(reg) a.row_bytes,
                step = in(reg) a.step_bytes,
                pairs = in(reg) 128usize,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack, readonly)
            );
        }
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
