//! How does one collective run: entry, then steps?
//!
//! **Entry.** A rank publishes what it issued and waits until all have; then everyone compares. So a mismatch is found before
//! a byte is taken for something it is not.
//!
//! **Steps.** A message is cut into segments. In step k each rank fills its slot k % 2, announces it (`filled`), reads the slots
//! of the others once they are filled, and announces that too (`drained`). A slot is filled again only when all have
//! drained it. Filling runs one step ahead of reading, so that copies of different ranks overlap; the first slot is filled
//! before the entry, so that a short message needs a single meeting. All ranks count the same steps.

use super::Seat;
use super::shared::reached;
use super::wait::ring;
use crate::operands::Call;
use crate::{Error, Result};
use std::sync::atomic::Ordering::*;

/// One collective in progress.
pub(super) struct Pass<'a> {
    pub seat: &'a Seat,
    pub sequence: u64,
    pub call: &'a Call,
    /// Steps done before this collective.
    base: u32,
}

impl<'a> Pass<'a> {
    pub fn new(seat: &'a Seat, sequence: u64, call: &'a Call) -> Pass<'a> {
        let base = seat.page().progress.drained.load(Relaxed);
        Pass { seat, sequence, call, base }
    }

    fn what(&self) -> String {
        format!("#{} {}", self.sequence, self.call)
    }

    /// Where `rank` stages step `k` of this collective.
    pub fn slot(&self, rank: usize, k: usize) -> *mut u8 {
        self.seat.shared().slot(rank, self.base.wrapping_add(k as u32))
    }

    /// Runs `steps` steps: `fill(k)` writes this rank's slot, `take(k)` reads the others'.
    pub fn run(&self, steps: usize, fill: &dyn Fn(usize), take: &dyn Fn(usize)) -> Result<()> {
        if steps > 0 {
            self.fill(0, fill)?;
        }
        self.enter()?;
        for k in 0..steps {
            if k + 1 < steps {
                self.fill(k + 1, fill)?;
            }
            self.await_all(|progress| &progress.filled, self.base.wrapping_add(k as u32 + 1))?;
            take(k);
            self.seat.page().progress.drained.store(self.base.wrapping_add(k as u32 + 1), Release);
            ring(self.seat.page());
        }
        self.seat.page().progress.completed.store(self.sequence, Release);
        Ok(())
    }

    fn fill(&self, k: usize, fill: &dyn Fn(usize)) -> Result<()> {
        let step = self.base.wrapping_add(k as u32);
        // Step s uses the slot of step s - 2: all ranks must have drained s - 1 steps.
        self.await_all(|progress| &progress.drained, step.wrapping_sub(1))?;
        fill(k);
        self.seat.page().progress.filled.store(step.wrapping_add(1), Release);
        if k > 0 {
            ring(self.seat.page());
        }
        Ok(())
    }

    fn await_all(&self, counter: impl Fn(&super::shared::Progress) -> &std::sync::atomic::AtomicU32, target: u32) -> Result<()> {
        for peer in self.peers() {
            self.seat.wait_for(peer, &|| self.what(), &|page| reached(counter(&page.progress).load(Acquire), target))?;
        }
        Ok(())
    }

    /// The other ranks, beginning with the next: not all wait for rank 0 first.
    fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let (rank, ranks) = (self.seat.rank, self.seat.shared().ranks);
        (1..ranks).map(move |i| (rank + i) % ranks)
    }

    fn enter(&self) -> Result<()> {
        let page = self.seat.page();
        page.descriptor(self.sequence).set(self.call);
        page.progress.arrived.store(self.sequence as u32, Release);
        ring(page);
        match self.await_all(|progress| &progress.arrived, self.sequence as u32) {
            Ok(()) => self.compare().map_or(Ok(()), Err),
            // Whoever saw the difference first ended the group; those that differ report it themselves all the same.
            Err(error) => Err(self.compare().unwrap_or(error)),
        }
    }

    /// The lowest rank that arrived with another call.
    fn compare(&self) -> Option<Error> {
        let shared = self.seat.shared();
        let mine = self.seat.page().descriptor(self.sequence);
        let differs = |other: &usize| {
            let page = shared.page(*other);
            let arrived = page.progress.arrived.load(Acquire);
            reached(arrived, self.sequence as u32) && !page.descriptor(self.sequence).equals(mine)
        };
        let other = (0..shared.ranks).find(differs)?;
        let there = shared.page(other).descriptor(self.sequence).get();
        Some(Error::Mismatch {
            sequence: self.sequence,
            rank: self.seat.rank,
            here: self.call.to_string(),
            other,
            there: there.map_or("something unreadable".to_string(), |call| call.to_string()),
        })
    }
}
