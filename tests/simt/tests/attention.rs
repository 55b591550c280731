//! Flash attention on emulated GPUs against `f64`, against an oracle that rounds what the kernels round, and against the CPU: all
//! kernel widths and those between, both types, documents of odd lengths, groups of heads, windows, operands that begin anywhere.

use half::bf16;
use zrt_kernels::gpu::attention::{HEAD_DIMS, forward_tiles};
use zrt_kernels::gpu::launch::Arch;
use zrt_kernels::{Attention, DType, OpShape};
use zrt_simt::testing::{ARCHS, Rig, assert_close, can_run, normal, on, rounding, wide};

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
