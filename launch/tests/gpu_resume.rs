//! Does a run continue on another device as on its own? A checkpoint that two GPUs wrote at stage 3 continues with the same bits on the same
//! kind of device, whatever the ranks and the sharding, and on every other kind within rounding.

mod common;

use common::gpu::{BOTH, CUDA, Gpu, GpuRun, HIP, can_run};
use common::tiny::{Tiny, all_ranks_of};
use common::{kill, nobody_left, until};
use std::collections::BTreeMap;

const STEPS: u64 = 4;
/// The checkpoint that continues.
const FROM: u64 = 2;
/// Losses of the steps that are left, across kinds: each differs by another order of sums, as PyTorch differs from itself by 1e-6
/// (tests/golden/noise.json), and twice that covers two steps of a small learning rate.
const LOSS: f64 = 2e-6;
/// The same of gradient norms, where PyTorch differs from itself by 5e-6.
const NORM: f64 = 1e-5;

type Losses = BTreeMap<u64, (u64, u64)>;

/// Starts are under load from other tests.
const PATIENT: &str = "comm.heartbeat_timeout_seconds=30";

fn on(device: Option<Gpu>, tiny: &Tiny, ranks: usize, sets: &[&str]) {
    let sets = [&[PATIENT][..], sets].concat();
    match device {
        Some(gpu) => drop(GpuRun { tiny, gpu, ranks, emulator: "" }.train(&sets)),
        None => drop(tiny.train(ranks, &[&["device.kind=cpu"][..], &sets].concat())),
    }
}

#[track_caller]
fn close(got: &Losses, want: &Losses, case: &str) {
    assert!(got.keys().eq(want.keys()), "{case}: steps {:?}", got.keys());
    let mut worst = (0f64, 0f64);
    for (step, (loss, norm)) in got {
        let relative = |a: u64, b: u64| (f64::from_bits(a) / f64::from_bits(b) - 1.0).abs();
        let (loss, norm) = (relative(*loss, want[step].0), relative(*norm, want[step].1));
        assert!(loss <= LOSS && norm <= NORM, "{case}, step {step}: loss {loss:e}, norm {norm:e} apart");
        worst = (worst.0.max(loss), worst.1.max(norm));
    }
    println!("{case}: losses {:.1e}, norms {:.1e} apart", worst.0, worst.1);
}

/// A run on `from`, and its checkpoint continued in each of `cases`: device, ranks, settings.
fn matrix(from: Option<Gpu>, cases: &[(Option<Gpu>, usize, &[&str])]) {
    if !can_run() {
        return;
    }
    let tiny = Tiny::new(STEPS);
    on(from, &tiny, 2, &["checkpoint.interval=1", "checkpoint.keep_latest_k=20"]);
    let (losses, adapter) = (tiny.losses("out"), tiny.adapter("out"));
    let left: Losses = losses.into_iter().filter(|(step, _)| *step > FROM).collect();
    let resume = format!("checkpoint.resume={}", tiny.path(&format!("out/step-{FROM:08}")).display());
    let name = |device: Option<Gpu>| device.map_or("cpu", |g| g.0);
    for &(device, ranks, sets) in cases {
        let case = format!("{} -> {} x {ranks} {sets:?}", name(from), name(device));
        let _ = std::fs::remove_dir_all(tiny.path("again"));
        on(device, &tiny, ranks, &[sets, &["checkpoint.folder=again", &resume]].concat());
        if device == from {
            assert_eq!(tiny.losses("again"), left, "{case}");
            assert!(tiny.adapter("again") == adapter, "another adapter: {case}");
            println!("{case}: the same bits");
        } else {
            close(&tiny.losses("again"), &left, &case);
        }
    }
}

const OFFLOAD: [&str; 3] = ["zero.stage=3", "zero.offload_param=cpu", "zero.offload_optimizer=cpu"];

#[test]
fn from_cuda() {
    let cases: [(Option<Gpu>, usize, &[&str]); 5] = [
        (Some(CUDA), 1, &["zero.stage=0"]),
        (Some(CUDA), 2, &OFFLOAD),
        (Some(CUDA), 4, &["zero.stage=1", "training.micro_batch_group=all"]),
        (Some(HIP), 2, &["zero.stage=3"]),
        (None, 2, &["zero.stage=2"]),
    ];
    matrix(Some(CUDA), &cases);
}

#[test]
fn from_hip() {
    let cases: [(Option<Gpu>, usize, &[&str]); 4] =
        [(Some(HIP), 1, &OFFLOAD), (Some(HIP), 4, &["zero.stage=2"]), (Some(CUDA), 2, &["zero.stage=1"]), (None, 1, &[])];
    matrix(Some(HIP), &cases);
}

#[test]
fn from_the_cpu() {
    matrix(None, &[(Some(CUDA), 2, &["zero.stage=3"]), (Some(HIP), 1, &["zero.stage=0"])]);
}

/// Ctrl-C saves; the same command continues to the numbers of a run that was not interrupted; and so after `kill -9` of a rank.
#[test]
fn interrupted_and_killed() {
    if !can_run() {
        return;
    }
    for gpu in BOTH {
        let tiny = Tiny::new(10);
        let run = |sets: &[&str]| {
            GpuRun { tiny: &tiny, gpu, ranks: 2, emulator: "" }.start(&[&[PATIENT, "checkpoint.interval=1"][..], sets].concat())
        };
        on(Some(gpu), &tiny, 2, &["checkpoint.folder=unbroken"]);

        let running = run(&[]);
        until("a step is done", || tiny.steps("out") > 0);
        running.signal(2);
        let done = running.finish();
        done.says(0, &["stopping after this step, again to end at once"]);
        let at = tiny.steps("out");
        assert!(done.out.contains(&format!("stopped after step {at}; the same command continues")), "{}", done.out);

        let running = run(&[]);
        let pids = all_ranks_of(running.pid, 2);
        until("some steps more", || tiny.steps("out") > at + 1);
        kill(pids[1], 9);
        let done = running.finish();
        done.says(137, &[&format!("rank 1 (pid {}, host ", pids[1]), "died: signal 9 (SIGKILL)"]);
        nobody_left(&pids);

        let done = run(&[]).finish();
        done.says(0, &["continuing after step "]);
        assert_eq!(tiny.losses("out"), tiny.losses("unbroken"), "{}", gpu.0);
        assert!(tiny.adapter("out") == tiny.adapter("unbroken"), "{}", gpu.0);
    }
}
