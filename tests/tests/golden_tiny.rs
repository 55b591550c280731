//! Parity with PyTorch + PEFT on the tiny model in f32: gradients, losses, clipping, masked labels, final weights, logits by loss.

use std::sync::Arc;
use zrt::engine::StepInput;
use zrt_kernels::Device;
use zrt_kernels::cpu::Mode;
use zrt_tests::tiny::{check_gradients, check_training, first_batch, options};
use zrt_tests::*;

fn cpu() -> Arc<dyn Device> {
    device(1, Mode::Threaded)
}

#[test]
fn gradients() {
    for case in ["tiny_lora", "tiny_full"] {
        let batch = first_batch(case);
        check_gradients(case, "adapter_init", "grads.safetensors", "first_batch_loss", (&batch, &batch), &cpu);
    }
    let batch = first_batch("tiny_lora");
    check_gradients("tiny_lora", "adapter_random", "grads_random.safetensors", "random_adapter_loss", (&batch, &batch), &cpu);
}

#[test]
fn gradients_with_masked_labels() {
    for case in ["tiny_lora", "tiny_full"] {
        let file = format!("{case}/masked_batch.safetensors");
        let (input, labels) = (ids(&file, "input_ids").1, ids(&file, "labels").1);
        check_gradients(case, "adapter_init", "grads_masked.safetensors", "masked_batch_loss", (&input, &labels), &cpu);
    }
}

#[test]
fn training_lora() {
    check_training("tiny_lora", 20, 1e-2, false, &cpu);
}

#[test]
fn training_full() {
    check_training("tiny_full", 10, 1e-3, false, &cpu);
}

#[test]
fn training_with_clipping() {
    check_training("tiny_lora", 20, 1e-2, true, &cpu);
    check_training("tiny_full", 10, 1e-3, true, &cpu);
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
            let mut engine = engine(&Subject::full(golden(&dir)), options(), comm, cpu());
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
