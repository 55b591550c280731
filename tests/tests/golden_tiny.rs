//! Parity with PyTorch + PEFT on the tiny model in f32: gradients, losses, clipping, masked labels, final weights, logits by loss.

use zrt::checkpoint::Kind;
use zrt::engine::{EngineOptions, StepInput};
use zrt_kernels::DType;
use zrt_kernels::cpu::Mode;
use zrt_tests::*;

fn subject(case: &str, adapter: &str) -> Subject {
    match case {
        "tiny_lora" => Subject::lora(golden("tiny_model"), golden(&format!("tiny_lora/{adapter}"))),
        _ => Subject::full(golden("tiny_model")),
    }
}

fn options() -> EngineOptions {
    EngineOptions::new(shape(4, 64, DType::F32), 1)
}

/// Gradients after one backward: each tensor within 1e-5 relative L2 (float32 sums in another order).
fn check_gradients(case: &str, adapter: &str, file: &str, loss_key: &str, batch: (&[i64], &[i64])) {
    let want = tensors(&golden(&format!("{case}/{file}")));
    let host = rows(batch.0, batch.1, 64);
    on_ranks(1, true, |comm| {
        let mut engine = engine(&subject(case, adapter), options(), comm, device(1, Mode::Threaded));
        let input =
            StepInput { step: 0, hp: golden_adamw(0.0), trained_tokens: host.trained, batch: &|_| Ok(Some(host.clone())), stop: false };
        let got = engine.gradients(&input).unwrap();
        assert_eq!(got.len(), want.len());
        let mut worst = (0.0, String::new());
        for (name, g) in &got {
            let d = rel_l2(g, &want[name]);
            if d > worst.0 {
                worst = (d, name.clone());
            }
        }
        println!("{case}/{file}: worst gradient {} rel. L2 {:.2e}", worst.1, worst.0);
        assert!(worst.0 <= 1e-5, "{worst:?}");
        let loss = engine.step(&input).unwrap().loss;
        let golden_loss = json(&format!("{case}/meta.json"))[loss_key].as_f64().unwrap();
        assert!((loss - golden_loss).abs() <= 2e-6 * golden_loss + 2e-6, "loss {loss}, golden {golden_loss}");
    });
}

fn first_batch(case: &str) -> Vec<i64> {
    ids(&format!("{case}/tokens.safetensors"), "input_ids").1[..256].to_vec()
}

#[test]
fn gradients() {
    for case in ["tiny_lora", "tiny_full"] {
        let batch = first_batch(case);
        check_gradients(case, "adapter_init", "grads.safetensors", "first_batch_loss", (&batch, &batch));
    }
    let batch = first_batch("tiny_lora");
    check_gradients("tiny_lora", "adapter_random", "grads_random.safetensors", "random_adapter_loss", (&batch, &batch));
}

#[test]
fn gradients_with_masked_labels() {
    for case in ["tiny_lora", "tiny_full"] {
        let file = format!("{case}/masked_batch.safetensors");
        let (input, labels) = (ids(&file, "input_ids").1, ids(&file, "labels").1);
        check_gradients(case, "adapter_init", "grads_masked.safetensors", "masked_batch_loss", (&input, &labels));
    }
}

