//! Rotary embedding. Not on GPUs yet.

use super::launch::{Kernel, Launcher};
use super::unsupported;
use crate::*;

pub(super) const KERNELS: &[Kernel] = &[];

#[allow(clippy::too_many_arguments)]
pub(super) fn forward<L: Launcher>(
    _launcher: &L,
    _x: &ViewMut,
    _table: &View,
    _positions: &View,
    _heads: usize,
    _head_dim: usize,
    _s: &dyn Stream,
) -> Result<()> {
    unsupported("rope")
}

#[allow(clippy::too_many_arguments)]
pub(super) fn backward<L: Launcher>(
    _launcher: &L,
    _dx: &ViewMut,
    _table: &View,
    _positions: &View,
    _heads: usize,
    _head_dim: usize,
    _s: &dyn Stream,
) -> Result<()> {
    unsupported("rope_backward")
}
