//! Does `zlaunch` train right on this machine's GPUs, and how fast? Whole runs through the command, as a user starts them:
//! [`parity`] losses beside PyTorch's and beside the CPU's, [`speed`] steps of an 8B-shaped model. `benches/gpu.sh` calls it.
//!
//! This file is a run: a folder with a configuration, the command, what it wrote into `metrics.jsonl`.

pub mod parity;
pub mod speed;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use zrt_kernels::gpu::driver::{Libraries, Vendor, find};

/// The GPUs that are trained on, and the command that does it.
pub struct Machine {
    /// The `zlaunch` program.
    pub zlaunch: PathBuf,
    /// The repository, for golden data and models.
    pub root: PathBuf,
    /// What all devices are called.
    pub name: String,
    /// Devices.
    pub gpus: usize,
    /// `--set` of every run.
    pub sets: Vec<String>,
    /// The emulated driver's settings, where it is one.
    pub emulator: Option<String>,
    /// When all of it should be over.
    pub until: Instant,
}

/// One line of the table.
#[derive(Clone, Debug, Default)]
pub struct Line {
    /// What was run.
    pub part: String,
    /// On how many GPUs.
    pub ranks: usize,
    /// `right`, what is wrong, or why it was not run.
    pub outcome: String,
    /// Median seconds of a step, tokens per second of all ranks, share of the peak; none of a run for parity alone.
    pub speed: Option<[f64; 3]>,
    /// Something is wrong.
    pub wrong: bool,
}

/// What a step wrote.
#[derive(Clone, Copy, Debug, serde::Deserialize)]
pub struct Step {
    /// Mean loss.
    pub loss: f64,
    /// Norm of all gradients.
    pub grad_norm: f64,
    /// Tokens of all ranks per second.
    pub tokens_per_s: f64,
    /// Of the device's peak, 0 to 1; 0: the peak is not known.
    pub share_of_peak: f64,
    /// Duration.
    pub secs: f64,
}

impl Machine {
    /// The GPUs of this machine, or those of the emulated driver at `driver`; `None`: there are none.
    ///
    /// # Errors
    /// A driver that fails.
    pub fn find(zlaunch: PathBuf, root: PathBuf, emulated: Option<(&Path, &str)>, budget: Duration) -> Result<Option<Machine>, String> {
        let vendors = Vendor::ALL.into_iter().filter(|v| emulated.is_none_or(|(_, arch)| arch.starts_with("gfx") == (*v == Vendor::Amd)));
        for vendor in vendors {
            let libraries = Libraries { driver: emulated.map(|(driver, _)| driver.to_path_buf()), ..Libraries::default() };
            let Some(found) = find(vendor, &libraries).map_err(|e| e.to_string())? else { continue };
            let facts = found.facts(0).map_err(|e| e.to_string())?;
            let mut sets = vec![format!("device.kind={}", vendor.kind())];
            if let Some((driver, _)) = emulated {
                let driver = std::path::absolute(driver).map_err(|e| format!("{}: {e}", driver.display()))?;
                sets.extend(["driver", "compiler", "collectives"].map(|role| format!("device.libraries.{role}={}", driver.display())));
                sets.push("device.kernel_folder=kernels".into());
            }
            let emulator = emulated.map(|(_, arch)| format!("devices={};arch={arch}", found.count()));
            let until = Instant::now() + budget;
            return Ok(Some(Machine { zlaunch, root, name: facts.name, gpus: found.count(), sets, emulator, until }));
        }
        Ok(None)
    }

    /// Numbers of ranks that are tried: one, and two where there are two GPUs.
    pub fn ranks(&self) -> impl Iterator<Item = usize> {
        [1, 2].into_iter().filter(|r| *r <= self.gpus)
    }

