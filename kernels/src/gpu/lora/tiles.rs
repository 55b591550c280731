//! How is a call cut into launches, and a launch into blocks? Pure arithmetic, the same for those who launch and those who count.
//!
//! A kernel takes up to four slices of adapters: `lora_down` and `lora_x` with up to 12 tiles of 16 ranks together, so three adapters of
//! rank 64 are one launch; `lora_dy` with up to 64 ranks each. Larger ranks are several launches.

use crate::DType;
use crate::gpu::launch::{Arch, by_type};

/// Threads of a block.
pub(super) const THREADS: u32 = 256;
/// Slices of a launch.
pub(super) const MAX_SLICES: usize = 4;
/// Ranks of a tile, and tiles that kernels take.
pub(super) const RANKS: usize = 16;
pub(super) const SMALL_TILES: usize = 4;
pub(super) const LARGE_TILES: usize = 12;
/// Steps of the inner dimension that a part of `lora_down` has at least.
const PART_STEPS: usize = 4;
/// Tokens of a step and columns of a block of `lora_up`; ranks that it takes at once.
pub(super) const UP_TOKENS: usize = 64;
pub(super) const UP_COLS: usize = 128;
pub(super) const UP_RANKS: usize = 32;
/// Columns of a block of `lora_x`.
pub(super) const X_COLS: usize = 32;
/// Columns of a chunk of `lora_dy` are a multiple of this: whole lines of the caches.
const DY_CHUNK: usize = 64;
/// Tokens of a step of `lora_dy`, and ranks of a slice of its large form; the small one takes one tile.
pub(super) const DY_TOKENS: usize = 64;
pub(super) const DY_RANKS: usize = 64;
pub(super) const F32: usize = size_of::<f32>();

/// A machine with a copy engine keeps several tiles under way in shared memory, and takes wider ones.
fn copies(arch: &Arch) -> bool {
    arch.lanes == 32
}

/// Wide tiles in shared memory.
pub(super) fn stages(arch: &Arch) -> usize {
    if copies(arch) { 4 } else { 2 }
}

/// Warps of a block, halved: they share a block's work two by so many.
pub(super) fn half_warps(arch: &Arch) -> usize {
    (THREADS / arch.lanes) as usize / 2
}

/// Some ranks of an adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub adapter: usize,
    pub from: usize,
    pub ranks: usize,
    /// Rank tile, or block, of its launch that it begins with.
    pub first: usize,
}

/// Tiles of a launch of these pieces.
pub(super) fn tiles(pieces: &[Piece]) -> usize {
    pieces.last().map_or(0, |p| p.first + p.ranks.div_ceil(RANKS))
}

/// The launches that adapters of these ranks take, where their tiles are counted together.
fn launches(ranks: &[usize]) -> Vec<Vec<Piece>> {
    let mut all: Vec<Vec<Piece>> = Vec::new();
    for (adapter, rank) in ranks.iter().enumerate() {
        for from in (0..*rank).step_by(LARGE_TILES * RANKS) {
            let ranks = (rank - from).min(LARGE_TILES * RANKS);
            let fits = |l: &Vec<Piece>| l.len() < MAX_SLICES && tiles(l) + ranks.div_ceil(RANKS) <= LARGE_TILES;
            match all.last_mut().filter(|l| fits(l)) {
                Some(last) => last.push(Piece { adapter, from, ranks, first: tiles(last) }),
                None => all.push(vec![Piece { adapter, from, ranks, first: 0 }]),
            }
        }
    }
    all
}

/// A launch of `lora_down`: blocks of tokens x parts of the inner dimension.
pub(super) struct Down {
    pub pieces: Vec<Piece>,
    pub tiles: usize,
    pub large: bool,
    /// Tokens of a block.
    pub tokens: usize,
    /// Elements of the inner dimension that a block takes a step.
    pub step: usize,
    /// Parts of the inner dimension, and elements of each.
    pub parts: usize,
    pub part: usize,
}

impl Down {
    pub fn kernel(&self, dtype: DType) -> &'static str {
        if self.large {
            by_type(dtype, "lora_down_large_f32", "lora_down_large_bf16")
        } else {
            by_type(dtype, "lora_down_f32", "lora_down_bf16")
        }
    }
}

