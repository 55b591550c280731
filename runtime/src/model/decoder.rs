//! Llama-family decoders (Llama, SmolLM2, Mistral, Qwen2, Qwen3): embedding, blocks, final norm and head.
//!
//! A tied head visits the embedding's unit, so the matrix exists once; its two uses accumulate their own gradients.

use crate::error::{Error, Result};
use crate::hf::arch::ArchConfig;
use crate::hf::rope::rope_table;
use crate::model::block::{Adapter, Block, Linear, ParamList};
use crate::model::{Batch, BatchShape, Cx, Grads, Model, Params, Pass, TensorSpec, VisitSpec};
use crate::peft::plan::adapter_tensor;
use crate::plan::{Init, ParamKind, UnitSpec};
use std::collections::HashMap;
use zrt_kernels::{Attention, DType, OpShape, Ops, View, ViewMut, Write};

/// One LoRA adapter to attach.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterSpec {
    /// Path of the linear layer: `model.layers.0.self_attn.q_proj`.
    pub module: String,
    /// `R`.
    pub rank: usize,
    /// `alpha / r` or `alpha / sqrt(r)`.
    pub scale: f32,
}

/// A decoder over a checked configuration.
pub struct Decoder {
    arch: ArchConfig,
    seq_len: usize,
    units: Vec<UnitSpec>,
    blocks: Vec<Block>,
    /// Index of the final norm in the head's first unit is 0; this is the matrix: (position among the visit's units, parameter).
    head: (usize, usize),
    head_units: Vec<usize>,
    trained_base: bool,
    /// The rotary table, made once: planning builds many engines on one model.
    rope: std::sync::OnceLock<Vec<f32>>,
}

