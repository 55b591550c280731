//! Small cases of all operations, odd sizes, both types, for what runs over all kernels: mutations of the sources, sanitizers. Accuracy is
//! tested elsewhere, operation by operation; here a result is compared with the CPU's, to the bit where that is promised.

mod products;

use crate::testing::{Rig, normal};
use products::{attention, cross_entropy, linear, lora};
use zrt_kernels::ops::SUM_SQUARES_NODES;
use zrt_kernels::{AdamW, DType, Dropout, OpShape, Write};

/// Calls an operation on a rig and reads its results.
pub type Run = dyn Fn(&Rig) -> zrt_kernels::Result<Vec<Vec<f32>>>;

/// A call of one operation.
pub struct Case {
    /// The operation, and what is special.
    pub name: &'static str,
    /// Largest relative distance from the CPU's result, in L2; 0 where the bits are promised.
    pub tolerance: f64,
    /// Calls it and reads its results.
    pub run: Box<Run>,
}

fn case(name: &'static str, tolerance: f64, run: impl Fn(&Rig) -> zrt_kernels::Result<Vec<Vec<f32>>> + 'static) -> Case {
    Case { name, tolerance, run: Box::new(run) }
}

/// Distance of results that are rounded once, on either side.
fn rounded(dtype: DType) -> f64 {
    if dtype == DType::BF16 { 4e-3 } else { 2e-6 }
}

fn read(rig: &Rig, views: &[&zrt_kernels::ViewMut]) -> zrt_kernels::Result<Vec<Vec<f32>>> {
    views.iter().map(|v| rig.try_read(v)).collect()
}

fn rmsnorm(name: &'static str, dtype: DType, rows: usize, cols: usize) -> Case {
    case(name, rounded(dtype), move |rig| {
        let (ops, s) = (rig.ops(), rig.stream());
        let (x, w, dy) = (normal(rows * cols, dtype, 1), normal(cols, dtype, 2), normal(rows * cols, dtype, 3));
        let (x, w, dy) = (rig.tensor(&x, dtype), rig.tensor(&w, dtype), rig.tensor(&dy, dtype));
        let (y, rstd) = (rig.empty(rows * cols, dtype), rig.empty(rows, DType::F32));
        ops.rmsnorm(&y, &rstd, &x, &w, 1e-5, rows, cols, s)?;
        let work = rig.workspace(OpShape::RmsNormBackward { rows, cols });
        let (dx, dw) = (rig.empty(rows * cols, dtype), rig.empty(cols, DType::F32));
        ops.rmsnorm_backward(Some((&dx, Write::Set)), Some((&dw, Write::Set)), &dy, &x, &rstd, &w, rows, cols, &work, s)?;
        read(rig, &[&y, &rstd, &dx, &dw])
    })
}

fn rope(name: &'static str, dtype: DType) -> Case {
    case(name, rounded(dtype), move |rig| {
        let (tokens, heads, d) = (13, 3, 48);
        let positions: Vec<i32> = (0..tokens as i32).map(|n| n * 5 % 17).collect();
        let (x, table) = (rig.tensor(&normal(tokens * heads * d, dtype, 1), dtype), rig.tensor(&normal(17 * d, DType::F32, 2), DType::F32));
        let (dx, p) = (rig.tensor(&normal(tokens * heads * d, dtype, 3), dtype), rig.ints(&positions));
        rig.ops().rope(&x, &table, &p, heads, d, rig.stream())?;
        rig.ops().rope_backward(&dx, &table, &p, heads, d, rig.stream())?;
        read(rig, &[&x, &dx])
    })
}

fn swiglu(name: &'static str, dtype: DType) -> Case {
    case(name, rounded(dtype), move |rig| {
        let n = 1237;
        let [gate, up, dh] = [1, 2, 3].map(|seed| rig.tensor(&normal(n, dtype, seed), dtype));
        let [h, dgate, dup] = [(); 3].map(|()| rig.empty(n, dtype));
        rig.ops().swiglu(&h, &gate, &up, rig.stream())?;
        rig.ops().swiglu_backward(&dgate, &dup, &dh, &gate, &up, rig.stream())?;
        read(rig, &[&h, &dgate, &dup])
    })
}

