//! The table of what compilers made, `tests/simt/gates.md`: how it is written and compared. One line for each kernel and machine, so that a
//! change of a kernel is a short diff.

use super::occupancy::Unit;
use super::{ARCHS, Compiled, Row};
use std::fmt::Write as _;
use std::path::PathBuf;

const TITLE: &str = "\
# What compilers make of the GPU kernels

Made by `cargo run --release -p zrt-simt --bin gates`, compared by `cargo test -p zrt-simt --test gates`. Registers are those of a thread, on AMD with accumulators;
shared memory is in bytes, without what the host adds at a launch; blocks are those that a compute unit holds with that; matrix
counts instructions in the code. No kernel spills or uses scratch memory.

";

/// Where the table is.
pub fn path() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("gates.md")
}

fn line(row: &Row) -> String {
    let Row { kernel, arch, threads, registers, shared_bytes, matrix, .. } = row;
    let blocks = Unit::of(arch).map_or(0, |u| u.blocks(*threads, *registers, *shared_bytes));
    format!("| {kernel} | {arch} | {threads} | {registers} | {shared_bytes} | {blocks} | {matrix} |")
}

/// The whole table.
pub fn render(compiled: &Compiled) -> String {
    let mut out = TITLE.to_string();
    for (arch, _) in ARCHS {
        let version = compiled.versions.iter().find(|(a, _)| *a == arch).map_or("not compiled", |(_, v)| v);
        let _ = writeln!(out, "* {arch}: {version}");
    }
    let mut source = "";
    for row in &compiled.rows {
        if row.source != source {
            source = &row.source;
            let _ = write!(
                out,
                "\n## {source}\n\n| kernel | machine | threads | registers | shared | blocks | matrix |\n|---|---|--:|--:|--:|--:|--:|\n"
            );
        }
        out.push_str(&line(row));
        out.push('\n');
    }
    out
}

/// Lines that differ between the checked-in table and what was compiled now, `-` and `+`: of machines whose compiler is the same.
pub fn differences(text: &str, compiled: &Compiled) -> Vec<String> {
    let fresh: Vec<String> = compiled.rows.iter().map(line).collect();
    let mut out = Vec::new();
    for (arch, version) in &compiled.versions {
        if !text.lines().any(|l| l == format!("* {arch}: {version}")) {
            continue;
        }
        let of_arch = format!("| {arch} |");
        let had: Vec<&str> = text.lines().filter(|l| l.starts_with("| ") && l.contains(&of_arch)).collect();
        let have: Vec<&str> = fresh.iter().map(String::as_str).filter(|l| l.contains(&of_arch)).collect();
        out.extend(had.iter().filter(|l| !have.iter().any(|other| same(l, other))).map(|l| format!("- {l}")));
        out.extend(have.iter().filter(|l| !had.iter().any(|other| same(l, other))).map(|l| format!("+ {l}")));
    }
    out.sort_by(|a, b| a[2..].cmp(&b[2..]));
    out
}

/// Registers by which two compilations of one source differ: the pinned NVRTC gave `gemm_tn_f32` 148 or 150 on sm_80 and 173 or 175 on
/// sm_90 in three runs on the same text.
const JITTER: u32 = 2;

/// Whether two lines say the same, registers within [`JITTER`].
fn same(a: &str, b: &str) -> bool {
    let (mut a, mut b) = (a.split('|').enumerate(), b.split('|'));
    a.all(|(i, x)| {
        let Some(y) = b.next() else { return false };
        let registers = |cell: &str| cell.trim().parse::<u32>();
        x == y || (i == 4 && matches!((registers(x), registers(y)), (Ok(x), Ok(y)) if x.abs_diff(y) <= JITTER))
    }) && b.next().is_none()
}

/// Machines whose compiler is another than the table's, with the versions.
pub fn other_compilers(text: &str, compiled: &Compiled) -> Vec<String> {
    let differ = compiled.versions.iter().filter(|(arch, version)| !text.lines().any(|l| l == format!("* {arch}: {version}")));
    differ.map(|(arch, version)| format!("{arch}: {version} here")).collect()
}

/// Registers and shared memory that the table has for a kernel on a machine.
pub fn row_of(text: &str, kernel: &str, arch: &str) -> Option<(u32, u32)> {
    let line = text.lines().find(|l| l.starts_with(&format!("| {kernel} | {arch} |")))?;
    let cells: Vec<&str> = line.split('|').map(str::trim).collect();
    Some((cells.get(4)?.parse().ok()?, cells.get(5)?.parse().ok()?))
}
