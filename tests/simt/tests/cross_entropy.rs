//! Output head and cross entropy on emulated GPUs against `f64`: both types, vocabularies that fit no tile, tokens that are not trained,
//! gradients left out, added to, and in place of x; labels that no vocabulary has.

use zrt_kernels::{DType, OpShape, Weight, Write};
use zrt_simt::testing::{assert_close, can_run, normal, on, on_all, wide};

const SCALE: f32 = 0.125;

fn labels(tokens: usize, vocab: usize) -> Vec<i32> {
    (0..tokens).map(|n| if n % 5 == 3 { -100 } else { (n * 37 % vocab) as i32 }).collect()
}

fn check(tokens: usize, hidden: usize, vocab: usize, dtype: DType, skew: usize) {
    let (x, w) = (normal(tokens * hidden, dtype, 1), normal(vocab * hidden, dtype, 2));
    let (dw0, labels) = (normal(vocab * hidden, DType::F32, 3), labels(tokens, vocab));
    let case = |rig: &zrt_simt::testing::Rig| {
        let rig = &rig.skewed(skew);
        let (ops, s) = (rig.ops(), rig.stream());
        let (tx, tw, tl) = (rig.tensor(&x, dtype), Weight::from(rig.tensor(&w, dtype).view()), rig.ints(&labels));
        let work = rig.workspace(OpShape::LinearCrossEntropy { tokens, hidden, vocab });
        let (loss, dx, dw) = (rig.empty(tokens, DType::F32), rig.empty(tokens * hidden, dtype), rig.empty(vocab * hidden, DType::F32));
        let call = |loss, dx, dw, x| ops.linear_cross_entropy(loss, dx, dw, x, &tw, &tl, SCALE, tokens, hidden, vocab, &work, s).unwrap();
        call(&loss, Some(&dx), Some((&dw, Write::Set)), &tx);
        let (alone, in_place, dw2) = (rig.empty(tokens, DType::F32), rig.tensor(&x, dtype), rig.tensor(&dw0, DType::F32));
        call(&alone, None, None, &tx);
        call(&alone, Some(&in_place), Some((&dw2, Write::Add)), &in_place);
        let out = [&loss, &dx, &dw, &dw2].map(|v| rig.read(v));
        assert!(rig.read(&alone) == out[0] && rig.read(&in_place) == out[1], "alone and in place");
        out.to_vec()
    };
    let (cpu, gpus) = if tokens * vocab < 6000 { on_all(case) } else { on(&["sm_90", "gfx942"], case) };
    let (x, w) = (wide(&x), wide(&w));
    let (mut loss, mut dx, mut dw) = (vec![0.0; tokens], vec![0.0; tokens * hidden], vec![0.0; vocab * hidden]);
    for n in (0..tokens).filter(|n| labels[*n] >= 0) {
        let row = &x[n * hidden..][..hidden];
        let logits: Vec<f64> = (0..vocab).map(|v| (0..hidden).map(|c| row[c] * w[v * hidden + c]).sum()).collect();
        let most = logits.iter().copied().fold(f64::MIN, f64::max);
        let sum: f64 = logits.iter().map(|l| (l - most).exp()).sum();
        loss[n] = sum.ln() + most - logits[labels[n] as usize];
        for v in 0..vocab {
            let g = f64::from(SCALE) * ((logits[v] - most).exp() / sum - f64::from(u8::from(v == labels[n] as usize)));
            for c in 0..hidden {
                dx[n * hidden + c] += g * w[v * hidden + c];
                dw[v * hidden + c] += g * row[c];
            }
        }
    }
    let added: Vec<f64> = dw.iter().zip(&dw0).map(|(a, b)| a + f64::from(*b)).collect();
    // Gradients of bf16 logits are rounded once, and dx again.
    let gradient = if dtype == DType::F32 { 3e-6 } else { 2.0 / 256.0 };
    for (who, outputs) in gpus.iter().map(|g| (g.arch, &g.outputs)).chain([("cpu", &cpu)]) {
        for ((name, want, tolerance), got) in
            [("loss", &loss, 2e-6), ("dx", &dx, gradient), ("dw", &dw, gradient), ("dw added", &added, gradient)].iter().zip(outputs)
        {
            assert_close(&format!("{name} on {who}, {tokens} x {hidden} x {vocab} {dtype}, skew {skew}"), got, want, *tolerance);
        }
    }
}

#[test]
fn losses_and_gradients() {
    if !can_run() {
        return;
    }
    for dtype in [DType::F32, DType::BF16] {
        check(21, 24, 133, dtype, 0);
        check(9, 19, 77, dtype, 1);
        check(1, 1, 1, dtype, 0);
    }
    check(3, 8, 4500, DType::BF16, 0);
}

#[test]
fn no_tokens_have_no_gradient() {
    if !can_run() {
        return;
    }
    check(0, 8, 16, DType::BF16, 0);
}

#[test]
fn labels_beyond_the_vocabulary_are_an_error() {
    if !can_run() {
        return;
    }
    on(&["sm_90", "gfx942"], |rig| {
        let (ops, s) = (rig.ops(), rig.stream());
        let (x, w) = (rig.tensor(&normal(6 * 8, DType::F32, 1), DType::F32), rig.tensor(&normal(10 * 8, DType::F32, 2), DType::F32));
        let (labels, loss) = (rig.ints(&[1, 2, 10, 3, 99, 0]), rig.empty(6, DType::F32));
        let work = rig.workspace(OpShape::LinearCrossEntropy { tokens: 6, hidden: 8, vocab: 10 });
        // The CPU says so at the call or at the stream, too.
        let called = ops.linear_cross_entropy(&loss, None, None, &x, &w.view().into(), &labels, 1.0, 6, 8, 10, &work, s);
        let e = called.and_then(|()| rig.try_read(&loss).map(drop)).unwrap_err();
        assert!(e.to_string().contains("10"), "{e}");
        Vec::new()
    });
}
