//! Sums of squares along the aligned tree, and the clipping factor from the nodes of all ranks. `kernels/gpu/sum_squares.cu`.

use super::launch::{Address, Arch, Call, Kernel, Launcher, int, workspace_of};
use super::params::params;
use crate::cpu::norm_tree::{check_disjoint, chunks};
use crate::{OpShape, Result, Stream, View, ViewMut, checks};

const SOURCE: &str = "sum_squares.cu";
pub(super) const KERNELS: &[Kernel] = &[
    Kernel::new::<ChunkSums>("chunk_sums_f32", SOURCE),
    Kernel::new::<ChunkTree>("chunk_tree_f32", SOURCE),
    Kernel::new::<ClipScale>("clip_scale_f32", SOURCE),
];

params! {
    struct ChunkSums {
        sums: Address,
        x: Address,
        elems: i64,
        chunks: i64,
    }
    struct ChunkTree {
        nodes: Address,
        sums: Address,
        other: Address,
        first: i64,
        chunks: i64,
    }
    struct ClipScale {
        held: Address,
        norm: Address,
        scale: Address,
        nodes: Address,
        ranks: i32,
        segments: i32,
        clip: i32,
        max_norm: f32,
    }
}

const THREADS: u32 = 256;
const CLIP_THREADS: u32 = 64;

/// The chunks' sums, and as much again for every second level of the tree.
fn parts(elems: usize) -> [usize; 2] {
    [chunks(elems) * size_of::<f32>(); 2]
}

/// Bytes for the tree above the chunks.
pub(super) fn workspace_bytes(_arch: &Arch, elems: usize) -> usize {
    workspace_of(&parts(elems))
}

pub(super) fn sum_squares<L: Launcher>(
    launcher: &L,
    nodes: &ViewMut,
    x: &View,
    first_chunk: usize,
    workspace: &ViewMut,
    s: &dyn Stream,
) -> Result<()> {
    let bytes = super::workspace_bytes(launcher.arch(), OpShape::SumSquares { elems: x.elems() });
    checks::sum_squares(nodes, x, first_chunk, workspace, bytes)?;
    let mut call = Call::new(launcher, "sum_squares");
    let (pn, px) = (call.write(nodes)?, call.read(x)?);
    call.workspace(workspace)?;
    let [sums, other] = parts(x.elems());
    let (sums, other) = (call.part(sums)?, call.part(other)?);
    let n = chunks(x.elems());
    let per_block = (THREADS / launcher.arch().lanes) as usize;
    call.launch(
        "chunk_sums_f32",
        [n.div_ceil(per_block), 1, 1],
        THREADS,
        0,
        &ChunkSums { sums, x: px, elems: x.elems() as i64, chunks: n as i64 },
    )?;
    let tree = ChunkTree { nodes: pn, sums, other, first: first_chunk as i64, chunks: n as i64 };
    call.launch("chunk_tree_f32", [1, 1, 1], THREADS, 0, &tree)?;
    call.run(s)
}

#[allow(clippy::too_many_arguments)]
pub(super) fn clip_scale<L: Launcher>(
    launcher: &L,
    norm: &ViewMut,
    scale: &ViewMut,
    nodes: &View,
    ranges: &[(u64, u64)],
    ranks: usize,
    segments: usize,
    max_norm: Option<f32>,
    s: &dyn Stream,
) -> Result<()> {
    const OP: &str = "clip_scale";
    checks::clip_scale(norm, scale, nodes, ranges, ranks, segments, max_norm)?;
    check_disjoint(ranges, ranks, segments)?;
    let mut call = Call::new(launcher, OP);
    let (pn, ps, px) = (call.write(norm)?, call.write(scale)?, call.read(nodes)?);
    // (first chunk, chunks, rank) of each segment, from left to right, whatever the order of ranks.
    let held = (0..segments).flat_map(|segment| {
        let mut held: Vec<[u64; 3]> = (0..ranks)
            .map(|rank| {
                let (first, chunks) = ranges[rank * segments + segment];
                [first, chunks, rank as u64]
            })
            .collect();
        held.sort_unstable();
        held.into_iter().flatten()
    });
    let held: Vec<u64> = held.collect();
    let params = ClipScale {
        held: Address(0),
        norm: pn,
        scale: ps,
        nodes: px,
        ranks: int(OP, "ranks", ranks)?,
        segments: int(OP, "segments", segments)?,
        clip: max_norm.is_some().into(),
        max_norm: max_norm.unwrap_or(0.0),
    };
    call.launch_with_data("clip_scale_f32", [1, 1, 1], CLIP_THREADS, &params, &held)?;
    call.run(s)
}
