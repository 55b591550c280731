//! The page docs/kernels.md: what should each operation cost on a GPU that is not here? Bytes against the least possible, arithmetic,
//! blocks for each compute unit, how many of them it holds at once (registers and shared memory from the compile gates), and the
//! time that the copy bandwidth and the matrix rate of two machines allow. A run on a real GPU (`benches/gpu.sh`) is
//! compared with it.

use crate::gates::occupancy::Unit;
use crate::gates::page as gates;
use crate::plan::{Plan, blocks, plan};
use crate::shapes::{self, B8, B70, Case, Model};
use std::fmt::Write as _;
use std::path::PathBuf;
use zrt_kernels::DType;
use zrt_kernels::gpu::launch::Arch;
use zrt_kernels::gpu::lora::traffic;

/// A machine with rates that programs reach, not those of its data sheet.
pub struct Machine {
    /// For people.
    pub name: &'static str,
    /// Its compiler's name.
    pub arch: &'static str,
    /// Bytes a second that a copy reads and writes.
    pub copy: f64,
    /// Floating-point operations a second of a large bf16 product.
    pub matrix: f64,
}

/// H200: measured, a device-to-device copy of 8.6 GB and an 8192 x 8192 x 8192 product of random bf16 by PyTorch 2 (data sheet: 4.8 TB/s,
/// 989 TFLOP/s). MI300X: 0.8 of the data sheet's 5.3 TB/s, assumed; 668 TFLOP/s measured by others (the "maximum achievable
/// matmul FLOPS" table of Bekman's Machine Learning Engineering, ROCm 6.3; data sheet: 1,307).
pub const MACHINES: [Machine; 2] = [
    Machine { name: "H200", arch: "sm_90", copy: 4.3e12, matrix: 790e12 },
    Machine { name: "MI300X", arch: "gfx942", copy: 4.2e12, matrix: 668e12 },
];

impl Machine {
    fn arch(&self) -> Result<Arch, String> {
        Arch::known(self.arch).ok_or_else(|| format!("unknown machine {}", self.arch))
    }

    /// Seconds that a call takes at least, and whether memory is what it waits for.
    pub fn predict(&self, moved_bytes: u64, flops: u64) -> (f64, bool) {
        let (memory, matrix) = (moved_bytes as f64 / self.copy, flops as f64 / self.matrix);
        (memory.max(matrix), memory >= matrix)
    }
}

const TITLE: &str = "\
# What the GPU kernels should cost

Made by `cargo run --release -p zrt-simt --bin kernels_page`; nothing here was measured. `benches/gpu.sh` measures the same calls on a GPU.

Activations and weights are bf16, adapters f32, one document, base weights frozen. *Least* counts each operand once. *Moved* is that
and the partial sums of the workspace, written once and read once: what passes through device memory if the caches hold what
blocks share (weights and adapters, keys and values of a head). *Blocks* are those of the largest launch for each
compute unit, *held* is how many of them a unit holds at once. The time is the greater of moved bytes at the copy bandwidth and arithmetic at
the matrix rate, where bytes are what limits it marked `B`; starts of kernels, some microseconds each, are not in it. The bf16 products of an f32 adapter
are made twice, for the upper and lower half of its mantissa, which memory hides; arithmetic counts them once.

";

/// Where the page is.
pub fn path() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/kernels.md")
}

fn cells(plan: &Plan, machine: &Machine, arch: &Arch, table: &str) -> String {
    let (secs, memory) = machine.predict(plan.moved_bytes(), plan.flops);
    let moved = plan.moved_bytes() as f64 / plan.least_bytes.max(1) as f64;
    let Some(main) = plan.main() else { return " | | | |".into() };
    let per_unit = blocks(main) as f64 / f64::from(arch.units);
    let held = gates::row_of(table, main.kernel, machine.arch)
        .and_then(|(registers, shared)| Some(Unit::of(machine.arch)?.blocks(main.threads, registers, shared + main.shared_bytes)));
    let held = held.map_or("-".into(), |h| h.to_string());
    format!(" {moved:.2} | {per_unit:.1} | {held} | {:.1}{} |", secs * 1e6, if memory { " B" } else { "" })
}

