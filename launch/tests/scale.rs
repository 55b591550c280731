//! `zlaunch calibrate` and `zlaunch scale`: what they write is whole, and says what cannot run and why. Nothing here depends on speed.

mod common;

use common::tiny::Tiny;
use common::*;
use std::path::Path;

/// The lines of `study.csv` as (column, value), quoted commas put together.
fn rows(folder: &Path) -> Vec<Vec<(String, String)>> {
    let text = std::fs::read_to_string(folder.join("study.csv")).unwrap();
    let cells = |line: &str| {
        let (mut out, mut cell, mut quoted) = (Vec::new(), String::new(), false);
        for c in line.chars() {
            match c {
                '"' => quoted = !quoted,
                ',' if !quoted => out.push(std::mem::take(&mut cell)),
                c => cell.push(c),
            }
        }
        out.push(cell);
        out
    };
    let mut lines = text.lines();
    let head = cells(lines.next().unwrap());
    let row = |line: &str| {
        let values = cells(line);
        assert_eq!(values.len(), head.len(), "{line}");
        head.iter().cloned().zip(values).collect()
    };
    lines.map(row).collect()
}

fn get<'a>(row: &'a [(String, String)], column: &str) -> &'a str {
    &row.iter().find(|c| c.0 == column).unwrap_or_else(|| panic!("no column {column}")).1
}

fn number(row: &[(String, String)], column: &str) -> f64 {
    get(row, column).parse().unwrap_or_else(|e| panic!("{column}: {e}: {:?}", get(row, column)))
}

/// `zlaunch scale train.toml --out study ...`
fn scale(tiny: &Tiny, arguments: &[&str]) -> Done {
    let mut command = zlaunch();
    command.current_dir(tiny.path("")).args(["scale", "train.toml", "--out", "study"]).args(arguments);
    Running::start(&mut command).finish()
}

#[test]
fn a_study_is_a_table_and_a_page_that_stands_alone() {
    let tiny = Tiny::new(3);
    let sweep = ["--sweep", "zero.stage=0,3", "--sweep", "training.micro_batch_size=1,2,64"];
    let batch = ["--machine", "H100x8", "--nodes", "1,...,4", "--set", "training.global_batch_size=64"];
    scale(&tiny, &[&batch[..], &sweep].concat()).says(0, &[]);
    let rows = rows(&tiny.path("study"));
    // 6 choices; at the smallest size once, at the others twice.
    assert_eq!(rows.len(), 6 * (1 + 2 * 2));
    for row in &rows {
        if get(row, "training.micro_batch_size") == "64" {
            assert_eq!(get(row, "feasible"), "no");
            assert!(!get(row, "reason").is_empty() && get(row, "secs").is_empty(), "{row:?}");
            continue;
        }
        assert_eq!(get(row, "feasible"), "yes", "{row:?}");
        let [low, secs, high] = ["secs_low", "secs", "secs_high"].map(|c| number(row, c));
        assert!(0.0 < low && low <= secs && secs <= high, "{row:?}");
        // 32 tokens a sequence.
        let tokens = 32.0 * number(row, "global_batch_size");
        // Printed with all digits.
        assert!((number(row, "tokens_per_s") * secs / tokens - 1.0).abs() < 1e-9, "{row:?}");
        assert!(number(row, "device_bytes") > 0.0 && number(row, "usd_per_mtoken") > 0.0);
        let grown = if get(row, "scaling") == "weak" { number(row, "nodes") } else { 1.0 };
        assert_eq!(number(row, "global_batch_size"), 64.0 * grown);
    }
    let page = std::fs::read_to_string(tiny.path("study/report.html")).unwrap();
    for outside in ["<script", "<link", "<img", "@import", "src=\"", "href=\""] {
        assert!(!page.contains(outside), "{outside}");
    }
    assert_eq!(page.matches("<svg").count(), 6);
    assert!(page.contains("What cannot run, and why (10)"));
}

#[test]
fn what_does_not_fit_says_by_how_much() {
    let tiny = Tiny::new(3);
    let small = ["--machine", "H100x8,device_memory=1MB", "--set", "training.global_batch_size=64"];
    let done = scale(&tiny, &small);
    done.says(0, &[]);
    assert!(done.out.contains("1 configuration, 0 can run"), "{}", done.out);
    let rows = rows(&tiny.path("study"));
    assert!(get(&rows[0], "reason").contains("bytes too many on a device"), "{rows:?}");
}

#[test]
fn a_calibrated_machine_is_read_and_used() {
    let tiny = Tiny::new(3);
    let file = tiny.path("hw/local.toml");
    let file = file.to_str().unwrap();
    let done = run(&["calibrate", "--quick", "--out", file]);
    done.says(0, &["measuring"]);
    assert!(done.out.contains("products, bf16") && done.out.contains(file), "{}", done.out);
    let text = std::fs::read_to_string(file).unwrap();
    for part in
        ["how = \"measured\"", "zlaunch calibrate, 20", "[[part.matmul.f32.points]]", "op = \"reduce_scatter\"", "[part.ops.rmsnorm_f32"]
    {
        assert!(text.contains(part), "{part} not in\n{text}");
    }
    scale(&tiny, &["--hw", "hw", "-n", "1,2"]).says(0, &[]);
    let before = number(&rows(&tiny.path("study"))[0], "secs");
    // Every product a thousand times slower than measured: the study follows the file.
    let mut slower = String::new();
    for line in text.lines() {
        match line.strip_prefix("flops = ").and_then(|v| v.parse::<f64>().ok()) {
            Some(flops) => slower += &format!("flops = {:e}\n", flops / 1000.0),
            None => slower += &format!("{line}\n"),
        }
    }
    tiny.write("hw/local.toml", slower);
    scale(&tiny, &["--hw", "hw", "-n", "1,2"]).says(0, &[]);
    assert!(number(&rows(&tiny.path("study"))[0], "secs") > 2.0 * before);
}

#[test]
fn real_runs_stand_beside_their_predictions() {
    let tiny = Tiny::new(3);
    let done = scale(&tiny, &["--measure", "-n", "1,2", "--sweep", "zero.stage=0,3", "--steps", "3"]);
    done.says(0, &[]);
    assert!(done.out.contains("predicted against measured"), "{}", done.out);
    let rows = rows(&tiny.path("study"));
    // Each choice on one rank, and on two with either batch.
    assert_eq!(rows.len(), 6);
    assert!(rows.iter().all(|r| number(r, "measured_secs") > 0.0 && number(r, "measured_device_bytes") > 0.0), "{rows:?}");
    assert!(!tiny.path("out").exists(), "the configuration's own run folder is left alone");
    assert_eq!(std::fs::read_dir(tiny.path("study")).unwrap().count(), 2, "real runs leave nothing behind");
    assert!(std::fs::read_to_string(tiny.path("study/report.html")).unwrap().contains("Real runs on this machine"));
}

#[test]
fn what_cannot_be_meant() {
    let tiny = Tiny::new(3);
    scale(&tiny, &["--machine", "H100x8", "--nodes", "4,2"]).says(2, &["2 is not above 4"]);
    scale(&tiny, &["--nodes", "2"]).says(2, &["--machine"]);
    scale(&tiny, &["--machine", "H1000x8"]).says(2, &["not in the catalogue"]);
    scale(&tiny, &["--machine", "H100x8", "--sweep", "zero.stage"]).says(2, &["expected key=value"]);
    scale(&tiny, &["--machine", "H100x8", "--sweep", "zero.staeg=0,3"]).says(2, &["staeg"]);
    scale(&tiny, &["--machine", "H100x8", "--measure"]).says(2, &["cannot be used with"]);
}
