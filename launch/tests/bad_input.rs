//! What a person can get wrong, or a machine: each ends with a sentence that says what and where, code 2 for input, and nothing is lost.

mod common;

use common::tiny::*;
use common::*;
use std::path::{Path, PathBuf};

/// A copy of the model in `tiny/m`.
fn copy_of_model(tiny: &Tiny) -> PathBuf {
    let dir = tiny.path("m");
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir(&dir).unwrap();
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(model().join(name), dir.join(name)).unwrap();
    }
    dir
}

fn edit(path: &Path, from: &str, to: &str) {
    let text = std::fs::read_to_string(path).unwrap();
    assert!(text.contains(from), "{from} not in {text}");
    std::fs::write(path, text.replace(from, to)).unwrap();
}

/// Sets one f32 of a tensor.
fn set_weight(dir: &Path, tensor: &str, element: usize, value: f32) {
    let path = dir.join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let json: serde_json::Value = serde_json::from_slice(&bytes[8..header]).unwrap();
    let at = header + json[tensor]["data_offsets"][0].as_u64().unwrap() as usize + element * 4;
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
    std::fs::write(&path, bytes).unwrap();
}

const IN_M: &str = "model.path=m";

#[test]
fn keys() {
    let tiny = Tiny::new(2);
    tiny.run(2, &["training.seqlen=64"]).says(2, &["unknown key training.seqlen", "did you mean training.seq_len?"]);
    let sets = ["training.epochs=1", "training.gradient_accumulation_steps=2", "zero.stage=0", "zero.offload_param=cpu", "lora.rank=4"];
    tiny.run(2, &sets).says(
        2,
        &["4 problems in the configuration", "training.steps", "training.epochs", "global_batch_size", "zero.offload_param", "lora.rank"],
    );
    assert!(!tiny.path("out").exists(), "nothing is made before the input is good");
}

#[test]
fn batch_arithmetic() {
    let tiny = Tiny::new(2);
    let shown = "global_batch_size 4 = micro_batch_size 1 x ranks 3 x accumulation 1.333";
    tiny.run(3, &[]).says(2, &["train.toml: ", shown, "make training.global_batch_size a multiple of 3"]);
    tiny.run(8, &[]).says(2, &["a step has 4 micro-batches of 1, fewer than 8 ranks; use -n 4 or fewer"]);
}

#[test]
fn model_folders() {
    let tiny = Tiny::new(2);
    let dir = copy_of_model(&tiny);
    std::fs::remove_file(dir.join("model.safetensors")).unwrap();
    tiny.run(2, &[IN_M]).says(2, &["/m: there is no model.safetensors", "model.init = \"random\""]);

    let dir = copy_of_model(&tiny);
    std::fs::File::options().write(true).open(dir.join("model.safetensors")).unwrap().set_len(100_000).unwrap();
    tiny.run(2, &[IN_M]).says(2, &["m/model.safetensors: not a valid safetensors file", "the file is truncated or damaged"]);

    let dir = copy_of_model(&tiny);
    edit(&dir.join("config.json"), "\"intermediate_size\": 176", "\"intermediate_size\": 160");
    let shape = "model.layers.1.mlp.up_proj.weight: expected shape [160, 64], got [176, 64]";
    tiny.run(2, &[IN_M]).says(2, &["6 of the weights do not fit config.json", shape]);
    edit(&dir.join("config.json"), "\"intermediate_size\": 160", "\"intermediate_size\": 176");
    edit(&dir.join("config.json"), "\"num_hidden_layers\": 2", "\"num_hidden_layers\": 3");
    tiny.run(2, &[IN_M]).says(2, &["model.layers.2.input_layernorm.weight: missing, expected shape [64]"]);

    let dir = copy_of_model(&tiny);
    edit(&dir.join("config.json"), "LlamaForCausalLM", "BertModel");
    tiny.run(2, &[IN_M]).says(2, &["architecture BertModel is not supported; supported are LlamaForCausalLM", "Qwen3ForCausalLM"]);

    let dir = copy_of_model(&tiny);
    std::fs::rename(dir.join("model.safetensors"), tiny.path("w.safetensors")).unwrap();
    let index = |file: &str| {
        let names = zrt::hf::Weights::open(&model()).unwrap();
        let map = names.names().iter().map(|n| (n.to_string(), file.into())).collect::<serde_json::Map<_, _>>();
        std::fs::write(dir.join("model.safetensors.index.json"), serde_json::json!({ "weight_map": map }).to_string()).unwrap();
    };
    for outside in ["../w.safetensors".to_string(), tiny.path("w.safetensors").display().to_string()] {
        index(&outside);
        tiny.run(2, &[IN_M]).says(2, &["model.safetensors.index.json", "in its own folder", &outside]);
    }
    index("model-00001-of-00002.safetensors");
    tiny.run(2, &[IN_M]).says(2, &["model-00001-of-00002.safetensors"]);
    assert!(!tiny.path("out/metrics.jsonl").exists());
}

