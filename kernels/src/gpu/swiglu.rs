//! SwiGLU. Not on GPUs yet.

use super::launch::{Kernel, Launcher};
use super::unsupported;
use crate::*;

pub(super) const KERNELS: &[Kernel] = &[];

#[allow(clippy::too_many_arguments)]
pub(super) fn forward<L: Launcher>(_launcher: &L, _h: &ViewMut, _gate: &View, _up: &View, _s: &dyn Stream) -> Result<()> {
    unsupported("swiglu")
}

#[allow(clippy::too_many_arguments)]
pub(super) fn backward<L: Launcher>(
    _launcher: &L,
    _dgate: &ViewMut,
    _dup: &ViewMut,
    _dh: &View,
    _gate: &View,
    _up: &View,
    _s: &dyn Stream,
) -> Result<()> {
    unsupported("swiglu_backward")
}
