//! Would the tests notice a mistake? Each mutation changes one place of a kernel or a header: a barrier less, a wrong lane, a bound
//! less, another order of additions. At least one case, in one of three orders of threads, must fail. Barriers are taken out one by one
//! wherever they stand; the rest are lists (`mutants`), and a mutation whose text is gone fails here too, so that they follow the sources.

mod mutants;

use mutants::{ARITHMETIC, BOUNDS, LANES, Mutant};
use std::time::Instant;
use zrt_kernels::gpu::table::SOURCES;
use zrt_simt::cases::check;
use zrt_simt::testing::can_run;
use zrt_simt::{Mutation, Order, SimtDevice, SimtOptions};

/// sm_90 with one compute unit: blocks walk over all that there is.
const ONE_UNIT: &str = "one unit";

/// Which cases run the barriers of a file, in turn: what notices most comes first.
const RUN: &[(&str, &[&str])] = &[
    ("attention.cu", &["attention bf16, 64", "attention f32, 64", "attention f32, 256"]),
    ("attention.cuh", &["attention bf16, 64", "attention f32, 64"]),
    ("attention_backward.cu", &["attention bf16, 64", "attention f32, 256"]),
    ("column_sum.cu", &["rmsnorm bf16, a block a row"]),
    ("cross_entropy.cu", &["cross entropy"]),
    ("elementwise.cu", &["elements f32"]),
    ("embedding.cu", &["embedding f32"]),
    ("gemm.cu", &["linear bf16", "linear f32"]),
    ("lora.cu", &["lora bf16", "lora f32"]),
    ("lora_backward.cu", &["lora bf16", "lora f32"]),
    ("rmsnorm.cu", &["rmsnorm bf16, a block a row", "rmsnorm bf16, a warp a row"]),
    ("sum_squares.cu", &["sum_squares"]),
];

/// Barriers that no result needs: (file, the text that ends with it, why it is there).
const SPARE: &[(&str, &str, &str)] = &[
    ("attention.cuh", "if constexpr (NARROW) warp_sync();", "it keeps the compiler from starting all loads at once"),
    ("lora_backward.cu", "if (uniform(mode)) {\n            warp_sync();", "a barrier of the block comes before it on every way"),
];

