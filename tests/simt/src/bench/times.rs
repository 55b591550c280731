//! How fast is each call on a real GPU? Times of the device's own clock, beside what a copy and a product reach there, what
//! docs/kernels.md predicts, and PyTorch's time for the same maths if `benches/compare/gpu.py` was run.

use super::Target;
use super::gpu::Gpu;
use crate::plan::plan;
use crate::shapes::{self, B8, Call, Case, Fill, Memory};
use std::fmt::Write as _;
use std::time::{Duration, Instant};
use zrt_kernels::{DType, Result};

/// Tokens of the measured block.
pub const TOKENS: usize = 2048;
/// Ranks of its adapters.
pub const RANKS: [usize; 2] = [16, 64];

/// What PyTorch measured: `operation<TAB>sizes<TAB>microseconds<TAB>by what`, one line each.
pub struct Peers(Vec<(String, f64, String)>);

impl Peers {
    /// From that text.
    pub fn parse(text: &str) -> Peers {
        let line = |l: &str| {
            let mut cells = l.split('\t');
            let key = format!("{}\t{}", cells.next()?, cells.next()?);
            Some((key, cells.next()?.parse().ok()?, cells.next()?.trim().to_string()))
        };
        Peers(text.lines().filter_map(line).collect())
    }

    /// The best time of a call, in microseconds, and whose it is.
    pub fn best(&self, op: &str, sizes: &str) -> Option<(f64, &str)> {
        let key = format!("{op}\t{sizes}");
        let of_call = self.0.iter().filter(|(k, _, _)| *k == key);
        of_call.min_by(|a, b| a.1.total_cmp(&b.1)).map(|(_, us, whose)| (*us, whose.as_str()))
    }
}

/// The calls that are measured.
pub fn cases() -> Vec<Case> {
    let mut out = shapes::block(B8, TOKENS, RANKS[0]);
    out.extend(shapes::adapters(B8, TOKENS, RANKS[1]));
    out.extend(shapes::ends(B8, TOKENS, shapes::adapted(B8, RANKS[0])));
    out
}

/// Seconds of one run: the mean of as many as fit into `budget`, after three.
fn secs_of(gpu: &Gpu, budget: Duration, run: &dyn Fn() -> Result<()>) -> Result<f64> {
    gpu.secs(2, run)?;
    let one = gpu.secs(1, run)?;
    let runs = (budget.as_secs_f64() / one.max(1e-6)).clamp(3.0, 200.0) as u32;
    Ok(gpu.secs(runs, run)? / f64::from(runs))
}

/// Bytes a second, read and written, of a copy of 2 GB within the device.
fn copy_rate(gpu: &Gpu) -> Result<f64> {
    let bytes = 2usize << 30;
    let one = || gpu.tensor(bytes / 4, DType::F32, Fill::Zeros);
    let (from, to) = (one()?, one()?);
    let secs = secs_of(gpu, Duration::from_millis(200), &|| gpu.stream().copy(&to, &from))?;
    Ok(2.0 * bytes as f64 / secs)
}

fn run(gpu: &Gpu, call: &Call) -> Result<()> {
    (call.run)(gpu.ops(), gpu.stream())
}

/// The row of a call: ours, PyTorch's.
fn row(case: &Case, secs: f64, share: &str, peers: &Peers) -> String {
    let us = secs * 1e6;
    let peer = peers.best(case.op, &case.sizes).map_or("- | -".into(), |(p, whose)| format!("{p:.1} {whose} | {:.2}x", p / us));
    format!("| {} | {} | {us:.1} | {share} | {peer} |", case.op, case.sizes)
}

/// The measured table, within about `budget`.
///
/// # Errors
/// What the driver says.
pub fn table(gpu: &Gpu, peers: &Peers, budget: Duration) -> Result<String> {
    let started = Instant::now();
    let copy = copy_rate(gpu)?;
    // The best product that anybody made here: PyTorch's, else ours.
    let product = peers.best("matmul", "8192 x 8192 x 8192").map(|(us, _)| 2.0 * 8192f64.powi(3) / us * 1e6);
    let mut out = format!("copy: {:.2} TB/s read and written; ", copy / 1e12);
    let _ = match product {
        Some(rate) => writeln!(out, "bf16 product of 8192: {:.0} TFLOP/s (PyTorch)\n", rate / 1e12),
        None => writeln!(out, "bf16 product: not measured (no PyTorch), shares are of 790 TFLOP/s\n"),
    };
    let product = product.unwrap_or(790e12);
    out += "| operation | sizes | us | share | PyTorch us | ours is |\n|---|---|--:|--:|--:|--:|\n";
    let (mut ours, mut theirs, mut missing, mut unmatched) = (0.0, 0.0, 0, 0);
    for case in cases() {
        if started.elapsed() > budget {
            out += "stopped: out of time\n";
            break;
        }
        let planned = match plan(&case, &gpu.facts().arch) {
            Ok(planned) => planned,
            Err(e) => {
                missing += case.times;
                let _ = writeln!(out, "| {} | {} | {e} | | | |", case.op, case.sizes);
                continue;
            }
        };
        let call = (case.prepare)(gpu)?;
        let secs = match secs_of(gpu, Duration::from_millis(300), &|| run(gpu, &call)) {
            Ok(secs) => secs,
            Err(e) => {
                missing += case.times;
                let _ = writeln!(out, "| {} | {} | {e} | | | |", case.op, case.sizes);
                continue;
            }
        };
        let (memory, matrix) = (planned.moved_bytes() as f64 / copy, planned.flops as f64 / product);
        let limit = if memory >= matrix { "copy" } else { "product" };
        let share = format!("{:.0}% of {limit}", 100.0 * memory.max(matrix) / secs);
        let _ = writeln!(out, "{}", row(&case, secs, &share, peers));
        ours += secs * case.times as f64;
        match peers.best(case.op, &case.sizes) {
            Some((us, _)) => theirs += us / 1e6 * case.times as f64,
            None => unmatched += case.times,
        }
    }
    let _ = writeln!(
        out,
        "\n8B block, {TOKENS} tokens, rank {}, forward and backward, sum of its calls: {:.2} ms ({missing} calls without a kernel); \
         PyTorch, the same calls: {:.2} ms ({unmatched} calls without a figure)",
        RANKS[0],
        ours * 1e3,
        theirs * 1e3
    );
    if let Some((us, whose)) = peers.best("block", &format!("{TOKENS} tokens, rank {}", RANKS[0])) {
        let _ = writeln!(out, "PyTorch, one block with autograd ({whose}): {:.2} ms", us / 1e3);
    }
    if missing == 0 {
        let all = shapes::block(B8, TOKENS, RANKS[0]);
        let calls = all.iter().map(|c| Ok((c.times, (c.prepare)(gpu)?))).collect::<Result<Vec<_>>>()?;
        let block = || calls.iter().try_for_each(|(times, call)| (0..*times).try_for_each(|_| run(gpu, call)));
        let secs = secs_of(gpu, Duration::from_secs(2), &block)?;
        let _ = writeln!(out, "The same calls back to back: {:.2} ms", secs * 1e3);
    }
    Ok(out)
}
