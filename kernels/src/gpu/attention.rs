//! Flash attention on GPUs (Dao 2023): which tiles, how many blocks, how many bytes? The grid follows from tokens and documents alone;
//! where documents begin is read on the device. [`Tiles`] mirror `ForwardShape` of `attention.cu`, `KeyShape` and `QueryShape` of
//! `attention_backward.cu`; [`traffic`] is what these tiles must move, for given documents.

use super::launch::{Address, Arch, Call, Fault, Kernel, Launcher, by_type, whole_16, workspace_of};
use super::params::params;
use super::traffic::Traffic;
use crate::*;

params! {
    struct Boundaries { fault: Address, bounds: Address, documents: i32, tokens: i32, }

    struct Geometry {
        documents: i32, tokens: i32, heads: i32, kv_heads: i32, group: i32, share: u32, dim: i32, window: i32, tiles: i32, vector: i32,
        scale: f32, scale_log2: f32,
    }

    struct AttentionForward {
        o: Address, lse: Address, q: Address, k: Address, v: Address, bounds: Address, g: Geometry,
    }

    struct AttentionDelta {
        fault: Address, bounds: Address, delta: Address, o: Address, dout: Address,
        rows: i64, documents: i32, tokens: i32, dim: i32, vector: i32,
    }

    struct AttentionBackward {
        dq: Address, dk: Address, dv: Address, dout: Address, q: Address, k: Address, v: Address, lse: Address, delta: Address,
        bounds: Address, g: Geometry,
    }
}

const FORWARD: &str = "attention.cu";
const BACKWARD: &str = "attention_backward.cu";
const BOUNDARY_THREADS: u32 = 256;
/// Rows of a block of `attention_delta`.
const DELTA_ROWS: usize = 32;

/// Head dimensions that have kernels; others are padded by zeros to the next one.
pub const HEAD_DIMS: [usize; 4] = [64, 96, 128, 256];

/// The kernels of one head dimension and type.
struct Names {
    forward: &'static str,
    /// One kernel for dk and dv, or one for each.
    keys: &'static [&'static str],
    queries: &'static str,
}

const F32: [Names; 4] = [
    Names { forward: "attention_64_f32", keys: &["attention_dkdv_64_f32"], queries: "attention_dq_64_f32" },
    Names { forward: "attention_96_f32", keys: &["attention_dkdv_96_f32"], queries: "attention_dq_96_f32" },
    Names { forward: "attention_128_f32", keys: &["attention_dkdv_128_f32"], queries: "attention_dq_128_f32" },
    Names { forward: "attention_256_f32", keys: &["attention_dv_256_f32", "attention_dk_256_f32"], queries: "attention_dq_256_f32" },
];
const BF16: [Names; 4] = [
    Names { forward: "attention_64_bf16", keys: &["attention_dkdv_64_bf16"], queries: "attention_dq_64_bf16" },
    Names { forward: "attention_96_bf16", keys: &["attention_dkdv_96_bf16"], queries: "attention_dq_96_bf16" },
    Names { forward: "attention_128_bf16", keys: &["attention_dkdv_128_bf16"], queries: "attention_dq_128_bf16" },
    Names { forward: "attention_256_bf16", keys: &["attention_dv_256_bf16", "attention_dk_256_bf16"], queries: "attention_dq_256_bf16" },
];

/// Kernels of one type: 4 forward, 5 of keys, 4 of queries.
const fn of_type(names: &[Names; 4]) -> [Kernel; 13] {
    let mut all = [Kernel::new::<AttentionForward>("", FORWARD); 13];
    let (mut i, mut at) = (0, 0);
    while i < 4 {
        all[at] = Kernel::new::<AttentionForward>(names[i].forward, FORWARD);
        all[at + 1] = Kernel::new::<AttentionBackward>(names[i].queries, BACKWARD);
        at += 2;
        let mut k = 0;
        while k < names[i].keys.len() {
            all[at] = Kernel::new::<AttentionBackward>(names[i].keys[k], BACKWARD);
            (k, at) = (k + 1, at + 1);
        }
        i += 1;
    }
    all
}

pub(super) const KERNELS: &[Kernel] = &{
    let mut all = [Kernel::new::<Boundaries>("attention_boundaries", FORWARD); 29];
    all[1] = Kernel::new::<AttentionDelta>("attention_delta_f32", BACKWARD);
    all[2] = Kernel::new::<AttentionDelta>("attention_delta_bf16", BACKWARD);
    let (f32, bf16) = (of_type(&F32), of_type(&BF16));
    let mut i = 0;
    while i < 13 {
        all[3 + i] = f32[i];
        all[16 + i] = bf16[i];
        i += 1;
    }
    all
};

fn names(dtype: DType, width: usize) -> &'static Names {
    if dtype == DType::BF16 { &BF16[width] } else { &F32[width] }
}