/// `lora_down` of adapters of these ranks over `[tokens, width]` of elements of `bytes` bytes.
pub(super) fn down(arch: &Arch, bytes: usize, tokens: usize, width: usize, ranks: &[usize]) -> Vec<Down> {
    let cut = |pieces: Vec<Piece>| {
        let tiles = tiles(&pieces);
        let large = tiles > SMALL_TILES;
        let step = down_step(arch, bytes, large);
        let (parts, part) = down_parts(arch, step, tokens.div_ceil(down_tokens(arch, large)), width);
        Down { pieces, tiles, large, tokens: down_tokens(arch, large), step, parts, part }
    };
    launches(ranks).into_iter().map(cut).collect()
}

fn down_tokens(arch: &Arch, large: bool) -> usize {
    if large && !copies(arch) { 32 } else { 64 }
}

fn down_step(arch: &Arch, bytes: usize, large: bool) -> usize {
    (if copies(arch) && !large { 128 } else { 64 }) / bytes
}

/// Parts of the inner dimension `width`, and elements of each, of so many blocks of tokens: every compute unit gets a block.
fn down_parts(arch: &Arch, step: usize, token_blocks: usize, width: usize) -> (usize, usize) {
    let wanted = (arch.units as usize).div_ceil(token_blocks.max(1));
    let parts = wanted.min(width / (PART_STEPS * step)).max(1);
    let part = width.div_ceil(parts).next_multiple_of(step).max(step);
    (width.div_ceil(part).max(1), part)
}

/// A launch of `lora_up`: blocks of columns of adapters `adapters` x groups of tokens.
pub(super) struct Up {
    pub adapters: std::ops::Range<usize>,
    /// Blocks of columns of all of them.
    pub blocks: usize,
    /// Groups of tokens, and tokens of each: two blocks for each compute unit.
    pub groups: usize,
    pub group: usize,
}

/// `lora_up` of adapters of these widths.
pub(super) fn up(arch: &Arch, tokens: usize, widths: &[usize]) -> Vec<Up> {
    let cut = |first: usize| {
        let adapters = first..widths.len().min(first + MAX_SLICES);
        let blocks: usize = widths[adapters.clone()].iter().map(|w| w.div_ceil(UP_COLS)).sum();
        let wanted = (2 * arch.units as usize).div_ceil(blocks.max(1));
        let group = tokens.div_ceil(wanted).next_multiple_of(UP_TOKENS).max(UP_TOKENS);
        // A grid has 65,535 rows.
        let group = group.max(tokens.div_ceil(65_535).next_multiple_of(UP_TOKENS));
        Up { adapters, blocks, groups: tokens.div_ceil(group), group }
    };
    (0..widths.len()).step_by(MAX_SLICES).map(cut).collect()
}

/// A launch of `lora_x`: blocks of columns x groups of tokens.
pub(super) struct X {
    pub pieces: Vec<Piece>,
    pub tiles: usize,
    pub large: bool,
    /// Groups of tokens, and tokens of each.
    pub groups: usize,
    pub group: usize,
}

impl X {
    pub fn kernel(&self, dtype: DType) -> &'static str {
        if self.large { by_type(dtype, "lora_x_large_f32", "lora_x_large_bf16") } else { by_type(dtype, "lora_x_f32", "lora_x_bf16") }
    }
}

/// `lora_x` of adapters of these ranks over `[tokens, width]`.
pub(super) fn x(arch: &Arch, tokens: usize, width: usize, ranks: &[usize]) -> Vec<X> {
    let wanted = (arch.units as usize).div_ceil(width.div_ceil(X_COLS).max(1));
    let group = tokens.div_ceil(wanted).next_multiple_of(x_tokens(arch)).max(x_tokens(arch));
    let cut = |pieces: Vec<Piece>| {
        let tiles = tiles(&pieces);
        X { pieces, tiles, large: tiles > SMALL_TILES, groups: tokens.div_ceil(group), group }
    };
    launches(ranks).into_iter().map(cut).collect()
}

/// Tokens of a step of `lora_x`.
pub(super) fn x_tokens(arch: &Arch) -> usize {
    16 * half_warps(arch)
}

/// A launch of `lora_dy`: chunks of columns of its pieces' adapters x groups of tokens.
#[derive(Debug)]
pub(super) struct Dy {
    /// `first` is the first chunk.
    pub pieces: Vec<Piece>,
    pub large: bool,
    /// Groups of tokens, and tokens of each.
    pub groups: usize,
    pub group: usize,
    /// Columns of a chunk.
    pub chunk: usize,
    /// Chunks of all pieces.
    pub blocks: usize,
}

