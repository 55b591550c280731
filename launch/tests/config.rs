//! Every way a configuration can be wrong has a message that names the place and the fix, and all are told at once.

use std::path::Path;
use zrt::config::{Config, OffloadDevice};

const GOOD: &str = r#"
[model]
path = "model"
[[dataset]]
path = "train.jsonl"
[training]
seq_len = 128
steps = 20
"#;

fn load(text: &str, sets: &[&str]) -> Result<Config, String> {
    let sets: Vec<String> = sets.iter().map(|s| s.to_string()).collect();
    Config::parse(text, Path::new("train.toml"), Path::new("/somewhere"), &sets).map_err(|e| e.to_string())
}

/// The one problem of `GOOD` with `sets`.
fn problem(sets: &[&str]) -> String {
    let text = load(GOOD, sets).expect_err("must be refused");
    assert_eq!(text.lines().count(), 1, "one problem expected:\n{text}");
    text
}

#[track_caller]
fn says(sets: &[&str], parts: &[&str]) {
    let text = problem(sets);
    for part in parts {
        assert!(text.contains(part), "{part:?} not in {text}");
    }
}

#[test]
fn a_minimal_file_loads_with_defaults() {
    let c = load(GOOD, &[]).unwrap();
    assert_eq!(c.training.steps, Some(20));
    assert_eq!(c.dataset[0].path, Path::new("/somewhere/train.jsonl"));
    assert_eq!(c.checkpoint.folder, Path::new("/somewhere/out"));
    assert_eq!(c.model.path, "model", "not a folder anywhere: left for the look-up as a hub id");
}

#[test]
fn overrides_take_toml_and_bare_strings() {
    let c = load(
        GOOD,
        &[
            "training.steps=7",
            "zero.stage=3",
            "zero.offload_param=cpu",
            "zero.offload_optimizer.device=cpu",
            "optimizer.lr=1e-3",
            "optimizer.betas=[0.9, 0.95]",
            "lora.r=4",
            "lora.target_modules=[\"q_proj\"]",
            "lora.rank_pattern.\"layers.0.q_proj\"=2",
            "dataset.0.type=alpaca",
            "dataset.1.path=/b.jsonl",
            "eval_dataset.0.path=/e.jsonl",
            "training.deterministic=true",
        ],
    )
    .unwrap();
    assert_eq!(c.training.steps, Some(7));
    assert!(c.training.deterministic);
    assert_eq!(c.zero.offload_param.device, OffloadDevice::Cpu);
    assert_eq!(c.zero.offload_optimizer.device, OffloadDevice::Cpu);
    assert_eq!(c.optimizer.lr, 1e-3);
    assert_eq!(c.lora.as_ref().unwrap().rank_pattern["layers.0.q_proj"], 2);
    assert_eq!(c.dataset.len(), 2);
    assert_eq!(c.eval_dataset[0].path, Path::new("/e.jsonl"));
    let again = load(&c.to_toml().unwrap(), &[]).unwrap();
    assert_eq!(again, c, "the saved file loads to the same");
    let c = load(GOOD, &["training.steps=", "training.epochs=2"]).unwrap();
    assert_eq!((c.training.steps, c.training.epochs), (None, Some(2.0)), "an empty value removes the key");
}

#[test]
fn paths_typed_on_the_command_line_count_from_where_they_are_typed() {
    let here = std::env::current_dir().unwrap();
    let c = load(GOOD, &["checkpoint.folder=runs/a", "dataset.0.path=./Cargo.toml"]).unwrap();
    assert_eq!(c.checkpoint.folder, here.join("runs/a"));
    assert_eq!(c.dataset[0].path, here.join("Cargo.toml"));
}

#[test]
fn inputs_are_looked_for_in_the_working_directory_too() {
    let c = load(&GOOD.replace("train.jsonl", "Cargo.toml"), &[]).unwrap();
    assert_eq!(c.dataset[0].path, std::env::current_dir().unwrap().join("Cargo.toml"));
}

