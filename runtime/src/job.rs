//! Everything of a run that is the same on all ranks and needs no device: model, adapters, data, batch arithmetic.

use crate::checkpoint::BaseId;
use crate::config::{CheckpointMode, ComputeType, Config, ModelInit, OffloadDevice, ResidentBytes, Resolved};
use crate::data::{self, HostBatch, Length, PrepareSpec, Schedule, ScheduleSpec};
use crate::engine::EngineOptions;
use crate::error::{Error, Result};
use crate::hf::{ArchConfig, Weights, folder};
use crate::model::decoder::{AdapterSpec, Decoder};
use crate::model::{BatchShape, Model};
use crate::peft::{LoraPlan, load_adapter};
use crate::source::Sources;
use std::path::PathBuf;
use std::sync::Arc;
use zrt_kernels::DType;

/// The model of a run, known without its weights.
pub struct ModelPart {
    /// Its folder.
    pub folder: PathBuf,
    /// Its configuration.
    pub arch: ArchConfig,
    /// The maths.
    pub model: Arc<dyn Model>,
    /// Adapters; `None` when all weights are trained.
    pub lora: Option<LoraPlan>,
}

/// A run, opened.
pub struct Job {
    /// The configuration.
    pub config: Config,
    /// The model.
    pub model: ModelPart,
    /// Batch arithmetic.
    pub batch: Resolved,
    /// Training data in order.
    pub schedule: Schedule,
    /// Held-out data: one micro-batch a step.
    pub eval: Option<Schedule>,
    /// Base weights and the adapter to continue from.
    pub sources: Sources,
    /// Identity of the base.
    pub base: BaseId,
}

/// A user's mistake, from any of the parts.
pub fn input(e: impl std::fmt::Display) -> Error {
    Error::Input(e.to_string())
}

impl ModelPart {
    /// Reads `config.json`, plans the adapters, builds the model.
    pub fn open(config: &Config) -> Result<ModelPart> {
        let folder = folder::resolve(&config.model.path, None).map_err(input)?;
        let arch = ArchConfig::load(&folder).map_err(input)?;
        let lora = config.lora.as_ref().map(|l| LoraPlan::new(l, &arch)).transpose().map_err(input)?;
        let adapters: Option<Vec<AdapterSpec>> =
            lora.as_ref().map(|p| p.targets.iter().map(|t| AdapterSpec { module: t.path.clone(), rank: t.r, scale: t.scale }).collect());
        let dropout = lora.as_ref().map_or(0.0, |p| p.config.dropout as f32);
        let model = Decoder::new(arch.clone(), config.training.seq_len, adapters.as_deref(), dropout)?;
        Ok(ModelPart { folder, arch, model: Arc::new(model), lora })
    }
}

impl Job {
    /// Opens the model and the data (tokenizing unless cached; with a progress bar if `progress`).
    ///
    /// # Errors
    /// [`Error::Input`] for everything a user can mend: configuration, folders, files, data.
    pub fn open(config: &Config, ranks: usize, progress: bool) -> Result<Job> {
        let batch = config.resolve(ranks).map_err(input)?;
        let model = ModelPart::open(config)?;
        let prepare = |sets: &[crate::config::DatasetConfig]| -> Result<Arc<data::TokenSet>> {
            let mut set = data::prepare(&PrepareSpec::new(config, sets, &model.folder), progress).map_err(input)?;
            if set.max_id() as usize >= model.arch.vocab {
                return Err(Error::Input(format!(
                    "the data has token id {}, the model's vocabulary has {} entries: the tokenizer is not this model's",
                    set.max_id(),
                    model.arch.vocab
                )));
            }
            set.pad_within(model.arch.vocab);
            Ok(Arc::new(set))
        };
        if config.dataset.is_empty() {
            return Err(Error::Input("no data: add a [[dataset]] with path and type".into()));
        }
        let t = &config.training;
        let length = match (t.steps, t.epochs) {
            (Some(steps), _) => Length::Steps(steps),
            (None, epochs) => Length::Epochs(epochs.unwrap_or(1.0)),
        };
        let spec = ScheduleSpec {
            seq_len: t.seq_len,
            micro_batch_size: batch.micro_batch_size,
            global_batch_size: batch.global_batch_size,
            packing: config.data.packing,
            shuffle: config.data.shuffle,
            seed: t.seed,
            length,
        };
        let schedule = Schedule::new(prepare(&config.dataset)?, spec).map_err(input)?;
        let (warmup, steps) = (crate::lr::warmup_steps(&config.lr_scheduler, schedule.total_steps()), schedule.total_steps());
        if warmup >= steps {
            tracing::warn!("lr_scheduler: warm-up takes {warmup} of {steps} steps, so optimizer.lr is never reached");
        }
        let eval = if config.eval_dataset.is_empty() {
            None
        } else {
            let set = prepare(&config.eval_dataset)?;
            Some(Schedule::evaluation(set, t.seq_len, batch.micro_batch_size, config.data.packing).map_err(input)?)
        };
        let adapter = match &config.lora {
            Some(lora) if lora.adapter_path.is_some() => {
                let dir = lora.adapter_path.clone().unwrap_or_default();
                Some(Arc::new(load_adapter(&dir, &model.arch).map_err(input)?.weights))
            }
            _ => None,
        };
        let (base, weights) = match config.model.init {
            ModelInit::Random => (BaseId::random(&model.folder, t.seed).map_err(input)?, None),
            ModelInit::Pretrained => {
                let weights = Weights::open(&model.folder).map_err(input)?;
                weights.validate(&model.arch).map_err(input)?;
                (BaseId::of(&model.folder, &weights).map_err(input)?, Some(Arc::new(weights)))
            }
        };
        let sources = Sources { base: weights, adapter, seed: t.seed, ..Sources::default() };
        Ok(Job { config: config.clone(), model, batch, schedule, eval, sources, base })
    }

