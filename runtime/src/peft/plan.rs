//! Which layers get an adapter, of which rank and scale? PEFT's matching rules over the module paths of a model.
//!
//! Stricter than PEFT in one way: a name or pattern that matches nothing is an error that lists what exists, where PEFT
//! trains silently without it.

use super::config::{AdapterConfig, Targets};
use super::{Error, Result};
use crate::config::{LoraConfig, TargetModules};
use crate::hf::{ArchConfig, LinearModule};
use fancy_regex::Regex;
use std::collections::BTreeSet;

/// One adapted layer: `y += scale * (x A^T) B^T`, A `[r, inputs]`, B `[outputs, r]`.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraTarget {
    /// Path in the model: `model.layers.0.self_attn.q_proj`.
    pub path: String,
    /// `I`.
    pub inputs: usize,
    /// `O`.
    pub outputs: usize,
    /// `R`.
    pub r: usize,
    /// Scale numerator.
    pub alpha: f64,
    /// `alpha / r`, or `alpha / sqrt(r)`.
    pub scale: f32,
}

/// PEFT's name of an adapter tensor of the layer at `path`: `which` is `A` or `B`.
pub fn adapter_tensor(path: &str, which: char) -> String {
    format!("base_model.model.{path}.lora_{which}.weight")
}

impl LoraTarget {
    /// PEFT's name of A.
    pub fn a_name(&self) -> String {
        adapter_tensor(&self.path, 'A')
    }

    /// PEFT's name of B.
    pub fn b_name(&self) -> String {
        adapter_tensor(&self.path, 'B')
    }

    /// Name of the base layer's weight.
    pub fn weight_name(&self) -> String {
        format!("{}.weight", self.path)
    }
}

/// The adapted layers of a model, in model order, and the configuration that says so.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraPlan {
    /// Adapted layers. The index is a layer's dropout site.
    pub targets: Vec<LoraTarget>,
    /// What will be written: targets as an explicit list. The trainer sets `base_model` to the name users know the base by.
    pub config: AdapterConfig,
}

impl LoraPlan {
    /// Plans `[lora]` on a model. With `lora.adapter_path` the adapter's own configuration is used, and a key of `[lora]` that is set to something else is an error.
    ///
    /// # Errors
    /// A target or pattern that matches no layer, an invalid or ambiguous pattern, an adapter that cannot be honoured.
    pub fn new(lora: &LoraConfig, arch: &ArchConfig) -> Result<LoraPlan> {
        if let Some(path) = &lora.adapter_path {
            let mut config = AdapterConfig::load(path)?;
            check_same(lora, &config)?;
            // Dropout is how one trains, not what the adapter is.
            if lora.dropout != 0.0 {
                config.dropout = f64::from(lora.dropout);
            }
            return Self::of(&config, arch);
        }
        let modules = arch.linear_modules();
        let targets = match &lora.target_modules {
            TargetModules::List(names) => Targets::List(names.clone()),
            TargetModules::Named(name) if name.eq_ignore_ascii_case("all-linear") => Targets::AllLinear,
            // A plain name as a string is a suffix here; under PEFT it would match nothing.
            TargetModules::Named(name) if modules.iter().any(|m| is_suffix(&m.path, name)) => Targets::List(vec![name.clone()]),
            TargetModules::Named(pattern) => Targets::Regex(pattern.clone()),
        };
        let config = AdapterConfig {
            base_model: None,
            r: lora.r,
            alpha: f64::from(lora.alpha),
            dropout: f64::from(lora.dropout),
            use_rslora: lora.use_rslora,
            targets,
            exclude: None,
            layers: None,
            rank_pattern: lora.rank_pattern.iter().map(|(k, r)| (k.clone(), *r)).collect(),
            alpha_pattern: lora.alpha_pattern.iter().map(|(k, a)| (k.clone(), f64::from(*a))).collect(),
        };
        if config.r == 0 || config.rank_pattern.iter().any(|(_, r)| *r == 0) {
            return Err(Error::Targets { key: "r", what: "a rank must be at least 1".into() });
        }
        // TOML tables have no order, so "the first that matches" must not matter.
        refuse_ambiguous("rank_pattern", &config.rank_pattern, &modules)?;
        refuse_ambiguous("alpha_pattern", &config.alpha_pattern, &modules)?;
        Self::of(&config, arch)
    }

