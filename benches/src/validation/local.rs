//! Real runs on this machine beside their predictions: SmolLM2 over stage x ranks x home x grouping, and a few other keys.
//!
//! Sequences are full and every token is trained, as a plan supposes: what packing leaves empty and masks leave out would be the
//! data's, not the plan's.

use std::fmt::Write as _;
use std::path::Path;
use zrt::config::Config;
use zrt::cost::{Catalogue, Cluster, Predictor, Sheet};
use zrt::error::{Error, Result};

const SEQ: usize = 256;

/// One configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct Setting {
    /// Ranks.
    pub ranks: usize,
    /// In a word or two, for the table.
    pub name: String,
    /// Over the base configuration.
    pub set: Vec<String>,
}

/// A real run.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    /// Number in [`settings`].
    pub index: usize,
    /// Median seconds of the steps after the first.
    pub secs: f64,
    /// Bytes that rank 0 held after the last.
    pub bytes: u64,
}

/// All configurations: each stage on 1 and 2 ranks, each micro-batch for itself and all in one group; homes; then what else shapes a
/// step.
pub fn settings() -> Vec<Setting> {
    let mut out = Vec::new();
    let mut add = |ranks: usize, name: &str, set: &[&str]| {
        out.push(Setting { ranks, name: name.to_string(), set: set.iter().map(|s| s.to_string()).collect() });
    };
    for ranks in [1, 2] {
        for stage in 0..4 {
            // Without gathers there is nothing to share.
            for group in if stage < 2 { &["1"][..] } else { &["1", "all"] } {
                let set = [format!("zero.stage={stage}"), format!("training.micro_batch_group={group}")];
                add(ranks, &format!("stage {stage}, group {group}"), &set.iter().map(String::as_str).collect::<Vec<_>>());
            }
        }
    }
    let z3 = "zero.stage=3";
    for group in ["1", "all"] {
        let group_set = format!("training.micro_batch_group={group}");
        add(2, &format!("stage 3, weights on host, group {group}"), &[z3, "zero.offload_param=cpu", &group_set]);
        add(2, &format!("stage 3, own pages, group {group}"), &[z3, "comm.share_pages=false", &group_set]);
    }
    for stage in [0, 2, 3] {
        let set = format!("zero.stage={stage}");
        add(2, &format!("stage {stage}, optimizer on host"), &[&set, "zero.offload_optimizer=cpu"]);
        add(2, &format!("stage {stage}, all weights"), &[&set, "lora="]);
    }
    add(1, "stage 0, all weights", &["zero.stage=0", "lora="]);
    add(2, "stage 3, all blocks recomputed", &[z3, "activation_checkpoint.mode=full"]);
    add(2, "stage 3, micro-batch 2", &[z3, "training.micro_batch_size=2"]);
    add(2, "stage 3, f32", &[z3, "precision.compute=f32"]);
    add(2, "stage 3, deterministic", &[z3, "training.deterministic=true"]);
    add(1, "stage 0, f32", &["zero.stage=0", "precision.compute=f32"]);
    add(4, "stage 3", &[z3]);
    out
}

/// Writes data and the base configuration into `folder`; returns the configuration's path.
///
/// # Errors
/// The folder cannot be written.
pub fn prepare(folder: &Path, model: &Path) -> Result<std::path::PathBuf> {
    let write = |name: &str, text: &str| -> Result<std::path::PathBuf> {
        let path = folder.join(name);
        std::fs::write(&path, text).map_err(|source| Error::Io { path: path.display().to_string(), source })?;
        Ok(path)
    };
    let mut rows = String::new();
    for row in 0..64usize {
        // Spread over the vocabulary, all different.
        let ids: Vec<String> = (0..SEQ).map(|i| ((row * 7919 + i * 104_729) % 49_000 + 100).to_string()).collect();
        let _ = writeln!(rows, "{{\"input_ids\": [{}]}}", ids.join(", "));
    }
    write("rows.jsonl", &rows)?;
    let text = format!(
        "[model]\npath = \"{}\"\n[lora]\nr = 16\nalpha = 32\n[[dataset]]\npath = \"rows.jsonl\"\ntype = \"tokenized\"\n[data]\n\
         cache_folder = \"cache\"\n[training]\nseq_len = {SEQ}\nglobal_batch_size = 4\nsteps = 6\n[checkpoint]\nfolder = \"out\"\n",
        model.display()
    );
    write("train.toml", &text)
}

