//! `zrt`: sharded training of large language models.
#![forbid(unsafe_code)]

pub mod config;