    /// Trains `config` on `rows` in a new folder; its steps.
    ///
    /// # Errors
    /// The command's last words; it took longer than `limit`, or than the whole has left.
    pub fn train(&self, ranks: usize, job: &Job, sets: &[&str], limit: Duration) -> Result<Vec<Step>, String> {
        let io = |e: std::io::Error| e.to_string();
        let limit = limit.min(self.until.saturating_duration_since(Instant::now()));
        let folder = tempfile::tempdir().map_err(io)?;
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).map_err(io);
        write("train.toml", &job.config)?;
        write("train.jsonl", &job.rows)?;
        let log = std::fs::File::create(folder.path().join("log")).map_err(io)?;
        let mut command = Command::new(std::path::absolute(&self.zlaunch).map_err(io)?);
        command.current_dir(folder.path()).args(["-n", &ranks.to_string(), "train.toml"]);
        command.args(self.sets.iter().map(String::as_str).chain(sets.iter().copied()).flat_map(|s| ["--set", s]));
        command.envs(self.emulator.iter().map(|settings| ("ZRT_EMULATED_GPU", settings)));
        command.stdin(Stdio::null()).stdout(log.try_clone().map_err(io)?).stderr(log);
        let mut child = command.spawn().map_err(|e| format!("{}: {e}", self.zlaunch.display()))?;
        let begun = Instant::now();
        let status = loop {
            if let Some(status) = child.try_wait().map_err(io)? {
                break status;
            }
            if begun.elapsed() > limit {
                // Ranks end with their launcher.
                child.kill().and_then(|()| child.wait()).map_err(io)?;
                return Err(format!("not done after {} s", limit.as_secs()));
            }
            std::thread::sleep(Duration::from_millis(50));
        };
        if !status.success() {
            let log = std::fs::read_to_string(folder.path().join("log")).unwrap_or_default();
            let last = log.lines().rev().find(|l| !l.trim().is_empty()).unwrap_or("it said nothing");
            return Err(format!("{status}: {last}"));
        }
        let metrics = std::fs::read_to_string(folder.path().join("out/metrics.jsonl")).map_err(io)?;
        metrics.lines().map(|l| serde_json::from_str(l).map_err(|e| format!("metrics.jsonl: {e}"))).collect()
    }
}

/// A configuration, and rows of token ids for it.
pub struct Job {
    /// `train.toml`, whose data is `train.jsonl` and whose folder is `out`.
    pub config: String,
    /// `train.jsonl`.
    pub rows: String,
}

impl Job {
    /// Rows of token ids as documents of their own, in order.
    pub fn new(model: &str, more: &str, rows: &[&[i64]]) -> Job {
        let config = format!(
            "[model]\n{model}\n[[dataset]]\npath = \"train.jsonl\"\ntype = \"tokenized\"\n[data]\ncache_folder = \"cache\"\npacking = false\n\
             shuffle = false\n[checkpoint]\nfolder = \"out\"\n{more}"
        );
        Job { config, rows: rows.iter().map(|row| format!("{{\"input_ids\": {row:?}}}\n")).collect() }
    }
}

/// The table, and whether nothing is wrong.
pub fn table(lines: &[Line]) -> (String, bool) {
    let mut out = String::from("| part | GPUs | outcome | s/step | tokens/s | of peak |\n|---|--:|---|--:|--:|--:|\n");
    for line in lines {
        let speed = match line.speed {
            Some([secs, tokens, share]) if share > 0.0 => format!("{secs:.3} | {tokens:.0} | {:.1} %", 100.0 * share),
            Some([secs, tokens, _]) => format!("{secs:.3} | {tokens:.0} | not known"),
            None => "- | - | -".into(),
        };
        out += &format!("| {} | {} | {} | {speed} |\n", line.part, line.ranks, line.outcome.replace('|', "/"));
    }
    (out, lines.iter().all(|l| !l.wrong))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_says_what_was_not_run_and_what_is_wrong() {
        let good = Line { part: "8B".into(), ranks: 1, outcome: "ran".into(), speed: Some([0.5, 1000.0, 0.4]), wrong: false };
        let bad = Line { part: "tiny".into(), ranks: 2, outcome: "not done after 3 s".into(), speed: None, wrong: true };
        let (text, right) = table(&[good.clone(), bad]);
        assert!(
            !right
                && text.contains("| 8B | 1 | ran | 0.500 | 1000 | 40.0 % |")
                && text.contains("| tiny | 2 | not done after 3 s | - | - | - |")
        );
        assert!(table(&[good]).1);
    }
}
