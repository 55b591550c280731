//! One rank as a process of its own that measures itself:
//!
//! ```text
//! measured_rank train|load CONFIG.toml
//! ```
//!
//! `train` runs the job, `load` only makes the engine and loads the weights. The variables of a rank must be set. The last line of
//! standard output is a JSON object of bytes, see [`main`].

use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use zrt::config::Config;
use zrt::engine::Engine;
use zrt::job::{Job, engine_options};
use zrt::rank::RankEnv;
use zrt::run::{RunOptions, connect_store, cpu_device, local_options};
use zrt::store::WeightSource;
use zrt_collectives::Comm;
use zrt_collectives::local::LocalComm;
use zrt_tests::processes::proc_bytes;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [mode, file] = &arguments[..] else { panic!("usage: measured_rank train|load CONFIG.toml") };
    let env = RankEnv::read().unwrap().expect("RANK is set");
    let config = Config::load(Path::new(file), &[]).unwrap();
    let result = match mode.as_str() {
        "train" => train(&config, &env),
        _ => load(&config, &env),
    };
    println!("{result}");
}

/// `anon_peak`: the most private memory at any of the moments looked at, 5 ms apart; `file` and `shared`: the same of mapped files and
/// of shared pages.
fn train(config: &Config, env: &RankEnv) -> Value {
    let done = Arc::new(AtomicBool::new(false));
    let stop = done.clone();
    let sampler = std::thread::spawn(move || {
        let mut peak = [0; 3];
        while !stop.load(Ordering::Relaxed) {
            let status = proc_bytes("/proc/self/status");
            for (peak, field) in peak.iter_mut().zip(["RssAnon", "RssFile", "RssShmem"]) {
                *peak = status[field].max(*peak);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        peak
    });
    let summary = zrt::run::run(config, env, &RunOptions::default()).unwrap();
    done.store(true, Ordering::Relaxed);
    let [anon, file, shared] = sampler.join().unwrap();
    json!({ "anon_peak": anon, "file": file, "shared": shared, "steps": summary.steps.len() })
}

/// `resident`: memory with the weights loaded; `peak`: the most there was on the way, from the kernel's high-water mark, which is
/// reset when the engine has been made; `bytes_read`: bytes read from the model's files while loading.
fn load(config: &Config, env: &RankEnv) -> Value {
    let job = Job::open(config, env.world_size, false).unwrap();
    let store = connect_store(config, env).unwrap();
    let device = cpu_device(config, zrt::run::threads(config, env.local_world_size), false).unwrap();
    let comm: Comm = Arc::new(LocalComm::join(&*store, env.rank, env.world_size, local_options(config)).unwrap());
    let base = job.sources.base.clone().unwrap();
    let source: Arc<dyn WeightSource> = Arc::new(job.sources);
    let mut engine = Engine::new(device, comm, job.model.model.clone(), engine_options(config, &job.batch).unwrap()).unwrap();
    let before = base.bytes_read();
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    engine.load(&source).unwrap();
    let status = proc_bytes("/proc/self/status");
    json!({ "resident": status["VmRSS"], "peak": status["VmHWM"], "bytes_read": base.bytes_read() - before })
}
