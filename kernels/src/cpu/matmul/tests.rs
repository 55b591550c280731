//! Every layout, type, write mode, instruction set and thread count against sums in f64.

use super::*;
use half::bf16;
use proptest::prelude::*;

/// Scattered values that bf16 holds exactly, so that one reference serves both types.
fn values(elems: usize, seed: u32) -> Vec<f32> {
    let scatter = |i: u32| {
        let h = (i ^ seed << 24).wrapping_mul(0x9E37_79B1);
        let h = (h ^ h >> 15).wrapping_mul(0x85EB_CA6B);
        (h ^ h >> 13) as f32 / 2_147_483_648.0 - 1.0
    };
    (0..elems as u32).map(|i| bf16::from_f32(scatter(i)).to_f32()).collect()
}

fn narrow(x: &[f32]) -> Vec<bf16> {
    x.iter().map(|x| bf16::from_f32(*x)).collect()
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Case {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub a_inner: bool,
    pub b_inner: bool,
    pub half_in: bool,
    pub half_out: bool,
    pub add: bool,
    pub bias: bool,
}

/// A product under test: [`matmul`] or one of its paths.
pub(super) type By = fn(&Pool, FloatMut<'_>, usize, Operand<'_>, Operand<'_>, Product<'_>);

/// Result and reference of one case, as f32 and f64.
fn run(pool: &Pool, c: Case, by: By) -> (Vec<f32>, Vec<f64>) {
    let Case { m, n, k, .. } = c;
    // Rows are longer than they need be, so that strides are exercised.
    let (sa, sb, sc) = (if c.a_inner { k } else { m } + 3, if c.b_inner { k } else { n } + 1, n + 2);
    let (a, b) = (values(sa * if c.a_inner { m } else { k }, 1), values(sb * if c.b_inner { n } else { k }, 2));
    let (old, bias) = (values(sc * m, 3), values(n, 4));
    let (ah, bh, bias_h) = (narrow(&a), narrow(&b), narrow(&bias));
    let float = |f, h| if c.half_in { Float::Bf16(h) } else { Float::F32(f) };
    let (fa, fb, fbias) = (float(&a[..], &ah[..]), float(&b[..], &bh[..]), float(&bias[..], &bias_h[..]));
    let operand = |inner, x, stride| if inner { Operand::k_inner(x, stride) } else { Operand::k_outer(x, stride) };
    let p = Product { m, n, k, alpha: 0.75, bias: c.bias.then_some(fbias), write: if c.add { Write::Add } else { Write::Set } };
    let (oa, ob) = (operand(c.a_inner, fa, sa), operand(c.b_inner, fb, sb));
    let got = if c.half_out {
        let mut out = narrow(&old);
        by(pool, FloatMut::Bf16(&mut out), sc, oa, ob, p);
        out.iter().map(|v| v.to_f32()).collect()
    } else {
        let mut out = old.clone();
        by(pool, FloatMut::F32(&mut out), sc, oa, ob, p);
        out
    };
    let mut want: Vec<f64> = old.iter().map(|v| f64::from(*v)).collect();
    for i in 0..m {
        for j in 0..n {
            let at =
                |x: &[f32], inner: bool, i: usize, k: usize, stride| f64::from(if inner { x[i * stride + k] } else { x[k * stride + i] });
            let sum: f64 = (0..k).map(|k| at(&a, c.a_inner, i, k, sa) * at(&b, c.b_inner, j, k, sb)).sum();
            let base = if c.add { f64::from(old[i * sc + j]) } else { 0.0 } + if c.bias { f64::from(bias[j]) } else { 0.0 };
            want[i * sc + j] = 0.75 * sum + base;
        }
    }
    (got, want)
}

pub(super) fn result_with(pool: &Pool, c: Case, by: By) -> Vec<f32> {
    run(pool, c, by).0
}

fn check(pool: &Pool, c: Case) {
    check_with(pool, c, matmul);
}

pub(super) fn check_with(pool: &Pool, c: Case, by: By) {
    let (got, want) = run(pool, c, by);
    for (i, (got, want)) in got.iter().zip(&want).enumerate() {
        // Sums of k products below 1 have errors of order sqrt(k) units; bf16 keeps 8 bits.
        let tolerance = 2e-7 * (c.k as f64).sqrt() * 4.0 + 1e-6 + if c.half_out { want.abs() / 256.0 } else { 0.0 };
        assert!((f64::from(*got) - want).abs() <= tolerance, "{} {c:?} element {i}: {got} instead of {want}", pool.isa().name());
    }
}

pub(super) fn case(m: usize, n: usize, k: usize, bits: u32) -> Case {
    let bit = |i: u32| bits >> i & 1 == 1;
    Case { m, n, k, a_inner: bit(0), b_inner: bit(1), half_in: bit(2), half_out: bit(3), add: bit(4), bias: bit(5) }
}

#[test]
fn every_mode_at_odd_sizes_on_every_instruction_set() {
    for isa in Isa::available() {
        let pool = Pool::with_isa(2, isa).unwrap();
        for bits in 0..64 {
            check(&pool, case(37, 45, 53, bits));
            check(&pool, case(5, 3, 1, bits));
        }
    }
}

#[test]
fn blocks_of_every_dimension() {
    let pool = Pool::new(2).unwrap();
    // More than one block of rows, columns and k; sizes that leave a rest in each.
    for (m, n, k) in [(519, 17, 401), (29, 1045, 9), (151, 65, 1201), (1, 1, 3000), (300, 200, 768)] {
        for bits in [0b000011, 0b011101, 0b110110, 0b101000] {
            check(&pool, case(m, n, k, bits));
        }
    }
}

#[test]
fn empty_sums_and_empty_results() {
    let pool = Pool::new(1).unwrap();
    check(&pool, case(5, 7, 0, 0b110011));
    check(&pool, case(5, 7, 0, 0b000011));
    let p = Product { m: 0, n: 4, k: 4, alpha: 1.0, bias: None, write: Write::Set };
    let empty = Float::F32(&[]);
    let b = [1.0; 16];
    matmul(&pool, FloatMut::F32(&mut []), 4, Operand::k_inner(empty, 4), Operand::k_inner(Float::F32(&b), 4), p);
}

#[test]
fn threads_do_not_change_bits() {
    for isa in Isa::available() {
        let pools: Vec<_> = [1, 2, 3, 7].iter().map(|t| Pool::with_isa(*t, isa).unwrap()).collect();
        for c in [case(130, 170, 500, 0b000111), case(61, 400, 33, 0b011010), case(700, 20, 90, 0b110001)] {
            let first = result_with(&pools[0], c, matmul);
            for pool in &pools[1..] {
                assert_eq!(result_with(pool, c, matmul), first, "{} {c:?}", isa.name());
            }
        }
    }
}

#[test]
fn a_nan_stays_in_its_row_and_column() {
    let pool = Pool::new(1).unwrap();
    let (mut a, b, mut c) = (values(9 * 40, 1), values(40 * 20, 2), vec![0.0f32; 180]);
    a[3 * 40 + 7] = f32::NAN;
    let p = Product { m: 9, n: 20, k: 40, alpha: 1.0, bias: None, write: Write::Set };
    matmul(&pool, FloatMut::F32(&mut c), 20, Operand::k_inner(Float::F32(&a), 40), Operand::k_outer(Float::F32(&b), 20), p);
    for (i, v) in c.iter().enumerate() {
        assert_eq!(v.is_nan(), i / 20 == 3);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]
    #[test]
    fn any_shape((m, n, k, bits) in (1usize..70, 1usize..120, 1usize..90, 0u32..64), threads in 1usize..4) {
        check(&Pool::with_isa(threads, *Isa::available().last().unwrap()).unwrap(), case(m, n, k, bits));
    }
}
