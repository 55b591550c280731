//! Operations on elements, SwiGLU, AdamW and the gradient norm on emulated GPUs: those whose bits are promised against the CPU, the
//! others against `f64`. Lengths that are whole pieces of 16 bytes and that are not, operands that begin anywhere, in place.

use half::bf16;
use zrt_kernels::ops::SUM_SQUARES_NODES;
use zrt_kernels::philox::philox4x32;
use zrt_kernels::{AdamW, DType, OpShape};
use zrt_simt::testing::{Rig, assert_bits, assert_close, can_run, normal, on, rounding, wide};

/// One machine of each lane count: nothing here uses matrix instructions.
const TWO: [&str; 2] = ["sm_90", "gfx942"];
const TYPES: [DType; 2] = [DType::F32, DType::BF16];

/// Runs a case on both machines and demands the CPU's bits.
fn same_bits(what: &str, case: impl Fn(&Rig) -> Vec<Vec<f32>>) {
    let (cpu, gpus) = on(&TWO, case);
    for gpu in gpus {
        for (i, (got, want)) in gpu.outputs.iter().zip(&cpu).enumerate() {
            assert_bits(&format!("{what}, output {i} on {}", gpu.arch), got, want);
        }
    }
}

/// Numbers of all magnitudes, signs and kinds, without NaN.
fn wild(elems: usize, seed: u32) -> Vec<f32> {
    let value = |i: usize| {
        let x = f32::from_bits(philox4x32([i as u32, 0, 0, 0], [seed, 2])[0]);
        if x.is_nan() { 0.0 } else { x }
    };
    (0..elems).map(value).collect()
}

#[test]
fn sums_scales_and_casts_have_the_bits_of_the_cpu() {
    if !can_run() {
        return;
    }
    for (elems, skew) in [(1, 0), (7, 1), (2048, 0), (5003, 0), (1030, 3)] {
        let (x, y) = (wild(elems, 1), wild(elems, 2));
        same_bits(&format!("{elems} elements, skew {skew}"), |rig| {
            let rig = rig.skewed(skew);
            let (ops, s) = (rig.ops(), rig.stream());
            let mut outputs = vec![];
            let (a, b) = (rig.tensor(&x, DType::F32), rig.tensor(&y, DType::F32));
            let out = rig.empty(elems, DType::F32);
            ops.add(&out, &a, &b, s).unwrap();
            ops.add(&b, &a, &b, s).unwrap();
            outputs.extend([rig.read(&out), rig.read(&b)]);
            for to in TYPES {
                for from in TYPES {
                    let (dst, src) = (rig.empty(elems, to), rig.tensor(&x, from));
                    ops.cast(&dst, &src, s).unwrap();
                    outputs.push(rig.read(&dst));
                    if from == DType::F32 || to == DType::BF16 {
                        let sum = rig.tensor(&y, to);
                        ops.add_into(&sum, &src, s).unwrap();
                        outputs.push(rig.read(&sum));
                    }
                }
                let scaled = rig.tensor(&x, to);
                ops.scale(&scaled, 0.3, s).unwrap();
                outputs.push(rig.read(&scaled));
            }
            let (total, few) = (rig.empty(1, DType::F32), rig.tensor(&normal(elems, DType::F32, 3), DType::F32));
            ops.sum(&total, &few, s).unwrap();
            outputs.push(rig.read(&total));
            // A sum of infinities of both signs is a NaN, whose bits nobody promises.
            outputs.iter_mut().flatten().filter(|x| x.is_nan()).for_each(|x| *x = 12345.0);
            outputs
        });
    }
}

#[test]
fn a_cast_keeps_every_nan_a_nan() {
    if !can_run() {
        return;
    }
    let nans = [0x7f80_0001u32, 0xff80_0001, 0x7fff_ffff, 0x7fc0_0000, 0xffc1_2345].map(f32::from_bits);
    same_bits("NaN", |rig| {
        let (dst, src) = (rig.empty(5, DType::BF16), rig.tensor(&nans, DType::F32));
        rig.ops().cast(&dst, &src, rig.stream()).unwrap();
        vec![rig.read(&dst)]
    });
}