/// How a pass is cut into blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiles {
    /// Rows of a block: queries (token, head of the group) in forward and for dq, keys for dk and dv.
    pub rows: usize,
    /// Rows of the other kind that it takes at a time.
    pub step: usize,
    /// Threads of a block.
    pub threads: u32,
    /// Shared memory of a block.
    pub shared_bytes: usize,
}

/// `ForwardShape` of `attention.cu`.
pub fn forward_tiles(arch: &Arch, dtype: DType, width: usize) -> Tiles {
    let (wide, f32) = (arch.lanes == 64, dtype == DType::F32);
    let warps = match (width > 128, wide) {
        (true, false) => 8,
        (true, true) if f32 => 2,
        _ => 4,
    };
    let rows = 16 * warps * if f32 || width > 128 { 1 } else { 2 };
    let step = match (f32, width) {
        (true, 129..) => 16,
        (true, _) => 32,
        (false, 65..) if !wide => 32,
        _ => 64,
    };
    let held = wide;
    let keys_bytes = if f32 && width > 128 { 1 } else { 2 } * step * width * dtype.bytes();
    let rows_bytes = rows * width * dtype.bytes();
    let tile_bytes = if held { keys_bytes.max(rows_bytes) } else { keys_bytes + rows_bytes };
    Tiles { rows, step, threads: warps as u32 * arch.lanes, shared_bytes: tile_bytes + if f32 { warps * 1024 } else { 0 } }
}

/// `KeyShape` of `attention_backward.cu`: blocks of keys for dk and dv.
pub fn key_tiles(arch: &Arch, dtype: DType, width: usize) -> Tiles {
    let (wide, f32) = (arch.lanes == 64, dtype == DType::F32);
    let warps = match (f32, wide) {
        (true, _) if width > 128 => 1,
        (false, false) => 4,
        _ => 2,
    };
    let (rows, step, stages) = (16 * warps, if f32 { 16 } else { 32 }, if wide { 1 } else { 2 });
    let keys_bytes = if wide { 0 } else { 2 * rows * width * dtype.bytes() };
    let rows_bytes = 2 * if wide { rows.max(stages * step) } else { stages * step } * width * dtype.bytes();
    let shared_bytes = keys_bytes + rows_bytes + 8 * stages * step + if f32 { warps * 1024 } else { 0 };
    Tiles { rows, step, threads: warps as u32 * arch.lanes, shared_bytes }
}

/// `QueryShape` of `attention_backward.cu`: blocks of rows for dq.
pub fn query_tiles(arch: &Arch, dtype: DType, width: usize) -> Tiles {
    let (wide, f32) = (arch.lanes == 64, dtype == DType::F32);
    let warps = if f32 { 2 } else { 4 } / if wide && width > 128 { 2 } else { 1 };
    let (rows, step) = (16 * warps, if f32 { 16 } else { 32 });
    let (keys_bytes, rows_bytes) = (2 * step * width * dtype.bytes(), 2 * rows * width * dtype.bytes());
    let tile_bytes = if wide { keys_bytes.max(rows_bytes) } else { keys_bytes + rows_bytes };
    Tiles { rows, step, threads: warps as u32 * arch.lanes, shared_bytes: tile_bytes + if f32 { warps * 1024 } else { 0 } }
}

/// Bytes of workspace: delta, for backward.
pub(super) fn workspace_bytes(tokens: usize, shape: Attention) -> usize {
    workspace_of(&[tokens * shape.heads * size_of::<f32>()])
}

/// What the passes of one call move.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AttentionTraffic {
    /// `attention_*`.
    pub forward: Traffic,
    /// `attention_delta_*`.
    pub delta: Traffic,
    /// `attention_dkdv_*`, or `attention_dv_*` and `attention_dk_*` together.
    pub keys: Traffic,
    /// `attention_dq_*`.
    pub queries: Traffic,
}

