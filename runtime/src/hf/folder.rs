//! Where does a model lie? `model.path` is a directory, or a hub id that the local Hugging Face cache holds.
//!
//! Nothing is ever downloaded: a job's ranks must not race for the network, and a download is the user's decision. Links inside
//! a directory are followed, as the cache is made of them (`snapshots/<rev>/x -> ../../blobs/<hash>`), but the names in an index must
//! be plain file names, so that a hostile index cannot make us read elsewhere.

use super::{Error, Result};
use serde::Deserialize;
use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::path::{Component, Path, PathBuf};

/// Name of the index of a sharded model.
pub const INDEX: &str = "model.safetensors.index.json";

/// Weight files of a directory.
#[derive(Debug)]
pub(crate) struct Files {
    /// The files, in name order.
    pub paths: Vec<PathBuf>,
    /// Tensor to file, where there is an index.
    pub index: Option<HashMap<String, usize>>,
}

/// Finds the directory of `model.path`: as a path relative to `base` (the configuration's folder), then to the working directory, then as a hub
/// id in the local cache (`HF_HUB_CACHE`, `HF_HOME`, `~/.cache/huggingface/hub`).
///
/// # Errors
/// [`Error::NotFound`] with the places looked at and the command that downloads the model.
pub fn resolve(model: &str, base: Option<&Path>) -> Result<PathBuf> {
    resolve_in(model, base, hub_cache(|k| std::env::var_os(k)))
}

/// [`resolve`] with the cache given.
///
/// # Errors
/// As [`resolve`].
pub fn resolve_in(model: &str, base: Option<&Path>, cache: Option<PathBuf>) -> Result<PathBuf> {
    let tried = Path::new(model);
    for candidate in base.map(|b| b.join(tried)).into_iter().chain([tried.to_path_buf()]) {
        if candidate.is_dir() {
            return Ok(candidate);
        }
        if candidate.is_file() {
            let what = format!("{} is a file; give the directory that holds config.json", candidate.display());
            return Err(Error::NotFound { id: model.into(), what });
        }
    }
    if !is_hub_id(model) {
        let what = format!("there is no such directory{}", base.map_or(String::new(), |b| format!(" (looked in {} too)", b.display())));
        return Err(Error::NotFound { id: model.into(), what });
    }
    let looked = match cache {
        Some(cache) => match snapshot(&cache, model)? {
            Some(dir) => return Ok(dir),
            None => format!("nor in the cache {}", cache.display()),
        },
        None => "and no cache folder is known (HF_HUB_CACHE, HF_HOME and HOME are unset)".into(),
    };
    Err(Error::NotFound { id: model.into(), what: format!("it is neither a directory {looked}; to download it: hf download {model}") })
}

/// The cache folder by the conventions of huggingface_hub.
fn hub_cache(var: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let set = |key| var(key).filter(|v| !v.is_empty()).map(PathBuf::from);
    set("HF_HUB_CACHE")
        .or_else(|| set("HUGGINGFACE_HUB_CACHE"))
        .or_else(|| set("HF_HOME").map(|h| h.join("hub")))
        .or_else(|| set("XDG_CACHE_HOME").map(|h| h.join("huggingface/hub")))
        .or_else(|| set("HOME").map(|h| h.join(".cache/huggingface/hub")))
}

/// `name` or `organization/name`, with the characters that the hub allows.
fn is_hub_id(id: &str) -> bool {
    let part = |p: &str| {
        let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        !p.is_empty() && p.len() <= 96 && p.chars().all(allowed) && !p.starts_with(['.', '-']) && !p.ends_with(['.', '-'])
    };
    let parts: Vec<&str> = id.split('/').collect();
    parts.len() <= 2 && parts.iter().all(|p| part(p))
}

/// The snapshot that `refs/main` names, else the only one there is.
fn snapshot(cache: &Path, id: &str) -> Result<Option<PathBuf>> {
    let repo = cache.join(format!("models--{}", id.replace('/', "--")));
    let snapshots = repo.join("snapshots");
    if let Ok(revision) = std::fs::read_to_string(repo.join("refs/main")) {
        let revision = revision.trim();
        if is_plain_name(revision) && snapshots.join(revision).is_dir() {
            return Ok(Some(snapshots.join(revision)));
        }
    }
    let Ok(entries) = std::fs::read_dir(&snapshots) else { return Ok(None) };
    let mut dirs: Vec<PathBuf> = entries.flatten().map(|e| e.path()).filter(|p| p.is_dir()).collect();
    match dirs.len() {
        0 => Ok(None),
        1 => Ok(dirs.pop()),
        n => Err(Error::NotFound {
            id: id.into(),
            what: format!("{} holds {n} revisions and refs/main names none of them; give the path of one", snapshots.display()),
        }),
    }
}

