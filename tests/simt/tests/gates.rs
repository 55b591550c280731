//! Do real compilers make of the kernels what was planned? Every source for every machine: no spills, no scratch memory, matrix
//! instructions where there are products, names and sizes of parameters as the host has them, and registers, shared memory and
//! blocks as in `tests/simt/gates.md`.

use zrt_kernels::gpu::launch::Kernel;
use zrt_kernels::gpu::table;
use zrt_simt::gates::{ARCHS, Compiled, Row, compile_all, faults, page, tools::Compiler};

#[test]
fn kernels_compile_as_the_table_says() {
    let compiled = compile_all().unwrap_or_else(|e| panic!("{e}"));
    for (arch, why) in &compiled.not_run {
        println!("not run: {arch}: {why}");
    }
    let table = std::fs::read_to_string(page::path()).unwrap_or_default();
    for other in page::other_compilers(&table, &compiled) {
        println!("not compared with the table, which another version of the compiler made: {other}");
    }
    let mut wrong = faults(&compiled);
    let differences = page::differences(&table, &compiled);
    if !differences.is_empty() {
        wrong.push("gates.md is not up to date; if this is meant, run `cargo run --release -p zrt-simt --bin gates`:".into());
        wrong.extend(differences);
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

/// Every kernel on every machine, without a fault.
fn sound() -> Compiled {
    let row = |k: &Kernel, arch: &str| Row {
        source: k.source.into(),
        kernel: k.name.into(),
        arch: arch.into(),
        params_bytes: k.params_bytes as u32,
        threads: 256,
        registers: 64,
        shared_bytes: 1024,
        scratch_bytes: 0,
        spills: 0,
        matrix: 8,
    };
    let rows = table::kernels().flat_map(|k| ARCHS.iter().map(move |(arch, _)| row(k, arch))).collect();
    let version = |c: Compiler| if c == Compiler::Nvrtc { "NVRTC 1.2" } else { "clang 3.4.5" };
    Compiled { rows, not_run: Vec::new(), versions: ARCHS.iter().map(|(arch, c)| (*arch, version(*c).to_string())).collect() }
}

#[test]
fn each_fault_is_seen() {
    assert!(faults(&sound()).is_empty(), "{:?}", faults(&sound()));
    let seen = |change: fn(&mut Compiled), text: &str| {
        let mut compiled = sound();
        change(&mut compiled);
        let found = faults(&compiled);
        assert!(found.len() == 1 && found[0].contains(text), "{text}: {found:?}");
    };
    seen(|c| c.rows[3].spills = 2, "2 spills");
    seen(|c| c.rows[0].scratch_bytes = 16, "16 bytes of scratch");
    seen(|c| c.rows[1].params_bytes += 8, "the host passes");
    seen(|c| drop(c.rows.remove(2)), "is not in the code");
    let extra = |c: &mut Compiled| {
        let row = Row { kernel: "unknown".into(), ..c.rows[0].clone() };
        c.rows.push(row);
    };
    seen(extra, "table.rs");
}

#[test]
fn each_change_is_a_line_of_the_difference() {
    let before = page::render(&sound());
    assert!(page::differences(&before, &sound()).is_empty());
    let mut after = sound();
    after.rows[0].registers -= 2;
    assert!(page::differences(&before, &after).is_empty(), "a compiler's own jitter, as many blocks");
    after.rows[0].registers += 3;
    let kernel = after.rows[0].kernel.clone();
    let lines = page::differences(&before, &after);
    assert!(lines.len() == 2 && lines[0].starts_with(&format!("- | {kernel} ")) && lines[1].starts_with("+ "), "{lines:?}");
    // Another version of a compiler is another table: nothing to compare, and that is said.
    after.versions[0].1 = "NVRTC 1.3".into();
    assert!(page::differences(&before, &after).is_empty());
    assert_eq!(page::other_compilers(&before, &after), ["sm_80: NVRTC 1.3 here"]);
}
