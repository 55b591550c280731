//! The linear layer, LoRA and the loss against references in f64: values, finite differences, types, write modes, threads.

use super::dropout::Mask;
use super::float::{Float, FloatMut};
use super::loss::{self, Hidden};
use super::pool::Pool;
use super::simd::Isa;
use super::{linear, lora, lora_split};
use crate::{Dropout, Write};
use half::bf16;
use proptest::prelude::*;

/// Scattered values below 1 that bf16 holds exactly.
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

fn wide(x: &[bf16]) -> Vec<f32> {
    x.iter().map(|x| x.to_f32()).collect()
}

fn f64s(x: &[f32]) -> Vec<f64> {
    x.iter().map(|x| f64::from(*x)).collect()
}

/// Storage of either type.
#[derive(Clone)]
enum Store {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
}

impl Store {
    fn new(x: &[f32], half: bool) -> Store {
        if half { Store::Bf16(narrow(x)) } else { Store::F32(x.to_vec()) }
    }
    fn get(&self) -> Float<'_> {
        match self {
            Store::F32(x) => Float::F32(x),
            Store::Bf16(x) => Float::Bf16(x),
        }
    }
    fn get_mut(&mut self) -> FloatMut<'_> {
        match self {
            Store::F32(x) => FloatMut::F32(x),
            Store::Bf16(x) => FloatMut::Bf16(x),
        }
    }
    fn f32s(&self) -> Vec<f32> {
        match self {
            Store::F32(x) => x.clone(),
            Store::Bf16(x) => wide(x),
        }
    }
}

/// Relative L2 distance within `tolerance`; eight times that for fewer than 64 elements, which may all have cancelled to a
/// fraction of the terms they sum.
fn close(what: &str, got: &[f32], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    let (mut off, mut all) = (0.0, 0.0);
    for (g, w) in got.iter().zip(want) {
        off += (f64::from(*g) - w).powi(2);
        all += w * w;
    }
    let tolerance = if got.len() < 64 { 8.0 * tolerance } else { tolerance };
    assert!(off.sqrt() <= tolerance * all.sqrt() + 1e-30, "{what}: relative distance {}", (off / all).sqrt());
}

/// f32 sums round a few units of 6e-8; bf16 results round at 2^-9 = 2e-3, in the root mean square a little less.
fn tolerance(half: bool) -> f64 {
    if half { 3e-3 } else { 1e-6 }
}

/// `a [m,k] b [k,n]` in f64, each possibly given transposed.
fn product(a: &[f64], a_t: bool, b: &[f64], b_t: bool, m: usize, n: usize, k: usize) -> Vec<f64> {
    let mut c = vec![0.0; m * n];
    for i in 0..m {
        for j in 0..n {
            c[i * n + j] = (0..k).map(|l| a[if a_t { l * m + i } else { i * k + l }] * b[if b_t { j * k + l } else { l * n + j }]).sum();
        }
    }
    c
}

