//! The configuration: one TOML file, one struct. Section names follow torchtitan's last TOML schema, keys in `[zero]`
//! follow DeepSpeed, keys in `[lora]` follow PEFT.
//!
//! This file declares every key with its unit, effect and default. Unknown keys are errors. `load` reads a file and `--set`
//! overrides, `validate` finds what contradicts, `batch` does the arithmetic that needs the number of ranks.

mod auto;
mod batch;
mod foreign;
mod load;
mod paths;
mod problem;
mod schema;
mod source;
mod validate;

pub use auto::Auto;
pub use batch::Resolved;
pub(crate) use batch::unresolved;
pub use problem::{ConfigErrors, Place, Problem};

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// A whole run.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// The model to train.
    pub model: ModelConfig,
    /// LoRA adapters. Without this section all weights are trained.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lora: Option<LoraConfig>,
    /// Training data, concatenated.
    #[serde(default)]
    pub dataset: Vec<DatasetConfig>,
    /// Held-out data for the evaluation loss.
    #[serde(default)]
    pub eval_dataset: Vec<DatasetConfig>,
    /// How rows become samples.
    #[serde(default)]
    pub data: DataConfig,
    /// Steps, batch and sequence.
    pub training: TrainingConfig,
    /// The optimizer.
    #[serde(default)]
    pub optimizer: OptimizerConfig,
    /// The learning rate over time.
    #[serde(default)]
    pub lr_scheduler: LrSchedulerConfig,
    /// Storage and arithmetic types.
    #[serde(default)]
    pub precision: PrecisionConfig,
    /// Sharding and offload.
    #[serde(default)]
    pub zero: ZeroConfig,
    /// Which activations are kept.
    #[serde(default)]
    pub activation_checkpoint: ActivationCheckpointConfig,
    /// The run folder.
    #[serde(default)]
    pub checkpoint: CheckpointConfig,
    /// Held-out evaluation.
    #[serde(default)]
    pub eval: EvalConfig,
    /// Logging.
    #[serde(default)]
    pub metrics: MetricsConfig,
    /// Collectives.
    #[serde(default)]
    pub comm: CommConfig,
    /// The device of each rank.
    #[serde(default)]
    pub device: DeviceConfig,
}

/// `[model]`
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// Hugging Face directory (relative to the TOML file, then to the working directory), or a hub id present in the local cache.
    pub path: String,
    /// `"pretrained"`: weights from the directory. `"random"`: from `config.json` alone, normal with its `initializer_range`.
    #[serde(default)]
    pub init: ModelInit,
}

/// Where weights come from.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum ModelInit {
    /// From the safetensors files.
    #[default]
    Pretrained,
    /// Random start.
    Random,
}

/// `[lora]`, with PEFT's names.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[serde(deny_unknown_fields, default)]
pub struct LoraConfig {
    /// Rank.
    pub r: usize,
    /// Scale numerator: the update is `alpha / r` (or `alpha / sqrt(r)`) times `B A`.
    #[serde(alias = "lora_alpha")]
    pub alpha: f32,
    /// Probability of dropping an input of A.
    #[serde(alias = "lora_dropout")]
    pub dropout: f32,
    /// Module names by suffix (`["q_proj", "v_proj"]`), or `"all-linear"` (all but the head).
    pub target_modules: TargetModules,
    /// Rank-stabilized scale `alpha / sqrt(r)`.
    pub use_rslora: bool,
    /// Rank by module name or suffix, or regular expression as PEFT reads it.
    pub rank_pattern: BTreeMap<String, usize>,
    /// Alpha by module name, likewise.
    pub alpha_pattern: BTreeMap<String, f32>,
    /// Continue from this PEFT adapter folder. Its shapes and scales win; contradictions are errors.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub adapter_path: Option<PathBuf>,
}