fn embedding(name: &'static str, dtype: DType, hidden: usize) -> Case {
    case(name, 0.0, move |rig| {
        let (tokens, vocab) = (1100, 37);
        let ids: Vec<i32> = (0..tokens as i32).map(|n| n * n % 37).collect();
        let (table, dy) = (rig.tensor(&normal(vocab * hidden, dtype, 1), dtype), rig.tensor(&normal(tokens * hidden, dtype, 2), dtype));
        let (y, dtable, ids) = (rig.empty(tokens * hidden, dtype), rig.empty(vocab * hidden, DType::F32), rig.ints(&ids));
        rig.ops().embedding(&y, &table, &ids, hidden, rig.stream())?;
        let work = rig.workspace(OpShape::EmbeddingBackward { tokens, hidden, vocab });
        rig.ops().embedding_backward(&dtable, Write::Set, &dy, &ids, hidden, &work, rig.stream())?;
        read(rig, &[&y, &dtable])
    })
}

fn adamw(name: &'static str, copy: DType) -> Case {
    case(name, 0.0, move |rig| {
        let n = 1003;
        let [p, m, g] = [1, 2, 3].map(|seed| rig.tensor(&normal(n, DType::F32, seed), DType::F32));
        let v: Vec<f32> = normal(n, DType::F32, 4).iter().map(|v| v * v * 1e-4).collect();
        let (v, out, scale) = (rig.tensor(&v, DType::F32), rig.empty(n, copy), rig.tensor(&[0.7], DType::F32));
        let hp = AdamW { lr: 1e-3, beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1, step: 3 };
        rig.ops().adamw(&p, &m, &v, Some(&out), &g, &scale, hp, rig.stream())?;
        read(rig, &[&p, &m, &v, &out])
    })
}

fn elements(name: &'static str, dtype: DType) -> Case {
    case(name, 0.0, move |rig| {
        let (ops, s, n) = (rig.ops(), rig.stream(), 2051);
        let (x, y, sum) = (rig.tensor(&normal(n, dtype, 1), dtype), rig.tensor(&normal(n, dtype, 2), dtype), rig.empty(n, DType::F32));
        let [wide, narrow] = [DType::F32, DType::BF16].map(|t| rig.empty(n, t));
        // Halfway between two bf16 numbers: to the even one.
        let ties: Vec<f32> = (0..64).map(|i| f32::from_bits(0x3f80_8000 + (i << 16))).collect();
        let (ties, even) = (rig.tensor(&ties, DType::F32), rig.empty(64, DType::BF16));
        ops.cast(&even, &ties, s)?;
        let [count, total] = [(); 2].map(|()| rig.empty(1, DType::F32));
        ops.add_into(&y, &x, s)?;
        ops.scale(&y, 0.3, s)?;
        ops.cast(&wide, &y, s)?;
        ops.cast(&narrow, &y, s)?;
        ops.add_into(&narrow, &wide, s)?;
        ops.add(&sum, &wide, &wide, s)?;
        ops.count_nonfinite(&count, &rig.tensor(&vec![f32::INFINITY; n], dtype), s)?;
        ops.sum(&total, &wide, s)?;
        read(rig, &[&y, &wide, &narrow, &sum, &count, &total, &even])
    })
}

fn gradient_norm() -> Case {
    case("sum_squares and clip_scale", 0.0, |rig| {
        let (ops, s, elems, first) = (rig.ops(), rig.stream(), 21 * 1024 + 77, 3);
        let (nodes, x) = (rig.empty(SUM_SQUARES_NODES, DType::F32), rig.tensor(&normal(elems, DType::F32, 1), DType::F32));
        ops.sum_squares(&nodes, &x, first, &rig.workspace(OpShape::SumSquares { elems }), s)?;
        let [norm, scale] = [(); 2].map(|()| rig.empty(1, DType::F32));
        ops.clip_scale(&norm, &scale, &nodes, &[(first as u64, 22)], 1, 1, Some(1.0), s)?;
        // More segments than a block has threads; their nodes are any numbers that are not negative.
        let many = 67;
        let squares: Vec<f32> = normal(many * SUM_SQUARES_NODES, DType::F32, 2).iter().map(|v| v * v).collect();
        let (all, [norms, scales]) = (rig.tensor(&squares, DType::F32), [(); 2].map(|()| rig.empty(1, DType::F32)));
        ops.clip_scale(&norms, &scales, &all, &vec![(5, 22); many], 1, many, Some(1.0), s)?;
        read(rig, &[&nodes, &norm, &scale, &norms, &scales])
    })
}

