//! What a person can look at before, during and after a run: the plan, the data, the timeline.

mod common;

use common::tiny::*;
use common::*;

#[test]
fn a_dry_run_starts_and_writes_nothing() {
    let tiny = Tiny::new(2);
    let done = Running::start(tiny.command(2, &["zero.stage=2"]).arg("--dry-run")).finish();
    done.says(0, &[]);
    for part in ["134,592 parameters, 9,344 trained", "zero.stage 2, 2 ranks", "layers.0 .. layers.1 (2x)", "per rank ", "per host "] {
        assert!(done.out.contains(part), "{part:?} not in\n{}", done.out);
    }
    assert!(!tiny.path("out").exists() && !tiny.path("cache").exists());
}

#[test]
fn data_is_shown_without_weights() {
    let tiny = Tiny::new(2);
    std::fs::create_dir(tiny.path("m")).unwrap();
    std::fs::copy(model().join("config.json"), tiny.path("m/config.json")).unwrap();
    tiny.write("d.jsonl", "{\"input_ids\": [1, 2, 3, 4, 5], \"labels\": [-100, -100, 3, 4, -100]}\n");
    let file = tiny.path("train.toml");
    let data = format!("dataset.0.path={}", tiny.path("d.jsonl").display());
    let model = format!("model.path={}", tiny.path("m").display());
    let done = run(&["data", "show", file.to_str().unwrap(), "--set", &data, "--set", &model, "--rows", "1"]);
    done.says(0, &[]);
    let row = done.out.split("== step 0, micro-batch 0, row 0").nth(1).unwrap_or_default();
    assert!(row.contains("d.jsonl:1: 5 tokens, 2 trained") && row.contains("1 2 [3 4 ]5"), "{}", done.out);
    assert!(!tiny.path("out").exists());
}

/// The form that chrome://tracing and ui.perfetto.dev read: complete events with times in order of their starts per stream.
#[test]
fn a_timeline_of_each_rank() {
    let tiny = Tiny::new(3);
    let done = Running::start(tiny.command(2, &[]).arg("--trace")).finish();
    done.says(0, &[]);
    for rank in 0..2 {
        let text = std::fs::read(tiny.path(&format!("out/trace-rank-{rank}.json"))).unwrap();
        let json: serde_json::Value = serde_json::from_slice(&text).unwrap();
        let events = json["traceEvents"].as_array().unwrap();
        let of = |kind: &str| events.iter().filter(|e| e["ph"] == kind).collect::<Vec<_>>();
        let streams: Vec<&str> = of("M").iter().filter(|e| e["name"] == "thread_name").filter_map(|e| e["args"]["name"].as_str()).collect();
        assert!(streams.contains(&"compute") && streams.contains(&"comm"), "{streams:?}");
        for e in of("X") {
            assert!(e["name"].is_string() && e["tid"].is_u64() && e["pid"].as_u64() == Some(rank), "{e}");
            assert!(e["ts"].as_f64().is_some_and(|t| t > 0.0) && e["dur"].as_f64().is_some_and(|d| d >= 0.0), "{e}");
        }
        let names: Vec<&str> = of("X").iter().filter_map(|e| e["name"].as_str()).collect();
        for op in ["attention", "adamw", "reduce_scatter"] {
            assert!(names.iter().any(|n| n.contains(op)), "no {op} in the timeline of rank {rank}");
        }
        // An arrow from a record to each wait for it.
        assert!(!of("s").is_empty() && !of("f").is_empty());
    }
}
