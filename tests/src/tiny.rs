//! Runs of the tiny model against PyTorch + PEFT in f32, on any device: gradients of one step, and losses, norms and weights of several.

use crate::*;
use zrt_kernels::Device;

/// Makes the device that a run is on.
pub type MakeDevice = dyn Fn() -> Arc<dyn Device> + Sync;

/// The tiny model, with an adapter for `tiny_lora`.
pub fn subject(case: &str, adapter: &str) -> Subject {
    match case {
        "tiny_lora" => Subject::lora(golden("tiny_model"), golden(&format!("tiny_lora/{adapter}"))),
        _ => Subject::full(golden("tiny_model")),
    }
}

/// One micro-batch of 4 rows of 64 tokens.
pub fn options() -> EngineOptions {
    EngineOptions::new(shape(4, 64, DType::F32), 1)
}

/// Gradients after one backward: each tensor within 1e-5 relative L2 (float32 sums in another order).
pub fn check_gradients(case: &str, adapter: &str, file: &str, loss_key: &str, batch: (&[i64], &[i64]), device: &MakeDevice) {
    let want = tensors(&golden(&format!("{case}/{file}")));
    let host = rows(batch.0, batch.1, 64);
    on_ranks(1, true, |comm| {
        let mut engine = engine(&subject(case, adapter), options(), comm, device());
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

/// Tokens of the first step.
pub fn first_batch(case: &str) -> Vec<i64> {
    ids(&format!("{case}/tokens.safetensors"), "input_ids").1[..256].to_vec()
}

/// Trains the first `steps` steps of a golden run. All losses within 2e-6 relative + 2e-6 and gradient norms within 1e-5 (noise.json:
/// PyTorch differs from itself by 1e-6 and 5e-6), final weights within 1e-5 relative L2 each... of all weights together, since a weight near zero has no relative scale.
pub fn check_training(case: &str, steps: usize, lr: f64, clip: bool, device: &MakeDevice) {
    let (_, tokens) = ids(&format!("{case}/tokens.safetensors"), "input_ids");
    let golden_steps = if clip { json(&format!("{case}/clip_steps.json"))["steps"].clone() } else { json(&format!("{case}/steps.json")) };
    on_ranks(1, true, |comm| {
        let mut o = options();
        o.max_grad_norm = clip.then_some(1.0);
        let mut engine = engine(&subject(case, "adapter_init"), o, comm, device());
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
        // Golden weights are those after the last step.
        if !clip && steps == golden_steps.as_array().unwrap().len() {
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
