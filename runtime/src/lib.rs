//! `zrt`: sharded training of large language models.
#![forbid(unsafe_code)]

pub mod auto;
pub mod checkpoint;
pub mod config;
pub mod cores;
pub mod cost;
pub mod data;
pub mod device;
pub mod durable;
pub mod engine;
pub mod error;
pub mod export;
pub mod grads;
pub mod hf;
pub mod hooks;
pub mod job;
pub mod lr;
pub mod merge;
pub mod model;
pub mod optim;
pub mod peft;
pub mod plan;
pub mod progress;
pub mod rank;
pub mod rate;
pub mod resume;
pub mod run;
pub mod saver;
pub mod source;
pub mod store;
pub mod trainer;

pub use error::{Error, Result};
