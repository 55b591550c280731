//! How does a run on GPUs end when something fails? Every fault that the emulated driver can have, through `zlaunch` on both vendors:
//! an error that names what failed, no hang, no panic, and every step that was counted has the numbers of a run without faults.
//!
//! What is asserted is the outcome; the seconds from fault to end are printed, and are to be below 5 (10 for a peer that is silent).
//! The deadlines of the jobs are short: heartbeats 2 s ([`Tiny`]), collectives and joining 3 s where a case needs them.

mod common;

use common::gpu::{BOTH, CUDA, Gpu, GpuRun, HIP, can_run};
use common::tiny::{Tiny, all_ranks_of};
use common::{HANG, kill, nobody_left, until};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime, UNIX_EPOCH};
use zrt_kernels::gpu::build_ahead;
use zrt_kernels::gpu::driver::Libraries;

const STEPS: u64 = 2;

/// Numbers of a step, see [`Tiny::losses`].
type Losses = BTreeMap<u64, (u64, u64)>;

/// Settings of the emulator and how a run on two ranks must end with them.
struct Case {
    what: &'static str,
    emulator: String,
    sets: Vec<String>,
    code: i32,
    says: Vec<String>,
}

/// A fault that ends the run with exit code 1.
fn case(what: &'static str, fault: impl std::fmt::Display, says: &[&str]) -> Case {
    let says = says.iter().map(|s| s.to_string()).collect();
    Case { what, emulator: format!("fault={fault}"), sets: Vec::new(), code: 1, says }
}

/// What must change nothing.
fn harmless(what: &'static str, emulator: &str) -> Case {
    Case { what, emulator: emulator.into(), sets: Vec::new(), code: 0, says: Vec::new() }
}

impl Case {
    fn with(mut self, set: impl Into<String>) -> Case {
        self.sets.push(set.into());
        self
    }

    fn and(mut self, emulator: &str) -> Case {
        self.emulator += &format!(";{emulator}");
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
        let emulator = format!("{};fault_log={}", self.emulator, log.display());
        // Whoever computes slowly on a machine full of tests is not lost.
        let patient = ["comm.heartbeat_timeout_seconds=30"];
        let sets: Vec<&str> = patient.into_iter().chain(self.sets.iter().map(String::as_str)).collect();
        let done = GpuRun { tiny: &tiny, gpu, ranks: 2, emulator: &emulator }.start(&sets).finish();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos();
        let came = std::fs::read_to_string(&log).unwrap_or_default();
        let first = came.lines().next().and_then(|l| l.split(' ').next()?.parse::<u128>().ok());
        let secs = first.map_or(String::new(), |at| format!("{:.2} s", (now - at) as f64 / 1e9));
        println!("{:4} {:40} {secs:6}  {}", gpu.0, self.what, self.emulator.chars().take(60).collect::<String>());
        if self.code != 0 {
            println!("       {}", done.err.lines().find(|l| l.trim_start().starts_with("error: ")).unwrap_or_default());
        }

        let mut wrong = Vec::new();
        if done.code != Some(self.code) {
            wrong.push(format!("exit code {:?}, expected {}", done.code, self.code));
        }
        wrong.extend(self.says.iter().filter(|part| !done.err.contains(*part)).map(|part| format!("it does not say {part:?}")));
        if done.err.contains("panicked at") {
            wrong.push("it panics".into());
        }
        if self.emulator.contains("fault=") && first.is_none() && !self.emulator.contains("slow") {
            wrong.push("the fault did not come".into());
        }
        let counted = if tiny.steps("out") > 0 { tiny.losses("out") } else { Losses::new() };
        let complete = self.code != 0 || counted.len() == right.len();
        if !complete || counted.iter().any(|(step, numbers)| right.get(step) != Some(numbers)) {
            wrong.push(format!("steps {counted:?}, without faults {right:?}"));
        }
        let all = wrong.join("; ");
        (!wrong.is_empty()).then(|| format!("{} on {} ({}): {all}\n{}\n{}", self.what, gpu.0, self.emulator, done.err, done.out))
    }
}