fn add(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

fn check_linear(pool: &Pool, n: usize, i: usize, o: usize, half: bool, write: Write) -> Vec<Vec<f32>> {
    let (x, w, bias, dy) = (values(n * i, 1), values(o * i, 2), values(o, 3), values(n * o, 4));
    let (y0, dx0, dw0, db0) = (values(n * o, 5), values(n * i, 6), values(o * i, 7), values(o, 8));
    let [xs, ws, bs, dys] = [&x, &w, &bias, &dy].map(|v| Store::new(v, half));
    let (mut y, mut dx, mut dw, mut db) = (Store::new(&y0, half), Store::new(&dx0, half), dw0.clone(), db0.clone());
    linear::forward(pool, y.get_mut(), write, xs.get(), ws.get(), Some(bs.get()), n, i, o);
    let (gx, gw, gb) = (Some((dx.get_mut(), write)), Some((&mut dw[..], write)), Some((&mut db[..], write)));
    linear::backward(pool, gx, gw, gb, dys.get(), Some(xs.get()), ws.get(), n, i, o);
    let [x, w, bias, dy] = [x, w, bias, dy].map(|v| f64s(&v));
    let old = |v: &[f32]| if write == Write::Add { f64s(v) } else { vec![0.0; v.len()] };
    let mut want_y = add(&product(&x, false, &w, true, n, o, i), &old(&y0));
    want_y.iter_mut().enumerate().for_each(|(e, v)| *v += bias[e % o]);
    let want_db: Vec<f64> = (0..o).map(|c| (0..n).map(|r| dy[r * o + c]).sum::<f64>()).collect();
    close("y", &y.f32s(), &want_y, tolerance(half));
    close("dx", &dx.f32s(), &add(&product(&dy, false, &w, false, n, i, o), &old(&dx0)), tolerance(half));
    close("dw", &dw, &add(&product(&dy, true, &x, false, o, i, n), &old(&dw0)), tolerance(false));
    close("dbias", &db, &add(&want_db, &old(&db0)), tolerance(false));
    vec![y.f32s(), dx.f32s(), dw, db]
}

#[test]
fn linear_and_its_gradients() {
    for isa in Isa::available() {
        let pools = [1, 2, 3].map(|t| Pool::with_isa(t, isa).unwrap());
        for (n, i, o) in [(1, 1, 1), (7, 33, 17), (130, 70, 129), (65, 400, 24)] {
            for (half, write) in [(false, Write::Set), (false, Write::Add), (true, Write::Set), (true, Write::Add)] {
                let first = check_linear(&pools[0], n, i, o, half, write);
                assert_eq!(check_linear(&pools[1], n, i, o, half, write), first);
                assert_eq!(check_linear(&pools[2], n, i, o, half, write), first);
            }
        }
    }
}

#[test]
fn frozen_gradients_cost_nothing_and_touch_nothing() {
    let pool = Pool::new(1).unwrap();
    let (w, dy, mut dw) = (values(6, 1), values(4, 2), vec![7.0f32; 6]);
    linear::backward(&pool, None, Some((&mut dw, Write::Set)), None, Float::F32(&dy), None, Float::F32(&w), 2, 3, 2);
    assert_eq!(dw, [7.0; 6]);
}

/// (outputs, rank, scale) of the adapters of one case.
type Adapters<'a> = &'a [(usize, usize, f32)];

#[allow(clippy::too_many_arguments)]
fn check_lora(pool: &Pool, split: bool, adapters: Adapters, n: usize, i: usize, half: bool, p: f32, write: Write) -> Vec<Vec<f32>> {
    let dropout = (p > 0.0).then_some(Dropout { p, seed: 99, step: 5, micro_batch: 2 });
    let xs = Store::new(&values(n * i, 1), half);
    let x = f64s(&xs.f32s());
    let (rank, count) = (adapters.iter().map(|a| a.1).max().unwrap(), adapters.len());
    let outputs = adapters.iter().map(|a| a.0).max().unwrap();
    let mut workspace = vec![f32::NAN; lora::workspace_bytes(n, i, outputs, rank, count) / 4];
    let mut y: Vec<Store> = adapters.iter().enumerate().map(|(k, a)| Store::new(&values(n * a.0, 20 + k as u32), half)).collect();
    let dy: Vec<Store> = adapters.iter().enumerate().map(|(k, a)| Store::new(&values(n * a.0, 30 + k as u32), half)).collect();
    let a: Vec<Vec<f32>> = adapters.iter().enumerate().map(|(k, a)| values(a.1 * i, 40 + k as u32)).collect();
    let b: Vec<Vec<f32>> = adapters.iter().enumerate().map(|(k, a)| values(a.0 * a.1, 50 + k as u32)).collect();
    let mut t: Vec<Vec<f32>> = adapters.iter().map(|a| vec![f32::NAN; n * a.1]).collect();
    let (y0, mut dx) = (y.clone(), Store::new(&values(n * i, 60), half));
    let dx0 = f64s(&dx.f32s());
    let fill = |elems| if write == Write::Add { vec![0.5f32; elems] } else { vec![f32::NAN; elems] };
    let mut da: Vec<Vec<f32>> = adapters.iter().map(|a| fill(a.1 * i)).collect();
    let mut db: Vec<Vec<f32>> = adapters.iter().map(|a| fill(a.0 * a.1)).collect();

    let mut forward: Vec<_> = (y.iter_mut().zip(&mut t).zip(a.iter().zip(&b)).zip(adapters).enumerate())
        .map(|(k, (((y, t), (a, b)), s))| lora::Forward { y: y.get_mut(), t, a, b, scale: s.2, outputs: s.0, rank: s.1, site: k as u32 })
        .collect();
    lora::forward_as(split, pool, &mut forward, xs.get(), dropout, n, i, &mut workspace);
    drop(forward);
    workspace.fill(f32::NAN);
    let mut backward = Vec::new();
    for (k, (da, db)) in da.iter_mut().zip(&mut db).enumerate() {
        let (outputs, rank, scale) = adapters[k];
        let (dy, t, a, b) = (dy[k].get(), &t[k][..], &a[k][..], &b[k][..]);
        backward.push(lora::Backward { da, db, write, dy, t, a, b, scale, outputs, rank, site: k as u32 });
    }
    lora::backward_as(split, pool, Some(dx.get_mut()), &mut backward, xs.get(), dropout, n, i, &mut workspace);

    // Two bf16 hold 17 bits of an adapter, and of t or dt between two products: 2^-17 each.
    let single = if split && half && p == 0.0 { 1.5e-5 } else { tolerance(false) };
    let mut want_dx = dx0;
    for (k, (o, r, scale)) in adapters.iter().copied().enumerate() {
        let mask = Mask::new(dropout, k as u32);
        let factor: Vec<f64> = (0..n * i).map(|e| mask.map_or(1.0, |m| f64::from(m.factor(e as u64)))).collect();
        let dropped: Vec<f64> = x.iter().zip(&factor).map(|(x, f)| x * f).collect();
        let (a, b, dy) = (f64s(&a[k]), f64s(&b[k]), f64s(&dy[k].f32s()));
        let scaled = |v: Vec<f64>| -> Vec<f64> { v.iter().map(|v| v * f64::from(scale)).collect() };
        let old = |elems| vec![if write == Write::Add { 0.5 } else { 0.0 }; elems];
        let want_t = product(&dropped, false, &a, true, n, r, i);
        let want_y = add(&f64s(&y0[k].f32s()), &scaled(product(&want_t, false, &b, true, n, o, r)));
        let dt = scaled(product(&dy, false, &b, false, n, r, o));
        close("t", &t[k], &want_t, single);
        close("y", &y[k].f32s(), &want_y, tolerance(half));
        close("db", &db[k], &add(&scaled(product(&dy, true, &want_t, false, o, r, n)), &old(o * r)), single);
        close("da", &da[k], &add(&product(&dt, true, &dropped, false, r, i, n), &old(r * i)), single);
        let g = product(&dt, false, &a, false, n, i, r);
        want_dx = add(&want_dx, &g.iter().zip(&factor).map(|(g, f)| g * f).collect::<Vec<_>>());
    }
    // With dropout and bf16, dx is rounded once per adapter.
    close("dx", &dx.f32s(), &want_dx, tolerance(half) * count as f64);
    let mut all: Vec<Vec<f32>> = y.iter().map(Store::f32s).collect();
    all.extend(t.into_iter().chain(da).chain(db));
    all.push(dx.f32s());
    all
}

#[test]
fn lora_of_adapters_that_share_an_input() {
    for isa in Isa::available() {
        let pools = [1, 2, 3].map(|t| Pool::with_isa(t, isa).unwrap());
        let cases: [Adapters; 3] = [&[(33, 16, 2.0)], &[(33, 4, 0.5), (16, 16, 2.0), (65, 3, 1.0)], &[(48, 8, 1.0), (48, 8, 1.0)]];
        for adapters in cases {
            for (n, i) in [(5, 7), (300, 65)] {
                for (half, p, write) in
                    [(false, 0.0, Write::Set), (true, 0.0, Write::Add), (false, 0.2, Write::Add), (true, 0.2, Write::Set)]
                {
                    for split in [false, true] {
                        let first = check_lora(&pools[0], split, adapters, n, i, half, p, write);
                        assert_eq!(check_lora(&pools[1], split, adapters, n, i, half, p, write), first);
                        assert_eq!(check_lora(&pools[2], split, adapters, n, i, half, p, write), first);
                    }
                }
            }
        }
    }
}

/// Layers with their adapters: the outputs of both in one sum, `dx` through all layers and adapters in one sum.
#[test]
fn a_layer_and_its_adapter_are_one_sum() {
    let (n, i) = (70, 65);
    let shapes: Adapters = &[(33, 4, 0.5), (48, 16, 2.0)];
    let x = narrow(&values(n * i, 1));
    let x64 = f64s(&wide(&x));
    for isa in Isa::available() {
        let pool = Pool::with_isa(2, isa).unwrap();
        let mut workspace = vec![f32::NAN; lora::workspace_bytes(n, i, 48, 16, 2) / 4];
        let seeded = |elems: fn(usize, usize, usize) -> usize, seed: u32| -> Vec<Vec<f32>> {
            shapes.iter().zip(seed..).map(|((o, r, _), seed)| values(elems(*o, *r, 65), seed)).collect()
        };
        let (a, b) = (seeded(|_, r, i| r * i, 10), seeded(|o, r, _| o * r, 20));
        let w: Vec<Vec<bf16>> = seeded(|o, _, i| o * i, 30).iter().map(|w| narrow(w)).collect();
        let dy: Vec<Vec<bf16>> = seeded(|o, _, _| 70 * o, 40).iter().map(|d| narrow(d)).collect();
        let bias = values(48, 50);
        let mut y: Vec<Vec<f32>> = shapes.iter().map(|s| vec![0.25; n * s.0]).collect();
        let mut t: Vec<Vec<f32>> = shapes.iter().map(|s| vec![f32::NAN; n * s.1]).collect();
        let bases = [
            lora_split::Base { w: &w[0], bias: None, write: Write::Add },
            lora_split::Base { w: &w[1], bias: Some(Float::F32(&bias)), write: Write::Set },
        ];
        let mut forward: Vec<_> = (y.iter_mut().zip(&mut t).zip(a.iter().zip(&b)).zip(shapes))
            .map(|(((y, t), (a, b)), s)| lora::Forward { y: FloatMut::F32(y), t, a, b, scale: s.2, outputs: s.0, rank: s.1, site: 0 })
            .collect();
        lora_split::forward(&pool, &mut forward, Some(&bases), &x, n, i, &mut workspace);
        drop(forward);
        workspace.fill(f32::NAN);
        let mut dx = vec![0.5f32; n * i];
        let mut da: Vec<Vec<f32>> = a.iter().map(|a| vec![f32::NAN; a.len()]).collect();
        let mut db: Vec<Vec<f32>> = b.iter().map(|b| vec![f32::NAN; b.len()]).collect();
        let mut backward = Vec::new();
        for (k, (da, db)) in da.iter_mut().zip(&mut db).enumerate() {
            let (outputs, rank, scale) = shapes[k];
            let (dy, t, a, b) = (Float::Bf16(&dy[k]), &t[k][..], &a[k][..], &b[k][..]);
            backward.push(lora::Backward { da, db, write: Write::Set, dy, t, a, b, scale, outputs, rank, site: 0 });
        }
        let weights: Vec<&[bf16]> = w.iter().map(|w| &w[..]).collect();
        let to = Some((FloatMut::F32(&mut dx), Write::Add));
        lora_split::backward(&pool, to, &mut backward, Some(&weights), &x, n, i, &mut workspace);

        let mut want_dx = vec![0.5; n * i];
        for (k, (o, r, scale)) in shapes.iter().copied().enumerate() {
            let (a, b, w, dy) = (f64s(&a[k]), f64s(&b[k]), f64s(&wide(&w[k])), f64s(&wide(&dy[k])));
            let scaled = |v: Vec<f64>| -> Vec<f64> { v.iter().map(|v| v * f64::from(scale)).collect() };
            let want_t = product(&x64, false, &a, true, n, r, i);
            let before: Vec<f64> = (0..n * o).map(|e| if k == 0 { 0.25 } else { f64::from(bias[e % o]) }).collect();
            let low_rank = scaled(product(&want_t, false, &b, true, n, o, r));
            let want_y = add(&add(&product(&x64, false, &w, true, n, o, i), &low_rank), &before);
            let dt = scaled(product(&dy, false, &b, false, n, r, o));
            // Two bf16 hold 17 bits of an adapter, and of t or dt between two products: 2^-17 each.
            close("t", &t[k], &want_t, 1.5e-5);
            close("y", &y[k], &want_y, 1.5e-5);
            close("da", &da[k], &product(&dt, true, &x64, false, r, i, n), 1.5e-5);
            close("db", &db[k], &scaled(product(&dy, true, &want_t, false, o, r, n)), 1.5e-5);
            want_dx = add(&want_dx, &add(&product(&dy, false, &w, false, n, i, o), &product(&dt, false, &a, false, n, i, r)));
        }
        close("dx", &dx, &want_dx, 1.5e-5);
    }
}

#[test]
fn lora_without_gradient_of_the_input() {
    let pool = Pool::new(1).unwrap();
    let (x, dy, t, a, b) = (values(12, 1), values(8, 2), values(8, 3), values(6, 4), values(4, 5));
    let (mut da, mut db) = (vec![0.0; 6], vec![0.0; 4]);
    let mut one = [lora::Backward {
        da: &mut da,
        db: &mut db,
        write: Write::Set,
        dy: Float::F32(&dy),
        t: &t,
        a: &a,
        b: &b,
        scale: 1.0,
        outputs: 2,
        rank: 2,
        site: 0,
    }];
    let mut workspace = vec![0.0; lora::workspace_bytes(4, 3, 2, 2, 1) / 4];
    lora::backward(&pool, None, &mut one, Float::F32(&x), None, 4, 3, &mut workspace);
    assert!(da.iter().chain(&db).all(|v| v.is_finite() && *v != 0.0));
}

/// (loss, dx, dw) in f64.
fn loss_reference(x: &[f64], w: &[f64], labels: &[i32], scale: f64, n: usize, c: usize, v: usize) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let mut logits = product(x, false, w, true, n, v, c);
    let mut loss = vec![0.0; n];
    for r in 0..n {
        let row = &mut logits[r * v..(r + 1) * v];
        if labels[r] < 0 {
            row.fill(0.0);
            continue;
        }
        let max = row.iter().fold(f64::MIN, |m, l| m.max(*l));
        let sum: f64 = row.iter().map(|l| (l - max).exp()).sum();
        loss[r] = sum.ln() + max - row[labels[r] as usize];
        for (j, l) in row.iter_mut().enumerate() {
            *l = scale * ((*l - max).exp() / sum - f64::from(u8::from(j == labels[r] as usize)));
        }
    }
    (loss, product(&logits, false, w, false, n, c, v), product(&logits, true, x, false, v, c, n))
}

