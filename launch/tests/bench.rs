//! Every `zlaunch bench` runs and prints its figures beside their limits, at sizes that take no time: nothing here depends on speed.

mod common;

use common::tiny::{Tiny, model};
use common::*;
use serde_json::Value;

/// The tables that a bench prints with `--json`.
fn tables(arguments: &[&str]) -> Vec<Value> {
    let done = run(&[&["bench", "--json"], arguments].concat());
    done.says(0, &[]);
    serde_json::from_str(&done.out).unwrap_or_else(|e| panic!("{e}: {}", done.out))
}

fn rows(table: &Value) -> &Vec<Value> {
    table["rows"].as_array().unwrap()
}

/// Every row has a positive number under `key`.
fn positive(table: &Value, key: &str) {
    assert!(!rows(table).is_empty());
    assert!(rows(table).iter().all(|r| r[key].as_f64().is_some_and(|x| x > 0.0)), "{key} of {table}");
}

#[test]
fn products_and_updates() {
    let products = tables(&["matmul", "--tokens", "8", "--budget", "0", "--threads", "1", "--type", "bf16"]);
    assert_eq!(rows(&products[0]).len(), 5);
    for key in ["forward GFLOP/s", "dgrad GFLOP/s", "wgrad GFLOP/s"] {
        positive(&products[0], key);
    }
    let updates = tables(&["adam", "--params", "5000", "--rounds", "2", "--threads", "2"]);
    assert_eq!(rows(&updates[0]).len(), 2);
    positive(&updates[0], "of limit %");
    let text = run(&["bench", "adam", "--params", "5000", "--rounds", "1"]);
    text.says(0, &[]);
    assert!(text.out.contains("limit: a loop that only reads and writes the same streams"), "{}", text.out);
}

#[test]
fn collectives() {
    let two = tables(&["collectives", "-n", "2,4", "--bytes", "64,4096"]);
    assert_eq!(two.len(), 2);
    assert_eq!(rows(&two[1]).len(), 6);
    positive(&two[1], "us");
    positive(&two[1], "limit us");
    run(&["bench", "collectives", "-n", "4", "--bytes", "24"]).says(2, &["not a multiple of 16"]);
}

#[test]
fn loading() {
    let folder = model();
    for more in [&["-n", "1"][..], &["-n", "2", "--type", "f32", "--no-share-pages"]] {
        let table = &tables(&[&["load", folder.to_str().unwrap(), "--rounds", "1"], more].concat())[0];
        assert_eq!(rows(table).len(), 4);
        positive(table, "load ms");
        positive(table, "times limit");
    }
}

#[test]
fn steps_and_sweeps() {
    let tiny = Tiny::new(2);
    let file = tiny.path("train.toml");
    let file = file.to_str().unwrap();
    let step = tables(&["step", "-n", "2", "--steps", "2", file]);
    positive(&step[0], "tokens/s");
    assert!(rows(&step[1]).iter().any(|r| r["operation"] == "linear"), "{}", step[1]);
    assert!(!tiny.path("out").exists(), "a bench writes nothing");
    for (axis, values) in [("tokens", "1,2"), ("layers", "1,2"), ("ranks", "1,2")] {
        let sweep = tables(&["step", "--steps", "2", "--sweep", axis, "--values", values, file]);
        assert_eq!(rows(&sweep[0]).len(), 2, "{axis}");
        positive(&sweep[0], "secs a step");
        assert_eq!(rows(&sweep[1])[0]["term"], "step", "{axis}");
    }
}

#[test]
fn what_cannot_be_meant() {
    run(&["bench"]).says(2, &["Usage"]);
    run(&["bench", "adam", "--params", "0"]).says(2, &["0"]);
    run(&["bench", "load", "no/such/model/here"]).says(2, &["no such directory"]);
    run(&["bench", "step", "nothere.toml"]).says(2, &["nothere.toml: cannot be read"]);
    run(&["bench", "step", "nothere.toml", "--values", "1,2"]).says(2, &["--sweep"]);
    let tiny = Tiny::new(2);
    let file = tiny.path("train.toml");
    run(&["bench", "step", "--set", "zero.stage=7", file.to_str().unwrap()]).says(2, &["zero.stage"]);
}
