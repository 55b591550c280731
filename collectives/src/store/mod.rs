//! How do ranks find each other? A small key-value store in which ranks set, wait for and count keys, always with a deadline.
//!
//! * [`MemoryStore`] lives in one process: ranks as threads, tests, and the inside of the server.
//! * [`TcpStoreServer`] and [`TcpStore`] carry the same calls between processes, authenticated by the job's [`Secret`].

mod memory;
mod secret;
mod tcp;
mod wire;

pub use memory::MemoryStore;
pub use secret::Secret;
pub use tcp::{ServerOptions, TcpStore, TcpStoreServer};

use crate::{Error, Result};
use std::time::{Duration, Instant};

/// Longest key, in bytes.
pub const MAX_KEY_BYTES: usize = 1024;
/// Longest value, in bytes.
pub const MAX_VALUE_BYTES: usize = 8 << 20;
/// Most bytes of keys and values that one store holds.
pub const MAX_STORE_BYTES: usize = 256 << 20;
/// Most keys in one `check` or `wait`.
pub const MAX_KEYS: usize = 1024;

/// A key-value store shared by the ranks of a job. All errors are [`Error::Rendezvous`].
pub trait Store: Send + Sync {
    /// Sets `key`, replacing what it held.
    fn set(&self, key: &str, value: &[u8]) -> Result<()>;
    /// The value of `key`; waits for it to be set, at most `deadline`.
    fn get(&self, key: &str, deadline: Duration) -> Result<Vec<u8>>;
    /// Adds to the number in `key` (decimal text; 0 when absent) and returns the sum.
    fn add(&self, key: &str, amount: i64) -> Result<i64>;
    /// True when all `keys` are set now.
    fn check(&self, keys: &[&str]) -> Result<bool>;
    /// Waits until all `keys` are set, at most `deadline`; the error names the first that is not.
    fn wait(&self, keys: &[&str], deadline: Duration) -> Result<()>;
    /// Removes `key`; true when it was there.
    fn delete(&self, key: &str) -> Result<bool>;
}

/// Longest wait: a day. Longer deadlines count as this.
const MAX_WAIT: Duration = Duration::from_secs(86_400);

/// When a wait of `deadline` that begins now ends; any duration is fine.
pub(crate) fn from_now(deadline: Duration) -> Instant {
    Instant::now() + deadline.min(MAX_WAIT)
}

fn fail<T>(what: String) -> Result<T> {
    Err(Error::Rendezvous(what))
}

fn check_key(key: &str) -> Result<()> {
    if key.is_empty() || key.len() > MAX_KEY_BYTES {
        return fail(format!("a key has {} bytes, expected 1 to {MAX_KEY_BYTES}", key.len()));
    }
    Ok(())
}

fn check_keys(keys: &[&str]) -> Result<()> {
    if keys.len() > MAX_KEYS {
        return fail(format!("{} keys in one call, expected at most {MAX_KEYS}", keys.len()));
    }
    keys.iter().try_for_each(|key| check_key(key))
}
