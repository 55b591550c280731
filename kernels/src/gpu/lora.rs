//! LoRA: how adapters that share an input are cut into launches, and into parts and groups whose partial sums go through the workspace.
//! `kernels/gpu/lora.cu` tells what each kernel touches.
//!
//! A kernel takes up to four slices of adapters with up to 12 tiles of 16 ranks together, so three adapters of rank 64 are one launch and
//! larger ranks are several. Launches follow each other on the stream: their partial sums share one piece of the workspace.

use super::launch::{Address, Arch, Call, Kernel, Launcher, by_type, whole_16, workspace_of};
use super::params::params;
use crate::philox::philox4x32;
use crate::{DType, Error, LoraBackward, LoraForward, OpShape, Result, Stream, View, ViewMut, Write, checks};
use bytemuck::Zeroable;

pub(super) const KERNELS: &[Kernel] = &[
    Kernel::new::<LoraDown>("lora_down_f32", "lora.cu"),
    Kernel::new::<LoraDown>("lora_down_bf16", "lora.cu"),
    Kernel::new::<LoraDown>("lora_down_large_f32", "lora.cu"),
    Kernel::new::<LoraDown>("lora_down_large_bf16", "lora.cu"),
    Kernel::new::<LoraDown>("lora_down_b_f32", "lora.cu"),
    Kernel::new::<LoraDown>("lora_down_b_bf16", "lora.cu"),
    Kernel::new::<LoraUp>("lora_up_f32", "lora.cu"),
    Kernel::new::<LoraUp>("lora_up_bf16", "lora.cu"),
    Kernel::new::<LoraX>("lora_x_f32", "lora.cu"),
    Kernel::new::<LoraX>("lora_x_bf16", "lora.cu"),
    Kernel::new::<LoraX>("lora_x_large_f32", "lora.cu"),
    Kernel::new::<LoraX>("lora_x_large_bf16", "lora.cu"),
    Kernel::new::<LoraSum>("lora_sum_f32", "lora.cu"),
];

params! {
    struct Dropout {
        key: [u32; 2],
        micro_batch: u32,
        least: u32,
        keep: f32,
        unused: u32,
    }
    struct Slice {
        skinny: Address,
        adapter: Address,
        grad: Address,
        y: Address,
        y_f32: Address,
        grad_part: i64,
        rank: i32,
        ld: i32,
        first: i32,
        width: i32,
        vector: i32,
        vector_t: i32,
        vector_wide: i32,
        grad_ld: i32,
        site: u32,
        scale: f32,
        add: i32,
        unused: i32,
    }
    struct LoraDown {
        x: Address,
        partial: Address,
        tokens: i64,
        width: i32,
        part: i32,
        tiles: i32,
        slices: i32,
        vector: i32,
        unused: i32,
        drop: Dropout,
        slice: [Slice; MAX_SLICES],
    }
    struct LoraUp {
        tokens: i64,
        group: i64,
        slices: i32,
        unused: i32,
        slice: [Slice; MAX_SLICES],
    }
    struct LoraX {
        x: Address,
        dx: Address,
        tokens: i64,
        group: i64,
        width: i32,
        tiles: i32,
        slices: i32,
        transposed: i32,
        vector: i32,
        vector_dx: i32,
        drop: Dropout,
        slice: [Slice; MAX_SLICES],
    }
    struct LoraSumJob {
        out: Address,
        partial: Address,
        part: i64,
        elems: i64,
        cols: i32,
        out_ld: i32,
        in_ld: i32,
        parts: i32,
        scale: f32,
        add: i32,
    }
    struct LoraSum {
        job: [LoraSumJob; MAX_SUMS],
    }
}

