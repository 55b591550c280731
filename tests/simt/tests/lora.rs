//! LoRA on emulated GPUs against `f64` and the CPU: ranks from 1 to beyond what one launch takes, adapters of different ranks and outputs
//! that share an input, dropout, operands that begin anywhere, sums in one part and in several.

use zrt_kernels::philox::philox4x32;
use zrt_kernels::{DType, Dropout, LoraBackward, LoraForward, OpShape, ViewMut, Write};
use zrt_simt::testing::{assert_close, can_run, normal, on, on_all, rounding, wide};

struct Case {
    tokens: usize,
    inputs: usize,
    /// Rank and outputs of each adapter.
    adapters: &'static [(usize, usize)],
    dtype: DType,
    /// y is f32 whatever x is.
    y_f32: bool,
    dropout: Option<Dropout>,
    write: Write,
    skew: usize,
}

const CASE: Case =
    Case { tokens: 0, inputs: 0, adapters: &[], dtype: DType::BF16, y_f32: false, dropout: None, write: Write::Set, skew: 0 };

/// Of no other seed than the others'.
const DROP: Option<Dropout> = Some(Dropout { p: 0.3, seed: 0x1234_5678_9abc_def0, step: 7, micro_batch: 3 });

fn site(adapter: usize) -> u32 {
    40 + 3 * adapter as u32
}

/// The definition in `kernels/src/cpu/dropout.rs`.
fn factor(d: Option<Dropout>, site: u32, e: usize) -> f64 {
    let Some(d) = d else { return 1.0 };
    let key = philox4x32([d.step, 0, 0, 0x6472_6f70], [d.seed as u32, (d.seed >> 32) as u32]);
    let word = philox4x32([(e / 4) as u32, ((e as u64 / 4) >> 32) as u32, site, d.micro_batch], [key[0], key[1]])[e % 4];
    if f64::from(word >> 8) / 16_777_216.0 >= f64::from(d.p) { f64::from(1.0 / (1.0 - d.p)) } else { 0.0 }
}

/// `[M,N]` from element functions over K.
fn product(m: usize, n: usize, k: usize, a: impl Fn(usize, usize) -> f64, b: impl Fn(usize, usize) -> f64) -> Vec<f64> {
    (0..m * n).map(|i| (0..k).map(|k| a(i / n, k) * b(i % n, k)).sum()).collect()
}

/// Results and tolerances, in the order in which the case returns them.
fn reference(c: &Case, data: &Data) -> Vec<(String, Vec<f64>, f64)> {
    let (n, i) = (c.tokens, c.inputs);
    // f32 sums, of terms that cancel to the size of a few; split numbers are good to 2^-17 each, t and dt are made of two of them.
    let f32s = if c.dtype == DType::F32 { 2e-6 } else { 2e-5 };
    let stored = rounding(c.dtype).max(f32s);
    let x = wide(&data.x);
    let mut dx = wide(&data.dx);
    let mut all = Vec::new();
    for (ad, &(r, o)) in c.adapters.iter().enumerate() {
        let [a, b, y, dy, da, db] = data.of[ad].each_ref().map(|v| wide(v));
        let s = f64::from(SCALE);
        let dropped: Vec<f64> = x.iter().enumerate().map(|(e, x)| x * factor(c.dropout, site(ad), e)).collect();
        let t = product(n, r, i, |n, k| dropped[n * i + k], |r, k| a[r * i + k]);
        let mut out = product(n, o, r, |n, k| s * t[n * r + k], |o, k| b[o * r + k]);
        out.iter_mut().zip(&y).for_each(|(o, y)| *o += y);
        let mut gb = product(o, r, n, |o_, k| s * dy[k * o + o_], |r_, k| t[k * r + r_]);
        let dt = product(n, r, o, |n, k| s * dy[n * o + k], |r_, k| b[k * r + r_]);
        let mut ga = product(r, i, n, |r_, k| dt[k * r + r_], |i_, k| dropped[k * i + i_]);
        if c.write == Write::Add {
            ga.iter_mut().zip(&da).for_each(|(g, d)| *g += d);
            gb.iter_mut().zip(&db).for_each(|(g, d)| *g += d);
        }
        let g = product(n, i, r, |n, k| dt[n * r + k], |i_, k| a[k * i + i_]);
        dx.iter_mut().enumerate().for_each(|(e, d)| *d += g[e] * factor(c.dropout, site(ad), e));
        let wide_y = if c.y_f32 { f32s } else { stored };
        all.push((format!("t {ad}"), t, f32s));
        all.push((format!("y {ad}"), out, wide_y));
        all.push((format!("da {ad}"), ga, f32s));
        all.push((format!("db {ad}"), gb, f32s));
    }
    all.push(("dx".into(), dx, stored));
    all
}