#[test]
fn all_problems_come_at_once_with_their_places() {
    let text = load(
        r#"
[model]
path = 3
[lora]
rr = 8
use_dora = true
[[dataset]]
pth = "a"
[training]
seq_len = 128
stpes = 20
learning_rate = 1e-4
micro_batch_group = 3
[optimizer]
lr = -1.0
"#,
        &["zero.stage=7", "nothing"],
    )
    .unwrap_err();
    let expected = [
        "train.toml:3:1: model.path = 3: invalid type: integer `3`, expected a string",
        "train.toml:5:1: unknown key lora.rr: did you mean lora.r? keys of [lora]: r, alpha, lora_alpha",
        "train.toml:6:1: lora.use_dora is known to PEFT, not supported here",
        "train.toml:8:1: unknown key dataset.0.pth: did you mean dataset.0.path? keys of [[dataset]]: path, type",
        "train.toml:11:1: unknown key training.stpes: did you mean training.steps?",
        "train.toml:12:1: unknown key training.learning_rate: here it is optimizer.lr",
        "train.toml:13:1: training.micro_batch_group = 3: expected a power of two",
        "train.toml:15:1: optimizer.lr = -1 must be a finite number above 0",
        "--set nothing: no '='",
        "--set zero.stage=7: zero.stage = 7: expected 0, 1, 2, 3 or \"auto\"",
    ];
    for part in expected {
        assert!(text.contains(part), "{part:?} not in\n{text}");
    }
    assert_eq!(text.lines().count(), expected.len(), "nothing follows from what is told already:\n{text}");
}

#[test]
fn syntax_errors_have_a_place() {
    let text = load("[model]\npath = \"a\nseq_len 3\n", &[]).unwrap_err();
    assert!(text.starts_with("train.toml:2:"), "{text}");
    assert!(text.contains("not TOML"), "{text}");
}

#[test]
fn a_file_that_is_not_there_is_named() {
    let text = Config::load(Path::new("/nowhere/x.toml"), &[]).unwrap_err().to_string();
    assert!(text.starts_with("/nowhere/x.toml: cannot be read:"), "{text}");
}

#[test]
fn unknown_keys_and_sections() {
    says(&["trainin.steps=3"], &["unknown key trainin: did you mean training? sections: model, lora, dataset"]);
    says(&["training.banana=1"], &["unknown key training.banana; keys of [training]: seed, deterministic"]);
    says(&["micro_batch_size=2"], &["unknown key micro_batch_size: micro_batch_size belongs in [training]"]);
    says(&["lora_r=2"], &["unknown key lora_r: here it is lora.r"]);
    says(&["gradient_clipping=1.0"], &["here it is training.max_grad_norm"]);
    says(&["training.lr=1e-4"], &["lr belongs in [optimizer]"]);
    says(&["zero.overlap_comm=true"], &["known to DeepSpeed"]);
    says(&["zero.stage=3", "zero.offload_param={device=\"cpu\", nvme_path=\"/x\"}"], &["zero.offload_param.nvme_path", "DeepSpeed"]);
    says(&["lora.modules_to_save=[\"lm_head\"]"], &["lora.modules_to_save is known to PEFT, not supported here: remove it"]);
}

#[test]
fn wrong_types() {
    says(&["training.steps=many"], &["training.steps = \"many\": invalid type", "u64"]);
    says(&["zero.stage=three"], &["zero.stage = \"three\": expected 0, 1, 2, 3 or \"auto\""]);
    says(
        &["training.micro_batch_size=auto", "training.global_batch_size="],
        &["training.micro_batch_size = \"auto\" needs training.global_batch_size"],
    );
    says(&["training.micro_batch_group=some"], &["\"some\": expected a power of two (1, 2, 4, ...), \"all\" or \"auto\""]);
    says(&["zero.offload_param=disk"], &["expected \"none\", \"cpu\", \"auto\", or a table"]);
    says(&["precision.compute=fp8"], &["unknown variant `fp8`, expected", "bf16"]);
    says(&["lora=3"], &["lora is of type integer: write [lora], a section"]);
    says(&["training.steps.x=3"], &["steps is of type integer, it has no key 'x'"]);
    says(&["dataset.3.path=x"], &["dataset has 1 entries; dataset.3 would leave a gap"]);
    says(&["lora.alpha=8", "lora.lora_alpha=8"], &["duplicate field `alpha`"]);
}

#[test]
fn missing_keys() {
    let text = load("[[dataset]]\npath = \"a\"\n[training]\nsteps = 1\n", &[]).unwrap_err();
    assert!(text.contains("train.toml: model.path is missing"), "{text}");
    assert!(text.contains("train.toml:3:2: training.seq_len is missing"), "{text}");
    assert_eq!(text.lines().count(), 2, "{text}");
    says(&["dataset="], &["there is no [[dataset]]: add one"]);
}