impl Dy {
    pub fn kernel(&self, dtype: DType) -> &'static str {
        if self.large { by_type(dtype, "lora_dy_large_f32", "lora_dy_large_bf16") } else { by_type(dtype, "lora_dy_f32", "lora_dy_bf16") }
    }
}

/// `lora_dy` of adapters of these widths and ranks.
pub(super) fn dy(arch: &Arch, tokens: usize, adapters: &[(usize, usize)]) -> Vec<Dy> {
    let piece = |adapter: usize, from: usize| Piece { adapter, from, ranks: (adapters[adapter].1 - from).min(DY_RANKS), first: 0 };
    let all: Vec<Piece> = (0..adapters.len())
        .flat_map(|a| (0..adapters[a].1).step_by(DY_RANKS).map(move |from| (a, from)))
        .map(|(a, f)| piece(a, f))
        .collect();
    let most = |of: fn(&(usize, usize)) -> usize| adapters.iter().map(of).max().unwrap_or(0);
    let budget = dy_budget(arch, tokens, most(|a| a.0), most(|a| a.1), adapters.len());
    let cut = |pieces: &[Piece]| {
        let sizes: Vec<(usize, usize)> = pieces.iter().map(|p| (adapters[p.adapter].0, p.ranks)).collect();
        let (group, chunk) = dy_split(arch, tokens, &sizes, budget);
        let mut blocks = 0;
        let mut pieces = pieces.to_vec();
        for p in &mut pieces {
            p.first = blocks;
            blocks += adapters[p.adapter].0.div_ceil(chunk);
        }
        let large = pieces.iter().any(|p| p.ranks > RANKS);
        Dy { pieces, large, groups: tokens.div_ceil(group), group, chunk, blocks }
    };
    all.chunks(MAX_SLICES).map(cut).collect()
}

/// Columns of a step of `lora_dy`.
pub(super) fn dy_cols(arch: &Arch) -> usize {
    if copies(arch) { 128 } else { 64 }
}

/// Bytes of shared memory of `lora_dy`: tiles of dy under way, one of t and one of B.
pub(super) fn dy_shared(arch: &Arch, bytes: usize, large: bool) -> usize {
    let (cols, ranks, stages) = (dy_cols(arch), if large { DY_RANKS } else { RANKS }, if copies(arch) { 3 } else { 2 });
    stages * DY_TOKENS * cols * bytes + (DY_TOKENS + cols) * ranks * F32
}

/// f32 partial sums of `lora_dy` over slices of these widths and ranks, each written and read once: of dt by chunks, of db by groups.
pub(super) fn dy_partials(tokens: usize, slices: &[(usize, usize)], group: usize, chunk: usize) -> usize {
    let groups = tokens.div_ceil(group);
    let of = |&(width, rank): &(usize, usize)| {
        let chunks = width.div_ceil(chunk);
        let dt = if chunks == 1 { 0 } else { chunks * tokens * rank };
        dt + if groups == 1 { 0 } else { groups * width * rank }
    };
    slices.iter().map(of).sum()
}

/// Tokens of a group and columns of a chunk: of those whose partial sums are at most `budget`, that give every compute unit a block (or
/// most of them one), those with the fewest partial sums.
fn dy_split(arch: &Arch, tokens: usize, slices: &[(usize, usize)], budget: usize) -> (usize, usize) {
    let (units, cols) = (arch.units as usize, DY_CHUNK);
    let widest = slices.iter().map(|s| s.0).max().unwrap_or(0).div_ceil(cols).max(1);
    let blocks =
        |group: usize, chunk: usize| tokens.div_ceil(group).max(1) * slices.iter().map(|s| s.0.div_ceil(chunk * cols)).sum::<usize>();
    let key = |group: usize, chunk: usize| {
        let partials = dy_partials(tokens, slices, group, chunk * cols);
        (partials > budget, units.saturating_sub(blocks(group, chunk)), partials)
    };
    // One block for each slice has none.
    let mut best = (tokens.next_multiple_of(DY_TOKENS).max(DY_TOKENS), widest);
    for groups in 1..=units.min(tokens.div_ceil(DY_TOKENS)) {
        let group = tokens.div_ceil(groups).next_multiple_of(DY_TOKENS);
        // The widest chunk that gives enough blocks.
        let (mut low, mut high) = (1, widest + 1);
        while high - low > 1 {
            let middle = (low + high) / 2;
            if blocks(group, middle) >= units { low = middle } else { high = middle }
        }
        if key(group, low) < key(best.0, best.1) {
            best = (group, low);
        }
    }
    (best.0, best.1 * cols)
}