/// One component that stays in its folder.
pub(crate) fn is_plain_name(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None)) && !name.contains(['/', '\\', '\0'])
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// Weight files of a directory: those of the index, else `model.safetensors`, else the only safetensors file there is.
pub(crate) fn weight_files(dir: &Path) -> Result<Files> {
    let single = dir.join("model.safetensors");
    let index = dir.join(INDEX);
    if single.is_file() && !index.is_file() {
        return Ok(Files { paths: vec![single], index: None });
    }
    if index.is_file() {
        return indexed(dir, &index);
    }
    let no = |what: String| Error::NoWeights { dir: dir.into(), what };
    let mut found = Vec::new();
    let mut pickles = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(Error::io("list", dir))? {
        let name = entry.map_err(Error::io("list", dir))?.file_name().to_string_lossy().into_owned();
        if name.ends_with(".safetensors") {
            found.push(name);
        } else if [".bin", ".pt", ".pth"].iter().any(|e| name.ends_with(e)) {
            pickles.push(name);
        }
    }
    match found.as_slice() {
        [one] => Ok(Files { paths: vec![dir.join(one)], index: None }),
        [] if pickles.is_empty() => Err(no("there is no model.safetensors; for a random start set model.init = \"random\"".into())),
        [] => {
            pickles.sort();
            Err(no(format!(
                "there are only pickle files ({}), which can run code when they are read and never are; convert them to safetensors",
                pickles.join(", ")
            )))
        }
        many => {
            Err(no(format!("there are {} safetensors files and no {INDEX} that says what is where; is the download complete?", many.len())))
        }
    }
}

fn indexed(dir: &Path, index: &Path) -> Result<Files> {
    let text = std::fs::read_to_string(index).map_err(Error::io("read", index))?;
    let map: Index = serde_json::from_str(&text).map_err(|e| Error::Json { path: index.into(), why: e.to_string() })?;
    if map.weight_map.is_empty() {
        return Err(Error::NoWeights { dir: dir.into(), what: format!("{INDEX} names no tensor") });
    }
    let mut names: Vec<&String> = map.weight_map.values().collect();
    names.sort();
    names.dedup();
    for name in &names {
        if !is_plain_name(name) || !name.ends_with(".safetensors") {
            return Err(Error::Value {
                path: index.into(),
                key: "weight_map".into(),
                expected: "names of safetensors files in its own folder".into(),
                got: format!("{name:?}"),
            });
        }
    }
    let missing: Vec<String> = names
        .iter()
        .filter(|n| !dir.join(n).is_file())
        .map(|n| format!("{n}: the index names it, it is not there (an interrupted download?)"))
        .collect();
    if !missing.is_empty() {
        return Err(Error::Tensors { dir: dir.into(), problems: missing });
    }
    let place: HashMap<&String, usize> = names.iter().enumerate().map(|(i, n)| (*n, i)).collect();
    let by_tensor = map.weight_map.iter().map(|(tensor, file)| (tensor.clone(), place[file])).collect();
    Ok(Files { paths: names.iter().map(|n| dir.join(n)).collect(), index: Some(by_tensor) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hub_ids_and_plain_names() {
        assert!(is_hub_id("meta-llama/Llama-3.1-70B") && is_hub_id("gpt2"));
        for bad in ["/abs", "a/b/c", "../x", "a//b", "", "./x", "a/..", "a b/c"] {
            assert!(!is_hub_id(bad), "{bad}");
        }
        assert!(is_plain_name("model-00001-of-00002.safetensors"));
        for bad in ["../m.safetensors", "/etc/m.safetensors", "a/m.safetensors", "..", ".", "", "a\\m.safetensors", "a/"] {
            assert!(!is_plain_name(bad), "{bad}");
        }
    }

    #[test]
    fn cache_location_follows_the_hub_library() {
        let env =
            |pairs: &'static [(&str, &str)]| hub_cache(move |k| pairs.iter().find(|(name, _)| *name == k).map(|(_, v)| OsString::from(*v)));
        assert_eq!(env(&[("HF_HUB_CACHE", "/c"), ("HF_HOME", "/h")]), Some("/c".into()));
        assert_eq!(env(&[("HF_HOME", "/h"), ("HOME", "/u")]), Some("/h/hub".into()));
        assert_eq!(env(&[("HOME", "/u")]), Some("/u/.cache/huggingface/hub".into()));
        assert_eq!(env(&[]), None);
    }
}
