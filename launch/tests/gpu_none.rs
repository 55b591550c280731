//! What does a machine without a GPU, or with too few, say? `cuda` and `hip` are an error of the user's with exit code 2, `auto` trains on
//! the CPU and says so; and the binary itself asks for no vendor's library.

mod common;

use common::gpu::{BOTH, Gpu};
use common::tiny::Tiny;
use common::zlaunch;
use std::process::Command;
use zrt_kernels::gpu::driver::{Libraries, find};

/// Whether this machine has no GPU of its own; says "not run" if it has one.
fn without(gpus: &[Gpu]) -> bool {
    let vendors = zrt_kernels::gpu::driver::Vendor::ALL.into_iter().filter(|v| gpus.iter().any(|g| g.0 == v.kind()));
    let here: Vec<&str> = vendors.filter(|v| !matches!(find(*v, &Libraries::default()), Ok(None))).map(|v| v.kind()).collect();
    if !here.is_empty() {
        println!("not run: this machine has a device for {here:?}");
    }
    here.is_empty()
}

#[test]
fn a_gpu_that_is_not_there_is_an_error() {
    for gpu in BOTH {
        if without(&[gpu]) {
            let tiny = Tiny::new(2);
            let done = tiny.run(1, &[&format!("device.kind={}", gpu.0)]);
            done.says(
                2,
                &[
                    &format!("device.kind = \"{}\": no driver (", gpu.0),
                    "was found on this host",
                    "[device.libraries]",
                    "\"cpu\" or \"auto\"",
                ],
            );
            assert!(!tiny.path("out").join("metrics.jsonl").exists());
        }
    }
}

#[test]
fn auto_trains_on_the_cpu_and_says_so() {
    if !without(&BOTH) {
        return;
    }
    let tiny = Tiny::new(2);
    let done = tiny.train(2, &["device.kind=auto"]);
    assert!(done.err.contains("device: no GPU found, training on the CPU"), "{}", done.err);
    let (auto, adapter) = (tiny.losses("out"), tiny.adapter("out"));
    let done = tiny.train(2, &["device.kind=cpu", "checkpoint.folder=cpu"]);
    assert!(!done.err.contains("device:"), "{}", done.err);
    assert_eq!(auto, tiny.losses("cpu"));
    assert!(adapter == tiny.adapter("cpu"));
}

/// What does not work is told, also where another device is used.
#[test]
fn a_path_that_leads_nowhere_is_named() {
    let nowhere = "device.libraries.driver=/nowhere/libdriver.so";
    for gpu in BOTH {
        let done = Tiny::new(2).run(1, &[&format!("device.kind={}", gpu.0), nowhere]);
        done.says(2, &[&format!("device.kind = \"{}\": /nowhere/libdriver.so: ", gpu.0), "check the path in [device.libraries]"]);
    }
    let done = Tiny::new(2).train(1, &["device.kind=auto", nowhere]);
    for part in ["/nowhere/libdriver.so: ", "training on the CPU"] {
        assert!(done.err.contains(part), "{}", done.err);
    }
}

#[test]
fn fewer_devices_than_ranks() {
    for gpu in BOTH {
        let tiny = Tiny::new(2);
        let sets = gpu.sets();
        let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
        let mut command = tiny.command(2, &sets);
        let done = common::Running::start(command.env(zrt_driver::VARIABLE, "devices=1")).finish();
        done.says(2, &["2 ranks, but this host has 1 Emulated ", "start with -n 1", "device.kind = \"cpu\""]);
        let mut command = tiny.command(1, &sets);
        let done = common::Running::start(command.env(zrt_driver::VARIABLE, "devices=0")).finish();
        done.says(2, &[&format!("device.kind = \"{}\": no driver (", gpu.0)]);
    }
}

#[test]
fn the_binary_needs_no_vendors_library() {
    let program = zlaunch().get_program().to_owned();
    let Ok(out) = Command::new("ldd").arg(program).output() else { return println!("not run: no ldd") };
    let libraries = String::from_utf8_lossy(&out.stdout).to_lowercase();
    assert!(out.status.success() && libraries.contains("libc.so"), "{libraries}");
    for vendors in ["libcuda", "libamdhip", "nccl", "rccl", "nvrtc", "hiprtc", "cublas", "hipblas", "libhsa", "rocm"] {
        assert!(!libraries.contains(vendors), "{libraries}");
    }
    println!("{libraries}");
}