/// f32 partial sums that [`dy`] may leave for adapters up to these sizes: what it leaves where all have them.
fn dy_budget(arch: &Arch, tokens: usize, outputs: usize, rank: usize, adapters: usize) -> usize {
    let slices = vec![(outputs, rank.min(DY_RANKS)); (adapters * rank.div_ceil(DY_RANKS)).min(MAX_SLICES)];
    let (group, chunk) = dy_split(arch, tokens, &slices, usize::MAX);
    dy_partials(tokens, &slices, group, chunk)
}

/// f32 of dt, and of partial sums, for adapters up to these ranks and outputs, however many of them and of whatever type.
pub(super) fn scratch(arch: &Arch, tokens: usize, inputs: usize, outputs: usize, rank: usize, adapters: usize) -> [usize; 2] {
    let padded = rank.next_multiple_of(RANKS);
    let ranks = (adapters * padded).min(LARGE_TILES * RANKS);
    // Large kernels have narrower blocks of tokens, others more parts: the most of either, and narrower steps allow more parts.
    let parts = |large| {
        let blocks = tokens.div_ceil(down_tokens(arch, large));
        [2, 4].map(|b| down_parts(arch, down_step(arch, b, large), blocks, inputs).0).into_iter().max().unwrap_or(1)
    };
    let down = parts(false).max(parts(true)) * tokens * ranks;
    // At least as many as groups x inputs.
    let x = (tokens.div_ceil(x_tokens(arch)).max(1) * inputs).min(arch.units as usize * X_COLS + inputs) * ranks;
    [adapters * tokens * rank, down.max(x).max(dy_budget(arch, tokens, outputs, rank, adapters))]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::philox::philox4x32;

    /// Partial sums of every launch fit what is asked for, whatever the sizes; and launches take all ranks.
    #[test]
    fn partial_sums_fit_the_workspace() {
        for case in 0..600u32 {
            let words = philox4x32([case, 0, 0, 0], [11, 0]);
            let arch = Arch::known(["sm_80", "sm_90", "gfx90a", "gfx942", "gfx950"][words[0] as usize % 5]).unwrap();
            let tokens = [0, 1, 63, 500, 2048, 8192, 70_001][words[1] as usize % 7];
            let inputs = [1, 51, 4096, 14_336][words[2] as usize % 4];
            let number = |i: u32, most: u32| 1 + (philox4x32([case, i, 0, 0], [12, 0])[0] % most) as usize;
            let adapters: Vec<(usize, usize)> =
                (0..number(0, 6) as u32).map(|i| (number(2 * i + 1, 30_000), number(2 * i + 2, 256))).collect();
            let ranks: Vec<usize> = adapters.iter().map(|a| a.1).collect();
            let (outputs, rank) = (adapters.iter().map(|a| a.0).max().unwrap(), ranks.iter().copied().max().unwrap());
            let [_, partials] = scratch(&arch, tokens, inputs, outputs, rank, adapters.len());
            for bytes in [2, 4] {
                for d in down(&arch, bytes, tokens, inputs, &ranks) {
                    assert!(d.parts == 1 || d.parts * tokens * d.tiles * RANKS <= partials, "{arch:?} {tokens} x {inputs} {adapters:?}");
                }
            }
            for x in x(&arch, tokens, inputs, &ranks) {
                let all: usize = x.pieces.iter().map(|p| p.ranks).sum();
                assert!(x.groups == 1 || x.groups * inputs * all <= partials, "{arch:?} {tokens} x {inputs} {adapters:?}");
            }
            let mut taken = 0;
            for d in dy(&arch, tokens, &adapters) {
                let sizes: Vec<_> = d.pieces.iter().map(|p| (adapters[p.adapter].0, p.ranks)).collect();
                assert!(dy_partials(tokens, &sizes, d.group, d.chunk) <= partials, "{arch:?} {tokens} {adapters:?} {d:?}");
                taken += d.pieces.iter().map(|p| p.ranks).sum::<usize>();
            }
            assert_eq!(taken, ranks.iter().sum::<usize>());
        }
    }
}
