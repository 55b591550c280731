//! What a program enqueued, in order: works, records and waits of every stream, and where the host waited. Recording is what a
//! simulated operation costs, so it neither allocates nor compares strings: equal works are one entry, names are numbers.
//!
//! A tape stands for one step of many. A wait for an event that this step has not recorded yet waits for the record that the step
//! before made, which is the last one on this tape: [`Tape`] is a loop.

use super::work::Work;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// One entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Item {
    /// Index of the stream in [`Tape::lanes`]. Meaningless for what the host does.
    pub lane: u8,
    /// What.
    pub what: What,
}

/// What an [`Item`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// Work `works[work]`, about `names[tag]` (0: nothing in particular).
    Work {
        /// Index.
        work: u32,
        /// Index.
        tag: u32,
    },
    /// A record of an event.
    Record {
        /// The event's number.
        event: u32,
    },
    /// A wait for the record at this index of the tape.
    Wait {
        /// Index of an earlier item.
        record: u32,
    },
    /// A wait for the record that the step before made: the item at this index, later on the tape.
    WaitBefore {
        /// Index of a later item, or [`NEVER`].
        record: u32,
    },
    /// The host waits for the record at this index; nothing below was enqueued before it had passed.
    HostWait {
        /// Index of an earlier item.
        record: u32,
    },
    /// A place that the recorder named; see [`Tape::repeats`].
    Mark {
        /// Which.
        mark: u32,
    },
}

/// No record: the wait returns at once.
pub const NEVER: u32 = u32::MAX;

/// A recorded step.
#[derive(Clone, Debug, Default)]
pub struct Tape {
    /// Names of streams.
    pub lanes: Vec<String>,
    /// Distinct works.
    pub works: Vec<Work>,
    /// Distinct names; the first is empty.
    pub names: Vec<String>,
    /// All entries, in the order of the host's calls.
    pub items: Vec<Item>,
    /// How many times what lies between the two [`What::Mark`]s happens in a step, though it is here once. 1 without marks.
    pub repeats: u64,
}

/// Multiplies and rotates (Fx): keys are small numbers and short names.
#[derive(Default)]
pub(crate) struct FastHasher(u64);

impl Hasher for FastHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word));
        }
    }
    fn write_u8(&mut self, n: u8) {
        self.write_u64(u64::from(n));
    }
    fn write_u32(&mut self, n: u32) {
        self.write_u64(u64::from(n));
    }
    fn write_usize(&mut self, n: usize) {
        self.write_u64(n as u64);
    }
    fn write_u64(&mut self, n: u64) {
        self.0 = (self.0.rotate_left(5) ^ n).wrapping_mul(0x517c_c1b7_2722_0a95);
    }
}

type Fast<K> = HashMap<K, u32, BuildHasherDefault<FastHasher>>;

/// Where an event was recorded last: (recording, item). Kept by the event.
pub(crate) type Place = (u32, u32);

/// A tape being made.
#[derive(Default)]
pub(crate) struct Recorder {
    /// Number of this recording; what events of other recordings say is the past.
    epoch: u32,
    on: bool,
    tape: Tape,
    works: Fast<Work>,
    names: Fast<Box<str>>,
    /// Last record of each event on this tape.
    last: Fast<u32>,
}

impl Recorder {
    pub fn start(&mut self, lanes: &[String], items: usize) {
        *self = Recorder { epoch: self.epoch + 1, on: true, ..Recorder::default() };
        self.tape = Tape { lanes: lanes.to_vec(), repeats: 1, names: vec![String::new()], ..Tape::default() };
        self.tape.items.reserve(items);
        self.tape.works.reserve(256);
        self.works.reserve(256);
        self.names.reserve(256);
        self.last.reserve(256);
    }

    pub fn mark(&mut self, mark: u32, lane: usize) {
        self.push(lane, What::Mark { mark });
    }

    pub fn repeats(&mut self, repeats: u64) {
        self.tape.repeats = repeats.max(1);
    }

    fn recording(&self) -> bool {
        self.on
    }

    fn push(&mut self, lane: usize, what: What) {
        if self.recording() {
            self.tape.items.push(Item { lane: lane as u8, what });
        }
    }

    pub fn work(&mut self, lane: usize, work: Work, tag: &str) {
        if !self.recording() {
            return;
        }
        let next = self.tape.works.len() as u32;
        let index = *self.works.entry(work).or_insert(next);
        if index == next {
            self.tape.works.push(work);
        }
        let tag = if tag.is_empty() { 0 } else { self.name(tag) };
        self.push(lane, What::Work { work: index, tag });
    }

    fn name(&mut self, name: &str) -> u32 {
        match self.names.get(name) {
            Some(&index) => index,
            None => {
                let index = self.tape.names.len() as u32;
                self.tape.names.push(name.to_string());
                self.names.insert(name.into(), index);
                index
            }
        }
    }

    /// What the event must keep, if this is recorded.
    pub fn record(&mut self, lane: usize, event: u32) -> Option<Place> {
        if !self.recording() {
            return None;
        }
        let index = self.tape.items.len() as u32;
        self.push(lane, What::Record { event });
        self.last.insert(event, index);
        Some((self.epoch, index))
    }

    pub fn wait(&mut self, lane: usize, event: u32, (epoch, record): Place) {
        // Which record it was is known when the tape ends; until then the event's number stands there.
        let what = if epoch == self.epoch { What::Wait { record } } else { What::WaitBefore { record: event } };
        self.push(lane, what);
    }

    pub fn host_wait(&mut self, (epoch, record): Place) {
        if epoch == self.epoch {
            self.push(0, What::HostWait { record });
        }
    }

    /// Ends the recording.
    pub fn take(&mut self) -> Tape {
        self.on = false;
        let mut tape = std::mem::take(&mut self.tape);
        for item in &mut tape.items {
            if let What::WaitBefore { record } = &mut item.what {
                *record = self.last.get(record).copied().unwrap_or(NEVER);
            }
        }
        tape
    }
}
