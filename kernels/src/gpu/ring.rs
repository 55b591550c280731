//! Small data on its way to the device or back: batches, losses, fault cells, arguments that do not fit a launch. A block of locked host
//! memory beside a block of device memory, handed out from front to back in two halves: a half is used again once the device has
//! passed the point behind its last use.
#![allow(unsafe_code)]

use super::driver::Driver;
use super::event::Point;
use super::memory::{OnDevice, Pinned};
use crate::memory::Mapping;
use crate::{Error, Result};
use std::sync::Arc;

/// Bytes of a half; what is larger goes another way.
const HALF_BYTES: usize = 512 << 10;
/// Largest piece.
pub(super) const MOST_BYTES: usize = 128 << 10;
const ALIGN: usize = 256;

/// Bytes that a piece takes of a half.
pub(super) fn room(bytes: usize) -> usize {
    bytes.next_multiple_of(ALIGN)
}

pub(super) struct Ring {
    host: Pinned,
    device: OnDevice,
    half: usize,
    used: usize,
    /// Behind the last use of each half.
    last: [Option<Arc<Point>>; 2],
}

/// A piece: the same bytes on both sides.
#[derive(Clone, Copy)]
pub(super) struct Piece {
    /// In locked memory.
    pub host: *mut u8,
    /// On the device.
    pub device: u64,
}

impl Ring {
    pub fn new(driver: &Arc<Driver>, stream: &str) -> Result<Ring> {
        let name = format!("staging of stream '{stream}'");
        let (host, _) = Pinned::new(driver, &name, 2 * HALF_BYTES, false)?;
        Ok(Ring { host, device: OnDevice::new(driver, &name, 2 * HALF_BYTES)?, half: 0, used: 0, last: [None, None] })
    }

    /// Whether the next piece of `bytes` begins the other half; then the caller gives the point behind all it has issued, for
    /// [`Ring::turn`], first.
    pub fn is_full(&self, bytes: usize) -> bool {
        self.used + bytes > HALF_BYTES
    }

    /// Begins the other half. Returns the point that must be passed before anything is taken from it.
    pub fn turn(&mut self, behind: Arc<Point>) -> Option<Arc<Point>> {
        self.last[self.half] = Some(behind);
        (self.half, self.used) = (1 - self.half, 0);
        self.last[self.half].take()
    }

    /// The next `bytes`, at most [`MOST_BYTES`].
    pub fn take(&mut self, bytes: usize) -> Result<Piece> {
        if bytes > MOST_BYTES || self.is_full(bytes) {
            return Err(Error::Shape { op: "staging", what: format!("{bytes} bytes are more than {MOST_BYTES}") });
        }
        let at = self.half * HALF_BYTES + self.used;
        self.used += room(bytes);
        // SAFETY: `at + bytes` is within both halves.
        Ok(Piece { host: unsafe { self.host.base().add(at) }, device: self.device.address() + at as u64 })
    }
}

// SAFETY: plain memory without thread affinity, used by the thread that issues, and by checks of points behind its use.
unsafe impl Send for Ring {}