#[test]
fn a_model_folder_of_links_works() {
    let tiny = Tiny::new(2);
    // As the Hugging Face cache has them: links into a folder beside.
    let (blobs, dir) = (tiny.path("blobs"), tiny.path("m"));
    std::fs::create_dir(&blobs).unwrap();
    std::fs::create_dir(&dir).unwrap();
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(model().join(name), blobs.join(name)).unwrap();
        std::os::unix::fs::symlink(Path::new("../blobs").join(name), dir.join(name)).unwrap();
    }
    tiny.train(2, &[IN_M]);
}

#[test]
fn weights_that_are_not_finite() {
    let tiny = Tiny::new(2);
    let dir = copy_of_model(&tiny);
    set_weight(&dir, "model.layers.1.mlp.up_proj.weight", 10, f32::NAN);
    let found = "tensor 'model.layers.1.mlp.up_proj.weight': element 10 is NaN; 1 of 11264 values are not finite";
    tiny.run(2, &[IN_M]).says(2, &[found]);
    set_weight(&dir, "model.layers.1.mlp.up_proj.weight", 10, f32::INFINITY);
    tiny.run(1, &[IN_M]).says(2, &["'model.layers.1.mlp.up_proj.weight': element 10 is inf"]);
}

#[test]
fn data() {
    let tiny = Tiny::new(2);
    let good = std::fs::read_to_string(tiny.path("train.jsonl")).unwrap();
    let with = |row: &str| {
        tiny.write("d.jsonl", row);
        tiny.run(2, &["dataset.0.path=d.jsonl"])
    };
    let broken = with(&format!("{good}{{\"input_ids\": [1, 2,\n{good}"));
    broken.says(2, &["d.jsonl:41: not a JSON object (EOF while parsing a value, column "]);
    assert!(!broken.err.contains("line 2"), "{}", broken.err);
    with(&format!("{{\"text\": \"a\"}}\n{good}")).says(2, &["d.jsonl:1: expected \"input_ids\", a list of integers, got nothing"]);
    with("[\n{\"input_ids\": [1]}\n]\n").says(2, &["d.jsonl:1: ", "one object per line"]);
    with("").says(2, &["no data", "d.jsonl has no rows"]);
    with("{\"input_ids\": [1, 2, 3], \"labels\": [-100, -100, -100]}\n")
        .says(2, &["none of the 1 rows has a trained token (first: ", "d.jsonl:1"]);
    with("{\"input_ids\": [1, 2, 256]}\n").says(2, &["token id 256", "the model's vocabulary has 256 entries"]);
    tiny.run(2, &["dataset.0.path=nothere.jsonl"]).says(2, &["cannot read", "nothere.jsonl", "No such file"]);
    assert!(!tiny.path("out/metrics.jsonl").exists());

    let untrained = with(&format!("{good}{{\"input_ids\": [1, 2, 3], \"labels\": [-100, -100, -100]}}\n"));
    untrained.says(0, &["1 without a trained token were dropped (first: ", "d.jsonl:41)"]);
    let ids: Vec<String> = (0..100).map(|i| i.to_string()).collect();
    let _ = std::fs::remove_dir_all(tiny.path("out"));
    let long = with(&format!("{{\"input_ids\": [{}]}}\n", ids.join(",")));
    long.says(0, &["1 longer than seq_len were cut (68 tokens lost; first: ", "d.jsonl:1)"]);
}

