//! Are copies from the host hidden? In the emulated driver's virtual time, where every operation has a start and an end by bandwidths and
//! engines, weights at home on the host must arrive under the kernels of the unit before; and what is resident is copied once.

mod common;

use common::gpu::{BOTH, Gpu, GpuRun, can_run};
use common::tiny::{Tiny, model};

/// What the emulated driver did: kind, bytes, start and end in virtual nanoseconds.
struct Op {
    kind: String,
    bytes: u64,
    start: u64,
    end: u64,
}

/// Copies of weights are larger than batches and losses, which are less than this.
const WEIGHTS: u64 = 8 << 10;

fn timeline(gpu: Gpu, sets: &[&str], emulator: &str) -> Vec<Op> {
    let tiny = Tiny::new(4);
    // Deeper than the slots: 6 blocks of random weights.
    let config = std::fs::read_to_string(model().join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&config).unwrap();
    config["num_hidden_layers"] = 6.into();
    std::fs::create_dir(tiny.path("deep")).unwrap();
    tiny.write("deep/config.json", config.to_string());
    let sets: Vec<&str> = sets.iter().copied().chain(["model.path=deep", "model.init=random"]).collect();
    let path = tiny.path("timeline.jsonl");
    let emulator = format!("{emulator};timeline={}", path.display());
    GpuRun { tiny: &tiny, gpu, ranks: 1, emulator: &emulator }.train(&sets);
    let text = std::fs::read_to_string(path).unwrap();
    let op = |line: &str| {
        let v: serde_json::Value = serde_json::from_str(line).unwrap();
        let number = |key: &str| v[key].as_u64().unwrap();
        Op { kind: v["kind"].as_str().unwrap().into(), bytes: number("bytes"), start: number("start_ns"), end: number("end_ns") }
    };
    text.lines().map(op).collect()
}

/// Times of `ops`, put together where they touch, in order.
fn union<'a>(ops: impl Iterator<Item = &'a Op>) -> Vec<(u64, u64)> {
    let mut times: Vec<(u64, u64)> = ops.map(|o| (o.start, o.end)).collect();
    times.sort_unstable();
    let mut out: Vec<(u64, u64)> = Vec::new();
    for (start, end) in times {
        match out.last_mut() {
            Some(last) if start <= last.1 => last.1 = last.1.max(end),
            _ => out.push((start, end)),
        }
    }
    out
}

fn length(times: &[(u64, u64)]) -> u64 {
    times.iter().map(|(start, end)| end - start).sum()
}

fn common_length(a: &[(u64, u64)], b: &[(u64, u64)]) -> u64 {
    a.iter().flat_map(|x| b.iter().map(move |y| x.1.min(y.1).saturating_sub(x.0.max(y.0)))).sum()
}

const HOST_HOME: [&str; 4] = ["zero.stage=3", "zero.offload_param=cpu", "zero.offload_optimizer=cpu", "training.micro_batch_group=all"];

#[test]
fn weights_from_the_host_arrive_under_compute() {
    if !can_run() {
        return;
    }
    for gpu in BOTH {
        let mut sets = HOST_HOME.to_vec();
        sets.push("zero.resident_bytes=0");
        // A kernel takes 20 us; a unit's weights take less than its kernels, as on a machine that should stream.
        let ops = timeline(gpu, &sets, "kernel_ns=20000;h2d=1");
        let kernels = union(ops.iter().filter(|o| o.kind == "kernel"));
        // What is copied before the first step (loading) and after the last (saving) has nothing to hide under.
        let (begin, end) = (kernels[0].0, kernels[kernels.len() - 1].1);
        let copies = union(ops.iter().filter(|o| o.kind == "h2d" && o.bytes >= WEIGHTS && (begin..end).contains(&o.start)));
        let (hidden, all) = (common_length(&copies, &kernels), length(&copies));
        let share = hidden as f64 / all as f64;
        println!("{}: {all} ns of copies, {:.1} % of them under {} ns of kernels", gpu.0, 100.0 * share, length(&kernels));
        assert!(length(&kernels) > all, "compute must be longer for this to mean anything");
        assert!(share >= 0.95, "{}: {:.1} % of the copies' time is hidden", gpu.0, 100.0 * share);
    }
}

#[test]
fn resident_units_are_copied_once() {
    if !can_run() {
        return;
    }
    for gpu in BOTH {
        let copied = |resident: &str| {
            let mut sets = HOST_HOME.to_vec();
            sets.push(resident);
            let ops = timeline(gpu, &sets, "");
            ops.iter().filter(|o| o.kind == "h2d" && o.bytes >= WEIGHTS).map(|o| o.bytes).sum::<u64>()
        };
        let (once, always) = (copied("zero.resident_bytes=all"), copied("zero.resident_bytes=0"));
        println!("{}: {once} bytes of weights copied with a resident set, {always} without", gpu.0);
        // Without: forward and backward of 4 steps; with: the frozen ones once, the adapters (a tenth of it) each time.
        assert!(2 * once < always, "{}: {once} and {always}", gpu.0);
    }
}
