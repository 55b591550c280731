//! Is a kernel's error against f64 at most twice that of PyTorch in bf16? Operations on the data of `tests/tools/make_gpu_golden.py`, which
//! PyTorch computed in f64, and whose errors in bf16 it wrote down.

use half::bf16;
use std::collections::BTreeMap;
use zrt_kernels::{Attention, DType, LoraBackward, LoraForward, OpShape, Weight, Write};
use zrt_simt::testing::{Rig, can_run, distance, wide};
use zrt_simt::{SimtDevice, SimtOptions};

const B: DType = DType::BF16;
const F: DType = DType::F32;

type Tensors = BTreeMap<String, Vec<f32>>;

fn golden() -> (Tensors, serde_json::Value) {
    let bytes = std::fs::read(zrt_tests::golden("gpu/ops.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let values = |t: safetensors::tensor::TensorView| match t.dtype() {
        safetensors::Dtype::BF16 => t.data().chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
        _ => t.data().chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
    };
    (file.iter().map(|(name, t)| (name.to_string(), values(t))).collect(), zrt_tests::json("gpu/errors.json"))
}

/// Runs all operations: results by their names in the file.
fn run(rig: &Rig, x: &Tensors) -> Tensors {
    let (ops, s) = (rig.ops(), rig.stream());
    let on = |name: &str, dtype| rig.tensor(&x[name], dtype);
    let like = |name: &str, dtype| rig.empty(x[name].len(), dtype);
    let mut out = Vec::new();

    let shape = Attention { heads: 2, kv_heads: 1, head_dim: 64, window: None, scale: 0.125 };
    let mut bounds = vec![40; 41];
    bounds[0] = 0;
    let (bounds, work) = (rig.ints(&bounds), rig.workspace(OpShape::Attention { tokens: 40, shape }));
    let [q, k, v, above] = ["q", "k", "v", "above"].map(|n| on(&format!("attention.{n}"), B));
    let [o, dq, dk, dv] = ["o", "dq", "dk", "dv"].map(|n| like(&format!("attention.{n}"), B));
    let lse = rig.empty(80, F);
    ops.attention(&o, &lse, &q, &k, &v, &bounds, 1, 40, shape, &work, s).unwrap();
    ops.attention_backward(&dq, &dk, &dv, &above, &q, &k, &v, &o, &lse, &bounds, 1, 40, shape, &work, s).unwrap();
    out.extend([("attention.o", o), ("attention.dq", dq), ("attention.dk", dk), ("attention.dv", dv)]);

    let (tokens, inputs, outputs, rank) = (48, 64, 96, 8);
    let work = rig.workspace(OpShape::Lora { tokens, inputs, outputs, rank, adapters: 1 });
    let (x_in, a, b, y, dy) =
        (on("lora.x", B), on("lora.a", F).view(), on("lora.b", F).view(), on("lora.y0", B), on("lora.above", B).view());
    let (t, dx) = (rig.empty(tokens * rank, F), rig.tensor(&vec![0.0; tokens * inputs], B));
    let (da, db) = (like("lora.da", F), like("lora.db", F));
    let f = LoraForward { y: y.clone(), t: t.clone(), a: a.clone(), b: b.clone(), scale: 2.0, outputs, rank, site: 0 };
    ops.lora(&[f], &x_in, None, tokens, inputs, &work, s).unwrap();
    let (da_out, db_out) = (da.clone(), db.clone());
    let g = LoraBackward { da, db, write: Write::Set, dy, t: t.view(), a, b, scale: 2.0, outputs, rank, site: 0 };
    ops.lora_backward(Some(&dx), &[g], &x_in, None, tokens, inputs, &work, s).unwrap();
    out.extend([("lora.y", y), ("lora.dx", dx), ("lora.da", da_out), ("lora.db", db_out)]);

    let (tokens, inputs, outputs) = (48, 64, 72);
    let work = rig.workspace(OpShape::LinearBackward { tokens, inputs, outputs });
    let (x_in, w, dy) = (on("linear.x", B), Weight::from(on("linear.w", B).view()), on("linear.above", B));
    let (y, dx, dw) = (like("linear.y", B), like("linear.dx", B), like("linear.dw", F));
    ops.linear(&y, Write::Set, &x_in, &w, None, tokens, inputs, outputs, s).unwrap();
    let (dx_set, dw_set) = (Some((&dx, Write::Set)), Some((&dw, Write::Set)));
    ops.linear_backward(dx_set, dw_set, None, &dy, Some(&x_in), &w, tokens, inputs, outputs, &work, s).unwrap();
    out.extend([("linear.y", y), ("linear.dx", dx), ("linear.dw", dw)]);

    let (rows, cols) = (16, 256);
    let (x_in, w, dy) = (on("rmsnorm.x", B), on("rmsnorm.w", B), on("rmsnorm.above", B));
    let (y, rstd, dx, dw) = (like("rmsnorm.y", B), rig.empty(rows, F), like("rmsnorm.dx", B), like("rmsnorm.dw", F));
    ops.rmsnorm(&y, &rstd, &x_in, &w, 1e-5, rows, cols, s).unwrap();
    let work = rig.workspace(OpShape::RmsNormBackward { rows, cols });
    ops.rmsnorm_backward(Some((&dx, Write::Set)), Some((&dw, Write::Set)), &dy, &x_in, &rstd, &w, rows, cols, &work, s).unwrap();
    out.extend([("rmsnorm.y", y), ("rmsnorm.dx", dx), ("rmsnorm.dw", dw)]);

    let (gate, up, dh) = (on("swiglu.gate", B), on("swiglu.up", B), on("swiglu.above", B));
    let [h, dgate, dup] = ["h", "dgate", "dup"].map(|n| like(&format!("swiglu.{n}"), B));
    ops.swiglu(&h, &gate, &up, s).unwrap();
    ops.swiglu_backward(&dgate, &dup, &dh, &gate, &up, s).unwrap();
    out.extend([("swiglu.h", h), ("swiglu.dgate", dgate), ("swiglu.dup", dup)]);

    let (y, dx, table, positions) = (on("rope.x", B), on("rope.above", B), on("rope.table", F), rig.ints(&(0..16).collect::<Vec<_>>()));
    ops.rope(&y, &table, &positions, 2, 64, s).unwrap();
    ops.rope_backward(&dx, &table, &positions, 2, 64, s).unwrap();
    out.extend([("rope.y", y), ("rope.dx", dx)]);

    let (tokens, hidden, vocab) = (24, 32, 160);
    let work = rig.workspace(OpShape::LinearCrossEntropy { tokens, hidden, vocab });
    let labels: Vec<i32> = (0..24).map(|n| if n % 5 == 3 { -100 } else { n * 37 % 160 }).collect();
    let (x_in, w, labels) = (on("cross_entropy.x", B), Weight::from(on("cross_entropy.w", B).view()), rig.ints(&labels));
    let (loss, dx, dw) = (rig.empty(tokens, F), like("cross_entropy.dx", B), like("cross_entropy.dw", F));
    let (dx_out, dw_set) = (Some(&dx), Some((&dw, Write::Set)));
    ops.linear_cross_entropy(&loss, dx_out, dw_set, &x_in, &w, &labels, 0.125, tokens, hidden, vocab, &work, s).unwrap();
    out.extend([("cross_entropy.loss", loss), ("cross_entropy.dx", dx), ("cross_entropy.dw", dw)]);
    out.into_iter().map(|(name, view)| (name.to_string(), rig.read(&view))).collect()
}

#[test]
fn errors_are_at_most_twice_those_of_pytorch() {
    if !can_run() {
        return;
    }
    let (x, json) = golden();
    let errors = json["errors"].as_object().unwrap();
    for arch in ["sm_90", "gfx942"] {
        let device = SimtDevice::new(SimtOptions { arch, exact: true, ..Default::default() }).unwrap();
        let got = run(&Rig::new(device), &x);
        assert!(got.keys().eq(errors.keys().collect::<std::collections::BTreeSet<_>>()), "results of both");
        for (name, got) in &got {
            let (ours, torch) = (distance(got, &wide(&x[name])), errors[name].as_f64().unwrap());
            println!("{arch} {name}: {ours:.1e}, PyTorch {torch:.1e}");
            assert!(ours <= 2.0 * torch, "{arch} {name}: off by {ours:e}, PyTorch by {torch:e}");
        }
    }
}
