//! How does a run on GPUs end when something fails? Every fault that the emulated driver can have, through `zlaunch` on both vendors:
//! an error that names what failed, no hang, no panic, and every step that was counted has the numbers of a run without faults.
//!
//! What is asserted is the outcome; the seconds from fault to end are printed, and are to be below 5 (10 for a peer that is silent).

mod common;

use common::gpu::{CUDA, Gpu, GpuRun, HIP, can_run};
use common::tiny::Tiny;
use common::*;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

const STEPS: u64 = 2;

/// Numbers of a step, see [`Tiny::losses`].
type Losses = BTreeMap<u64, (u64, u64)>;

/// One fault and how the run must end.
struct Case {
    what: &'static str,
    fault: String,
    ranks: usize,
    sets: Vec<String>,
    code: i32,
    says: Vec<&'static str>,
}

/// On two ranks, exit code 1.
fn case(what: &'static str, fault: impl Into<String>, says: &[&'static str]) -> Case {
    Case { what, fault: fault.into(), ranks: 2, sets: Vec::new(), code: 1, says: says.to_vec() }
}

impl Case {
    fn with(mut self, sets: &[&str]) -> Case {
        self.sets.extend(sets.iter().map(|s| s.to_string()));
        self
    }

    fn ends(mut self, code: i32) -> Case {
        self.code = code;
        self
    }

    /// What is wrong with how it ended; `right` are the numbers of a run without faults.
    fn complaints(&self, gpu: Gpu, right: &Losses) -> Option<String> {
        let tiny = Tiny::new(STEPS);
        let log = tiny.path("faults");
        let emulator = format!("fault={};fault_log={}", self.fault, log.display());
        let sets: Vec<&str> = self.sets.iter().map(String::as_str).collect();
        let done = GpuRun { tiny: &tiny, gpu, ranks: self.ranks, emulator: &emulator }.start(&sets).finish();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos();
        let came = std::fs::read_to_string(&log).unwrap_or_default();
        let first = came.lines().next().and_then(|l| l.split(' ').next()?.parse::<u128>().ok());
        let secs = first.map_or("no fault came".into(), |at| format!("{:.2} s", (now - at) as f64 / 1e9));
        println!("{:>4} {:44} {:44} {secs}", gpu.0, self.what, self.fault);
        if std::env::var_os("SHOW").is_some() {
            println!("exit code {:?}\n{}\n", done.code, done.err);
        }
        let mut wrong = Vec::new();
        if done.code != Some(self.code) {
            wrong.push(format!("exit code {:?}, expected {}", done.code, self.code));
        }
        wrong.extend(self.says.iter().filter(|part| !done.err.contains(**part)).map(|part| format!("it does not say {part:?}")));
        if done.err.contains("panicked at") {
            wrong.push("it panics".into());
        }
        let counted = if tiny.steps("out") > 0 { tiny.losses("out") } else { Losses::new() };
        if counted.iter().any(|(step, numbers)| right.get(step) != Some(numbers)) {
            wrong.push(format!("steps {counted:?}, without faults {right:?}"));
        }
        let all = wrong.join("; ");
        (!wrong.is_empty()).then(|| format!("{} on {} ({}): {all}\n{}\n{}", self.what, gpu.0, self.fault, done.err, done.out))
    }
}

/// The numbers of a run without faults.
fn right(gpu: Gpu) -> Losses {
    let tiny = Tiny::new(STEPS);
    GpuRun { tiny: &tiny, gpu, ranks: 2, emulator: "" }.train(&[]);
    tiny.losses("out")
}

fn all(gpu: Gpu, cases: Vec<Case>) {
    let right = right(gpu);
    let wrong: Vec<String> = cases.iter().filter_map(|c| c.complaints(gpu, &right)).collect();
    assert!(wrong.is_empty(), "{} of {} cases:\n\n{}", wrong.len(), cases.len(), wrong.join("\n\n"));
}

/// Memory, kernels, the device, and codes that nobody knows.
fn device(gpu: Gpu) -> Vec<Case> {
    let (to_device, to_host) = (gpu.name("cuMemcpyHtoDAsync_v2", "hipMemcpyHtoDAsync"), gpu.name("cuMemcpyDtoHAsync_v2", "hipMemcpyDtoHAsync"));
    let mut cases = Vec::new();
    for n in [1, 12] {
        let says = ["out of memory: ", " wants ", " bytes are free", "lower training.micro_batch_size", "rank 1"];
        cases.push(case("out of memory", format!("oom:{n}@1"), &says));
    }
    cases.push(case("a kernel fails", "launch:rmsnorm_forward:3@1", &["719", "rank 1"]));
    cases.push(case("a kernel fails", "launch:*:300@0", &["719", "rank 0"]));
    cases.push(case("inline", "launch:*:300@0", &["719", "rank 0"]).with(&["device.mode=inline"]));
    cases.push(case("the device is lost", "lost:40@1", &["999", "rank 1"]));
    cases.push(case("an unknown code of a copy to the device", format!("call:{to_device}:9:12345@0"), &[to_device, "12345", "rank 0"]));
    cases.push(case("an unknown code of a copy to the host", format!("call:{to_host}:2:12345@1"), &[to_host, "12345", "rank 1"]));
    cases.push(case("an unknown code of a collective", "call:ncclAllGather:2:12345@1", &["ncclAllGather", "12345", "rank 1"]));
    cases.push(case("an image of the other vendor", "image:2@1", &["rank 1"]));
    cases
}

/// Peers.
fn peers(_gpu: Gpu) -> Vec<Case> {
    vec![
        case("a peer that dies when it joins", "dead:1:0", &["rank 1 (pid ", "died: signal 9 (SIGKILL)"]).ends(137),
        case("a peer that dies in a collective", "dead:1:5", &["rank 1 (pid ", "died: signal 9 (SIGKILL)"]).ends(137),
        case("a peer that never joins", "silent:1:0", &["rank "]).with(&["comm.init_timeout_seconds=5"]),
        case("a silent peer", "silent:1:5", &["rank "]).with(&["comm.train_timeout_seconds=3"]),
        case("a peer in another collective", "mismatch:1:4", &["rank "]).with(&["comm.train_timeout_seconds=3"]),
        case("a slow peer", "slow:1:20", &[]).ends(0),
    ]
}

fn run(gpu: Gpu, cases: fn(Gpu) -> Vec<Case>) {
    if can_run() {
        all(gpu, cases(gpu));
    }
}

#[test]
fn device_cuda() {
    run(CUDA, device);
}

#[test]
fn device_hip() {
    run(HIP, device);
}

#[test]
fn peers_cuda() {
    run(CUDA, peers);
}

#[test]
fn peers_hip() {
    run(HIP, peers);
}
