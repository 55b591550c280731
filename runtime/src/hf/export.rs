//! How is a Hugging Face directory written? Streamed: a callback produces each tensor range by range, so the peak is one range
//! of [`RANGE_BYTES`], whatever the model; and whole or not at all (see [`crate::durable`]).
//!
//! Files: `model.safetensors`, or shards of at most a given size with an index; `config.json` with the dtype that was
//! written; tokenizer, chat template and generation settings copied from the base. `__metadata__` has `format: pt`, without
//! which transformers refuses the file.

use super::folder::INDEX;
use super::{Error, Result, Stored};
use crate::durable::{self, Staging};
use serde_json::{Map, Value, json};
use std::fs::File;
use std::io::Write;
use std::path::Path;

/// Most bytes asked of the callback at once.
pub const RANGE_BYTES: usize = 16 << 20;

/// Default of the largest shard, as transformers writes them.
pub const MAX_SHARD_BYTES: u64 = 5_000_000_000;

/// A tensor to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Name in the file.
    pub name: String,
    /// Shape.
    pub shape: Vec<usize>,
    /// Element type in the file.
    pub dtype: Stored,
}

impl TensorSpec {
    /// Number of elements.
    pub fn elems(&self) -> usize {
        self.shape.iter().product()
    }

    /// Bytes in the file.
    pub fn bytes(&self) -> u64 {
        self.elems() as u64 * self.dtype.bytes() as u64
    }
}

/// Fills the bytes (little-endian) of elements `start..` of a tensor. Called in file order, each element once.
pub type Produce<'a> = dyn FnMut(&TensorSpec, usize, &mut [u8]) -> Result<(), Box<dyn std::error::Error + Send + Sync>> + 'a;

/// What was written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Exported {
    /// Names of the weight files.
    pub files: Vec<String>,
    /// Bytes of all weights.
    pub weight_bytes: u64,
}

/// Files beside the weights that are copied from the base where they exist.
const COMPANIONS: &[&str] = &[
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
];

/// Order in which [`write_safetensors`] lays tensors out: wider types first, so that every tensor is aligned to its type.
fn file_order(specs: &[TensorSpec]) -> Vec<&TensorSpec> {
    let mut order: Vec<&TensorSpec> = specs.iter().collect();
    order.sort_by_key(|s| std::cmp::Reverse(s.dtype.bytes()));
    order
}

/// Writes one new safetensors file and syncs it; returns its bytes.
///
/// # Errors
/// A tensor comes twice or has no elements, the callback fails, or the disk does. A partial file is removed.
pub fn write_safetensors(path: &Path, specs: &[TensorSpec], produce: &mut Produce) -> Result<u64> {
    let written = write_file(path, specs, produce);
    if written.is_err() {
        let _ = std::fs::remove_file(path);
    }
    written
}

fn write_file(path: &Path, specs: &[TensorSpec], produce: &mut Produce) -> Result<u64> {
    let order = file_order(specs);
    let mut header = Map::new();
    header.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut offset = 0u64;
    for s in &order {
        let what = if s.elems() == 0 {
            Some(format!("has shape {:?}, that is no element: its shards were not gathered before saving", s.shape))
        } else {
            let entry = json!({"dtype": s.dtype.name(), "shape": s.shape, "data_offsets": [offset, offset + s.bytes()]});
            header.insert(s.name.clone(), entry).map(|_| "comes twice".to_owned())
        };
        if let Some(what) = what {
            return Err(Error::Range { name: s.name.clone(), what });
        }
        offset += s.bytes();
    }
    let mut text = Value::Object(header).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut file = File::options().write(true).create_new(true).open(path).map_err(Error::io("create", path))?;
    let mut put = |bytes: &[u8]| file.write_all(bytes).map_err(Error::io("write", path));
    put(&(text.len() as u64).to_le_bytes())?;
    put(&text)?;
    let mut range = Vec::new();
    for s in &order {
        let (elems, width) = (s.elems(), s.dtype.bytes());
        let step = RANGE_BYTES / width.max(1);
        let mut start = 0;
        while start < elems {
            range.resize(step.min(elems - start) * width, 0);
            produce(s, start, &mut range).map_err(|source| Error::Produce { name: s.name.clone(), source })?;
            put(&range)?;
            start += step;
        }
    }
    file.sync_all().map_err(Error::io("sync", path))?;
    Ok(8 + text.len() as u64 + offset)
}

