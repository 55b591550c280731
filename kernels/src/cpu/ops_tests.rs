//! Does a method of `Ops` hand the right operands to the right function? Every operation once through a device, in all modes
//! and both storage types, with asymmetric sizes so that a swapped number or operand shows; results are compared, to the bit
//! where there is one order, with naive ones or with the functions, which have tests of their own.

use super::reference::{Values, assert_close, rounding};
use super::*;
use crate::device::HostSource;
use crate::{AdamW, Attention, DType, Dropout, LoraBackward, LoraForward, OpShape, View, ViewMut, Weight, Write};
use std::time::Duration;

const LONG: Duration = Duration::from_secs(120);
const MODES: [Mode; 3] = [Mode::Threaded, Mode::Inline, Mode::Chaos { seed: 3 }];

/// A device with one stream, whose operands are of one storage type.
struct Bench {
    device: Arc<CpuDevice>,
    s: Arc<dyn Stream>,
    bf16: bool,
}

impl Bench {
    fn new(mode: Mode, bf16: bool) -> Bench {
        let device = CpuDevice::new(CpuOptions { threads: 2, mode, track: false, trace: false }).unwrap();
        let s = device.stream("s").unwrap();
        Bench { device, s, bf16 }
    }

    fn alloc(&self, dtype: DType, elems: usize) -> ViewMut {
        let buffer = self.device.alloc("t", elems * dtype.bytes(), Place::Device, Category::Workspace).unwrap();
        let view = buffer.all(dtype).unwrap();
        // What an operation does not write shows.
        if matches!(dtype, DType::F32 | DType::BF16) {
            self.s.fill(&view, f32::NAN).unwrap();
        }
        view
    }

    fn float(&self, elems: usize) -> ViewMut {
        self.alloc(if self.bf16 { DType::BF16 } else { DType::F32 }, elems)
    }

    fn f32(&self, elems: usize) -> ViewMut {
        self.alloc(DType::F32, elems)
    }

    fn upload(&self, view: &ViewMut, bytes: Vec<u8>) {
        let source: HostSource = Box::new(move |to| {
            to.copy_from_slice(&bytes);
            Ok(())
        });
        self.s.write(view, "test data", source).unwrap();
    }

    fn stored(&self, x: &Values) -> ViewMut {
        let (dtype, elems, bytes): (_, _, &[u8]) = match x {
            Values::F32(x) => (DType::F32, x.len(), bytemuck::cast_slice(x)),
            Values::Bf16(x) => (DType::BF16, x.len(), bytemuck::cast_slice(x)),
        };
        let view = self.alloc(dtype, elems);
        self.upload(&view, bytes.to_vec());
        view
    }

    /// Random operands of the bench's type, and their values.
    fn random(&self, elems: usize, seed: u32) -> (ViewMut, Vec<f64>) {
        let x = Values::random(elems, self.bf16, seed);
        (self.stored(&x), x.f64s())
    }

    fn random_f32(&self, elems: usize, seed: u32) -> (ViewMut, Vec<f64>) {
        let x = Values::random(elems, false, seed);
        (self.stored(&x), x.f64s())
    }

    fn ints(&self, x: &[i32]) -> View {
        let view = self.alloc(DType::I32, x.len());
        self.upload(&view, bytemuck::cast_slice(x).to_vec());
        view.view()
    }

    /// Workspace of exactly the bytes asked for, at an odd address.
    fn scratch(&self, shape: OpShape) -> ViewMut {
        let bytes = self.device.ops().workspace_bytes(shape);
        self.alloc(DType::U8, bytes + 1).slice(1, bytes).unwrap()
    }

    fn get(&self, view: &View) -> Vec<f32> {
        let bytes = self.s.read(view).unwrap().bytes(LONG).unwrap();
        match view.dtype() {
            DType::F32 => bytes.chunks_exact(4).map(bytemuck::pod_read_unaligned).collect(),
            _ => bytes.chunks_exact(2).map(|x| bytemuck::pod_read_unaligned::<half::bf16>(x).to_f32()).collect(),
        }
    }

