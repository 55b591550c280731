//! The contract between a model and the engine. A model only does maths: it names its units and visits and enqueues
//! operations; the engine owns order, micro-batches, gathers, recomputation, and the sum of gradients.
//!
//! Implement [`Model`] for your own network or loss and train it with [`crate::engine::Engine`]; [`decoder`] is the
//! implementation for the Llama family.

pub mod block;
pub mod decoder;

use crate::error::{Error, Result};
use crate::plan::UnitSpec;
use zrt_kernels::{DType, Dropout, Ops, Stream, View, ViewMut};

/// Sizes that are the same for every micro-batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BatchShape {
    /// `N`: tokens of a micro-batch, padding included: `micro_batch_size * seq_len`.
    pub tokens: usize,
    /// Tokens of one sequence.
    pub seq_len: usize,
    /// Storage type of activations and base weights.
    pub compute: DType,
}

/// A tensor that a visit needs: an activation kept for backward, or scratch.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorSpec {
    /// Name for traces and the memory table.
    pub name: &'static str,
    /// Elements.
    pub elems: usize,
    /// Element type.
    pub dtype: DType,
}

/// A step of computation that opens units.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct VisitSpec {
    /// Name in tables, traces and errors.
    pub name: String,
    /// Units it opens, in the order in which `forward` and `backward` see them. Every trained parameter of
    /// these units gets its gradient in this visit's `backward`.
    pub units: Vec<usize>,
    /// Elements of its input (the previous visit's output); 0 for the first.
    pub input: usize,
    /// Elements of its output; 0 for the last.
    pub output: usize,
    /// Input and output gradients share one buffer: `backward` turns `dy` into `dx` in place.
    pub in_place: bool,
    /// Kept from forward to backward, for each micro-batch (or recomputed).
    pub acts: Vec<TensorSpec>,
    /// Used within one forward or backward only.
    pub scratch: Vec<TensorSpec>,
    /// Bytes of operation workspace.
    pub workspace_bytes: usize,
    /// Whether activation checkpointing may recompute it.
    pub recompute: bool,
    /// Useful floating-point operations of (forward, backward) of one micro-batch, for "share of peak".
    pub flops: (f64, f64),
}

/// Why `forward` runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// A `backward` follows. The last visit leaves the loss to its `backward`.
    Train,
    /// Only the loss is wanted: the last visit computes it in `forward`.
    Eval,
}

/// One micro-batch on the device.
#[derive(Clone, Debug)]
pub struct Batch {
    /// `[N]` i32 token ids.
    pub ids: View,
    /// `[N]` i32: the id to predict at each position, negative where nothing is trained.
    pub labels: View,
    /// `[N]` i32 positions within documents.
    pub positions: View,
    /// `[N+1]` i32 document boundaries, see [`Ops::attention`].
    pub cu_seqlens: View,
    /// Number of documents.
    pub documents: usize,
    /// `[N]` f32: receives the loss of each token (0 where untrained).
    pub loss: ViewMut,
    /// Gradients are of `grad_scale * sum(loss)`: 1 / trained tokens of the whole step.
    pub grad_scale: f32,
    /// Optimizer step and global index of the micro-batch: the dropout key.
    pub step: u32,
    /// See `step`.
    pub index: u32,
}

/// What operations need besides their operands.
pub struct Cx<'a> {
    /// The device's operations.
    pub ops: &'a dyn Ops,
    /// The compute stream.
    pub stream: &'a dyn Stream,
    /// Operation workspace, at least the visit's `workspace_bytes`.
    pub workspace: ViewMut,
    /// The visit's scratch tensors.
    pub scratch: &'a [ViewMut],
    /// The model's tables, in the order of [`Model::tables`].
    pub tables: &'a [View],
    /// Why forward runs.
    pub pass: Pass,
    /// Run seed.
    pub seed: u64,
}

impl Cx<'_> {
    /// The key of dropout with probability `p`; `None` in evaluation or without dropout.
    pub fn dropout(&self, p: f32, batch: &Batch) -> Option<Dropout> {
        (p > 0.0 && self.pass == Pass::Train).then_some(Dropout { p, seed: self.seed, step: batch.step, micro_batch: batch.index })
    }
}

/// The opened weights of a visit: `params[k][i]` is parameter i of the visit's k-th unit.
pub struct Params {
    pub(crate) views: Vec<Vec<View>>,
}

impl Params {
    /// Parameter `param` of the visit's `unit`-th unit.
    pub fn get(&self, unit: usize, param: usize) -> Result<&View> {
        let found = self.views.get(unit).and_then(|u| u.get(param));
        found.ok_or_else(|| Error::Model(format!("no parameter {param} in unit {unit} of the visit")))
    }
}

/// Where a visit's gradients go, f32, in the shape of the parameters. Write them with [`Grads::write`].
pub struct Grads {
    pub(crate) views: Vec<Vec<Option<ViewMut>>>,
    /// How to write: the engine decides whether micro-batches add up in place or in a tree.
    pub write: zrt_kernels::Write,
}

impl Grads {
    /// Of a visit that trains nothing.
    pub(crate) fn none(units: usize) -> Grads {
        Grads { views: vec![Vec::new(); units], write: zrt_kernels::Write::Set }
    }

    /// The gradient of parameter `param` of the visit's `unit`-th unit; `None` when it is frozen.
    pub fn get(&self, unit: usize, param: usize) -> Option<(&ViewMut, zrt_kernels::Write)> {
        self.views.get(unit)?.get(param)?.as_ref().map(|v| (v, self.write))
    }
}

/// A network the engine can train.
pub trait Model: Send + Sync {
    /// Storage: what is gathered together.
    fn units(&self) -> Vec<UnitSpec>;
    /// Computation, first to last. `ops` is asked for workspace sizes.
    fn visits(&self, shape: BatchShape, ops: &dyn Ops) -> Vec<VisitSpec>;
    /// Constant f32 tables to keep on the device (rotary embeddings).
    fn tables(&self) -> Vec<Vec<f32>> {
        Vec::new()
    }
    /// Enqueues the forward of `visit`: `x` is its input (`None` for the first), `y` its output (`None` for the last).
    #[allow(clippy::too_many_arguments)]
    fn forward(
        &self,
        cx: &Cx,
        visit: usize,
        w: &Params,
        y: Option<&ViewMut>,
        x: Option<&View>,
        acts: &[ViewMut],
        batch: &Batch,
    ) -> Result<()>;
    /// Enqueues the backward of `visit`. `dy` is the gradient of its output (`None` for the last), `dx` receives that of its
    /// input (`None` when nothing before it is trained); the same memory where `in_place`. Activations may be overwritten.
    #[allow(clippy::too_many_arguments)]
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
    ) -> Result<()>;
}