/// All cases.
pub fn cases() -> Vec<Case> {
    const F: DType = DType::F32;
    const B: DType = DType::BF16;
    vec![
        rmsnorm("rmsnorm f32, a warp a row", F, 37, 72),
        rmsnorm("rmsnorm bf16, a warp a row", B, 301, 71),
        rmsnorm("rmsnorm f32, a block a row", F, 5, 900),
        rmsnorm("rmsnorm bf16, a block a row", B, 270, 901),
        rmsnorm("rmsnorm f32, a wide block a row", F, 2, 4100),
        rmsnorm("rmsnorm bf16, a wide block a row", B, 3, 8208),
        rope("rope f32", F),
        rope("rope bf16", B),
        swiglu("swiglu f32", F),
        swiglu("swiglu bf16", B),
        embedding("embedding f32", F, 9),
        embedding("embedding bf16", B, 9),
        embedding("embedding bf16, aligned rows", B, 24),
        adamw("adamw f32", F),
        adamw("adamw bf16", B),
        elements("elements f32", F),
        elements("elements bf16", B),
        gradient_norm(),
        linear("linear f32", F, 37, 72, 40),
        linear("linear bf16", B, 50, 51, 133),
        linear("linear bf16, a long sum", B, 1100, 24, 16),
        lora("lora f32", F, 70, 72, &[(40, 8), (21, 5)], None),
        lora("lora bf16", B, 150, 640, &[(136, 16), (24, 4)], None),
        lora("lora bf16, dropout", B, 67, 72, &[(24, 8), (40, 4)], Some(Dropout { p: 0.3, seed: 7, step: 2, micro_batch: 1 })),
        lora("lora f32, dropout and odd rows", F, 35, 37, &[(24, 8), (9, 3)], Some(Dropout { p: 0.3, seed: 7, step: 2, micro_batch: 1 })),
        lora("lora f32, large ranks", F, 40, 48, &[(40, 64), (16, 33)], None),
        lora("lora f32, whole rows", F, 64, 128, &[(192, 16)], None),
        lora("lora f32, whole rows of large ranks", F, 64, 64, &[(128, 64), (64, 32)], None),
        lora("lora bf16, whole rows", B, 128, 256, &[(384, 16), (128, 16)], None),
        lora("lora bf16, whole rows of large ranks", B, 64, 128, &[(256, 64), (64, 32)], None),
        lora("lora bf16, large ranks", B, 70, 48, &[(200, 64), (16, 130)], None),
        attention("attention f32, 64", F, &[5, 36], 64, None),
        attention("attention f32, 96", F, &[41], 80, Some(7)),
        attention("attention f32, 128", F, &[17, 1], 128, None),
        attention("attention f32, 256", F, &[20], 256, None),
        attention("attention bf16, 64", B, &[37, 1, 70], 64, None),
        attention("attention bf16, 96", B, &[75], 72, Some(20)),
        attention("attention bf16, 128", B, &[1, 66], 128, None),
        attention("attention bf16, 256", B, &[40, 33], 200, None),
        cross_entropy("cross entropy f32", F),
        cross_entropy("cross entropy bf16", B),
    ]
}

/// What is wrong with `got`, if anything.
pub fn difference(case: &Case, got: &[Vec<f32>], want: &[Vec<f32>]) -> Option<String> {
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        if case.tolerance == 0.0 {
            if let Some(at) = got.iter().zip(want).position(|(a, b)| a.to_bits() != b.to_bits()) {
                return Some(format!("{}: output {i} is {} at {at}, expected {}", case.name, got[at], want[at]));
            }
            continue;
        }
        let d = crate::testing::distance(got, &crate::testing::wide(want));
        if d.is_nan() || d > case.tolerance {
            return Some(format!("{}: output {i} is off by {d:e}, at most {:e}", case.name, case.tolerance));
        }
    }
    None
}

/// Runs the cases whose name contains `only` on a device and compares them with the CPU; the first difference or error.
pub fn check(device: &std::sync::Arc<crate::SimtDevice>, only: &str) -> Result<(), String> {
    check_skewed(device, only, 0)
}

/// The same with operands that begin `skew` elements behind a multiple of 256 bytes.
pub fn check_skewed(device: &std::sync::Arc<crate::SimtDevice>, only: &str, skew: usize) -> Result<(), String> {
    for case in cases().iter().filter(|c| c.name.contains(only)) {
        let want = (case.run)(&Rig::cpu()).map_err(|e| format!("{}: {e}", case.name))?;
        // A failed stream stays failed: each case has its own.
        let got = (case.run)(&Rig::new(device.clone()).skewed(skew)).map_err(|e| format!("{}: {e}", case.name))?;
        if let Some(what) = difference(case, &got, &want) {
            return Err(what);
        }
    }
    Ok(())
}
