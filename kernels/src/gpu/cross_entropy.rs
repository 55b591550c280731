//! Output head and cross entropy. Not on GPUs yet.

use super::launch::{Kernel, Launcher};
use super::unsupported;
use crate::*;

pub(super) const KERNELS: &[Kernel] = &[];

#[allow(clippy::too_many_arguments)]
pub(super) fn linear_cross_entropy<L: Launcher>(
    _launcher: &L,
    _loss: &ViewMut,
    _dx: Option<&ViewMut>,
    _dw: Option<(&ViewMut, Write)>,
    _x: &View,
    _w: &Weight,
    _labels: &View,
    _grad_scale: f32,
    _tokens: usize,
    _hidden: usize,
    _vocab: usize,
    _workspace: &ViewMut,
    _s: &dyn Stream,
) -> Result<()> {
    unsupported("linear_cross_entropy")
}
