//! What is a group of one? Every collective is a copy or nothing. It works on every device, and needs no vendor's library for one GPU.

use crate::operands::{Call, Check, Counters};
use crate::{Communicator, Counts, Error, Health, Result};
use std::sync::Mutex;
use zrt_kernels::{Buffer, Stream, View, ViewMut};

/// Rank 0 of 1.
#[derive(Default)]
pub struct SoloComm {
    counters: Counters,
    lost: Mutex<Option<Error>>,
}

const CHECK: Check = Check { rank: 0, ranks: 1 };

impl SoloComm {
    /// A group of its own.
    pub fn new() -> SoloComm {
        SoloComm::default()
    }

    fn copy(&self, call: Call, moved: Option<(&ViewMut, &View)>, s: &dyn Stream) -> Result<()> {
        if let Health::Lost(error) = self.health() {
            return Err(error);
        }
        self.counters.add(&call, 1);
        match moved {
            Some((dst, src)) if dst.span() != src.span() => Ok(s.copy(dst, src)?),
            _ => Ok(()),
        }
    }
}

impl Communicator for SoloComm {
    fn rank(&self) -> usize {
        0
    }
    fn ranks(&self) -> usize {
        1
    }
    fn all_gather(&self, dst: &ViewMut, src: &View, tag: &str, s: &dyn Stream) -> Result<()> {
        self.copy(CHECK.all_gather(dst, src, tag)?, Some((dst, src)), s)
    }
    fn reduce_scatter(&self, dst: &ViewMut, src: &View, tag: &str, s: &dyn Stream) -> Result<()> {
        self.copy(CHECK.reduce_scatter(dst, src, tag)?, Some((dst, src)), s)
    }
    fn all_reduce(&self, data: &ViewMut, tag: &str, s: &dyn Stream) -> Result<()> {
        self.copy(CHECK.all_reduce(data, tag)?, None, s)
    }
    fn all_to_all(&self, dst: &ViewMut, src: &View, tag: &str, s: &dyn Stream) -> Result<()> {
        self.copy(CHECK.all_to_all(dst, src, tag)?, Some((dst, src)), s)
    }
    fn broadcast(&self, data: &ViewMut, root: usize, tag: &str, s: &dyn Stream) -> Result<()> {
        self.copy(CHECK.broadcast(data, root, tag)?, None, s)
    }
    fn barrier(&self, tag: &str, s: &dyn Stream) -> Result<()> {
        self.copy(CHECK.barrier(tag), None, s)
    }
    /// There is nobody to share with.
    fn share_pages(&self, _name: &str, _bytes: usize) -> Result<Option<Buffer>> {
        Ok(None)
    }
    fn health(&self) -> Health {
        self.lost.lock().unwrap_or_else(|e| e.into_inner()).clone().map_or(Health::Good, Health::Lost)
    }
    fn abort(&self, reason: &str) {
        let aborted = || Error::Aborted { rank: 0, by: 0, reason: reason.to_string() };
        self.lost.lock().unwrap_or_else(|e| e.into_inner()).get_or_insert_with(aborted);
    }
    fn counts(&self) -> Counts {
        self.counters.get()
    }
}
