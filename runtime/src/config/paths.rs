//! What relative paths in a configuration are relative to.
//!
//! A file can be moved with its data and model, so its paths count from its own folder; a path typed on the command line counts
//! from where it was typed. Inputs that are not at the first are looked for at the second. All end up absolute, so that ranks
//! and the saved configuration do not depend on a working directory.

use super::Config;
use std::path::{Path, PathBuf};

/// Makes the paths of `config` absolute. `typed` tells which dotted keys came from the command line.
pub(super) fn resolve(config: &mut Config, folder: &Path, typed: impl Fn(&str) -> bool) {
    let here = std::env::current_dir().unwrap_or_else(|_| PathBuf::from("."));
    let folder = here.join(folder);
    let bases = |key: &str| if typed(key) { [&here, &folder] } else { [&folder, &here] };
    let input = |path: &Path, key: &str| -> PathBuf {
        let [first, second] = bases(key);
        let (a, b) = (first.join(path), second.join(path));
        if !a.exists() && b.exists() { tidy(&b) } else { tidy(&a) }
    };
    let output = |path: &Path, key: &str| real(&tidy(&bases(key)[0].join(path)));

    // A hub id (`owner/name`) that is no folder here stays as it is, for the look-up in the local cache.
    let model = input(Path::new(&config.model.path), "model.path");
    if model.exists() {
        config.model.path = model.to_string_lossy().into_owned();
    }
    for (name, list) in [("dataset", &mut config.dataset), ("eval_dataset", &mut config.eval_dataset)] {
        for (i, dataset) in list.iter_mut().enumerate() {
            dataset.path = input(&dataset.path, &format!("{name}.{i}.path"));
        }
    }
    if let Some(path) = config.lora.as_mut().and_then(|l| l.adapter_path.as_mut()) {
        *path = input(path, "lora.adapter_path");
    }
    if let Some(path) = &mut config.data.chat_template {
        *path = input(path, "data.chat_template");
    }
    if let Some(path) = &mut config.data.cache_folder {
        *path = output(path, "data.cache_folder");
    }
    config.checkpoint.folder = output(&config.checkpoint.folder, "checkpoint.folder");
    if !matches!(config.checkpoint.resume.as_str(), "auto" | "none") {
        let path = input(Path::new(&config.checkpoint.resume), "checkpoint.resume");
        config.checkpoint.resume = path.to_string_lossy().into_owned();
    }
}

/// Drops `.` parts; `..` stays, since what it means depends on links.
fn tidy(path: &Path) -> PathBuf {
    path.components().filter(|c| !matches!(c, std::path::Component::CurDir)).collect()
}

/// The path without links and `..` as far as it exists; the rest, which the run will make, stays as written.
fn real(path: &Path) -> PathBuf {
    for parent in path.ancestors() {
        if let (Ok(real), Ok(rest)) = (parent.canonicalize(), path.strip_prefix(parent)) {
            return if rest.as_os_str().is_empty() { real } else { real.join(rest) };
        }
    }
    path.to_path_buf()
}