#[test]
fn what_is_not_finite_is_counted() {
    if !can_run() {
        return;
    }
    for dtype in TYPES {
        for (elems, skew) in [(70_001, 0), (70_000, 1), (3, 0), (0, 0)] {
            let bad = |i: usize| i % 1000 == 2 || i + 1 == elems;
            let x: Vec<f32> =
                (0..elems).map(|i| if bad(i) { [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][i % 3] } else { f32::MIN_POSITIVE }).collect();
            let (_, gpus) = on(&TWO, |rig| {
                let rig = rig.skewed(skew);
                let out = rig.empty(1, DType::F32);
                rig.ops().count_nonfinite(&out, &rig.tensor(&x, dtype), rig.stream()).unwrap();
                vec![rig.read(&out)]
            });
            let want = (0..elems).filter(|i| bad(*i)).count() as f32;
            assert!(gpus.iter().all(|g| g.outputs[0] == [want]), "{elems} {dtype}");
        }
    }
}

#[test]
fn swiglu_and_its_gradient() {
    if !can_run() {
        return;
    }
    for dtype in TYPES {
        for (elems, skew) in [(1, 0), (5003, 0), (4096, 0), (777, 1)] {
            let extremes = [-1e4f32, -200.0, -88.5, -20.0, 88.5, 200.0, 1e4, 0.0];
            let mut gate = normal(elems, dtype, 1);
            gate.iter_mut().zip(extremes).for_each(|(g, x)| *g = x);
            let (up, dh) = (normal(elems, dtype, 2), normal(elems, dtype, 3));
            let (_, gpus) = on(&TWO, |rig| {
                let rig = rig.skewed(skew);
                let (ops, s) = (rig.ops(), rig.stream());
                let (g, u, d) = (rig.tensor(&gate, dtype), rig.tensor(&up, dtype), rig.tensor(&dh, dtype));
                let (h, dg, du, in_place) =
                    (rig.empty(elems, dtype), rig.empty(elems, dtype), rig.empty(elems, dtype), rig.tensor(&gate, dtype));
                ops.swiglu(&h, &g, &u, s).unwrap();
                ops.swiglu(&in_place, &in_place, &u, s).unwrap();
                ops.swiglu_backward(&dg, &du, &d, &g, &u, s).unwrap();
                let outputs = [&h, &dg, &du].map(|v| rig.read(v)).to_vec();
                assert_bits("in place", &rig.read(&in_place), &outputs[0]);
                // dgate over gate and dup over up; then dgate over dh.
                let (g2, u2) = (rig.tensor(&gate, dtype), rig.tensor(&up, dtype));
                ops.swiglu_backward(&g2, &u2, &d, &g2, &u2, s).unwrap();
                ops.swiglu_backward(&d, &du, &d, &g, &u, s).unwrap();
                assert_bits("over gate", &rig.read(&g2), &outputs[1]);
                assert_bits("over up", &rig.read(&u2), &outputs[2]);
                assert_bits("over dh", &rig.read(&d), &outputs[1]);
                outputs
            });
            let (g, u, d) = (wide(&gate), wide(&up), wide(&dh));
            let sig = |x: f64| 1.0 / (1.0 + (-x).exp());
            let h: Vec<f64> = g.iter().zip(&u).map(|(g, u)| g * sig(*g) * u).collect();
            let dg: Vec<f64> = (0..elems).map(|i| d[i] * u[i] * sig(g[i]) * (1.0 + g[i] * (1.0 - sig(g[i])))).collect();
            let du: Vec<f64> = (0..elems).map(|i| d[i] * g[i] * sig(g[i])).collect();
            for gpu in gpus {
                for (name, got, want) in [("h", &gpu.outputs[0], &h), ("dgate", &gpu.outputs[1], &dg), ("dup", &gpu.outputs[2], &du)] {
                    assert_close(&format!("{name} of {elems} {dtype} on {}", gpu.arch), got, want, rounding(dtype));
                }
            }
        }
    }
}

#[test]
fn adamw_has_the_bits_of_the_cpu() {
    if !can_run() {
        return;
    }
    let hp = AdamW { lr: 2e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.1, step: 17 };
    for (elems, skew) in [(5003, 0), (4096, 0), (70, 1)] {
        let (p, m, g) = (wild(elems, 1), normal(elems, DType::F32, 2), wild(elems, 4));
        let v: Vec<f32> = normal(elems, DType::F32, 3).iter().map(|v| v * v * 1e-6).collect();
        for (scale, copy) in [(0.37, Some(DType::BF16)), (1.0, Some(DType::F32)), (f32::NAN, Some(DType::BF16)), (0.5, None)] {
            same_bits(&format!("{elems} elements, scale {scale}"), |rig| {
                let rig = rig.skewed(skew);
                let (tp, tm, tv, tg) =
                    (rig.tensor(&p, DType::F32), rig.tensor(&m, DType::F32), rig.tensor(&v, DType::F32), rig.tensor(&g, DType::F32));
                let out = rig.empty(elems, copy.unwrap_or(DType::F32));
                rig.ops().adamw(&tp, &tm, &tv, copy.map(|_| &out), &tg, &rig.tensor(&[scale], DType::F32), hp, rig.stream()).unwrap();
                let mut outputs = [&tp, &tm, &tv, &out].map(|v| rig.read(v)).to_vec();
                // Overflows make NaN, whose bits nobody promises.
                outputs.iter_mut().flatten().filter(|x| x.is_nan()).for_each(|x| *x = 12345.0);
                outputs
            });
        }
    }
}