impl Decoder {
    /// Builds the units. With `adapters` the base is frozen; without, everything is trained.
    ///
    /// # Errors
    /// An adapter for a layer that does not exist, or a sequence longer than the model was made for.
    pub fn new(arch: ArchConfig, seq_len: usize, adapters: Option<&[AdapterSpec]>, dropout: f32) -> Result<Decoder> {
        let trained_base = adapters.is_none();
        let by_module: HashMap<&str, (u32, &AdapterSpec)> =
            adapters.unwrap_or(&[]).iter().enumerate().map(|(i, a)| (a.module.as_str(), (i as u32, a))).collect();
        let shapes: HashMap<String, Vec<usize>> = arch.parameters().into_iter().collect();
        let mut used = 0;
        let normal = Init::Normal(arch.initializer_range);
        let base = |list: &mut ParamList, name: String| -> Result<usize> {
            let shape = shapes.get(&name).ok_or_else(|| Error::Model(format!("{name}: not a parameter of this architecture")))?;
            let init = if name.ends_with(".bias") {
                Init::Zeros
            } else if shape.len() == 1 {
                Init::Ones
            } else {
                normal
            };
            Ok(list.push(name, shape, ParamKind::Base, trained_base, init))
        };
        let mut units = Vec::new();
        let mut embed = ParamList::default();
        base(&mut embed, "model.embed_tokens.weight".into())?;
        units.push(UnitSpec { name: "embed".into(), params: embed.0 });

        let mut blocks = Vec::with_capacity(arch.layers);
        for layer in 0..arch.layers {
            let prefix = format!("model.layers.{layer}");
            let mut list = ParamList::default();
            let norm1 = base(&mut list, format!("{prefix}.input_layernorm.weight"))?;
            let mut next_act = Block::first_adapter_act(arch.qk_norm);
            let mut linear = |list: &mut ParamList, module: &str, biased: bool| -> Result<Linear> {
                let path = format!("{prefix}.{module}");
                let weight = base(list, format!("{path}.weight"))?;
                let bias = if biased { Some(base(list, format!("{path}.bias"))?) } else { None };
                let (outputs, inputs) = (list.0[weight].shape[0], list.0[weight].shape[1]);
                let adapter = by_module.get(path.as_str()).map(|(site, spec)| {
                    used += 1;
                    let r = spec.rank;
                    let init = Init::Uniform(1.0 / (inputs as f32).sqrt());
                    let a = list.push(adapter_tensor(&path, 'A'), &[r, inputs], ParamKind::Adapter, true, init);
                    let b = list.push(adapter_tensor(&path, 'B'), &[outputs, r], ParamKind::Adapter, true, Init::Zeros);
                    next_act += 1;
                    Adapter { a, b, rank: r, scale: spec.scale, site: *site, t: next_act - 1 }
                });
                Ok(Linear { inputs, outputs, weight, bias, adapter })
            };
            let q = linear(&mut list, "self_attn.q_proj", arch.qkv_bias)?;
            let k = linear(&mut list, "self_attn.k_proj", arch.qkv_bias)?;
            let v = linear(&mut list, "self_attn.v_proj", arch.qkv_bias)?;
            let o = linear(&mut list, "self_attn.o_proj", arch.o_bias)?;
            let gate = linear(&mut list, "mlp.gate_proj", arch.mlp_bias)?;
            let up = linear(&mut list, "mlp.up_proj", arch.mlp_bias)?;
            let down = linear(&mut list, "mlp.down_proj", arch.mlp_bias)?;
            let norm2 = base(&mut list, format!("{prefix}.post_attention_layernorm.weight"))?;
            let qk_norm = if arch.qk_norm {
                let q = base(&mut list, format!("{prefix}.self_attn.q_norm.weight"))?;
                Some((q, base(&mut list, format!("{prefix}.self_attn.k_norm.weight"))?))
            } else {
                None
            };
            blocks.push(Block {
                hidden: arch.hidden,
                mlp: arch.intermediate,
                attention: Attention {
                    heads: arch.heads,
                    kv_heads: arch.kv_heads,
                    head_dim: arch.head_dim,
                    window: arch.windows.get(layer).copied().flatten(),
                    scale: 1.0 / (arch.head_dim as f32).sqrt(),
                },
                eps: arch.rms_eps,
                dropout,
                norm1,
                norm2,
                qk_norm,
                q,
                k,
                v,
                o,
                gate,
                up,
                down,
            });
            units.push(UnitSpec { name: format!("layers.{layer}"), params: list.0 });
        }
        if used != by_module.len() {
            let known = arch.linear_modules();
            let lost = by_module.keys().find(|m| !known.iter().any(|k| k.path == **m)).copied().unwrap_or("?");
            return Err(Error::Input(format!("lora: no linear layer is named {lost}")));
        }
        let mut last = ParamList::default();
        base(&mut last, "model.norm.weight".into())?;
        let (name, head, head_units) = if arch.tie_word_embeddings {
            ("norm", (1, 0), vec![units.len(), 0])
        } else {
            let matrix = base(&mut last, "lm_head.weight".into())?;
            ("head", (0, matrix), vec![units.len()])
        };
        units.push(UnitSpec { name: name.into(), params: last.0 });
        Ok(Decoder { arch, seq_len, units, blocks, head, head_units, trained_base, rope: Default::default() })
    }

    /// The configuration it was built from.
    pub fn arch(&self) -> &ArchConfig {
        &self.arch
    }
}

impl Model for Decoder {
    fn units(&self) -> Vec<UnitSpec> {
        self.units.clone()
    }

    fn visits(&self, shape: BatchShape, ops: &dyn Ops) -> Vec<VisitSpec> {
        let (n, c, v) = (shape.tokens, self.arch.hidden, self.arch.vocab);
        let embedding = OpShape::EmbeddingBackward { tokens: n, hidden: c, vocab: v };
        let mut visits = vec![VisitSpec {
            name: "embed".into(),
            units: vec![0],
            output: n * c,
            workspace_bytes: ops.workspace_bytes(embedding),
            ..VisitSpec::default()
        }];
        for (i, block) in self.blocks.iter().enumerate() {
            visits.push(block.visit(self.units[i + 1].name.clone(), i + 1, shape, ops));
        }
        let loss = ops.workspace_bytes(OpShape::LinearCrossEntropy { tokens: n, hidden: c, vocab: v });
        let norm = ops.workspace_bytes(OpShape::RmsNormBackward { rows: n, cols: c });
        let matmul = 2.0 * n as f64 * c as f64 * v as f64;
        visits.push(VisitSpec {
            name: "head".into(),
            units: self.head_units.clone(),
            input: n * c,
            acts: vec![
                TensorSpec { name: "n", elems: n * c, dtype: shape.compute },
                TensorSpec { name: "rstd", elems: n, dtype: DType::F32 },
            ],
            scratch: vec![TensorSpec { name: "dn", elems: n * c, dtype: shape.compute }],
            workspace_bytes: loss.max(norm),
            flops: (matmul, if self.trained_base { 2.0 * matmul } else { matmul }),
            ..VisitSpec::default()
        });
        visits
    }