impl Default for LoraConfig {
    fn default() -> Self {
        LoraConfig {
            r: 8,
            alpha: 16.0,
            dropout: 0.0,
            target_modules: TargetModules::default(),
            use_rslora: false,
            rank_pattern: BTreeMap::new(),
            alpha_pattern: BTreeMap::new(),
            adapter_path: None,
        }
    }
}

/// Which linear layers get an adapter.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[serde(untagged)]
pub enum TargetModules {
    /// `"all-linear"`, or one suffix.
    Named(String),
    /// Suffixes.
    List(Vec<String>),
}

impl Default for TargetModules {
    fn default() -> Self {
        TargetModules::Named("all-linear".into())
    }
}

/// `[[dataset]]` and `[[eval_dataset]]`
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct DatasetConfig {
    /// JSONL file.
    pub path: PathBuf,
    /// How a row is read.
    #[serde(rename = "type", default)]
    pub kind: DatasetKind,
}

/// Row formats.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, PartialEq, Eq, Hash)]
#[serde(rename_all = "snake_case")]
pub enum DatasetKind {
    /// `{"messages": [{"role", "content"}], "tools": [...]?}` through the model's chat template; loss on assistant turns.
    #[default]
    #[serde(alias = "chat_template", alias = "chat")]
    Messages,
    /// `{"prompt", "completion"}`, strings or message lists; loss on the completion.
    #[serde(alias = "input_output")]
    PromptCompletion,
    /// `{"instruction", "input"?, "output"}`; loss on the output.
    Alpaca,
    /// `{"text"}`; loss on everything.
    #[serde(alias = "completion")]
    Text,
    /// `{"input_ids": [...], "labels": [...]?}`; used as they are (`-100`: not trained).
    Tokenized,
}

/// `[data]`
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[serde(deny_unknown_fields, default)]
pub struct DataConfig {
    /// Put several documents into one sequence, attention and positions separate for each.
    pub packing: bool,
    /// Train on prompts and user turns too.
    pub train_on_inputs: bool,
    /// A Jinja file that replaces the model's chat template.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chat_template: Option<PathBuf>,
    /// Shuffle samples each epoch, keyed by `training.seed`.
    pub shuffle: bool,
    /// What chat templates see as now, in seconds since 1970 (only the day matters). Unset: when the run was first started.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub now_secs: Option<i64>,
    /// Folder of the token cache; default: `$XDG_CACHE_HOME/zlaunch/tokens` or `~/.cache/zlaunch/tokens`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache_folder: Option<PathBuf>,
}

impl Default for DataConfig {
    fn default() -> Self {
        DataConfig { packing: true, train_on_inputs: false, chat_template: None, shuffle: true, now_secs: None, cache_folder: None }
    }
}

/// `[training]`
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct TrainingConfig {
    /// Seed of shuffling, initialization and dropout.
    #[serde(default = "default_seed")]
    pub seed: u64,
    /// The same bits whatever the sharding and the number of ranks (powers of two). Outside it stages 0 and 1 reduce once per step.
    #[serde(default)]
    pub deterministic: bool,
    /// Optimizer steps. Exactly one of `steps` and `epochs`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub steps: Option<u64>,
    /// Passes over the data.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epochs: Option<f64>,
    /// Tokens of one sequence.
    pub seq_len: usize,
    /// Sequences of one micro-batch (the unit of computation), or `"auto"`.
    #[serde(default = "one")]
    pub micro_batch_size: Auto<usize>,
    /// Sequences of one step over all ranks. At most one of this and `gradient_accumulation_steps`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub global_batch_size: Option<usize>,
    /// Micro-batches of one step on each rank.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gradient_accumulation_steps: Option<usize>,
    /// Micro-batches that share one gather of each unit: a power of two, `"all"` of the step, or `"auto"`.
    #[serde(default)]
    pub micro_batch_group: GroupSize,
    /// Clip the gradient norm over all weights to this; 0 turns clipping off.
    #[serde(default = "one_f32")]
    pub max_grad_norm: f32,
    /// Stop after so many steps in a row whose gradient was not finite (they are skipped).
    #[serde(default = "ten")]
    pub max_skipped_steps: u64,
}