#[test]
fn contradictions_tell_the_fix() {
    says(&["training.epochs=1"], &["training.steps and training.epochs are both given: keep one"]);
    says(&["training.steps="], &["neither training.steps nor training.epochs is given: add one"]);
    says(&["training.steps=0"], &["trains nothing"]);
    says(&["training.steps=", "training.epochs=-1"], &["training.epochs = -1 must be a number above 0"]);
    says(&["training.global_batch_size=4", "training.gradient_accumulation_steps=2"], &["are both given", "keep one"]);
    says(
        &["training.global_batch_size=5", "training.micro_batch_size=2"],
        &["training.global_batch_size 5 = micro_batch_size 2 x 2.5 micro-batches"],
    );
    says(&["zero.offload_param=cpu"], &["needs zero.stage = 3 (it is 0): set stage = 3, or offload_param = \"none\""]);
    says(&["activation_checkpoint.layers=2"], &["activation_checkpoint.layers needs mode = \"full\""]);
    says(&["lr_scheduler.warmup_steps=2", "lr_scheduler.warmup_ratio=0.1"], &["are both given: keep one"]);
    says(&["lr_scheduler.min_lr_ratio=1.5"], &["lr_scheduler.min_lr_ratio = 1.5 is a share: expected 0 to 1"]);
    says(&["lr_scheduler.warmup_steps=21"], &["more than training.steps = 20"]);
    says(&["training.seq_len=0"], &["training.seq_len = 0: a sequence has at least 1 token"]);
    says(&["optimizer.lr=0"], &["optimizer.lr = 0 must be a finite number above 0"]);
    says(&["optimizer.lr=nan"], &["optimizer.lr = NaN"]);
    says(&["optimizer.betas=[0.9, 1.0]"], &["optimizer.betas = [0.9, 1]: each must be at least 0 and below 1"]);
    says(&["optimizer.name=adamww"], &["did you mean \"adamw\"?"]);
    says(&["lora.dropout=1.0"], &["lora.dropout = 1 is a probability"]);
    says(&["lora.r=0"], &["lora.r = 0: an adapter has rank 1 or more"]);
    says(&["training.micro_batch_group=6"], &["training.micro_batch_group = 6: expected a power of two"]);
    says(&["device.kind=rocm"], &["device.kind = \"rocm\": AMD's devices are \"hip\" here"]);
    says(&["device.kind=cpu", "comm.backend=ccl"], &["comm.backend = \"ccl\" is for GPUs"]);
    says(&["device.kind=hip", "comm.backend=local"], &["comm.backend = \"local\" is for CPU ranks"]);
    says(&["device.kind=tpu"], &["\"tpu\" is not known"]);
    says(&["comm.backend=nccl"], &["comm.backend = \"nccl\" is not known (did you mean \"ccl\"?)"]);
    says(&["eval.interval=5"], &["there is no [[eval_dataset]]"]);
    let text = load(GOOD, &["training.epochs=1", "zero.offload_param=cpu", "optimizer.lr=0", "lora.r=0"]).unwrap_err();
    assert_eq!(text.lines().count(), 4, "all at once:\n{text}");
}

#[test]
fn batches_resolve_or_show_their_arithmetic() {
    let c = load(GOOD, &["training.global_batch_size=16", "training.micro_batch_size=2", "training.micro_batch_group=all"]).unwrap();
    let batch = c.resolve(2).unwrap();
    assert_eq!((batch.accumulation, batch.micro_batches, batch.global_batch_size, batch.group), (4, 8, 16, 4));
    let text = c.resolve(3).unwrap_err().to_string();
    assert!(text.contains("global_batch_size 16 = micro_batch_size 2 x ranks 3 x accumulation 2.667"), "{text}");
    let text = c.resolve(16).unwrap_err().to_string();
    assert!(text.contains("a step has 8 micro-batches of 2, fewer than 16 ranks; use -n 8 or fewer"), "{text}");
    let c = load(GOOD, &["training.gradient_accumulation_steps=3"]).unwrap();
    assert_eq!(c.resolve(4).unwrap().global_batch_size, 12);
}
