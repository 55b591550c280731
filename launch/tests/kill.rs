//! `kill -9` of a whole job at 30 random moments, many of them while it saves: what lies in the run folder is always whole, and the
//! same command continues to the same numbers.

mod common;

use common::tiny::*;
use common::*;
use std::process::Command;
use std::time::{Duration, Instant};
use zrt::checkpoint::{Check, folder, latest};

const KILLS: usize = 30;
const STEPS: u64 = 25;

/// Launcher and ranks at once; ranks not yet seen die with the launcher.
fn kill_job(launcher: u32) -> Vec<u32> {
    let ranks: Vec<u32> = ranks_of(launcher).into_values().collect();
    let pids = std::iter::once(launcher).chain(ranks.iter().copied()).map(|p| p.to_string());
    // Some may have ended by themselves in the meantime.
    let _ = Command::new("kill").arg("-9").args(pids).stderr(std::process::Stdio::null()).status();
    ranks
}

#[test]
fn thirty_kills() {
    let tiny = Tiny::new(STEPS);
    let saving = ["checkpoint.interval=1", "checkpoint.keep_latest_k=3"];
    let begun = Instant::now();
    tiny.train(2, &[&saving[..], &["checkpoint.folder=unbroken"]].concat());
    let length = begun.elapsed();
    let (losses, adapter) = (tiny.losses("unbroken"), tiny.adapter("unbroken"));

    let mut dice = Dice(30);
    let (mut in_save, mut with_none, mut whole_runs) = (0, 0, 0);
    let out = tiny.path("out");
    for kill in 0..KILLS {
        let (ranks, stage) = (1 << dice.below(2), format!("zero.stage={}", dice.below(4)));
        let running = tiny.start(ranks, &[&saving[..], &[&stage]].concat());
        // Squared, so that early moments, before there is a checkpoint, are among them.
        let moment = length.mul_f64((dice.below(1000) as f64 / 1000.0).powi(2));
        let begun = Instant::now();
        // Every second one as soon as a save is seen after the moment.
        while begun.elapsed() < moment || (kill % 2 == 1 && !tiny.saving("out") && begun.elapsed() < length) {
            std::thread::sleep(Duration::from_micros(100));
        }
        let pids = kill_job(running.pid);
        running.finish();
        nobody_left(&pids);
        in_save += usize::from(tiny.saving("out"));

        // What bears a checkpoint's name is one, byte for byte.
        for (_, dir) in folder::steps(&out).unwrap() {
            let reader = zrt::checkpoint::Reader::open(&dir).unwrap_or_else(|e| panic!("kill {kill}: {e}"));
            reader.verify().unwrap_or_else(|e| panic!("kill {kill}: {e}"));
        }
        let found = latest(&out, Check::Full).unwrap();
        assert!(found.skipped.is_empty(), "kill {kill}: {:?}", found.skipped);
        match found.found {
            None => with_none += 1,
            Some(reader) if reader.manifest().step == STEPS => {
                finish_and_compare(&tiny, &saving, &losses, &adapter);
                whole_runs += 1;
                std::fs::remove_dir_all(&out).unwrap();
            }
            Some(_) => {}
        }
    }
    finish_and_compare(&tiny, &saving, &losses, &adapter);
    println!(
        "{KILLS} kills: {in_save} left a save unfinished, {with_none} came before the first checkpoint; {} runs all ended like the unbroken one",
        whole_runs + 1
    );
}

#[track_caller]
fn finish_and_compare(tiny: &Tiny, saving: &[&str], losses: &std::collections::BTreeMap<u64, (u64, u64)>, adapter: &[u8]) {
    tiny.train(2, saving);
    assert_eq!(&tiny.losses("out"), losses, "every step is there once, with the unbroken run's numbers");
    assert!(tiny.adapter("out") == adapter, "another adapter");
    assert!(!tiny.saving("out"), "what was left unfinished is removed at the next start");
}