fn default_seed() -> u64 {
    42
}
fn one() -> Auto<usize> {
    Auto::Set(1)
}
fn one_f32() -> f32 {
    1.0
}
fn ten() -> u64 {
    10
}

/// Micro-batches per gather.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[serde(untagged)]
pub enum GroupSize {
    /// A power of two.
    Count(usize),
    /// `"all"` or `"auto"`.
    Named(String),
}

impl GroupSize {
    /// To be chosen.
    pub fn is_auto(&self) -> bool {
        matches!(self, GroupSize::Named(name) if name == "auto")
    }
}

impl Default for GroupSize {
    fn default() -> Self {
        GroupSize::Count(1)
    }
}

/// `[optimizer]`
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[serde(deny_unknown_fields, default)]
pub struct OptimizerConfig {
    /// `"adamw"`.
    pub name: String,
    /// Peak learning rate.
    pub lr: f64,
    /// Decay of the moments.
    pub betas: [f64; 2],
    /// Added to the denominator.
    pub eps: f64,
    /// Decoupled weight decay, on all trained tensors.
    pub weight_decay: f64,
}

impl Default for OptimizerConfig {
    fn default() -> Self {
        OptimizerConfig { name: "adamw".into(), lr: 2e-4, betas: [0.9, 0.999], eps: 1e-8, weight_decay: 0.0 }
    }
}

/// `[lr_scheduler]`
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[serde(deny_unknown_fields, default)]
pub struct LrSchedulerConfig {
    /// Shape after warm-up.
    #[serde(rename = "type")]
    pub kind: LrSchedule,
    /// Steps of linear warm-up: step s has `lr * s / warmup_steps` (the first step has 0).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warmup_steps: Option<u64>,
    /// The same as a share of all steps. At most one of the two.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warmup_ratio: Option<f64>,
    /// Final rate as a share of `lr` (linear, cosine, wsd).
    pub min_lr_ratio: f64,
    /// wsd: share of all steps that decay.
    pub decay_ratio: f64,
}

impl Default for LrSchedulerConfig {
    fn default() -> Self {
        LrSchedulerConfig { kind: LrSchedule::Constant, warmup_steps: None, warmup_ratio: None, min_lr_ratio: 0.0, decay_ratio: 0.1 }
    }
}

/// Shapes of the learning rate.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum LrSchedule {
    /// Stays at `lr`.
    #[default]
    #[serde(alias = "constant_with_warmup")]
    Constant,
    /// Falls linearly.
    Linear,
    /// Half a cosine.
    Cosine,
    /// Warm-up, stable, linear decay at the end.
    Wsd,
}

/// `[precision]`
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[serde(deny_unknown_fields, default)]
pub struct PrecisionConfig {
    /// Storage type of weights and activations; sums are always f32. Adapters, master weights, gradients and state are f32.
    pub compute: ComputeType,
}

impl Default for PrecisionConfig {
    fn default() -> Self {
        PrecisionConfig { compute: ComputeType::Bf16 }
    }
}

/// Compute types.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum ComputeType {
    /// bfloat16.
    #[serde(alias = "bfloat16")]
    Bf16,
    /// float32.
    #[serde(alias = "fp32", alias = "float32")]
    F32,
}

/// `[zero]`, with DeepSpeed's names.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[serde(deny_unknown_fields, default)]
pub struct ZeroConfig {
    /// 0 nothing is sharded, 1 optimizer state, 2 and gradients, 3 and weights; `"auto"`: the fastest plan that fits.
    pub stage: Auto<u8>,
    /// Home of weight shards at stage 3.
    pub offload_param: Offload,
    /// Home of optimizer state and of the update.
    pub offload_optimizer: Offload,
    /// Units gathered ahead of the one that computes (stage 3).
    pub prefetch_depth: usize,
    /// Units kept gathered while memory lasts (stage 3, frozen weights): bytes per rank for the resident set; `"all"`, `"auto"` or bytes.
    pub resident_bytes: ResidentBytes,
    /// `"auto"`: bytes of each device's memory that a plan must leave free. Default: 2 GB or 3 %, whichever is more.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_margin_bytes: Option<u64>,
}

