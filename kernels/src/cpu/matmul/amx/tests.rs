//! The AMX path, by its own machine code: every layout and edge, against sums in f64 and against itself.
//!
//! Where there is no AMX the instructions are emulated ([`emulate`](super::emulate)), a few microseconds each, so shapes are small.

use super::*;
use crate::Write;
use crate::cpu::float::{Float, FloatMut};
use crate::cpu::matmul::tests::{Case, case, check_with, result_with};
use crate::cpu::simd::Isa;
use std::sync::atomic::Ordering;

/// Runs a product of `bf16` operands on tiles.
fn on_tiles(pool: &Pool, c: FloatMut<'_>, stride: usize, a: Operand<'_>, b: Operand<'_>, p: Product<'_>) {
    let (Float::Bf16(x), Float::Bf16(y)) = (a.data, b.data) else { panic!("bf16 only") };
    // SAFETY: the instructions are there or emulated since `install`.
    match c {
        FloatMut::F32(c) => unsafe {
            let c = crate::cpu::matmul::checked(c, stride, &a, &b, &p);
            c.into_iter().for_each(|c| blocks(pool, c, stride, (a, x), (b, y), p))
        },
        FloatMut::Bf16(c) => unsafe {
            let c = crate::cpu::matmul::checked(c, stride, &a, &b, &p);
            c.into_iter().for_each(|c| blocks(pool, c, stride, (a, x), (b, y), p))
        },
    }
}

fn half(c: Case) -> Case {
    Case { half_in: true, ..c }
}

#[test]
fn every_layout_and_edge() {
    let emulated = emulate::install();
    println!("AMX: {}", if emulated { "emulated, instruction by instruction" } else { "by the processor" });
    let before = emulate::EXECUTED.load(Ordering::Relaxed);
    for isa in Isa::available() {
        let pool = Pool::with_isa(2, isa).unwrap();
        for bits in (0..64).filter(|b| b & 4 == 0) {
            check_with(&pool, half(case(37, 45, 53, bits)), on_tiles);
            check_with(&pool, half(case(5, 3, 1, bits)), on_tiles);
        }
        // Whole tiles, read in place and packed.
        for bits in [0b000, 0b001, 0b010, 0b011, 0b110011] {
            check_with(&pool, half(case(64, 96, 128, bits)), on_tiles);
        }
        check_with(&pool, half(case(3, 5, 0, 0b110011)), on_tiles);
    }
    let ran = emulate::EXECUTED.load(Ordering::Relaxed) > before;
    assert_eq!(ran, emulated, "the path under test did not run");
}

#[test]
fn blocks_of_every_dimension() {
    emulate::install();
    let pool = Pool::new(2).unwrap();
    for (m, n, k) in [(545, 9, 33), (40, 520, 40), (33, 40, 1217), (1, 1, 1200)] {
        for bits in [0b000011, 0b011001, 0b110010, 0b101000] {
            check_with(&pool, half(case(m, n, k, bits)), on_tiles);
        }
    }
}

/// A tall operand whose rows are 4 KiB apart is packed; elsewhere whole tiles are read in place. Both must give the same bits.
#[test]
fn reading_in_place_and_packing_agree() {
    emulate::install();
    let pool = Pool::new(1).unwrap();
    let (m, n, k) = (64, 32, 64);
    let x: Vec<bf16> = (0..m * 2048).map(|i| bf16::from_f32(((i * 37 % 251) as f32 - 125.0) / 64.0)).collect();
    let near: Vec<bf16> = (0..m).flat_map(|r| x[r * 2048..r * 2048 + k].to_vec()).collect();
    let w: Vec<bf16> = (0..n * k).map(|i| bf16::from_f32(((i * 53 % 241) as f32 - 120.0) / 64.0)).collect();
    let p = Product { m, n, k, alpha: 1.0, bias: None, write: Write::Set };
    let run = |x: &[bf16], stride| {
        let mut c = vec![0.0f32; m * n];
        on_tiles(&pool, FloatMut::F32(&mut c), n, Operand::k_inner(Float::Bf16(x), stride), Operand::k_inner(Float::Bf16(&w), k), p);
        c
    };
    assert!(readable(&Operand::k_inner(Float::Bf16(&near), k), k) && !readable(&Operand::k_inner(Float::Bf16(&x), 2048), k));
    assert_eq!(run(&x, 2048), run(&near, k));
}

/// A row's result depends on neither threads, nor the rows around it, nor how sums are cut into items.
#[test]
fn threads_and_neighbours_do_not_change_bits() {
    emulate::install();
    let pools: Vec<_> = [1, 2, 3].iter().map(|t| Pool::new(*t).unwrap()).collect();
    for c in [case(70, 90, 100, 0b000011), case(40, 130, 620, 0b010010), case(100, 20, 65, 0b100000)].map(half) {
        let first = result_with(&pools[0], c, on_tiles);
        for pool in &pools[1..] {
            assert_eq!(result_with(pool, c, on_tiles), first, "{c:?}");
        }
    }
    // Rows of A at `i * stride`: fewer rows are a prefix of the operand.
    let (many, few) = (case(70, 40, 96, 0b000011), case(19, 40, 96, 0b000011));
    let (many, few) = (result_with(&pools[0], half(many), on_tiles), result_with(&pools[0], half(few), on_tiles));
    assert_eq!(many[..few.len()], few[..]);
}
