//! When did each task run, and what did it wait for? A timeline of a device's streams, and its Chrome/Perfetto form.
//!
//! Times are nanoseconds of the host's monotonic clock: the same for all ranks of a host, so that their files can be joined
//! into one timeline, and small enough that the format's doubles keep nanoseconds.
#![allow(unsafe_code)]

use super::event::lock;
use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::path::Path;
use std::sync::{Arc, Mutex};

/// What a [`TraceEvent`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TraceKind {
    /// A task ran.
    Task,
    /// The stream passed a record; the number joins it with waits.
    Record(u64),
    /// The stream waited for the record of this number.
    Wait(u64),
}

/// One thing that happened on one stream.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceEvent {
    /// Unique in the process.
    pub stream_id: u64,
    /// The stream's name.
    pub stream: Arc<str>,
    /// The task's name; of a wait, the name of the stream waited for.
    pub name: String,
    /// Nanoseconds of the host's monotonic clock.
    pub start_ns: u64,
    /// As `start_ns`; equals `start_ns` for a record.
    pub end_ns: u64,
    /// What happened.
    pub kind: TraceKind,
}

/// Now, in the unit of [`TraceEvent`].
pub(crate) fn now_ns() -> u64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes the struct it is given; this clock always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut t) };
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

/// Collects the events of one device.
#[derive(Default)]
pub(crate) struct Trace {
    events: Mutex<Vec<TraceEvent>>,
}

impl Trace {
    pub fn push(&self, event: TraceEvent) {
        lock(&self.events).push(event);
    }

    /// Takes what was collected so far.
    pub fn take(&self) -> Vec<TraceEvent> {
        std::mem::take(&mut lock(&self.events))
    }
}

fn quoted(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            c if u32::from(c) < 0x20 => {
                // Writing to a string cannot fail.
                let _ = write!(out, "\\u{:04x}", u32::from(c));
            }
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

/// Microseconds with the nanoseconds as decimals: the unit of the format.
fn micros(ns: u64) -> String {
    format!("{}.{:03}", ns / 1000, ns % 1000)
}

/// Writes `events` as JSON that `chrome://tracing` and Perfetto open: a process `pid`, one row per stream in the order in
/// which the streams were made, an arrow from each record to the waits of other streams that took it.
pub fn write_chrome(path: &Path, pid: u32, events: &[TraceEvent]) -> io::Result<()> {
    let mut out = io::BufWriter::new(std::fs::File::create(path)?);
    let mut streams: Vec<(u64, &str)> = events.iter().map(|e| (e.stream_id, &*e.stream)).collect();
    streams.sort_unstable();
    streams.dedup();
    write!(out, "{{\"displayTimeUnit\":\"ms\",\"traceEvents\":[")?;
    write!(out, "\n{{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":{pid},\"args\":{{\"name\":\"device {pid}\"}}}}")?;
    for (id, name) in &streams {
        let name = quoted(name);
        write!(out, ",\n{{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":{pid},\"tid\":{id},\"args\":{{\"name\":{name}}}}}")?;
        write!(out, ",\n{{\"ph\":\"M\",\"name\":\"thread_sort_index\",\"pid\":{pid},\"tid\":{id},\"args\":{{\"sort_index\":{id}}}}}")?;
    }
    // Records that nothing waited for would only hide the others.
    let waited: std::collections::HashSet<u64> =
        events.iter().filter_map(|e| if let TraceKind::Wait(id) = e.kind { Some(id) } else { None }).collect();
    for e in events {
        let (cat, name, flow) = match e.kind {
            TraceKind::Task => ("task", quoted(&e.name), String::new()),
            TraceKind::Record(id) if waited.contains(&id) => ("event", quoted("record"), format!("\"ph\":\"s\",\"id\":{id}")),
            TraceKind::Record(_) => continue,
            TraceKind::Wait(id) => ("event", quoted(&format!("wait {}", e.name)), format!("\"ph\":\"f\",\"bp\":\"e\",\"id\":{id}")),
        };
        // An arrow is tied to the slice around it, which must have a length.
        let dur = e.end_ns.saturating_sub(e.start_ns).max(1);
        let (tid, ts) = (e.stream_id, micros(e.start_ns));
        write!(
            out,
            ",\n{{\"ph\":\"X\",\"cat\":\"{cat}\",\"name\":{name},\"pid\":{pid},\"tid\":{tid},\"ts\":{ts},\"dur\":{}}}",
            micros(dur)
        )?;
        if !flow.is_empty() {
            let ts = micros(if matches!(e.kind, TraceKind::Wait(_)) { e.start_ns + dur - 1 } else { e.start_ns });
            write!(out, ",\n{{{flow},\"cat\":\"event\",\"name\":\"event\",\"pid\":{pid},\"tid\":{tid},\"ts\":{ts}}}")?;
        }
    }
    writeln!(out, "\n]}}")?;
    out.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_are_escaped_and_times_keep_nanoseconds() {
        assert_eq!(quoted("a\"b\\c\n"), "\"a\\\"b\\\\c\\u000a\"");
        assert_eq!(micros(1_234_005), "1234.005");
        let a = now_ns();
        assert!(now_ns() >= a);
    }

    #[test]
    fn arrows_join_records_with_waits() {
        let event = |stream_id, name: &str, kind| TraceEvent {
            stream_id,
            stream: format!("s{stream_id}").into(),
            name: name.into(),
            start_ns: 1000,
            end_ns: 3500,
            kind,
        };
        let events = [
            event(1, "matmul", TraceKind::Task),
            event(1, "", TraceKind::Record(7)),
            event(1, "", TraceKind::Record(8)),
            event(2, "s1", TraceKind::Wait(7)),
        ];
        let path = std::env::temp_dir().join(format!("zrt-trace-{}.json", std::process::id()));
        write_chrome(&path, 3, &events).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(text.matches("\"ph\":\"X\"").count(), 3);
        assert_eq!(text.matches("\"ph\":\"s\",\"id\":7").count(), 1);
        assert_eq!(text.matches("\"ph\":\"f\",\"bp\":\"e\",\"id\":7").count(), 1);
        assert!(text.contains("\"name\":\"matmul\",\"pid\":3,\"tid\":1,\"ts\":1.000,\"dur\":2.500"));
        assert!(text.contains("\"wait s1\"") && !text.contains("\"id\":8"));
        assert_eq!(text.matches('{').count(), text.matches('}').count());
    }
}
