//! Flash attention on emulated GPUs against `f64`, against an oracle that rounds what the kernels round, and against the CPU: all
//! kernel widths and those between, both types, documents of odd lengths, groups of heads, windows, operands that begin anywhere.

use half::bf16;
use zrt_kernels::gpu::attention::{HEAD_DIMS, forward_tiles, traffic};
use zrt_kernels::gpu::launch::Arch;
use zrt_kernels::{Attention, DType, OpShape};
use zrt_simt::testing::{ARCHS, Rig, assert_bits, assert_close, can_run, normal, on, rounding, wide};
use zrt_simt::{Counters, SimtDevice, SimtOptions};

#[derive(Clone)]
struct Case {
    documents: Vec<usize>,
    shape: Attention,
    dtype: DType,
    skew: usize,
}

fn case(documents: &[usize], heads: usize, kv_heads: usize, head_dim: usize, window: Option<usize>, dtype: DType) -> Case {
    let scale = 1.0 / (head_dim as f32).sqrt();
    Case { documents: documents.to_vec(), shape: Attention { heads, kv_heads, head_dim, window, scale }, dtype, skew: 0 }
}

impl Case {
    fn tokens(&self) -> usize {
        self.documents.iter().sum()
    }

    fn bounds(&self) -> Vec<i32> {
        let mut bounds = vec![0];
        bounds.extend(self.documents.iter().scan(0, |at, n| {
            *at += *n as i32;
            Some(*at)
        }));
        // What lies behind the last boundary is ignored.
        bounds.resize(self.tokens() + 1, -7);
        bounds
    }

    fn inputs(&self) -> Inputs {
        let n = self.tokens() * self.shape.head_dim;
        let make = |heads: usize, seed| normal(n * heads, self.dtype, seed);
        let (h, k) = (self.shape.heads, self.shape.kv_heads);
        Inputs { q: make(h, 1), k: make(k, 2), v: make(k, 3), dout: make(h, 4) }
    }

    fn name(&self) -> String {
        format!("documents {:?}, {:?}, {}, skew {}", self.documents, self.shape, self.dtype, self.skew)
    }
}

#[derive(Clone)]
struct Inputs {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    dout: Vec<f32>,
}

/// o, lse, dq, dk, dv.
fn run(rig: &Rig, case: &Case, x: &Inputs) -> Vec<Vec<f32>> {
    let rig = &rig.skewed(case.skew);
    let (ops, s, tokens, shape, t) = (rig.ops(), rig.stream(), case.tokens(), case.shape, case.dtype);
    let bounds = rig.ints(&case.bounds());
    let (q, k, v) = (rig.tensor(&x.q, t), rig.tensor(&x.k, t), rig.tensor(&x.v, t));
    let (o, lse) = (rig.empty(x.q.len(), t), rig.empty(tokens * shape.heads, DType::F32));
    let work = rig.workspace(OpShape::Attention { tokens, shape });
    ops.attention(&o, &lse, &q, &k, &v, &bounds, case.documents.len(), tokens, shape, &work, s).unwrap();
    let dout = rig.tensor(&x.dout, t);
    let (dq, dk, dv) = (rig.empty(x.q.len(), t), rig.empty(x.k.len(), t), rig.empty(x.v.len(), t));
    ops.attention_backward(&dq, &dk, &dv, &dout, &q, &k, &v, &o, &lse, &bounds, case.documents.len(), tokens, shape, &work, s).unwrap();
    [&o, &lse, &dq, &dk, &dv].map(|v| rig.read(v)).into()
}

/// What an oracle does with a probability or its gradient before a product with it.
type Round = fn(f64) -> f64;

fn exact(x: f64) -> f64 {
    x
}

fn to_bf16(x: f64) -> f64 {
    f64::from(bf16::from_f64(x))
}

/// Forward in f64. `rows`, `step`: tiles of rows (token, head of the group) and of keys, which decide at which maximum a
/// probability is rounded. Returns o, lse.
fn forward(case: &Case, x: &Inputs, round: Round, rows: usize, step: usize) -> (Vec<f64>, Vec<f64>) {
    let Attention { heads, kv_heads, head_dim: d, window, scale } = case.shape;
    let g = heads / kv_heads;
    let (q, k, v) = (wide(&x.q), wide(&x.k), wide(&x.v));
    let (mut o, mut lse) = (vec![0.0; q.len()], vec![0.0; case.tokens() * heads]);
    let mut start = 0;
    for n in &case.documents {
        for h in 0..heads {
            for i in 0..*n {
                let row = ((start + i) * heads + h) * d;
                let key = |j: usize| ((start + j) * kv_heads + h / g) * d;
                let first_token = (i * g + h % g) / rows * rows / g;
                let seen_from = |token: usize| window.map_or(0, |w| (token + 1).saturating_sub(w));
                let (mut top, mut total, mut acc) = (f64::NEG_INFINITY, 0.0, vec![0.0; d]);
                for tile in (seen_from(first_token)..=i).step_by(step) {
                    let keys = tile.max(seen_from(i))..=i.min(tile + step - 1);
                    let s: Vec<f64> =
                        keys.clone().map(|j| f64::from(scale) * (0..d).map(|c| q[row + c] * k[key(j) + c]).sum::<f64>()).collect();
                    let now = s.iter().fold(top, |a, b| a.max(*b));
                    if now == f64::NEG_INFINITY {
                        continue;
                    }
                    let decay = (top - now).exp();
                    acc.iter_mut().for_each(|a| *a *= decay);
                    total *= decay;
                    for (j, s) in keys.zip(&s) {
                        let p = (s - now).exp();
                        total += p;
                        (0..d).for_each(|c| acc[c] += round(p) * v[key(j) + c]);
                    }
                    top = now;
                }
                lse[(start + i) * heads + h] = top + total.ln();
                (0..d).for_each(|c| o[row + c] = acc[c] / total);
            }
        }
        start += n;
    }
    (o, lse)
}

