//! Embedding rows and their gradient. Not on GPUs yet.

use super::launch::{Kernel, Launcher};
use super::unsupported;
use crate::*;

pub(super) const KERNELS: &[Kernel] = &[];

#[allow(clippy::too_many_arguments)]
pub(super) fn forward<L: Launcher>(_launcher: &L, _y: &ViewMut, _table: &View, _ids: &View, _hidden: usize, _s: &dyn Stream) -> Result<()> {
    unsupported("embedding")
}

#[allow(clippy::too_many_arguments)]
pub(super) fn backward<L: Launcher>(
    _launcher: &L,
    _dtable: &ViewMut,
    _write: Write,
    _dy: &View,
    _ids: &View,
    _hidden: usize,
    _workspace: &ViewMut,
    _s: &dyn Stream,
) -> Result<()> {
    unsupported("embedding_backward")
}
