//! Which checkpoint of a run is the latest good one, and which may go? Names sort by step; a damaged one is skipped with its
//! reason and never counts as one that is kept.

use super::{Error, Reader, Result};
use crate::durable::{self, TMP_PREFIX, at};
use std::path::{Path, PathBuf};

/// How much of a checkpoint is checked while looking for the latest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Check {
    /// Manifest, indices, sizes and coverage. Data is still checked as it is read.
    Sizes,
    /// Every byte too, so that a damaged one is skipped now.
    Full,
}

/// Result of the search for the latest checkpoint.
#[derive(Debug, Default)]
pub struct Latest {
    /// The newest good one.
    pub found: Option<Reader>,
    /// Newer ones that were skipped, each with its reason.
    pub skipped: Vec<(PathBuf, Error)>,
}

/// Folder of a step's checkpoint.
pub fn step_dir(run: &Path, step: u64) -> PathBuf {
    run.join(format!("step-{step:08}"))
}

/// Temporary folder in which all ranks write a step's checkpoint; they agree on the nonce.
pub fn tmp_dir(run: &Path, step: u64, nonce: &str) -> PathBuf {
    run.join(format!("{TMP_PREFIX}step-{step:08}.{nonce}"))
}

/// Steps of a run that have a folder, newest first, whole or not.
///
/// # Errors
/// The run folder cannot be listed; one that does not exist has none.
pub fn steps(run: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let entries = match std::fs::read_dir(run) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(at("list", run))?,
    };
    let mut all = Vec::new();
    for entry in entries {
        let entry = entry.map_err(at("list", run))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let step = name.strip_prefix("step-").filter(|d| d.len() >= 8 && d.bytes().all(|b| b.is_ascii_digit()));
        if let Some(step) = step.and_then(|d| d.parse().ok()) {
            all.push((step, entry.path()));
        }
    }
    all.sort_by_key(|(step, _)| std::cmp::Reverse(*step));
    Ok(all)
}

fn open(dir: &Path, check: Check) -> Result<Reader> {
    let reader = Reader::open(dir)?;
    if check == Check::Full {
        reader.verify()?;
    }
    Ok(reader)
}

/// Finds the newest checkpoint that is good, and says why newer ones are not.
///
/// # Errors
/// The run folder cannot be listed.
pub fn latest(run: &Path, check: Check) -> Result<Latest> {
    let mut result = Latest::default();
    for (_, dir) in steps(run)? {
        match open(&dir, check) {
            Ok(reader) => {
                result.found = Some(reader);
                break;
            }
            Err(e) => result.skipped.push((dir, e)),
        }
    }
    Ok(result)
}

/// Removes all but the newest `k` good checkpoints (at least one); returns the folders removed. A damaged one newer than those stays for inspection.
///
/// # Errors
/// A folder cannot be listed or removed.
pub fn keep_latest(run: &Path, k: usize) -> Result<Vec<PathBuf>> {
    let mut good = 0;
    let mut removed = Vec::new();
    for (_, dir) in steps(run)? {
        if good < k.max(1) {
            good += usize::from(open(&dir, Check::Sizes).is_ok());
            continue;
        }
        // Renamed first: a kill in the middle of removing leaves no half checkpoint under a real name.
        let doomed = durable::beside(&dir);
        std::fs::rename(&dir, &doomed).map_err(at("rename", &dir))?;
        std::fs::remove_dir_all(&doomed).map_err(at("remove", &doomed))?;
        removed.push(dir);
    }
    Ok(removed)
}

/// Removes what killed processes left unfinished in the run folder; called once at start, before any rank saves. Returns the names.
pub fn sweep(run: &Path) -> Vec<String> {
    durable::sweep(run)
}