const THREADS: u32 = 256;
const MAX_SLICES: usize = 4;
const MAX_SUMS: usize = 16;
/// Ranks of a tile, and tiles that kernels take.
const RANKS: usize = 16;
const SMALL_TILES: usize = 4;
const LARGE_TILES: usize = 12;
/// Tokens of a block of `lora_down`.
const DOWN_TOKENS: usize = 64;
/// Steps of the inner dimension that a part has at least.
const PART_STEPS: usize = 4;
/// Tokens of a step and columns of a block of `lora_up`.
const UP_TOKENS: usize = 64;
const UP_COLS: usize = 128;
const UP_RANKS: usize = 32;
/// Columns of a block of `lora_x`.
const X_COLS: usize = 32;
const F32: usize = size_of::<f32>();

/// Wide tiles in shared memory, with and without a copy engine.
fn stages(arch: &Arch) -> usize {
    if arch.lanes == 32 { 4 } else { 2 }
}

/// Warps of a block, halved: they share a block's work two by so many.
fn half_warps(arch: &Arch) -> usize {
    (THREADS / arch.lanes) as usize / 2
}

/// Some ranks of an adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    adapter: usize,
    from: usize,
    ranks: usize,
    /// Rank tile of its launch that it begins with.
    first: usize,
}

/// The launches that adapters of these ranks take.
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

fn tiles(pieces: &[Piece]) -> usize {
    pieces.last().map_or(0, |p| p.first + p.ranks.div_ceil(RANKS))
}

/// Elements of the inner dimension that `lora_down` takes a step.
fn down_step(arch: &Arch, bytes: usize, large: bool) -> usize {
    (if arch.lanes == 32 && !large { 128 } else { 64 }) / bytes
}

/// Parts of the inner dimension `width`, and elements of each: every compute unit gets a block.
fn down_parts(arch: &Arch, step: usize, tokens: usize, width: usize) -> (usize, usize) {
    let wanted = (arch.units as usize).div_ceil(tokens.div_ceil(DOWN_TOKENS).max(1));
    let parts = wanted.min(width / (PART_STEPS * step)).max(1);
    let part = width.div_ceil(parts).next_multiple_of(step).max(step);
    (width.div_ceil(part).max(1), part)
}

/// Tokens of a step of `lora_x`.
fn x_tokens(arch: &Arch) -> usize {
    16 * half_warps(arch)
}

/// Groups of tokens of `lora_x` over `width` columns, and tokens of each.
fn x_groups(arch: &Arch, tokens: usize, width: usize) -> (usize, usize) {
    let step = x_tokens(arch);
    let wanted = (arch.units as usize).div_ceil(width.div_ceil(X_COLS).max(1));
    let group = tokens.div_ceil(wanted).next_multiple_of(step).max(step);
    (tokens.div_ceil(group), group)
}

/// At least as many elements as `groups width` of any width up to `width`.
fn x_partial_cols(arch: &Arch, tokens: usize, width: usize) -> usize {
    let most = tokens.div_ceil(x_tokens(arch)).max(1);
    (most * width).min(arch.units as usize * X_COLS + width)
}

/// Bytes of dt, and of partial sums, for adapters up to these ranks and outputs.
fn scratch(arch: &Arch, tokens: usize, inputs: usize, outputs: usize, rank: usize, adapters: usize) -> [usize; 2] {
    let padded = rank.next_multiple_of(RANKS);
    let ranks = (adapters * padded).min(LARGE_TILES * RANKS);
    // Narrower steps allow more parts.
    let parts = |width| [2, 4].map(|b| down_parts(arch, down_step(arch, b, true), tokens, width).0).into_iter().max().unwrap_or(1);
    let down = parts(inputs).max(parts(outputs)) * tokens * ranks;
    let x = x_partial_cols(arch, tokens, inputs) * ranks;
    let db = x_partial_cols(arch, tokens, outputs) * padded.min(LARGE_TILES * RANKS);
    [adapters * tokens * rank * F32, down.max(x).max(db) * F32]
}

/// Bytes of the workspace of [`forward`] and [`backward`].
pub(super) fn workspace_bytes(arch: &Arch, tokens: usize, inputs: usize, outputs: usize, rank: usize, adapters: usize) -> usize {
    workspace_of(&scratch(arch, tokens, inputs, outputs, rank, adapters))
}

