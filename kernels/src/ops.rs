//! The contract of the maths: every operation of a decoder, forward beside backward, each followed by the sizes of its operands.
//!
//! Legend: `N` tokens (rows), `C` hidden, `I` inputs, `O` outputs, `F` mlp, `H` heads, `K` kv heads, `D` head dim,
//! `V` vocabulary, `R` LoRA rank. All matrices are dense and row-major. A storage type is `f32` or `bf16` ("float");
//! accumulation is in `f32`. Within one call all activations and weights share one storage type, adapters, gradients of
//! weights, statistics and losses are `f32`.
//!
//! Rules: outputs first, then inputs, numbers, stream. Operations never allocate and never synchronize; scratch is sized by
//! [`Ops::workspace_bytes`] and passed in (dtype `U8`, at least that long). Operands must not overlap unless said so. A result does not depend on the number of threads.
//! Gradients are `Option`: a frozen weight passes `None` and costs nothing. Lengths are checked before anything is enqueued.

use crate::{Result, Stream, View, ViewMut};

/// Whether a result replaces what is there or is added to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Write {
    /// Overwrite.
    Set,
    /// Add to what is there (sum in f32, rounded once to the storage type).
    Add,
}

/// A weight matrix. Devices pack what they need of it within each call: docs/performance.md says what a packed copy would save.
#[derive(Clone, Debug)]
pub struct Weight {
    /// `[O, I]`, row-major.
    pub view: View,
}

impl From<View> for Weight {
    fn from(view: View) -> Self {
        Weight { view }
    }
}

/// Attention geometry. `scale` multiplies q.k; documents are given by cumulative lengths.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attention {
    /// Query heads `H`; a multiple of `kv_heads`.
    pub heads: usize,
    /// Key and value heads `K`; query head h reads kv head `h / (H / K)`.
    pub kv_heads: usize,
    /// Head dimension `D`, even.
    pub head_dim: usize,
    /// Sliding window: a query at position p sees keys in `(p - window, p]` of its document. `None`: all before it.
    pub window: Option<usize>,
    /// Multiplies the scores before the softmax, `1 / sqrt(D)` in all models here.
    pub scale: f32,
}

/// Dropout by counter-based random numbers: recomputed in backward, never stored, the same bits on every device.
/// Element `e` of the input of adapter `site` is kept iff `philox(seed, step, micro_batch, site, e) >= p`; kept values are scaled by `1 / (1 - p)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropout {
    /// Probability of dropping, in `[0, 1)`.
    pub p: f32,
    /// Run seed.
    pub seed: u64,
    /// Optimizer step.
    pub step: u32,
    /// Global index of the micro-batch within the step.
    pub micro_batch: u32,
}

/// One adapter of [`Ops::lora`].
#[derive(Clone, Debug)]
pub struct LoraForward {
    /// `[N, O]` float: the base layer's output; `scale * drop(x) A^T B^T` is added to it. Best f32: added to a bf16 number, a small
    /// update is rounded away.
    pub y: ViewMut,
    /// `[N, R]` f32: receives `drop(x) A^T`, needed by backward.
    pub t: ViewMut,
    /// `[R, I]` f32.
    pub a: View,
    /// `[O, R]` f32.
    pub b: View,
    /// `alpha / r`, or `alpha / sqrt(r)`.
    pub scale: f32,
    /// `O`.
    pub outputs: usize,
    /// `R`.
    pub rank: usize,
    /// Which adapter this is in the whole model: the dropout key.
    pub site: u32,
}

/// One adapter of [`Ops::lora_backward`].
#[derive(Clone, Debug)]
pub struct LoraBackward {
    /// `[R, I]` f32 gradient of A.
    pub da: ViewMut,
    /// `[O, R]` f32 gradient of B.
    pub db: ViewMut,
    /// How `da` and `db` are written.
    pub write: Write,
    /// `[N, O]` float: gradient of the layer's output.
    pub dy: View,
    /// `[N, R]` f32 from forward.
    pub t: View,
    /// `[R, I]` f32.
    pub a: View,
    /// `[O, R]` f32.
    pub b: View,
    /// As in forward.
    pub scale: f32,
    /// `O`.
    pub outputs: usize,
    /// `R`.
    pub rank: usize,
    /// As in forward.
    pub site: u32,
}