#[test]
fn a_checkpoint_of_another_base_or_configuration() {
    let tiny = Tiny::new(4);
    let dir = copy_of_model(&tiny);
    tiny.train(2, &[IN_M, "training.steps=2"]);
    let saved = std::fs::read(tiny.path("out/config.toml")).unwrap();
    let differing = ["training.seed: 42 there, 3 here", "lora.r: 4 there, 8 here"];
    let done = tiny.run(2, &[IN_M, "training.seed=3", "lora.r=8"]);
    done.says(2, &["step-00000002 is of another configuration", differing[0], differing[1], "start anew in another checkpoint.folder"]);
    assert!(!done.err.contains("peft_type") && !done.err.contains("rank 0"), "only what differs, before ranks start: {}", done.err);
    tiny.run(2, &[IN_M, "lora="]).says(2, &["trained: \"adapters\" there, \"all weights\" here"]);
    tiny.run(2, &[IN_M, "dataset.0.path=d.jsonl"]).says(2, &["d.jsonl"]);

    set_weight(&dir, "model.layers.0.mlp.up_proj.weight", 0, 0.25);
    tiny.run(2, &[IN_M]).says(2, &["step-00000002 is of another base model: the weights are others (same architecture)"]);
    let (at, missing) =
        (format!("checkpoint.resume={}", tiny.path("out").display()), format!("checkpoint.resume={}", tiny.path("no").display()));
    tiny.run(2, &[IN_M, &at]).says(2, &["step-00000002 is of another base model"]);
    tiny.run(2, &[IN_M, &missing]).says(2, &["/no/manifest.json"]);
    assert_eq!(std::fs::read(tiny.path("out/config.toml")).unwrap(), saved, "the run's configuration is still its own");

    set_weight(&dir, "model.layers.0.mlp.up_proj.weight", 0, {
        let tensors = std::fs::read(model().join("model.safetensors")).unwrap();
        let header = 8 + u64::from_le_bytes(tensors[..8].try_into().unwrap()) as usize;
        let json: serde_json::Value = serde_json::from_slice(&tensors[8..header]).unwrap();
        let at = header + json["model.layers.0.mlp.up_proj.weight"]["data_offsets"][0].as_u64().unwrap() as usize;
        f32::from_le_bytes(tensors[at..at + 4].try_into().unwrap())
    });
    let done = tiny.train(1, &[IN_M]);
    assert!(done.out.contains("2 steps"), "nothing was lost by the refusals: {}", done.out);
}

/// A damaged newest checkpoint is told and passed over.
#[test]
fn a_damaged_checkpoint() {
    let tiny = Tiny::new(4);
    tiny.train(2, &["checkpoint.interval=2"]);
    let (losses, adapter) = (tiny.losses("out"), tiny.adapter("out"));
    let path = tiny.path("out/step-00000004/rank-00001.bin");
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[100] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let done = tiny.train(2, &[]);
    assert!(done.err.contains("step-00000004 is not usable") && done.out.contains("2 steps"), "{}\n{}", done.err, done.out);
    assert_eq!(tiny.losses("out"), losses);
    assert!(tiny.adapter("out") == adapter);
}

#[test]
fn a_run_folder_that_cannot_be_written() {
    let tiny = Tiny::new(2);
    tiny.run(2, &["checkpoint.folder=train.jsonl/out"]).says(2, &["run folder ", "train.jsonl/out", "set checkpoint.folder"]);
    // A read-only mount in a namespace of its own refuses the administrator too.
    std::fs::create_dir(tiny.path("ro")).unwrap();
    let script = "mount -t tmpfs -o ro none ro && exec \"$@\"";
    match in_namespace(&tiny, script, 2, &["checkpoint.folder=ro/out"]) {
        Some(done) => done.says(2, &["run folder ", "ro/out", "Read-only file system", "set checkpoint.folder"]),
        None => println!("read-only mount: not run, this system allows no mount in a namespace"),
    }
}

/// Runs `script` in a mount namespace with the command of a run as its arguments; `None` where that is not allowed.
fn in_namespace(tiny: &Tiny, script: &str, ranks: usize, sets: &[&str]) -> Option<Done> {
    let mut unshare = std::process::Command::new("unshare");
    let probe = unshare.args(["-rm", "sh", "-c", "mount -t tmpfs none /mnt"]).stderr(std::process::Stdio::null()).status();
    probe.ok().filter(|s| s.success())?;
    Some(wrapped(tiny, &["unshare", "-rm", "sh", "-c", script, "sh"], ranks, sets))
}

/// The command of a run behind `wrapper`.
fn wrapped(tiny: &Tiny, wrapper: &[&str], ranks: usize, sets: &[&str]) -> Done {
    let inner = tiny.command(ranks, sets);
    let mut outer = std::process::Command::new(wrapper[0]);
    outer.args(&wrapper[1..]).arg(inner.get_program()).args(inner.get_args()).current_dir(tiny.path(""));
    outer.stdin(std::process::Stdio::null()).stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    Running::start(&mut outer).finish()
}

/// The last good checkpoint is whole, and with space again the same command ends as if nothing had been.
#[track_caller]
fn goes_on_from(tiny: &Tiny, step: u64) {
    let latest = zrt::checkpoint::latest(&tiny.path("out"), zrt::checkpoint::Check::Full).unwrap();
    assert!(latest.skipped.is_empty(), "{:?}", latest.skipped);
    assert_eq!(latest.found.unwrap().manifest().step, step);
    assert!(!tiny.saving("out"), "what could not be finished is removed");
    tiny.train(2, &[]);
    tiny.train(2, &["checkpoint.folder=unbroken"]);
    assert_eq!(tiny.losses("out"), tiny.losses("unbroken"));
    assert!(tiny.adapter("out") == tiny.adapter("unbroken"));
}

