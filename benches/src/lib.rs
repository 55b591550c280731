//! Measurements that need more than one crate: predictions beside real runs and published ones, and whole runs on GPUs. Whole steps and
//! single operations are `zlaunch bench`; `benches/compare/run.sh` puts the command beside PyTorch.
#![forbid(unsafe_code)]

pub mod gpu;
pub mod validation;