#[derive(Clone, Copy, Debug)]
struct LossCase {
    n: usize,
    c: usize,
    v: usize,
    half: bool,
    /// Gradients of logits as bf16.
    narrow: bool,
    in_place: bool,
    write: Write,
    untrained: u32,
}

fn check_loss(pool: &Pool, case: LossCase) -> Vec<Vec<f32>> {
    let LossCase { n, c, v, half, .. } = case;
    let labels: Vec<i32> =
        (0..n as u32).map(|i| if i % 4 < case.untrained { -100 } else { (i.wrapping_mul(2_654_435_761) % v as u32) as i32 }).collect();
    let (xs, ws, dw0) = (Store::new(&values(n * c, 1), half), Store::new(&values(v * c, 2), half), values(v * c, 3));
    let (mut dx, mut dw, mut losses) = (xs.clone(), dw0.clone(), vec![f32::NAN; n]);
    let mut workspace = vec![f32::NAN; loss::workspace_bytes(n, c, v) / 4];
    let scale = 0.37;
    let hidden = match case.in_place {
        true => Hidden::InPlace(dx.get_mut()),
        false => {
            dx = Store::new(&vec![f32::NAN; n * c], half);
            Hidden::Gradient(xs.get(), dx.get_mut())
        }
    };
    let gradient = Some((&mut dw[..], case.write));
    let narrow = case.narrow && half;
    loss::linear_cross_entropy_as(narrow, pool, &mut losses, hidden, gradient, ws.get(), &labels, scale, n, c, v, &mut workspace).unwrap();
    let (want, want_dx, mut want_dw) = loss_reference(&f64s(&xs.f32s()), &f64s(&ws.f32s()), &labels, f64::from(scale), n, c, v);
    if case.write == Write::Add {
        want_dw = add(&want_dw, &f64s(&dw0));
    }
    for (i, (got, want)) in losses.iter().zip(&want).enumerate() {
        // A logit of size 5 is rounded at 5e-7.
        assert!((f64::from(*got) - want).abs() <= 2e-6 + 1e-6 * want, "{case:?} loss {i}: {got} instead of {want}");
    }
    // Softmax amplifies the error of a logit (5e-7 absolute) into a relative error of its probability.
    close("dx", &dx.f32s(), &want_dx, if half { 3e-3 } else { 2e-6 });
    // Gradients of logits rounded to bf16: 2^-9 at most, each for itself.
    close("dw", &dw, &want_dw, if narrow { 3e-3 } else { 2e-6 });
    let mut alone = vec![f32::NAN; n];
    workspace.fill(f32::NAN);
    let read = Hidden::Read(xs.get());
    loss::linear_cross_entropy(pool, &mut alone, read, None, ws.get(), &labels, scale, n, c, v, &mut workspace).unwrap();
    assert_eq!(alone, losses, "the loss is the same with and without gradients");
    vec![losses, dx.f32s(), dw]
}

