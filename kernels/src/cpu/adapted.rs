//! Frozen layers with their adapters, on machines where both products are one sum: pairs of bf16 by instructions of their own, without dropout
//! (which gives every adapter an input of its own). Everywhere else they are composed of `linear` and `lora`.
#![allow(unsafe_code)]

use super::float::Float;
use super::operand::{Operand, Raw};
use super::ops::{CpuOps, Handles, lora_shape, views, workspace_bytes, written};
use super::{lora, lora_split};
use crate::ops::composed;
use crate::{AdaptedLinear, DType, Dropout, LoraBackward, LoraForward, Result, Stream, View, ViewMut, Weight, Write, checks};
use half::bf16;

/// Handles to the operands of one adapter of forward, `y` apart: the sum's place, or the output.
pub(super) struct ForwardHandles {
    y: Operand,
    t: Raw<f32>,
    a: Raw<f32>,
    b: Raw<f32>,
    numbers: (f32, usize, usize, u32),
}

impl ForwardHandles {
    /// Of `l`, which writes `y`; adds what is written and read to the lists.
    pub fn of(h: Handles, l: &LoraForward, y: &ViewMut, writes: &mut Vec<ViewMut>, reads: &mut Vec<View>) -> Result<Self> {
        writes.extend([y.clone(), l.t.clone()]);
        reads.extend([l.a.clone(), l.b.clone()]);
        let numbers = (l.scale, l.outputs, l.rank, l.site);
        Ok(ForwardHandles { y: h.float(y)?, t: h.f32(&l.t)?, a: h.f32(&l.a)?, b: h.f32(&l.b)?, numbers })
    }

    /// # Safety
    /// The task holds the views, and its checks keep what is written apart from the rest, of all adapters.
    pub unsafe fn open<'a>(self) -> lora::Forward<'a> {
        let (scale, outputs, rank, site) = self.numbers;
        // SAFETY: by contract.
        let (y, t, a, b) = unsafe { (self.y.write_all(), self.t.write_all(), self.a.read_all(), self.b.read_all()) };
        lora::Forward { y, t, a, b, scale, outputs, rank, site }
    }
}

/// Handles to the operands of one adapter of backward.
pub(super) struct BackwardHandles {
    da: Raw<f32>,
    db: Raw<f32>,
    write: Write,
    dy: Operand,
    t: Raw<f32>,
    a: Raw<f32>,
    b: Raw<f32>,
    numbers: (f32, usize, usize, u32),
}

impl BackwardHandles {
    /// Of `l`; adds what is written and read to the lists.
    pub fn of(h: Handles, l: &LoraBackward, writes: &mut Vec<ViewMut>, reads: &mut Vec<View>) -> Result<Self> {
        writes.extend([l.da.clone(), l.db.clone()]);
        reads.extend([l.dy.clone(), l.t.clone(), l.a.clone(), l.b.clone()]);
        let (da, db, dy) = (h.f32(&l.da)?, h.f32(&l.db)?, h.float(&l.dy)?);
        let numbers = (l.scale, l.outputs, l.rank, l.site);
        Ok(BackwardHandles { da, db, write: l.write, dy, t: h.f32(&l.t)?, a: h.f32(&l.a)?, b: h.f32(&l.b)?, numbers })
    }

    /// # Safety
    /// As [`ForwardHandles::open`].
    pub unsafe fn open<'a>(self) -> lora::Backward<'a> {
        let (scale, outputs, rank, site) = self.numbers;
        // SAFETY: by contract.
        let (da, db, dy) = unsafe { (self.da.write_all(), self.db.write_all(), self.dy.read_all()) };
        // SAFETY: by contract.
        let (t, a, b) = unsafe { (self.t.read_all(), self.a.read_all(), self.b.read_all()) };
        lora::Backward { da, db, write: self.write, dy, t, a, b, scale, outputs, rank, site }
    }
}

