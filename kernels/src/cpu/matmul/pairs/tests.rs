//! Both units, AMX by its own machine code: every layout and edge, against sums in f64 and against itself.
//!
//! Where there is no AMX the instructions are emulated ([`emulate`](super::emulate)), a few microseconds each, so shapes are small.

use super::amx::Tiles;
use super::dots::Dots;
use super::*;
use crate::Write;
use crate::cpu::float::{Float, FloatMut};
use crate::cpu::matmul::tests::{By, Case, case, check_with, result_with};
use crate::cpu::simd::Isa;
use std::sync::atomic::Ordering;

/// Runs a product of `bf16` operands on a unit.
fn on<U: Unit>(pool: &Pool, c: FloatMut<'_>, stride: usize, a: Operand<'_>, b: Operand<'_>, p: Product<'_>) {
    let (Float::Bf16(x), Float::Bf16(y)) = (a.data, b.data) else { panic!("bf16 only") };
    // SAFETY: the instructions are there or emulated since `install`; dots need none.
    match c {
        FloatMut::F32(c) => unsafe {
            let c = crate::cpu::matmul::checked(c, stride, &a, &b, &p);
            c.into_iter().for_each(|c| blocks::<U, _>(pool, c, stride, &[Term { a, x, b, y, k: p.k }], p))
        },
        FloatMut::Bf16(c) => unsafe {
            let c = crate::cpu::matmul::checked(c, stride, &a, &b, &p);
            c.into_iter().for_each(|c| blocks::<U, _>(pool, c, stride, &[Term { a, x, b, y, k: p.k }], p))
        },
    }
}

const UNITS: [By; 2] = [on::<Tiles>, on::<Dots>];

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
        for by in UNITS {
            for bits in (0..64).filter(|b| b & 4 == 0) {
                check_with(&pool, half(case(37, 45, 53, bits)), by);
                check_with(&pool, half(case(5, 3, 1, bits)), by);
            }
            // Whole tiles.
            for bits in [0b000, 0b001, 0b010, 0b011, 0b110011] {
                check_with(&pool, half(case(64, 96, 128, bits)), by);
            }
            check_with(&pool, half(case(3, 5, 0, 0b110011)), by);
        }
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
            UNITS.iter().for_each(|by| check_with(&pool, half(case(m, n, k, bits)), *by));
        }
    }
}

/// Terms are summed as if their `k` followed one another: cut at a whole step, they give the bits of the one product.
#[test]
fn terms_are_one_sum() {
    emulate::install();
    terms_are_one_sum_on::<Tiles>();
    terms_are_one_sum_on::<Dots>();
}

fn terms_are_one_sum_on<U: Unit>() {
    let pool = Pool::new(1).unwrap();
    let (m, n) = (70, 40);
    let make =
        |elems: usize, by: usize| -> Vec<bf16> { (0..elems).map(|i| bf16::from_f32(((i * by % 251) as f32 - 125.0) / 64.0)).collect() };
    // One round, one round with short terms, several rounds.
    for cuts in [vec![64, 37], vec![32, 64, 32, 5], vec![1408, 1408, 96], vec![32; 11]] {
        let k: usize = cuts.iter().sum();
        let (x, y) = (make(m * k, 37), make(n * k, 53));
        let p = Product { m, n, k, alpha: 1.0, bias: None, write: Write::Set };
        let mut whole = vec![0.0f32; m * n];
        let (a, b) = (Operand::k_inner(Float::Bf16(&x), k), Operand::k_inner(Float::Bf16(&y), k));
        on::<U>(&pool, FloatMut::F32(&mut whole), n, a, b, p);
        let mut start = 0;
        let terms: Vec<Term<'_>> = cuts
            .iter()
            .map(|len| {
                let (x, y) = (&x[start..], &y[start..]);
                start += len;
                let (a, b) = (Operand::k_inner(Float::Bf16(x), k), Operand::k_inner(Float::Bf16(y), k));
                Term { a, x, b, y, k: *len }
            })
            .collect();
        let mut parts = vec![0.0f32; m * n];
        // SAFETY: operands hold what the terms say; the instructions are there or emulated.
        unsafe { blocks::<U, _>(&pool, Shared::new(&mut parts), n, &terms, p) };
        assert_eq!(parts, whole, "{cuts:?}");
    }
}

/// A row's result depends on neither threads, nor the rows around it, nor how sums are cut into items.
#[test]
fn threads_and_neighbours_do_not_change_bits() {
    emulate::install();
    let pools: Vec<_> = [1, 2, 3].iter().map(|t| Pool::new(*t).unwrap()).collect();
    for by in UNITS {
        for c in [case(70, 90, 100, 0b000011), case(40, 130, 620, 0b010010), case(100, 20, 65, 0b100000)].map(half) {
            let first = result_with(&pools[0], c, by);
            for pool in &pools[1..] {
                assert_eq!(result_with(pool, c, by), first, "{c:?}");
            }
        }
        // Rows of A at `i * stride`: fewer rows are a prefix of the operand.
        let (many, few) = (case(70, 40, 96, 0b000011), case(19, 40, 96, 0b000011));
        let (many, few) = (result_with(&pools[0], half(many), by), result_with(&pools[0], half(few), by));
        assert_eq!(many[..few.len()], few[..]);
    }
}
