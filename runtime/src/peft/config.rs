//! What does `adapter_config.json` say? Read from any PEFT version, written so that every known reader takes it.
//!
//! Unknown keys are ignored as long as they are null, false or empty, since each PEFT version adds some; one that is switched on may
//! change the maths and is refused. Written: an explicit list of targets, as other readers do not expand "all-linear".

use super::{Error, Result};
use crate::durable;
use serde_json::{Map, Value, json};
use std::path::Path;

/// File name in an adapter folder.
pub const CONFIG_FILE: &str = "adapter_config.json";

/// Which modules get an adapter, as PEFT reads it.
#[derive(Clone, Debug, PartialEq)]
pub enum Targets {
    /// All linear layers but the head.
    AllLinear,
    /// A regular expression over the whole module path.
    Regex(String),
    /// Module paths, or their last parts.
    List(Vec<String>),
}

/// The part of `adapter_config.json` that is honoured.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterConfig {
    /// Model the adapter belongs to, as its writer called it.
    pub base_model: Option<String>,
    /// Rank.
    pub r: usize,
    /// Scale numerator.
    pub alpha: f64,
    /// Probability of dropping an input of A while training.
    pub dropout: f64,
    /// Scale `alpha / sqrt(r)` instead of `alpha / r`.
    pub use_rslora: bool,
    /// Targets.
    pub targets: Targets,
    /// Modules left out of them.
    pub exclude: Option<Targets>,
    /// Blocks to adapt; `None`: all.
    pub layers: Option<Vec<usize>>,
    /// Rank by pattern, in PEFT's order: the first that matches counts.
    pub rank_pattern: Vec<(String, usize)>,
    /// Alpha by pattern, likewise.
    pub alpha_pattern: Vec<(String, f64)>,
}

impl AdapterConfig {
    /// Reads `dir/adapter_config.json`.
    ///
    /// # Errors
    /// The file is missing, or [`AdapterConfig::parse`] refuses it.
    pub fn load(dir: &Path) -> Result<AdapterConfig> {
        let path = dir.join(CONFIG_FILE);
        let text = std::fs::read_to_string(&path).map_err(durable::at("read", &path))?;
        Self::parse(&text, &path)
    }

    /// Reads the text of an `adapter_config.json`; `path` is only for messages.
    ///
    /// # Errors
    /// Not JSON, not a LoRA, a number out of range, or something that cannot be honoured.
    pub fn parse(text: &str, path: &Path) -> Result<AdapterConfig> {
        let map: Map<String, Value> =
            serde_json::from_str(text).map_err(|e| crate::hf::Error::Json { path: path.into(), why: e.to_string() })?;
        let k = Keys { path, map: &map };
        k.refuse_unsupported()?;
        let targets = match k.get("target_modules") {
            Some(v) => k.targets("target_modules", v)?,
            None => return Err(k.bad("target_modules", "a list of module names, a pattern or \"all-linear\"")),
        };
        let layers = match k.get("layers_to_transform") {
            None => None,
            Some(v) => {
                let one_or_many = v.as_array().cloned().unwrap_or_else(|| vec![v.clone()]);
                let indices: Option<Vec<usize>> = one_or_many.iter().map(|n| n.as_u64().map(|n| n as usize)).collect();
                Some(indices.ok_or_else(|| k.bad("layers_to_transform", "block numbers"))?).filter(|l| !l.is_empty())
            }
        };
        Ok(AdapterConfig {
            base_model: k.get("base_model_name_or_path").and_then(Value::as_str).map(str::to_owned),
            r: k.rank("r", k.get("r").unwrap_or(&json!(8)))?,
            alpha: k.number("lora_alpha", k.get("lora_alpha").unwrap_or(&json!(8)))?,
            dropout: match k.number("lora_dropout", k.get("lora_dropout").unwrap_or(&json!(0.0)))? {
                p if (0.0..1.0).contains(&p) => p,
                _ => return Err(k.bad("lora_dropout", "a probability in [0, 1)")),
            },
            use_rslora: k.get("use_rslora").is_some_and(|v| *v == Value::Bool(true)),
            targets,
            exclude: k.get("exclude_modules").map(|v| k.targets("exclude_modules", v)).transpose()?,
            layers,
            rank_pattern: k.pattern("rank_pattern", |v| k.rank("rank_pattern", v))?,
            alpha_pattern: k.pattern("alpha_pattern", |v| k.number("alpha_pattern", v))?,
        })
    }

    /// The text of an `adapter_config.json` with the keys that readers need (SGLang, vLLM, llama.cpp, PEFT of any version).
    pub fn to_json(&self) -> String {
        let whole = |x: f64| if x.fract() == 0.0 && x.abs() < 1e15 { json!(x as i64) } else { json!(x) };
        let targets = match &self.targets {
            Targets::AllLinear => json!("all-linear"),
            Targets::Regex(r) => json!(r),
            Targets::List(l) => json!(l),
        };
        let exclude = match &self.exclude {
            None => Value::Null,
            Some(Targets::List(l)) => json!(l),
            Some(Targets::Regex(r)) => json!(r),
            Some(Targets::AllLinear) => json!("all-linear"),
        };
        let ranks: Map<String, Value> = self.rank_pattern.iter().map(|(k, r)| (k.clone(), json!(r))).collect();
        let alphas: Map<String, Value> = self.alpha_pattern.iter().map(|(k, a)| (k.clone(), whole(*a))).collect();
        let mut value = json!({
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base_model,
            "r": self.r,
            "lora_alpha": whole(self.alpha),
            "lora_dropout": self.dropout,
            "bias": "none",
            "use_rslora": self.use_rslora,
            "use_dora": false,
            "target_modules": targets,
            "modules_to_save": null,
            "rank_pattern": ranks,
            "alpha_pattern": alphas,
            "fan_in_fan_out": false,
            "layers_to_transform": self.layers,
            "layers_pattern": null,
            "init_lora_weights": true,
            "inference_mode": true,
            "revision": null
        });
        // PEFT before 0.14 does not know the key, so it is only written where it says something.
        if let (Some(map), false) = (value.as_object_mut(), exclude.is_null()) {
            map.insert("exclude_modules".into(), exclude);
        }
        format!("{value:#}\n")
    }
}