/// A frozen layer and its adapter: one of [`Ops::adapted_linear`].
#[derive(Clone, Debug)]
pub struct AdaptedLinear {
    /// `[N, O]` float: the output.
    pub y: ViewMut,
    /// How it is written.
    pub write: Write,
    /// `[O, I]`.
    pub w: Weight,
    /// `[O]`.
    pub bias: Option<View>,
    /// The adapter. Its `y` is a place for the sum until it is rounded, best f32, or the output itself.
    pub lora: LoraForward,
}

/// Hyper-parameters of one AdamW update (Loshchilov & Hutter 2019, as `torch.optim.AdamW` computes it).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Learning rate of this step.
    pub lr: f32,
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the denominator.
    pub eps: f32,
    /// Decoupled weight decay.
    pub weight_decay: f32,
    /// Number of this update, from 1 on, for bias correction.
    pub step: u64,
}

/// Sizes for which [`Ops::workspace_bytes`] is asked.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum OpShape {
    /// [`Ops::rmsnorm_backward`].
    RmsNormBackward {
        /// Rows.
        rows: usize,
        /// Columns.
        cols: usize,
    },
    /// [`Ops::linear_backward`].
    LinearBackward {
        /// `N`.
        tokens: usize,
        /// `I`.
        inputs: usize,
        /// `O`.
        outputs: usize,
    },
    /// [`Ops::lora`] and [`Ops::lora_backward`] over adapters whose largest rank is `rank` and largest output is `outputs`.
    Lora {
        /// `N`.
        tokens: usize,
        /// `I`.
        inputs: usize,
        /// Largest `O`.
        outputs: usize,
        /// Largest `R`.
        rank: usize,
        /// Adapters that share the input.
        adapters: usize,
    },
    /// [`Ops::attention`] and [`Ops::attention_backward`].
    Attention {
        /// `N`.
        tokens: usize,
        /// Geometry.
        shape: Attention,
    },
    /// [`Ops::linear_cross_entropy`].
    LinearCrossEntropy {
        /// `N`.
        tokens: usize,
        /// `C`.
        hidden: usize,
        /// `V`.
        vocab: usize,
    },
    /// [`Ops::embedding_backward`].
    EmbeddingBackward {
        /// `N`.
        tokens: usize,
        /// `C`.
        hidden: usize,
        /// `V`.
        vocab: usize,
    },
    /// [`Ops::sum_squares`].
    SumSquares {
        /// Elements.
        elems: usize,
    },
}

/// Slots of a [`Ops::sum_squares`] result: node `level` left and right of the aligned tree, for 48 levels.
pub const SUM_SQUARES_NODES: usize = 96;

/// Elements of one chunk of [`Ops::sum_squares`]; shard boundaries are multiples of it.
pub const SUM_SQUARES_CHUNK: usize = 1024;

/// Every operation, forward beside backward. Implementations: `cpu::CpuOps`, `sim::SimOps`.
#[allow(clippy::too_many_arguments)]
pub trait Ops: Send + Sync {
    /// Scratch bytes that the operation needs for these sizes.
    fn workspace_bytes(&self, shape: OpShape) -> usize;

    /// `y[n] = table[ids[n]]`. `y [N,C]`, `table [V,C]` float, `ids [N]` i32 (out of `0..V` fails the stream).
    fn embedding(&self, y: &ViewMut, table: &View, ids: &View, hidden: usize, s: &dyn Stream) -> Result<()>;
    /// `dtable[ids[n]] += dy[n]` in token order. `dtable [V,C]` f32 (`Set` clears it first), `dy [N,C]` float.
    fn embedding_backward(
        &self,
        dtable: &ViewMut,
        write: Write,
        dy: &View,
        ids: &View,
        hidden: usize,
        workspace: &ViewMut,
        s: &dyn Stream,
    ) -> Result<()>;