impl Default for ZeroConfig {
    fn default() -> Self {
        ZeroConfig {
            stage: Auto::Set(0),
            offload_param: Offload::default(),
            offload_optimizer: Offload::default(),
            prefetch_depth: 1,
            resident_bytes: ResidentBytes::default(),
            memory_margin_bytes: None,
        }
    }
}

/// Bytes of the resident set.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[serde(untagged)]
pub enum ResidentBytes {
    /// So many bytes per rank.
    Bytes(u64),
    /// `"all"`: every frozen unit; `"auto"`: what memory allows.
    Named(String),
}

impl ResidentBytes {
    /// To be chosen.
    pub fn is_auto(&self) -> bool {
        matches!(self, ResidentBytes::Named(name) if name == "auto")
    }
}

impl Default for ResidentBytes {
    fn default() -> Self {
        ResidentBytes::Bytes(0)
    }
}

/// Where something lives. Written as `"none"` / `"cpu"` / `"auto"`, or as DeepSpeed does: a table with `device` (and `pin_memory`).
#[derive(Clone, Debug, Default, Deserialize, Serialize, PartialEq)]
#[serde(from = "OffloadForm")]
pub struct Offload {
    /// `"none"`, `"cpu"` or `"auto"`.
    pub device: OffloadDevice,
    /// Pin the host memory (no effect on a CPU device).
    pub pin_memory: bool,
}

/// Homes.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum OffloadDevice {
    /// On the device.
    #[default]
    None,
    /// In host memory.
    Cpu,
    /// Where the planner puts it.
    Auto,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OffloadForm {
    Device(OffloadDevice),
    Table(OffloadTable),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OffloadTable {
    device: OffloadDevice,
    #[serde(default = "yes")]
    pin_memory: bool,
}

fn yes() -> bool {
    true
}

impl From<OffloadForm> for Offload {
    fn from(form: OffloadForm) -> Self {
        match form {
            OffloadForm::Device(device) => Offload { device, pin_memory: true },
            OffloadForm::Table(t) => Offload { device: t.device, pin_memory: t.pin_memory },
        }
    }
}

/// `[activation_checkpoint]`
#[derive(Clone, Debug, Default, Deserialize, Serialize, PartialEq)]
#[serde(deny_unknown_fields, default)]
pub struct ActivationCheckpointConfig {
    /// `"none"` keeps everything, `"full"` keeps block inputs and recomputes, `"auto"` recomputes as few blocks as memory allows.
    pub mode: CheckpointMode,
    /// Recompute only the first so many blocks (with `mode = "full"`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layers: Option<usize>,
}

/// Modes of activation checkpointing.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum CheckpointMode {
    /// Keep all activations.
    #[default]
    None,
    /// Recompute blocks in backward.
    Full,
    /// Chosen by the planner.
    Auto,
}

/// `[checkpoint]`: the run folder and what is saved there.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[serde(deny_unknown_fields, default)]
pub struct CheckpointConfig {
    /// The run folder: resolved configuration, metrics, logs, checkpoints, the final adapter or model.
    pub folder: PathBuf,
    /// Save every so many steps; 0: only at the end.
    pub interval: u64,
    /// Keep the latest so many checkpoints (at least 1).
    pub keep_latest_k: usize,
    /// `"auto"`: from the latest valid checkpoint in `folder` if there is one; `"none"`: start anew (an existing run there is an error); a path: that checkpoint.
    pub resume: String,
}

impl Default for CheckpointConfig {
    fn default() -> Self {
        CheckpointConfig { folder: "out".into(), interval: 0, keep_latest_k: 2, resume: "auto".into() }
    }
}

