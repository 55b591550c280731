//! A run that was interrupted continues as if it had not been, whatever the ranks and the sharding before and after.
//!
//! Deterministic mode: every comparison is of bits, of losses, gradient norms and of the adapter at the end. The runs have
//! dropout, a learning rate that changes with every step, and are cut in the middle of an epoch.

mod common;

use common::tiny::*;
use common::*;

const STEPS: u64 = 12;

#[test]
fn saved_on_two_ranks_resumed_on_any() {
    let tiny = Tiny::new(STEPS);
    tiny.train(2, &["checkpoint.interval=1", "checkpoint.keep_latest_k=20"]);
    let (losses, adapter) = (tiny.losses("out"), tiny.adapter("out"));
    assert_eq!(losses.len() as u64, STEPS);
    // 1 is inside the warm-up, 5 in the middle of the first epoch, 8 of the second.
    for (from, ranks, sets) in [
        (5, 1, &["zero.stage=0"][..]),
        (5, 1, &["zero.stage=3", "zero.offload_param=cpu", "zero.offload_optimizer=cpu"]),
        (5, 2, &["zero.stage=1", "zero.offload_optimizer=cpu"]),
        (5, 2, &["zero.stage=2", "comm.share_pages=false"]),
        (5, 2, &["zero.stage=3", "training.micro_batch_group=all"]),
        (5, 4, &["zero.stage=3", "comm.share_pages=false"]),
        (1, 4, &["zero.stage=0", "zero.offload_optimizer=cpu"]),
        (8, 4, &["zero.stage=1", "activation_checkpoint.mode=full"]),
        (8, 1, &["zero.stage=2"]),
    ] {
        let case = format!("from step {from} on {ranks} ranks, {sets:?}");
        let out = tiny.path("again");
        let _ = std::fs::remove_dir_all(&out);
        let resume = format!("checkpoint.resume={}", tiny.path(&format!("out/step-{from:08}")).display());
        tiny.train(ranks, &[sets, &["checkpoint.folder=again", &resume]].concat());
        let remaining = losses.iter().filter(|(s, _)| **s > from).map(|(s, l)| (*s, *l)).collect();
        assert_eq!(tiny.losses("again"), remaining, "{case}");
        assert!(tiny.adapter("again") == adapter, "another adapter {case}");
    }
}

#[test]
fn all_weights_resume_too() {
    let tiny = Tiny::new(8);
    let full = ["lora=", "checkpoint.keep_latest_k=20", "checkpoint.interval=3", "training.max_grad_norm=0.5"];
    let model = |out: &str| std::fs::read(tiny.path(out).join("model/model.safetensors")).unwrap();
    tiny.train(2, &full);
    for (ranks, stage) in [(1, "zero.stage=1"), (4, "zero.stage=3")] {
        let _ = std::fs::remove_dir_all(tiny.path("again"));
        let resume = format!("checkpoint.resume={}", tiny.path("out/step-00000003").display());
        tiny.train(ranks, &[&full[..], &[stage, "checkpoint.folder=again", &resume]].concat());
        assert_eq!(tiny.losses("again"), tiny.losses("out").split_off(&4), "{ranks} ranks, {stage}");
        assert!(model("again") == model("out"), "another model on {ranks} ranks, {stage}");
    }
}

/// The same folder and `checkpoint.resume = "auto"`: ask a run to stop, start it again.
#[test]
fn ctrl_c_saves_and_the_same_command_continues() {
    // Some seconds long, so that the signals arrive before its end.
    let tiny = Tiny::new(300);
    tiny.train(2, &["checkpoint.folder=unbroken"]);
    let mut at = 0;
    for (ranks, stage, signal) in [(2, "zero.stage=3", 2), (4, "zero.stage=1", 15)] {
        let running = tiny.start(ranks, &[stage]);
        until("some steps more", || tiny.steps("out") > at + 2);
        running.signal(signal);
        let done = running.finish();
        done.says(0, &["stopping after this step, again to end at once"]);
        at = tiny.steps("out");
        let text = format!("stopped after step {at}; the same command continues");
        assert!(done.out.contains(&text), "{text:?} not in\n{}", done.out);
        let latest = zrt::checkpoint::latest(&tiny.path("out"), zrt::checkpoint::Check::Full).unwrap();
        assert_eq!(latest.found.unwrap().manifest().step, at as u64, "the step it stopped after is saved");
    }
    let done = tiny.train(1, &["zero.stage=2"]);
    assert!(done.err.contains(&format!("continuing after step {at} from ")), "{}", done.err);
    assert!(done.out.contains(&format!("{} steps", 300 - at)), "{}", done.out);
    assert_eq!(tiny.losses("out"), tiny.losses("unbroken"));
    assert!(tiny.adapter("out") == tiny.adapter("unbroken"));
    let done = tiny.train(2, &[]);
    assert!(done.out.contains("nothing left to do after step 300"), "{}", done.out);
    assert!(tiny.adapter("out") == tiny.adapter("unbroken"));
}

#[test]
fn a_second_ctrl_c_ends_at_once() {
    // Steps of a second or more: the first Ctrl-C waits for the step.
    let tiny = Tiny::new(100_000);
    let running = tiny.start(2, &["training.seq_len=256", "training.global_batch_size=128"]);
    let pids = all_ranks_of(running.pid, 2);
    until("a step is done", || tiny.steps("out") > 0);
    // Several, since signals that arrive together count as one.
    for _ in 0..10 {
        running.signal(2);
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    running.finish().says(130, &["ended at once, on signal 2 (SIGINT)"]);
    nobody_left(&pids);
}
