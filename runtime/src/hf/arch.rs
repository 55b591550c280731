//! What is this model? `config.json` of transformers 4 and 5, read into one struct of checked numbers.
//!
//! Both generations are read by the same code: rotary parameters come from `rope_scaling` (4) or `rope_parameters` (5), the
//! base from inside them or from `rope_theta`, the type from `dtype` or `torch_dtype`. Defaults of absent keys are those of
//! the model's class in transformers. Sizes have upper limits, so that later products of them cannot overflow.

use super::{Error, Result};
use serde_json::{Map, Value};
use std::path::Path;

/// Architectures that have an implementation, for messages.
pub const SUPPORTED: &str = "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM";

/// Model families; they differ in biases, q/k norm and windows only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    /// Llama 2 and 3, SmolLM2.
    Llama,
    /// Mistral: sliding window in all layers.
    Mistral,
    /// Qwen 2 and 2.5: biases on q, k, v.
    Qwen2,
    /// Qwen 3: q and k normalized per head.
    Qwen3,
}

/// How rotary frequencies are scaled beyond the pre-training length; names as in transformers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rope {
    /// Su et al. 2021.
    Default,
    /// Position interpolation (Chen et al. 2023): frequencies divided by `factor`.
    Linear {
        /// At least 1 in practice; any positive number is accepted.
        factor: f64,
    },
    /// NTK-aware: the base grows with the sequence length beyond `max_position`.
    Dynamic {
        /// Strength.
        factor: f64,
    },
    /// Llama 3.1: low frequencies divided, high ones kept, a ramp between.
    Llama3 {
        /// Divisor of low frequencies.
        factor: f64,
        /// Wavelengths above `original_max / low` are divided.
        low: f64,
        /// Wavelengths below `original_max / high` are kept.
        high: f64,
        /// Pre-training length.
        original_max: usize,
    },
    /// YaRN (Peng et al. 2023).
    Yarn {
        /// Extension of the length.
        factor: f64,
        /// Rotations above which a dimension is kept.
        beta_fast: f64,
        /// Rotations below which a dimension is interpolated.
        beta_slow: f64,
        /// Multiplies cosines and sines; `None`: from `factor` and the scales below.
        attention_factor: Option<f64>,
        /// Pre-training length.
        original_max: usize,
        /// Scale of the attention factor (DeepSeek).
        mscale: Option<f64>,
        /// Its divisor.
        mscale_all_dim: Option<f64>,
        /// Round the ramp's ends to whole dimensions.
        truncate: bool,
    },
}

/// A checked `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct ArchConfig {
    /// Family.
    pub architecture: Architecture,
    /// `V`.
    pub vocab: usize,
    /// `C`.
    pub hidden: usize,
    /// `F`.
    pub intermediate: usize,
    /// `L`.
    pub layers: usize,
    /// `H`, a multiple of `kv_heads`.
    pub heads: usize,
    /// `K`.
    pub kv_heads: usize,
    /// `D`, even.
    pub head_dim: usize,
    /// Added to the mean square in RMSNorm.
    pub rms_eps: f32,
    /// Rotary variant.
    pub rope: Rope,
    /// Rotary base.
    pub rope_theta: f64,
    /// Longest sequence the model was made for.
    pub max_position: usize,
    /// The head uses the embedding's matrix.
    pub tie_word_embeddings: bool,
    /// Biases on q, k and v.
    pub qkv_bias: bool,
    /// Bias on o.
    pub o_bias: bool,
    /// Biases on gate, up and down.
    pub mlp_bias: bool,
    /// RMSNorm over each head of q and k.
    pub qk_norm: bool,
    /// Per layer: a query at position p sees keys in `(p - window, p]`; `None`: all before it.
    pub windows: Vec<Option<usize>>,
    /// Standard deviation of a random start.
    pub initializer_range: f32,
    /// Id of the padding token, if it is one of the vocabulary. Its row of the embedding is not trained as an input (transformers
    /// passes it to `torch.nn.Embedding` as `padding_idx`).
    pub pad_token_id: Option<usize>,
    /// `dtype` (`torch_dtype`) as written, such as `"bfloat16"`.
    pub dtype: Option<String>,
}

