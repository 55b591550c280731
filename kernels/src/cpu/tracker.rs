//! Which two tasks touch the same bytes without an order between them? Answered when the later one is enqueued, from
//! vector clocks alone, so that a missing wait is found in every run, however the threads happened to be scheduled.
//!
//! Each stream counts its tasks, and its clock says, for every stream, up to which task everything is ordered before its
//! next one. A record keeps the stream's clock, a wait joins it. The host is one more clock: what it waited for is joined
//! there, and every later task of any stream inherits it. (All host threads count as one: that can hide a race between
//! threads of the host, it never invents one.) For each byte range of an allocation the last writer and the readers since
//! are kept; an access that is ordered before a newer one of the same kind is dropped, since the newer one implies it.

use super::event::lock;
use crate::memory::Allocation;
use crate::{Error, Result, View, ViewMut};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, Weak};

/// For each stream id, sorted: all its tasks up to this number are ordered before.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Clock(Vec<(u64, u64)>);

impl Clock {
    fn get(&self, stream: u64) -> u64 {
        self.0.binary_search_by_key(&stream, |e| e.0).map_or(0, |i| self.0[i].1)
    }

    fn raise(&mut self, stream: u64, seq: u64) {
        match self.0.binary_search_by_key(&stream, |e| e.0) {
            Ok(i) => self.0[i].1 = self.0[i].1.max(seq),
            Err(i) => self.0.insert(i, (stream, seq)),
        }
    }

    fn join(&mut self, other: &Clock) {
        for &(stream, seq) in &other.0 {
            self.raise(stream, seq);
        }
    }
}

/// Names for the message.
struct Label {
    stream: Arc<str>,
    task: String,
}

#[derive(Clone)]
struct Access {
    stream: u64,
    seq: u64,
    label: Arc<Label>,
}

impl Access {
    fn before(&self, clock: &Clock) -> bool {
        clock.get(self.stream) >= self.seq
    }
}

/// Bytes from the map's key to `end` that share a history.
#[derive(Clone)]
struct Segment {
    end: usize,
    writer: Option<Access>,
    readers: Vec<Access>,
}

/// One allocation: disjoint segments by first byte. Bytes in none were never touched, or all of that is past.
struct History {
    alive: Weak<Allocation>,
    segments: BTreeMap<usize, Segment>,
}

impl History {
    /// The first access in `first..end` that the clock is not ordered after.
    fn conflict(&self, first: usize, end: usize, write: bool, clock: &Clock) -> Option<(&Access, bool, usize, usize)> {
        let left = self.segments.range(..=first).next_back().filter(|(_, s)| s.end > first).map_or(first, |(k, _)| *k);
        for (&start, seg) in self.segments.range(left..end) {
            let found = seg.writer.iter().map(|a| (a, true)).chain(seg.readers.iter().filter(|_| write).map(|a| (a, false)));
            if let Some((access, wrote)) = found.into_iter().find(|(a, _)| !a.before(clock)) {
                return Some((access, wrote, start.max(first), seg.end.min(end)));
            }
        }
        None
    }

    /// Makes `at` a boundary between segments.
    fn split(&mut self, at: usize) {
        if let Some((_, seg)) = self.segments.range_mut(..at).next_back().filter(|(_, s)| s.end > at) {
            let right = seg.clone();
            seg.end = at;
            self.segments.insert(at, right);
        }
    }

    fn write(&mut self, first: usize, end: usize, access: Access) {
        self.split(first);
        self.split(end);
        let inside: Vec<usize> = self.segments.range(first..end).map(|(k, _)| *k).collect();
        for key in inside {
            self.segments.remove(&key);
        }
        self.segments.insert(first, Segment { end, writer: Some(access), readers: Vec::new() });
    }

    fn read(&mut self, first: usize, end: usize, access: &Access, clock: &Clock, host: &Clock) {
        self.split(first);
        self.split(end);
        // Rebuilt left to right, joining neighbours that came to have the same history: a table written row by row
        // becomes one segment again once all that is past.
        let mut rest = self.segments.split_off(&first);
        let mut after = rest.split_off(&end);
        let mut at = first;
        let mut out: Vec<(usize, Segment)> = Vec::new();
        let fresh = |end| Segment { end, writer: None, readers: vec![access.clone()] };
        let mut push = |start: usize, seg: Segment| match out.last_mut() {
            Some((_, last)) if last.end == start && same(last, &seg) => last.end = seg.end,
            _ => out.push((start, seg)),
        };
        for (start, mut seg) in rest {
            if start > at {
                push(at, fresh(start));
            }
            at = seg.end;
            seg.writer = seg.writer.filter(|w| !w.before(host));
            seg.readers.retain(|r| !r.before(clock));
            seg.readers.push(access.clone());
            push(start, seg);
        }
        if at < end {
            push(at, fresh(end));
        }
        self.segments.extend(out);
        self.segments.append(&mut after);
    }
}

