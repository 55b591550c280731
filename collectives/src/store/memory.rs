//! The store itself: a map behind a lock, and a condition that every change signals.

use super::{MAX_STORE_BYTES, MAX_VALUE_BYTES, Store, check_key, check_keys, fail, from_now};
use crate::Result;
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

#[derive(Default)]
struct Map {
    values: BTreeMap<String, Vec<u8>>,
    bytes: usize,
    closed: bool,
}

impl Map {
    fn put(&mut self, key: &str, value: &[u8]) -> Result<()> {
        if value.len() > MAX_VALUE_BYTES {
            return fail(format!("the value of '{key}' has {} bytes, expected at most {MAX_VALUE_BYTES}", value.len()));
        }
        let held = self.values.get(key).map_or(0, |v| key.len() + v.len());
        let bytes = self.bytes - held + key.len() + value.len();
        if bytes > MAX_STORE_BYTES {
            return fail(format!(
                "setting '{key}' would fill the store with {bytes} bytes, expected at most {MAX_STORE_BYTES}; delete old keys"
            ));
        }
        self.bytes = bytes;
        self.values.insert(key.to_string(), value.to_vec());
        Ok(())
    }

    fn missing(&self, keys: &[&str]) -> Option<String> {
        keys.iter().find(|k| !self.values.contains_key(**k)).map(|k| k.to_string())
    }
}

/// A store in this process. Clones share one content.
#[derive(Clone, Default)]
pub struct MemoryStore(Arc<(Mutex<Map>, Condvar)>);

impl MemoryStore {
    /// An empty store.
    pub fn new() -> MemoryStore {
        MemoryStore::default()
    }

    /// All keys that begin with `prefix`, in order, with their values: for the owner's inspection.
    pub fn list(&self, prefix: &str) -> Vec<(String, Vec<u8>)> {
        let map = self.lock();
        map.values.range(prefix.to_string()..).take_while(|(k, _)| k.starts_with(prefix)).map(|(k, v)| (k.clone(), v.clone())).collect()
    }

    /// Ends all waits, now and later, with an error.
    pub fn close(&self) {
        self.lock().closed = true;
        self.0.1.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Map> {
        self.0.0.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// `Ok(None)` when the keys are there, `Ok(Some(first missing key))` when `wait` has passed.
    pub(super) fn wait_briefly(&self, keys: &[&str], wait: Duration) -> Result<Option<String>> {
        let until = from_now(wait);
        let mut map = self.lock();
        loop {
            let Some(key) = map.missing(keys) else { return Ok(None) };
            if map.closed {
                return fail(format!("the store was closed while waiting for '{key}'"));
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(Some(key));
            }
            map = self.0.1.wait_timeout(map, left).unwrap_or_else(|e| e.into_inner()).0;
        }
    }

    pub(super) fn value(&self, key: &str) -> Option<Vec<u8>> {
        self.lock().values.get(key).cloned()
    }
}

pub(super) fn not_set<T>(key: &str, deadline: Duration) -> Result<T> {
    fail(format!("'{key}' was not set within {:.1} s; a rank that should set it did not start, or is stuck", deadline.as_secs_f64()))
}

impl Store for MemoryStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        check_key(key)?;
        self.lock().put(key, value)?;
        self.0.1.notify_all();
        Ok(())
    }

    fn get(&self, key: &str, deadline: Duration) -> Result<Vec<u8>> {
        check_key(key)?;
        let until = from_now(deadline);
        loop {
            if self.wait_briefly(&[key], until.saturating_duration_since(Instant::now()))?.is_some() {
                return not_set(key, deadline);
            }
            // Between the wait and the look the key may have been deleted again.
            if let Some(value) = self.value(key) {
                return Ok(value);
            }
        }
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64> {
        check_key(key)?;
        let mut map = self.lock();
        let old = match map.values.get(key) {
            None => 0,
            Some(text) => match std::str::from_utf8(text).ok().and_then(|t| t.parse::<i64>().ok()) {
                Some(number) => number,
                None => return fail(format!("'{key}' holds {} bytes that are no number; add needs a counter", text.len())),
            },
        };
        let Some(new) = old.checked_add(amount) else { return fail(format!("'{key}': {old} + {amount} leaves the range of i64")) };
        map.put(key, new.to_string().as_bytes())?;
        drop(map);
        self.0.1.notify_all();
        Ok(new)
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        check_keys(keys)?;
        Ok(self.lock().missing(keys).is_none())
    }

    fn wait(&self, keys: &[&str], deadline: Duration) -> Result<()> {
        check_keys(keys)?;
        match self.wait_briefly(keys, deadline)? {
            None => Ok(()),
            Some(key) => not_set(&key, deadline),
        }
    }

    fn delete(&self, key: &str) -> Result<bool> {
        check_key(key)?;
        let mut map = self.lock();
        match map.values.remove(key) {
            None => Ok(false),
            Some(value) => {
                map.bytes -= key.len() + value.len();
                Ok(true)
            }
        }
    }
}