/// `[eval]`
#[derive(Clone, Debug, Default, Deserialize, Serialize, PartialEq)]
#[serde(deny_unknown_fields, default)]
pub struct EvalConfig {
    /// Evaluate every so many steps (and at the end); 0: only at the end, if there is an `[[eval_dataset]]`.
    pub interval: u64,
}

/// `[metrics]`
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[serde(deny_unknown_fields, default)]
pub struct MetricsConfig {
    /// Log every so many steps.
    pub log_freq: u64,
}

impl Default for MetricsConfig {
    fn default() -> Self {
        MetricsConfig { log_freq: 1 }
    }
}

/// `[comm]`
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[serde(deny_unknown_fields, default)]
pub struct CommConfig {
    /// `"auto"`: `"ccl"` (NCCL, RCCL) between GPUs, `"local"` (shared memory) between CPU ranks of a host.
    pub backend: String,
    /// How GPUs of one host gather weights: `"library"`, `"copies"` (by the copy engines, from each other's memory) or `"auto"`: on a pair of AMD
    /// GPUs, which share one link, by whichever is faster when the run starts.
    pub gather: String,
    /// CPU ranks of one host keep one copy of what is sharded, in shared memory; opening a unit then copies nothing.
    pub share_pages: bool,
    /// Seconds for all ranks to meet.
    pub init_timeout_seconds: u64,
    /// Seconds without progress in a collective while all ranks are alive.
    pub train_timeout_seconds: u64,
    /// Seconds after which a rank that gives no sign of life is lost. By default the whole job has ended within 10 s then.
    pub heartbeat_timeout_seconds: u64,
}

impl Default for CommConfig {
    fn default() -> Self {
        CommConfig {
            backend: "auto".into(),
            gather: "auto".into(),
            share_pages: true,
            init_timeout_seconds: 300,
            train_timeout_seconds: 100,
            heartbeat_timeout_seconds: 8,
        }
    }
}

/// `[device]`
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[serde(deny_unknown_fields, default)]
pub struct DeviceConfig {
    /// `"auto"` (a GPU where one is found, else the CPU), `"cuda"`, `"hip"` or `"cpu"`.
    pub kind: String,
    /// Threads per rank for operations; 0: cores / ranks of this host, at least 1.
    pub threads: usize,
    /// Bind each rank to cores of its own where the ranks of a host use all its cores.
    pub bind_threads: bool,
    /// Streams: `"threaded"`, `"inline"` (debugging) or `"chaos"` (random delays, NaN-filled memory).
    pub mode: String,
    /// Folder of compiled GPU kernels; by default one in the user's cache. `zlaunch kernels build` fills it ahead.
    pub kernel_folder: Option<PathBuf>,
    /// The GPU vendor's libraries, where they are not under their usual names.
    pub libraries: LibraryPaths,
}

/// `[device.libraries]`: paths of the vendor's libraries.
#[derive(Clone, Debug, Default, Deserialize, Serialize, PartialEq)]
#[serde(deny_unknown_fields, default)]
pub struct LibraryPaths {
    /// The driver: `libcuda.so.1`, `libamdhip64.so.6`.
    pub driver: Option<PathBuf>,
    /// The run-time compiler: `libnvrtc.so.12`, `libhiprtc.so.6`.
    pub compiler: Option<PathBuf>,
    /// Dense products: `libcublasLt.so.12`, `libhipblaslt.so.0`.
    pub blas: Option<PathBuf>,
    /// Collectives: `libnccl.so.2`, `librccl.so.1`.
    pub collectives: Option<PathBuf>,
}

impl Default for DeviceConfig {
    fn default() -> Self {
        DeviceConfig {
            kind: "auto".into(),
            threads: 0,
            bind_threads: true,
            mode: "threaded".into(),
            kernel_folder: None,
            libraries: LibraryPaths::default(),
        }
    }
}
