//! Shared by the integration tests: golden data, ranks as threads, engines over small models.

pub mod logits;
pub mod processes;
pub mod tiny;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use zrt::checkpoint::Kind;
use zrt::data::HostBatch;
use zrt::engine::{Engine, EngineOptions, StepInput, StepOutput};
use zrt::hf::{ArchConfig, Weights};
use zrt::model::decoder::{AdapterSpec, Decoder};
use zrt::model::{BatchShape, Model};
use zrt::peft::load_adapter;
use zrt::source::Sources;
use zrt::store::WeightSource;
use zrt_collectives::Comm;
use zrt_collectives::local::{LocalGroup, LocalOptions};
use zrt_kernels::cpu::{CpuDevice, CpuOptions, Mode};
use zrt_kernels::{AdamW, DType, Device};

/// Folder of golden data, or a file in it.
pub fn golden(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("golden").join(path)
}

/// SmolLM2-135M, if it was made; tests that need it print "not run" otherwise.
pub fn smollm2() -> Option<PathBuf> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/smollm2-135m");
    dir.join("model.safetensors").is_file().then_some(dir)
}

/// A golden JSON file.
pub fn json(path: &str) -> serde_json::Value {
    let path = golden(path);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).unwrap()
}

/// An i64 tensor of a golden safetensors file: (shape, values).
pub fn ids(path: &str, name: &str) -> (Vec<usize>, Vec<i64>) {
    let bytes = std::fs::read(golden(path)).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let t = file.tensor(name).unwrap();
    let values = t.data().chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap())).collect();
    (t.shape().to_vec(), values)
}

/// All f32 tensors of a safetensors file.
pub fn tensors(path: &Path) -> HashMap<String, Vec<f32>> {
    let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let f32s = file.iter().filter(|(_, t)| t.dtype() == safetensors::Dtype::F32);
    f32s.map(|(n, t)| (n.to_string(), t.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect())).collect()
}

/// `|a - b| / |b|` in L2.
pub fn rel_l2(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let d: f64 = a.iter().zip(b).map(|(x, y)| (f64::from(*x) - f64::from(*y)).powi(2)).sum();
    let n: f64 = b.iter().map(|y| f64::from(*y).powi(2)).sum();
    if n == 0.0 { d.sqrt() } else { (d / n).sqrt() }
}

/// Rows of one micro-batch, each its own document; `labels[i]` is the label *of* token i (`-100`: untrained), shifted here.
pub fn rows(ids: &[i64], labels: &[i64], seq: usize) -> HostBatch {
    let n = ids.len();
    let shifted = (0..n).map(|i| if i % seq + 1 < seq { labels[i + 1] as i32 } else { -100 });
    let labels: Vec<i32> = shifted.collect();
    let documents = n / seq;
    let mut cu_seqlens = vec![n as i32; n + 1];
    for (d, c) in cu_seqlens.iter_mut().take(documents).enumerate() {
        *c = (d * seq) as i32;
    }
    HostBatch {
        ids: ids.iter().map(|&i| i as i32).collect(),
        trained: labels.iter().filter(|l| **l >= 0).count() as u64,
        labels,
        positions: (0..n).map(|i| (i % seq) as i32).collect(),
        cu_seqlens,
        documents,
        tokens: n as u64,
        samples: Vec::new(),
    }
}

/// A model of a test: folder, and the adapter to start from.
#[derive(Clone)]
pub struct Subject {
    /// Hugging Face folder.
    pub folder: PathBuf,
    /// PEFT folder; `None`: full training.
    pub adapter: Option<PathBuf>,
    /// Dropout of LoRA.
    pub dropout: f32,
    /// New adapters of this rank on all linear layers.
    pub fresh_rank: Option<usize>,
}

impl Subject {
    /// Full training of `folder`.
    pub fn full(folder: PathBuf) -> Subject {
        Subject { folder, adapter: None, dropout: 0.0, fresh_rank: None }
    }

    /// LoRA from an adapter folder.
    pub fn lora(folder: PathBuf, adapter: PathBuf) -> Subject {
        Subject { folder, adapter: Some(adapter), dropout: 0.0, fresh_rank: None }
    }

    /// LoRA from new adapters on all linear layers, with dropout.
    pub fn fresh_lora(folder: PathBuf, rank: usize, dropout: f32) -> Subject {
        Subject { folder, adapter: None, dropout, fresh_rank: Some(rank) }
    }

    /// The model and where its weights come from.
    pub fn open(&self, seq: usize) -> (Arc<dyn Model>, Arc<dyn WeightSource>) {
        let (decoder, source) = self.decoder(seq);
        (Arc::new(decoder), source)
    }