/// All losses within 2e-6 relative + 2e-6 and gradient norms within 1e-5 (noise.json: PyTorch differs from itself by 1e-6 and
/// 5e-6), final weights within 1e-5 relative L2 each... of all weights together, since a weight near zero has no relative scale.
fn check_training(case: &str, steps: usize, lr: f64, clip: bool) {
    let (_, tokens) = ids(&format!("{case}/tokens.safetensors"), "input_ids");
    let golden_steps = if clip { json(&format!("{case}/clip_steps.json"))["steps"].clone() } else { json(&format!("{case}/steps.json")) };
    on_ranks(1, true, |comm| {
        let mut o = options();
        o.max_grad_norm = clip.then_some(1.0);
        let mut engine = engine(&subject(case, "adapter_init"), o, comm, device(1, Mode::Threaded));
        let batch = |s: usize, _: usize| rows(&tokens[s * 256..(s + 1) * 256], &tokens[s * 256..(s + 1) * 256], 64);
        let got = train(&mut engine, steps, lr, &batch);
        let mut worst = (0f64, 0f64);
        for (s, out) in got.iter().enumerate() {
            let (loss, norm) = (golden_steps[s]["loss"].as_f64().unwrap(), golden_steps[s]["grad_norm"].as_f64().unwrap());
            worst.0 = worst.0.max((out.loss - loss).abs() / (2e-6 * loss + 2e-6));
            worst.1 = worst.1.max((f64::from(out.grad_norm) - norm).abs() / norm);
            assert!(out.applied);
        }
        println!("{case} clip {clip}: loss difference {:.2} of its tolerance, gradient norm {:.1e} relative", worst.0, worst.1);
        assert!(worst.0 <= 1.0, "loss off by {} tolerances", worst.0);
        assert!(worst.1 <= 1e-5, "gradient norm off by {}", worst.1);
        if !clip {
            let file = if case == "tiny_lora" { "adapter_final/adapter_model.safetensors" } else { "model_final.safetensors" };
            let want = tensors(&golden(&format!("{case}/{file}")));
            let got = whole_state(vec![state(&mut engine)]);
            let (mut a, mut b) = (Vec::new(), Vec::new());
            for (name, w) in &want {
                a.extend_from_slice(&got[&(Kind::Weight, name.clone())]);
                b.extend_from_slice(w);
            }
            let d = rel_l2(&a, &b);
            println!("{case}: final weights rel. L2 {d:.2e}");
            assert!(d <= 1e-5, "final weights off by {d}");
        }
    });
}

#[test]
fn training_lora() {
    check_training("tiny_lora", 20, 1e-2, false);
}

#[test]
fn training_full() {
    check_training("tiny_full", 10, 1e-3, false);
}

#[test]
fn training_with_clipping() {
    check_training("tiny_lora", 20, 1e-2, true);
    check_training("tiny_full", 10, 1e-3, true);
}

/// llama3 rope, mistral, qwen2 (biases, tied), qwen3 (q/k norm, tied): loss and every gradient.
#[test]
fn other_architectures() {
    for name in ["llama3_rope", "mistral", "qwen2", "qwen3"] {
        let dir = format!("tiny_arch/{name}");
        let want = tensors(&golden(&format!("{dir}/grads.safetensors")));
        let batch = ids(&format!("{dir}/logits.safetensors"), "batch").1;
        let host = rows(&batch, &batch, 64);
        on_ranks(1, true, |comm| {
            let mut engine = engine(&Subject::full(golden(&dir)), options(), comm, device(1, Mode::Threaded));
            let input =
                StepInput { step: 0, hp: golden_adamw(0.0), trained_tokens: host.trained, batch: &|_| Ok(Some(host.clone())), stop: false };
            let got = engine.gradients(&input).unwrap();
            assert_eq!(got.len(), want.len(), "{name}");
            let mut worst = (0.0, String::new());
            for (tensor, g) in &got {
                // Keys' biases have no gradient but rounding (softmax ignores a shift): compare with the queries' scale.
                let scale = if tensor.ends_with("k_proj.bias") { &want[&tensor.replace("k_proj", "q_proj")] } else { &want[tensor] };
                let norm = |x: &[f32]| x.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
                let diff: Vec<f32> = g.iter().zip(&want[tensor]).map(|(a, b)| a - b).collect();
                let d = norm(&diff) / norm(scale);
                if d > worst.0 {
                    worst = (d, tensor.clone());
                }
            }
            println!("{name}: worst gradient {} rel. L2 {:.2e}", worst.1, worst.0);
            assert!(worst.0 <= 1e-5, "{name}: {worst:?}");
            let loss = engine.step(&input).unwrap().loss;
            let golden_loss = json(&format!("{dir}/meta.json"))["loss"].as_f64().unwrap();
            assert!((loss - golden_loss).abs() <= 2e-6 * golden_loss + 2e-6, "{name}: loss {loss}, golden {golden_loss}");
        });
    }
}