    /// RMSNorm (Zhang & Sennrich 2019): `y = x * rstd * weight`, `rstd = 1/sqrt(mean(x^2) + eps)`.
    /// `y, x [rows, cols]` float, `rstd [rows]` f32 out, `weight [cols]` float. Per-head q/k norm: `rows = N*H`, `cols = D`. `y` may be `x`.
    fn rmsnorm(
        &self,
        y: &ViewMut,
        rstd: &ViewMut,
        x: &View,
        weight: &View,
        eps: f32,
        rows: usize,
        cols: usize,
        s: &dyn Stream,
    ) -> Result<()>;
    /// `dx [rows, cols]` float; `dweight [cols]` f32. `dx` may be `dy` with `Set`.
    fn rmsnorm_backward(
        &self,
        dx: Option<(&ViewMut, Write)>,
        dweight: Option<(&ViewMut, Write)>,
        dy: &View,
        x: &View,
        rstd: &View,
        weight: &View,
        rows: usize,
        cols: usize,
        workspace: &ViewMut,
        s: &dyn Stream,
    ) -> Result<()>;

    /// `y = x W^T + bias` (or added to `y`). `y [N,O]`, `x [N,I]`, `w [O,I]`, `bias [O]`, all float of one type; `y` may be f32 where the
    /// others are bf16: a sum that will be rounded once, later.
    fn linear(
        &self,
        y: &ViewMut,
        write: Write,
        x: &View,
        w: &Weight,
        bias: Option<&View>,
        tokens: usize,
        inputs: usize,
        outputs: usize,
        s: &dyn Stream,
    ) -> Result<()>;
    /// `dx = dy W` `[N,I]` float; `dw = dy^T x` `[O,I]` f32; `dbias = sum_n dy` `[O]` f32. `x` may be `None` where `dw` is.
    fn linear_backward(
        &self,
        dx: Option<(&ViewMut, Write)>,
        dw: Option<(&ViewMut, Write)>,
        dbias: Option<(&ViewMut, Write)>,
        dy: &View,
        x: Option<&View>,
        w: &Weight,
        tokens: usize,
        inputs: usize,
        outputs: usize,
        workspace: &ViewMut,
        s: &dyn Stream,
    ) -> Result<()>;

    /// LoRA (Hu et al. 2021) of several adapters that share `x [N,I]` float: for each, `t = drop(x) A^T`, `y += scale * t B^T`.
    fn lora(
        &self,
        adapters: &[LoraForward],
        x: &View,
        dropout: Option<Dropout>,
        tokens: usize,
        inputs: usize,
        workspace: &ViewMut,
        s: &dyn Stream,
    ) -> Result<()>;
    /// For each adapter: `db = scale * dy^T t`, `dt = scale * dy B`, `da = dt^T drop(x)`, `dx += drop'(dt A)`; `dx [N,I]` float is always added to.
    fn lora_backward(
        &self,
        dx: Option<&ViewMut>,
        adapters: &[LoraBackward],
        x: &View,
        dropout: Option<Dropout>,
        tokens: usize,
        inputs: usize,
        workspace: &ViewMut,
        s: &dyn Stream,
    ) -> Result<()>;

    /// Layers that share `x [N,I]`, with their adapters: `y = x W^T + bias + scale * drop(x) A^T B^T`, set or added, and each adapter's `t`.
    /// Devices that can sum both products at once round once and need no place for the sum; the rest compose [`Ops::linear`] and
    /// [`Ops::lora`].
    fn adapted_linear(
        &self,
        layers: &[AdaptedLinear],
        x: &View,
        dropout: Option<Dropout>,
        tokens: usize,
        inputs: usize,
        workspace: &ViewMut,
        s: &dyn Stream,
    ) -> Result<()> {
        composed::adapted_linear(self, layers, x, dropout, tokens, inputs, workspace, s)
    }
    /// Gradients of [`Ops::adapted_linear`]: `dx = sum of dy W + drop'(dt A)` over the layers, set or added, and those of the adapters
    /// as [`Ops::lora_backward`] gives them.
    fn adapted_linear_backward(
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
        composed::adapted_linear_backward(self, dx, layers, x, dropout, tokens, inputs, workspace, s)
    }

    /// Rotary embedding (Su et al. 2021), in place, rotate-half layout: dimension `i` pairs with `i + D/2`.
    /// `x [N, heads*D]` float, `table [P, D]` f32: row p holds `D/2` cosines, then `D/2` sines; `positions [N]` i32 in `0..P`.
    fn rope(&self, x: &ViewMut, table: &View, positions: &View, heads: usize, head_dim: usize, s: &dyn Stream) -> Result<()>;
    /// The transposed rotation of the gradient, in place. Tables may carry a factor (yarn); backward multiplies by it too.
    fn rope_backward(&self, dx: &ViewMut, table: &View, positions: &View, heads: usize, head_dim: usize, s: &dyn Stream) -> Result<()>;

