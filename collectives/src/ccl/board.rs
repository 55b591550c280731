//! How do ranks learn that they issued different collectives, when the library cannot tell? Each posts what it issues, when it issues it, on a
//! ring in shared memory that the others read: before the library is called, and without waiting for anyone.
//!
//! A rank may be far ahead of another, since nothing waits: it keeps what the slowest has not yet issued. An entry carries a digest of all entries
//! up to it, so that what was overwritten before it could be read is compared all the same.
#![allow(unsafe_code)]

use crate::local::{Control, Text};
use crate::operands::{Call, fold};
use crate::{Error, Result};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::*, fence};

/// Entries that others can still read.
const ENTRIES: u64 = 1024;

#[repr(C, align(64))]
struct Entry {
    /// Its number; 0 while it is written.
    sequence: AtomicU64,
    /// Of all entries up to this one.
    digest: AtomicU64,
    kind: AtomicU64,
    elems: AtomicU64,
    tag: Text<8>,
}

#[repr(C, align(64))]
struct Ring {
    /// The last number posted; numbers begin at 1.
    posted: AtomicU64,
    /// 1 when the owner has let go of the others' device memory.
    unmapped: AtomicU64,
    entries: [Entry; ENTRIES as usize],
}

/// Shared memory that a rank needs.
pub(super) const BYTES: usize = size_of::<Ring>();

struct Posted {
    sequence: u64,
    digest: u64,
    call: Call<'static>,
}

/// One rank's view of what all issued.
pub(super) struct Board {
    control: Arc<Control>,
    /// What not all others were compared with yet.
    mine: VecDeque<Posted>,
    posted: u64,
    digest: u64,
    /// By rank: the last number that was compared.
    compared: Vec<u64>,
}

impl Board {
    pub fn new(control: Arc<Control>) -> Board {
        let compared = vec![0; control.ranks()];
        Board { control, mine: VecDeque::new(), posted: 0, digest: 0, compared }
    }

    fn ring(&self, rank: usize) -> &Ring {
        // SAFETY: every rank was given `BYTES` of memory, zeroed at first and aligned to a line; a ring is made of atomics.
        unsafe { &*self.control.memory(rank).cast::<Ring>() }
    }

    /// Posts this rank's next collective and returns its number.
    ///
    /// # Errors
    /// [`Error::Mismatch`] when another rank is known to have issued another one, [`Error::Timeout`] when one has left.
    pub fn post(&mut self, call: &Call) -> Result<u64> {
        let sequence = self.posted + 1;
        self.digest = [call.kind(), call.elems as u64, call.tag_hash()].into_iter().fold(self.digest, fold);
        let ring = self.ring(self.control.rank());
        let entry = &ring.entries[(sequence % ENTRIES) as usize];
        entry.sequence.store(0, Relaxed);
        // Who reads what follows sees that the entry has changed.
        fence(Release);
        entry.digest.store(self.digest, Relaxed);
        entry.kind.store(call.kind(), Relaxed);
        entry.elems.store(call.elems as u64, Relaxed);
        entry.tag.set(&call.tag);
        entry.sequence.store(sequence, Release);
        ring.posted.store(sequence, Release);
        self.posted = sequence;
        self.mine.push_back(Posted { sequence, digest: self.digest, call: call.clone().into_owned() });
        self.look().map_or(Ok(sequence), Err)
    }

    /// How many collectives `rank` has issued.
    pub fn posted(&self, rank: usize) -> u64 {
        self.ring(rank).posted.load(Acquire)
    }

    /// This rank has let go of the others' device memory.
    pub fn unmapped(&self) {
        self.ring(self.control.rank()).unmapped.store(1, Release);
    }

    /// Whether all others have, too, or are gone.
    pub fn all_unmapped(&self) -> bool {
        self.control.peers().all(|peer| self.ring(peer).unmapped.load(Acquire) == 1 || self.control.left(peer))
    }

    /// What is wrong with the ranks' collectives, as far as can be seen now.
    pub fn look(&mut self) -> Option<Error> {
        self.compare().or_else(|| self.deserted())
    }

    /// A rank that left without issuing what this one did.
    fn deserted(&self) -> Option<Error> {
        // It left after its last post.
        let culprit = self.control.peers().find(|peer| self.control.left(*peer) && self.posted(*peer) < self.posted)?;
        let missed = self.mine.iter().find(|posted| posted.sequence > self.posted(culprit));
        let what = missed.map_or("a collective".to_string(), |posted| format!("#{} {}", posted.sequence, posted.call));
        let state = format!("left the group; {}", self.control.whereabouts(culprit));
        Some(Error::Timeout { rank: self.control.rank(), what, culprit, state, secs: 0 })
    }

    /// The first difference to another rank.
    fn compare(&mut self) -> Option<Error> {
        for peer in self.control.peers() {
            let theirs = self.posted(peer);
            let mut next = self.compared[peer] + 1;
            while next <= theirs.min(self.posted) {
                match self.read(peer, next) {
                    Some((digest, there)) => {
                        let mine = &self.mine[(next - self.mine[0].sequence) as usize];
                        if digest != mine.digest {
                            return Some(self.mismatch(peer, mine, there));
                        }
                        self.compared[peer] = next;
                        next += 1;
                    }
                    // Overwritten: the oldest that is safe to read stands for it.
                    None => next = (next + 1).max((theirs + 2).saturating_sub(ENTRIES)),
                }
            }
        }
        let all = self.control.peers().map(|peer| self.compared[peer]).min().unwrap_or(self.posted);
        while self.mine.front().is_some_and(|posted| posted.sequence <= all) {
            self.mine.pop_front();
        }
        None
    }

    fn read(&self, rank: usize, sequence: u64) -> Option<(u64, Option<Call<'static>>)> {
        let entry = &self.ring(rank).entries[(sequence % ENTRIES) as usize];
        if entry.sequence.load(Acquire) != sequence {
            return None;
        }
        let call = Call::from_words(entry.kind.load(Relaxed), entry.elems.load(Relaxed), entry.tag.get());
        let digest = entry.digest.load(Relaxed);
        fence(Acquire);
        (entry.sequence.load(Relaxed) == sequence).then_some((digest, call))
    }

    fn mismatch(&self, other: usize, mine: &Posted, there: Option<Call>) -> Error {
        Error::Mismatch {
            sequence: mine.sequence,
            rank: self.control.rank(),
            here: mine.call.to_string(),
            other,
            there: there.map_or("something unreadable".to_string(), |call| call.to_string()),
        }
    }
}