struct Keys<'a> {
    path: &'a Path,
    map: &'a Map<String, Value>,
}

/// Keys that are read, or that cannot change the maths of a trained adapter.
const KNOWN: &[&str] = &[
    "alpha_pattern",
    "auto_mapping",
    "base_model_name_or_path",
    "bias",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "lora_alpha",
    "lora_dropout",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "rank_pattern",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
    "use_rslora",
];

impl Keys<'_> {
    fn get(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    fn bad(&self, key: &str, expected: &str) -> Error {
        let got: String = self.map.get(key).map_or("nothing".to_owned(), Value::to_string).chars().take(100).collect();
        Error::Value { path: self.path.into(), key: key.into(), expected: expected.into(), got }
    }

    fn refuse_unsupported(&self) -> Result<()> {
        let refuse = |key: &str, why: &str| {
            let got: String = self.map.get(key).map_or("nothing".to_owned(), Value::to_string).chars().take(100).collect();
            Err(Error::Unsupported { path: self.path.into(), key: key.into(), got, why: why.into() })
        };
        let text = |key| self.get(key).and_then(Value::as_str);
        if text("peft_type") != Some("LORA") {
            return refuse("peft_type", "only LORA adapters can be loaded");
        }
        if let Some(task) = self.get("task_type").filter(|t| *t != "CAUSAL_LM") {
            return refuse("task_type", &format!("only CAUSAL_LM adapters can be loaded, this is for {task}"));
        }
        if self.get("bias").is_some_and(|b| b != "none") {
            return refuse("bias", "trained biases change the base; only \"none\" is");
        }
        if self.on("fan_in_fan_out") {
            return refuse("fan_in_fan_out", "it is for models with transposed weights (GPT-2), which are not supported");
        }
        match self.get("init_lora_weights") {
            None | Some(Value::Bool(_)) => {}
            Some(Value::String(s)) if matches!(s.as_str(), "gaussian" | "orthogonal" | "eva") => {}
            Some(_) => {
                return refuse(
                    "init_lora_weights",
                    "this start changes the base weights, so the adapter does not fit the base as published; convert it to a plain LoRA with PEFT first",
                );
            }
        }
        let pattern = self.get("layers_pattern").filter(|_| self.get("layers_to_transform").is_some());
        if pattern.is_some_and(|p| !(p == "layers" || *p == json!(["layers"]) || *p == json!([]) || p == "")) {
            return refuse("layers_pattern", "the blocks of the supported models are called \"layers\"");
        }
        for (key, why) in [
            ("use_dora", "DoRA is not implemented; train with plain LoRA, or merge the adapter into the base with PEFT"),
            ("modules_to_save", "fully trained modules beside an adapter are not implemented; merge the adapter into the base with PEFT"),
            ("lora_bias", "a bias on lora_B is not implemented"),
            ("trainable_token_indices", "trained embeddings are not implemented"),
            ("target_parameters", "adapters on expert tensors are not implemented"),
            ("layer_replication", "replicated layers are not implemented"),
        ] {
            if self.on(key) {
                return refuse(key, why);
            }
        }
        match self.map.keys().find(|key| !KNOWN.contains(&key.as_str()) && self.on(key)) {
            Some(key) => refuse(
                key,
                "the key is not known here and is switched on, so the adapter may mean something else; remove it if it does not",
            ),
            None => Ok(()),
        }
    }

    /// Neither null, false nor empty.
    fn on(&self, key: &str) -> bool {
        match self.map.get(key) {
            None | Some(Value::Null | Value::Bool(false)) => false,
            Some(Value::Array(a)) => !a.is_empty(),
            Some(Value::Object(o)) => !o.is_empty(),
            Some(Value::String(s)) => !s.is_empty(),
            Some(_) => true,
        }
    }

    fn targets(&self, key: &str, v: &Value) -> Result<Targets> {
        match v {
            Value::String(s) if s.eq_ignore_ascii_case("all-linear") => Ok(Targets::AllLinear),
            Value::String(s) => Ok(Targets::Regex(s.clone())),
            Value::Array(a) => {
                let names: Option<Vec<String>> = a.iter().map(|n| n.as_str().map(str::to_owned)).collect();
                names.map(Targets::List).ok_or_else(|| self.bad(key, "a list of strings"))
            }
            _ => Err(self.bad(key, "a string or a list of strings")),
        }
    }

    fn rank(&self, key: &str, v: &Value) -> Result<usize> {
        match v.as_u64() {
            Some(r) if (1..=65536).contains(&r) => Ok(r as usize),
            _ => Err(self.bad(key, "a rank from 1 to 65536")),
        }
    }

    fn number(&self, key: &str, v: &Value) -> Result<f64> {
        v.as_f64().filter(|x| x.is_finite() && x.abs() < 1e9).ok_or_else(|| self.bad(key, "a finite number"))
    }

    fn pattern<T>(&self, key: &str, read: impl Fn(&Value) -> Result<T>) -> Result<Vec<(String, T)>> {
        match self.get(key) {
            None => Ok(Vec::new()),
            Some(Value::Object(o)) => o.iter().map(|(k, v)| Ok((k.clone(), read(v)?))).collect(),
            Some(_) => Err(self.bad(key, "an object")),
        }
    }
}
