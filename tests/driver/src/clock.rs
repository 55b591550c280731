//! How long would it have taken? Every operation gets a start and an end in virtual time: it begins when its stream, what its stream
//! waited for, and the host thread that gave it are there and its engine is free. Engines of a device are its compute units, a copy
//! engine each way, and its link to other ranks. Lines of the timeline are written whole, so that processes may share a file.

use crate::memory::lock;
use crate::settings::Settings;
use std::cell::Cell;
use std::fs::File;
use std::io::Write;
use std::sync::Mutex;

/// What an operation does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    H2d,
    D2h,
    D2d,
    Kernel,
    Memset,
    Collective,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::H2d => "h2d",
            Kind::D2h => "d2h",
            Kind::D2d => "d2d",
            Kind::Kernel => "kernel",
            Kind::Memset => "memset",
            Kind::Collective => "collective",
        }
    }

    /// Which engine it is for.
    fn engine(self) -> usize {
        match self {
            Kind::Kernel | Kind::Memset => 0,
            Kind::H2d => 1,
            Kind::D2h => 2,
            Kind::D2d => 3,
            Kind::Collective => 4,
        }
    }

    /// Virtual nanoseconds to move so many bytes.
    pub fn cost(self, bytes: u64, settings: &Settings) -> u64 {
        let (rate, latency) = match self {
            Kind::H2d => (settings.h2d, 1_000),
            Kind::D2h => (settings.d2h, 1_000),
            Kind::D2d | Kind::Kernel | Kind::Memset => (settings.d2d, 1_000),
            Kind::Collective => (settings.link, 10_000),
        };
        latency + (bytes as f64 / rate) as u64
    }
}

/// When the engines of a device are busy: disjoint, ascending times of each.
#[derive(Default)]
pub struct Engines {
    busy: Mutex<[Vec<(u64, u64)>; 5]>,
}

impl Engines {
    /// Takes the first time from `ready` on in which the engine is free for so long; its start.
    pub fn take(&self, kind: Kind, ready: u64, cost: u64) -> u64 {
        let mut all = lock(&self.busy);
        let busy = &mut all[kind.engine()];
        let mut at = busy.partition_point(|(_, end)| *end <= ready);
        let mut start = ready;
        while let Some((begin, end)) = busy.get(at) {
            if start + cost <= *begin {
                break;
            }
            start = start.max(*end);
            at += 1;
        }
        let end = start + cost;
        let before = at > 0 && busy[at - 1].1 == start;
        let behind = busy.get(at).is_some_and(|(begin, _)| *begin == end);
        match (before, behind) {
            (true, true) => busy[at - 1].1 = busy.remove(at).1,
            (true, false) => busy[at - 1].1 = end,
            (false, true) => busy[at].0 = start,
            (false, false) => busy.insert(at, (start, end)),
        }
        start
    }
}

thread_local! {
    static HOST: Cell<u64> = const { Cell::new(0) };
}

/// Virtual time up to which this host thread has waited.
pub fn host_time() -> u64 {
    HOST.get()
}

/// This host thread has seen that something ended then.
pub fn host_waited(until: u64) {
    HOST.set(HOST.get().max(until));
}

/// The file that operations are written to.
pub struct Timeline {
    rank: String,
    out: Mutex<(File, Vec<u8>)>,
}

/// Where and when an operation ran.
pub struct Span<'a> {
    pub device: usize,
    pub stream: u64,
    pub kind: Kind,
    pub name: &'a str,
    pub bytes: u64,
    pub start: u64,
    pub end: u64,
}

impl Timeline {
    /// Adds to this file, or makes it.
    pub fn open(path: &std::path::Path) -> std::io::Result<Timeline> {
        let file = File::options().create(true).append(true).open(path)?;
        Ok(Timeline { rank: std::env::var("RANK").unwrap_or_else(|_| "0".into()), out: Mutex::new((file, Vec::new())) })
    }

    pub fn write(&self, span: &Span) {
        let Span { device, stream, kind, name, bytes, start, end } = span;
        let (pid, rank, kind) = (std::process::id(), &self.rank, kind.name());
        let mut out = lock(&self.out);
        let line = format!(
            "{{\"pid\":{pid},\"rank\":{rank},\"device\":{device},\"stream\":{stream},\"kind\":\"{kind}\",\"name\":\"{name}\",\
             \"bytes\":{bytes},\"start_ns\":{start},\"end_ns\":{end}}}\n"
        );
        out.1.extend_from_slice(line.as_bytes());
        if out.1.len() > 1 << 16 {
            Self::give(&mut out);
        }
    }

    /// Writes what is not written yet.
    pub fn flush(&self) {
        Self::give(&mut lock(&self.out));
    }

    fn give(out: &mut (File, Vec<u8>)) {
        let lines = std::mem::take(&mut out.1);
        if let Err(e) = out.0.write_all(&lines) {
            eprintln!("emulated GPU: the timeline cannot be written: {e}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_fill_gaps_and_never_overlap() {
        let engines = Engines::default();
        assert_eq!(engines.take(Kind::Kernel, 100, 10), 100);
        assert_eq!(engines.take(Kind::Kernel, 0, 50), 0);
        assert_eq!(engines.take(Kind::Kernel, 20, 60), 110);
        assert_eq!(engines.take(Kind::Kernel, 20, 50), 50);
        assert_eq!(engines.take(Kind::Kernel, 0, 1), 170);
        assert_eq!(engines.take(Kind::H2d, 0, 1), 0);
    }
}