fn config(file: &Path, setting: &Setting) -> Result<Config> {
    Config::load(file, &setting.set).map_err(|e| Error::Input(format!("{}: {e}", setting.name)))
}

/// Runs setting `index`, on threads as ranks, writing nothing.
///
/// # Errors
/// Whatever stops the job.
pub fn measure(file: &Path, index: usize, setting: &Setting) -> Result<Measured> {
    let rates = zrt::rate::steps(&config(file, setting)?, setting.ranks)?;
    let mut warm: Vec<f64> = rates.steps.iter().skip(1).map(|s| s.secs).collect();
    warm.sort_by(f64::total_cmp);
    let secs = warm.get(warm.len() / 2).copied().unwrap_or(0.0);
    Ok(Measured { index, secs, bytes: rates.steps.last().map_or(0, |s| s.memory_bytes) })
}

/// A prediction beside a run.
pub struct Compared {
    /// The run.
    pub measured: Measured,
    /// Expected seconds, low and high.
    pub secs: [f64; 3],
    /// Planned bytes of rank 0.
    pub bytes: u64,
}

impl Compared {
    /// Percent by which the prediction is off.
    pub fn error(&self) -> f64 {
        100.0 * (self.secs[1] / self.measured.secs - 1.0)
    }
}

/// The machine of a file that `zlaunch calibrate` wrote, as `ranks` ranks see it.
///
/// # Errors
/// No such file, or not of this form.
pub fn machine(sheet: &Path, ranks: usize) -> Result<Cluster> {
    let text = std::fs::read_to_string(sheet).map_err(|source| Error::Io { path: sheet.display().to_string(), source })?;
    let mut catalogue = Catalogue::builtin()?;
    catalogue.add(Sheet::parse(&text, &sheet.display().to_string())?);
    Cluster::this_host(&catalogue, ranks)
}

/// Predicts what was measured.
///
/// # Errors
/// A setting that cannot be planned.
pub fn compare(file: &Path, sheet: &Path, runs: &[Measured]) -> Result<Vec<Compared>> {
    let settings = settings();
    let predictor = Predictor::default();
    let one = |measured: &Measured| {
        let setting = &settings[measured.index];
        let config = config(file, setting)?;
        let p = predictor.predict(&config, &machine(sheet, setting.ranks)?)?;
        let plan = zrt::run::dry_run(&config, setting.ranks)?;
        let bytes = plan.memory.iter().map(|(_, _, used)| used.peak_bytes as u64).sum();
        Ok(Compared { measured: measured.clone(), secs: [p.secs.low, p.secs.expected, p.secs.high], bytes })
    };
    runs.iter().map(one).collect()
}

/// `runs.csv`.
pub fn to_csv(runs: &[Measured]) -> String {
    let row = |r: &Measured| format!("{},{},{}\n", r.index, r.secs, r.bytes);
    format!("setting,secs,bytes\n{}", runs.iter().map(row).collect::<String>())
}

/// Reads `runs.csv`; rows of settings that are no more are left out.
pub fn from_csv(text: &str) -> Vec<Measured> {
    let row = |line: &str| {
        let mut cells = line.split(',');
        let measured =
            Measured { index: cells.next()?.parse().ok()?, secs: cells.next()?.parse().ok()?, bytes: cells.next()?.trim().parse().ok()? };
        (measured.index < settings().len()).then_some(measured)
    };
    text.lines().filter_map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_distinct_and_enough() {
        let all = settings();
        assert!(all.len() >= 24);
        for (i, a) in all.iter().enumerate() {
            assert!(all[..i].iter().all(|b| (a.ranks, &a.set) != (b.ranks, &b.set)), "{a:?}");
        }
    }

    #[test]
    fn runs_survive_their_file() {
        let runs = vec![Measured { index: 3, secs: 1.25, bytes: 700 }, Measured { index: 0, secs: 0.5, bytes: 1 }];
        assert_eq!(from_csv(&to_csv(&runs)), runs);
        assert!(from_csv("setting,secs,bytes\n9999,1,1\n").is_empty());
    }
}
