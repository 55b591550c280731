//! Data: from files to the tokens of each micro-batch.
//!
//! ```text
//! [[dataset]] --prepare (once, cached)--> TokenSet --Schedule--> HostBatch of (step, micro-batch)
//! ```
//!
//! * [`tokenizer`] the model's tokenizer, special tokens and chat template.
//! * [`template`] conversations to text, byte for byte as transformers renders them.
//! * `mask` which characters, and so which tokens, are trained; `rows` the row formats.
//! * [`prepare()`] all rows to tokens, in parallel, with a cache on disk (`cache`).
//! * [`set`] what that yields. [`schedule`] which of it each step trains on: pure arithmetic, the same on every rank.
//! * [`show()`] the tokens as the trainer sees them, as text.

mod cache;
mod error;
mod mask;
mod packing;
pub mod prepare;
mod python;
mod rows;
pub mod schedule;
pub mod set;
pub mod show;
pub mod template;
pub mod tokenizer;

pub use error::DataError;
pub use prepare::{PrepareSpec, prepare};
pub use schedule::{HostBatch, IGNORE, Length, Sample, Schedule, ScheduleSpec};
pub use set::{Document, Report, Source, TokenSet};
pub use show::show;
pub use template::{ChatTemplate, Conversation, Rendered};
pub use tokenizer::{Encoded, Tokenizer};
