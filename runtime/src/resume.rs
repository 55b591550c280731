//! Which checkpoint does a run continue from, and may it? Rank 0 chooses, the others open the same.

use crate::checkpoint::{self, Check, Reader};
use crate::error::{Error, Result};
use crate::job::{Job, input};
use crate::trainer::{Surroundings, wait_word};
use std::path::Path;
use std::sync::Arc;

/// The checkpoint to continue, or `None` for a new run. Collective.
pub fn find_checkpoint(job: &Job, at: &Surroundings) -> Result<Option<Arc<Reader>>> {
    if !at.write {
        return Ok(None);
    }
    let folder = &job.config.checkpoint.folder;
    let key = "resume";
    if at.comm.rank() == 0 {
        let chosen = choose_checkpoint(job, folder);
        let word = match &chosen {
            Ok(Some(reader)) => format!("from {}", reader.dir().display()),
            Ok(None) => String::new(),
            Err(e) => format!("error {e}"),
        };
        at.store.set(key, word.as_bytes())?;
        return chosen.map(|c| c.map(Arc::new));
    }
    // Rank 0 reads every byte of the newest checkpoint to be sure of it.
    let word = wait_word(at, key)?;
    let word = String::from_utf8_lossy(&word).into_owned();
    match word.split_once(' ') {
        None => Ok(None),
        Some(("from", dir)) => Ok(Some(Arc::new(Reader::open(Path::new(dir)).map_err(input)?))),
        Some((_, why)) => Err(Error::Input(why.to_string())),
    }
}

fn choose_checkpoint(job: &Job, folder: &Path) -> Result<Option<Reader>> {
    std::fs::create_dir_all(folder).map_err(|source| Error::Io { path: folder.display().to_string(), source })?;
    for name in checkpoint::sweep(folder) {
        tracing::info!("removed {name}, left unfinished by an earlier run");
    }
    let reader = match job.config.checkpoint.resume.as_str() {
        "auto" => {
            let latest = checkpoint::latest(folder, Check::Full).map_err(input)?;
            for (dir, why) in &latest.skipped {
                tracing::warn!("checkpoint {} is not usable: {why}", dir.display());
            }
            latest.found
        }
        "none" => {
            let latest = checkpoint::latest(folder, Check::Sizes).map_err(input)?;
            if let Some(found) = latest.found {
                return Err(Error::Input(format!(
                    "{} holds a run already ({}): choose another checkpoint.folder, or checkpoint.resume = \"auto\" to continue it",
                    folder.display(),
                    found.dir().display()
                )));
            }
            None
        }
        path => Some(open_named(Path::new(path))?),
    };
    if let Some(reader) = &reader {
        check_resumable(job, reader)?;
        let step = reader.manifest().step;
        let named = !matches!(job.config.checkpoint.resume.as_str(), "auto" | "none");
        if named && let Some((later, dir)) = checkpoint::steps(folder).map_err(input)?.into_iter().find(|(s, _)| *s > step) {
            return Err(Error::Input(format!(
                "{} is of step {step}, but {} holds step {later}, which would count as the newer one: move it away, or choose another checkpoint.folder",
                reader.dir().display(),
                dir.display()
            )));
        }
        tracing::info!("continuing after step {} from {}", reader.manifest().step, reader.dir().display());
    }
    Ok(reader)
}

/// Can `job` continue what its run folder holds? Called before ranks start; they check again, and every byte.
///
/// # Errors
/// [`Error::Input`]: the checkpoint is of another base or configuration.
pub fn check_resume(job: &Job) -> Result<()> {
    let reader = match job.config.checkpoint.resume.as_str() {
        "none" => None,
        "auto" => checkpoint::latest(&job.config.checkpoint.folder, Check::Sizes).map_err(input)?.found,
        path => Some(open_named(Path::new(path))?),
    };
    reader.map_or(Ok(()), |reader| check_resumable(job, &reader))
}

/// The checkpoint that `checkpoint.resume` names: a checkpoint's folder, or a run's, whose latest it is.
fn open_named(path: &Path) -> Result<Reader> {
    if path.is_dir() && !path.join(checkpoint::MANIFEST).is_file() {
        let latest = checkpoint::latest(path, Check::Sizes).map_err(input)?;
        return latest.found.ok_or_else(|| Error::Input(format!("checkpoint.resume: {} holds no usable checkpoint", path.display())));
    }
    Reader::open(path).map_err(input)
}

fn check_resumable(job: &Job, reader: &Reader) -> Result<()> {
    let (dir, manifest) = (reader.dir().display(), reader.manifest());
    if let Some(what) = manifest.base.difference(&job.base) {
        return Err(Error::Input(format!("checkpoint {dir} is of another base model: {what}")));
    }
    let (now, then) = (job.resume_keys(), &manifest.extra["keys"]);
    let differing: Vec<String> = now
        .as_object()
        .into_iter()
        .flatten()
        .filter(|(k, v)| then.get(k) != Some(v) && (!k.starts_with("lora.") || then["trained"] == now["trained"]))
        .map(|(k, v)| format!("{k}: {} there, {v} here", then.get(k).unwrap_or(&serde_json::Value::Null)))
        .collect();
    if !differing.is_empty() {
        return Err(Error::Input(format!(
            "checkpoint {dir} is of another configuration:\n  {}\nset them back, or start anew in another checkpoint.folder",
            differing.join("\n  ")
        )));
    }
    Ok(())
}
