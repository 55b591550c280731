//! Why is the group lost? One cell in shared memory, written once by the first rank that knows, read by all.

use super::shared::Text;
use crate::Error;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};

const CLAIMED: u32 = 1;
const SET: u32 = 2;

const ABORTED: u64 = 1;
const TIMEOUT: u64 = 2;
const MISMATCH: u64 = 3;

/// The first error of a group.
#[repr(C)]
pub(super) struct LostCell {
    state: AtomicU32,
    by: AtomicU32,
    kind: AtomicU64,
    other: AtomicU64,
    secs: AtomicU64,
    sequence: AtomicU64,
    a: Text<64>,
    b: Text<64>,
}

impl LostCell {
    /// Keeps `error` of rank `by` if it is the first; true then.
    pub fn set(&self, by: usize, error: &Error) -> bool {
        if self.state.compare_exchange(0, CLAIMED, AcqRel, Acquire).is_err() {
            return false;
        }
        let (kind, other, secs, sequence, a, b) = match error {
            Error::Timeout { what, culprit, state, secs, .. } => (TIMEOUT, *culprit, *secs, 0, what.clone(), state.clone()),
            Error::Mismatch { sequence, other, here, there, .. } => (MISMATCH, *other, 0, *sequence, here.clone(), there.clone()),
            Error::Aborted { reason, .. } => (ABORTED, 0, 0, 0, reason.clone(), String::new()),
            other => (ABORTED, 0, 0, 0, other.to_string(), String::new()),
        };
        self.by.store(by as u32, Relaxed);
        self.kind.store(kind, Relaxed);
        self.other.store(other as u64, Relaxed);
        self.secs.store(secs, Relaxed);
        self.sequence.store(sequence, Relaxed);
        self.a.set(&a);
        self.b.set(&b);
        self.state.store(SET, Release);
        true
    }

    pub fn is_set(&self) -> bool {
        self.state.load(Acquire) != 0
    }

    /// The group's error as `rank` reports it: what it waited in and for how long is its own, the culprit is the group's.
    pub fn get(&self, rank: usize, waited: Option<(&str, u64)>) -> Option<Error> {
        // A writer needs a microsecond; one that was killed in it must not make us wait for ever.
        for _ in 0..1000 {
            match self.state.load(Acquire) {
                0 => return None,
                SET => return Some(self.read(rank, waited)),
                _ => std::thread::yield_now(),
            }
        }
        let by = self.by.load(Relaxed) as usize;
        Some(Error::Aborted { rank, by, reason: "the rank that aborted died before it could say why".to_string() })
    }

    fn read(&self, rank: usize, waited: Option<(&str, u64)>) -> Error {
        let by = self.by.load(Relaxed) as usize;
        let other = self.other.load(Relaxed) as usize;
        let (a, b) = (self.a.get(), self.b.get());
        match self.kind.load(Relaxed) {
            TIMEOUT => {
                let (what, secs) = waited.map_or((a, self.secs.load(Relaxed)), |(what, secs)| (what.to_string(), secs));
                // Nobody waits for itself: who is named reads what the other one said.
                let rank = if rank == other { by } else { rank };
                Error::Timeout { rank, what, culprit: other, state: b, secs }
            }
            MISMATCH => Error::Mismatch { sequence: self.sequence.load(Relaxed), rank: by, here: a, other, there: b },
            _ => Error::Aborted { rank, by, reason: a },
        }
    }
}