/// The least that the tiles of `arch` let attention move for documents of these lengths: each block reads its own rows and the
/// rows of the other side that any of its rows sees, and writes its result. Boundaries of documents, a few bytes a block, are left out.
/// `None` where the head dimension has no kernel.
pub fn traffic(arch: &Arch, dtype: DType, documents: &[usize], shape: Attention) -> Option<AttentionTraffic> {
    let width = HEAD_DIMS[HEAD_DIMS.iter().position(|w| shape.head_dim <= *w)?];
    let (g, row_bytes) = (shape.heads / shape.kv_heads, (shape.head_dim * dtype.bytes()) as u64);
    let (kv, tokens) = (shape.kv_heads as u64, documents.iter().sum::<usize>() as u64);
    let (rows, keys) = (tokens * shape.heads as u64, tokens * kv);
    let split = width > 128;
    let mut t = AttentionTraffic::default();
    let [forward, key_side, query_side] =
        [forward_tiles(arch, dtype, width), key_tiles(arch, dtype, width), query_tiles(arch, dtype, width)];
    for &n in documents {
        let window = shape.window.unwrap_or(n);
        // Keys that rows `first..end` see.
        let seen = |first: usize, end: usize| ((end - 1) / g + 1 - (first / g + 1).saturating_sub(window)) as u64;
        for first in (0..n * g).step_by(forward.rows) {
            let end = (first + forward.rows).min(n * g);
            t.forward.read_bytes += kv * row_bytes * ((end - first) as u64 + 2 * seen(first, end));
            t.forward.blocks += kv;
        }
        for first in (0..n * g).step_by(query_side.rows) {
            let end = (first + query_side.rows).min(n * g);
            t.queries.read_bytes += kv * ((2 * row_bytes + 8) * (end - first) as u64 + 2 * row_bytes * seen(first, end));
            t.queries.blocks += kv;
        }
        for first in (0..n).step_by(key_side.rows) {
            let end = (first + key_side.rows).min(n);
            let (own, others) = ((end - first) as u64, (((end - 1 + window).min(n) - first) * g) as u64);
            // Values alone need neither v nor delta, but the kernel reads the statistics together.
            let passes: &[u64] = if split { &[1, 2] } else { &[2] };
            for sides in passes {
                t.keys.read_bytes += kv * (row_bytes * sides * own + (2 * row_bytes + 8) * others);
            }
            t.keys.blocks += kv * passes.len() as u64;
        }
    }
    t.forward.write_bytes = rows * (row_bytes + 4);
    t.forward.once_bytes = t.forward.write_bytes + row_bytes * (rows + 2 * keys);
    t.delta.read_bytes = 2 * rows * row_bytes;
    t.delta.write_bytes = 4 * rows;
    t.delta.once_bytes = t.delta.read_bytes + t.delta.write_bytes;
    t.delta.blocks = rows.div_ceil(DELTA_ROWS as u64);
    t.keys.write_bytes = 2 * keys * row_bytes;
    t.queries.write_bytes = rows * row_bytes;
    let read_once = rows * (2 * row_bytes + 8) + 2 * keys * row_bytes;
    t.keys.once_bytes = t.keys.write_bytes + read_once + if split { read_once - keys * row_bytes } else { 0 };
    t.queries.once_bytes = t.queries.write_bytes + read_once;
    Some(t)
}

/// Index of the kernels' head dimension for this one.
fn width_of(op: &'static str, head_dim: usize) -> Result<usize> {
    HEAD_DIMS.iter().position(|w| head_dim <= *w).ok_or_else(|| Error::Shape {
        op,
        what: format!("head_dim is {head_dim}, GPU kernels exist up to 256 (any even number; fastest 64, 96, 128, 256)"),
    })
}

/// What is refused on GPUs though the operation's contract allows it, and the numbers that all passes get.
fn geometry(op: &'static str, documents: usize, tokens: usize, shape: Attention, vector: bool) -> Result<Geometry> {
    let fail = |what: String| Err(Error::Shape { op, what });
    let group = shape.heads / shape.kv_heads;
    // A positive factor may be taken out of a maximum.
    if shape.scale <= 0.0 {
        return fail(format!("scale is {}, expected more than 0 on GPUs", shape.scale));
    }
    // Rows of a document are counted in i32, heads of a group divided by a multiplication.
    if tokens.saturating_mul(group) > i32::MAX as usize / 4 || group > 4096 || shape.heads * shape.head_dim > 1 << 20 {
        return fail(format!(
            "{tokens} tokens with {} query heads for {} kv heads of {} are more than GPU kernels count; use shorter micro-batches",
            shape.heads, shape.kv_heads, shape.head_dim
        ));
    }
    Ok(Geometry {
        documents: documents as i32,
        tokens: tokens as i32,
        heads: shape.heads as i32,
        kv_heads: shape.kv_heads as i32,
        group: group as i32,
        share: (1u32 << 24).div_ceil(group as u32),
        dim: shape.head_dim as i32,
        window: shape.window.map_or(tokens, |w| w.min(tokens)) as i32,
        tiles: 0,
        vector: vector.into(),
        scale: shape.scale,
        scale_log2: shape.scale * std::f32::consts::LOG2_E,
    })
}

/// Tiles of `rows` rows that `documents` with `all_rows` rows together can have at most: see `find_span` of `attention.cuh`.
fn tiles(all_rows: usize, rows: usize, documents: usize) -> usize {
    all_rows / rows + documents
}