const SCALE: f32 = 1.5;

struct Data {
    x: Vec<f32>,
    dx: Vec<f32>,
    /// a, b, y, dy, da, db of each adapter.
    of: Vec<[Vec<f32>; 6]>,
}

fn data(c: &Case) -> Data {
    let (n, i, t, f) = (c.tokens, c.inputs, c.dtype, DType::F32);
    let y = if c.y_f32 { f } else { t };
    let of = |(ad, &(r, o)): (usize, &(usize, usize))| {
        let seed = 10 * (ad as u32 + 1);
        let small = |elems, seed| normal(elems, f, seed).iter().map(|v| v * 0.25).collect::<Vec<f32>>();
        [
            small(r * i, seed),
            small(o * r, seed + 1),
            normal(n * o, y, seed + 2),
            normal(n * o, t, seed + 3),
            normal(r * i, f, seed + 4),
            normal(o * r, f, seed + 5),
        ]
    };
    Data { x: normal(n * i, t, 1), dx: normal(n * i, t, 2), of: c.adapters.iter().enumerate().map(of).collect() }
}

fn check(c: Case) {
    let d = data(&c);
    let (n, i, t, f) = (c.tokens, c.inputs, c.dtype, DType::F32);
    let y_type = if c.y_f32 { f } else { t };
    let shape = OpShape::Lora {
        tokens: n,
        inputs: i,
        outputs: c.adapters.iter().map(|a| a.1).max().unwrap(),
        rank: c.adapters.iter().map(|a| a.0).max().unwrap(),
        adapters: c.adapters.len(),
    };
    let case = |rig: &zrt_simt::testing::Rig| {
        let rig = &rig.skewed(c.skew);
        let (ops, s) = (rig.ops(), rig.stream());
        let (x, work) = (rig.tensor(&d.x, t), rig.workspace(shape));
        let mut forward = Vec::new();
        for (ad, (&(rank, outputs), [a, b, y, ..])) in c.adapters.iter().zip(&d.of).enumerate() {
            let (a, b, y, t) = (rig.tensor(a, f).view(), rig.tensor(b, f).view(), rig.tensor(y, y_type), rig.empty(n * rank, f));
            forward.push(LoraForward { y, t, a, b, scale: SCALE, outputs, rank, site: site(ad) });
        }
        ops.lora(&forward, &x, c.dropout, n, i, &work, s).unwrap();
        let work = rig.workspace(shape);
        let mut backward = Vec::new();
        let start = |values: &[f32]| if c.write == Write::Add { rig.tensor(values, f) } else { rig.empty(values.len(), f) };
        for (f, [_, _, _, dy, da, db]) in forward.iter().zip(&d.of) {
            let (da, db, dy) = (start(da), start(db), rig.tensor(dy, t).view());
            let LoraForward { t, a, b, scale, outputs, rank, site, .. } = f.clone();
            backward.push(LoraBackward { da, db, write: c.write, dy, t: t.view(), a, b, scale, outputs, rank, site });
        }
        let dx = rig.tensor(&d.dx, t);
        ops.lora_backward(Some(&dx), &backward, &x, c.dropout, n, i, &work, s).unwrap();
        // Gradients of the adapters alone are the same.
        let alone: Vec<_> =
            backward.iter().zip(&d.of).map(|(b, d)| LoraBackward { da: start(&d[4]), db: start(&d[5]), ..b.clone() }).collect();
        ops.lora_backward(None, &alone, &x, c.dropout, n, i, &work, s).unwrap();
        let mut views: Vec<&ViewMut> = Vec::new();
        for (f, b) in forward.iter().zip(&backward) {
            views.extend([&f.t, &f.y, &b.da, &b.db]);
        }
        views.push(&dx);
        let outputs: Vec<Vec<f32>> = views.iter().map(|v| rig.read(v)).collect();
        for (ad, b) in alone.iter().enumerate() {
            assert!(rig.read(&b.da) == outputs[4 * ad + 2] && rig.read(&b.db) == outputs[4 * ad + 3], "adapter {ad} without dx");
        }
        outputs
    };
    // The machine with the wider instruction runs the same kernels in the smaller cases.
    let (cpu, gpus) = if n * i < 20_000 { on_all(case) } else { on(&["sm_90", "gfx942"], case) };
    let want = reference(&c, &d);
    let who = gpus.iter().map(|g| (g.arch, &g.outputs)).chain([("cpu", &cpu)]);
    for (who, outputs) in who {
        for ((name, want, tolerance), got) in want.iter().zip(outputs) {
            let what = format!("{name} on {who}, {n} x {i}, {:?} {t}, skew {}", c.adapters, c.skew);
            assert_close(&what, got, want, *tolerance);
        }
    }
}

