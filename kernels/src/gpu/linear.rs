//! Dense products. Not on GPUs yet.

use super::launch::{Kernel, Launcher};
use super::unsupported;
use crate::*;

pub(super) const KERNELS: &[Kernel] = &[];

#[allow(clippy::too_many_arguments)]
pub(super) fn forward<L: Launcher>(
    _launcher: &L,
    _y: &ViewMut,
    _write: Write,
    _x: &View,
    _w: &Weight,
    _bias: Option<&View>,
    _tokens: usize,
    _inputs: usize,
    _outputs: usize,
    _s: &dyn Stream,
) -> Result<()> {
    unsupported("linear")
}

#[allow(clippy::too_many_arguments)]
pub(super) fn backward<L: Launcher>(
    _launcher: &L,
    _dx: Option<(&ViewMut, Write)>,
    _dw: Option<(&ViewMut, Write)>,
    _dbias: Option<(&ViewMut, Write)>,
    _dy: &View,
    _x: Option<&View>,
    _w: &Weight,
    _tokens: usize,
    _inputs: usize,
    _outputs: usize,
    _workspace: &ViewMut,
    _s: &dyn Stream,
) -> Result<()> {
    unsupported("linear_backward")
}