/// The numbers of a run without faults.
fn right(gpu: Gpu) -> Losses {
    let tiny = Tiny::new(STEPS);
    GpuRun { tiny: &tiny, gpu, ranks: 2, emulator: "" }.train(&[]);
    tiny.losses("out")
}

fn all(gpu: Gpu, cases: impl Fn(Gpu) -> Vec<Case>) {
    if !can_run() {
        return;
    }
    let (right, cases) = (right(gpu), cases(gpu));
    let wrong: Vec<String> = cases.iter().filter_map(|c| c.complaints(gpu, &right)).collect();
    assert!(wrong.is_empty(), "{} of {} cases:\n\n{}", wrong.len(), cases.len(), wrong.join("\n\n"));
}

/// Memory, kernels, and the device.
fn device(gpu: Gpu) -> Vec<Case> {
    let mut cases = Vec::new();
    // The first is of a stream, the twelfth of the model, the last of a run that has begun.
    for n in [1, 12, 40] {
        let says = ["rank 1: out of memory: ", " wants ", " bytes are free", "lower training.micro_batch_size"];
        cases.push(case("out of memory", format!("oom:{n}@1"), &says));
    }
    let register = gpu.name("cuMemHostRegister_v2", "hipHostRegister");
    // The first ones are of streams, which stage through them; how many there are is their business.
    let refused: Vec<String> = (1..40).map(|n| format!("call:{register}:{n}:2@0")).collect();
    let mut unlocked = harmless("host memory may not be locked", &format!("fault={}", refused.join(","))).with("zero.offload_param=cpu");
    unlocked.says.push("RLIMIT_MEMLOCK".into());
    cases.push(unlocked);
    cases.push(case("a kernel fails", "launch:adamw_f32:1@1", &["rank 1: stream '", "719"]));
    let inline = ["rank 1: stream 'update', adamw: ", "719"];
    cases.push(case("the same, each waited for", "launch:adamw_f32:1@1", &inline).with("device.mode=inline"));
    cases.push(case("any kernel fails", "launch:*:300@0", &["rank 0: ", "719"]));
    cases.push(case("the device is lost", "lost:40@1", &["rank 1: ", "999"]));
    cases.push(case(
        "an image of the other vendor",
        "image:1",
        &["rank ", ".cu on Emulated ", gpu.name("cuModuleLoadData", "hipModuleLoadData"), "returned 200"],
    ));
    cases
}

/// Codes that nobody knows, of every kind of call.
fn codes(gpu: Gpu) -> Vec<Case> {
    let blas = format!("device.libraries.blas={}", zrt_driver::library().unwrap().display());
    let calls = [
        ("cuMemcpyHtoDAsync_v2", "hipMemcpyHtoDAsync", 9),
        ("cuMemcpyDtoHAsync_v2", "hipMemcpyDtoHAsync", 2),
        ("cuMemAlloc_v2", "hipMalloc", 20),
        ("cuLaunchKernel", "hipModuleLaunchKernel", 60),
        ("cuEventRecord", "hipEventRecord", 30),
        ("cuEventQuery", "hipEventQuery", 30),
        ("cuStreamWaitEvent", "hipStreamWaitEvent", 5),
        ("ncclAllGather", "ncclAllGather", 2),
        ("ncclReduceScatter", "ncclReduceScatter", 2),
        ("ncclAllReduce", "ncclAllReduce", 2),
        ("ncclCommGetAsyncError", "ncclCommGetAsyncError", 4),
        ("cublasLtMatmul", "hipblasLtMatmul", 4),
    ];
    let fails = |(cuda, hip, n)| {
        let name = gpu.name(cuda, hip);
        let case = case("an unknown code", format!("call:{name}:{n}:12345@1"), &["rank 1: ", name, "12345"]);
        if name.contains("Matmul") { case.with(&blas) } else { case }
    };
    calls.map(fails).into()
}

