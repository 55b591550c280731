//! `zlaunch doctor` on the machine that runs the tests: it reports, whatever there is, and never fails.

mod common;

use common::gpu::BOTH;
use common::tiny::Tiny;
use common::{Running, run, zlaunch};
use serde_json::Value;
use std::path::Path;

#[test]
fn it_reports_whatever_there_is() {
    let done = run(&["doctor"]);
    done.says(0, &[]);
    for heading in ["Devices and drivers", "NUMA", "Kernel", "Limits and memory", "Network", "Speed"] {
        assert!(done.out.lines().any(|l| l == heading), "no '{heading}' in\n{}", done.out);
    }
    let done = run(&["doctor", "--json"]);
    done.says(0, &[]);
    let report: Value = serde_json::from_str(&done.out).unwrap_or_else(|e| panic!("{e}: {}", done.out));
    let findings = report["findings"].as_array().unwrap();
    let text = |f: &Value, key: &str| f[key].as_str().unwrap_or_default().to_string();
    assert!(findings.iter().all(|f| !text(f, "what").is_empty() && !text(f, "found").is_empty()), "{report}");
    // Whatever is wrong comes with what to do.
    assert!(findings.iter().all(|f| !matches!(f["level"].as_str(), Some("warning" | "problem")) || !text(f, "fix").is_empty()), "{report}");
    assert_eq!(findings.iter().filter(|f| f["group"] == "speed").count(), 2, "{report}");
    let drivers = ["/dev/kfd", "/dev/nvidiactl"].iter().any(|f| Path::new(f).exists());
    let none = findings.iter().any(|f| text(f, "found").contains("runs use the CPU"));
    let amd_or_nvidia = findings.iter().any(|f| text(f, "what").starts_with("AMD ") || text(f, "what").starts_with("NVIDIA "));
    assert!(drivers || amd_or_nvidia || none, "{report}");
    run(&["doctor", "everything"]).says(2, &["everything: cannot be read"]);
    run(&["doctor", "--set", "device.kind=hip"]).says(2, &["<TRAIN.TOML>"]);
}

/// The libraries that `[device.libraries]` names are asked, and their devices measured: the emulated driver answers as both vendors, and
/// its clock is virtual, so that rates are the ones it was given.
#[test]
fn it_asks_the_libraries_of_the_configuration() {
    for gpu in BOTH {
        let tiny = Tiny::new(4);
        let library = zrt_driver::library().unwrap();
        let sets = [format!("device.libraries.blas={}", library.display())].into_iter().chain(gpu.sets());
        let mut command = zlaunch();
        command.args(["doctor", "--json"]).arg(tiny.path("train.toml")).args(sets.flat_map(|s| ["--set".to_string(), s]));
        command.env(zrt_driver::VARIABLE, "devices=2;h2d=40;d2h=20;memory=2GiB");
        let done = Running::start(&mut command).finish();
        done.says(0, &[]);
        let report: Value = serde_json::from_str(&done.out).unwrap_or_else(|e| panic!("{e}: {}", done.out));
        let findings = report["findings"].as_array().unwrap();
        let said = |f: &Value| format!("{}: {}", f["what"].as_str().unwrap_or_default(), f["found"].as_str().unwrap_or_default());
        let text: String = findings.iter().map(|f| said(f) + "\n").collect();
        let arch = gpu.name("sm_90", "gfx942");
        let says = |part: &str| assert!(text.contains(part), "{}: no {part:?} in\n{text}", gpu.0);
        for (index, pci) in ["0000:10:00.0", "0000:11:00.0"].into_iter().enumerate() {
            says(&format!("device at {pci}: Emulated {arch} {index}, {arch}, 2 GiB, driver {}", gpu.name("CUDA 12.9", "HIP 6.4")));
            says(&format!("copy to the device, {pci}: 40.0 GB/s"));
            says(&format!("copy to the host, {pci}: 20.0 GB/s"));
        }
        for (role, version) in [("compiler", gpu.name("NVRTC", "hipRTC")), ("blas", gpu.name("12.9.0", "1.2.0")), ("collectives", "2.")] {
            says(&format!("{role} library ({}): {version}", library.display()));
        }
        says("access to peers: each of 2 devices reads the memory of all others");
        says("all-reduce (bus bandwidth): ");
        assert_eq!(findings.iter().filter(|f| f["group"] == "speed").count(), 2 + 2 * 2 + 1, "{report}");
    }
}