fn dropout(d: Option<crate::Dropout>) -> Dropout {
    let Some(d) = d.filter(|d| d.p > 0.0) else { return Dropout::zeroed() };
    let words = philox4x32([d.step, 0, 0, 0x6472_6f70], [d.seed as u32, (d.seed >> 32) as u32]);
    let least = (f64::from(d.p) * 16_777_216.0).ceil() as u32;
    Dropout { key: [words[0], words[1]], micro_batch: d.micro_batch, least, keep: 1.0 / (1.0 - d.p), unused: 0 }
}

/// What an adapter is to a launch.
#[derive(Clone, Copy)]
struct Adapter {
    /// t or dt, `[N, R]`.
    skinny: Address,
    /// A `[R, W]`, or B `[W, R]` if `of_b`.
    matrix: Address,
    of_b: bool,
    /// Gradient of that matrix.
    grad: Address,
    write: Write,
    rank: usize,
    width: usize,
    site: u32,
    scale: f32,
}

impl Adapter {
    /// Its ranks of `piece`, as a kernel gets them.
    fn slice(&self, piece: &Piece) -> Slice {
        let row = if self.of_b { self.rank } else { self.width };
        let skip = |base: Address, stride: usize| if base.0 == 0 { base } else { base.offset(piece.from * stride * F32) };
        let along = if self.of_b { 1 } else { self.width };
        Slice {
            skinny: skip(self.skinny, 1),
            adapter: skip(self.matrix, along),
            grad: skip(self.grad, along),
            rank: piece.ranks as i32,
            ld: self.rank as i32,
            first: piece.first as i32,
            width: self.width as i32,
            vector: whole_16(&[self.matrix.0, (row * F32) as u64]).into(),
            vector_t: whole_16(&[self.skinny.0, (self.rank * F32) as u64]).into(),
            grad_ld: self.rank as i32,
            site: self.site,
            scale: self.scale,
            add: (self.write == Write::Add).into(),
            ..Slice::zeroed()
        }
    }
}

/// The first slots filled with these.
fn filled<T: Zeroable + Copy, const N: usize>(items: impl IntoIterator<Item = T>) -> [T; N] {
    let mut all = [T::zeroed(); N];
    all.iter_mut().zip(items).for_each(|(slot, item)| *slot = item);
    all
}

/// Builds the launches of one call.
struct Builder<'a, 'b, L: Launcher> {
    call: &'b mut Call<'a, L>,
    arch: &'a Arch,
    dtype: DType,
    tokens: usize,
    drop: Dropout,
    /// Partial sums.
    partial: Address,
}

