//! LoRA adapters that share an input. Not on GPUs yet.

use super::launch::{Kernel, Launcher};
use super::unsupported;
use crate::*;

pub(super) const KERNELS: &[Kernel] = &[];

#[allow(clippy::too_many_arguments)]
pub(super) fn forward<L: Launcher>(
    _launcher: &L,
    _adapters: &[LoraForward],
    _x: &View,
    _dropout: Option<Dropout>,
    _tokens: usize,
    _inputs: usize,
    _workspace: &ViewMut,
    _s: &dyn Stream,
) -> Result<()> {
    unsupported("lora")
}

#[allow(clippy::too_many_arguments)]
pub(super) fn backward<L: Launcher>(
    _launcher: &L,
    _dx: Option<&ViewMut>,
    _adapters: &[LoraBackward],
    _x: &View,
    _dropout: Option<Dropout>,
    _tokens: usize,
    _inputs: usize,
    _workspace: &ViewMut,
    _s: &dyn Stream,
) -> Result<()> {
    unsupported("lora_backward")
}
