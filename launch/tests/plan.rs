//! `zlaunch plan` says what a run takes on a machine that is not here; `"auto"` is chosen before ranks start, and says why.

mod common;

use common::tiny::*;
use common::*;
use std::path::Path;

fn example(name: &str) -> String {
    format!("{}/../examples/{name}", env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn a_plan_says_memory_time_money_and_what_it_rests_on() {
    let done = run(&["plan", &example("train70b.toml"), "--machine", "2xMI300X"]);
    done.says(0, &[]);
    for part in [
        "70.76 G parameters, 207.1 M trained, on 2x MI300X: replicated (stage 0)",
        "instead of sharded (stage 3)",
        "instead of streamed from host memory (stage 3, offload_param)",
        "weights ",
        "activations ",
        "reserved ",
        "it fits; 6.18 GB of each device are kept free",
        "expected (low .. high)",
        "tokens/s",
        "of the data sheet's peak",
        "decided by      matrix products reach at most 668 TFLOP/s",
        "streams busy    compute",
        "it rests on",
        "published: highest bf16 product found (MAMF) on ROCm 6.3",
        "whole run       111 steps",
        "$",
    ] {
        assert!(done.out.contains(part), "{part:?} not in\n{}", done.out);
    }
}

#[test]
fn an_explicit_choice_is_obeyed_and_compared() {
    let mut args = vec!["plan".to_string(), example("train70b.toml"), "--machine".into(), "2xMI300X".into()];
    for set in [
        "zero.stage=3",
        "zero.offload_param=cpu",
        "zero.offload_optimizer=none",
        "zero.resident_bytes=0",
        "zero.prefetch_depth=0",
        "training.micro_batch_size=2",
        "training.micro_batch_group=1",
        "activation_checkpoint.mode=full",
    ] {
        args.extend(["--set".to_string(), set.to_string()]);
    }
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("step.json");
    args.extend(["--trace".to_string(), trace.display().to_string()]);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let done = run(&args);
    done.says(0, &[]);
    for part in [
        "streamed from host memory (stage 3, offload_param), micro-batch 2 x 4, all blocks recomputed",
        "DeepSpeed's estimate for stage 3",
        "12 gathers x ",
        "a much faster plan: replicated (stage 0)",
        "s in which compute waits: co",
    ] {
        assert!(done.out.contains(part), "{part:?} not in\n{}", done.out);
    }
    // The same form as a run's timeline.
    let json: serde_json::Value = serde_json::from_slice(&std::fs::read(&trace).unwrap()).unwrap();
    let events = json["traceEvents"].as_array().unwrap();
    let names: Vec<&str> = events.iter().filter(|e| e["ph"] == "X").filter_map(|e| e["name"].as_str()).collect();
    for op in ["attention", "all_gather layers.3", "copy layers.3 frozen"] {
        assert!(names.contains(&op), "no {op}");
    }
}

#[test]
fn json_has_the_same() {
    let done = run(&["plan", &example("train8b.toml"), "--machine", "8xH100", "--json", "--set", "training.global_batch_size=32"]);
    done.says(0, &[]);
    let v: serde_json::Value = serde_json::from_str(&done.out).unwrap();
    assert_eq!((v["fits"].as_bool(), v["plan"]["ranks"].as_u64()), (Some(true), Some(8)));
    let secs = &v["plan"]["secs"];
    assert!(secs["low"].as_f64() < secs["expected"].as_f64() && secs["expected"].as_f64() < secs["high"].as_f64());
    assert!(v["plan"]["memory"]["rows"].as_array().unwrap().len() > 4 && v["plan"]["assumptions"].as_array().unwrap().len() >= 3);
}

#[test]
fn what_cannot_be_is_said_with_bytes() {
    run(&["plan", &example("train70b.toml"), "--machine", "1xRTX4090", "--set", "zero.stage=0"])
        .says(2, &["nothing fits on 1x RTX4090", " bytes (", "cheapest change that fits: "]);
    // An explicit plan that does not fit is shown, with what would.
    let mut explicit = vec!["plan".to_string(), example("train8b.toml"), "--machine".into(), "1xRTX4090".into()];
    for set in ["zero.stage=0", "zero.offload_param=none", "zero.offload_optimizer=none", "zero.resident_bytes=0"] {
        explicit.extend(["--set".to_string(), set.to_string()]);
    }
    for set in ["training.micro_batch_size=4", "training.micro_batch_group=1", "activation_checkpoint.mode=none"] {
        explicit.extend(["--set".to_string(), set.to_string()]);
    }
    let done = run(&explicit.iter().map(String::as_str).collect::<Vec<_>>());
    done.says(0, &[]);
    assert!(done.out.contains("it does NOT fit: ") && done.out.contains("cheapest change that fits: leave zero.stage"), "{}", done.out);
    run(&["plan", &example("train70b.toml"), "--machine", "2xMI3000"]).says(2, &["MI3000 is not in the catalogue; known: A100"]);
    run(&["plan", "nothere.toml", "--machine", "H100"]).says(2, &["nothere.toml"]);
}

/// A start with `"auto"` on a machine that nobody calibrated: chosen, told, trained, and the resolved file has no `"auto"`.
#[test]
fn auto_is_chosen_before_ranks_start() {
    let tiny = Tiny::new(2);
    let sets = ["zero.stage=auto", "training.micro_batch_group=auto", "activation_checkpoint.mode=auto"];
    let done = Running::start(&mut tiny.command(2, &sets)).finish();
    done.says(0, &[]);
    let all = format!("{}{}", done.out, done.err);
    assert!(all.contains("chosen (zero.stage, training.micro_batch_group, activation_checkpoint.mode \"auto\")"), "{all}");
    let saved = std::fs::read_to_string(tiny.path("out/config.toml")).unwrap();
    assert!(!saved.contains("stage = \"auto\"") && !saved.contains("mode = \"auto\""), "{saved}");
}

#[test]
fn a_calibrated_host_is_planned_by_its_own_figures() {
    let tiny = Tiny::new(2);
    let hw = tiny.path("home/zlaunch/hw");
    std::fs::create_dir_all(&hw).unwrap();
    let measured = Path::new(env!("CARGO_MANIFEST_DIR")).join("../benches/validation/machine.toml");
    std::fs::copy(measured, hw.join("local.toml")).unwrap();
    let plan = |home: Option<&Path>| {
        let mut command = zlaunch();
        command.current_dir(tiny.path(".")).args(["plan", "train.toml", "-n", "2", "--set", "device.kind=cpu"]);
        command.env("XDG_CONFIG_HOME", home.unwrap_or(Path::new("/nowhere")));
        let done = Running::start(&mut command).finish();
        assert_eq!(done.code, Some(0), "{}", done.err);
        done.out
    };
    let (own, guessed) = (plan(Some(&tiny.path("home"))), plan(None));
    assert!(own.contains("measured"), "{own}");
    assert_ne!(own, guessed);
}