impl<L: Launcher> Builder<'_, '_, L> {
    /// `skinny = scale * drop(x) A^T` (or `x B`) of all adapters; they share `x [N, width]`.
    fn down(&mut self, x: Address, width: usize, adapters: &[Adapter]) -> Result<()> {
        let of_b = adapters.first().is_some_and(|a| a.of_b);
        for pieces in launches(&adapters.iter().map(|a| a.rank).collect::<Vec<_>>()) {
            let tiles = tiles(&pieces);
            let large = of_b || tiles > SMALL_TILES;
            let bytes = self.dtype.bytes();
            let step = down_step(self.arch, bytes, large);
            let (parts, part) = down_parts(self.arch, step, self.tokens, width);
            let partial = if parts > 1 { self.partial } else { Address(0) };
            let keep = if self.drop.least > 0 { self.drop.keep } else { 1.0 };
            let slices: Vec<Slice> =
                pieces.iter().map(|p| adapters[p.adapter].slice(p)).map(|s| Slice { scale: s.scale * keep, ..s }).collect();
            let params = LoraDown {
                x,
                partial,
                tokens: self.tokens as i64,
                width: width as i32,
                part: part as i32,
                tiles: tiles as i32,
                slices: slices.len() as i32,
                vector: whole_16(&[x.0, (width * bytes) as u64]).into(),
                unused: 0,
                drop: self.drop,
                slice: filled(slices.iter().copied()),
            };
            let kernel = match (of_b, large) {
                (true, _) => by_type(self.dtype, "lora_down_b_f32", "lora_down_b_bf16"),
                (false, true) => by_type(self.dtype, "lora_down_large_f32", "lora_down_large_bf16"),
                (false, false) => by_type(self.dtype, "lora_down_f32", "lora_down_bf16"),
            };
            let most = RANKS * if large { LARGE_TILES } else { SMALL_TILES };
            let (wide, along_k) = (DOWN_TOKENS * step * bytes, if large { 1 } else { half_warps(self.arch) });
            let shared = ((stages(self.arch) + 1) * wide + 2 * most * step * F32).max(along_k * DOWN_TOKENS * most * F32);
            self.call.launch(kernel, [self.tokens.div_ceil(DOWN_TOKENS), parts, 1], THREADS, shared, &params)?;
            if parts > 1 {
                let ranks = tiles * RANKS;
                let job = |s: &Slice| LoraSumJob {
                    out: s.skinny,
                    partial: partial.offset(s.first as usize * RANKS * F32),
                    part: (self.tokens * ranks) as i64,
                    elems: self.tokens as i64 * i64::from(s.rank),
                    cols: s.rank,
                    out_ld: s.ld,
                    in_ld: ranks as i32,
                    parts: parts as i32,
                    scale: s.scale,
                    add: 0,
                };
                let jobs: Vec<_> = slices.iter().map(job).collect();
                self.sums(&jobs)?;
            }
        }
        Ok(())
    }

    /// Adds partial sums in order.
    fn sums(&mut self, jobs: &[LoraSumJob]) -> Result<()> {
        for jobs in jobs.chunks(MAX_SUMS) {
            let blocks = jobs.iter().map(|j| (j.elems as usize).div_ceil(THREADS as usize)).max().unwrap_or(0);
            let params = LoraSum { job: filled(jobs.iter().copied()) };
            self.call.launch("lora_sum_f32", [blocks.min(8 * self.arch.units as usize), jobs.len(), 1], THREADS, 0, &params)?;
        }
        Ok(())
    }

    /// `grad = scale * skinny^T drop(x)` of all adapters (of B: transposed), `dx += drop'(skinny A)`.
    fn x(&mut self, dx: Address, x: Address, width: usize, adapters: &[Adapter]) -> Result<()> {
        let (groups, group) = x_groups(self.arch, self.tokens, width);
        let transposed = adapters.first().is_some_and(|a| a.of_b);
        for pieces in launches(&adapters.iter().map(|a| a.rank).collect::<Vec<_>>()) {
            let tiles = tiles(&pieces);
            let keep = if self.drop.least > 0 { self.drop.keep } else { 1.0 };
            let slice = |p: &Piece| adapters[p.adapter].slice(p);
            let mut slices: Vec<Slice> = pieces.iter().map(slice).map(|s| Slice { scale: s.scale * keep, ..s }).collect();
            let mut jobs = Vec::new();
            if groups != 1 {
                // Each slice has its own partial sums, dense.
                let mut next = self.partial;
                for s in &mut slices {
                    let elems = width * s.rank as usize;
                    let (cols, out_ld) = if transposed { (s.rank, s.grad_ld) } else { (width as i32, width as i32) };
                    jobs.push(LoraSumJob {
                        out: s.grad,
                        partial: next,
                        part: elems as i64,
                        elems: elems as i64,
                        cols,
                        out_ld,
                        in_ld: cols,
                        parts: groups as i32,
                        scale: s.scale,
                        add: s.add,
                    });
                    *s = Slice { grad: next, grad_part: elems as i64, grad_ld: s.rank, scale: 1.0, add: 0, ..*s };
                    next = next.offset(groups * elems * F32);
                }
            }
            let large = tiles > SMALL_TILES;
            let bytes = self.dtype.bytes();
            let params = LoraX {
                x,
                dx,
                tokens: self.tokens as i64,
                group: group as i64,
                width: width as i32,
                tiles: tiles as i32,
                slices: slices.len() as i32,
                transposed: transposed.into(),
                vector: whole_16(&[x.0, (width * bytes) as u64]).into(),
                vector_dx: whole_16(&[dx.0, (width * bytes) as u64]).into(),
                drop: self.drop,
                slice: filled(slices),
            };
            let kernel = if large {
                by_type(self.dtype, "lora_x_large_f32", "lora_x_large_bf16")
            } else {
                by_type(self.dtype, "lora_x_f32", "lora_x_bf16")
            };
            let (most, step) = (RANKS * if large { LARGE_TILES } else { SMALL_TILES }, x_tokens(self.arch));
            let wide = step * X_COLS * bytes;
            let strips = (2 * half_warps(self.arch) * 1024).max(wide);
            let shared = stages(self.arch) * wide + (step + X_COLS) * most * F32 + strips + step * X_COLS / (16 / bytes) * size_of::<u16>();
            self.call.launch(kernel, [width.div_ceil(X_COLS), groups, 1], THREADS, shared, &params)?;
            self.sums(&jobs)?;
        }
        Ok(())
    }

