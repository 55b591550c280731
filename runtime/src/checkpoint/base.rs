//! Which base model do these numbers belong to? A hash of `config.json` and one of the weights, made in seconds for any size.
//!
//! The weights' hash covers every tensor's name, type and shape, and of its contents up to three samples of 4 KiB (start, middle,
//! end; small tensors whole). Another checkpoint of the same architecture differs in every tensor, so it is told apart; a
//! change of single values between samples is not. It does not depend on how the tensors are distributed over files. From
//! the configuration, keys are left out that say nothing about the model's function.

use crate::hf::{Error, Result, Weights};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::path::Path;

/// Bytes of one sample.
const SAMPLE: usize = 4096;

/// Keys of `config.json` that differ between copies of one model.
const IGNORED: &[&str] = &["transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache", "architectures"];

/// Identity of a base model; equal for equal models wherever they lie.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BaseId {
    /// Sha256 of the configuration, hexadecimal.
    pub config: String,
    /// Sha256 over the tensors, hexadecimal; `random:<seed>` for a random start.
    pub weights: String,
}

impl BaseId {
    /// Of a model directory with open weights; reads at most 12 KiB of each tensor.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn of(dir: &Path, weights: &Weights) -> Result<BaseId> {
        let mut hash = Sha256::new();
        for name in weights.names().iter().filter(|n| !n.ends_with("rotary_emb.inv_freq")) {
            let info = weights.tensor(name)?;
            hash.update(format!("{name}\0{}\0{:?}\0", info.dtype, info.shape));
            let width = info.dtype.bytes().max(1);
            let (elems, part) = (info.elems(), SAMPLE / width);
            let starts =
                if elems <= 3 * part { vec![(0, elems)] } else { vec![(0, part), ((elems - part) / 2, part), (elems - part, part)] };
            for (start, count) in starts {
                let mut bytes = vec![0u8; count * width];
                weights.read_stored(name, start, &mut bytes)?;
                hash.update(&bytes);
            }
        }
        Ok(BaseId { config: config_hash(dir)?, weights: hex(&hash.finalize()) })
    }

    /// Of a model that starts from random weights.
    ///
    /// # Errors
    /// `config.json` cannot be read.
    pub fn random(dir: &Path, seed: u64) -> Result<BaseId> {
        Ok(BaseId { config: config_hash(dir)?, weights: format!("random:{seed}") })
    }

    /// As JSON.
    pub fn to_json(&self) -> String {
        format!("{:#}\n", serde_json::json!({"config": self.config, "weights": self.weights}))
    }

    /// From JSON; `path` is only for messages.
    ///
    /// # Errors
    /// It is not what [`BaseId::to_json`] writes.
    pub fn parse(text: &str, path: &Path) -> Result<BaseId> {
        serde_json::from_str(text).map_err(|e| Error::Json { path: path.into(), why: e.to_string() })
    }

    /// What differs from `other`, as a sentence; `None` if nothing does.
    pub fn difference(&self, other: &BaseId) -> Option<String> {
        match (self.config == other.config, self.weights == other.weights) {
            (true, true) => None,
            (false, _) => Some("config.json describes another model".into()),
            (true, false) => Some("the weights are others (same architecture)".into()),
        }
    }
}

fn config_hash(dir: &Path) -> Result<String> {
    let path = dir.join("config.json");
    let text = std::fs::read_to_string(&path).map_err(Error::io("read", &path))?;
    let map: Map<String, Value> = serde_json::from_str(&text).map_err(|e| Error::Json { path: path.clone(), why: e.to_string() })?;
    let sorted: BTreeMap<_, _> = map.into_iter().filter(|(k, v)| !IGNORED.contains(&k.as_str()) && !v.is_null()).collect();
    let mut hash = Sha256::new();
    for (key, value) in sorted {
        hash.update(format!("{key}\0{value}\0"));
    }
    Ok(hex(&hash.finalize()))
}

/// Lower-case hexadecimal.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}
