//! AdamW. Not on GPUs yet.

use super::launch::{Kernel, Launcher};
use super::unsupported;
use crate::*;

pub(super) const KERNELS: &[Kernel] = &[];

#[allow(clippy::too_many_arguments)]
pub(super) fn update<L: Launcher>(
    _launcher: &L,
    _param: &ViewMut,
    _m: &ViewMut,
    _v: &ViewMut,
    _copy_out: Option<&ViewMut>,
    _g: &View,
    _scale: &View,
    _hp: AdamW,
    _s: &dyn Stream,
) -> Result<()> {
    unsupported("adamw")
}