    /// `y += scale * t B^T`.
    fn up(&mut self, adapters: &[(Adapter, Address, DType)]) -> Result<()> {
        for some in adapters.chunks(MAX_SLICES) {
            let mut blocks = 0;
            let mut slices = Vec::new();
            for (a, y, dtype) in some {
                let whole = Piece { adapter: 0, from: 0, ranks: a.rank, first: blocks };
                let (y, y_f32) = if *dtype == DType::F32 { (Address(0), *y) } else { (*y, Address(0)) };
                let vector_wide = whole_16(&[y.0 | y_f32.0, (a.width * dtype.bytes()) as u64]).into();
                slices.push(Slice { y, y_f32, vector_wide, ..a.slice(&whole) });
                blocks += a.width.div_ceil(UP_COLS);
            }
            let (groups, group) = up_groups(self.arch, self.tokens, blocks);
            let count = slices.len() as i32;
            let params = LoraUp { tokens: self.tokens as i64, group: group as i64, slices: count, unused: 0, slice: filled(slices) };
            let shared = (UP_TOKENS + UP_COLS) * UP_RANKS * F32 + 2 * UP_COLS * 16 * F32;
            self.call.launch(by_type(self.dtype, "lora_up_f32", "lora_up_bf16"), [blocks, groups, 1], THREADS, shared, &params)?;
        }
        Ok(())
    }
}

/// Groups of tokens of `lora_up` with this many blocks of columns, and tokens of each: two blocks for each compute unit.
fn up_groups(arch: &Arch, tokens: usize, blocks: usize) -> (usize, usize) {
    let wanted = (2 * arch.units as usize).div_ceil(blocks.max(1));
    let group = tokens.div_ceil(wanted).next_multiple_of(UP_TOKENS).max(UP_TOKENS);
    // A grid has 65,535 rows.
    let group = group.max(tokens.div_ceil(65_535).next_multiple_of(UP_TOKENS));
    (tokens.div_ceil(group), group)
}

/// Sizes must fit the 32 bits in which kernels count.
fn countable(op: &'static str, numbers: &[usize]) -> Result<()> {
    match numbers.iter().find(|n| **n > i32::MAX as usize - 4096) {
        Some(n) => Err(Error::Shape { op, what: format!("{n} tokens or columns are more than 32 bits can count") }),
        None => Ok(()),
    }
}

