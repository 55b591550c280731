//! Operations on elements one by one, and sums of them. Not on GPUs yet.

use super::launch::{Kernel, Launcher};
use super::unsupported;
use crate::*;

pub(super) const KERNELS: &[Kernel] = &[];

#[allow(clippy::too_many_arguments)]
pub(super) fn sum<L: Launcher>(_launcher: &L, _out: &ViewMut, _x: &View, _s: &dyn Stream) -> Result<()> {
    unsupported("sum")
}

#[allow(clippy::too_many_arguments)]
pub(super) fn add<L: Launcher>(_launcher: &L, _out: &ViewMut, _a: &View, _b: &View, _s: &dyn Stream) -> Result<()> {
    unsupported("add")
}

#[allow(clippy::too_many_arguments)]
pub(super) fn add_into<L: Launcher>(_launcher: &L, _y: &ViewMut, _x: &View, _s: &dyn Stream) -> Result<()> {
    unsupported("add_into")
}

#[allow(clippy::too_many_arguments)]
pub(super) fn scale<L: Launcher>(_launcher: &L, _x: &ViewMut, _factor: f32, _s: &dyn Stream) -> Result<()> {
    unsupported("scale")
}

#[allow(clippy::too_many_arguments)]
pub(super) fn cast<L: Launcher>(_launcher: &L, _dst: &ViewMut, _src: &View, _s: &dyn Stream) -> Result<()> {
    unsupported("cast")
}

#[allow(clippy::too_many_arguments)]
pub(super) fn count_nonfinite<L: Launcher>(_launcher: &L, _out: &ViewMut, _x: &View, _s: &dyn Stream) -> Result<()> {
    unsupported("count_nonfinite")
}