/// Values over a wide range of magnitudes, so that another order of additions would show.
fn spread(n: usize, seed: u32) -> Vec<f32> {
    normal(n, DType::F32, seed).iter().enumerate().map(|(i, x)| x * 2f32.powi((i % 9) as i32 - 4)).collect()
}

#[test]
fn the_gradient_norm_has_the_bits_of_the_cpu() {
    if !can_run() {
        return;
    }
    for (elems, first) in [(0, 3), (1, 0), (1024, 1), (10_000, 0), (40_961, 5), (70 * 1024 + 1, 2)] {
        same_bits(&format!("{elems} elements from chunk {first}"), |rig| {
            let (nodes, x) = (rig.empty(SUM_SQUARES_NODES, DType::F32), rig.tensor(&spread(elems, 1), DType::F32));
            rig.ops().sum_squares(&nodes, &x, first, &rig.workspace(OpShape::SumSquares { elems }), rig.stream()).unwrap();
            vec![rig.read(&nodes)]
        });
    }
    // Ranks in any order, with gaps, empty ranges and more segments than threads.
    for (ranks, segments, max_norm) in [(1, 1, Some(0.5)), (5, 3, Some(1e9)), (3, 70, None), (8, 2, Some(1.0))] {
        let mut ranges = vec![(0u64, 0u64); ranks * segments];
        for segment in 0..segments {
            let mut at = segment as u64 % 3;
            for k in 0..ranks {
                let rank = (k * 3 + segment) % ranks;
                let rank = if ranks.is_multiple_of(3) { k } else { rank };
                let chunks = philox4x32([k as u32, segment as u32, 0, 0], [9, 9])[0] as u64 % 6;
                ranges[rank * segments + segment] = (at, chunks);
                at += chunks + u64::from(k % 4 == 3);
            }
        }
        for bad in [false, true] {
            same_bits(&format!("{ranks} ranks, {segments} segments"), |rig| {
                let (ops, s) = (rig.ops(), rig.stream());
                let mut all = vec![];
                for (i, (first, chunks)) in ranges.iter().enumerate() {
                    let mut x = spread(*chunks as usize * 1024, i as u32);
                    if bad && i == ranges.len() / 2 {
                        x.iter_mut().take(1).for_each(|x| *x = 3e30);
                    }
                    let nodes = rig.empty(SUM_SQUARES_NODES, DType::F32);
                    let work = rig.workspace(OpShape::SumSquares { elems: x.len() });
                    ops.sum_squares(&nodes, &rig.tensor(&x, DType::F32), *first as usize, &work, s).unwrap();
                    all.extend(rig.read(&nodes));
                }
                let (norm, scale) = (rig.empty(1, DType::F32), rig.empty(1, DType::F32));
                ops.clip_scale(&norm, &scale, &rig.tensor(&all, DType::F32), &ranges, ranks, segments, max_norm, s).unwrap();
                let scale = rig.read(&scale)[0];
                vec![rig.read(&norm), vec![if scale.is_nan() { 12345.0 } else { scale }]]
            });
        }
    }
}

#[test]
fn half_is_the_reference_of_bf16() {
    if !can_run() {
        return;
    }
    let x = wild(4099, 8);
    let want: Vec<f32> = x.iter().map(|x| bf16::from_f32(*x).to_f32()).collect();
    let (_, gpus) = on(&TWO, |rig| {
        let out = rig.empty(4099, DType::BF16);
        rig.ops().cast(&out, &rig.tensor(&x, DType::F32), rig.stream()).unwrap();
        vec![rig.read(&out)]
    });
    gpus.iter().for_each(|g| assert_bits(g.arch, &g.outputs[0], &want));
}