/// A linear layer of a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinearModule {
    /// Path in the model: `model.layers.0.self_attn.q_proj`.
    pub path: String,
    /// `O`.
    pub outputs: usize,
    /// `I`.
    pub inputs: usize,
    /// Whether it has a bias.
    pub bias: bool,
}

impl ArchConfig {
    /// Reads `dir/config.json`.
    ///
    /// # Errors
    /// The file is missing or unreadable, or [`ArchConfig::parse`] refuses it.
    pub fn load(dir: &Path) -> Result<ArchConfig> {
        let path = dir.join("config.json");
        let text = std::fs::read_to_string(&path).map_err(Error::io("read", &path))?;
        Self::parse(&text, &path)
    }

    /// Reads the text of a `config.json`; `path` is only for messages.
    ///
    /// # Errors
    /// Not JSON, an architecture without implementation, a missing key, or a number that is zero, too large or does not divide.
    pub fn parse(text: &str, path: &Path) -> Result<ArchConfig> {
        let map: Map<String, Value> = serde_json::from_str(text).map_err(|e| Error::Json { path: path.into(), why: e.to_string() })?;
        let k = Keys { path, prefix: "", map: &map };
        let architecture = architecture(&k)?;
        for (key, why) in [
            ("quantization_config", "the weights are quantized; training needs the unquantized model"),
            ("auto_map", "the model brings its own Python code, which is never run; use a model of a supported architecture"),
        ] {
            if map.get(key).is_some_and(|v| !v.is_null()) {
                return Err(Error::Unsupported { path: path.into(), what: format!("{key}: {why}") });
            }
        }
        let hidden = k.size("hidden_size", 1 << 20)?;
        let heads = k.size("num_attention_heads", 1 << 16)?;
        let layers = k.size("num_hidden_layers", 1 << 12)?;
        let kv_default = match architecture {
            Architecture::Llama => heads,
            Architecture::Mistral => 8,
            Architecture::Qwen2 | Architecture::Qwen3 => 32,
        };
        let kv_heads = if k.is_null("num_key_value_heads") { heads } else { k.size_or("num_key_value_heads", 1 << 16, kv_default)? };
        let head_dim = match k.get("head_dim") {
            None if architecture == Architecture::Qwen3 && !k.is_null("head_dim") => 128,
            None if hidden % heads != 0 => {
                return Err(k.bad("hidden_size", format!("a multiple of num_attention_heads ({heads}), as there is no head_dim")));
            }
            None => hidden / heads,
            Some(_) => k.size("head_dim", 1 << 12)?,
        };
        if heads % kv_heads != 0 {
            return Err(k.bad("num_key_value_heads", format!("a divisor of num_attention_heads ({heads})")));
        }
        if head_dim % 2 != 0 {
            return Err(k.bad_value("head_dim", "an even number", &head_dim.to_string()));
        }
        match k.get("hidden_act") {
            None => {}
            Some(Value::String(s)) if s == "silu" || s == "swish" => {}
            Some(_) => return Err(k.bad("hidden_act", "\"silu\"".into())),
        }
        let (max_default, bias_allowed) = match architecture {
            Architecture::Llama => (2048, true),
            Architecture::Mistral => (4096 * 32, false),
            Architecture::Qwen2 => (32768, false),
            Architecture::Qwen3 => (32768, true),
        };
        let max_position = k.size_or("max_position_embeddings", 1 << 30, max_default)?;
        let attention_bias = bias_allowed && k.flag("attention_bias", false)?;
        let (rope_theta, rope) = rope(&k, max_position)?;
        let vocab = k.size("vocab_size", 1 << 24)?;
        Ok(ArchConfig {
            architecture,
            vocab,
            hidden,
            intermediate: k.size("intermediate_size", 1 << 22)?,
            layers,
            heads,
            kv_heads,
            head_dim,
            rms_eps: k.number_in("rms_norm_eps", 1e-6, 0.0, 1.0)? as f32,
            rope,
            rope_theta,
            max_position,
            tie_word_embeddings: k.flag("tie_word_embeddings", false)?,
            qkv_bias: attention_bias || architecture == Architecture::Qwen2,
            o_bias: attention_bias,
            mlp_bias: architecture == Architecture::Llama && k.flag("mlp_bias", false)?,
            qk_norm: architecture == Architecture::Qwen3,
            windows: windows(&k, architecture, layers)?,
            initializer_range: k.number_in("initializer_range", 0.02, 0.0, 1e3)? as f32,
            pad_token_id: map.get("pad_token_id").and_then(Value::as_u64).map(|id| id as usize).filter(|id| *id < vocab),
            dtype: ["dtype", "torch_dtype"].iter().find_map(|key| map.get(*key)?.as_str()).map(str::to_owned),
        })
    }