    /// Plans an adapter's configuration on a model.
    ///
    /// # Errors
    /// As [`LoraPlan::new`].
    pub fn of(config: &AdapterConfig, arch: &ArchConfig) -> Result<LoraPlan> {
        let modules = arch.linear_modules();
        let chosen = select(config, &modules)?;
        let ranks = compile("rank_pattern", &config.rank_pattern)?;
        let alphas = compile("alpha_pattern", &config.alpha_pattern)?;
        let mut targets = Vec::with_capacity(chosen.len());
        for m in &chosen {
            let r = first_match("rank_pattern", &ranks, &m.path)?.unwrap_or(config.r);
            let alpha = first_match("alpha_pattern", &alphas, &m.path)?.unwrap_or(config.alpha);
            let divisor = if config.use_rslora { (r as f64).sqrt() } else { r as f64 };
            let scale = (alpha / divisor) as f32;
            targets.push(LoraTarget { path: m.path.clone(), inputs: m.inputs, outputs: m.outputs, r, alpha, scale });
        }
        for (key, unused) in [("rank_pattern", unused(&ranks, &chosen)?), ("alpha_pattern", unused(&alphas, &chosen)?)] {
            if let Some(pattern) = unused {
                return Err(Error::Targets { key, what: format!("\"{pattern}\" matches no adapted layer; {}", existing(&modules)) });
            }
        }
        let list = Targets::List(explicit(&chosen, &modules));
        Ok(LoraPlan { targets, config: AdapterConfig { targets: list, exclude: None, layers: None, ..config.clone() } })
    }

    /// Names and shapes of all adapter tensors: A `[r, in]` and B `[out, r]` of each target.
    pub fn parameters(&self) -> Vec<(String, Vec<usize>)> {
        self.targets.iter().flat_map(|t| [(t.a_name(), vec![t.r, t.inputs]), (t.b_name(), vec![t.outputs, t.r])]).collect()
    }
}

/// PEFT: the key is the name, or ends with a dot and the name.
fn is_suffix(path: &str, name: &str) -> bool {
    path == name || path.strip_suffix(name).is_some_and(|rest| rest.ends_with('.'))
}

fn select<'a>(config: &AdapterConfig, modules: &'a [LinearModule]) -> Result<Vec<&'a LinearModule>> {
    let matches = |key: &'static str, targets: &Targets| -> Result<Vec<bool>> {
        match targets {
            Targets::AllLinear => Ok(vec![true; modules.len()]),
            Targets::List(names) => Ok(modules.iter().map(|m| names.iter().any(|n| is_suffix(&m.path, n))).collect()),
            Targets::Regex(pattern) => {
                let regex = regex(key, &format!("^(?:{pattern})$"), pattern)?;
                modules.iter().map(|m| is_match(key, &regex, &m.path)).collect()
            }
        }
    };
    if let Targets::List(names) = &config.targets {
        if let Some(head) = names.iter().find(|n| is_suffix("lm_head", n) || is_suffix("model.embed_tokens", n)) {
            let what = format!("\"{head}\": adapters on the embedding and the head are not supported; {}", existing(modules));
            return Err(Error::Targets { key: "target_modules", what });
        }
        if let Some(name) = names.iter().find(|n| !modules.iter().any(|m| is_suffix(&m.path, n))) {
            return Err(Error::Targets { key: "target_modules", what: format!("\"{name}\" matches no layer; {}", existing(modules)) });
        }
    }
    let wanted = matches("target_modules", &config.targets)?;
    let excluded = config.exclude.as_ref().map(|e| matches("exclude_modules", e)).transpose()?;
    let chosen: Vec<&LinearModule> = modules
        .iter()
        .enumerate()
        .filter(|(i, m)| {
            wanted[*i] && !excluded.as_ref().is_some_and(|e| e[*i]) && config.layers.as_ref().is_none_or(|l| l.contains(&block(&m.path)))
        })
        .map(|(_, m)| m)
        .collect();
    if chosen.is_empty() {
        let what = match &config.targets {
            Targets::Regex(p) => format!("the pattern \"{p}\" matches no whole module path; {}", existing(modules)),
            _ => format!("no layer is left to adapt; {}", existing(modules)),
        };
        return Err(Error::Targets { key: "target_modules", what });
    }
    Ok(chosen)
}

/// Block number in `model.layers.N.`.
fn block(path: &str) -> usize {
    path.split('.').nth(2).and_then(|n| n.parse().ok()).unwrap_or(usize::MAX)
}

fn leaf(path: &str) -> &str {
    path.rsplit('.').next().unwrap_or(path)
}

/// Last names where they say exactly which layers are meant, whole paths otherwise.
fn explicit(chosen: &[&LinearModule], modules: &[LinearModule]) -> Vec<String> {
    let paths: BTreeSet<&str> = chosen.iter().map(|m| m.path.as_str()).collect();
    let mut leaves = Vec::new();
    for m in chosen {
        if !leaves.contains(&leaf(&m.path)) {
            leaves.push(leaf(&m.path));
        }
    }
    if modules.iter().all(|m| !leaves.contains(&leaf(&m.path)) || paths.contains(m.path.as_str())) {
        leaves.into_iter().map(str::to_owned).collect()
    } else {
        chosen.iter().map(|m| m.path.clone()).collect()
    }
}

