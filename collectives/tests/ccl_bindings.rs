//! Do the generated numbers agree with another source? ROCm publishes its enums as Python modules, for a much newer release than the
//! headers that ours were made from; the generators put them beside themselves.

use std::process::Command;

const SOURCES: [&str; 2] = [include_str!("../src/ccl/sys.rs"), include_str!("../../kernels/src/gpu/driver/hip_sys.rs")];

/// Prints `NAME VALUE` of every number in the modules.
const PRINT: &str = "
from rocm.bindings import hip, hiprtc, hipblas, hipblaslt, rccl
for module in hip, hiprtc, hipblas, hipblaslt, rccl:
    for name in dir(module):
        value = getattr(module, name)
        members = getattr(value, '__members__', None)
        for name, value in members.items() if isinstance(members, dict) or hasattr(members, 'items') else [(name, value)]:
            if isinstance(value, int):
                print(name, int(value))
";

#[test]
fn numbers_equal_those_of_rocm() {
    let python = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/bindings/python/bin/python");
    let printed = Command::new(python).args(["-c", PRINT]).output();
    let Some(printed) = printed.ok().filter(|p| p.status.success()) else {
        println!(
            "not run: no Python package of ROCm's numbers; kernels/bindings/generate.sh and collectives/bindings/generate.sh install it"
        );
        return;
    };
    let printed = String::from_utf8(printed.stdout).unwrap();
    let theirs: std::collections::HashMap<&str, &str> = printed.lines().filter_map(|line| line.split_once(' ')).collect();
    let ours: Vec<(&str, &str)> = SOURCES.iter().flat_map(|source| source.lines()).filter_map(constant).collect();
    assert!(ours.len() > 60, "{ours:?}");
    for (name, value) in ours {
        assert_eq!(theirs.get(name), Some(&value), "{name}");
    }
}

/// Name and value of `pub const NAME: TYPE = VALUE;`.
fn constant(line: &str) -> Option<(&str, &str)> {
    let (name, rest) = line.strip_prefix("pub const ")?.split_once(": ")?;
    Some((name, rest.split_once(" = ")?.1.strip_suffix(';')?))
}
