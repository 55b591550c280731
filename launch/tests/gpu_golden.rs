//! Does `zlaunch -n 2` train on GPUs as PyTorch + PEFT did? The golden runs of the tiny model, and one step of each other architecture,
//! on two emulated GPUs of each vendor, in processes, within the tolerances of the CPU's own test (`tests/tests/golden_tiny.rs`).

mod common;

use common::gpu::{BOTH, GpuRun, can_run};
use common::tiny::Tiny;
use std::path::{Path, PathBuf};

fn golden(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden").join(path)
}

fn json(path: &str) -> serde_json::Value {
    serde_json::from_str(&std::fs::read_to_string(golden(path)).unwrap()).unwrap()
}

/// Rows of token ids of a golden file, as a data set.
fn rows(file: &str, tensor: &str, row: usize) -> String {
    let bytes = std::fs::read(golden(file)).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let ids: Vec<i64> = file.tensor(tensor).unwrap().data().chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap())).collect();
    ids.chunks(row).map(|row| format!("{{\"input_ids\": {row:?}}}\n")).collect()
}

/// A job that repeats a golden run: rows in order, each a document of 64 tokens, 2 of the 4 rows of a step on each rank.
fn job(model: &str, lora: &str, data: &str, lr: f64, steps: usize) -> Tiny {
    let tiny = Tiny::empty();
    tiny.write("train.jsonl", data);
    // The golden schedule: lr * min(1, step / 5).
    let warmup = if steps >= 5 { 5 } else { 0 };
    let text = format!(
        "[model]\npath = \"{}\"\n{lora}\n[[dataset]]\npath = \"train.jsonl\"\ntype = \"tokenized\"\n\
         [training]\nseq_len = 64\nmicro_batch_size = 2\nglobal_batch_size = 4\nsteps = {steps}\ndeterministic = true\nmax_grad_norm = 0.0\n\
         [optimizer]\nlr = {lr:e}\nweight_decay = 0.01\nbetas = [0.9, 0.999]\neps = 1e-8\n\
         [lr_scheduler]\ntype = \"constant\"\nwarmup_steps = {warmup}\n[precision]\ncompute = \"f32\"\n[zero]\nstage = 3\n\
         [checkpoint]\nfolder = \"out\"\n[data]\ncache_folder = \"cache\"\npacking = false\nshuffle = false\n[device]\nthreads = 1\n",
        golden(model).display()
    );
    tiny.write("train.toml", text);
    tiny
}

/// Losses within 2e-6 relative + 2e-6 and gradient norms within 1e-5: PyTorch differs from itself by 1e-6 and 5e-6 (tests/golden/noise.json).
#[track_caller]
fn compare(tiny: &Tiny, want: &[(f64, f64)], what: &str) {
    let got = tiny.losses("out");
    assert_eq!(got.len(), want.len(), "{what}");
    for ((step, (loss, norm)), (golden_loss, golden_norm)) in got.iter().zip(want) {
        let (loss, norm) = (f64::from_bits(*loss), f64::from_bits(*norm));
        assert!((loss - golden_loss).abs() <= 2e-6 * golden_loss + 2e-6, "{what}, step {step}: loss {loss}, golden {golden_loss}");
        assert!((norm - golden_norm).abs() <= 1e-5 * golden_norm, "{what}, step {step}: gradient norm {norm}, golden {golden_norm}");
    }
}

fn training(case: &str, lora: &str, lr: f64) {
    if !can_run() {
        return;
    }
    const STEPS: usize = 5;
    let steps = json(&format!("{case}/steps.json"));
    let number = |s: usize, key: &str| steps[s][key].as_f64().unwrap();
    let want: Vec<(f64, f64)> = (0..STEPS).map(|s| (number(s, "loss"), number(s, "grad_norm"))).collect();
    for gpu in BOTH {
        let tiny = job("tiny_model", lora, &rows(&format!("{case}/tokens.safetensors"), "input_ids", 64), lr, STEPS);
        GpuRun { tiny: &tiny, gpu, ranks: 2, emulator: "" }.train(&[]);
        compare(&tiny, &want, &format!("{case} on {}", gpu.0));
    }
}

#[test]
fn lora() {
    let adapter = golden("tiny_lora/adapter_init");
    training("tiny_lora", &format!("[lora]\nadapter_path = \"{}\"", adapter.display()), 1e-2);
}

#[test]
fn all_weights() {
    training("tiny_full", "", 1e-3);
}

/// llama3 rope, mistral, qwen2 (biases, tied), qwen3 (q/k norm, tied): loss and the norm of all gradients.
#[test]
fn other_architectures() {
    if !can_run() {
        return;
    }
    for name in ["llama3_rope", "mistral", "qwen2", "qwen3"] {
        let folder = format!("tiny_arch/{name}");
        let bytes = std::fs::read(golden(&format!("{folder}/grads.safetensors"))).unwrap();
        let gradients = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let squares = gradients.iter().flat_map(|(_, t)| t.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())));
        let norm = squares.map(|g| f64::from(g).powi(2)).sum::<f64>().sqrt();
        let want = [(json(&format!("{folder}/meta.json"))["loss"].as_f64().unwrap(), norm)];
        for gpu in BOTH {
            let tiny = job(&folder, "", &rows(&format!("{folder}/logits.safetensors"), "batch", 64), 1e-3, 1);
            GpuRun { tiny: &tiny, gpu, ranks: 2, emulator: "" }.train(&[]);
            compare(&tiny, &want, &format!("{name} on {}", gpu.0));
        }
    }
}
