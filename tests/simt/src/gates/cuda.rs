//! What does NVIDIA's compiler make of a source? Registers and spills are in its log, parameters and threads in the PTX, and
//! matrix instructions in the disassembly of the code itself.

use super::tools::Tools;
use super::{Row, write_whole};
use crate::build::target_folder;
use std::process::Command;

/// The number in front of a word: `64 registers`.
fn before(text: &str, word: &str) -> Option<u32> {
    let at = text.find(word)?;
    text[..at].split_whitespace().last()?.parse().ok()
}

/// The number behind a text, as far as it goes.
fn after(text: &str, word: &str) -> Option<u32> {
    let rest = &text[text.find(word)? + word.len()..];
    rest[..rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len())].parse().ok()
}

/// The kernels of a source on one machine.
///
/// # Errors
/// What the compiler or the disassembler says, or a kernel of which they do not say all.
pub fn compile(tools: &Tools, source: &str, arch: &str) -> Result<Vec<Row>, String> {
    let compiled = tools.nvrtc.as_ref().map_err(Clone::clone)?.compile(source, arch).map_err(|e| e.to_string())?;
    let mut rows = Vec::new();
    for part in compiled.log.split("Compiling entry function '").skip(1) {
        let kernel = part.split('\'').next().unwrap_or_default();
        let missing = |what: &str| format!("{kernel} on {arch}: the compiler does not say its {what}");
        // Bytes on the stack, stored and loaded: on the line behind the kernel's own properties.
        let properties = part.split("Function properties for ").skip(1);
        let own = properties.clone().find(|p| p.split_whitespace().next() == Some(kernel)).ok_or_else(|| missing("spills"))?;
        let called: u32 = properties.filter_map(|p| before(p, " bytes stack frame")).sum();
        let used = own.split("Used ").nth(1).ok_or_else(|| missing("registers"))?;
        let used = used.lines().next().unwrap_or_default();
        let entry = compiled.ptx.split(".entry ").skip(1).find(|e| e.split(['(', ' ']).next() == Some(kernel));
        let entry = entry.and_then(|e| e.split('{').next()).ok_or_else(|| missing("declaration"))?;
        rows.push(Row {
            source: source.into(),
            kernel: kernel.into(),
            arch: arch.into(),
            params_bytes: after(entry, "_param_0[").ok_or_else(|| missing("parameters"))?,
            threads: after(entry, ".maxntid ").ok_or_else(|| missing("threads"))?,
            registers: before(used, " registers").ok_or_else(|| missing("registers"))?,
            shared_bytes: before(used, " bytes smem").unwrap_or(0),
            scratch_bytes: called,
            spills: before(own, " bytes spill stores").unwrap_or(0) + before(own, " bytes spill loads").unwrap_or(0),
            matrix: 0,
        });
    }
    let code = target_folder().join("gates").join(format!("{source}.{arch}.cubin"));
    std::fs::create_dir_all(target_folder().join("gates")).map_err(|e| e.to_string())?;
    write_whole(&code, &compiled.code)?;
    let program = tools.nvdisasm.as_ref().ok_or("no nvdisasm")?;
    let out = Command::new(program).arg("-c").arg(&code).output().map_err(|e| format!("nvdisasm: {e}"))?;
    if !out.status.success() {
        return Err(format!("nvdisasm of {source} for {arch}: {}", String::from_utf8_lossy(&out.stderr)));
    }
    let text = String::from_utf8_lossy(&out.stdout);
    for section in text.split(".section\t.text.").skip(1) {
        let kernel = section.split([',', '\n']).next().unwrap_or_default();
        if let Some(row) = rows.iter_mut().find(|row| row.kernel == kernel) {
            let matrix = |line: &&str| line.contains(" HMMA.") || line.contains(" HGMMA.");
            row.matrix = section.lines().filter(matrix).count() as u32;
        }
    }
    Ok(rows)
}
