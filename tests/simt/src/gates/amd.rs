//! What does clang make of a source for AMD's machines? Its assembler output holds all: instructions, notes on each kernel's
//! registers, and the metadata that a driver reads.

use super::Row;
use super::tools::{Compiler, Tools};
use crate::build::target_folder;
use std::process::Command;
use zrt_kernels::gpu::table;

/// The kernels of a source on one machine.
///
/// # Errors
/// What the compiler says, or a kernel of which it does not say all.
pub fn compile(tools: &Tools, compiler: Compiler, source: &str, arch: &str) -> Result<Vec<Row>, String> {
    let folder = target_folder().join("gates").join(format!("{source}.{arch}.{}", std::process::id()));
    std::fs::create_dir_all(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    for (name, text) in table::SOURCES {
        std::fs::write(folder.join(name), text).map_err(|e| format!("{name}: {e}"))?;
    }
    let (program, first) = tools.clang(compiler)?;
    let out = Command::new(program)
        .args(first)
        .args(["-x", "hip", "--offload-device-only", "--no-gpu-bundle-output", "-nogpuinc", "-nogpulib", "-O3", "-std=c++17", "-S"])
        .arg(format!("--offload-arch={arch}"))
        .arg(folder.join(source))
        .args(["-o", "-"])
        .output();
    let _ = std::fs::remove_dir_all(&folder);
    let out = out.map_err(|e| format!("{}: {e}", program.display()))?;
    if !out.status.success() {
        return Err(format!("{source} for {arch}: {}", String::from_utf8_lossy(&out.stderr)));
    }
    read(&String::from_utf8_lossy(&out.stdout), source, arch)
}

/// The number behind `name:` in a list of such lines.
fn field(text: &str, name: &str) -> Option<u32> {
    let line = text.lines().find_map(|l| l.trim_start_matches([' ', '-', ';']).strip_prefix(name)?.strip_prefix(':'))?;
    line.split_whitespace().next()?.parse().ok()
}

fn read(text: &str, source: &str, arch: &str) -> Result<Vec<Row>, String> {
    let metadata = text.split("\t.amdgpu_metadata").nth(1).ok_or_else(|| format!("{source} for {arch}: no metadata"))?;
    let mut rows = Vec::new();
    for part in metadata.split("\n  - .agpr_count:").skip(1) {
        let name = part.lines().find_map(|l| l.trim().strip_prefix(".name:")).unwrap_or_default().trim();
        let missing = |what: &str| format!("{name} on {arch}: the compiler does not say its {what}");
        let number = |what: &str| field(part, what).ok_or_else(|| missing(what));
        // From the kernel's label to the notes behind its code.
        let code = text.split(&format!("\n{name}:")).nth(1).ok_or_else(|| missing("code"))?;
        let end = code.find("; Occupancy:").ok_or_else(|| missing("notes"))?;
        let code = &code[..end];
        rows.push(Row {
            source: source.into(),
            kernel: name.into(),
            arch: arch.into(),
            // Our struct alone: what a runtime passes besides it comes behind.
            params_bytes: field(part, ".size").ok_or_else(|| missing("parameters"))?,
            threads: number(".max_flat_workgroup_size")?,
            registers: field(code, "TotalNumVgprs").ok_or_else(|| missing("registers"))?,
            shared_bytes: number(".group_segment_fixed_size")?,
            scratch_bytes: number(".private_segment_fixed_size")?,
            spills: number(".vgpr_spill_count")? + number(".sgpr_spill_count")?,
            matrix: code.lines().filter(|l| l.trim_start().starts_with("v_mfma_")).count() as u32,
        });
    }
    Ok(rows)
}
