//! What does a communicator whose bytes travel elsewhere use of a local group? Who is alive, why the group ended, how far each rank has come, and
//! a piece of shared memory per rank, which its owner writes and all read.

use super::wait::ring;
use super::{LocalComm, LocalOptions, end_group};
use crate::operands::Call;
use crate::store::Store;
use crate::{Error, Result};
use std::sync::atomic::Ordering::*;

/// A local group without its collectives. Dropping it is leaving in order.
pub(crate) struct Control(LocalComm);

impl Control {
    /// As [`LocalComm::join`]; each rank gets `bytes` of zeroed memory.
    pub fn join(store: &dyn Store, rank: usize, ranks: usize, bytes: usize, options: LocalOptions) -> Result<Control> {
        let options = LocalOptions { segment_bytes: bytes.div_ceil(2), spin: 0, share_pages: false, ..options };
        LocalComm::join(store, rank, ranks, options).map(Control)
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.0.seat.rank
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.0.seat.shared().ranks
    }

    /// The other ranks.
    pub fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let rank = self.rank();
        (0..self.ranks()).filter(move |r| *r != rank)
    }

    /// Where the memory of `rank` begins, at a cache line; it lives as long as this value.
    pub fn memory(&self, rank: usize) -> *mut u8 {
        self.0.seat.shared().staging(rank)
    }

    /// Why the group is lost.
    pub fn error(&self) -> Option<Error> {
        self.0.seat.error()
    }

    /// Ends the group for `error`, if nothing ended it before. Returns what this rank reports from now on.
    pub fn lose(&self, error: Error) -> Error {
        // What others ended first is the cause; what follows here is its echo.
        let error = self.error().unwrap_or(error);
        self.0.seat.lose(error)
    }

    /// Ends the group on request.
    pub fn abort(&self, reason: &str) {
        let rank = self.rank();
        end_group(self.0.seat.shared(), rank, &Error::Aborted { rank, by: rank, reason: reason.to_string() });
    }

    /// Shows how far this rank has come: the collectives that it completed last and that it is in.
    pub fn show(&self, completed: Option<(u64, &Call)>, now: Option<(u64, &Call)>) {
        let page = self.0.seat.page();
        for (sequence, call) in completed.into_iter().chain(now) {
            page.letter(sequence).announce(sequence, call);
        }
        let done = completed.map_or(0, |(sequence, _)| sequence);
        page.arrived.store(now.map_or(done, |(sequence, _)| sequence) as u32, Release);
        page.completed.store(done, Release);
    }

    /// How far `rank` has come: the last collective it completed, and the one it is in, else the same.
    pub fn progress(&self, rank: usize) -> (u64, u64) {
        let page = self.0.seat.shared().page(rank);
        let (done, arrived) = (page.completed.load(Acquire), page.arrived.load(Acquire));
        (done, done + arrived.wrapping_sub(done as u32).min(1) as u64)
    }

    /// The same in words.
    pub fn whereabouts(&self, rank: usize) -> String {
        self.0.seat.shared().page(rank).whereabouts()
    }

    /// Leaves in order, ahead of being dropped: others count on nothing more from this rank.
    pub fn leave(&self) {
        self.0.seat.page().left.store(1, Release);
        ring(self.0.seat.page());
    }

    /// Whether `rank` has left in order.
    pub fn left(&self, rank: usize) -> bool {
        self.0.seat.shared().page(rank).left.load(Acquire) == 1
    }
}