#[test]
fn a_disk_that_is_full_while_saving() {
    let tiny = Tiny::new(12);
    std::fs::create_dir(tiny.path("disk")).unwrap();
    // A checkpoint takes about 130 kB: two fit.
    let script = "mount -t tmpfs -o size=330k none disk && \"$@\"; code=$?; cp -r disk/out out; exit $code";
    match in_namespace(&tiny, script, 2, &["checkpoint.folder=disk/out", "checkpoint.interval=2"]) {
        Some(done) => {
            done.says(1, &["No space left on device", "free some space", "earlier checkpoints are intact; training goes on"]);
            let verdict = done.err.lines().rev().find(|l| l.starts_with("rank ")).expect("a rank is named");
            let reason = done.err.lines().rev().find(|l| l.trim().starts_with("error: saving")).expect("and why");
            // Each rank writes its part of a checkpoint and is named for it. The adapter at the end is rank 0's, and all ranks fail with
            // its reason: the first to end is named.
            if reason.contains("checkpoint: ") {
                assert_eq!(reason.contains("checkpoint: rank 0: "), verdict.starts_with("rank 0 "), "{}", done.err);
            }
            goes_on_from(&tiny, 4);
        }
        None => println!("full disk: not run, this system allows no mount in a namespace"),
    }
}

#[test]
fn a_file_that_may_not_grow_while_saving() {
    let tiny = Tiny::new(8);
    // Each rank's part of a checkpoint takes 7 MB. The limit of 5 MB (in blocks of 512 bytes) lets pass what ranks share in memory.
    edit(&tiny.path("train.toml"), "r = 4\n", "r = 512\n");
    tiny.train(2, &["training.steps=2"]);
    let script = "trap '' XFSZ; ulimit -f 10240; exec \"$@\"";
    let done = wrapped(&tiny, &["sh", "-c", script, "sh"], 2, &["checkpoint.interval=2", "comm.share_pages=false"]);
    done.says(
        1,
        &["File too large", "saving the checkpoint: rank 0: ", "earlier checkpoints are intact; training goes on", "rank 0 (pid "],
    );
    assert!(!done.err.contains("rank 1 (pid "), "the rank that could not write is named: {}", done.err);
    goes_on_from(&tiny, 2);
}

#[test]
fn two_runs_in_one_folder() {
    let tiny = Tiny::new(100_000);
    let running = tiny.start(1, &[]);
    until("the first is under way", || tiny.steps("out") > 0);
    let holder = format!("out is in use by pid {} on ", running.pid);
    tiny.run(2, &[]).says(2, &["run folder ", &holder, "set another checkpoint.folder"]);
    running.signal(2);
    let done = running.finish();
    done.says(0, &[]);
    assert!(done.out.contains("the same command continues"), "the first run is untouched: {}", done.out);
}

#[test]
fn a_port_in_use() {
    let taken = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    run(&["--master-port", &port, "--", "true"])
        .says(2, &[&format!("--master-port {port}: Address already in use"), "or 0 for a free one"]);
}

#[test]
fn gradients_that_are_not_finite() {
    let tiny = Tiny::new(12);
    // The first update at such a rate makes weights that overflow.
    let huge = ["optimizer.lr=1e30", "lr_scheduler=", "training.max_skipped_steps=3", "checkpoint.interval=1"];
    let done = tiny.run(2, &huge);
    assert!(!matches!(done.code, Some(0 | 2)), "{:?}", done.code);
    let skipped = "step 3: gradient not finite, no weight was changed; first: rank 0: output of layers.0 in micro-batch 0 (";
    done.says(1, &["WARN step 2: ", skipped, "train.jsonl:", "rank 1: output of layers.0 in micro-batch 1 ("]);
    done.says(1, &["step 4: ", "3 such steps in a row (training.max_skipped_steps), giving up: lower optimizer.lr or check the data"]);
    assert!(done.out.contains(" loss NaN skipped 2 tok/s "), "skipped steps are shown and counted: {}", done.out);
    let rows = std::fs::read_to_string(tiny.path("out/metrics.jsonl")).unwrap();
    let last: serde_json::Value = serde_json::from_str(rows.lines().last().unwrap()).unwrap();
    assert_eq!((last["step"].as_u64(), last["skipped"].as_u64(), last["loss"].is_null()), (Some(3), Some(2), true));
}
