//! Kernels made ahead: `zlaunch kernels build` with a run-time compiler, then a run without one. Where the vendor's real compiler is (the
//! compile gates install NVRTC), the emulated driver loads the real cubins and runs the kernels of those names.

mod common;

use common::gpu::{BOTH, CUDA, Gpu, can_run};
use common::tiny::Tiny;
use common::*;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Builds for `gpu` with `compiler`, then trains with a compiler that does not exist.
fn ahead(gpu: Gpu, compiler: &Path) {
    let tiny = Tiny::new(2);
    let arch = gpu.name("sm_90", "gfx942");
    let out = tiny.path("ahead");
    let args = ["kernels", "build", "--arch", arch, "--out", out.to_str().unwrap(), "--compiler", compiler.to_str().unwrap()];
    let done = Running::start(zlaunch().args(args)).finish_within(Duration::from_secs(300));
    assert_eq!(done.code, Some(0), "{}", done.err);
    assert!(done.out.contains(&format!("{arch}: ")), "{}", done.out);
    let mut sets = gpu.sets();
    sets.retain(|s| !s.starts_with("device.libraries.compiler") && !s.starts_with("device.kernel_folder"));
    sets.push("device.libraries.compiler=/nowhere/compiler.so".into());
    sets.push("device.kernel_folder=ahead".into());
    let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
    let done = tiny.start(1, &sets).finish_within(Duration::from_secs(600));
    assert_eq!(done.code, Some(0), "{}", done.err);
    // And without them the compiler is missed by name.
    std::fs::remove_dir_all(out).unwrap();
    std::fs::remove_dir_all(tiny.path("out")).unwrap();
    let done = tiny.start(1, &sets).finish_within(Duration::from_secs(600));
    done.says(1, &["/nowhere/compiler.so"]);
}

#[test]
fn a_run_without_a_compiler() {
    if can_run() {
        BOTH.into_iter().for_each(|gpu| ahead(gpu, &zrt_driver::library().unwrap()));
    }
}

#[test]
fn real_cubins_run_by_name() {
    let tools = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/gpu-tools");
    let find = |dir: PathBuf| std::fs::read_dir(dir).into_iter().flatten().flatten().map(|e| e.path());
    let roots = find(tools).flat_map(|t| find(t.join("lib"))).map(|python| python.join("site-packages/nvidia/cu13/lib"));
    let nvrtc = roots.flat_map(find).find(|p| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with("libnvrtc.so.")));
    match nvrtc {
        Some(nvrtc) if can_run() => ahead(CUDA, &nvrtc),
        Some(_) => {}
        None => println!("not run: no NVRTC (.ci/tools installs it)"),
    }
}

#[test]
fn unknown_machines_are_refused() {
    run(&["kernels", "build", "--arch", "gfx1100", "--out", "/tmp/none"]).says(2, &["gfx1100", "gfx942"]);
    run(&["kernels", "build"]).says(2, &["--arch"]);
}
