//! A job of real processes: `measured_rank` once per rank, with the variables that the launcher sets, on SmolLM2 and the examples' data.

use crate::smollm2;
use serde_json::Value;
use std::collections::HashMap;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use zrt::config::Config;
use zrt::job::Job;
use zrt_collectives::store::{Secret, ServerOptions, TcpStoreServer};

/// SmolLM2, LoRA r16 on all linear layers, bf16, sequences of 512, micro-batch 1, two steps, ZeRO-3; `set` as `--set` takes it.
/// The data is tokenized when this returns. `None` where the model was not made.
pub fn smollm2_job(dir: &Path, ranks: usize, set: &[&str]) -> Option<(Config, PathBuf)> {
    let model = smollm2()?;
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/data/train.jsonl");
    let text = format!(
        "[model]\npath = {model:?}\n[lora]\nr = 16\nalpha = 32\n[[dataset]]\npath = {data:?}\ntype = \"messages\"\n\
         [data]\ncache_folder = {cache:?}\n[training]\nseq_len = 512\nmicro_batch_size = 1\nsteps = 2\n[zero]\nstage = 3\n\
         [device]\nthreads = 1\n[checkpoint]\nfolder = {run:?}\n",
        cache = dir.join("tokens"),
        run = dir.join("run"),
    );
    let path = dir.join("job.toml");
    std::fs::write(&path, text).unwrap();
    let set: Vec<String> = set.iter().map(|s| s.to_string()).collect();
    let config = Config::load(&path, &set).unwrap();
    Job::open(&config, ranks, false).unwrap();
    std::fs::write(&path, config.to_toml().unwrap()).unwrap();
    Some((config, path))
}

/// What the processes of a job said, and what was seen of them from outside.
pub struct Measured {
    /// The JSON object of each rank.
    pub ranks: Vec<Value>,
    /// The most of the sum over ranks of their proportional share of memory (PSS), in bytes.
    pub pss_peak: u64,
}

/// Starts `program mode config` as `ranks` ranks and waits for them.
pub fn run(program: &str, mode: &str, config: &Path, ranks: usize) -> Measured {
    let dir = tempfile::tempdir().unwrap();
    let secret_file = dir.path().join("secret");
    let secret = Secret::create(&secret_file).unwrap();
    let server = TcpStoreServer::start(secret, ServerOptions::default()).unwrap();
    let number = |n: usize| n.to_string();
    let mut children: Vec<Child> = (0..ranks)
        .map(|rank| {
            Command::new(program)
                .arg(mode)
                .arg(config)
                .env("RANK", number(rank))
                .env("WORLD_SIZE", number(ranks))
                .env("LOCAL_RANK", number(rank))
                .env("LOCAL_WORLD_SIZE", number(ranks))
                .env("MASTER_ADDR", server.address().ip().to_string())
                .env("MASTER_PORT", server.address().port().to_string())
                .env("ZLAUNCH_JOB", &secret_file)
                .stdout(Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect();
    let mut pss_peak = 0;
    // A rank that fails reports it to the others, so all end and none is waited for in vain.
    while children.iter_mut().any(|c| c.try_wait().unwrap().is_none()) {
        let pss = |c: &Child| proc_bytes(&format!("/proc/{}/smaps_rollup", c.id())).get("Pss").copied().unwrap_or(0);
        pss_peak = pss_peak.max(children.iter().map(pss).sum());
        std::thread::sleep(Duration::from_millis(20));
    }
    let answer = |mut child: Child| {
        let mut text = String::new();
        child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
        assert!(child.wait().unwrap().success(), "a rank failed: {text}");
        serde_json::from_str(text.lines().last().unwrap_or_default()).unwrap()
    };
    Measured { ranks: children.into_iter().map(answer).collect(), pss_peak }
}

/// The fields of a file of the proc system that are given in kB, as bytes.
pub fn proc_bytes(file: &str) -> HashMap<String, u64> {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    let field = |line: &str| {
        let (name, rest) = line.split_once(':')?;
        let kb: u64 = rest.trim().strip_suffix("kB")?.trim().parse().ok()?;
        Some((name.to_string(), kb * 1024))
    };
    text.lines().filter_map(field).collect()
}