fn existing(modules: &[LinearModule]) -> String {
    let mut leaves: Vec<&str> = Vec::new();
    for m in modules {
        if !leaves.contains(&leaf(&m.path)) {
            leaves.push(leaf(&m.path));
        }
    }
    let example = modules.first().map_or("", |m| &m.path);
    format!("layers are called {} (whole path: {example})", leaves.join(", "))
}

type Compiled<T> = Vec<(String, Regex, T)>;

fn regex(key: &'static str, text: &str, shown: &str) -> Result<Regex> {
    Regex::new(text).map_err(|e| Error::Targets { key, what: format!("\"{shown}\" is not a regular expression: {e}") })
}

fn is_match(key: &'static str, regex: &Regex, path: &str) -> Result<bool> {
    regex.is_match(path).map_err(|e| Error::Targets { key, what: format!("matching {path}: {e}") })
}

fn compile<T: Copy>(key: &'static str, patterns: &[(String, T)]) -> Result<Compiled<T>> {
    patterns.iter().map(|(p, v)| Ok((p.clone(), regex(key, &format!(r"^(?:.*\.)?(?:{p})$"), p)?, *v))).collect()
}

fn first_match<T: Copy>(key: &'static str, patterns: &Compiled<T>, path: &str) -> Result<Option<T>> {
    for (_, regex, value) in patterns {
        if is_match(key, regex, path)? {
            return Ok(Some(*value));
        }
    }
    Ok(None)
}

fn unused<T>(patterns: &Compiled<T>, chosen: &[&LinearModule]) -> Result<Option<String>> {
    for (text, regex, _) in patterns {
        let mut used = false;
        for m in chosen {
            used |= is_match("rank_pattern", regex, &m.path)?;
        }
        if !used {
            return Ok(Some(text.clone()));
        }
    }
    Ok(None)
}

fn refuse_ambiguous<T: Copy + PartialEq>(key: &'static str, patterns: &[(String, T)], modules: &[LinearModule]) -> Result<()> {
    let compiled = compile(key, patterns)?;
    for m in modules {
        let mut found: Option<(&str, T)> = None;
        for (text, regex, value) in &compiled {
            if is_match(key, regex, &m.path)? {
                if let Some((other, _)) = found.filter(|(_, v)| v != value) {
                    let what = format!("\"{other}\" and \"{text}\" both match {} and differ; make the patterns exclusive", m.path);
                    return Err(Error::Targets { key, what });
                }
                found = Some((text, *value));
            }
        }
    }
    Ok(())
}

/// A key of `[lora]` that is not at its default must agree with the adapter it continues.
fn check_same(lora: &LoraConfig, adapter: &AdapterConfig) -> Result<()> {
    let default = LoraConfig::default();
    let path = lora.adapter_path.clone().unwrap_or_default();
    let differ = |key, here: String, there: String| Err(Error::Contradiction { key, here, there, path: path.clone() });
    if lora.r != default.r && lora.r != adapter.r {
        return differ("r", lora.r.to_string(), adapter.r.to_string());
    }
    if lora.alpha != default.alpha && f64::from(lora.alpha) != adapter.alpha {
        return differ("alpha", lora.alpha.to_string(), adapter.alpha.to_string());
    }
    if lora.use_rslora && !adapter.use_rslora {
        return differ("use_rslora", "true".into(), "false".into());
    }
    if !lora.rank_pattern.is_empty() && lora.rank_pattern != adapter.rank_pattern.iter().cloned().collect() {
        return differ("rank_pattern", format!("{:?}", lora.rank_pattern), format!("{:?}", adapter.rank_pattern));
    }
    let alphas = adapter.alpha_pattern.iter().map(|(k, a)| (k.clone(), *a as f32)).collect();
    if !lora.alpha_pattern.is_empty() && lora.alpha_pattern != alphas {
        return differ("alpha_pattern", format!("{:?}", lora.alpha_pattern), format!("{:?}", adapter.alpha_pattern));
    }
    if let (TargetModules::List(here), Targets::List(there)) = (&lora.target_modules, &adapter.targets)
        && here.iter().collect::<BTreeSet<_>>() != there.iter().collect::<BTreeSet<_>>()
    {
        return differ("target_modules", format!("{here:?}"), format!("{there:?}"));
    }
    Ok(())
}