impl CpuOps {
    /// [`Ops::adapted_linear`](crate::Ops::adapted_linear).
    #[allow(clippy::too_many_arguments)]
    pub(super) fn adapted(
        &self,
        layers: &[AdaptedLinear],
        x: &View,
        dropout: Option<Dropout>,
        tokens: usize,
        inputs: usize,
        workspace: &ViewMut,
        s: &dyn Stream,
    ) -> Result<()> {
        let fused = lora::splits(self.pool())
            && dropout.is_none_or(|d| d.p == 0.0)
            && [x].into_iter().chain(layers.iter().map(|l| &l.w.view)).all(|v| v.dtype() == DType::BF16);
        if !fused {
            return composed::adapted_linear(self, layers, x, dropout, tokens, inputs, workspace, s);
        }
        let bytes = workspace_bytes(lora_shape(tokens, inputs, layers.iter().map(|l| (l.lora.outputs, l.lora.rank))));
        checks::adapted_linear(layers, x, dropout, tokens, inputs, workspace, bytes)?;
        let h = Handles("adapted_linear");
        let (px, work) = (h.float(x)?, h.workspace(workspace, bytes)?);
        let (mut writes, mut reads, mut parts) = (written([Some(workspace)]), views([Some(x)]), Vec::new());
        for l in layers {
            let bias = l.bias.as_ref().map(|view| h.float(view)).transpose()?;
            let base = (Raw::<bf16>::of(h.0, &l.w.view)?, bias, l.write);
            parts.push((ForwardHandles::of(h, &l.lora, &l.y, &mut writes, &mut reads)?, base));
            reads.extend(std::iter::once(l.w.view.clone()).chain(l.bias.clone()));
        }
        self.enqueue(s, h.0, writes, reads, move |pool| {
            let (mut adapters, mut bases) = (Vec::new(), Vec::new());
            for (adapter, (w, bias, write)) in parts {
                // SAFETY: the task holds the views; the checks keep what is written apart from the rest, of all layers.
                adapters.push(unsafe { adapter.open() });
                // SAFETY: as above.
                let (w, bias) = unsafe { (w.read_all(), bias.map(|b| b.read_all())) };
                bases.push(lora_split::Base { w, bias, write });
            }
            // SAFETY: as above.
            let (x, work) = unsafe { (px.read_all(), work.write_all()) };
            let Float::Bf16(x) = x else { unreachable!("checked") };
            lora_split::forward(pool, &mut adapters, Some(&bases), x, tokens, inputs, work);
            Ok(())
        })
    }

    /// [`Ops::adapted_linear_backward`](crate::Ops::adapted_linear_backward).
    #[allow(clippy::too_many_arguments)]
    pub(super) fn adapted_backward(
        &self,
        dx: Option<(&ViewMut, Write)>,
        layers: &[(Weight, LoraBackward)],
        x: &View,
        dropout: Option<Dropout>,
        tokens: usize,
        inputs: usize,
        workspace: &ViewMut,
        s: &dyn Stream,
    ) -> Result<()> {
        let fused = lora::splits(self.pool())
            && layers.len() <= lora_split::MAX_LAYERS
            && dropout.is_none_or(|d| d.p == 0.0)
            && [x].into_iter().chain(layers.iter().flat_map(|l| [&l.0.view, &l.1.dy])).all(|v| v.dtype() == DType::BF16);
        let Some((dx, write)) = dx.filter(|_| fused) else {
            return composed::adapted_linear_backward(self, dx, layers, x, dropout, tokens, inputs, workspace, s);
        };
        let bytes = workspace_bytes(lora_shape(tokens, inputs, layers.iter().map(|l| (l.1.outputs, l.1.rank))));
        let adapters: Vec<LoraBackward> = layers.iter().map(|l| l.1.clone()).collect();
        checks::lora_backward(Some(dx), &adapters, x, dropout, tokens, inputs, workspace, bytes)?;
        for (w, a) in layers {
            checks::linear_backward(Some((dx, write)), None, None, &a.dy, None, w, tokens, inputs, a.outputs, workspace, 0)?;
        }
        let h = Handles("adapted_linear_backward");
        let (pdx, px, work) = (h.float(dx)?, h.float(x)?, h.workspace(workspace, bytes)?);
        let (mut writes, mut reads, mut parts) = (written([Some(dx), Some(workspace)]), views([Some(x)]), Vec::new());
        for (w, a) in layers {
            parts.push((BackwardHandles::of(h, a, &mut writes, &mut reads)?, Raw::<bf16>::of(h.0, &w.view)?));
            reads.push(w.view.clone());
        }
        self.enqueue(s, h.0, writes, reads, move |pool| {
            let (mut adapters, mut weights) = (Vec::new(), Vec::new());
            for (adapter, w) in parts {
                // SAFETY: as in `adapted`.
                adapters.push(unsafe { adapter.open() });
                // SAFETY: as above.
                weights.push(unsafe { w.read_all() });
            }
            // SAFETY: as above.
            let (dx, x, work) = unsafe { (pdx.write_all(), px.read_all(), work.write_all()) };
            let Float::Bf16(x) = x else { unreachable!("checked") };
            lora_split::backward(pool, Some((dx, write)), &mut adapters, Some(&weights), x, tokens, inputs, work);
            Ok(())
        })
    }
}