    /// The same, as the concrete model.
    pub fn decoder(&self, seq: usize) -> (Decoder, Arc<dyn WeightSource>) {
        let arch = ArchConfig::load(&self.folder).unwrap();
        let weights = Arc::new(Weights::open(&self.folder).unwrap());
        let adapter = self.adapter.as_ref().map(|dir| load_adapter(dir, &arch).unwrap());
        let loaded = adapter.as_ref().map(|a| {
            let specs = a.plan.targets.iter().map(|t| AdapterSpec { module: t.path.clone(), rank: t.r, scale: t.scale });
            specs.collect::<Vec<_>>()
        });
        let fresh = self.fresh_rank.map(|rank| {
            let specs = arch.linear_modules().into_iter().map(|m| AdapterSpec { module: m.path, rank, scale: 2.0 });
            specs.collect::<Vec<_>>()
        });
        let specs = loaded.or(fresh);
        let model = Decoder::new(arch, seq, specs.as_deref(), self.dropout).unwrap();
        let sources = Sources { base: Some(weights), adapter: adapter.map(|a| Arc::new(a.weights)), seed: 1, ..Sources::default() };
        (model, Arc::new(sources))
    }
}

/// A CPU device for a test.
pub fn device(threads: usize, mode: Mode) -> Arc<dyn Device> {
    let track = matches!(mode, Mode::Chaos { .. });
    CpuDevice::new(CpuOptions { threads, mode, track, trace: false }).unwrap()
}

/// Runs `body` on `ranks` ranks as threads and returns their results in rank order. A panic of one aborts all.
pub fn on_ranks<T: Send>(ranks: usize, share_pages: bool, body: impl Fn(Comm) -> T + Sync) -> Vec<T> {
    let options = LocalOptions { share_pages, train_timeout: std::time::Duration::from_secs(60), ..LocalOptions::default() };
    let comms = LocalGroup::threads(ranks, options).unwrap();
    std::thread::scope(|scope| {
        let threads: Vec<_> = comms
            .into_iter()
            .map(|comm| {
                let body = &body;
                scope.spawn(move || {
                    let comm: Comm = comm;
                    let guard = comm.clone();
                    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| body(comm)));
                    if result.is_err() {
                        guard.abort("a rank of the test panicked");
                    }
                    result
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap().unwrap_or_else(|p| std::panic::resume_unwind(p))).collect()
    })
}

/// AdamW of the golden runs.
pub fn golden_adamw(lr: f64) -> AdamW {
    AdamW { lr: lr as f32, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01, step: 0 }
}

/// One engine on one rank, for golden comparisons.
pub fn engine(subject: &Subject, options: EngineOptions, comm: Comm, device: Arc<dyn Device>) -> Engine {
    let (model, source) = subject.open(options.shape.seq_len);
    let mut engine = Engine::new(device, comm, model, options).unwrap();
    engine.load(&source).unwrap();
    engine
}

/// Shape of `batch` rows of `seq` tokens.
pub fn shape(batch: usize, seq: usize, compute: DType) -> BatchShape {
    BatchShape { tokens: batch * seq, seq_len: seq, compute }
}

/// Trains on batches by step and micro-batch; the golden warm-up schedule `lr * min(1, s / 5)`.
pub fn train(engine: &mut Engine, steps: usize, lr: f64, batch: &dyn Fn(usize, usize) -> HostBatch) -> Vec<StepOutput> {
    let m = engine.options().micro_batches;
    (0..steps)
        .map(|s| {
            let trained: u64 = (0..m).map(|i| batch(s, i).trained).sum();
            let lr = lr * (s as f64 / 5.0).min(1.0);
            let input =
                StepInput { step: s as u64, hp: golden_adamw(lr), trained_tokens: trained, batch: &|i| Ok(Some(batch(s, i))), stop: false };
            engine.step(&input).unwrap()
        })
        .collect()
}

/// This rank's owned parts of trained parameters and state: (kind, name, first element) -> values.
pub fn state(engine: &mut Engine) -> HashMap<(Kind, String, usize), Vec<f32>> {
    let mut out = HashMap::new();
    engine
        .export_state(&mut |kind, name, start, values| {
            out.insert((kind, name.to_string(), start), values.to_vec());
            Ok(())
        })
        .unwrap();
    out
}

/// The parts of all ranks put together: (kind, name) -> values.
pub fn whole_state(parts: Vec<HashMap<(Kind, String, usize), Vec<f32>>>) -> std::collections::BTreeMap<(Kind, String), Vec<f32>> {
    let mut sorted: Vec<_> = parts.into_iter().flatten().collect();
    sorted.sort_by(|a, b| a.0.cmp(&b.0));
    let mut out: std::collections::BTreeMap<(Kind, String), Vec<f32>> = Default::default();
    for ((kind, name, start), values) in sorted {
        let all = out.entry((kind, name)).or_default();
        assert_eq!(all.len(), start, "pieces must follow each other");
        all.extend(values);
    }
    out
}