    /// Causal grouped-query attention over packed documents, tiled with an online softmax (Dao 2023): never an `N x N` matrix.
    /// `o, q [N, H*D]`, `k, v [N, K*D]` float, `lse [N, H]` f32 out. `cu_seqlens [N+1]` i32: entries `0..=documents` are the
    /// boundaries, ascending from 0 to N; the rest is ignored.
    fn attention(
        &self,
        o: &ViewMut,
        lse: &ViewMut,
        q: &View,
        k: &View,
        v: &View,
        cu_seqlens: &View,
        documents: usize,
        tokens: usize,
        shape: Attention,
        workspace: &ViewMut,
        s: &dyn Stream,
    ) -> Result<()>;
    /// `dq [N,H*D]`, `dk, dv [N,K*D]` float, overwritten.
    fn attention_backward(
        &self,
        dq: &ViewMut,
        dk: &ViewMut,
        dv: &ViewMut,
        dout: &View,
        q: &View,
        k: &View,
        v: &View,
        o: &View,
        lse: &View,
        cu_seqlens: &View,
        documents: usize,
        tokens: usize,
        shape: Attention,
        workspace: &ViewMut,
        s: &dyn Stream,
    ) -> Result<()>;

    /// SwiGLU (Shazeer 2020): `h = silu(gate) * up`, all `[elems]` float. `h` may be `gate`.
    fn swiglu(&self, h: &ViewMut, gate: &View, up: &View, s: &dyn Stream) -> Result<()>;
    /// `dgate`, `dup` may be `gate`, `up` in place; `dh` may be either too.
    fn swiglu_backward(&self, dgate: &ViewMut, dup: &ViewMut, dh: &View, gate: &View, up: &View, s: &dyn Stream) -> Result<()>;

    /// Output head and cross entropy in chunks of tokens: never all logits in memory.
    /// `loss [N]` f32: `-log softmax(x W^T)[label]`, 0 where `labels [N]` i32 is negative (any negative is "not trained").
    /// If asked, gradients of `grad_scale * sum(loss)`: `dx [N,C]` float (overwritten, may be `x`), `dw [V,C]` f32. `x [N,C]`, `w [V,C]` float.
    fn linear_cross_entropy(
        &self,
        loss: &ViewMut,
        dx: Option<&ViewMut>,
        dw: Option<(&ViewMut, Write)>,
        x: &View,
        w: &Weight,
        labels: &View,
        grad_scale: f32,
        tokens: usize,
        hidden: usize,
        vocab: usize,
        workspace: &ViewMut,
        s: &dyn Stream,
    ) -> Result<()>;

    /// `out[0] = sum(x)` in a fixed order. `out [1]`, `x [elems]` f32.
    fn sum(&self, out: &ViewMut, x: &View, s: &dyn Stream) -> Result<()>;
    /// `out = a + b`, f32, same lengths; `out` may be either.
    fn add(&self, out: &ViewMut, a: &View, b: &View, s: &dyn Stream) -> Result<()>;
    /// `y += x`, float of one type, same lengths (residual and its gradient); `x` may be f32 where `y` is bf16.
    fn add_into(&self, y: &ViewMut, x: &View, s: &dyn Stream) -> Result<()>;
    /// `x *= factor`, float.
    fn scale(&self, x: &ViewMut, factor: f32, s: &dyn Stream) -> Result<()>;
    /// Converts between `f32` and `bf16` (round to nearest even), or copies.
    fn cast(&self, dst: &ViewMut, src: &View, s: &dyn Stream) -> Result<()>;
    /// `out[0] =` number of elements of `x` (float) that are NaN or infinite, as f32.
    fn count_nonfinite(&self, out: &ViewMut, x: &View, s: &dyn Stream) -> Result<()>;

