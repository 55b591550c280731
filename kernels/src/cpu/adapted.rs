//! Frozen layers with their adapters, on machines where both products are one sum: products of bf16 on tiles, without dropout
//! (which gives every adapter an input of its own). Everywhere else they are composed of `linear` and `lora`.
#![allow(unsafe_code)]

use super::float::Float;
use super::operand::Raw;
use super::ops::{CpuOps, Handles, lora_shape, views, workspace_bytes, written};
use super::{lora, lora_split};
use crate::ops::composed;
use crate::{AdaptedLinear, DType, Dropout, LoraBackward, Result, Stream, View, ViewMut, Weight, Write, checks};
use half::bf16;

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
            let (bias, a) = (l.bias.as_ref().map(|view| h.float(view)).transpose()?, &l.lora);
            let base = (Raw::<bf16>::of(h.0, &l.w.view)?, bias, l.write);
            parts.push((h.float(&l.y)?, base, (h.f32(&a.t)?, h.f32(&a.a)?, h.f32(&a.b)?), (a.scale, a.outputs, a.rank, a.site)));
            writes.extend([l.y.clone(), a.t.clone()]);
            reads.extend([l.w.view.clone(), a.a.clone(), a.b.clone()].into_iter().chain(l.bias.clone()));
        }
        self.enqueue(s, h.0, writes, reads, move |pool| {
            let (mut adapters, mut bases) = (Vec::new(), Vec::new());
            for (y, (w, bias, write), (t, a, b), (scale, outputs, rank, site)) in parts {
                // SAFETY: as in lora.
                let (y, t, a, b) = unsafe { (y.write_all(), t.write_all(), a.read_all(), b.read_all()) };
                adapters.push(lora::Forward { y, t, a, b, scale, outputs, rank, site });
                // SAFETY: as in lora.
                let (w, bias) = unsafe { (w.read_all(), bias.map(|b| b.read_all())) };
                bases.push(lora_split::Base { w, bias, write });
            }
            // SAFETY: as in lora.
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
            let numbers = (a.write, a.scale, a.outputs, a.rank, a.site);
            let frozen = (Raw::<bf16>::of(h.0, &w.view)?, h.float(&a.dy)?);
            parts.push(((h.f32(&a.da)?, h.f32(&a.db)?), frozen, (h.f32(&a.t)?, h.f32(&a.a)?, h.f32(&a.b)?), numbers));
            writes.extend([a.da.clone(), a.db.clone()]);
            reads.extend([w.view.clone(), a.dy.clone(), a.t.clone(), a.a.clone(), a.b.clone()]);
        }
        self.enqueue(s, h.0, writes, reads, move |pool| {
            let (mut adapters, mut weights) = (Vec::new(), Vec::new());
            for ((da, db), (w, dy), (t, a, b), (write, scale, outputs, rank, site)) in parts {
                // SAFETY: as in lora.
                let (da, db, w, dy) = unsafe { (da.write_all(), db.write_all(), w.read_all(), dy.read_all()) };
                // SAFETY: as in lora.
                let (t, a, b) = unsafe { (t.read_all(), a.read_all(), b.read_all()) };
                adapters.push(lora::Backward { da, db, write, dy, t, a, b, scale, outputs, rank, site });
                weights.push(w);
            }
            // SAFETY: as in lora.
            let (dx, x, work) = unsafe { (pdx.write_all(), px.read_all(), work.write_all()) };
            let Float::Bf16(x) = x else { unreachable!("checked") };
            lora_split::backward(pool, Some((dx, write)), &mut adapters, Some(&weights), x, tokens, inputs, work);
            Ok(())
        })
    }
}
