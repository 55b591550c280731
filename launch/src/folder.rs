//! The run folder: whose it is, and what the launcher writes there.
//!
//! Two runs in one folder would destroy each other's checkpoints. A lock that the system drops with the process (flock) cannot be
//! left behind by a crash, unlike a file that merely exists.

use crate::fault::Fault;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};
use zrt::config::Config;

/// A run folder that belongs to this process until dropped.
pub struct RunFolder {
    /// The folder.
    pub path: PathBuf,
    /// The resolved configuration in it.
    pub config: PathBuf,
    /// Folder of the logs.
    pub logs: PathBuf,
    /// Holds the lock.
    _lock: File,
}

impl RunFolder {
    /// Makes and locks the folder of `config`; writes nothing else yet.
    pub fn claim(config: &Config) -> Result<RunFolder, Fault> {
        let path = config.checkpoint.folder.clone();
        let logs = path.join("logs");
        std::fs::create_dir_all(&logs).map_err(|e| {
            Fault::user(format!("run folder {}: {e}; set checkpoint.folder to a folder that can be written", path.display()))
        })?;
        let lock = lock(&path)?;
        let taken = ["metrics.jsonl", "adapter", "model"].iter().find(|name| path.join(name).exists());
        if let (Some(name), "none") = (taken, config.checkpoint.resume.as_str()) {
            return Err(Fault::user(format!(
                "run folder {} holds a run already ({name}) and checkpoint.resume is \"none\": choose another checkpoint.folder, \
                 remove that one, or continue it with checkpoint.resume = \"auto\"",
                path.display()
            )));
        }
        Ok(RunFolder { config: path.join("config.toml"), logs, path, _lock: lock })
    }

    /// When a run in this folder was first started, by its saved configuration.
    pub fn started(&self) -> Option<i64> {
        self.config.is_file().then(|| Config::load(&self.config, &[]).ok()?.data.now_secs)?
    }

    /// Writes the resolved configuration, whole or not at all.
    pub fn save_config(&self, config: &Config) -> Result<(), Fault> {
        let text = format!("# The configuration of this run, defaults included, written by zlaunch.\n{}", config.to_toml()?);
        let temporary = self.path.join(".config.toml.new");
        let write = || -> std::io::Result<()> {
            let mut file = File::create(&temporary)?;
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
            std::fs::rename(&temporary, &self.config)
        };
        write().map_err(|e| Fault::user(format!("{}: {e}; is the disk full or read-only?", self.config.display())))
    }
}

fn lock(folder: &Path) -> Result<File, Fault> {
    let path = folder.join("run.lock");
    let fail = |e: std::io::Error| Fault::user(format!("{}: {e}", path.display()));
    let mut file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path).map_err(fail)?;
    match rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(rustix::io::Errno::WOULDBLOCK) => {
            let mut holder = String::new();
            // The holder's name is for people; the refusal stands without it.
            let _ = file.read_to_string(&mut holder);
            let holder = if holder.trim().is_empty() { "another process".to_owned() } else { holder.trim().to_owned() };
            return Err(Fault::user(format!(
                "run folder {} is in use by {holder}: two runs cannot share a folder; wait for it, or set another checkpoint.folder",
                folder.display()
            )));
        }
        Err(e) => return Err(fail(e.into())),
    }
    let named =
        file.set_len(0).and_then(|()| file.rewind()).and_then(|()| writeln!(file, "pid {} on {}", std::process::id(), crate::proc::host()));
    named.map_err(fail)?;
    Ok(file)
}