#[test]
fn loss_and_its_gradients() {
    for isa in Isa::available() {
        let pools = [1, 2, 3].map(|t| Pool::with_isa(t, isa).unwrap());
        for (n, c, v) in [(1, 1, 1), (9, 13, 17), (37, 24, 601), (70, 8, 1030)] {
            for untrained in 0..=4 {
                for (half, narrow, in_place, write) in [
                    (false, false, false, Write::Set),
                    (false, false, true, Write::Add),
                    (true, false, true, Write::Set),
                    (true, true, true, Write::Set),
                    (true, true, false, Write::Add),
                ] {
                    let case = LossCase { n, c, v, half, narrow, in_place, write, untrained };
                    let first = check_loss(&pools[0], case);
                    assert_eq!(check_loss(&pools[1], case), first);
                    assert_eq!(check_loss(&pools[2], case), first);
                }
            }
        }
    }
}

#[test]
fn loss_over_several_chunks() {
    // 150 000 words leave room for 80 tokens in a chunk.
    let case = LossCase { n: 120, c: 2, v: 150_000, half: false, narrow: false, in_place: false, write: Write::Set, untrained: 1 };
    assert!(loss::workspace_bytes(120, 2, 150_000) < 4 * 81 * 150_005);
    check_loss(&Pool::new(2).unwrap(), case);
}

