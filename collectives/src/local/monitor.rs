//! Which ranks are alive? One thread per process shows its own sign of life and looks at the others' every 100 ms, so that a dead or stopped
//! rank is found even while this one computes.
//!
//! Dead: its pidfd says so (or, where the kernel has none, /proc: absent, zombie, or another start time, since process
//! numbers are used again). Stopped: its heartbeat stands still for `heartbeat_timeout`. Silence counts only while this process runs: one that was
//! stopped itself has no opinion on what the others did meanwhile.

use super::shared::Shared;
use super::wait::{Patience, SLICE};
use super::{LocalOptions, end_group};
use crate::{Error, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering::*;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// (state letter, start time in clock ticks) of a process, from /proc.
fn stat(pid: u32) -> Option<(char, u64)> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may hold anything, also spaces and parentheses.
    let fields: Vec<&str> = text[text.rfind(')')? + 1..].split_whitespace().collect();
    Some((fields.first()?.chars().next()?, fields.get(19)?.parse().ok()?))
}

/// When the process began; `None` when it is gone or only a zombie.
pub(super) fn start_time(pid: u32) -> Option<u64> {
    stat(pid).filter(|(state, _)| !matches!(state, 'Z' | 'X')).map(|(_, start)| start)
}

struct Watched {
    rank: usize,
    pid: u32,
    start: u64,
    pidfd: Option<OwnedFd>,
    heartbeat: u64,
    silence: Patience,
}

impl Watched {
    fn new(shared: &Shared, rank: usize) -> Watched {
        let page = shared.page(rank);
        let (pid, start) = (page.pid.load(Relaxed), page.start_time.load(Relaxed));
        let pidfd = Pid::from_raw(pid as i32).and_then(|p| pidfd_open(p, PidfdFlags::empty()).ok());
        // Between its joining and our opening the number may have passed to another process.
        let pidfd = pidfd.filter(|_| start_time(pid) == Some(start));
        Watched { rank, pid, start, pidfd, heartbeat: page.heartbeat.load(Relaxed), silence: Patience::new() }
    }

    /// What is wrong with the rank, and for how many seconds.
    fn trouble(&mut self, shared: &Shared, dead: bool, timeout: Duration) -> Option<(String, u64)> {
        let page = shared.page(self.rank);
        if page.left.load(Acquire) == 1 {
            return None;
        }
        if dead || (self.pidfd.is_none() && start_time(self.pid) != Some(self.start)) {
            // It may have left in order between the two looks.
            let left = page.left.load(Acquire) == 1;
            return (!left).then(|| (format!("process {} is gone; {}", self.pid, page.whereabouts()), 0));
        }
        let heartbeat = page.heartbeat.load(Relaxed);
        if heartbeat != self.heartbeat {
            self.heartbeat = heartbeat;
            self.silence.reset();
            return None;
        }
        let silence = self.silence.spend();
        if silence < timeout {
            return None;
        }
        let state = match stat(self.pid) {
            Some(('T' | 't', _)) => "is stopped",
            Some(_) => "does not run",
            None => "is gone",
        };
        let secs = silence.as_secs();
        Some((format!("no heartbeat for {secs} s, process {} {state}; {}", self.pid, page.whereabouts()), secs))
    }
}

/// The thread of one process.
pub(super) struct Monitor {
    stop: Arc<(Mutex<bool>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

impl Monitor {
    /// Watches all other ranks; `None` when there are none.
    pub fn start(shared: Arc<Shared>, rank: usize, options: &LocalOptions) -> Result<Option<Monitor>> {
        if shared.ranks == 1 {
            return Ok(None);
        }
        let timeout = options.heartbeat_timeout.max(5 * SLICE);
        let stop = Arc::new((Mutex::new(false), Condvar::new()));
        let stopped = stop.clone();
        let spawned = std::thread::Builder::new().name("heartbeat".into()).spawn(move || {
            let mut others: Vec<Watched> = (0..shared.ranks).filter(|r| *r != rank).map(|r| Watched::new(&shared, r)).collect();
            loop {
                shared.page(rank).heartbeat.fetch_add(1, Relaxed);
                look(&shared, rank, &mut others, timeout);
                let lock = stopped.0.lock().unwrap_or_else(|e| e.into_inner());
                let wait = stopped.1.wait_timeout_while(lock, SLICE, |stop| !*stop);
                if *wait.unwrap_or_else(|e| e.into_inner()).0 {
                    return;
                }
            }
        });
        match spawned {
            Ok(thread) => Ok(Some(Monitor { stop, thread: Some(thread) })),
            Err(e) => Err(Error::Rendezvous(format!("starting the heartbeat thread: {e}"))),
        }
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        *self.stop.0.lock().unwrap_or_else(|e| e.into_inner()) = true;
        self.stop.1.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn look(shared: &Shared, rank: usize, others: &mut [Watched], timeout: Duration) {
    if shared.header().lost.is_set() {
        return;
    }
    let mut fds: Vec<PollFd> = others.iter().filter_map(|w| w.pidfd.as_ref()).map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    // A failed poll tells nothing; heartbeats still do.
    let _ = poll(&mut fds, Some(&at_once));
    let mut ended = fds.iter().map(|fd| !fd.revents().is_empty()).collect::<Vec<_>>().into_iter();
    drop(fds);
    for other in others {
        let dead = other.pidfd.is_some() && ended.next().unwrap_or(false);
        if let Some((state, secs)) = other.trouble(shared, dead, timeout) {
            let page = shared.page(rank);
            let what = match page.completed.load(Acquire) {
                done if page.arrived.load(Acquire) == done as u32 => format!("between collectives, after #{done}"),
                done => page.letter(done + 1).call().map_or("a collective".to_string(), |c| format!("#{} {c}", done + 1)),
            };
            return end_group(shared, rank, &Error::Timeout { rank, what, culprit: other.rank, state, secs });
        }
    }
}
