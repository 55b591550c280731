//! How does a file or folder come to exist whole or not at all? Written beside its place under a name that no reader takes
//! for real, synced, renamed, and the parent synced, as rename is atomic and a crash keeps one of the two.
//!
//! Everything that the runtime saves goes through here, so that a full disk, a kill or a power cut leaves what was there before.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// Prefix of everything that is not finished yet.
pub const TMP_PREFIX: &str = ".tmp-";

/// A file operation that failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} {}: {source}{}", path.display(), hint(source))]
pub struct Error {
    /// `"write"`, `"sync"`, `"rename"`, ...
    pub action: &'static str,
    /// The file or folder.
    pub path: PathBuf,
    /// The system's reason.
    pub source: io::Error,
}

/// Advice for the system errors that users can act on.
pub fn hint(e: &io::Error) -> &'static str {
    use io::ErrorKind::*;
    match e.kind() {
        StorageFull | QuotaExceeded => "; free some space or choose another folder (what was saved before is untouched)",
        ReadOnlyFilesystem | PermissionDenied => {
            "; this user may not do that here: check the folder's owner and mount, or choose another folder"
        }
        _ => "",
    }
}

/// Attaches what was done to which path.
pub fn at(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_path_buf();
    move |source| Error { action, path, source }
}

/// A name part that no other process or call uses.
pub fn nonce() -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos() as u64);
    format!("{:x}-{nanos:x}-{:x}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed))
}

/// Makes a folder's entries survive a power cut.
///
/// # Errors
/// The system's.
pub fn sync_dir(dir: &Path) -> Result<(), Error> {
    // Some file systems cannot sync folders and say EINVAL; they need no sync.
    match File::open(dir).and_then(|f| f.sync_all()) {
        Err(e) if e.kind() != io::ErrorKind::InvalidInput => Err(at("sync", dir)(e)),
        _ => Ok(()),
    }
}

/// Writes and syncs a new file.
///
/// # Errors
/// The system's; the file is removed again.
pub fn write_new(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    let write = || {
        let mut f = File::options().write(true).create_new(true).open(path)?;
        f.write_all(bytes)?;
        f.sync_all()
    };
    write().map_err(|e| {
        if e.kind() != io::ErrorKind::AlreadyExists {
            let _ = fs::remove_file(path);
        }
        at("write", path)(e)
    })
}

/// Replaces a file by `bytes`, atomically.
///
/// # Errors
/// The system's; what was there stays.
pub fn replace_file(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    let tmp = beside(path);
    write_new(&tmp, bytes)?;
    fs::rename(&tmp, path).map_err(|e| {
        let _ = fs::remove_file(&tmp);
        at("rename", path)(e)
    })?;
    sync_dir(parent(path))
}

/// A temporary name next to `path`.
pub fn beside(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    parent(path).join(format!("{TMP_PREFIX}{name}.{}", nonce()))
}

fn parent(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Syncs the files of a folder (not below it) and the folder.
///
/// # Errors
/// The system's.
pub fn sync_files(dir: &Path) -> Result<(), Error> {
    for entry in fs::read_dir(dir).map_err(at("list", dir))? {
        let path = entry.map_err(at("list", dir))?.path();
        if path.is_file() {
            File::open(&path).and_then(|f| f.sync_all()).map_err(at("sync", &path))?;
        }
    }
    sync_dir(dir)
}

/// Puts the folder `tmp` in the place of `dir`; an older `dir` is swapped out in the same instant and then removed.
///
/// # Errors
/// The system's; then `dir` is as before, and `tmp` still there.
pub fn install(tmp: &Path, dir: &Path) -> Result<(), Error> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    if dir.exists() && !dir.is_dir() {
        return Err(at("replace", dir)(io::ErrorKind::NotADirectory.into()));
    }
    sync_files(tmp)?;
    if dir.exists() {
        match renameat_with(CWD, tmp, CWD, dir, RenameFlags::EXCHANGE) {
            Ok(()) => fs::remove_dir_all(tmp).map_err(at("remove", tmp))?,
            // File systems without an exchange: two renames, with a moment in which only the new name is missing.
            Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) => {
                let old = beside(dir);
                fs::rename(dir, &old).map_err(at("rename", dir))?;
                if let Err(e) = fs::rename(tmp, dir) {
                    let _ = fs::rename(&old, dir);
                    return Err(at("rename", dir)(e));
                }
                fs::remove_dir_all(&old).map_err(at("remove", &old))?;
            }
            Err(e) => return Err(at("rename", dir)(e.into())),
        }
    } else {
        fs::rename(tmp, dir).map_err(at("rename", dir))?;
    }
    sync_dir(parent(dir))
}

/// A folder in the making: removed when dropped before [`Staging::install`].
#[derive(Debug)]
pub struct Staging {
    tmp: PathBuf,
    dir: PathBuf,
}

impl Staging {
    /// Makes a temporary folder beside `dir`, and the folders above.
    ///
    /// # Errors
    /// The system's.
    pub fn new(dir: &Path) -> Result<Staging, Error> {
        let tmp = beside(dir);
        fs::create_dir_all(&tmp).map_err(at("create", &tmp))?;
        Ok(Staging { tmp, dir: dir.into() })
    }

    /// Where to write.
    pub fn path(&self) -> &Path {
        &self.tmp
    }

    /// Puts the folder in its place, replacing an older one.
    ///
    /// # Errors
    /// The system's; then the older one stays and the new one is removed.
    pub fn install(self) -> Result<(), Error> {
        install(&self.tmp, &self.dir)
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.tmp);
    }
}

/// Removes what earlier processes left unfinished in `dir`; returns the names. Only for folders that one run owns.
pub fn sweep(dir: &Path) -> Vec<String> {
    let mut removed = Vec::new();
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with(TMP_PREFIX) {
            let path = entry.path();
            let gone = if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
            if gone.is_ok() {
                removed.push(name);
            }
        }
    }
    removed.sort();
    removed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn install_replaces_whole_folders_and_drop_removes() {
        let top = tempfile::tempdir().unwrap();
        let dir = top.path().join("d");
        for text in ["one", "two"] {
            let s = Staging::new(&dir).unwrap();
            write_new(&s.path().join(text), text.as_bytes()).unwrap();
            s.install().unwrap();
            let names: Vec<_> = fs::read_dir(&dir).unwrap().map(|e| e.unwrap().file_name()).collect();
            assert_eq!(names, [text]);
        }
        drop(Staging::new(&dir).unwrap());
        assert_eq!(fs::read_dir(top.path()).unwrap().count(), 1);
        fs::create_dir(top.path().join(".tmp-x.1")).unwrap();
        assert_eq!(sweep(top.path()), [".tmp-x.1"]);
    }
}