/// Writes a model directory: weights from `produce`, everything else from `base`. Replaces an older directory at `out` atomically.
///
/// # Errors
/// As [`write_safetensors`], or a file of the base cannot be read. Nothing is left at `out` but what was there.
pub fn export_model(out: &Path, base: &Path, specs: &[TensorSpec], max_shard_bytes: u64, produce: &mut Produce) -> Result<Exported> {
    let staging = Staging::new(out)?;
    let shards = shards(specs, max_shard_bytes);
    let mut exported = Exported::default();
    let mut weight_map = Map::new();
    for (i, shard) in shards.iter().enumerate() {
        let name = match shards.len() {
            1 => "model.safetensors".to_owned(),
            n => format!("model-{:05}-of-{n:05}.safetensors", i + 1),
        };
        write_safetensors(&staging.path().join(&name), shard, produce)?;
        for spec in *shard {
            weight_map.insert(spec.name.clone(), json!(name));
            exported.weight_bytes += spec.bytes();
        }
        exported.files.push(name);
    }
    if shards.len() > 1 {
        let index = json!({"metadata": {"total_size": exported.weight_bytes}, "weight_map": weight_map});
        durable::write_new(&staging.path().join(INDEX), format!("{index:#}\n").as_bytes())?;
    }
    copy_companions(staging.path(), base, specs)?;
    staging.install()?;
    Ok(exported)
}

/// Consecutive runs of at most `max` bytes; a larger tensor has a shard of its own.
fn shards(specs: &[TensorSpec], max: u64) -> Vec<&[TensorSpec]> {
    let mut all = Vec::new();
    let (mut first, mut bytes) = (0, 0u64);
    for (i, s) in specs.iter().enumerate() {
        if i > first && bytes + s.bytes() > max {
            all.push(&specs[first..i]);
            (first, bytes) = (i, 0);
        }
        bytes += s.bytes();
    }
    all.push(&specs[first..]);
    all
}

fn copy_companions(out: &Path, base: &Path, specs: &[TensorSpec]) -> Result<()> {
    let read = |name: &str| {
        let path = base.join(name);
        match std::fs::read(&path) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(Error::io("read", &path)(e)),
        }
    };
    for name in COMPANIONS {
        if let Some(bytes) = read(name)? {
            durable::write_new(&out.join(name), &bytes)?;
        }
    }
    if let Some(bytes) = read("config.json")? {
        let text = with_dtype(&bytes, specs).map_err(|e| Error::Json { path: base.join("config.json"), why: e.to_string() })?;
        durable::write_new(&out.join("config.json"), &text)?;
    }
    Ok(())
}

/// `config.json` that names the type most bytes have; unchanged where it already does.
fn with_dtype(config: &[u8], specs: &[TensorSpec]) -> serde_json::Result<Vec<u8>> {
    let mut map: Map<String, Value> = serde_json::from_slice(config)?;
    let share = |d: Stored| specs.iter().filter(|s| s.dtype == d).map(TensorSpec::bytes).sum::<u64>();
    let most = [(Stored::F32, "float32"), (Stored::BF16, "bfloat16"), (Stored::F16, "float16")].into_iter().max_by_key(|(d, _)| share(*d));
    let name = most.map_or("float32", |(_, name)| name);
    let key = if map.contains_key("dtype") { "dtype" } else { "torch_dtype" };
    if map.get(key).and_then(Value::as_str) == Some(name) {
        return Ok(config.to_vec());
    }
    map.insert(key.into(), json!(name));
    Ok(format!("{:#}\n", Value::Object(map)).into_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_are_consecutive_and_bounded() {
        let spec = |name: &str, n| TensorSpec { name: name.into(), shape: vec![n], dtype: Stored::BF16 };
        let specs = [spec("a", 5), spec("b", 5), spec("c", 20), spec("d", 1)];
        let names = |max| shards(&specs, max).iter().map(|s| s.iter().map(|t| t.name.as_str()).collect::<String>()).collect::<Vec<_>>();
        assert_eq!(names(20), ["ab", "c", "d"]);
        assert_eq!(names(10), ["a", "b", "c", "d"]);
        assert_eq!(names(u64::MAX), ["abcd"]);
    }
}
