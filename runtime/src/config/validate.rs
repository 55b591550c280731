//! Which values, each well-formed, do not make a run: out of range, or contradicting each other. Every finding says the fix.
//!
//! Only what the file alone decides; what depends on the number of ranks is in `batch`, what depends on the model or the data is
//! checked where those are read.

use super::problem::Problem;
use super::schema::nearest;
use super::source::Source;
use super::{CheckpointMode, Config, GroupSize, OffloadDevice, ResidentBytes};

/// One contradiction and the keys it is about, the one to point at first.
pub(super) struct Finding {
    pub keys: Vec<String>,
    what: String,
}

impl Finding {
    pub fn problem(self, source: &Source) -> Problem {
        let place = self.keys.first().map_or(super::Place::Nowhere, |k| source.place(k));
        Problem { place, what: self.what }
    }
}

#[derive(Default)]
struct Findings(Vec<Finding>);

impl Findings {
    /// Notes a finding when `bad`.
    fn when(&mut self, bad: bool, keys: &[&str], what: impl FnOnce() -> String) {
        if bad {
            self.0.push(Finding { keys: keys.iter().map(|k| (*k).to_owned()).collect(), what: what() });
        }
    }

    /// `value` must be one of `known`.
    fn name(&mut self, key: &str, value: &str, known: &[&str]) {
        self.when(!known.contains(&value), &[key], || {
            let hint = nearest(value, known.iter().copied()).map_or(String::new(), |n| format!(" (did you mean \"{n}\"?)"));
            format!("{key} = \"{value}\" is not known{hint}; known: {}", known.join(", "))
        });
    }
}

/// All contradictions of `c`.
pub(super) fn findings(c: &Config) -> Vec<Finding> {
    let mut f = Findings::default();
    training(c, &mut f);
    optimizer(c, &mut f);
    lora(c, &mut f);
    sharding(c, &mut f);
    run(c, &mut f);
    f.0
}

fn training(c: &Config, f: &mut Findings) {
    let t = &c.training;
    let duration = ["training.steps", "training.epochs"];
    f.when(t.steps.is_some() && t.epochs.is_some(), &duration, || {
        "training.steps and training.epochs are both given: keep one (--set training.epochs= drops a key)".into()
    });
    f.when(t.steps.is_none() && t.epochs.is_none(), &duration, || {
        "neither training.steps nor training.epochs is given: add one, such as steps = 100 or epochs = 1".into()
    });
    f.when(t.steps == Some(0), &duration[..1], || "training.steps = 0 trains nothing: give at least 1".into());
    f.when(t.epochs.is_some_and(|e| !(e.is_finite() && e > 0.0)), &duration[1..], || {
        format!("training.epochs = {} must be a number above 0", t.epochs.unwrap_or_default())
    });
    f.when(t.seed > i64::MAX as u64, &["training.seed"], || {
        format!("training.seed = {} does not fit TOML's integers: at most {}", t.seed, i64::MAX)
    });
    f.when(t.seq_len == 0, &["training.seq_len"], || "training.seq_len = 0: a sequence has at least 1 token, such as 2048".into());
    let micro = t.micro_batch_size.set();
    f.when(micro == Some(0), &["training.micro_batch_size"], || {
        "training.micro_batch_size = 0: a micro-batch has at least 1 sequence".into()
    });
    let batch = ["training.global_batch_size", "training.gradient_accumulation_steps"];
    f.when(t.global_batch_size.is_some() && t.gradient_accumulation_steps.is_some(), &batch, || {
        "training.global_batch_size and training.gradient_accumulation_steps are both given, and one follows from the other \
         (global_batch_size = micro_batch_size x ranks x gradient_accumulation_steps): keep one"
            .into()
    });
    f.when(t.global_batch_size == Some(0), &batch[..1], || "training.global_batch_size = 0: a step has at least 1 sequence".into());
    f.when(t.gradient_accumulation_steps == Some(0), &batch[1..], || {
        "training.gradient_accumulation_steps = 0: a step has at least 1 micro-batch per rank".into()
    });
    if let (Some(global), Some(micro @ 1..)) = (t.global_batch_size, micro)
        && !global.is_multiple_of(micro)
    {
        f.when(true, &["training.global_batch_size", "training.micro_batch_size"], || {
            format!(
                "training.global_batch_size {global} = micro_batch_size {micro} x {} micro-batches, which is not whole: \
                 make it a multiple of micro_batch_size x ranks",
                super::batch::ratio(global, micro)
            )
        });
    }
    let group_bad = match &t.micro_batch_group {
        GroupSize::Count(n) => !n.is_power_of_two(),
        GroupSize::Named(name) => name != "all" && name != "auto",
    };
    f.when(group_bad, &["training.micro_batch_group"], || {
        let got = match &t.micro_batch_group {
            GroupSize::Count(n) => n.to_string(),
            GroupSize::Named(name) => format!("\"{name}\""),
        };
        format!("training.micro_batch_group = {got}: expected a power of two (1, 2, 4, ...), \"all\" or \"auto\"")
    });
    f.when(
        t.micro_batch_size.is_auto() && t.global_batch_size.is_none(),
        &["training.micro_batch_size", "training.global_batch_size"],
        || {
            "training.micro_batch_size = \"auto\" needs training.global_batch_size: only the cut of a step may be chosen, not the step"
                .into()
        },
    );
    f.when(!(t.max_grad_norm.is_finite() && t.max_grad_norm >= 0.0), &["training.max_grad_norm"], || {
        format!("training.max_grad_norm = {} must be a number, 0 (no clipping) or above", t.max_grad_norm)
    });
}