#[test]
fn a_label_outside_the_vocabulary_is_an_error_and_writes_nothing() {
    let pool = Pool::new(1).unwrap();
    let (x, w, mut losses) = (values(4, 1), values(6, 2), vec![9.0f32; 2]);
    let mut workspace = vec![0.0; loss::workspace_bytes(2, 2, 3) / 4];
    let read = Hidden::Read(Float::F32(&x));
    let e = loss::linear_cross_entropy(&pool, &mut losses, read, None, Float::F32(&w), &[1, 3], 1.0, 2, 2, 3, &mut workspace);
    assert!(e.unwrap_err().to_string().contains("label 3 of token 1"));
    assert_eq!(losses, [9.0; 2]);
}

#[test]
fn a_nan_input_reaches_its_loss_and_no_other() {
    let pool = Pool::new(1).unwrap();
    let (mut x, w, mut losses) = (values(3 * 5, 1), values(40 * 5, 2), vec![0.0f32; 3]);
    x[7] = f32::NAN;
    let mut workspace = vec![0.0; loss::workspace_bytes(3, 5, 40) / 4];
    let read = Hidden::Read(Float::F32(&x));
    loss::linear_cross_entropy(&pool, &mut losses, read, None, Float::F32(&w), &[1, 3, 5], 1.0, 3, 5, 40, &mut workspace).unwrap();
    assert_eq!(losses.iter().map(|l| l.is_nan()).collect::<Vec<_>>(), [false, true, false]);
}