fn same(a: &Segment, b: &Segment) -> bool {
    let key = |x: &Access| (x.stream, x.seq);
    a.writer.as_ref().map(key) == b.writer.as_ref().map(key) && a.readers.iter().map(key).eq(b.readers.iter().map(key))
}

#[derive(Default)]
struct State {
    host: Clock,
    streams: HashMap<u64, Clock>,
    allocations: HashMap<u64, History>,
    prune_at: usize,
}

impl State {
    fn clock(&mut self, stream: u64) -> &mut Clock {
        let clock = self.streams.entry(stream).or_default();
        clock.join(&self.host);
        clock
    }

    fn history(&mut self, view: &View) -> &mut History {
        if self.allocations.len() >= self.prune_at {
            self.allocations.retain(|_, h| h.alive.strong_count() > 0);
            self.prune_at = 64.max(2 * self.allocations.len());
        }
        let fresh = || History { alive: Arc::downgrade(&view.alloc), segments: BTreeMap::new() };
        self.allocations.entry(view.alloc.id).or_insert_with(fresh)
    }
}

/// The tracker of one device.
#[derive(Default)]
pub(crate) struct Tracker {
    state: Mutex<State>,
}

impl Tracker {
    /// A task is about to be enqueued. An error means that it must not be.
    pub fn task(&self, stream: u64, stream_name: &Arc<str>, task: &str, reads: &[View], writes: &[ViewMut]) -> Result<()> {
        let mut state = lock(&self.state);
        let clock = state.clock(stream);
        let seq = clock.get(stream) + 1;
        clock.raise(stream, seq);
        let clock = clock.clone();
        let accesses = || reads.iter().map(|v| (v, false)).chain(writes.iter().map(|v| (&**v, true))).filter(|(v, _)| v.bytes() > 0);
        for (view, write) in accesses() {
            let (id, first, end) = view.span();
            let Some(history) = state.allocations.get(&id) else { continue };
            if let Some((other, wrote, first, end)) = history.conflict(first, end, write, &clock) {
                let verb = |w| if w { "writes" } else { "reads" };
                return Err(Error::Race(format!(
                    "'{task}' on stream '{stream_name}' {} bytes {first}..{end} of '{}', which '{}' on stream '{}' {}, and no event \
                     orders the two; record an event after the one and wait for it before the other",
                    verb(write),
                    view.name(),
                    other.label.task,
                    other.label.stream,
                    verb(wrote),
                )));
            }
        }
        let access = Access { stream, seq, label: Arc::new(Label { stream: stream_name.clone(), task: task.to_string() }) };
        // Writes last: of a range that is read and written in place, the write is what later tasks must come after.
        for (view, write) in accesses() {
            let (_, first, end) = view.span();
            let host = state.host.clone();
            let history = state.history(view);
            if write { history.write(first, end, access.clone()) } else { history.read(first, end, &access, &clock, &host) }
        }
        Ok(())
    }

    /// The clock that an event recorded now keeps.
    pub fn record(&self, stream: u64) -> Clock {
        lock(&self.state).clock(stream).clone()
    }

    /// Later tasks of `stream` come after what `clock` knows.
    pub fn wait(&self, stream: u64, clock: &Clock) {
        lock(&self.state).clock(stream).join(clock);
    }

    /// The host waited: all later tasks of all streams come after what `clock` knows.
    pub fn host_joins(&self, clock: &Clock) {
        lock(&self.state).host.join(clock);
    }

    /// The stream was drained and is gone.
    pub fn ended(&self, stream: u64) {
        let mut state = lock(&self.state);
        if let Some(clock) = state.streams.remove(&stream) {
            state.host.join(&clock);
        }
    }