    /// The keys that must not change between a checkpoint and the run that continues it, by name.
    pub fn resume_keys(&self) -> serde_json::Value {
        let t = &self.config.training;
        let hex: String = self.schedule.set().fingerprint().iter().map(|b| format!("{b:02x}")).collect();
        let mut keys = serde_json::json!({
            "training.seed": t.seed,
            "training.seq_len": t.seq_len,
            "training.micro_batch_size": self.batch.micro_batch_size,
            "training.global_batch_size": self.batch.global_batch_size,
            "data.packing": self.config.data.packing,
            "data.shuffle": self.config.data.shuffle,
            "dataset": hex,
            "trained": if self.model.lora.is_some() { "adapters" } else { "all weights" },
        });
        // Key by key, so that only what differs is told.
        let lora = self.model.lora.as_ref().and_then(|l| serde_json::from_str(&l.config.to_json()).ok());
        if let (Some(keys), Some(serde_json::Value::Object(lora))) = (keys.as_object_mut(), lora) {
            keys.extend(lora.into_iter().map(|(k, v)| (format!("lora.{k}"), v)));
        }
        keys
    }

    /// Micro-batch `index` of `step`.
    pub fn micro_batch(&self, step: u64, index: usize) -> Result<Option<HostBatch>> {
        Ok(Some(self.schedule.batch(step, index)))
    }
}

/// How `config` runs on `batch.ranks` ranks.
///
/// # Errors
/// A key is `"auto"` still: [`crate::auto::choose`] comes before.
pub fn engine_options(config: &Config, batch: &Resolved) -> Result<EngineOptions> {
    let (t, z) = (&config.training, &config.zero);
    let unresolved = |key: &str| Error::Input(crate::config::unresolved(key));
    let compute = match config.precision.compute {
        ComputeType::Bf16 => DType::BF16,
        ComputeType::F32 => DType::F32,
    };
    let offloaded = |key: &str, device: OffloadDevice| match device {
        OffloadDevice::None => Ok(false),
        OffloadDevice::Cpu => Ok(true),
        OffloadDevice::Auto => Err(unresolved(key)),
    };
    Ok(EngineOptions {
        shape: BatchShape { tokens: batch.micro_batch_size * t.seq_len, seq_len: t.seq_len, compute },
        micro_batches: batch.micro_batches,
        group: batch.group,
        stage: z.stage.set().ok_or_else(|| unresolved("zero.stage"))?,
        offload_param: offloaded("zero.offload_param", z.offload_param.device)?,
        offload_optimizer: offloaded("zero.offload_optimizer", z.offload_optimizer.device)?,
        // Pages are of the host's memory; GPUs compute in their own.
        share_pages: config.comm.share_pages && !crate::device::uses_gpu(config),
        prefetch_depth: z.prefetch_depth,
        resident_bytes: match &z.resident_bytes {
            ResidentBytes::Bytes(b) => *b,
            auto if auto.is_auto() => return Err(unresolved("zero.resident_bytes")),
            ResidentBytes::Named(_) => u64::MAX,
        },
        recompute: match config.activation_checkpoint.mode {
            CheckpointMode::None => 0,
            CheckpointMode::Full => config.activation_checkpoint.layers.unwrap_or(usize::MAX),
            CheckpointMode::Auto => return Err(unresolved("activation_checkpoint.mode")),
        },
        deterministic: t.deterministic,
        max_grad_norm: (t.max_grad_norm > 0.0).then_some(t.max_grad_norm),
        seed: t.seed,
        poison: config.device.mode == "chaos",
    })
}
