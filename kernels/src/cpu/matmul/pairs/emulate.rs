//! AMX in software, for tests: the six instructions that [`amx`](super::amx) uses, decoded from machine code.
//!
//! A processor without the unit answers them with SIGILL. The handler here reads the instruction at the faulting address, carries
//! it out on tiles kept per thread, and returns behind it, so tests run the very bytes that an AMX machine runs: the encoding of
//! registers and addresses, the order of steps and the layout of panels are all proven. Semantics after Intel's manual
//! (TDPBF16PS: even and odd products are summed apart within an instruction, then added to the tile; to nearest even; subnormals
//! are zero). Anything else keeps its fatal default.

use half::bf16;
use std::cell::UnsafeCell;
use std::sync::Once;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Instructions carried out so far, by all threads.
pub static EXECUTED: AtomicUsize = AtomicUsize::new(0);

/// Makes the instructions work on this process: by the processor if it has them, else by emulation. Returns whether it is emulation.
pub fn install() -> bool {
    if super::amx::detect() {
        return false;
    }
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: a zeroed action is valid; the handler only touches its own thread's state and the interrupted context.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_illegal as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO;
            assert_eq!(libc::sigaction(libc::SIGILL, &action, std::ptr::null_mut()), 0);
        }
    });
    true
}

struct State {
    configured: bool,
    tiles: [[u8; 1024]; 8],
}

thread_local! {
    static STATE: UnsafeCell<State> = const { UnsafeCell::new(State { configured: false, tiles: [[0; 1024]; 8] }) };
}

/// One decoded instruction; addresses are computed.
#[derive(Debug, PartialEq)]
enum Instruction {
    Configure { from: usize },
    Release,
    Zero { tile: usize },
    Load { tile: usize, from: usize, stride: usize },
    Store { tile: usize, to: usize, stride: usize },
    Product { sums: usize, a: usize, b: usize },
}

/// An address as its parts: base + displacement, and the scaled index, which is the stride of tiles.
struct Address {
    start: usize,
    stride: usize,
    bytes: usize,
}

/// Registers by their number in machine code, and the address of the instruction's end as far as it was decoded.
fn address(code: &[u8], registers: &[usize; 16], index_high: bool, base_high: bool) -> Option<Address> {
    let modrm = *code.first()?;
    let (mode, rm) = (modrm >> 6, modrm & 7);
    let (mut bytes, mut start, mut stride) = (1, 0usize, 0usize);
    let high = |low: u8, high: bool| usize::from(low) + if high { 8 } else { 0 };
    if rm == 4 {
        let sib = *code.get(1)?;
        bytes += 1;
        let index = high(sib >> 3 & 7, index_high);
        // Number 4 means "no index".
        stride = if index == 4 { 0 } else { registers[index] << (sib >> 6) };
        if mode == 0 && sib & 7 == 5 {
            return None; // No base: never emitted here.
        }
        start += registers[high(sib & 7, base_high)];
    } else {
        if mode == 0 && rm == 5 {
            return None; // Relative to the instruction: never emitted here.
        }
        start += registers[high(rm, base_high)];
    }
    match mode {
        1 => {
            start = start.wrapping_add_signed(isize::from(*code.get(bytes)? as i8));
            bytes += 1;
        }
        2 => {
            let d = code.get(bytes..bytes + 4)?;
            start = start.wrapping_add_signed(i32::from_le_bytes([d[0], d[1], d[2], d[3]]) as isize);
            bytes += 4;
        }
        _ => {}
    }
    Some(Address { start, stride, bytes })
}

/// The instruction at the front of `code` and its length.
fn decode(code: &[u8], registers: &[usize; 16]) -> Option<(Instruction, usize)> {
    // Three-byte VEX, map 0F38, 128 bits, W0. R, X, B and vvvv are stored inverted.
    let &[0xc4, second, third, opcode, modrm, ..] = code else { return None };
    if second & 0x1f != 2 || third & 0x84 != 0 {
        return None;
    }
    let (r, x, b) = (second & 0x80 == 0, second & 0x40 == 0, second & 0x20 == 0);
    let (v, prefix) = (usize::from(!third >> 3 & 15), third & 3);
    let (mode, reg, rm) = (modrm >> 6, usize::from(modrm >> 3 & 7), usize::from(modrm & 7));
    if r {
        return None; // There are eight tiles.
    }
    let memory = || address(&code[4..], registers, x, b);
    Some(match (opcode, prefix, mode) {
        (0x49, 0, 3) if modrm == 0xc0 && v == 0 => (Instruction::Release, 5),
        (0x49, 3, 3) if rm == 0 && v == 0 => (Instruction::Zero { tile: reg }, 5),
        (0x49, 0, 0..=2) if reg == 0 && v == 0 => {
            let m = memory()?;
            // A plain operand: an index would be part of the address.
            (Instruction::Configure { from: m.start.wrapping_add(m.stride) }, 4 + m.bytes)
        }
        (0x4b, 3, 0..=2) if rm == 4 && v == 0 => {
            let m = memory()?;
            (Instruction::Load { tile: reg, from: m.start, stride: m.stride }, 4 + m.bytes)
        }
        (0x4b, 2, 0..=2) if rm == 4 && v == 0 => {
            let m = memory()?;
            (Instruction::Store { tile: reg, to: m.start, stride: m.stride }, 4 + m.bytes)
        }
        // Two equal tiles are an error of the processor too.
        (0x5c, 2, 3) if v < 8 && reg != rm && reg != v && rm != v => (Instruction::Product { sums: reg, a: rm, b: v }, 5),
        _ => return None,
    })
}

