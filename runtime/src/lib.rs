//! `zrt`: sharded training of large language models.
#![forbid(unsafe_code)]

pub mod checkpoint;
pub mod config;
pub mod data;
pub mod durable;
pub mod engine;
pub mod error;
pub mod grads;
pub mod hf;
pub mod merge;
pub mod model;
pub mod optim;
pub mod peft;
pub mod plan;
pub mod progress;
pub mod rank;
pub mod store;

pub use error::{Error, Result};
