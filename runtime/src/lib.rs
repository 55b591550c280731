//! `zrt`: sharded training of large language models.
#![forbid(unsafe_code)]

pub mod config;
pub mod error;
pub mod model;
pub mod plan;

pub use error::{Error, Result};
pub mod hf;
pub mod data;
