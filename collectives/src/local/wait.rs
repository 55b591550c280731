//! How does a rank wait for another: cheaply when it is about to arrive, and never longer than it may?
//!
//! Spin a little while every rank has a core, else offer the core to the others a few times; then sleep on the other rank's bell in slices of 100 ms. A rank that has entered the
//! collective is about to go on, so that waiting for its next step spins longer than waiting for it to come. After each slice look whether the
//! group is lost. Time is counted in slices with a cap, so that a job that was stopped as a whole and
//! continued does not find that everyone is late.

use super::Seat;
use super::shared::{Page, reached};
use crate::{Error, Result};
use rustix::thread::futex;
use std::sync::atomic::{Ordering::*, fence};
use std::time::{Duration, Instant};

/// The longest sleep without a look around.
pub(super) const SLICE: Duration = Duration::from_millis(100);
/// The most that one slice counts: more means that this process did not run.
const SLICE_CAP: Duration = Duration::from_millis(500);

/// Time that passed while this process ran.
pub(crate) struct Patience {
    looked: Instant,
    spent: Duration,
}

impl Patience {
    pub fn new() -> Patience {
        Patience { looked: Instant::now(), spent: Duration::ZERO }
    }

    /// Counts the time since the last call; returns the sum.
    pub fn spend(&mut self) -> Duration {
        let now = Instant::now();
        self.spent += (now - self.looked).min(SLICE_CAP);
        self.looked = now;
        self.spent
    }

    pub fn reset(&mut self) {
        *self = Patience::new();
    }
}

/// Tells everyone who sleeps on `page`'s bell that something changed. It was stored with Release before.
pub(super) fn ring(page: &Page) {
    // The store must be visible before the look at `sleepers`, or one who just looked and lay down is missed. Whoever counts itself after this
    // fence sees the store, and does not lie down.
    fence(SeqCst);
    if page.bell.sleepers.load(Relaxed) != 0 {
        page.bell.word.fetch_add(1, SeqCst);
        let _ = futex::wake(&page.bell.word, futex::Flags::empty(), i32::MAX as u32);
    }
}

/// Looks without a pause at first: what comes within a trip between cores is seen at once.
const EAGER: u32 = 64;
/// How much longer than for an entry it spins for a step.
const STEP_SPINS: u32 = 16;

/// How often a rank without a core of its own offers the one it has to the others before it sleeps: a switch costs less than to be woken.
const YIELDS: u32 = 20;

/// What a wait is for: how long it may spin.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Until {
    /// The other rank comes; it may be computing.
    Entered,
    /// It goes on: it is in the collective already.
    Stepped,
}

impl Seat {
    /// Waits until `ready` holds of `peer`'s page. `what` names the collective for errors.
    #[inline]
    pub(super) fn wait_for(&self, peer: usize, until: Until, what: &dyn Fn() -> String, ready: impl Fn(&Page) -> bool) -> Result<()> {
        let page = self.shared().page(peer);
        if self.spin > 0 {
            for _ in 0..EAGER {
                if ready(page) {
                    return Ok(());
                }
            }
        }
        self.wait_longer(peer, until, what, &ready)
    }

    #[inline(never)]
    fn wait_longer(&self, peer: usize, until: Until, what: &dyn Fn() -> String, ready: &dyn Fn(&Page) -> bool) -> Result<()> {
        let page = self.shared().page(peer);
        let spins = if until == Until::Stepped { self.spin.saturating_mul(STEP_SPINS) } else { self.spin };
        for _ in 0..=spins {
            if ready(page) {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        for _ in 0..if self.crowded { YIELDS } else { 0 } {
            std::thread::yield_now();
            if ready(page) {
                return Ok(());
            }
        }
        let begun = Instant::now();
        let mut patience = Patience::new();
        let mut heard = page.whatever_moves();
        loop {
            page.bell.sleepers.fetch_add(1, SeqCst);
            // Pairs with the fence in `ring`.
            fence(SeqCst);
            let bell = page.bell.word.load(SeqCst);
            let outcome = if ready(page) { Some(Ok(())) } else { self.interrupted(peer, page, what, ready, begun.elapsed().as_secs()) };
            if outcome.is_none() {
                let slice = futex::Timespec { tv_sec: 0, tv_nsec: SLICE.as_nanos() as _ };
                // A timeout, a signal and a bell that has rung already all mean: look again.
                let _ = futex::wait(&page.bell.word, futex::Flags::empty(), bell, Some(&slice));
            }
            page.bell.sleepers.fetch_sub(1, SeqCst);
            if let Some(outcome) = outcome {
                return outcome;
            }
            let now = page.whatever_moves();
            if now != heard {
                heard = now;
                patience.reset();
            } else if patience.spend() >= self.options().train_timeout {
                return Err(self.overdue(peer, what, begun.elapsed().as_secs()));
            }
        }
    }

    fn interrupted(
        &self,
        peer: usize,
        page: &Page,
        what: &dyn Fn() -> String,
        ready: &dyn Fn(&Page) -> bool,
        secs: u64,
    ) -> Option<Result<()>> {
        if self.shared().header().lost.is_set() {
            return self.shared().header().lost.get(self.rank, Some((&what(), secs))).map(Err);
        }
        if page.left.load(Acquire) == 1 {
            // It left after its last store; what it did before leaving counts.
            if ready(page) {
                return Some(Ok(()));
            }
            let state = format!("left the group; {}", page.whereabouts());
            return Some(Err(Error::Timeout { rank: self.rank, what: what(), culprit: peer, state, secs }));
        }
        None
    }

    /// Everyone is alive and no one moves: the culprit is the rank that is furthest behind.
    fn overdue(&self, peer: usize, what: &dyn Fn() -> String, secs: u64) -> Error {
        let shared = self.shared();
        let arrived = |rank: usize| shared.page(rank).arrived.load(Acquire);
        // The peer may itself wait for another that has not come as far. At the same place it is the peer that we know of.
        let others = (0..shared.ranks).filter(|rank| *rank != self.rank);
        let culprit = others.fold(peer, |worst, rank| if reached(arrived(rank), arrived(worst)) { worst } else { rank });
        let state = format!("alive, {}", shared.page(culprit).whereabouts());
        Error::Timeout { rank: self.rank, what: what(), culprit, state, secs }
    }
}