#[allow(clippy::too_many_arguments)]
pub(super) fn forward<L: Launcher>(
    launcher: &L,
    adapters: &[LoraForward],
    x: &View,
    drop: Option<crate::Dropout>,
    tokens: usize,
    inputs: usize,
    workspace: &ViewMut,
    s: &dyn Stream,
) -> Result<()> {
    const OP: &str = "lora";
    let arch = launcher.arch();
    let (outputs, rank) = (adapters.iter().map(|a| a.outputs).max().unwrap_or(0), adapters.iter().map(|a| a.rank).max().unwrap_or(0));
    let bytes = super::workspace_bytes(arch, OpShape::Lora { tokens, inputs, outputs, rank, adapters: adapters.len() });
    checks::lora(adapters, x, drop, tokens, inputs, workspace, bytes)?;
    countable(OP, &[tokens, inputs, outputs])?;
    if tokens == 0 || adapters.is_empty() {
        return Ok(());
    }
    let mut call = Call::new(launcher, OP);
    call.workspace(workspace)?;
    let partial = call.part(scratch(arch, tokens, inputs, outputs, rank, adapters.len())[1])?;
    let px = call.read(x)?;
    let (mut down, mut up) = (Vec::new(), Vec::new());
    for a in adapters {
        let common = Adapter {
            skinny: call.write(&a.t)?,
            matrix: call.read(&a.a)?,
            of_b: false,
            grad: Address(0),
            write: Write::Set,
            rank: a.rank,
            width: inputs,
            site: a.site,
            scale: 1.0,
        };
        down.push(common);
        let b = Adapter { matrix: call.read(&a.b)?, of_b: true, width: a.outputs, scale: a.scale, ..common };
        up.push((b, call.write(&a.y)?, a.y.dtype()));
    }
    let mut builder = Builder { call: &mut call, arch, dtype: x.dtype(), tokens, drop: dropout(drop), partial };
    builder.down(px, inputs, &down)?;
    builder.up(&up)?;
    call.run(s)
}

#[allow(clippy::too_many_arguments)]
pub(super) fn backward<L: Launcher>(
    launcher: &L,
    dx: Option<&ViewMut>,
    adapters: &[LoraBackward],
    x: &View,
    drop: Option<crate::Dropout>,
    tokens: usize,
    inputs: usize,
    workspace: &ViewMut,
    s: &dyn Stream,
) -> Result<()> {
    const OP: &str = "lora_backward";
    let arch = launcher.arch();
    let (outputs, rank) = (adapters.iter().map(|a| a.outputs).max().unwrap_or(0), adapters.iter().map(|a| a.rank).max().unwrap_or(0));
    let bytes = super::workspace_bytes(arch, OpShape::Lora { tokens, inputs, outputs, rank, adapters: adapters.len() });
    checks::lora_backward(dx, adapters, x, drop, tokens, inputs, workspace, bytes)?;
    countable(OP, &[tokens, inputs, outputs])?;
    if adapters.is_empty() {
        return Ok(());
    }
    let mut call = Call::new(launcher, OP);
    call.workspace(workspace)?;
    let [dt_bytes, partial_bytes] = scratch(arch, tokens, inputs, outputs, rank, adapters.len());
    let (mut dt, partial) = (call.part(dt_bytes)?, call.part(partial_bytes)?);
    let (px, pdx) = (call.read(x)?, call.write_some(dx)?);
    let (mut of_b, mut of_a) = (Vec::new(), Vec::new());
    for a in adapters {
        let common = Adapter {
            skinny: dt,
            matrix: call.read(&a.a)?,
            of_b: false,
            grad: call.write(&a.da)?,
            write: a.write,
            rank: a.rank,
            width: inputs,
            site: a.site,
            scale: 1.0,
        };
        of_a.push(common);
        let b = Adapter { matrix: call.read(&a.b)?, of_b: true, grad: call.write(&a.db)?, width: a.outputs, scale: a.scale, ..common };
        of_b.push((b, call.read(&a.dy)?, call.read(&a.t)?));
        dt = dt.offset(tokens * a.rank * F32);
    }
    let mut builder = Builder { call: &mut call, arch, dtype: x.dtype(), tokens, drop: Dropout::zeroed(), partial };
    for (b, dy, t) in of_b {
        builder.down(dy, b.width, &[b])?;
        builder.x(Address(0), dy, b.width, &[Adapter { skinny: t, ..b }])?;
    }
    builder.drop = dropout(drop);
    builder.x(pdx, px, inputs, &of_a)?;
    call.run(s)
}
