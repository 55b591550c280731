//! Sums of squares along the aligned tree, and the clipping factor. Not on GPUs yet.

use super::launch::{Kernel, Launcher};
use super::unsupported;
use crate::*;

pub(super) const KERNELS: &[Kernel] = &[];

#[allow(clippy::too_many_arguments)]
pub(super) fn sum_squares<L: Launcher>(
    _launcher: &L,
    _nodes: &ViewMut,
    _x: &View,
    _first_chunk: usize,
    _workspace: &ViewMut,
    _s: &dyn Stream,
) -> Result<()> {
    unsupported("sum_squares")
}

#[allow(clippy::too_many_arguments)]
pub(super) fn clip_scale<L: Launcher>(
    _launcher: &L,
    _norm: &ViewMut,
    _scale: &ViewMut,
    _nodes: &View,
    _ranges: &[(u64, u64)],
    _ranks: usize,
    _segments: usize,
    _max_norm: Option<f32>,
    _s: &dyn Stream,
) -> Result<()> {
    unsupported("clip_scale")
}
