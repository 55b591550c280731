//! Logits of the runtime: a decoder that, when it evaluates, also multiplies the normed hidden states with the head into a buffer of
//! its own. The product never holds all logits, so tests and the PEFT check ask through this wrapper, by public interfaces alone.

use crate::{Subject, device, on_ranks, shape};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use zrt::data::HostBatch;
use zrt::engine::{Engine, EngineOptions};
use zrt::error::{Error, Result};
use zrt::model::decoder::Decoder;
use zrt::model::{Batch, BatchShape, Cx, Grads, Model, Params, Pass, VisitSpec};
use zrt::plan::UnitSpec;
use zrt_collectives::Comm;
use zrt_kernels::cpu::Mode;
use zrt_kernels::{Category, DType, Device, Ops, Place, Readback, View, ViewMut, Write};

/// A decoder that keeps the logits `[N, V]` of its last evaluation.
pub struct Logits {
    decoder: Decoder,
    buffer: ViewMut,
    last: Mutex<Option<Readback>>,
}

impl Logits {
    /// Wraps `decoder`; the buffer is `shape.tokens` x vocabulary elements of the compute type on `device`.
    pub fn new(decoder: Decoder, shape: BatchShape, device: &dyn Device) -> Logits {
        let bytes = shape.tokens * decoder.arch().vocab * shape.compute.bytes();
        let buffer = device.alloc("logits", bytes, Place::Device, Category::Workspace).unwrap().all(shape.compute).unwrap();
        Logits { decoder, buffer, last: Mutex::new(None) }
    }

    fn head<'a>(&self, w: &'a Params) -> Result<&'a View> {
        if self.decoder.arch().tie_word_embeddings { w.get(1, 0) } else { w.get(0, 1) }
    }

    /// The logits of the last evaluation, `[N, V]`.
    pub fn take(&self) -> Vec<f32> {
        let readback = self.last.lock().unwrap().take().expect("nothing was evaluated");
        let patience = Duration::from_secs(60);
        match self.buffer.dtype() {
            DType::F32 => readback.f32s(patience).unwrap(),
            _ => {
                let bytes = readback.bytes(patience).unwrap();
                bytes.chunks_exact(2).map(|b| half::bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect()
            }
        }
    }
}

impl Model for Logits {
    fn units(&self) -> Vec<UnitSpec> {
        self.decoder.units()
    }

    fn visits(&self, shape: BatchShape, ops: &dyn Ops) -> Vec<VisitSpec> {
        self.decoder.visits(shape, ops)
    }

    fn tables(&self) -> Vec<Vec<f32>> {
        self.decoder.tables()
    }

    fn forward(&self, cx: &Cx, visit: usize, w: &Params, y: Option<&ViewMut>, x: Option<&View>, acts: &[ViewMut], b: &Batch) -> Result<()> {
        self.decoder.forward(cx, visit, w, y, x, acts, b)?;
        if y.is_none() && cx.pass == Pass::Eval {
            let (n, arch) = (b.ids.elems(), self.decoder.arch());
            let head = self.head(w)?.clone().into();
            cx.ops.linear(&self.buffer, Write::Set, &acts[0], &head, None, n, arch.hidden, arch.vocab, cx.stream)?;
            let readback = cx.stream.read(&self.buffer)?;
            *self.last.lock().map_err(|_| Error::Model("a reader of the logits panicked".into()))? = Some(readback);
        }
        Ok(())
    }

    fn backward(
        &self,
        cx: &Cx,
        visit: usize,
        w: &Params,
        g: &Grads,
        dx: Option<&ViewMut>,
        dy: Option<&ViewMut>,
        x: Option<&View>,
        acts: &[ViewMut],
        b: &Batch,
    ) -> Result<()> {
        self.decoder.backward(cx, visit, w, g, dx, dy, x, acts, b)
    }
}

/// An engine over `subject` whose evaluations keep their logits.
pub fn engine_with_logits(subject: &Subject, options: EngineOptions, comm: Comm) -> (Engine, Arc<Logits>) {
    let device = device(1, Mode::Threaded);
    let (decoder, source) = subject.decoder(options.shape.seq_len);
    let model = Arc::new(Logits::new(decoder, options.shape, &*device));
    let mut engine = Engine::new(device, comm, model.clone(), options).unwrap();
    engine.load(&source).unwrap();
    (engine, model)
}

/// Token losses `[N]` and logits `[N, V]` of one micro-batch.
pub fn evaluate(engine: &mut Engine, model: &Logits, batch: &HostBatch) -> (Vec<f32>, Vec<f32>) {
    let losses = engine.token_losses(batch.clone()).unwrap();
    (losses, model.take())
}

/// Logits `[ids, V]` of one sequence in f32, on one rank, without training.
pub fn logits_of(subject: &Subject, ids: &[i64]) -> Vec<f32> {
    let batch = crate::rows(ids, ids, ids.len());
    let all = on_ranks(1, true, |comm| {
        let (mut engine, model) = engine_with_logits(subject, EngineOptions::new(shape(1, ids.len(), DType::F32), 1), comm);
        evaluate(&mut engine, &model, &batch).1
    });
    all.into_iter().next().unwrap()
}

/// Largest absolute difference.
pub fn max_diff(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(x, y)| (x - y).abs()).fold(0.0, |m, d| if d.is_nan() { f32::INFINITY } else { m.max(d) })
}