#[test]
fn gradients_are_those_of_finite_differences() {
    // Of the f64 reference, which the tests above hold our results to: so its formulas are checked by themselves.
    let (n, c, v, h) = (4, 3, 7, 1e-5);
    let (x, w, labels) = (f64s(&values(n * c, 1)), f64s(&values(v * c, 2)), [2, -1, 6, 0]);
    let total = |x: &[f64], w: &[f64]| 0.5 * loss_reference(x, w, &labels, 0.5, n, c, v).0.iter().sum::<f64>();
    let (_, dx, dw) = loss_reference(&x, &w, &labels, 0.5, n, c, v);
    for (which, gradient) in [(0, dx), (1, dw)] {
        for (e, g) in gradient.iter().enumerate() {
            let mut sides = [0.0; 2];
            for (side, step) in sides.iter_mut().zip([h, -h]) {
                let (mut x, mut w) = (x.clone(), w.clone());
                if which == 0 {
                    x[e] += step
                } else {
                    w[e] += step
                }
                *side = total(&x, &w);
            }
            // Central differences: error of order h^2, and rounding of 1e-16 / h.
            assert!(((sides[0] - sides[1]) / (2.0 * h) - g).abs() < 1e-8);
        }
    }
}

#[test]
fn dimensions_of_one() {
    for (n, i, o) in [(26, 1, 20), (1, 1, 1), (7, 5, 1), (1, 33, 2)] {
        let pool = Pool::new(1).unwrap();
        check_linear(&pool, n, i, o, false, Write::Set);
        check_lora(&pool, false, &[(o, 2, 1.5)], n, i, false, 0.0, Write::Add);
        check_loss(&pool, LossCase { n, c: i, v: o.max(2), half: false, narrow: false, in_place: false, write: Write::Set, untrained: 0 });
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn any_shape((n, i, o) in (1usize..90, 8usize..80, 8usize..80), half: bool, set: bool, threads in 1usize..4) {
        let write = if set { Write::Set } else { Write::Add };
        let pool = Pool::new(threads).unwrap();
        check_linear(&pool, n, i, o, half, write);
        check_lora(&pool, !set, &[(o, 1 + i % 9, 1.5), (i, 1 + o % 5, 0.5)], n, i, half, if set { 0.1 } else { 0.0 }, write);
        check_loss(&pool, LossCase { n, c: i, v: o, half, narrow: !set, in_place: set, write, untrained: n as u32 % 4 });
    }
}
