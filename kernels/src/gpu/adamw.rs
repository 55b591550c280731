//! AdamW, with the factors that the host's optimizer computes. `kernels/gpu/adamw.cu`.

use super::elementwise::{THREADS, blocks};
use super::launch::{Address, Call, Kernel, Launcher, whole_16};
use super::params::params;
use crate::cpu::adamw::Factors;
use crate::{AdamW, DType, Result, Stream, View, ViewMut, checks};

pub(super) const KERNELS: &[Kernel] =
    &[Kernel::new::<AdamWParams>("adamw_f32", "adamw.cu"), Kernel::new::<AdamWParams>("adamw_bf16", "adamw.cu")];

params! {
    struct AdamWParams {
        param: Address,
        m: Address,
        v: Address,
        copy_out: Address,
        g: Address,
        scale: Address,
        elems: i64,
        vector: i32,
        lr: f32,
        decay: f32,
        beta1: f32,
        rest1: f32,
        beta2: f32,
        rest2: f32,
        step: f32,
        root2: f32,
        eps: f32,
    }
}

#[allow(clippy::too_many_arguments)]
pub(super) fn update<L: Launcher>(
    launcher: &L,
    param: &ViewMut,
    m: &ViewMut,
    v: &ViewMut,
    copy_out: Option<&ViewMut>,
    g: &View,
    scale: &View,
    hp: AdamW,
    s: &dyn Stream,
) -> Result<()> {
    checks::adamw(param, m, v, copy_out, g, scale, hp)?;
    let mut call = Call::new(launcher, "adamw");
    let (pp, pm, pv, pc) = (call.write(param)?, call.write(m)?, call.write(v)?, call.write_some(copy_out)?);
    let (pg, ps) = (call.read(g)?, call.read(scale)?);
    let f = Factors::new(hp);
    let params = AdamWParams {
        param: pp,
        m: pm,
        v: pv,
        copy_out: pc,
        g: pg,
        scale: ps,
        elems: param.elems() as i64,
        vector: whole_16(&[pp.0, pm.0, pv.0, pc.0, pg.0]).into(),
        lr: f.lr,
        decay: f.decay,
        beta1: f.beta1,
        rest1: f.rest1,
        beta2: f.beta2,
        rest2: f.rest2,
        step: f.step,
        root2: f.root2,
        eps: f.eps,
    };
    let bf16 = copy_out.is_some_and(|c| c.dtype() == DType::BF16);
    call.launch(if bf16 { "adamw_bf16" } else { "adamw_f32" }, blocks(launcher.arch(), param.elems(), 4), THREADS, 0, &params)?;
    call.run(s)
}