#[allow(clippy::too_many_arguments)]
pub(super) fn forward<L: Launcher>(
    launcher: &L,
    o: &ViewMut,
    lse: &ViewMut,
    q: &View,
    k: &View,
    v: &View,
    cu_seqlens: &View,
    documents: usize,
    tokens: usize,
    shape: Attention,
    workspace: &ViewMut,
    s: &dyn Stream,
) -> Result<()> {
    const OP: &str = "attention";
    checks::attention(o, lse, q, k, v, cu_seqlens, documents, tokens, shape, workspace, workspace_bytes(tokens, shape))?;
    let t = q.dtype();
    let width = width_of(OP, shape.head_dim)?;
    let mut call = Call::new(launcher, OP);
    let (po, plse, pq, pk, pv) = (call.write(o)?, call.write(lse)?, call.read(q)?, call.read(k)?, call.read(v)?);
    let bounds = call.read(cu_seqlens)?;
    let vector = whole_16(&[po.0, pq.0, pk.0, pv.0, (shape.head_dim * t.bytes()) as u64]);
    let mut g = geometry(OP, documents, tokens, shape, vector)?;
    let cut = forward_tiles(launcher.arch(), t, HEAD_DIMS[width]);
    let count = tiles(tokens * g.group as usize, cut.rows, documents);
    g.tiles = count as i32;
    let check = Boundaries { fault: Address(0), bounds, documents: g.documents, tokens: g.tokens };
    call.launch_with_fault("attention_boundaries", [1, 1, 1], BOUNDARY_THREADS, &check, Fault::boundaries(tokens))?;
    let params = AttentionForward { o: po, lse: plse, q: pq, k: pk, v: pv, bounds, g };
    call.launch(names(t, width).forward, [count * shape.kv_heads, 1, 1], cut.threads, cut.shared_bytes, &params)?;
    call.run(s)
}

#[allow(clippy::too_many_arguments)]
pub(super) fn backward<L: Launcher>(
    launcher: &L,
    dq: &ViewMut,
    dk: &ViewMut,
    dv: &ViewMut,
    dout: &View,
    q: &View,
    k: &View,
    v: &View,
    o: &View,
    lse: &View,
    cu_seqlens: &View,
    documents: usize,
    tokens: usize,
    shape: Attention,
    workspace: &ViewMut,
    s: &dyn Stream,
) -> Result<()> {
    const OP: &str = "attention_backward";
    let bytes = workspace_bytes(tokens, shape);
    checks::attention_backward(dq, dk, dv, dout, q, k, v, o, lse, cu_seqlens, documents, tokens, shape, workspace, bytes)?;
    let (t, arch) = (q.dtype(), launcher.arch());
    let width = width_of(OP, shape.head_dim)?;
    let mut call = Call::new(launcher, OP);
    let (pdq, pdk, pdv, pdo) = (call.write(dq)?, call.write(dk)?, call.write(dv)?, call.read(dout)?);
    let (pq, pk, pv, po, plse) = (call.read(q)?, call.read(k)?, call.read(v)?, call.read(o)?, call.read(lse)?);
    let bounds = call.read(cu_seqlens)?;
    call.workspace(workspace)?;
    let rows = tokens * shape.heads;
    let delta = call.part(rows * size_of::<f32>())?;
    let row_bytes = (shape.head_dim * t.bytes()) as u64;
    let vector = whole_16(&[pdq.0, pdk.0, pdv.0, pdo.0, pq.0, pk.0, pv.0, po.0, row_bytes]);
    let mut g = geometry(OP, documents, tokens, shape, vector)?;

    let params = AttentionDelta {
        fault: Address(0),
        bounds,
        delta,
        o: po,
        dout: pdo,
        rows: rows as i64,
        documents: g.documents,
        tokens: g.tokens,
        dim: g.dim,
        vector: g.vector,
    };
    let kernel = by_type(t, "attention_delta_f32", "attention_delta_bf16");
    // One block at least: it checks the boundaries.
    let blocks = rows.div_ceil(DELTA_ROWS).max(1);
    call.launch_with_fault(kernel, [blocks, 1, 1], BOUNDARY_THREADS, &params, Fault::boundaries(tokens))?;

    let mut pass = |kernel: &'static str, cut: Tiles, all_rows: usize| {
        let count = tiles(all_rows, cut.rows, documents);
        g.tiles = count as i32;
        let params = AttentionBackward { dq: pdq, dk: pdk, dv: pdv, dout: pdo, q: pq, k: pk, v: pv, lse: plse, delta, bounds, g };
        call.launch(kernel, [count * shape.kv_heads, 1, 1], cut.threads, cut.shared_bytes, &params)
    };
    for kernel in names(t, width).keys {
        pass(kernel, key_tiles(arch, t, HEAD_DIMS[width]), tokens)?;
    }
    pass(names(t, width).queries, query_tiles(arch, t, HEAD_DIMS[width]), tokens * shape.heads / shape.kv_heads)?;
    call.run(s)
}