    #[cfg(test)]
    fn segments(&self) -> usize {
        lock(&self.state).allocations.values().map(|h| h.segments.len()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::heap::AddressRange;
    use crate::{Buffer, DType, Place};
    use proptest::prelude::*;

    fn buffer(bytes: usize) -> ViewMut {
        Buffer::from_mapping("buf", Place::Device, Box::new(AddressRange(bytes))).all(DType::U8).unwrap()
    }

    fn write(t: &Tracker, stream: u64, v: &ViewMut) -> Result<()> {
        t.task(stream, &format!("s{stream}").into(), "w", &[], std::slice::from_ref(v))
    }

    fn read(t: &Tracker, stream: u64, v: &ViewMut) -> Result<()> {
        t.task(stream, &format!("s{stream}").into(), "r", &[v.view()], &[])
    }

    #[test]
    fn a_missing_wait_is_named() {
        let (t, b) = (Tracker::default(), buffer(100));
        write(&t, 1, &b.slice(0, 60).unwrap()).unwrap();
        let e = read(&t, 2, &b.slice(40, 60).unwrap()).unwrap_err().to_string();
        for part in ["'r'", "'s2'", "reads", "40..60", "'buf'", "'w'", "'s1'", "writes"] {
            assert!(e.contains(part), "{part} in {e}");
        }
        t.wait(2, &t.record(1));
        read(&t, 2, &b).unwrap();
        assert!(write(&t, 1, &b).is_err(), "write after read needs an order too");
        t.wait(1, &t.record(2));
        write(&t, 1, &b).unwrap();
    }

    #[test]
    fn order_is_transitive_and_a_record_covers_only_what_came_before() {
        let (t, b) = (Tracker::default(), buffer(8));
        write(&t, 1, &b).unwrap();
        t.wait(2, &t.record(1));
        t.wait(3, &t.record(2));
        read(&t, 3, &b).unwrap();
        let early = t.record(1);
        let c = buffer(8);
        write(&t, 1, &c).unwrap();
        t.wait(2, &early);
        assert!(read(&t, 2, &c).is_err());
    }

    #[test]
    fn the_host_orders_everything_it_waited_for() {
        let (t, b) = (Tracker::default(), buffer(8));
        write(&t, 1, &b).unwrap();
        t.host_joins(&t.record(1));
        write(&t, 2, &b).unwrap();
        t.ended(2);
        write(&t, 3, &b).unwrap();
    }

    #[test]
    fn readers_do_not_conflict_and_histories_stay_small() {
        let (t, b) = (Tracker::default(), buffer(1 << 16));
        for i in 0..1000 {
            write(&t, 1, &b.slice(i * 64, 64).unwrap()).unwrap();
        }
        t.host_joins(&t.record(1));
        for _ in 0..1000 {
            read(&t, 1, &b).unwrap();
            read(&t, 2, &b).unwrap();
        }
        assert_eq!(t.segments(), 1);
        for _ in 0..200 {
            drop(write(&t, 1, &buffer(16)));
        }
        assert!(lock(&t.state).allocations.len() <= 130, "freed allocations are forgotten");
    }

    proptest! {
        /// Against the plain definition: keep every access with its full set of predecessors, compare all pairs.
        #[test]
        fn agrees_with_comparing_all_pairs(steps in prop::collection::vec((0u8..6, 0usize..3, 0usize..3, 0usize..16, 1usize..8), 1..60)) {
            let (t, b) = (Tracker::default(), buffer(24));
            let mut seen: Vec<Vec<bool>> = vec![vec![]; 3];
            let mut host: Vec<bool> = vec![];
            let mut all: Vec<(usize, usize, bool)> = vec![];
            let or = |a: &mut Vec<bool>, b: &[bool]| for (i, x) in b.iter().enumerate() {
                if a.len() <= i { a.push(false) }
                a[i] |= x;
            };
            for (what, s, other, first, n) in steps {
                match what {
                    0 => {
                        t.wait(s as u64, &t.record(other as u64));
                        let o = [seen[other].clone(), host.clone()];
                        o.iter().for_each(|o| or(&mut seen[s], o));
                    }
                    1 if other == 0 => {
                        t.host_joins(&t.record(s as u64));
                        let o = seen[s].clone();
                        or(&mut host, &o);
                    }
                    _ => {
                        let w = what % 2 == 0;
                        let h = host.clone();
                        or(&mut seen[s], &h);
                        let mine = seen[s].clone();
                        let race = all.iter().enumerate().any(|(i, &(f, e, ow))| {
                            f < first + n && first < e && (w || ow) && !mine.get(i).copied().unwrap_or(false)
                        });
                        let v = b.slice(first, n).unwrap();
                        let got = if w { write(&t, s as u64, &v) } else { read(&t, s as u64, &v) };
                        prop_assert_eq!(got.is_err(), race);
                        if !race {
                            let mut bit = vec![false; all.len()];
                            bit.push(true);
                            all.push((first, first + n, w));
                            or(&mut seen[s], &bit);
                        }
                    }
                }
            }
        }
    }
}
