//! How does one collective run: entry, then mail or steps?
//!
//! **Entry.** A rank announces what it issued and waits until all have; then everyone compares. So a mismatch is found before
//! a byte is taken for something it is not.
//!
//! **Mail.** A short message follows the entry in lines that carry their own number ([`Pass::exchange`]): one trip between cores in all. While a
//! rank reads, it takes back the lines that its next message will be written to: they are still with the cores that read them.
//!
//! **Steps.** A long message is cut into pieces. Before the entry each rank fills its slot with piece 0; in step k it takes piece k from the
//! others' slots and fills its next slot with piece k + 1, each in one go: that is what the processor's own copying is best at.
//! Then it says that the step is done. Step k begins when all have done step k - 1: then piece k is in all slots, and nobody
//! reads the slot of piece k - 1 any more, which piece k + 1 overwrites. Piece 0 needs no wait: the slot it overwrites was taken in the
//! last step but one, before which nobody got here. All ranks count the same steps, over all collectives.

use super::Seat;
use super::copy::publish_streamed;
use super::shared::{Letter, Page, reached};
use super::wait::{Until, ring};
use crate::operands::Call;
use crate::{Error, Result};
use std::sync::atomic::Ordering::*;

/// One collective in progress.
pub(super) struct Pass<'a> {
    pub seat: &'a Seat,
    pub sequence: u64,
    pub call: &'a Call<'a>,
    /// Steps done before this collective.
    base: u32,
}

/// What moves bytes: those of one piece.
pub(super) type Move<'a> = &'a dyn Fn(usize);

impl<'a> Pass<'a> {
    pub fn new(seat: &'a Seat, sequence: u64, call: &'a Call<'a>) -> Pass<'a> {
        let base = seat.page().steps.0.load(Relaxed);
        Pass { seat, sequence, call, base }
    }

    fn what(&self) -> String {
        format!("#{} {}", self.sequence, self.call)
    }

    /// Where `rank` stages piece `k` of this collective.
    pub fn slot(&self, rank: usize, k: usize) -> *mut u8 {
        let ring = self.seat.ring;
        let slot = self.base.wrapping_add(k as u32) as usize % ring.slots;
        // SAFETY: a rank's staging memory has all slots of the ring.
        unsafe { self.seat.shared().staging(rank).add(slot * ring.slot_bytes) }
    }

    /// Runs `steps` steps: `fill(k)` writes piece k to this rank's slot, `take(k)` reads it from the others'.
    pub fn run(&self, steps: usize, fill: Move, take: Move) -> Result<()> {
        if steps > 0 {
            fill(0);
            publish_streamed();
        }
        self.announce();
        ring(self.seat.page());
        self.meet()?;
        for k in 0..steps {
            let done = self.base.wrapping_add(k as u32);
            if k > 0 {
                self.await_all(Until::Stepped, |page| reached(page.steps.0.load(Acquire), done))?;
            }
            if k + 1 < steps {
                fill(k + 1);
            }
            take(k);
            publish_streamed();
            self.seat.page().steps.0.store(done.wrapping_add(1), Release);
            // Nobody waits for the last step: whoever needs it waits for the next entry.
            if k + 1 < steps {
                ring(self.seat.page());
            }
        }
        self.complete();
        Ok(())
    }

    /// Runs a collective of short messages: `post` writes this rank's mail of `lines` lines, `take` reads the others'.
    pub fn exchange(&self, lines: usize, post: impl Fn(), take: impl Fn() -> Result<()>) -> Result<()> {
        self.announce();
        post();
        ring(self.seat.page());
        self.meet()?;
        // All have left the collective before, whose mail the next one overwrites.
        self.seat.page().letter(self.sequence + 1).claim(lines);
        take()?;
        self.complete();
        Ok(())
    }

    /// This rank's letter of this collective.
    pub fn letter(&self) -> &Letter {
        self.seat.page().letter(self.sequence)
    }

    /// Waits for line `line` of `peer`'s mail and returns it.
    pub fn line(&self, peer: usize, line: usize) -> Result<&super::shared::MailLine> {
        let found = self.seat.shared().page(peer).letter(self.sequence).line(line);
        if !found.arrived(self.sequence) {
            self.seat.wait_for(peer, Until::Stepped, &|| self.what(), |_| found.arrived(self.sequence))?;
        }
        Ok(found)
    }

    /// The other ranks, beginning with the next: not all wait for rank 0 first.
    pub fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let (rank, ranks) = (self.seat.rank, self.seat.shared().ranks);
        (1..ranks).map(move |i| (rank + i) % ranks)
    }

    fn announce(&self) {
        let page = self.seat.page();
        page.arrived.store(self.sequence as u32, Release);
        page.letter(self.sequence).announce(self.sequence, self.call);
    }

    fn complete(&self) {
        self.seat.page().completed.store(self.sequence, Release);
    }

    fn await_all(&self, until: Until, ready: impl Fn(&Page) -> bool) -> Result<()> {
        self.peers().try_for_each(|peer| self.seat.wait_for(peer, until, &|| self.what(), &ready))
    }

    fn meet(&self) -> Result<()> {
        match self.await_all(Until::Entered, |page| page.letter(self.sequence).arrived(self.sequence)) {
            Ok(()) => self.compare().map_or(Ok(()), Err),
            // Whoever saw the difference first ended the group; those that differ report it themselves all the same.
            Err(error) => Err(self.compare().unwrap_or(error)),
        }
    }

    /// The lowest rank that arrived with another call.
    fn compare(&self) -> Option<Error> {
        let shared = self.seat.shared();
        let mine = self.letter();
        let letter = |other: usize| shared.page(other).letter(self.sequence);
        let other = (0..shared.ranks).find(|other| letter(*other).arrived(self.sequence) && !letter(*other).equals(mine))?;
        let there = letter(other).call();
        Some(Error::Mismatch {
            sequence: self.sequence,
            rank: self.seat.rank,
            here: self.call.to_string(),
            other,
            there: there.map_or("something unreadable".to_string(), |call| call.to_string()),
        })
    }
}