    fn tables(&self) -> Vec<Vec<f32>> {
        vec![self.rope.get_or_init(|| rope_table(&self.arch, self.seq_len)).clone()]
    }

    fn forward(
        &self,
        cx: &Cx,
        visit: usize,
        w: &Params,
        y: Option<&ViewMut>,
        x: Option<&View>,
        acts: &[ViewMut],
        batch: &Batch,
    ) -> Result<()> {
        let (n, c, v) = (batch.ids.elems(), self.arch.hidden, self.arch.vocab);
        match (visit.checked_sub(1).map(|b| self.blocks.get(b)), x, y) {
            (None, None, Some(y)) => cx.ops.embedding(y, w.get(0, 0)?, &batch.ids, c, cx.stream)?,
            (Some(Some(block)), Some(x), Some(y)) => block.forward(cx, w, y, x, acts, batch)?,
            (Some(None), Some(x), None) => {
                cx.ops.rmsnorm(&acts[0], &acts[1], x, w.get(0, 0)?, self.arch.rms_eps, n, c, cx.stream)?;
                if cx.pass == Pass::Eval {
                    let head = w.get(self.head.0, self.head.1)?.clone().into();
                    let (loss, labels) = (&batch.loss, &batch.labels);
                    cx.ops.linear_cross_entropy(loss, None, None, &acts[0], &head, labels, 0.0, n, c, v, &cx.workspace, cx.stream)?;
                }
            }
            _ => return Err(Error::Model(format!("forward of visit {visit}: input and output do not fit its place"))),
        }
        Ok(())
    }

    fn backward(
        &self,
        cx: &Cx,
        visit: usize,
        w: &Params,
        grads: &Grads,
        dx: Option<&ViewMut>,
        dy: Option<&ViewMut>,
        x: Option<&View>,
        acts: &[ViewMut],
        batch: &Batch,
    ) -> Result<()> {
        let (n, c, v) = (batch.ids.elems(), self.arch.hidden, self.arch.vocab);
        match (visit.checked_sub(1).map(|b| self.blocks.get(b)), x, dy) {
            (None, None, Some(dy)) => {
                if let Some((table, write)) = grads.get(0, 0) {
                    cx.ops.embedding_backward(table, write, dy, &batch.ids, c, &cx.workspace, cx.stream)?;
                    if let Some(pad) = self.arch.pad_token_id {
                        // As torch.nn.Embedding with padding_idx: no gradient through the input (a tied head still trains the row).
                        cx.stream.fill(&table.slice(pad * c, c)?, 0.0)?;
                    }
                }
            }
            (Some(Some(block)), Some(x), Some(d)) => block.backward(cx, w, grads, d, dx.is_some(), x, acts, batch)?,
            (Some(None), Some(x), None) => {
                let head = w.get(self.head.0, self.head.1)?.clone().into();
                let (norm, dnorm) = (w.get(0, 0)?, grads.get(0, 0));
                let dn = &cx.scratch[0];
                let want = dx.is_some() || dnorm.is_some();
                let (dw, scale) = (grads.get(self.head.0, self.head.1), batch.grad_scale);
                cx.ops.linear_cross_entropy(
                    &batch.loss,
                    want.then_some(dn),
                    dw,
                    &acts[0],
                    &head,
                    &batch.labels,
                    scale,
                    n,
                    c,
                    v,
                    &cx.workspace,
                    cx.stream,
                )?;
                if want {
                    let dx = dx.map(|d| (d, Write::Set));
                    cx.ops.rmsnorm_backward(dx, dnorm, dn, x, &acts[1], norm, n, c, &cx.workspace, cx.stream)?;
                }
            }
            _ => return Err(Error::Model(format!("backward of visit {visit}: input and output do not fit its place"))),
        }
        Ok(())
    }
}