fn flush(x: f32) -> f32 {
    if x.is_subnormal() { 0.0f32.copysign(x) } else { x }
}

fn element(row: &[u8], i: usize) -> f32 {
    flush(bf16::from_le_bytes([row[2 * i], row[2 * i + 1]]).to_f32())
}

/// TDPBF16PS on full tiles: `sums [16,16] += a [16,32] b [16 pairs, 16, 2]`.
fn product(sums: &mut [u8; 1024], a: &[u8; 1024], b: &[u8; 1024]) {
    let row_of = |tile: &[u8; 1024], r: usize| -> [f32; 32] { std::array::from_fn(|i| element(&tile[64 * r..], i)) };
    let b_rows: [[f32; 32]; 16] = std::array::from_fn(|k| row_of(b, k));
    for m in 0..16 {
        let a_row = row_of(a, m);
        let mut apart = [0.0f32; 32];
        for (k, b_row) in b_rows.iter().enumerate() {
            for n in 0..16 {
                apart[2 * n] = flush(a_row[2 * k].mul_add(b_row[2 * n], apart[2 * n]));
                apart[2 * n + 1] = flush(a_row[2 * k + 1].mul_add(b_row[2 * n + 1], apart[2 * n + 1]));
            }
        }
        for n in 0..16 {
            let at = 64 * m + 4 * n;
            let old = flush(f32::from_le_bytes([sums[at], sums[at + 1], sums[at + 2], sums[at + 3]]));
            let new = flush(old + flush(apart[2 * n] + apart[2 * n + 1]));
            sums[at..at + 4].copy_from_slice(&new.to_le_bytes());
        }
    }
}

/// Carries an instruction out. `None` where the processor would fault.
///
/// # Safety
/// Addresses are those of the program's own instruction.
unsafe fn execute(state: &mut State, instruction: Instruction) -> Option<()> {
    if !state.configured && !matches!(instruction, Instruction::Configure { .. } | Instruction::Release) {
        return None;
    }
    match instruction {
        Instruction::Configure { from } => {
            // SAFETY: by contract; the operand has 64 bytes.
            let config = unsafe { std::slice::from_raw_parts(from as *const u8, 64) };
            // The shape that `product` is written for: palette 1, from row 0, eight tiles of 16 rows of 64 bytes.
            let full = (0..8).all(|t| config[16 + 2 * t] == 64 && config[17 + 2 * t] == 0 && config[48 + t] == 16);
            let rest_is_zero = config[2..16].iter().chain(&config[32..48]).chain(&config[56..]).all(|b| *b == 0);
            if config[..2] != [1, 0] || !full || !rest_is_zero {
                return None;
            }
            *state = State { configured: true, tiles: [[0; 1024]; 8] };
        }
        Instruction::Release => *state = State { configured: false, tiles: [[0; 1024]; 8] },
        Instruction::Zero { tile } => state.tiles[tile] = [0; 1024],
        Instruction::Load { tile, from, stride } => {
            for (r, row) in state.tiles[tile].chunks_mut(64).enumerate() {
                // SAFETY: by contract; a row has 64 bytes.
                unsafe { std::ptr::copy_nonoverlapping(from.wrapping_add(r * stride) as *const u8, row.as_mut_ptr(), 64) };
            }
        }
        Instruction::Store { tile, to, stride } => {
            for (r, row) in state.tiles[tile].chunks(64).enumerate() {
                // SAFETY: as above.
                unsafe { std::ptr::copy_nonoverlapping(row.as_ptr(), to.wrapping_add(r * stride) as *mut u8, 64) };
            }
        }
        Instruction::Product { sums, a, b } => {
            let (a, b) = (state.tiles[a], state.tiles[b]);
            product(&mut state.tiles[sums], &a, &b);
        }
    }
    Some(())
}

