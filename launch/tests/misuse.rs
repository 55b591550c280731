//! Wrong input ends with code 2 and a sentence that says what to do, before any rank starts.

mod common;

use common::*;
use std::path::{Path, PathBuf};

fn config(folder: &Path, more: &str) -> PathBuf {
    let path = folder.join("train.toml");
    let text = format!(
        "[model]\npath = \"{0}/model\"\n[[dataset]]\npath = \"train.jsonl\"\n[checkpoint]\nfolder = \"out\"\n[training]\nseq_len = 64\nsteps = 2\n{more}",
        folder.display()
    );
    std::fs::write(&path, text).unwrap();
    path
}

#[test]
fn commands_that_cannot_be_meant() {
    run(&[]).says(2, &["Usage"]);
    run(&["-n", "0", "train.toml"]).says(2, &["0"]);
    run(&["train.py"]).says(2, &["train.py is not a .toml file; to start a program put -- before it: zlaunch -n 1 -- train.py"]);
    run(&["nothere.toml"]).says(2, &["nothere.toml: cannot be read"]);
    run(&["--", "no-such-program-here"]).says(2, &["program no-such-program-here is not found"]);
    run(&["--", "train.toml"]).says(2, &["a configuration goes without --: zlaunch train.toml"]);
    run(&["--set", "a.b=1", "--", "true"]).says(2, &["--set is for training runs"]);
    run(&["a.toml", "--", "true"]).says(2, &["both a.toml and a program"]);
}

#[test]
fn a_wrong_configuration_lists_all_problems() {
    let dir = tempfile::tempdir().unwrap();
    let path = config(dir.path(), "epochs = 1\nmicro_batchsize = 2\n");
    let done = run(&["-n", "2", path.to_str().unwrap()]);
    done.says(2, &["2 problems in the configuration", "train.toml:11:1: unknown key training.micro_batchsize", "both given: keep one"]);
    assert!(!dir.path().join("out").exists(), "nothing is made before the input is good");
}

#[test]
fn more_ranks_than_micro_batches() {
    let dir = tempfile::tempdir().unwrap();
    let path = config(dir.path(), "global_batch_size = 4\nmicro_batch_size = 2\n");
    run(&["-n", "4", path.to_str().unwrap()]).says(2, &["train.toml: global_batch_size 4", "fewer than 4 ranks; use -n 2"]);
}

#[test]
fn two_runs_in_one_folder() {
    let dir = tempfile::tempdir().unwrap();
    let path = config(dir.path(), "");
    let out = dir.path().join("out");
    std::fs::create_dir(&out).unwrap();
    let lock = std::fs::File::create(out.join("run.lock")).unwrap();
    std::fs::write(out.join("run.lock"), "pid 4711 on here\n").unwrap();
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).unwrap();
    run(&[path.to_str().unwrap()]).says(2, &["is in use by pid 4711 on here", "set another checkpoint.folder"]);
    drop(lock);
    let done = run(&[path.to_str().unwrap()]);
    assert!(!done.err.contains("in use"), "the lock goes with its holder: {}", done.err);
}

#[test]
fn an_existing_run_is_not_overwritten_when_asked_to_start_anew() {
    let dir = tempfile::tempdir().unwrap();
    let path = config(dir.path(), "");
    std::fs::create_dir(dir.path().join("out")).unwrap();
    std::fs::write(dir.path().join("out/metrics.jsonl"), "{}").unwrap();
    run(&[path.to_str().unwrap(), "--set", "checkpoint.resume=none"]).says(2, &["holds a run already (metrics.jsonl)", "\"auto\""]);
}

#[test]
fn a_model_that_is_not_there() {
    let dir = tempfile::tempdir().unwrap();
    let path = config(dir.path(), "");
    run(&[path.to_str().unwrap()]).says(2, &["model"]);
}

#[test]
fn a_configuration_is_shown_with_its_defaults() {
    let dir = tempfile::tempdir().unwrap();
    let path = config(dir.path(), "");
    let done = run(&["config", "show", path.to_str().unwrap(), "--set", "zero.stage=3"]);
    assert_eq!(done.code, Some(0), "{}", done.err);
    assert!(done.out.contains("stage = 3") && done.out.contains("micro_batch_size = 1"), "{}", done.out);
    std::fs::write(dir.path().join("again.toml"), &done.out).unwrap();
    let again = run(&["config", "show", dir.path().join("again.toml").to_str().unwrap()]);
    assert_eq!(again.out, done.out, "what is shown loads to the same");
}