    fn close(&self, what: &str, got: &View, want: &[f64]) {
        let factor = if got.dtype() == DType::BF16 { 2.0 * rounding(true) } else { 4e-6 };
        assert_close(what, &self.get(got), want, factor);
    }
}

/// `a [m, k] b [n, k]^T`.
fn times(a: &[f64], b: &[f64], m: usize, n: usize, k: usize) -> Vec<f64> {
    (0..m * n).map(|i| (0..k).map(|c| a[i / n * k + c] * b[i % n * k + c]).sum()).collect()
}

/// `[rows, cols]` to `[cols, rows]`.
fn flip(x: &[f64], rows: usize, cols: usize) -> Vec<f64> {
    (0..rows * cols).map(|i| x[i % rows * cols + i / rows]).collect()
}

fn plus(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

fn everywhere(test: impl Fn(&Bench, &dyn Ops, &dyn Stream)) {
    for mode in MODES {
        for bf16 in [false, true] {
            let bench = Bench::new(mode, bf16);
            test(&bench, bench.device.ops(), &*bench.s);
        }
    }
}

#[test]
fn embedding_norm_and_rope() {
    everywhere(|b, ops, s| {
        let (n, c, v) = (5, 6, 9);
        let ((table, t), (dy, d)) = (b.random(v * c, 1), b.random(n * c, 2));
        let rows = [3, 8, 3, 0, 1];
        let ids = b.ints(&rows);
        let (y, dtable) = (b.float(n * c), b.f32(v * c));
        ops.embedding(&y, &table, &ids, c, s).unwrap();
        let scratch = b.scratch(OpShape::EmbeddingBackward { tokens: n, hidden: c, vocab: v });
        ops.embedding_backward(&dtable, Write::Set, &dy, &ids, c, &scratch, s).unwrap();
        let mut dt = vec![0.0; v * c];
        let mut want = Vec::new();
        for (row, d) in rows.iter().zip(d.chunks(c)) {
            want.extend_from_slice(&t[*row as usize * c..][..c]);
            dt[*row as usize * c..][..c].iter_mut().zip(d).for_each(|(t, d)| *t += d);
        }
        b.close("embedding", &y, &want);
        b.close("dtable", &dtable, &dt);

        let ((w, wv), rstd) = (b.random(c, 3), b.f32(n));
        let (h, dx, dw) = (b.float(n * c), b.float(n * c), b.f32(c));
        ops.rmsnorm(&h, &rstd, &y, &w, 0.5, n, c, s).unwrap();
        let scratch = b.scratch(OpShape::RmsNormBackward { rows: n, cols: c });
        ops.rmsnorm_backward(Some((&dx, Write::Set)), Some((&dw, Write::Set)), &dy, &y, &rstd, &w, n, c, &scratch, s).unwrap();
        let (mut hv, mut dxv, mut dwv) = (vec![], vec![], vec![0.0; c]);
        for (x, d) in want.chunks(c).zip(d.chunks(c)) {
            let r = 1.0 / (x.iter().map(|x| x * x).sum::<f64>() / c as f64 + 0.5).sqrt();
            let mean = (0..c).map(|i| d[i] * wv[i] * x[i] * r).sum::<f64>() / c as f64;
            hv.extend((0..c).map(|i| x[i] * r * wv[i]));
            dxv.extend((0..c).map(|i| r * (d[i] * wv[i] - x[i] * r * mean)));
            (0..c).for_each(|i| dwv[i] += d[i] * x[i] * r);
        }
        b.close("rmsnorm", &h, &hv);
        b.close("dx", &dx, &dxv);
        b.close("dweight", &dw, &dwv);

        // Rows of positions differ; heads * D = C.
        let (table, t) = b.random_f32(7 * 2, 4);
        let positions = b.ints(&[6, 0, 2, 2, 5]);
        ops.rope(&h, &table, &positions, 3, 2, s).unwrap();
        ops.rope_backward(&dx, &table, &positions, 3, 2, s).unwrap();
        for (n, p) in [6, 0, 2, 2, 5].into_iter().enumerate() {
            let (cos, sin) = (t[p * 2], t[p * 2 + 1]);
            for i in (n * c..(n + 1) * c).step_by(2) {
                (hv[i], hv[i + 1]) = (hv[i] * cos - hv[i + 1] * sin, hv[i + 1] * cos + hv[i] * sin);
                (dxv[i], dxv[i + 1]) = (dxv[i] * cos + dxv[i + 1] * sin, dxv[i + 1] * cos - dxv[i] * sin);
            }
        }
        b.close("rope", &h, &hv);
        b.close("rope_backward", &dx, &dxv);
    });
}

#[test]
fn linear_and_lora() {
    everywhere(|b, ops, s| {
        let (n, i, o, r) = (5, 7, 4, 3);
        let ((x, xv), (w, wv), (bias, bv), (dy, d)) = (b.random(n * i, 1), b.random(o * i, 2), b.random(o, 3), b.random(n * o, 4));
        let weight = Weight::from(w.view());
        let y = b.float(n * o);
        ops.linear(&y, Write::Set, &x, &weight, Some(&bias), n, i, o, s).unwrap();
        let mut want: Vec<f64> = times(&xv, &wv, n, o, i).iter().enumerate().map(|(e, y)| y + bv[e % o]).collect();
        b.close("linear", &y, &want);

        let (dx, (dw, before), dbias) = (b.float(n * i), b.random_f32(o * i, 5), b.f32(o));
        let scratch = b.scratch(OpShape::LinearBackward { tokens: n, inputs: i, outputs: o });
        let grads = (Some((&dx, Write::Set)), Some((&dw, Write::Add)), Some((&dbias, Write::Set)));
        ops.linear_backward(grads.0, grads.1, grads.2, &dy, Some(&x), &weight, n, i, o, &scratch, s).unwrap();
        let mut dxv = times(&d, &flip(&wv, o, i), n, i, o);
        b.close("dx", &dx, &dxv);
        b.close("dw", &dw, &plus(&before, &times(&flip(&d, n, o), &flip(&xv, n, i), o, i, n)));
        b.close("dbias", &dbias, &times(&flip(&d, n, o), &vec![1.0; n], o, 1, n));

        // Two adapters of one input; the second has another width and rank.
        let dims = [(o, r), (2, 5)];
        let (y2, _) = b.random(n * 2, 6);
        let (dy2, d2) = b.random(n * 2, 7);
        let dropout = Some(Dropout { p: 0.25, seed: 9, step: 1, micro_batch: 2 });
        let (mut fw, mut bw, mut naive) = (Vec::new(), Vec::new(), Vec::new());
        for (k, (o, r)) in dims.into_iter().enumerate() {
            let ((a, av), (bb, bbv)) = (b.random_f32(r * i, 10 + k as u32), b.random_f32(o * r, 20 + k as u32));
            let (site, scale) = (40 + k as u32, 0.5 + k as f32);
            let (y, t) = ([&y, &y2][k].clone(), b.f32(n * r));
            let (da, db, dy) = (b.f32(r * i), b.f32(o * r), [&dy, &dy2][k].view());
            bw.push(LoraBackward {
                da,
                db,
                write: Write::Set,
                dy,
                t: t.view(),
                a: a.view(),
                b: bb.view(),
                scale,
                outputs: o,
                rank: r,
                site,
            });
            fw.push(LoraForward { y, t, a: a.view(), b: bb.view(), scale, outputs: o, rank: r, site });
            naive.push((av, bbv, [&d, &d2][k]));
        }
        let scratch = b.scratch(OpShape::Lora { tokens: n, inputs: i, outputs: o, rank: 5, adapters: 2 });
        ops.lora(&fw, &x, dropout, n, i, &scratch, s).unwrap();
        ops.lora_backward(Some(&dx), &bw, &x, dropout, n, i, &scratch, s).unwrap();
        for (k, (o, r)) in dims.into_iter().enumerate() {
            let (a, bb, d) = &naive[k];
            let mask = dropout::Mask::new(dropout, 40 + k as u32).unwrap();
            let factor: Vec<f64> = (0..n * i).map(|e| f64::from(mask.factor(e as u64))).collect();
            let dropped: Vec<f64> = xv.iter().zip(&factor).map(|(x, f)| x * f).collect();
            let scaled = |x: Vec<f64>| x.iter().map(|x| x * (0.5 + k as f64)).collect::<Vec<_>>();
            let t = times(&dropped, a, n, r, i);
            b.close("t", &fw[k].t, &t);
            if k == 0 {
                want = plus(&want, &scaled(times(&t, bb, n, o, r)));
            }
            let dt = scaled(times(d, &flip(bb, o, r), n, r, o));
            b.close("db", &bw[k].db, &scaled(times(&flip(d, n, o), &flip(&t, n, r), o, r, n)));
            b.close("da", &bw[k].da, &times(&flip(&dt, n, r), &flip(&dropped, n, i), r, i, n));
            let back: Vec<f64> = times(&dt, &flip(a, r, i), n, i, r).iter().zip(&factor).map(|(g, f)| g * f).collect();
            dxv = plus(&dxv, &back);
        }
        b.close("lora", &y, &want);
        b.close("dx", &dx, &dxv);
    });
}

#[test]
fn attention_and_swiglu() {
    everywhere(|b, ops, s| {
        let (n, heads, kv_heads, d) = (11, 4, 2, 6);
        let shape = Attention { heads, kv_heads, head_dim: d, window: Some(3), scale: 0.4 };
        let (qn, kn) = (n * heads * d, n * kv_heads * d);
        let ((q, qv), (k, kv), (v, vv), (dout, dv)) = (b.random(qn, 1), b.random(kn, 2), b.random(kn, 3), b.random(qn, 4));
        let bounds = b.ints(&[0, 4, 11, -1, -1, -1, -1, -1, -1, -1, -1, -1]);
        let (o, lse, dq, dk, dvv) = (b.float(qn), b.f32(n * heads), b.float(qn), b.float(kn), b.float(kn));
        let scratch = b.scratch(OpShape::Attention { tokens: n, shape });
        ops.attention(&o, &lse, &q, &k, &v, &bounds, 2, n, shape, &scratch, s).unwrap();
        ops.attention_backward(&dq, &dk, &dvv, &dout, &q, &k, &v, &o, &lse, &bounds, 2, n, shape, &scratch, s).unwrap();
        let (mut ow, mut lw) = (vec![0.0; qn], vec![0.0; n * heads]);
        let (mut dqw, mut dkw, mut dvw) = (vec![0.0; qn], vec![0.0; kn], vec![0.0; kn]);
        for i in 0..n {
            for h in 0..heads {
                let row = (i * heads + h) * d;
                let key = |j: usize| (j * kv_heads + h / 2) * d;
                let low = (if i < 4 { 0 } else { 4 }).max((i + 1).saturating_sub(3));
                let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
                let e: Vec<f64> = (low..=i).map(|j| (f64::from(0.4f32) * dot(&qv[row..row + d], &kv[key(j)..key(j) + d])).exp()).collect();
                let total: f64 = e.iter().sum();
                lw[i * heads + h] = total.ln();
                let dp: Vec<f64> = (low..=i).map(|j| dot(&dv[row..row + d], &vv[key(j)..key(j) + d])).collect();
                let delta: f64 = e.iter().zip(&dp).map(|(e, dp)| e / total * dp).sum();
                for (j, (e, dp)) in (low..=i).zip(e.iter().zip(&dp)) {
                    let (p, ds) = (e / total, e / total * (dp - delta) * 0.4);
                    for c in 0..d {
                        ow[row + c] += p * vv[key(j) + c];
                        dvw[key(j) + c] += p * dv[row + c];
                        dqw[row + c] += ds * kv[key(j) + c];
                        dkw[key(j) + c] += ds * qv[row + c];
                    }
                }
            }
        }
        b.close("o", &o, &ow);
        b.close("lse", &lse, &lw);
        // The rounded output enters the gradients of bf16.
        for (name, got, want) in [("dq", &dq, &dqw), ("dk", &dk, &dkw), ("dv", &dvv, &dvw)] {
            assert_close(name, &b.get(got), want, if b.bf16 { 2e-2 } else { 4e-6 });
        }

        let (h, dg, du) = (b.float(qn), b.float(qn), b.float(qn));
        ops.swiglu(&h, &q, &dout, s).unwrap();
        ops.swiglu_backward(&dg, &du, &dq, &q, &dout, s).unwrap();
        let dh = b.get(&dq);
        let sig = |x: f64| 1.0 / (1.0 + (-x).exp());
        let (g, u) = (&qv, &dv);
        b.close("h", &h, &(0..qn).map(|i| g[i] * sig(g[i]) * u[i]).collect::<Vec<_>>());
        b.close("dup", &du, &(0..qn).map(|i| f64::from(dh[i]) * g[i] * sig(g[i])).collect::<Vec<_>>());
        let slope = |x: f64| sig(x) * (1.0 + x * (1.0 - sig(x)));
        b.close("dgate", &dg, &(0..qn).map(|i| f64::from(dh[i]) * u[i] * slope(g[i])).collect::<Vec<_>>());
    });
}

#[test]
fn cross_entropy_with_its_gradient_apart_and_in_place() {
    everywhere(|b, ops, s| {
        let (n, c, v) = (5, 6, 9);
        let ((x, xv), (w, wv)) = (b.random(n * c, 1), b.random(v * c, 2));
        let labels = [4, -100, 0, 8, -1];
        let ids = b.ints(&labels);
        let (loss, dx, dw) = (b.f32(n), b.float(n * c), b.f32(v * c));
        let weight = Weight::from(w.view());
        let scratch = b.scratch(OpShape::LinearCrossEntropy { tokens: n, hidden: c, vocab: v });
        ops.linear_cross_entropy(&loss, None, None, &x, &weight, &ids, 1.0, n, c, v, &scratch, s).unwrap();
        let only = b.get(&loss);
        ops.linear_cross_entropy(&loss, Some(&dx), Some((&dw, Write::Set)), &x, &weight, &ids, 0.5, n, c, v, &scratch, s).unwrap();
        ops.linear_cross_entropy(&loss, Some(&x), None, &x, &weight, &ids, 0.5, n, c, v, &scratch, s).unwrap();
        let logits = times(&xv, &wv, n, v, c);
        let (mut lw, mut g) = (vec![0.0; n], vec![0.0; n * v]);
        for (i, label) in labels.iter().enumerate().filter(|(_, l)| **l >= 0) {
            let row = &logits[i * v..][..v];
            let total: f64 = row.iter().map(|l| l.exp()).sum();
            lw[i] = total.ln() - row[*label as usize];
            (0..v).for_each(|j| g[i * v + j] = 0.5 * (row[j].exp() / total - f64::from(u8::from(j == *label as usize))));
        }
        b.close("loss", &loss, &lw);
        assert_eq!(only, b.get(&loss));
        b.close("dx", &dx, &times(&g, &flip(&wv, v, c), n, c, v));
        assert_eq!(b.get(&x), b.get(&dx));
        // Gradients of logits may be rounded to bf16 for the product.
        let dww = times(&flip(&g, n, v), &flip(&xv, n, c), v, c, n);
        assert_close("dw", &b.get(&dw), &dww, if b.bf16 { rounding(true) } else { 4e-6 });
    });
}

#[test]
fn elements_norm_and_update() {
    everywhere(|b, ops, s| {
        let n = 2500;
        let ((x, xv), (y, yv)) = (b.random(n, 1), b.random(n, 2));
        let ((p, pv), (g, gv)) = (b.random_f32(n, 3), b.random_f32(n, 4));
        ops.add_into(&y, &x, s).unwrap();
        b.close("add_into", &y, &plus(&xv, &yv));
        ops.scale(&x, -2.0, s).unwrap();
        b.close("scale", &x, &xv.iter().map(|x| -2.0 * x).collect::<Vec<_>>());
        let (wide, out, count) = (b.f32(n), b.f32(n), b.f32(1));
        ops.cast(&wide, &x, s).unwrap();
        ops.add(&out, &wide, &g, s).unwrap();
        let sums: Vec<f64> = xv.iter().zip(&gv).map(|(x, g)| -2.0 * x + g).collect();
        b.close("add", &out, &sums);
        ops.sum(&count, &out, s).unwrap();
        // Cancellation: relative to the magnitude of the terms, one rounding each.
        assert!((f64::from(b.get(&count)[0]) - sums.iter().sum::<f64>()).abs() < 1e-7 * n as f64);
        ops.count_nonfinite(&count, &x, s).unwrap();
        assert_eq!(b.get(&count), [0.0]);

        let (nodes, norm, scale) = (b.f32(96), b.f32(1), b.f32(1));
        let scratch = b.scratch(OpShape::SumSquares { elems: n });
        ops.sum_squares(&nodes, &g, 4, &scratch, s).unwrap();
        ops.clip_scale(&norm, &scale, &nodes, &[(4, 3)], 1, 1, Some(1.0), s).unwrap();
        let want = gv.iter().map(|g| g * g).sum::<f64>().sqrt();
        b.close("norm", &norm, &[want]);
        b.close("scale", &scale, &[1.0 / (want + 1e-6)]);
        assert!(ops.clip_scale(&norm, &scale, &nodes, &[(4, 3), (6, 1)], 2, 1, None, s).is_err());

        let (m, v, copy) = (b.f32(n), b.f32(n), b.float(n));
        s.fill(&m, 0.0).unwrap();
        s.fill(&v, 0.0).unwrap();
        let hp = AdamW { lr: 0.01, beta1: 0.9, beta2: 0.99, eps: 1e-6, weight_decay: 0.1, step: 1 };
        ops.adamw(&p, &m, &v, Some(&copy), &g, &scale, hp, s).unwrap();
        let clip = 1.0 / (want + 1e-6);
        b.close("m", &m, &gv.iter().map(|g| 0.1 * g * clip).collect::<Vec<_>>());
        b.close("v", &v, &gv.iter().map(|g| 0.01 * (g * clip).powi(2)).collect::<Vec<_>>());
        let first: Vec<f64> = pv.iter().zip(&gv).map(|(p, g)| p * (1.0 - 1e-3) - 0.01 * (g * clip) / ((g * clip).abs() + 1e-6)).collect();
        b.close("param", &p, &first);
        b.close("copy", &copy, &first);
    });
}

#[test]
fn a_bad_id_fails_the_stream_and_is_named() {
    let b = Bench::new(Mode::Threaded, false);
    let (y, (table, _), ids) = (b.float(6), b.random(8, 1), b.ints(&[0, 1, 4]));
    b.device.ops().embedding(&y, &table, &ids, 2, &*b.s).unwrap();
    let error = b.s.sync().unwrap_err().to_string();
    assert!(error.contains("embedding") && error.contains("id 4 at row 2 is out of 0..4"), "{error}");
}

#[test]
fn workspace_is_a_function_of_the_shape() {
    let sizes = |threads| {
        let d = CpuDevice::new(CpuOptions { threads, mode: Mode::Inline, track: false, trace: false }).unwrap();
        [
            OpShape::RmsNormBackward { rows: 1000, cols: 576 },
            OpShape::SumSquares { elems: 1 << 20 },
            OpShape::LinearCrossEntropy { tokens: 1000, hidden: 576, vocab: 49152 },
            OpShape::Lora { tokens: 1000, inputs: 576, outputs: 1536, rank: 16, adapters: 3 },
        ]
        .map(|shape| d.ops().workspace_bytes(shape))
    };
    assert_eq!(sizes(1), sizes(3));
}