extern "C" fn on_illegal(_: libc::c_int, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    use libc::*;
    // SAFETY: the kernel hands over the interrupted thread's context; code at its instruction pointer is readable up to the
    // instruction's length, and code of a program does not end within the next 16 bytes. The thread's state is touched by nothing
    // else, since the handler does not nest.
    unsafe {
        let registers = &mut (*context.cast::<ucontext_t>()).uc_mcontext.gregs;
        let order = [
            REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI, REG_R8, REG_R9, REG_R10, REG_R11, REG_R12, REG_R13,
            REG_R14, REG_R15,
        ];
        let numbered = order.map(|r| registers[r as usize] as usize);
        let code = std::slice::from_raw_parts(registers[REG_RIP as usize] as *const u8, 16);
        let done = decode(code, &numbered).and_then(|(i, bytes)| STATE.with(|s| execute(&mut *s.get(), i)).map(|()| bytes));
        match done {
            Some(bytes) => {
                registers[REG_RIP as usize] += bytes as i64;
                EXECUTED.fetch_add(1, Ordering::Relaxed);
            }
            // Back to the same instruction, which is fatal now.
            None => {
                signal(SIGILL, SIG_DFL);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decodes_the_bytes_of_the_manual() {
        let registers: [usize; 16] = std::array::from_fn(|i| 0x1000 * (i + 1));
        let is = |code: &[u8], want: Instruction| {
            let mut padded = code.to_vec();
            padded.resize(16, 0x90);
            assert_eq!(decode(&padded, &registers), Some((want, code.len())), "{code:x?}");
        };
        // ldtilecfg [rax]; ldtilecfg [r8 + 16]; tilerelease; tilezero tmm3.
        is(&[0xc4, 0xe2, 0x78, 0x49, 0x00], Instruction::Configure { from: 0x1000 });
        is(&[0xc4, 0xc2, 0x78, 0x49, 0x40, 0x10], Instruction::Configure { from: 0x9010 });
        is(&[0xc4, 0xe2, 0x78, 0x49, 0xc0], Instruction::Release);
        is(&[0xc4, 0xe2, 0x7b, 0x49, 0xd8], Instruction::Zero { tile: 3 });
        // tileloadd tmm2, [rdi + 4*rsi]; tileloadd tmm1, [r9 + r10 - 64]; tilestored [rax + rcx + 0x800], tmm7.
        is(&[0xc4, 0xe2, 0x7b, 0x4b, 0x14, 0xb7], Instruction::Load { tile: 2, from: 0x8000, stride: 0x1c000 });
        is(&[0xc4, 0x82, 0x7b, 0x4b, 0x4c, 0x11, 0xc0], Instruction::Load { tile: 1, from: 0x9fc0, stride: 0xb000 });
        is(&[0xc4, 0xe2, 0x7a, 0x4b, 0xbc, 0x08, 0, 8, 0, 0], Instruction::Store { tile: 7, to: 0x1800, stride: 0x2000 });
        // tdpbf16ps tmm1, tmm2, tmm3.
        is(&[0xc4, 0xe2, 0x62, 0x5c, 0xca], Instruction::Product { sums: 1, a: 2, b: 3 });
        // ud2, and tdpbssd, which is not used here.
        for other in [[0x0f, 0x0b, 0, 0, 0, 0], [0xc4, 0xe2, 0x63, 0x5e, 0xca, 0]] {
            assert_eq!(decode(&other, &registers), None);
        }
    }

    #[test]
    fn subnormals_are_zero_and_halves_are_summed_apart() {
        let (mut sums, mut a, mut b) = ([0u8; 1024], [0u8; 1024], [0u8; 1024]);
        let put = |t: &mut [u8; 1024], i: usize, v: f32| t[2 * i..2 * i + 2].copy_from_slice(&bf16::from_f32(v).to_le_bytes());
        // Row 0: even products 2^24 and 1, odd products -2^24 and 1. In order the ones would be lost; apart, even is 2^24 (1 is half a
        // unit, to even), odd is -2^24 + 1.
        for (k, v) in [(0, 16_777_216.0), (1, -16_777_216.0), (2, 1.0), (3, 1.0)] {
            put(&mut a, k, v);
            put(&mut b, 32 * (k / 2) + k % 2, 1.0);
        }
        // Row 1: a subnormal times a large number.
        put(&mut a, 32, 1e-39);
        product(&mut sums, &a, &b);
        assert_eq!(f32::from_le_bytes(sums[..4].try_into().unwrap()), 1.0);
        assert_eq!(f32::from_le_bytes(sums[64..68].try_into().unwrap()), 0.0);
    }
}