#[test]
fn one_adapter() {
    if !can_run() {
        return;
    }
    for dtype in [DType::F32, DType::BF16] {
        check(Case { tokens: 1, inputs: 1, adapters: &[(1, 1)], dtype, ..CASE });
        check(Case { tokens: 70, inputs: 72, adapters: &[(8, 136)], dtype, y_f32: true, ..CASE });
    }
}

#[test]
fn adapters_share_an_input() {
    if !can_run() {
        return;
    }
    for dtype in [DType::F32, DType::BF16] {
        check(Case { tokens: 37, inputs: 40, adapters: &[(16, 56), (4, 24), (17, 8)], dtype, write: Write::Add, ..CASE });
        check(Case { tokens: 19, inputs: 51, adapters: &[(3, 21), (5, 133)], dtype, skew: 1, ..CASE });
    }
}

#[test]
fn dropout_has_the_cpus_masks() {
    if !can_run() {
        return;
    }
    check(Case { tokens: 67, inputs: 72, adapters: &[(8, 24), (4, 40)], dropout: DROP, ..CASE });
    check(Case { tokens: 21, inputs: 35, adapters: &[(16, 8), (20, 16)], dtype: DType::F32, dropout: DROP, write: Write::Add, ..CASE });
}

#[test]
fn sums_in_several_parts() {
    if !can_run() {
        return;
    }
    check(Case { tokens: 150, inputs: 640, adapters: &[(8, 24)], ..CASE });
    check(Case { tokens: 70, inputs: 16, adapters: &[(12, 300)], dtype: DType::F32, ..CASE });
}

#[test]
fn large_ranks() {
    if !can_run() {
        return;
    }
    check(Case { tokens: 40, inputs: 48, adapters: &[(64, 40), (33, 16), (64, 24)], ..CASE });
    check(Case { tokens: 33, inputs: 40, adapters: &[(256, 24), (8, 16)], y_f32: true, dropout: DROP, ..CASE });
    check(Case { tokens: 20, inputs: 24, adapters: &[(200, 16)], dtype: DType::F32, write: Write::Add, ..CASE });
}

#[test]
fn more_adapters_than_a_launch_takes() {
    if !can_run() {
        return;
    }
    check(Case { tokens: 17, inputs: 24, adapters: &[(4, 8), (4, 16), (4, 8), (4, 24), (4, 8)], write: Write::Add, ..CASE });
}

#[test]
fn no_tokens_have_no_gradient() {
    if !can_run() {
        return;
    }
    check(Case { tokens: 0, inputs: 16, adapters: &[(4, 8)], ..CASE });
}
