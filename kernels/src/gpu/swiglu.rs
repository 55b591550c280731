//! SwiGLU. `kernels/gpu/swiglu.cu`.

use super::elementwise::{THREADS, blocks};
use super::launch::{Address, Call, Kernel, Launcher, by_type, whole_16};
use super::params::params;
use crate::{Result, Stream, View, ViewMut, checks};

const SOURCE: &str = "swiglu.cu";
pub(super) const KERNELS: &[Kernel] = &[
    Kernel::new::<SwiGlu>("swiglu_f32", SOURCE),
    Kernel::new::<SwiGlu>("swiglu_bf16", SOURCE),
    Kernel::new::<SwiGluBackward>("swiglu_backward_f32", SOURCE),
    Kernel::new::<SwiGluBackward>("swiglu_backward_bf16", SOURCE),
];

params! {
    struct SwiGlu {
        h: Address,
        gate: Address,
        up: Address,
        elems: i64,
        vector: i32,
        unused: i32,
    }
    struct SwiGluBackward {
        dgate: Address,
        dup: Address,
        dh: Address,
        gate: Address,
        up: Address,
        elems: i64,
        vector: i32,
        unused: i32,
    }
}

pub(super) fn forward<L: Launcher>(launcher: &L, h: &ViewMut, gate: &View, up: &View, s: &dyn Stream) -> Result<()> {
    checks::swiglu(h, gate, up)?;
    let mut call = Call::new(launcher, "swiglu");
    let (ph, pg, pu) = (call.write(h)?, call.read(gate)?, call.read(up)?);
    let vector = whole_16(&[ph.0, pg.0, pu.0]).into();
    let params = SwiGlu { h: ph, gate: pg, up: pu, elems: h.elems() as i64, vector, unused: 0 };
    let grid = blocks(launcher.arch(), h.elems(), 16 / h.dtype().bytes());
    call.launch(by_type(h.dtype(), "swiglu_f32", "swiglu_bf16"), grid, THREADS, 0, &params)?;
    call.run(s)
}

pub(super) fn backward<L: Launcher>(
    launcher: &L,
    dgate: &ViewMut,
    dup: &ViewMut,
    dh: &View,
    gate: &View,
    up: &View,
    s: &dyn Stream,
) -> Result<()> {
    checks::swiglu_backward(dgate, dup, dh, gate, up)?;
    let mut call = Call::new(launcher, "swiglu_backward");
    let (pdg, pdu) = (call.write(dgate)?, call.write(dup)?);
    let (pdh, pg, pu) = (call.read(dh)?, call.read(gate)?, call.read(up)?);
    let vector = whole_16(&[pdg.0, pdu.0, pdh.0, pg.0, pu.0]).into();
    let params = SwiGluBackward { dgate: pdg, dup: pdu, dh: pdh, gate: pg, up: pu, elems: dh.elems() as i64, vector, unused: 0 };
    let grid = blocks(launcher.arch(), dh.elems(), 16 / dh.dtype().bytes());
    call.launch(by_type(dh.dtype(), "swiglu_backward_f32", "swiglu_backward_bf16"), grid, THREADS, 0, &params)?;
    call.run(s)
}
