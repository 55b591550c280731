//! Measurements that print their figure: [`step_rates`] trains a configuration on threads as ranks and says how fast each step was.
//! `benches/compare/run.sh` puts the command beside PyTorch DDP; the rates of single operations and of collectives are examples of
//! their crates (`matmul_rate`, `attention_rate`, `collective_rate`).
#![forbid(unsafe_code)]

pub mod validation;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use zrt::config::Config;
use zrt::error::{Error, Result};
use zrt::job::Job;
use zrt::progress::StepReport;
use zrt::run::{cpu_device, local_options};
use zrt::trainer::{Surroundings, train};
use zrt_collectives::local::LocalGroup;
use zrt_collectives::store::{MemoryStore, Store};

/// Trains `file` under `set` (as `--set` takes it) on `ranks` threads as ranks, writing nothing, and returns rank 0's report of each step.
///
/// # Errors
/// Whatever stops the job, of the first rank that failed.
pub fn step_rates(file: &Path, set: &[String], ranks: usize) -> Result<Vec<StepReport>> {
    let config = Config::load(file, set).map_err(|e| Error::Input(e.to_string()))?;
    let job = Job::open(&config, ranks, true)?;
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let one = |comm| {
        let device = cpu_device(&config, zrt::run::threads(&config, ranks), false)?;
        let at = Surroundings { device, comm, store: store.clone(), stop: Arc::new(AtomicBool::new(false)), write: false };
        Ok(train(&job, at, &mut [])?.steps)
    };
    let comms = LocalGroup::threads(ranks, local_options(&config))?;
    std::thread::scope(|scope| {
        let threads: Vec<_> = comms.into_iter().map(|comm| scope.spawn(|| one(comm))).collect();
        let panicked = || Err(Error::Model("a rank panicked".into()));
        let reports = threads.into_iter().map(|t| t.join().unwrap_or_else(|_| panicked())).collect::<Result<Vec<_>>>()?;
        Ok(reports.into_iter().next().unwrap_or_default())
    })
}
