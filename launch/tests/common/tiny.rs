//! A training job of well under a second: a model of 2 layers on tokens that the test makes up.

use super::*;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// A folder with `train.toml`, `train.jsonl` and, after a run, `out`.
pub struct Tiny {
    dir: tempfile::TempDir,
}

/// The small model of the golden data: byte ids, no tokenizer.
pub fn model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/tiny_model")
}

/// Numbers that look random and are the same everywhere (splitmix64).
pub struct Dice(pub u64);

impl Dice {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

impl Tiny {
    /// LoRA with dropout, deterministic, a step of 4 micro-batches, about 6 steps an epoch; `steps` of them.
    pub fn new(steps: u64) -> Tiny {
        let tiny = Tiny { dir: tempfile::tempdir().unwrap() };
        let mut dice = Dice(7);
        let mut rows = String::new();
        for _ in 0..40 {
            let ids: Vec<String> = (0..8 + dice.below(23)).map(|_| dice.below(256).to_string()).collect();
            rows += &format!("{{\"input_ids\": [{}]}}\n", ids.join(", "));
        }
        tiny.write("train.jsonl", &rows);
        let text = format!(
            "[model]\npath = \"{}\"\n[lora]\nr = 4\nalpha = 8\ndropout = 0.1\n[[dataset]]\npath = \"train.jsonl\"\ntype = \"tokenized\"\n\
             [training]\nseq_len = 32\nglobal_batch_size = 4\nsteps = {steps}\ndeterministic = true\n[optimizer]\nlr = 1e-2\n\
             [lr_scheduler]\ntype = \"cosine\"\nwarmup_steps = 2\n[precision]\ncompute = \"f32\"\n[zero]\nstage = 3\n\
             [checkpoint]\nfolder = \"out\"\n[data]\ncache_folder = \"cache\"\n[device]\nthreads = 1\n\
             [comm]\nheartbeat_timeout_seconds = 2\n",
            model().display()
        );
        tiny.write("train.toml", &text);
        tiny
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        std::fs::write(self.path(name), bytes).unwrap();
        self.path(name)
    }

    /// An empty folder, for a job that the test writes.
    pub fn empty() -> Tiny {
        Tiny { dir: tempfile::tempdir().unwrap() }
    }

    /// `zlaunch -n <ranks> train.toml --set ...`, in this folder.
    pub fn command(&self, ranks: usize, sets: &[&str]) -> Command {
        let mut command = zlaunch();
        command.current_dir(self.dir.path()).args(["-n", &ranks.to_string(), "train.toml"]);
        command.args(sets.iter().flat_map(|s| ["--set", s]));
        command
    }

    pub fn start(&self, ranks: usize, sets: &[&str]) -> Running {
        Running::start(&mut self.command(ranks, sets))
    }

    pub fn run(&self, ranks: usize, sets: &[&str]) -> Done {
        self.start(ranks, sets).finish()
    }

    /// Runs to the end.
    #[track_caller]
    pub fn train(&self, ranks: usize, sets: &[&str]) -> Done {
        let done = self.run(ranks, sets);
        assert_eq!(done.code, Some(0), "stdout:\n{}\nstderr:\n{}", done.out, done.err);
        done
    }

    /// What must be the same however a run was cut into starts: (loss, gradient norm) of each step, bit by bit. Steps follow each other.
    #[track_caller]
    pub fn losses(&self, out: &str) -> BTreeMap<u64, (u64, u64)> {
        let text = std::fs::read_to_string(self.path(out).join("metrics.jsonl")).unwrap();
        let rows: Vec<serde_json::Value> = text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
        let of = |row: &serde_json::Value| {
            let bits = |key: &str| row[key].as_f64().unwrap_or(f64::NAN).to_bits();
            (row["step"].as_u64().unwrap(), (bits("loss"), bits("grad_norm")))
        };
        let steps: Vec<u64> = rows.iter().map(|r| of(r).0).collect();
        assert!(steps.windows(2).all(|w| w[0] + 1 == w[1]), "steps of metrics.jsonl: {steps:?}");
        rows.iter().map(of).collect()
    }

    /// Steps in `metrics.jsonl` so far.
    pub fn steps(&self, out: &str) -> usize {
        std::fs::read_to_string(self.path(out).join("metrics.jsonl")).map_or(0, |t| t.lines().count())
    }

    /// The bytes of the final adapter.
    #[track_caller]
    pub fn adapter(&self, out: &str) -> Vec<u8> {
        std::fs::read(self.path(out).join("adapter/adapter_model.safetensors")).unwrap()
    }

    /// A save is under way.
    pub fn saving(&self, out: &str) -> bool {
        let entries = std::fs::read_dir(self.path(out)).into_iter().flatten().flatten();
        entries.into_iter().any(|e| e.file_name().to_string_lossy().starts_with(".tmp-step-"))
    }
}

/// Process numbers of the ranks that `launcher` has started so far, by rank.
pub fn ranks_of(launcher: u32) -> BTreeMap<usize, u32> {
    let of = |pid: u32| -> Option<(usize, u32)> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let parent = stat.rsplit_once(')')?.1.split_whitespace().nth(1)?;
        if parent != launcher.to_string() {
            return None;
        }
        let vars = std::fs::read(format!("/proc/{pid}/environ")).ok()?;
        let rank = vars.split(|b| *b == 0).find_map(|v| v.strip_prefix(b"RANK="))?;
        Some((String::from_utf8_lossy(rank).parse().ok()?, pid))
    };
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    entries.filter_map(|e| of(e.file_name().to_string_lossy().parse().ok()?)).collect()
}

/// The same once all are there.
#[track_caller]
pub fn all_ranks_of(launcher: u32, ranks: usize) -> Vec<u32> {
    until("all ranks are started", || ranks_of(launcher).len() == ranks);
    ranks_of(launcher).into_values().collect()
}