    /// `[O, I]` and bias of a linear layer of a block, by its path below the block (`self_attn.q_proj`).
    fn block_linears(&self) -> [(&'static str, usize, usize, bool); 7] {
        let (c, f, q, kv) = (self.hidden, self.intermediate, self.heads * self.head_dim, self.kv_heads * self.head_dim);
        [
            ("self_attn.q_proj", q, c, self.qkv_bias),
            ("self_attn.k_proj", kv, c, self.qkv_bias),
            ("self_attn.v_proj", kv, c, self.qkv_bias),
            ("self_attn.o_proj", c, q, self.o_bias),
            ("mlp.gate_proj", f, c, self.mlp_bias),
            ("mlp.up_proj", f, c, self.mlp_bias),
            ("mlp.down_proj", c, f, self.mlp_bias),
        ]
    }

    /// Every linear layer of the blocks, in order (not the head).
    pub fn linear_modules(&self) -> Vec<LinearModule> {
        let mut all = Vec::with_capacity(self.layers * 7);
        for l in 0..self.layers {
            for (name, outputs, inputs, bias) in self.block_linears() {
                all.push(LinearModule { path: format!("model.layers.{l}.{name}"), outputs, inputs, bias });
            }
        }
        all
    }

    /// Names and shapes of block `layer`'s parameters, in Hugging Face naming.
    pub fn layer_parameters(&self, layer: usize) -> Vec<(String, Vec<usize>)> {
        let p = format!("model.layers.{layer}");
        let mut all = vec![(format!("{p}.input_layernorm.weight"), vec![self.hidden])];
        for (i, (name, outputs, inputs, bias)) in self.block_linears().into_iter().enumerate() {
            if i == 4 {
                all.push((format!("{p}.post_attention_layernorm.weight"), vec![self.hidden]));
            }
            all.push((format!("{p}.{name}.weight"), vec![outputs, inputs]));
            if bias {
                all.push((format!("{p}.{name}.bias"), vec![outputs]));
            }
            if i == 3 && self.qk_norm {
                all.push((format!("{p}.self_attn.q_norm.weight"), vec![self.head_dim]));
                all.push((format!("{p}.self_attn.k_norm.weight"), vec![self.head_dim]));
            }
        }
        all
    }

    /// Names and shapes of all parameters in Hugging Face naming: embedding, blocks, final norm, and the head unless it is tied.
    pub fn parameters(&self) -> Vec<(String, Vec<usize>)> {
        let mut all = vec![("model.embed_tokens.weight".to_owned(), vec![self.vocab, self.hidden])];
        for layer in 0..self.layers {
            all.extend(self.layer_parameters(layer));
        }
        all.push(("model.norm.weight".to_owned(), vec![self.hidden]));
        if !self.tie_word_embeddings {
            all.push(("lm_head.weight".to_owned(), vec![self.vocab, self.hidden]));
        }
        all
    }

    /// Number of elements of all parameters, a tied head counted once.
    pub fn parameter_count(&self) -> u64 {
        let block: u64 = self.layer_parameters(0).iter().map(|(_, s)| s.iter().product::<usize>() as u64).sum();
        let table = (self.vocab * self.hidden) as u64;
        self.layers as u64 * block + self.hidden as u64 + if self.tie_word_embeddings { table } else { 2 * table }
    }
}

fn architecture(k: &Keys) -> Result<Architecture> {
    let named = match k.get("architectures") {
        Some(Value::Array(a)) if a.len() == 1 => a[0].as_str().map(str::to_owned),
        Some(v) => return Err(k.bad_value("architectures", "a list with one name", &v.to_string())),
        None => None,
    };
    // Old directories lack `architectures`; `model_type` says the same.
    let name = named.or_else(|| k.get("model_type").and_then(|v| v.as_str().map(str::to_owned)));
    match name.as_deref() {
        Some("LlamaForCausalLM" | "llama") => Ok(Architecture::Llama),
        Some("MistralForCausalLM" | "mistral") => Ok(Architecture::Mistral),
        Some("Qwen2ForCausalLM" | "qwen2") => Ok(Architecture::Qwen2),
        Some("Qwen3ForCausalLM" | "qwen3") => Ok(Architecture::Qwen3),
        Some(other) => Err(Error::Architecture { path: k.path.into(), got: other.into() }),
        None => Err(k.bad("architectures", format!("one of {SUPPORTED}"))),
    }
}

fn windows(k: &Keys, architecture: Architecture, layers: usize) -> Result<Vec<Option<usize>>> {
    let width = |default| if k.is_null("sliding_window") { Ok(None) } else { k.size_or("sliding_window", 1 << 30, default).map(Some) };
    match architecture {
        Architecture::Llama => Ok(vec![None; layers]),
        Architecture::Mistral => Ok(vec![width(4096)?; layers]),
        Architecture::Qwen2 | Architecture::Qwen3 => {
            if !k.flag("use_sliding_window", false)? {
                return Ok(vec![None; layers]);
            }
            let window = width(4096)?;
            match k.get("layer_types") {
                None => {
                    let first = k.count_or("max_window_layers", 1 << 30, 28)?;
                    Ok((0..layers).map(|l| window.filter(|_| l >= first)).collect())
                }
                Some(Value::Array(types)) if types.len() == layers => types
                    .iter()
                    .map(|t| match t.as_str() {
                        Some("full_attention") => Ok(None),
                        Some("sliding_attention") => Ok(window),
                        _ => Err(k.bad_value("layer_types", "\"full_attention\" or \"sliding_attention\"", &t.to_string())),
                    })
                    .collect(),
                Some(v) => {
                    let got = v.as_array().map_or(v.to_string(), |a| format!("{} names", a.len()));
                    Err(k.bad_value("layer_types", &format!("a list of {layers} names"), &got))
                }
            }
        }
    }
}

fn rope(k: &Keys, max_position: usize) -> Result<(f64, Rope)> {
    let empty = Map::new();
    let (prefix, map) = ["rope_scaling", "rope_parameters"]
        .iter()
        .find_map(|key| match k.get(key) {
            Some(Value::Object(m)) if !m.is_empty() => Some(Ok((*key, m))),
            Some(Value::Object(_)) | None => None,
            Some(_) => Some(Err(k.bad(key, "an object or null".into()))),
        })
        .transpose()?
        .unwrap_or(("rope_parameters", &empty));
    let r = Keys { path: k.path, prefix, map };
    let theta_holder = if r.get("rope_theta").is_some() { &r } else { k };
    let theta = theta_holder.number_in("rope_theta", 10_000.0, 1.0 + 1e-6, 1e18)?;
    for holder in [&r, k] {
        if holder.number_in("partial_rotary_factor", 1.0, 0.0, 1.0)? != 1.0 {
            return Err(holder.bad("partial_rotary_factor", "1 (partial rotation is not supported)".into()));
        }
    }
    // Configurations before transformers 4.43 call the key `type`.
    let kind_key = if r.get("rope_type").is_some() { "rope_type" } else { "type" };
    let kind = match r.get(kind_key) {
        None => "default",
        Some(v) => v.as_str().ok_or_else(|| r.bad(kind_key, "a string".into()))?,
    };
    let factor = || r.required_in("factor", f64::MIN_POSITIVE, 1e6);
    // transformers takes the outer key first, then the inner, then the maximum itself.
    let original_max = || {
        let holder = if k.get("original_max_position_embeddings").is_some() { k } else { &r };
        holder.size_or("original_max_position_embeddings", 1 << 30, max_position)
    };
    let rope = match kind {
        "default" => Rope::Default,
        "linear" => Rope::Linear { factor: factor()? },
        "dynamic" => Rope::Dynamic { factor: factor()? },
        "llama3" => {
            let (low, high) = (r.required_in("low_freq_factor", 1e-6, 1e6)?, r.required_in("high_freq_factor", 1e-6, 1e6)?);
            if high <= low {
                return Err(r.bad("high_freq_factor", format!("more than low_freq_factor ({low})")));
            }
            Rope::Llama3 { factor: factor()?, low, high, original_max: original_max()? }
        }
        "yarn" => {
            let original_max = original_max()?;
            let beta = |key, default| r.number_in(key, default, 0.0, 1e6).map(|b| if b == 0.0 { default } else { b });
            Rope::Yarn {
                factor: if r.get("factor").is_some() { factor()? } else { max_position as f64 / original_max as f64 },
                beta_fast: beta("beta_fast", 32.0)?,
                beta_slow: beta("beta_slow", 1.0)?,
                attention_factor: r.optional_in("attention_factor", 0.0, 1e6)?,
                original_max,
                mscale: r.optional_in("mscale", 0.0, 1e6)?.filter(|m| *m != 0.0),
                mscale_all_dim: r.optional_in("mscale_all_dim", 0.0, 1e6)?.filter(|m| *m != 0.0),
                truncate: r.flag("truncate", true)?,
            }
        }
        other => return Err(r.bad_value(kind_key, "default, linear, dynamic, llama3 or yarn", other)),
    };
    Ok((theta, rope))
}

/// Keys of one JSON object, read with checks.
struct Keys<'a> {
    path: &'a Path,
    prefix: &'a str,
    map: &'a Map<String, Value>,
}