fn width(head_dim: usize) -> usize {
    *HEAD_DIMS.iter().find(|w| head_dim <= **w).unwrap()
}

/// f32: sums of up to 256 products in f32, and exponents of about 10 with an error of one in 2^24 of them.
const F32: f64 = 1e-5;

fn check(case: &Case, archs: &[&'static str]) {
    let x = case.inputs();
    let (cpu, gpus) = on(archs, |rig| run(rig, case, &x));
    let (o, lse) = forward(case, &x, exact, usize::MAX, usize::MAX);
    for gpu in &gpus {
        let who = format!("{} on {}", case.name(), gpu.arch);
        let cut = forward_tiles(&Arch::known(gpu.arch).unwrap(), case.dtype, width(case.shape.head_dim));
        let round = if case.dtype == DType::BF16 { to_bf16 } else { exact };
        let (o_rounded, _) = forward(case, &x, round, cut.rows, cut.step);
        let close = if case.dtype == DType::BF16 { rounding(DType::BF16) } else { F32 };
        assert_close(&format!("o of {who}"), &gpu.outputs[0], &o_rounded, close);
        assert_close(&format!("lse of {who}"), &gpu.outputs[1], &lse, F32);
        assert_close(&format!("o beside the CPU's of {who}"), &gpu.outputs[0], &wide(&cpu[0]), 2.0 * close);
        // The CPU's gradients, held to differences by its own tests, from its own output: in bf16 both outputs were rounded, and here
        // probabilities and their gradients too.
        for (i, name) in ["dq", "dk", "dv"].iter().enumerate() {
            let close = if case.dtype == DType::BF16 { 4.0 * close } else { F32 };
            assert_close(&format!("{name} beside the CPU's of {who}"), &gpu.outputs[2 + i], &wide(&cpu[2 + i]), close);
        }
        // What rounding of probabilities adds is of the order of the output's own rounding.
        assert_close(&format!("o against f64 of {who}"), &gpu.outputs[0], &o, 2.0 * close);
    }
}

#[test]
fn every_width() {
    if !can_run() {
        return;
    }
    for dim in HEAD_DIMS {
        check(&case(&[37, 1, 70], 4, 2, dim, None, DType::BF16), &ARCHS);
        check(&case(&[5, 41], 2, 1, dim, None, DType::F32), &["sm_90", "gfx942"]);
    }
}

const TWO: [&str; 2] = ["sm_90", "gfx942"];

#[test]
fn windows() {
    if !can_run() {
        return;
    }
    // With a window of 1 gradients are zero but for rounding.
    for window in [2, 17, 64] {
        check(&case(&[90, 21], 4, 2, 64, Some(window), DType::BF16), &TWO);
    }
    check(&case(&[40], 2, 2, 64, Some(5), DType::F32), &TWO);
}

#[test]
fn rows_that_begin_anywhere() {
    if !can_run() {
        return;
    }
    check(&Case { skew: 1, ..case(&[37, 9], 2, 1, 64, None, DType::BF16) }, &TWO);
    check(&Case { skew: 1, ..case(&[21], 2, 1, 40, Some(9), DType::F32) }, &TWO);
    check(&case(&[33], 3, 3, 10, None, DType::BF16), &TWO);
}

#[test]
fn documents_change_no_bit_of_each_other() {
    if !can_run() {
        return;
    }
    for dtype in [DType::F32, DType::BF16] {
        let packed = case(&[23, 50], 4, 2, 64, Some(20), dtype);
        let (x, alone) = (packed.inputs(), Case { documents: vec![50], ..packed.clone() });
        let (q, k) = (23 * 4 * 64, 23 * 2 * 64);
        let tail = Inputs { q: x.q[q..].to_vec(), k: x.k[k..].to_vec(), v: x.v[k..].to_vec(), dout: x.dout[q..].to_vec() };
        let (_, together) = on(&TWO, |rig| run(rig, &packed, &x));
        let (_, single) = on(&TWO, |rig| run(rig, &alone, &tail));
        for (together, single) in together.iter().zip(&single) {
            for ((name, skip), (a, b)) in
                [("o", q), ("lse", 23 * 4), ("dq", q), ("dk", k), ("dv", k)].iter().zip(together.outputs.iter().zip(&single.outputs))
            {
                assert_bits(&format!("{name} {dtype} on {}", together.arch), &a[*skip..], b);
            }
        }
    }
}

#[test]
fn boundaries_that_are_none_are_an_error() {
    if !can_run() {
        return;
    }
    let c = case(&[50], 2, 1, 64, None, DType::BF16);
    let (x, shape) = (c.inputs(), c.shape);
    // Too far back, beyond the tokens, not at their end, not from 0, negative.
    for (bounds, row) in [(vec![0, 30, 20, 50], 2), (vec![0, 60, 50], 2), (vec![0, 40], 1), (vec![1, 50], 0), (vec![0, -5, 50], 1)] {
        on(&TWO, |rig| {
            let documents = bounds.len() - 1;
            let mut padded = bounds.clone();
            padded.resize(51, 50);
            for backward in [false, true] {
                // A stream that failed stays failed.
                let rig = Rig::new(rig.device().clone());
                let (ops, s, b) = (rig.ops(), rig.stream(), rig.ints(&padded));
                let [q, k, v, dout] = [&x.q, &x.k, &x.v, &x.dout].map(|v| rig.tensor(v, DType::BF16));
                let (o, lse) = (rig.tensor(&x.q, DType::BF16), rig.tensor(&[1.0; 100], DType::F32));
                let work = rig.workspace(OpShape::Attention { tokens: 50, shape });
                let [dq, dk, dv] = [&x.q, &x.k, &x.v].map(|v| rig.empty(v.len(), DType::BF16));
                let called = if backward {
                    ops.attention_backward(&dq, &dk, &dv, &dout, &q, &k, &v, &o, &lse, &b, documents, 50, shape, &work, s)
                } else {
                    ops.attention(&o, &lse, &q, &k, &v, &b, documents, 50, shape, &work, s)
                };
                let e = called.and_then(|()| rig.try_read(if backward { &dq } else { &o }).map(drop)).expect_err("bad boundaries");
                assert!(e.to_string().contains("cu_seqlens"), "{bounds:?}: {e}");
                if rig.device().info().kind == "simt" {
                    assert!(e.to_string().contains(&format!("cu_seqlens[{row}]")), "{bounds:?}: {e}");
                }
            }
            Vec::new()
        });
    }
}

/// Bytes of memory and of the first cache against the least that tiles allow, pass by pass; and banks: at most two ways.
#[test]
fn bytes_are_those_of_tiles() {
    if !can_run() {
        return;
    }
    for arch in TWO {
        for c in [
            case(&[130, 77], 4, 2, 64, None, DType::BF16),
            case(&[200], 4, 1, 128, Some(64), DType::BF16),
            case(&[70], 2, 1, 256, None, DType::BF16),
            case(&[48], 2, 1, 64, None, DType::F32),
        ] {
            let device = SimtDevice::new(SimtOptions { arch, count: true, ..Default::default() }).unwrap();
            run(&Rig::new(device.clone()), &c, &c.inputs());
            let counted = device.take_counters();
            let least = traffic(&Arch::known(arch).unwrap(), c.dtype, &c.documents, c.shape).unwrap();
            let of = |begins: &[&str]| {
                let some = counted.iter().filter(|(k, _)| begins.iter().any(|b| k.starts_with(b)));
                some.fold(Counters::default(), |mut sum, (_, c)| {
                    sum.add(c);
                    sum
                })
            };
            let passes = [
                ("forward", of(&["attention_64", "attention_128", "attention_256"]), least.forward),
                ("delta", of(&["attention_delta"]), least.delta),
                ("dk and dv", of(&["attention_dk", "attention_dv"]), least.keys),
                ("dq", of(&["attention_dq"]), least.queries),
            ];
            for (pass, c_of, least) in passes {
                let (memory, cache) = (32 * (c_of.distinct_reads + c_of.distinct_writes), 32 * (c_of.read_sectors + c_of.write_sectors));
                let (once, asked) = (least.once_bytes as f64, (least.read_bytes + least.write_bytes) as f64);
                let (memory, cache) = (memory as f64 / once, cache as f64 / asked);
                let what = format!("{pass} of {} on {arch}", c.name());
                println!("{what}: {memory:.3} of the least from memory, {cache:.3} from the first cache, {} ways", c_of.worst_ways);
                assert!((0.99..=1.2).contains(&memory) && (0.99..=1.2).contains(&cache), "{what}: {memory}, {cache} of the least");
                assert!(c_of.worst_ways <= 2, "{what}: {} ways", c_of.worst_ways);
            }
        }
    }
}