fn optimizer(c: &Config, f: &mut Findings) {
    let o = &c.optimizer;
    f.name("optimizer.name", &o.name, &["adamw"]);
    f.when(!(o.lr.is_finite() && o.lr > 0.0), &["optimizer.lr"], || {
        format!("optimizer.lr = {} must be a finite number above 0, such as 2e-4", o.lr)
    });
    f.when(o.betas.iter().any(|b| !(0.0..1.0).contains(b)), &["optimizer.betas"], || {
        format!("optimizer.betas = [{}, {}]: each must be at least 0 and below 1, such as [0.9, 0.999]", o.betas[0], o.betas[1])
    });
    f.when(!(o.eps.is_finite() && o.eps > 0.0), &["optimizer.eps"], || {
        format!("optimizer.eps = {} must be a finite number above 0, such as 1e-8", o.eps)
    });
    f.when(!(o.weight_decay.is_finite() && o.weight_decay >= 0.0), &["optimizer.weight_decay"], || {
        format!("optimizer.weight_decay = {} must be a finite number, 0 or above", o.weight_decay)
    });
    let s = &c.lr_scheduler;
    f.when(s.warmup_steps.is_some() && s.warmup_ratio.is_some(), &["lr_scheduler.warmup_steps", "lr_scheduler.warmup_ratio"], || {
        "lr_scheduler.warmup_steps and lr_scheduler.warmup_ratio are both given: keep one".into()
    });
    let mut share = |key: &str, value: f64| {
        f.when(!(0.0..=1.0).contains(&value), &[key], || format!("{key} = {value} is a share: expected 0 to 1"));
    };
    share("lr_scheduler.warmup_ratio", s.warmup_ratio.unwrap_or(0.0));
    share("lr_scheduler.min_lr_ratio", s.min_lr_ratio);
    share("lr_scheduler.decay_ratio", s.decay_ratio);
    if let (Some(warmup), Some(steps)) = (s.warmup_steps, c.training.steps) {
        f.when(warmup > steps, &["lr_scheduler.warmup_steps", "training.steps"], || {
            format!("lr_scheduler.warmup_steps = {warmup} is more than training.steps = {steps}: the peak rate would never be reached")
        });
    }
}

fn lora(c: &Config, f: &mut Findings) {
    let Some(l) = &c.lora else { return };
    f.when(l.r == 0, &["lora.r"], || "lora.r = 0: an adapter has rank 1 or more, such as 16; to train all weights remove [lora]".into());
    f.when(!l.alpha.is_finite() || l.alpha == 0.0, &["lora.alpha"], || {
        format!("lora.alpha = {} must be a finite number other than 0: the update is alpha / r times B A", l.alpha)
    });
    f.when(!(0.0..1.0).contains(&l.dropout), &["lora.dropout"], || {
        format!("lora.dropout = {} is a probability: expected 0 or above and below 1", l.dropout)
    });
    for (name, _) in l.rank_pattern.iter().filter(|(_, r)| **r == 0) {
        f.when(true, &[&format!("lora.rank_pattern.{name}")], || format!("lora.rank_pattern.\"{name}\" = 0: a rank is 1 or more"));
    }
    for (name, alpha) in l.alpha_pattern.iter().filter(|(_, a)| !a.is_finite() || **a == 0.0) {
        f.when(true, &[&format!("lora.alpha_pattern.{name}")], || {
            format!("lora.alpha_pattern.\"{name}\" = {alpha} must be a finite number other than 0")
        });
    }
    let none = match &l.target_modules {
        super::TargetModules::Named(name) => name.is_empty(),
        super::TargetModules::List(names) => names.is_empty() || names.iter().any(String::is_empty),
    };
    f.when(none, &["lora.target_modules"], || {
        "lora.target_modules names no module: expected \"all-linear\" or a list such as [\"q_proj\", \"v_proj\"]".into()
    });
}