impl Keys<'_> {
    /// The value; `null` counts as absent.
    fn get(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    /// Present and `null`, which some keys tell apart from absent.
    fn is_null(&self, key: &str) -> bool {
        self.map.get(key).is_some_and(Value::is_null)
    }

    fn bad(&self, key: &str, expected: String) -> Error {
        let got = self.map.get(key).map_or("nothing".to_owned(), Value::to_string);
        self.bad_value(key, &expected, &got)
    }

    fn bad_value(&self, key: &str, expected: &str, got: &str) -> Error {
        let key = if self.prefix.is_empty() { key.to_owned() } else { format!("{}.{key}", self.prefix) };
        let got: String = got.chars().take(100).collect();
        Error::Value { path: self.path.into(), key, expected: expected.into(), got }
    }

    fn integer(&self, key: &str, low: u64, high: u64) -> Result<Option<usize>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        // Some writers store whole numbers as floats.
        let whole = value.as_u64().or_else(|| value.as_f64().filter(|f| f.fract() == 0.0 && *f >= 0.0 && *f < 1e15).map(|f| f as u64));
        match whole {
            Some(n) if (low..=high).contains(&n) => Ok(Some(n as usize)),
            _ => Err(self.bad(key, format!("a whole number from {low} to {high}"))),
        }
    }

    fn size(&self, key: &str, high: u64) -> Result<usize> {
        self.integer(key, 1, high)?.ok_or_else(|| self.bad(key, format!("a whole number from 1 to {high}")))
    }

    fn size_or(&self, key: &str, high: u64, default: usize) -> Result<usize> {
        Ok(self.integer(key, 1, high)?.unwrap_or(default))
    }

    fn count_or(&self, key: &str, high: u64, default: usize) -> Result<usize> {
        Ok(self.integer(key, 0, high)?.unwrap_or(default))
    }

    fn optional_in(&self, key: &str, low: f64, high: f64) -> Result<Option<f64>> {
        match self.get(key).map(Value::as_f64) {
            None => Ok(None),
            Some(Some(n)) if (low..=high).contains(&n) => Ok(Some(n)),
            Some(_) => Err(self.bad(key, format!("a number from {low:e} to {high:e}"))),
        }
    }

    fn number_in(&self, key: &str, default: f64, low: f64, high: f64) -> Result<f64> {
        Ok(self.optional_in(key, low, high)?.unwrap_or(default))
    }

    fn required_in(&self, key: &str, low: f64, high: f64) -> Result<f64> {
        self.optional_in(key, low, high)?.ok_or_else(|| self.bad(key, format!("a number from {low:e} to {high:e}")))
    }

    fn flag(&self, key: &str, default: bool) -> Result<bool> {
        match self.get(key) {
            None => Ok(default),
            Some(Value::Bool(b)) => Ok(*b),
            Some(_) => Err(self.bad(key, "true or false".into())),
        }
    }
}