fn line(case: &Case, table: &str, out: &mut String, totals: &mut [f64]) -> Result<(), String> {
    let mut rest = String::new();
    let (mut gflop, mut least, mut kernel) = (0.0, 0.0, "");
    for (machine, total) in MACHINES.iter().zip(totals.iter_mut()) {
        let arch = machine.arch()?;
        let plan = plan(case, &arch).map_err(|e| format!("{} of {}: {e}", case.op, case.sizes))?;
        (gflop, least) = (plan.flops as f64 / 1e9, plan.least_bytes as f64 / 1e6);
        kernel = plan.main().map_or(kernel, |l| l.kernel);
        rest += &cells(&plan, machine, &arch, table);
        *total += machine.predict(plan.moved_bytes(), plan.flops).0 * case.times as f64;
    }
    let _ = writeln!(out, "| {} | {} | {kernel} | {gflop:.1} | {least:.1} |{rest}", case.op, case.sizes);
    Ok(())
}

const LORA: &str = "\
## LoRA against its activations alone

All bytes that pass through memory (activations, adapters and their gradients, t and dt, partial sums written and read again) over those
of x, dy once and y, dx in and out, all bf16. *Blocks* are those of the smallest launch for each compute unit, sums aside. Backward reads dy
once for two products: P groups of tokens x C chunks of columns leave C N R + P O R partial sums, and with one block for each unit
there is no choice of P and C that leaves fewer (`tests/simt/tests/lora_traffic.rs`).

";

/// LoRA's bytes over those of x, y, dy, dx.
fn lora(out: &mut String) -> Result<(), String> {
    let names: String = MACHINES.iter().map(|m| format!(" {} forward | blocks | backward | blocks |", m.name)).collect();
    let _ = write!(out, "{LORA}| model | adapters | rank | tokens |{names}\n|---|---|--:|--:|{}\n", "--:|".repeat(4 * MACHINES.len()));
    for (model, tokens, rank) in
        [B8, B70].into_iter().flat_map(|m| [2048, 8192].map(|n| (m, n))).flat_map(|(m, n)| [8, 16, 64].map(|r| (m, n, r)))
    {
        for (name, inputs, outputs) in model.adapters() {
            let adapters: Vec<_> = outputs.iter().map(|o| (*o, rank)).collect();
            let _ = write!(out, "| {} | {name} | {rank} | {tokens} |", model.name);
            for machine in &MACHINES {
                let arch = machine.arch()?;
                let calls = [
                    traffic::forward(&arch, DType::BF16, DType::BF16, tokens, inputs, &adapters),
                    traffic::backward(&arch, DType::BF16, tokens, inputs, &adapters),
                ];
                for t in calls {
                    let per_unit = t.fewest_blocks() as f64 / f64::from(arch.units);
                    let _ = write!(out, " {:.2} | {per_unit:.1} |", t.moved_bytes() as f64 / t.least_bytes as f64);
                }
            }
            out.push('\n');
        }
    }
    out.push('\n');
    Ok(())
}

fn section(model: Model, n: usize, table: &str, out: &mut String) -> Result<(), String> {
    let names: String = MACHINES.iter().map(|m| format!(" {} moved / least | blocks | held | us |", m.name)).collect();
    let _ = write!(out, "## {} block, {n} tokens\n\n| operation | sizes | largest kernel | GFLOP | least MB |{names}\n", model.name);
    let _ = writeln!(out, "|---|---|---|--:|--:|{}", "--:|".repeat(4 * MACHINES.len()));
    let mut totals = [0.0; MACHINES.len()];
    for case in shapes::block(model, n, 16) {
        line(&case, table, out, &mut totals)?;
    }
    for case in shapes::adapters(model, n, 64).iter().chain(&shapes::ends(model, n, shapes::adapted(model, 16))) {
        line(case, table, out, &mut [0.0; MACHINES.len()])?;
    }
    let times: Vec<String> = MACHINES.iter().zip(totals).map(|(m, t)| format!("{:.2} ms on {}", t * 1e3, m.name)).collect();
    let _ = writeln!(out, "\nThe block forward and backward with adapters of rank 16: {}.\n", times.join(", "));
    Ok(())
}

/// The whole page.
///
/// # Errors
/// An operation that refuses one of the sizes.
pub fn render() -> Result<String, String> {
    let table = std::fs::read_to_string(gates::path()).map_err(|e| format!("{}: {e}", gates::path().display()))?;
    let mut out = TITLE.to_string();
    out += "| machine | compiled for | copy TB/s | matrix TFLOP/s |\n|---|---|--:|--:|\n";
    for m in MACHINES {
        let _ = writeln!(out, "| {} | {} | {:.1} | {:.0} |", m.name, m.arch, m.copy / 1e12, m.matrix / 1e12);
    }
    out.push('\n');
    for model in [B8, B70] {
        for tokens in [2048, 8192] {
            section(model, tokens, &table, &mut out)?;
        }
    }
    lora(&mut out)?;
    Ok(out.trim_end().to_string() + "\n")
}