/// Libraries that lack functions, or are not there.
fn libraries(gpu: Gpu, folder: &Path) -> Vec<Case> {
    let lacking = |role: &str, functions: &[&str]| {
        let own = folder.join(role);
        std::fs::create_dir_all(&own).unwrap();
        format!("device.libraries.{role}={}", zrt_driver::library_with(&own, functions).unwrap().display())
    };
    let none = |role: &str| format!("device.libraries.{role}=/nowhere/lib{role}.so");
    let missing = |what, role: &str, functions: &[&str], lacks: &str| {
        let mut case = harmless(what, "").with(lacking(role, functions)).ends(1);
        case.says = vec![format!("{role}/libfunctions.so"), lacks.into(), "device.libraries".into()];
        case
    };
    let absent = |what, role: &str| {
        let mut case = harmless(what, "").with(none(role)).ends(1);
        case.says = vec![format!("/nowhere/lib{role}.so"), "device.libraries".into()];
        case
    };
    vec![
        missing(
            "a driver without functions",
            "driver",
            &[gpu.name("cuInit", "hipInit")],
            gpu.name("cuDeviceGetCount", "hipGetDeviceCount"),
        )
        .ends(2),
        missing("a compiler without functions", "compiler", &[gpu.name("nvrtcVersion", "hiprtcVersion")], "no function"),
        missing("products without functions", "blas", &[gpu.name("cublasLtCreate", "hipblasLtCreate")], "no function"),
        missing("collectives without functions", "collectives", &["ncclGetVersion"], "has no ncclGetUniqueId"),
        absent("no driver", "driver").ends(2),
        absent("no compiler", "compiler"),
        absent("no products", "blas"),
        absent("no collectives", "collectives"),
    ]
}

/// Peers that die, are silent, late, or do something else.
fn peers(_: Gpu) -> Vec<Case> {
    let killed = ["rank 1 (pid ", "died: signal 9 (SIGKILL)"];
    let short = "comm.train_timeout_seconds=3";
    vec![
        case("a peer dies when it joins", "dead:1:0", &killed).ends(137),
        case("a peer dies in a collective", "dead:1:5", &killed).ends(137),
        case("the same, and the library hangs", "dead:1:5", &killed).and("dead_peer=hang").ends(137),
        case("a peer never joins", "silent:1:0", &["still in progress at its deadline"]).with("comm.init_timeout_seconds=3"),
        case("a peer is silent", "silent:1:5", &["#5 ", "waited 3 s", "hangs"]).with(short),
        case("a peer does something else", "mismatch:1:4", &["#4 all_gather f32", "waited 3 s", "hangs"]).with(short),
        harmless("a peer is slow", "fault=slow:1:20"),
        harmless("sums in random orders", "reduce_seed=7"),
        harmless("the library says it is in progress", "in_progress=1"),
        harmless("operations come late", "jitter=5"),
    ]
}

#[test]
fn device_cuda() {
    all(CUDA, device);
}

#[test]
fn device_hip() {
    all(HIP, device);
}

#[test]
fn codes_cuda() {
    all(CUDA, codes);
}

#[test]
fn codes_hip() {
    all(HIP, codes);
}

#[test]
fn libraries_of_both() {
    let folder = tempfile::tempdir().unwrap();
    for gpu in BOTH {
        all(gpu, |gpu| libraries(gpu, folder.path()));
    }
}

#[test]
fn peers_cuda() {
    all(CUDA, peers);
}

#[test]
fn peers_hip() {
    all(HIP, peers);
}

