//! What goes wrong, and when? Faults are ordered in the settings by what they hit and its number: the third allocation, the second
//! launch of a kernel. Counters are of the process.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// Codes that both vendors' drivers share.
pub mod code {
    pub const INVALID_VALUE: i32 = 1;
    pub const OUT_OF_MEMORY: i32 = 2;
    pub const NOT_INITIALIZED: i32 = 3;
    pub const NO_DEVICE: i32 = 100;
    pub const INVALID_DEVICE: i32 = 101;
    pub const INVALID_IMAGE: i32 = 200;
    pub const INVALID_CONTEXT: i32 = 201;
    pub const NO_BINARY: i32 = 209;
    pub const INVALID_HANDLE: i32 = 400;
    pub const NOT_FOUND: i32 = 500;
    pub const NOT_READY: i32 = 600;
    pub const ILLEGAL_ADDRESS: i32 = 700;
    pub const ALREADY_REGISTERED: i32 = 712;
    pub const NOT_REGISTERED: i32 = 713;
    pub const MISALIGNED: i32 = 716;
    pub const LAUNCH_FAILED: i32 = 719;
    pub const UNKNOWN: i32 = 999;
}

/// What a fault does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `oom:N`: the N-th allocation of device memory fails.
    OutOfMemory,
    /// `launch:KERNEL:N[:CODE]`: the N-th launch of this kernel (`*`: of any) fails where it runs.
    Launch(String, i32),
    /// `lost:N[:CODE]`: the device is lost at the N-th launch.
    Lost(i32),
    /// `call:FUNCTION:N:CODE`: the N-th call of an exported function returns this code and does nothing.
    Call(String, i32),
    /// `image:N`: the N-th compilation gives an image for the other vendor.
    Image,
    /// `dead:RANK:N`: this rank's process ends at its N-th collective; 0: when it joins.
    Dead(usize),
    /// `silent:RANK:N`: from its N-th collective on this rank takes part in none; 0: it never joins.
    Silent(usize),
    /// `slow:RANK:MS`: this rank is late by so many milliseconds, each time.
    Slow(usize),
    /// `mismatch:RANK:N`: the N-th collective of this rank is another one than the others'.
    Mismatch(usize),
}

/// One fault.
#[derive(Debug)]
pub struct Fault {
    pub kind: Kind,
    /// Which time, from 1; milliseconds of [`Kind::Slow`].
    pub nth: u64,
    seen: AtomicU64,
}

impl Clone for Fault {
    fn clone(&self) -> Fault {
        Fault { kind: self.kind.clone(), nth: self.nth, seen: AtomicU64::new(self.seen.load(Ordering::Relaxed)) }
    }
}

impl Fault {
    /// Reads one; `None` if it is another rank's, by `@RANK` at its end.
    ///
    /// # Errors
    /// Not understood.
    pub fn parse(text: &str, rank: Option<usize>) -> Result<Option<Fault>, String> {
        let bad = || format!("`{text}` is no fault");
        let (body, of_rank) = text.split_once('@').map_or((text, None), |(body, r)| (body, Some(r)));
        let of_rank = of_rank.map(|r| r.parse::<usize>().map_err(|_| bad())).transpose()?;
        let words: Vec<&str> = body.split(':').collect();
        let number = |at: usize| words.get(at).and_then(|w| w.parse::<u64>().ok()).ok_or_else(bad);
        let code = |at: usize, default: i32| words.get(at).map_or(Ok(default), |w| w.parse::<i32>().map_err(|_| bad()));
        let name = |at: usize| words.get(at).map(|w| w.to_string()).ok_or_else(bad);
        let rank_at = |at: usize| number(at).map(|n| n as usize);
        let (kind, nth) = match words[0] {
            "oom" => (Kind::OutOfMemory, number(1)?),
            "launch" => (Kind::Launch(name(1)?, code(3, code::LAUNCH_FAILED)?), number(2)?),
            "lost" => (Kind::Lost(code(2, code::UNKNOWN)?), number(1)?),
            "call" => (Kind::Call(name(1)?, number(3)? as i32), number(2)?),
            "image" => (Kind::Image, number(1)?),
            "dead" => (Kind::Dead(rank_at(1)?), number(2)?),
            "silent" => (Kind::Silent(rank_at(1)?), number(2)?),
            "slow" => (Kind::Slow(rank_at(1)?), number(2)?),
            "mismatch" => (Kind::Mismatch(rank_at(1)?), number(2)?),
            _ => return Err(bad()),
        };
        let here = of_rank.is_none() || of_rank == rank;
        Ok(here.then(|| Fault { kind, nth, seen: AtomicU64::new(0) }))
    }

    /// Counts once more; true: it is time.
    fn due(&self) -> bool {
        self.seen.fetch_add(1, Ordering::Relaxed) + 1 == self.nth
    }
}

/// The faults of a process.
pub struct Faults {
    all: Vec<Fault>,
    log: Option<PathBuf>,
}

impl Faults {
    pub fn new(all: Vec<Fault>, log: Option<PathBuf>) -> Faults {
        Faults { all, log }
    }

    /// Says that a fault comes now, for those who measure what follows.
    fn note(&self, fault: &Fault) {
        let Some(path) = &self.log else { return };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos());
        let line = format!("{now} {:?}\n", fault.kind);
        let file = OpenOptions::new().create(true).append(true).open(path);
        if let Err(e) = file.and_then(|mut f| f.write_all(line.as_bytes())) {
            eprintln!("emulated GPU: {}: {e}", path.display());
        }
    }

    /// Counts for all faults of a kind; what `pick` says of one that is due.
    pub fn hit<T>(&self, pick: impl Fn(&Kind) -> Option<T>) -> Option<T> {
        let mut found = None;
        for fault in &self.all {
            if let Some(value) = pick(&fault.kind)
                && fault.due()
            {
                self.note(fault);
                found = found.or(Some(value));
            }
        }
        found
    }

    /// Whether this is the n-th collective of the rank that `kind` names, or a later one.
    pub fn reached(&self, kind: &Kind, n: u64) -> bool {
        self.exactly(kind, n) || self.all.iter().any(|f| f.kind == *kind && n > f.nth)
    }

    /// Whether it is exactly the n-th.
    pub fn exactly(&self, kind: &Kind, n: u64) -> bool {
        let fault = self.all.iter().find(|f| f.kind == *kind && n == f.nth);
        fault.inspect(|f| self.note(f)).is_some()
    }

    /// Milliseconds by which this rank is late.
    pub fn late_ms(&self, rank: usize) -> u64 {
        self.all.iter().filter(|f| f.kind == Kind::Slow(rank)).map(|f| f.nth).sum()
    }
}