    /// Sum of squares as the maximal aligned nodes of a binary tree over chunks of 1024 elements, so that any split at chunk
    /// boundaries combines to the same bits. `x` f32 starts at chunk `first_chunk` of its segment. `nodes [96]` f32:
    /// unused slots 0. Node slots: `2*level` for a node that is a right child (sits at the left end of the range), `2*level+1` else.
    fn sum_squares(&self, nodes: &ViewMut, x: &View, first_chunk: usize, workspace: &ViewMut, s: &dyn Stream) -> Result<()>;
    /// Combines the nodes of all ranks and segments to `norm[0] = sqrt(total)` and `scale[0]`, the clipping factor of
    /// `torch.nn.utils.clip_grad_norm_`: `min(1, max_norm / (norm + 1e-6))`, 1 without `max_norm`, NaN when the norm is not finite.
    /// `nodes [ranks, segments, 96]` f32; the nodes of one segment are merged up the tree in the order of ranks (a slot may
    /// hold a node of each rank), segments are then added in order. `ranges [ranks, segments, 2]` gives (first chunk, chunks) of each, on the host.
    fn clip_scale(
        &self,
        norm: &ViewMut,
        scale: &ViewMut,
        nodes: &View,
        ranges: &[(u64, u64)],
        ranks: usize,
        segments: usize,
        max_norm: Option<f32>,
        s: &dyn Stream,
    ) -> Result<()>;

    /// AdamW with decoupled decay, as a fixed sequence of correctly rounded operations without fused multiply-add:
    /// `g' = g*scale + 0`, `p -= p*lr*wd`, `m = b1*m + (1-b1)*g'`, `v = b2*v + (1-b2)*g'^2`, `p -= (lr/bc1) * m / (sqrt(v)/sqrt(bc2) + eps)`.
    /// `param, m, v, g [elems]` f32, `scale [1]` f32 (NaN: nothing is changed), `copy_out [elems]` bf16 or f32 receives the new weights.
    fn adamw(
        &self,
        param: &ViewMut,
        m: &ViewMut,
        v: &ViewMut,
        copy_out: Option<&ViewMut>,
        g: &View,
        scale: &View,
        hp: AdamW,
        s: &dyn Stream,
    ) -> Result<()>;
}

/// Operations made of others, for devices that have nothing better.
pub mod composed {
    use super::*;

    /// [`Ops::adapted_linear`].
    #[allow(clippy::too_many_arguments)]
    pub fn adapted_linear<O: Ops + ?Sized>(
        ops: &O,
        layers: &[AdaptedLinear],
        x: &View,
        dropout: Option<Dropout>,
        tokens: usize,
        inputs: usize,
        workspace: &ViewMut,
        s: &dyn Stream,
    ) -> Result<()> {
        for l in layers {
            let write = if apart(l) { Write::Set } else { l.write };
            ops.linear(&l.lora.y, write, x, &l.w, l.bias.as_ref(), tokens, inputs, l.lora.outputs, s)?;
        }
        let adapters: Vec<LoraForward> = layers.iter().map(|l| l.lora.clone()).collect();
        ops.lora(&adapters, x, dropout, tokens, inputs, workspace, s)?;
        for l in layers.iter().filter(|l| apart(l)) {
            match l.write {
                Write::Set => ops.cast(&l.y, &l.lora.y, s)?,
                Write::Add => ops.add_into(&l.y, &l.lora.y, s)?,
            }
        }
        Ok(())
    }

    /// Whether the sum stands in a place of its own.
    fn apart(l: &AdaptedLinear) -> bool {
        l.lora.y.span() != l.y.span()
    }

    /// [`Ops::adapted_linear_backward`].
    #[allow(clippy::too_many_arguments)]
    pub fn adapted_linear_backward<O: Ops + ?Sized>(
        ops: &O,
        dx: Option<(&ViewMut, Write)>,
        layers: &[(Weight, LoraBackward)],
        x: &View,
        dropout: Option<Dropout>,
        tokens: usize,
        inputs: usize,
        workspace: &ViewMut,
        s: &dyn Stream,
    ) -> Result<()> {
        if let Some((dx, write)) = dx {
            for (i, (w, ad)) in layers.iter().enumerate() {
                let write = if i == 0 { write } else { Write::Add };
                ops.linear_backward(Some((dx, write)), None, None, &ad.dy, None, w, tokens, inputs, ad.outputs, workspace, s)?;
            }
        }
        let adapters: Vec<LoraBackward> = layers.iter().map(|l| l.1.clone()).collect();
        ops.lora_backward(dx.map(|d| d.0), &adapters, x, dropout, tokens, inputs, workspace, s)
    }
}