/// A rank's process is killed, or stopped, while it trains.
#[test]
fn a_rank_is_killed_or_stopped() {
    if !can_run() {
        return;
    }
    for (gpu, victim, signal) in [(CUDA, 0, 9), (HIP, 1, 9), (HIP, 0, 19)] {
        let tiny = Tiny::new(10_000);
        let running = GpuRun { tiny: &tiny, gpu, ranks: 2, emulator: "" }.start(&["checkpoint.interval=0"]);
        let pids = all_ranks_of(running.pid, 2);
        until("a step is done", || tiny.steps("out") > 0);
        let begun = Instant::now();
        kill(pids[victim], signal);
        let done = running.finish();
        println!("{:4} signal {signal} to rank {victim}: {:.2} s", gpu.0, begun.elapsed().as_secs_f64());
        nobody_left(&pids);
        let named = format!("rank {victim} (pid {}, host ", pids[victim]);
        match signal {
            9 => done.says(137, &[&named, "died: signal 9 (SIGKILL)"]),
            _ => done.says(1, &[&named, "is stopped (SIGSTOP)"]),
        }
        assert!(!done.err.contains("panicked at"), "{}", done.err);
    }
}

fn kernels_of(tiny: &Tiny) -> Vec<PathBuf> {
    let files = std::fs::read_dir(tiny.path("kernels")).unwrap().map(|f| f.unwrap().path());
    files.filter(|f| f.extension().is_some_and(|e| e == "bin")).collect()
}

/// Kept code that was cut short, or is of another machine, is made again; code made ahead needs no compiler, and says so when it does not fit.
#[test]
fn kept_kernels() {
    if !can_run() {
        return;
    }
    let arch = |gpu: Gpu| gpu.name("sm_90", "gfx942");
    for (gpu, other) in [(CUDA, HIP), (HIP, CUDA)] {
        let right = right(gpu);
        let tiny = Tiny::new(STEPS);
        let trains = |what: &str, sets: &[&str]| {
            let _ = std::fs::remove_dir_all(tiny.path("out"));
            let done = GpuRun { tiny: &tiny, gpu, ranks: 2, emulator: "" }.train(sets);
            assert!(!done.err.contains("panicked at"), "{what}: {}", done.err);
            assert_eq!(tiny.losses("out"), right, "{what}");
        };
        trains("none kept", &[]);
        let whole: Vec<(PathBuf, Vec<u8>)> = kernels_of(&tiny).into_iter().map(|f| (f.clone(), std::fs::read(f).unwrap())).collect();
        assert!(whole.len() > 8, "{whole:?}");
        let mended = |what: &str| whole.iter().for_each(|(f, bytes)| assert!(&std::fs::read(f).unwrap() == bytes, "{what}: {f:?}"));
        for (at, (file, bytes)) in whole.iter().enumerate() {
            std::fs::write(file, &bytes[..at * bytes.len() / whole.len()]).unwrap();
        }
        trains("cut short", &[]);
        mended("cut short");

        let folder = tempfile::tempdir().unwrap();
        let ours = Libraries { compiler: Some(zrt_driver::library().unwrap()), ..Libraries::default() };
        let strange = build_ahead(folder.path(), arch(other), &ours).unwrap();
        let source = |f: &Path| f.file_name().unwrap().to_str().unwrap().split('-').next().unwrap().to_string();
        for (file, _) in &whole {
            let of = strange.iter().find(|(s, _)| source(s) == source(file)).unwrap();
            std::fs::copy(&of.0, file).unwrap();
        }
        trains("of another machine", &[]);
        mended("of another machine");

        let no_compiler = "device.libraries.compiler=/nowhere/compiler.so";
        std::fs::remove_dir_all(tiny.path("kernels")).unwrap();
        let ahead = build_ahead(&tiny.path("kernels"), arch(gpu), &ours).unwrap();
        trains("made ahead", &[no_compiler]);
        let named = |f: &Path| ahead.iter().find(|(a, _)| source(a) == source(f)).unwrap().0.clone();
        strange.iter().for_each(|(f, _)| assert!(std::fs::copy(f, named(f)).is_ok()));
        std::fs::remove_dir_all(tiny.path("out")).unwrap();
        let done = GpuRun { tiny: &tiny, gpu, ranks: 2, emulator: "" }.start(&[no_compiler]).finish_within(HANG);
        done.says(1, &["from kernels/", &format!("-{}-", arch(gpu)), "returned 200"]);
    }
}
