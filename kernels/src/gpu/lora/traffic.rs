//! How many bytes do the launches of LoRA move, against the least? By the tiles that the launches take; the emulator counts the same.

use super::tiles::{self, F32, RANKS, UP_COLS, X_COLS};
use crate::DType;
use crate::gpu::launch::{Arch, by_type};
use crate::gpu::traffic::Traffic;

/// What a call moves.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoraTraffic {
    /// Launches in order: kernel, and what it moves.
    pub launches: Vec<(&'static str, Traffic)>,
    /// The least: forward x once, y in and out; backward x and dy once, dx in and out.
    pub least_bytes: u64,
}

impl LoraTraffic {
    /// Bytes that pass through device memory, of everything: activations, adapters and their gradients, t and dt, partial sums written and
    /// read; what several blocks of one launch read, once.
    pub fn moved_bytes(&self) -> u64 {
        self.launches.iter().map(|l| l.1.once_bytes).sum()
    }

    /// Blocks of the launch with the fewest, sums of parts aside.
    pub fn fewest_blocks(&self) -> u64 {
        self.launches.iter().filter(|l| l.0 != SUM).map(|l| l.1.blocks).min().unwrap_or(0)
    }

    fn launch(&mut self, kernel: &'static str, blocks: usize, once: [usize; 2], again: usize) {
        let [read, write] = once.map(|b| b as u64);
        let traffic = Traffic { read_bytes: read + again as u64, write_bytes: write, once_bytes: read + write, blocks: blocks as u64 };
        self.launches.push((kernel, traffic));
    }

    /// Partial sums, in all and what is left of them, if there is more than one part.
    fn sum(&mut self, elems: usize, left: usize) {
        if elems > 0 {
            self.launch(SUM, 0, [elems * F32, left * F32], 0);
        }
    }
}

const SUM: &str = "lora_sum_f32";

/// Forward, of adapters `(outputs, rank)` that share an input; `y` is the type of y, `x` that of x.
pub fn forward(arch: &Arch, x: DType, y: DType, tokens: usize, inputs: usize, adapters: &[(usize, usize)]) -> LoraTraffic {
    let (ranks, widths): (Vec<usize>, Vec<usize>) = (adapters.iter().map(|a| a.1).collect(), adapters.iter().map(|a| a.0).collect());
    let (x_bytes, outputs) = (tokens * inputs * x.bytes(), widths.iter().sum::<usize>());
    let mut t = LoraTraffic { least_bytes: (x_bytes + 2 * tokens * outputs * y.bytes()) as u64, ..LoraTraffic::default() };
    for cut in tiles::down(arch, x.bytes(), tokens, inputs, &ranks) {
        let ranks: usize = cut.pieces.iter().map(|p| p.ranks).sum();
        let (blocks, a) = (tokens.div_ceil(cut.tokens), ranks * inputs * F32);
        let written = if cut.parts > 1 { cut.parts * tokens * cut.tiles * RANKS } else { tokens * ranks };
        t.launch(cut.kernel(x), blocks * cut.parts, [x_bytes + a, written * F32], a * blocks.saturating_sub(1));
        t.sum(if cut.parts > 1 { cut.parts * tokens * ranks } else { 0 }, tokens * ranks);
    }
    for cut in tiles::up(arch, tokens, &widths) {
        let some = &adapters[cut.adapters];
        let sum = |of: fn(&(usize, usize)) -> usize| some.iter().map(of).sum::<usize>();
        let (y_bytes, b, ts) = (tokens * sum(|a| a.0) * y.bytes(), sum(|a| a.0 * a.1) * F32, tokens * sum(|a| a.1) * F32);
        // Every block of columns reads t, every group of tokens B.
        let again = tokens * F32 * sum(|a| (a.0.div_ceil(UP_COLS) - 1) * a.1) + b * cut.groups.saturating_sub(1);
        t.launch(by_type(x, "lora_up_f32", "lora_up_bf16"), cut.blocks * cut.groups, [y_bytes + b + ts, y_bytes], again);
    }
    t
}

/// Backward with dx, gradients of the adapters set.
pub fn backward(arch: &Arch, x: DType, tokens: usize, inputs: usize, adapters: &[(usize, usize)]) -> LoraTraffic {
    let (wide, outputs) = (x.bytes(), adapters.iter().map(|a| a.0).sum::<usize>());
    let mut t = LoraTraffic { least_bytes: (tokens * (3 * inputs + outputs) * wide) as u64, ..LoraTraffic::default() };
    for cut in tiles::dy(arch, tokens, adapters) {
        let (mut read, mut written, mut again, mut partials, mut left) = (0, 0, 0, 0, 0);
        for p in &cut.pieces {
            let width = adapters[p.adapter].0;
            let chunks = width.div_ceil(cut.chunk);
            let steps: usize = (0..chunks).map(|c| (width - c * cut.chunk).min(cut.chunk).div_ceil(tiles::dy_cols(arch))).sum();
            let (skinny, b) = (tokens * p.ranks, width * p.ranks);
            read += tokens * width * wide + (skinny + b) * F32;
            written += (chunks * skinny + cut.groups * b) * F32;
            // t for every step of columns, sums of dt before all but a chunk's first, B for every group.
            again += (skinny * (steps - 1 + steps - chunks) + b * cut.groups.saturating_sub(1)) * F32;
            for (parts, elems) in [(chunks, skinny), (cut.groups, b)] {
                if parts > 1 {
                    (partials, left) = (partials + parts * elems, left + elems);
                }
            }
        }
        t.launch(cut.kernel(x), cut.blocks * cut.groups, [read, written], again);
        t.sum(partials, left);
    }
    let ranks: Vec<usize> = adapters.iter().map(|a| a.1).collect();
    for cut in tiles::x(arch, tokens, inputs, &ranks) {
        let ranks: usize = cut.pieces.iter().map(|p| p.ranks).sum();
        let (blocks, a, dt, x_bytes) = (inputs.div_ceil(X_COLS), ranks * inputs, tokens * ranks * F32, tokens * inputs * wide);
        let again = dt * (blocks - 1) + a * F32 * cut.groups.saturating_sub(1);
        t.launch(cut.kernel(x), blocks * cut.groups, [2 * x_bytes + a * F32 + dt, x_bytes + cut.groups * a * F32], again);
        t.sum(if cut.groups > 1 { cut.groups * a } else { 0 }, a);
    }
    t
}