fn sharding(c: &Config, f: &mut Findings) {
    let z = &c.zero;
    f.when(z.stage.set().is_some_and(|s| s > 3), &["zero.stage"], || format!("zero.stage = {}: expected 0, 1, 2, 3 or \"auto\"", z.stage));
    f.when(
        z.stage.set().is_some_and(|s| s < 3) && z.offload_param.device == OffloadDevice::Cpu,
        &["zero.offload_param", "zero.stage"],
        || format!("zero.offload_param = \"cpu\" needs zero.stage = 3 (it is {}): set stage = 3, or offload_param = \"none\"", z.stage),
    );
    f.when(matches!(&z.resident_bytes, ResidentBytes::Named(n) if n != "all" && n != "auto"), &["zero.resident_bytes"], || {
        "zero.resident_bytes: expected a number of bytes, \"all\" or \"auto\"".into()
    });
    let a = &c.activation_checkpoint;
    f.when(a.layers.is_some() && a.mode != CheckpointMode::Full, &["activation_checkpoint.layers", "activation_checkpoint.mode"], || {
        "activation_checkpoint.layers needs mode = \"full\": it says how many blocks are recomputed; set mode, or remove layers".into()
    });
    f.name("comm.gather", &c.comm.gather, &["auto", "library", "copies"]);
    f.name("comm.backend", &c.comm.backend, &["auto", "local", "ccl"]);
    for (key, secs) in [
        ("comm.init_timeout_seconds", c.comm.init_timeout_seconds),
        ("comm.train_timeout_seconds", c.comm.train_timeout_seconds),
        ("comm.heartbeat_timeout_seconds", c.comm.heartbeat_timeout_seconds),
    ] {
        f.when(secs == 0, &[key], || format!("{key} = 0 would end every run at once: give at least 1"));
    }
    let kinds = ["auto", "cpu", "cuda", "hip"];
    let kind = if c.device.kind == "rocm" { "hip" } else { &c.device.kind };
    f.when(c.device.kind == "rocm", &["device.kind"], || "device.kind = \"rocm\": AMD's devices are \"hip\" here".into());
    f.name("device.kind", kind, &kinds);
    f.when(c.comm.backend == "local" && ["cuda", "hip"].contains(&kind), &["comm.backend", "device.kind"], || {
        format!("comm.backend = \"local\" is for CPU ranks, device.kind = \"{kind}\" is a GPU: use \"auto\" or \"ccl\"")
    });
    f.when(c.comm.backend == "ccl" && c.device.kind == "cpu", &["comm.backend", "device.kind"], || {
        "comm.backend = \"ccl\" is for GPUs, device.kind = \"cpu\" is not one: use \"auto\" or \"local\"".into()
    });
    f.name("device.mode", &c.device.mode, &["threaded", "inline", "chaos"]);
}

fn run(c: &Config, f: &mut Findings) {
    f.when(c.dataset.is_empty(), &["dataset"], || {
        "there is no [[dataset]]: add one with path = \"train.jsonl\" and type = \"messages\"".into()
    });
    f.when(c.checkpoint.folder.as_os_str().is_empty(), &["checkpoint.folder"], || {
        "checkpoint.folder is empty: name the folder of this run, such as \"out\"".into()
    });
    f.when(c.checkpoint.keep_latest_k == 0, &["checkpoint.keep_latest_k"], || {
        "checkpoint.keep_latest_k = 0 would keep nothing: give at least 1".into()
    });
    f.when(c.metrics.log_freq == 0, &["metrics.log_freq"], || "metrics.log_freq = 0: log every 1 or more steps".into());
    f.when(c.model.path.is_empty(), &["model.path"], || "model.path is empty: name a Hugging Face folder or hub id".into());
    f.when(c.eval.interval > 0 && c.eval_dataset.is_empty(), &["eval.interval", "eval_dataset"], || {
        format!("eval.interval = {} but there is no [[eval_dataset]]: add one, or remove the interval", c.eval.interval)
    });
}
