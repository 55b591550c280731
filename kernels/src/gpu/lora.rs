//! LoRA: which launches a call takes, and which sums through the workspace. `kernels/gpu/lora.cu` and `lora_backward.cu` tell what each
//! kernel touches.
//!
//! * `tiles` how a call is cut into launches and blocks, and how much workspace that takes; `traffic` the bytes that they move.
//!
//! Launches follow each other on the stream: their partial sums share one piece of the workspace.

mod tiles;
pub mod traffic;

use super::launch::{Address, Arch, Call, Kernel, Launcher, by_type, whole_16, workspace_of};
use super::params::params;
use crate::philox::philox4x32;
use crate::{DType, Error, LoraBackward, LoraForward, OpShape, Result, Stream, View, ViewMut, Write, checks};
use bytemuck::Zeroable;
use tiles::{F32, LARGE_TILES, MAX_SLICES, Piece, RANKS, SMALL_TILES, THREADS, UP_COLS, UP_RANKS, UP_TOKENS, X_COLS};
use tiles::{half_warps, stages, x_tokens};

pub(super) const KERNELS: &[Kernel] = &[
    Kernel::new::<LoraDown>("lora_down_f32", "lora.cu"),
    Kernel::new::<LoraDown>("lora_down_bf16", "lora.cu"),
    Kernel::new::<LoraDown>("lora_down_large_f32", "lora.cu"),
    Kernel::new::<LoraDown>("lora_down_large_bf16", "lora.cu"),
    Kernel::new::<LoraUp>("lora_up_f32", "lora.cu"),
    Kernel::new::<LoraUp>("lora_up_bf16", "lora.cu"),
    Kernel::new::<LoraSum>("lora_sum_f32", "lora.cu"),
    Kernel::new::<LoraDy>("lora_dy_f32", "lora_backward.cu"),
    Kernel::new::<LoraDy>("lora_dy_bf16", "lora_backward.cu"),
    Kernel::new::<LoraDy>("lora_dy_large_f32", "lora_backward.cu"),
    Kernel::new::<LoraDy>("lora_dy_large_bf16", "lora_backward.cu"),
    Kernel::new::<LoraX>("lora_x_f32", "lora_backward.cu"),
    Kernel::new::<LoraX>("lora_x_bf16", "lora_backward.cu"),
    Kernel::new::<LoraX>("lora_x_large_f32", "lora_backward.cu"),
    Kernel::new::<LoraX>("lora_x_large_bf16", "lora_backward.cu"),
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
        site: u32,
        scale: f32,
        add: i32,
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
        vector: i32,
        vector_dx: i32,
        unused: i32,
        drop: Dropout,
        slice: [Slice; MAX_SLICES],
    }
    struct DySlice {
        dy: Address,
        t: Address,
        b: Address,
        dt: Address,
        db: Address,
        dt_part: i64,
        db_part: i64,
        width: i32,
        rank: i32,
        ld: i32,
        dt_ld: i32,
        db_ld: i32,
        first: i32,
        vector: i32,
        vector_t: i32,
        vector_b: i32,
        add: i32,
        dt_scale: f32,
        db_scale: f32,
    }
    struct LoraDy {
        tokens: i32,
        group: i32,
        chunk: i32,
        slices: i32,
        slice: [DySlice; MAX_SLICES],
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

const MAX_SUMS: usize = 16;

/// Bytes of dt, and of partial sums.
fn scratch(arch: &Arch, tokens: usize, inputs: usize, outputs: usize, rank: usize, adapters: usize) -> [usize; 2] {
    tiles::scratch(arch, tokens, inputs, outputs, rank, adapters).map(|elems| elems * F32)
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

/// `address`, some elements of f32 further on, if it is wanted.
fn skip(address: Address, elems: usize) -> Address {
    if address.0 == 0 { address } else { address.offset(elems * F32) }
}

/// Whether rows of `elems` f32 from there on begin at multiples of 16 bytes.
fn vector(address: Address, elems: usize) -> i32 {
    whole_16(&[address.0, (elems * F32) as u64]).into()
}

impl Adapter {
    /// Its ranks of `piece`, as a kernel gets them.
    fn slice(&self, piece: &Piece) -> Slice {
        let (row, along) = if self.of_b { (self.rank, 1) } else { (self.width, self.width) };
        Slice {
            skinny: skip(self.skinny, piece.from),
            adapter: skip(self.matrix, piece.from * along),
            grad: skip(self.grad, piece.from * along),
            rank: piece.ranks as i32,
            ld: self.rank as i32,
            first: piece.first as i32,
            width: self.width as i32,
            vector: vector(self.matrix, row),
            vector_t: vector(self.skinny, self.rank),
            site: self.site,
            scale: self.scale,
            add: (self.write == Write::Add).into(),
            ..Slice::zeroed()
        }
    }
}

/// An adapter and what comes from above, to `lora_dy`.
struct Above {
    /// B, its gradient, and dt.
    b: Adapter,
    t: Address,
    dy: Address,
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
    /// `skinny = scale * drop(x) A^T` of all adapters; they share `x [N, width]`.
    fn down(&mut self, x: Address, width: usize, adapters: &[Adapter]) -> Result<()> {
        let bytes = self.dtype.bytes();
        for cut in tiles::down(self.arch, bytes, self.tokens, width, &ranks(adapters)) {
            let partial = if cut.parts > 1 { self.partial } else { Address(0) };
            let slices = self.slices(adapters, &cut.pieces);
            let params = LoraDown {
                x,
                partial,
                tokens: self.tokens as i64,
                width: width as i32,
                part: cut.part as i32,
                tiles: cut.tiles as i32,
                slices: slices.len() as i32,
                vector: whole_16(&[x.0, (width * bytes) as u64]).into(),
                unused: 0,
                drop: self.drop,
                slice: filled(slices.iter().copied()),
            };
            let most = RANKS * if cut.large { LARGE_TILES } else { SMALL_TILES };
            let (wide, along_k) = (cut.tokens * cut.step * bytes, if cut.large { 1 } else { half_warps(self.arch) });
            let shared = ((stages(self.arch) + 1) * wide + 2 * most * cut.step * F32).max(along_k * cut.tokens * most * F32);
            self.call.launch(cut.kernel(self.dtype), [self.tokens.div_ceil(cut.tokens), cut.parts, 1], THREADS, shared, &params)?;
            if cut.parts > 1 {
                let all_ranks = cut.tiles * RANKS;
                let job = |s: &Slice| LoraSumJob {
                    out: s.skinny,
                    partial: partial.offset(s.first as usize * RANKS * F32),
                    part: (self.tokens * all_ranks) as i64,
                    elems: self.tokens as i64 * i64::from(s.rank),
                    cols: s.rank,
                    out_ld: s.ld,
                    in_ld: all_ranks as i32,
                    parts: cut.parts as i32,
                    scale: s.scale,
                    add: 0,
                };
                let jobs: Vec<_> = slices.iter().map(job).collect();
                self.sums(&jobs)?;
            }
        }
        Ok(())
    }

    /// Slices of a launch over x, with what dropout multiplies the rest by.
    fn slices(&self, adapters: &[Adapter], pieces: &[Piece]) -> Vec<Slice> {
        let keep = if self.drop.least > 0 { self.drop.keep } else { 1.0 };
        pieces.iter().map(|p| adapters[p.adapter].slice(p)).map(|s| Slice { scale: s.scale * keep, ..s }).collect()
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

    /// `grad = scale * skinny^T drop(x)` of all adapters, `dx += drop'(skinny A)`.
    fn x(&mut self, dx: Address, x: Address, width: usize, adapters: &[Adapter]) -> Result<()> {
        let bytes = self.dtype.bytes();
        for cut in tiles::x(self.arch, self.tokens, width, &ranks(adapters)) {
            let mut slices = self.slices(adapters, &cut.pieces);
            let mut jobs = Vec::new();
            if cut.groups != 1 {
                // Each slice has its own partial sums, dense.
                let mut next = self.partial;
                for s in &mut slices {
                    let elems = width * s.rank as usize;
                    jobs.push(LoraSumJob { add: s.add, ..dense(s.grad, next, elems, width, width, cut.groups, s.scale) });
                    *s = Slice { grad: next, grad_part: elems as i64, scale: 1.0, add: 0, ..*s };
                    next = next.offset(cut.groups * elems * F32);
                }
            }
            let params = LoraX {
                x,
                dx,
                tokens: self.tokens as i64,
                group: cut.group as i64,
                width: width as i32,
                tiles: cut.tiles as i32,
                slices: slices.len() as i32,
                vector: whole_16(&[x.0, (width * bytes) as u64]).into(),
                vector_dx: whole_16(&[dx.0, (width * bytes) as u64]).into(),
                unused: 0,
                drop: self.drop,
                slice: filled(slices),
            };
            let (most, step) = (RANKS * if cut.large { LARGE_TILES } else { SMALL_TILES }, x_tokens(self.arch));
            let wide = step * X_COLS * bytes;
            let strips = (2 * half_warps(self.arch) * 1024).max(wide);
            let shared = stages(self.arch) * wide + (step + X_COLS) * most * F32 + strips + step * X_COLS / (16 / bytes) * size_of::<u16>();
            self.call.launch(cut.kernel(self.dtype), [width.div_ceil(X_COLS), cut.groups, 1], THREADS, shared, &params)?;
            self.sums(&jobs)?;
        }
        Ok(())
    }

    /// `dt = scale * dy B`, `db = scale * dy^T t` of all adapters.
    fn dy(&mut self, adapters: &[Above]) -> Result<()> {
        let bytes = self.dtype.bytes();
        let sizes: Vec<_> = adapters.iter().map(|a| (a.b.width, a.b.rank)).collect();
        for cut in tiles::dy(self.arch, self.tokens, &sizes) {
            let (mut slices, mut jobs, mut next) = (Vec::new(), Vec::new(), self.partial);
            for piece in &cut.pieces {
                let Above { b, t, dy } = &adapters[piece.adapter];
                let chunks = b.width.div_ceil(cut.chunk);
                let of = b.slice(piece);
                let mut s = DySlice {
                    dy: *dy,
                    t: skip(*t, piece.from),
                    b: of.adapter,
                    dt: of.skinny,
                    db: of.grad,
                    dt_part: 0,
                    db_part: 0,
                    width: of.width,
                    rank: of.rank,
                    ld: of.ld,
                    dt_ld: of.ld,
                    db_ld: of.ld,
                    first: of.first,
                    vector: whole_16(&[dy.0, (b.width * bytes) as u64]).into(),
                    vector_t: vector(*t, b.rank),
                    vector_b: of.vector,
                    add: of.add,
                    dt_scale: of.scale,
                    db_scale: of.scale,
                };
                if chunks != 1 {
                    let elems = self.tokens * piece.ranks;
                    jobs.push(dense(s.dt, next, elems, piece.ranks, b.rank, chunks, of.scale));
                    s = DySlice { dt: next, dt_part: elems as i64, dt_ld: of.rank, dt_scale: 1.0, ..s };
                    next = next.offset(chunks * elems * F32);
                }
                if cut.groups != 1 {
                    let elems = b.width * piece.ranks;
                    jobs.push(LoraSumJob { add: of.add, ..dense(s.db, next, elems, piece.ranks, b.rank, cut.groups, of.scale) });
                    s = DySlice { db: next, db_part: elems as i64, db_ld: of.rank, db_scale: 1.0, add: 0, ..s };
                    next = next.offset(cut.groups * elems * F32);
                }
                slices.push(s);
            }
            let (tokens, count) = (self.tokens as i32, slices.len() as i32);
            let params = LoraDy { tokens, group: cut.group as i32, chunk: cut.chunk as i32, slices: count, slice: filled(slices) };
            self.call.launch(
                cut.kernel(self.dtype),
                [cut.blocks, cut.groups, 1],
                THREADS,
                tiles::dy_shared(self.arch, bytes, cut.large),
                &params,
            )?;
            self.sums(&jobs)?;
        }
        Ok(())
    }

    /// `y += scale * t B^T`.
    fn up(&mut self, adapters: &[(Adapter, Address, DType)]) -> Result<()> {
        for cut in tiles::up(self.arch, self.tokens, &adapters.iter().map(|a| a.0.width).collect::<Vec<_>>()) {
            let mut first = 0;
            let mut slices = Vec::new();
            for (a, y, dtype) in &adapters[cut.adapters] {
                let whole = Piece { adapter: 0, from: 0, ranks: a.rank, first };
                let (y, y_f32) = if *dtype == DType::F32 { (Address(0), *y) } else { (*y, Address(0)) };
                let vector_wide = whole_16(&[y.0 | y_f32.0, (a.width * dtype.bytes()) as u64]).into();
                slices.push(Slice { y, y_f32, vector_wide, ..a.slice(&whole) });
                first += a.width.div_ceil(UP_COLS);
            }
            let count = slices.len() as i32;
            let params = LoraUp { tokens: self.tokens as i64, group: cut.group as i64, slices: count, unused: 0, slice: filled(slices) };
            let shared = (UP_TOKENS + UP_COLS) * UP_RANKS * F32 + 2 * UP_COLS * 16 * F32;
            let kernel = by_type(self.dtype, "lora_up_f32", "lora_up_bf16");
            self.call.launch(kernel, [cut.blocks, cut.groups, 1], THREADS, shared, &params)?;
        }
        Ok(())
    }
}

fn ranks(adapters: &[Adapter]) -> Vec<usize> {
    adapters.iter().map(|a| a.rank).collect()
}

/// The sum of `parts` dense matrices of `elems` elements, `cols` of them a row, into rows of `out_ld`.
fn dense(out: Address, partial: Address, elems: usize, cols: usize, out_ld: usize, parts: usize, scale: f32) -> LoraSumJob {
    LoraSumJob {
        out,
        partial,
        part: elems as i64,
        elems: elems as i64,
        cols: cols as i32,
        out_ld: out_ld as i32,
        in_ld: cols as i32,
        parts: parts as i32,
        scale,
        add: 0,
    }
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
        of_b.push(Above { b, dy: call.read(&a.dy)?, t: call.read(&a.t)? });
        dt = dt.offset(tokens * a.rank * F32);
    }
    let mut builder = Builder { call: &mut call, arch, dtype: x.dtype(), tokens, drop: dropout(drop), partial };
    builder.dy(&of_b)?;
    builder.x(pdx, px, inputs, &of_a)?;
    call.run(s)
}
