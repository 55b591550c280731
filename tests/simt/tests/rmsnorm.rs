//! RMSNorm on emulated GPUs against `f64` and against the CPU: all three kernels (a warp, a block, a wide block a row), both
//! types, widths that are whole 16 bytes and that are not, operands that begin anywhere, in place and added to.

use zrt_kernels::{DType, OpShape, Write};
use zrt_simt::testing::{assert_close, can_run, normal, on, rounding, wide};

const EPS: f32 = 1e-5;

struct Reference {
    y: Vec<f64>,
    rstd: Vec<f64>,
    dx: Vec<f64>,
    dw: Vec<f64>,
}

fn reference(x: &[f64], w: &[f64], dy: &[f64]) -> Reference {
    let cols = w.len();
    let mut r = Reference { y: vec![], rstd: vec![], dx: vec![], dw: vec![0.0; cols] };
    for (x, dy) in x.chunks(cols).zip(dy.chunks(cols)) {
        let rstd = 1.0 / (x.iter().map(|x| x * x).sum::<f64>() / cols as f64 + f64::from(EPS)).sqrt();
        let mean = (0..cols).map(|c| dy[c] * w[c] * x[c] * rstd).sum::<f64>() / cols as f64;
        r.rstd.push(rstd);
        for c in 0..cols {
            r.y.push(x[c] * rstd * w[c]);
            r.dx.push(rstd * (dy[c] * w[c] - x[c] * rstd * mean));
            r.dw[c] += dy[c] * x[c] * rstd;
        }
    }
    r
}

fn check(rows: usize, cols: usize, dtype: DType, skew: usize) {
    let (x, w, dy) = (normal(rows * cols, dtype, 1), normal(cols, dtype, 2), normal(rows * cols, dtype, 3));
    let (before, wbefore) = (normal(rows * cols, dtype, 4), normal(cols, DType::F32, 5));
    let (cpu, gpus) = on(&["sm_90", "gfx942"], |rig| {
        let rig = rig.skewed(skew);
        let (ops, s) = (rig.ops(), rig.stream());
        let (tx, tw, tdy) = (rig.tensor(&x, dtype), rig.tensor(&w, dtype), rig.tensor(&dy, dtype));
        let (y, rstd, in_place) = (rig.empty(rows * cols, dtype), rig.empty(rows, DType::F32), rig.tensor(&x, dtype));
        ops.rmsnorm(&y, &rstd, &tx, &tw, EPS, rows, cols, s).unwrap();
        ops.rmsnorm(&in_place, &rstd, &in_place, &tw, EPS, rows, cols, s).unwrap();
        let work = rig.workspace(OpShape::RmsNormBackward { rows, cols });
        let (dx, dw) = (rig.empty(rows * cols, dtype), rig.empty(cols, DType::F32));
        ops.rmsnorm_backward(Some((&dx, Write::Set)), Some((&dw, Write::Set)), &tdy, &tx, &rstd, &tw, rows, cols, &work, s).unwrap();
        let (dx2, dw2) = (rig.tensor(&before, dtype), rig.tensor(&wbefore, DType::F32));
        ops.rmsnorm_backward(Some((&dx2, Write::Add)), Some((&dw2, Write::Add)), &tdy, &tx, &rstd, &tw, rows, cols, &work, s).unwrap();
        // One of the two alone, the first of them in place.
        let (dx3, dw3) = (rig.tensor(&dy, dtype), rig.empty(cols, DType::F32));
        ops.rmsnorm_backward(Some((&dx3, Write::Set)), None, &dx3, &tx, &rstd, &tw, rows, cols, &work, s).unwrap();
        ops.rmsnorm_backward(None, Some((&dw3, Write::Set)), &tdy, &tx, &rstd, &tw, rows, cols, &work, s).unwrap();
        let outputs = [&y, &rstd, &dx, &dw, &dx2, &dw2, &in_place, &dx3, &dw3].map(|v| rig.read(v));
        assert!(outputs[0] == outputs[6] && outputs[2] == outputs[7] && outputs[3] == outputs[8], "in place and alone");
        outputs[..6].to_vec()
    });
    let want = reference(&wide(&x), &wide(&w), &wide(&dy));
    let sum = |a: &[f64], b: &[f32]| a.iter().zip(b).map(|(a, b)| a + f64::from(*b)).collect::<Vec<_>>();
    let wanted = [&want.y, &want.rstd, &want.dx, &want.dw, &sum(&want.dx, &before), &sum(&want.dw, &wbefore)];
    for (who, outputs) in gpus.iter().map(|g| (g.arch, &g.outputs)).chain([("cpu", &cpu)]) {
        for (i, name) in ["y", "rstd", "dx", "dw", "dx added", "dw added"].iter().enumerate() {
            // What is stored as f32 is computed in f32; a bf16 element is rounded once.
            let tolerance = if i % 2 == 1 { 1e-6 } else { rounding(dtype) };
            assert_close(&format!("{name} on {who}, {rows} x {cols} {dtype}, skew {skew}"), &outputs[i], want_of(&wanted, i), tolerance);
        }
    }
}

fn want_of<'a>(wanted: &[&'a Vec<f64>; 6], i: usize) -> &'a [f64] {
    wanted[i]
}

#[test]
fn one_warp_a_row() {
    if !can_run() {
        return;
    }
    for dtype in [DType::F32, DType::BF16] {
        for (rows, cols, skew) in [(1, 5, 0), (67, 64, 0), (700, 16, 0), (33, 130, 0), (9, 128, 1), (1000, 8, 0)] {
            check(rows, cols, dtype, skew);
        }
    }
}

#[test]
fn one_block_a_row() {
    if !can_run() {
        return;
    }
    for dtype in [DType::F32, DType::BF16] {
        for (rows, cols, skew) in [(7, 576, 0), (5, 1029, 0), (3, 4096, 0), (2, 600, 3)] {
            check(rows, cols, dtype, skew);
        }
    }
    check(270, 576, DType::BF16, 0);
}

#[test]
fn rows_that_do_not_fit_registers() {
    if !can_run() {
        return;
    }
    check(3, 8200, DType::BF16, 0);
    check(2, 9001, DType::F32, 0);
}

#[test]
fn no_rows_have_no_gradient() {
    if !can_run() {
        return;
    }
    let (_, gpus) = on(&["sm_90", "gfx942"], |rig| {
        let (none, w, rstd) = (rig.tensor(&[], DType::F32), rig.tensor(&[1.0; 40], DType::F32), rig.tensor(&[], DType::F32));
        let (dw, work) = (rig.empty(40, DType::F32), rig.workspace(OpShape::RmsNormBackward { rows: 0, cols: 40 }));
        let (ops, s) = (rig.ops(), rig.stream());
        ops.rmsnorm(&none, &rstd, &none, &w, EPS, 0, 40, s).unwrap();
        ops.rmsnorm_backward(None, Some((&dw, Write::Set)), &none, &none, &rstd, &w, 0, 40, &work, s).unwrap();
        vec![rig.read(&dw)]
    });
    assert!(gpus.iter().all(|g| g.outputs[0] == [0.0; 40]));
}
