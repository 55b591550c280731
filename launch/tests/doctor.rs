//! `zlaunch doctor` on the machine that runs the tests: it reports, whatever there is, and never fails.

mod common;

use common::run;
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
    run(&["doctor", "everything"]).says(2, &["unexpected argument"]);
}
