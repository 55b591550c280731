//! Flash attention. Not on GPUs yet.

use super::launch::{Kernel, Launcher};
use super::unsupported;
use crate::*;

pub(super) const KERNELS: &[Kernel] = &[];

#[allow(clippy::too_many_arguments)]
pub(super) fn forward<L: Launcher>(
    _launcher: &L,
    _o: &ViewMut,
    _lse: &ViewMut,
    _q: &View,
    _k: &View,
    _v: &View,
    _cu_seqlens: &View,
    _documents: usize,
    _tokens: usize,
    _shape: Attention,
    _workspace: &ViewMut,
    _s: &dyn Stream,
) -> Result<()> {
    unsupported("attention")
}

#[allow(clippy::too_many_arguments)]
pub(super) fn backward<L: Launcher>(
    _launcher: &L,
    _dq: &ViewMut,
    _dk: &ViewMut,
    _dv: &ViewMut,
    _dout: &View,
    _q: &View,
    _k: &View,
    _v: &View,
    _o: &View,
    _lse: &View,
    _cu_seqlens: &View,
    _documents: usize,
    _tokens: usize,
    _shape: Attention,
    _workspace: &ViewMut,
    _s: &dyn Stream,
) -> Result<()> {
    unsupported("attention_backward")
}
