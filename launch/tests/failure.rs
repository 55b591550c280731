//! One rank dies (SIGKILL) or stands still (SIGSTOP) in each phase of a run: the job ends within seconds, nobody is left, and the last
//! thing said is which rank it was and what happened to it. The others, who fail because of it, are not accused.

mod common;

use common::tiny::*;
use common::*;
use std::time::{Duration, Instant};

const KILL: i32 = 9;
const STOP: i32 = 19;
const CONT: i32 = 18;
/// `comm.heartbeat_timeout_seconds` of [`Tiny`]: a stopped rank is lost after it.
const HEARTBEAT: Duration = Duration::from_secs(2);
/// A killed rank's job is to end within 5 s; thrice that, since these tests share a machine with others.
const END: Duration = Duration::from_secs(15);

/// Steps of a second or more, for moments inside a step.
const LONG_STEPS: [&str; 3] = ["training.seq_len=256", "training.global_batch_size=128", "checkpoint.interval=0"];
/// Steps of some 10 ms, each saved.
const SAVED_STEPS: [&str; 2] = ["lora=", "checkpoint.interval=1"];

/// Starts `ranks` ranks, waits for `moment`, sends `signal` to rank `victim`, and looks at the end.
fn strike(phase: &str, ranks: usize, sets: &[&str], victim: usize, signal: i32, moment: impl Fn(&Tiny, &[u32])) {
    let tiny = Tiny::new(100_000);
    let running = tiny.start(ranks, sets);
    let pids = all_ranks_of(running.pid, ranks);
    moment(&tiny, &pids);
    let struck = Instant::now();
    kill(pids[victim], signal);
    if signal == KILL {
        // Ranks that `moment` stopped were not to fail themselves.
        pids.iter().enumerate().filter(|(r, _)| *r != victim).for_each(|(_, p)| kill(*p, CONT));
    }
    let done = running.finish();
    let took = struck.elapsed();
    nobody_left(&pids);
    println!("{phase}, {} of rank {victim} of {ranks}: {:.2} s", if signal == KILL { "SIGKILL" } else { "SIGSTOP" }, took.as_secs_f64());

    let named = format!("rank {victim} (pid {}, host ", pids[victim]);
    match signal {
        KILL => done.says(137, &[&named, "died: signal 9 (SIGKILL)"]),
        _ => done.says(1, &[&named, "is stopped (SIGSTOP): no sign of life for "]),
    }
    let verdict = done.err.rfind(&named).unwrap();
    let after = done.err[verdict..].lines().skip(1).find(|l| !l.starts_with("  "));
    assert_eq!(after, None, "the verdict is the last thing said:\n{}", done.err);
    let accused = done.err.lines().filter(|l| l.starts_with("rank ") && !l.starts_with(&named)).collect::<Vec<_>>();
    assert!(accused.is_empty(), "victims are accused: {accused:?}\n{}", done.err);
    let limit = if signal == KILL { END } else { END + HEARTBEAT };
    assert!(took < limit, "{phase}: {took:?}");
    let latest = zrt::checkpoint::latest(&tiny.path("out"), zrt::checkpoint::Check::Full).unwrap();
    assert!(latest.skipped.is_empty(), "{:?}", latest.skipped);
}

fn at_once(_: &Tiny, _: &[u32]) {}

fn after_a_step(tiny: &Tiny, _: &[u32]) {
    until("a step is done", || tiny.steps("out") > 0);
}

/// A moment of a long step: forward, backward or the update.
fn inside_a_step(seed: u64) -> impl Fn(&Tiny, &[u32]) {
    move |tiny, pids| {
        after_a_step(tiny, pids);
        std::thread::sleep(Duration::from_millis(Dice(seed).below(1000)));
    }
}

fn while_saving(tiny: &Tiny, pids: &[u32]) {
    after_a_step(tiny, pids);
    until("a save is under way", || tiny.saving("out"));
}

/// All but the victim stand still, so that it waits for them in a collective: it uses no time any more beyond its heartbeat's.
fn waiting_for_others(victim: usize) -> impl Fn(&Tiny, &[u32]) {
    move |tiny, pids| {
        after_a_step(tiny, pids);
        pids.iter().enumerate().filter(|(r, _)| *r != victim).for_each(|(_, p)| kill(*p, STOP));
        let ticks = || {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", pids[victim])).unwrap();
            let fields: Vec<u64> =
                stat.rsplit_once(')').unwrap().1.split_whitespace().skip(11).take(2).map(|f| f.parse().unwrap()).collect();
            fields[0] + fields[1]
        };
        // A step takes some 10 ms: 300 ms with at most a tick of them used are not a step.
        until("the victim waits", || {
            let before = ticks();
            std::thread::sleep(Duration::from_millis(300));
            ticks() <= before + 1
        });
    }
}

#[test]
fn at_the_start() {
    for (victim, signal) in [(0, KILL), (1, KILL), (0, STOP), (1, STOP)] {
        strike("start", 2, &[], victim, signal, at_once);
    }
}

#[test]
fn inside_steps() {
    for (ranks, victim, signal, seed) in [(2, 0, KILL, 1), (2, 1, KILL, 2), (4, 2, KILL, 3), (2, 0, STOP, 4), (4, 3, STOP, 5)] {
        strike("inside a step", ranks, &LONG_STEPS, victim, signal, inside_a_step(seed));
    }
}

#[test]
fn in_collectives() {
    for (ranks, victim) in [(2, 0), (2, 1), (4, 1)] {
        strike("in a collective", ranks, &[], victim, KILL, waiting_for_others(victim));
    }
    for victim in [0, 1] {
        strike("short steps", 2, &["comm.share_pages=false"], victim, STOP, after_a_step);
    }
}

#[test]
fn while_saving_checkpoints() {
    for (victim, signal) in [(0, KILL), (1, KILL), (0, STOP), (1, STOP)] {
        strike("saving", 2, &SAVED_STEPS, victim, signal, while_saving);
    }
}