/// All places of `what` in `text`, each as a piece of the text that stands there for the first time and ends with it.
fn places(text: &'static str, what: &str) -> Vec<&'static str> {
    let start_of_line = |at: usize| text[..at].rfind('\n').map_or(0, |n| n + 1);
    let place = |(at, found): (usize, &str)| {
        let end = at + found.len();
        let mut begin = start_of_line(at);
        while text.find(&text[begin..end]) != Some(begin) {
            begin = start_of_line(begin - 1);
        }
        &text[begin..end]
    };
    text.match_indices(what).map(place).collect()
}

/// Kernels that a case does not launch are left out of their file: those of the other type, of attention those of other widths. That is
/// most of what there is to compile.
fn narrowed(only: &str) -> Vec<Mutation> {
    let family = only.split(' ').next().unwrap_or_default();
    let other = match () {
        () if only.contains("bf16") => "<float>",
        () if only.contains("f32") => "<bf16>",
        () => return Vec::new(),
    };
    let width = only.rsplit_once(", ").map(|(_, width)| format!("_{width}_")).filter(|_| family == "attention");
    let is_width = |name: &str| ["_64_", "_96_", "_128_", "_256_"].into_iter().find(|w| name.contains(w));
    let unused = |line: &&str| {
        let name = line.split(',').next().unwrap_or_default();
        line.starts_with("KERNEL") && (line.contains(other) || is_width(name).is_some_and(|w| width.as_ref().is_some_and(|mine| mine != w)))
    };
    let files = SOURCES.iter().filter(|(file, _)| match family {
        "attention" => file.starts_with("attention") && file.ends_with(".cu"),
        "lora" => matches!(*file, "lora.cu" | "lora_backward.cu"),
        "linear" => *file == "gemm.cu",
        "rmsnorm" => *file == "rmsnorm.cu",
        _ => false,
    });
    let lines = files.flat_map(|(file, text)| text.lines().filter(unused).map(move |l| (*file, l)));
    lines.map(|(file, line)| Mutation { file, from: line.into(), to: String::new() }).collect()
}

/// What a case says about a mutant, in the first order and case in which one says anything.
fn noticed(file: &'static str, from: &str, to: &str, cases: &[&str], machine: &'static str) -> Option<String> {
    let (arch, units) = if machine == ONE_UNIT { ("sm_90", Some(1)) } else { (machine, None) };
    let run = |only: &str, order| {
        let mut mutations = vec![Mutation { file, from: from.into(), to: to.into() }];
        mutations.extend(narrowed(only));
        let options = SimtOptions { arch, units, order, exact: true, mutations, ..Default::default() };
        let device = SimtDevice::new(options).unwrap_or_else(|e| panic!("{e}"));
        check(&device, only).err()
    };
    let orders = [Order::Forward, Order::Reverse, Order::Random(1)];
    let found = cases.iter().find_map(|only| orders.into_iter().find_map(|order| run(only, order)))?;
    assert!(!found.contains("g++ on") && !found.contains("clang++ on"), "{file}: `{to}` does not compile: {found}");
    Some(found)
}

/// The mutants of a list must be noticed; every source that `applies` has one.
fn all_noticed(mutants: &[Mutant], applies: impl Fn(&str, &str) -> bool) {
    for (file, text) in SOURCES {
        assert!(!applies(file, text) || mutants.iter().any(|m| m.0 == *file), "{file} has no such mutation");
    }
    if !can_run() {
        return;
    }
    let mut missed = vec![];
    for &(file, from, to, only, machine) in mutants {
        let begun = Instant::now();
        match noticed(file, from, to, &[only], machine) {
            Some(why) => println!("{:.1} s, {file}: `{to}`: {why}", begun.elapsed().as_secs_f64()),
            None => missed.push(format!("{file}: `{from}` -> `{to}`")),
        }
    }
    assert!(missed.is_empty(), "not noticed:\n{}", missed.join("\n"));
}

/// Takes out one barrier after the other in the files that `mine` chooses.
fn every_barrier_is_needed(mine: impl Fn(&str) -> bool) {
    if !can_run() {
        return;
    }
    let mut missed = vec![];
    for (file, text) in SOURCES.iter().filter(|(file, _)| mine(file)) {
        let Some((_, cases)) = RUN.iter().find(|(name, _)| name == file) else {
            assert!(!text.contains("barrier();"), "{file}: which cases run it?");
            continue;
        };
        for from in ["barrier();", "warp_sync();"].iter().flat_map(|what| places(text, what)) {
            if SPARE.iter().any(|(name, end, _)| name == file && text[..text.find(from).unwrap_or(0) + from.len()].ends_with(end)) {
                continue;
            }
            let begun = Instant::now();
            let kept = from.trim_end_matches("barrier();").trim_end_matches("warp_sync();");
            let line = text[..text.find(from).unwrap_or(0) + from.len()].lines().count();
            match ["sm_90", ONE_UNIT, "gfx942"].into_iter().find_map(|machine| noticed(file, from, &format!("{kept};"), cases, machine)) {
                Some(why) => println!("{:.1} s, {file}:{line}: {why}", begun.elapsed().as_secs_f64()),
                None => missed.push(format!("{file}:{line}")),
            }
        }
    }
    assert!(missed.is_empty(), "not noticed without the barrier at:\n{}", missed.join("\n"));
}

#[test]
fn barriers_of_attention() {
    every_barrier_is_needed(|file| file.starts_with("attention."));
}

#[test]
fn barriers_of_attention_backward() {
    every_barrier_is_needed(|file| file == "attention_backward.cu");
}

#[test]
fn barriers_of_lora() {
    every_barrier_is_needed(|file| file.starts_with("lora"));
}

/// Of compat.h, that of its sums over a block; its conversions of fragments have a test of their own (`fragments`).
#[test]
fn other_barriers() {
    every_barrier_is_needed(|file| !file.starts_with("attention") && !file.starts_with("lora") && file != "compat.h");
    all_noticed(&[("compat.h", "    barrier();\n    float total", "    float total", "bf16, a block", "gfx942")], |_, _| false);
}

#[test]
fn lanes() {
    // philox.cuh asks for the lane's own number only to hide a value from the compiler.
    all_noticed(LANES, |file, text| file != "philox.cuh" && ["lane_id()", "warp_id()", "shuffle"].iter().any(|word| text.contains(word)));
}

#[test]
fn bounds() {
    // Every kernel has one; of the headers, those that read and write device memory.
    all_noticed(BOUNDS, |file, _| file.ends_with(".cu"));
}

#[test]
fn arithmetic() {
    all_noticed(ARITHMETIC, |_, _| false);
}
