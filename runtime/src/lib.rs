//! `zrt`: sharded training of large language models.
#![forbid(unsafe_code)]

pub mod config;
pub mod engine;
pub mod error;
pub mod grads;
pub mod model;
pub mod optim;
pub mod plan;
pub mod store;

pub use error::{Error, Result};
pub mod data;
pub mod hf;
pub mod progress;
pub mod rank;
