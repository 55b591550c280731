//! Do kernels keep to their operands, and to what C++ defines? The small cases of all operations, with kernels compiled with a sanitizer and
//! operands that are allocations of exactly their size, from an aligned address and from one an element behind it. AddressSanitizer must be in a process from its start: the test runs itself again,
//! with the library preloaded. So that silence means something, a kernel without a bound must die of the sanitizer alone, with the
//! emulator's own check of addresses taken out.

use std::path::Path;
use std::process::Command;
use std::time::Instant;
use zrt_simt::cases::check_skewed;
use zrt_simt::{Mutation, Sanitizer, SimtDevice, SimtOptions, build};

const MODE: &str = "ZRT_SANITIZERS_CASE";

/// (name, sanitizer, library to preload, machine, cases, with a kernel that lacks a bound)
type Case = (&'static str, Sanitizer, Option<&'static str>, &'static str, &'static str, bool);

const CASES: &[Case] = &[
    ("address-broken", Sanitizer::Address, Some("libasan.so"), "sm_90", "f32, a warp", true),
    ("address", Sanitizer::Address, Some("libasan.so"), "sm_90", "", false),
    ("address-wide", Sanitizer::Address, Some("libasan.so"), "gfx942", "", false),
    ("undefined", Sanitizer::Undefined, None, "sm_90", "", false),
    ("undefined-wide", Sanitizer::Undefined, None, "gfx942", "", false),
];

fn mutation(file: &'static str, from: &str, to: &str) -> Mutation {
    Mutation { file, from: from.into(), to: to.into() }
}

/// In the process of its own.
#[test]
fn one_case() {
    let Some((_, sanitizer, _, arch, only, broken)) = std::env::var(MODE).ok().and_then(|m| CASES.iter().find(|c| c.0 == m)) else {
        return;
    };
    let mutations = vec![
        mutation("emu_memory.h", "        check_device(at, bytes, write);", "        (void)at;"),
        mutation("rmsnorm.cu", "if (row >= p.rows) return;", ""),
    ];
    let mutations = if *broken { mutations } else { Vec::new() };
    let options = SimtOptions { arch, sanitizer: *sanitizer, exact: true, mutations, ..Default::default() };
    let device = SimtDevice::new(options).unwrap();
    // The first time with compiling.
    for skew in [0, 1] {
        let begun = Instant::now();
        check_skewed(&device, only, skew).unwrap_or_else(|e| panic!("skewed by {skew}: {e}"));
        println!("{:.1} s, skewed by {skew}", begun.elapsed().as_secs_f64());
    }
    println!("all cases ran");
}

/// The compiler's copy of a library; it answers with the bare name where it has none.
fn library(name: &str) -> Option<String> {
    let out = Command::new(build::compiler()?).arg(format!("-print-file-name={name}")).output().ok()?;
    let path = String::from_utf8_lossy(&out.stdout).trim().to_string();
    (path.contains('/') && Path::new(&path).is_file()).then_some(path)
}

/// Whether a program with this sanitizer can be made.
fn works(sanitizer: Sanitizer) -> bool {
    let (compiler, flag) = match (build::compiler(), sanitizer) {
        (Some(c), Sanitizer::Undefined) => (c, "-fsanitize=undefined"),
        (Some(c), _) => (c, "-fsanitize=address"),
        (None, _) => return false,
    };
    let out = std::env::temp_dir().join(format!("zrt-sanitizer-{}{flag}", std::process::id()));
    let mut child = Command::new(compiler);
    child.args([flag, "-x", "c++", "-shared", "-fPIC", "/dev/null", "-o"]).arg(&out);
    let made = child.output().is_ok_and(|o| o.status.success());
    let _ = std::fs::remove_file(out);
    made
}

fn run((name, sanitizer, preload, _, _, broken): &Case) {
    let preload = preload.map(library);
    if !works(*sanitizer) || preload == Some(None) {
        println!("not run: {name}: the C++ compiler has no {sanitizer:?} sanitizer");
        return;
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["one_case", "--exact", "--nocapture"]).env(MODE, name).env("ASAN_OPTIONS", "detect_leaks=0:abort_on_error=0");
    child.env("UBSAN_OPTIONS", "print_stacktrace=1");
    if let Some(Some(path)) = preload {
        child.env("LD_PRELOAD", path);
    }
    let out = child.output().unwrap();
    let text = format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    if *broken {
        let seen = !out.status.success() && text.contains("heap-buffer-overflow") && text.contains("rmsnorm.cu");
        assert!(seen, "{name}: a kernel without a bound was not caught, {}:\n{text}", out.status);
    } else {
        assert!(out.status.success() && text.contains("all cases ran"), "{name}, {}:\n{text}", out.status);
        let times: Vec<&str> = text.lines().filter(|l| l.contains(" s, skewed by ")).collect();
        println!("{name}: {}", times.join("; "));
    }
}

fn all_of(names: &[&str]) {
    CASES.iter().filter(|c| names.contains(&c.0)).for_each(run);
}

#[test]
fn addresses() {
    all_of(&["address-broken", "address"]);
}

#[test]
fn addresses_of_wide_machines() {
    all_of(&["address-wide"]);
}

#[test]
fn undefined_behaviour() {
    all_of(&["undefined"]);
}

#[test]
fn undefined_behaviour_of_wide_machines() {
    all_of(&["undefined-wide"]);
}
