//! Runs the command as a person would, and looks after the processes it starts.

#![allow(dead_code, reason = "each test file uses its part")]

pub mod gpu;
pub mod tiny;

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Far above what anything takes, so that only a hang ends by it.
pub const HANG: Duration = Duration::from_secs(60);

pub fn zlaunch() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_zlaunch"));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// A launcher whose pipes are read while it runs.
pub struct Running {
    child: Option<Child>,
    pub pid: u32,
}

impl Running {
    pub fn start(command: &mut Command) -> Running {
        let child = command.spawn().unwrap();
        Running { pid: child.id(), child: Some(child) }
    }

    pub fn signal(&self, signal: i32) {
        // The child has not been waited for, so the number is still its own.
        kill(self.pid, signal);
    }

    pub fn finish(self) -> Done {
        self.finish_within(HANG)
    }

    pub fn finish_within(mut self, deadline: Duration) -> Done {
        let child = self.child.take().unwrap();
        let pid = child.id();
        let (send, receive) = std::sync::mpsc::channel();
        let waiter = std::thread::spawn(move || send.send(child.wait_with_output().unwrap()));
        let output = receive.recv_timeout(deadline).unwrap_or_else(|_| {
            kill(pid, 9);
            panic!("the launcher hangs");
        });
        waiter.join().unwrap().unwrap();
        Done::new(output)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

pub struct Done {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

impl Done {
    fn new(output: Output) -> Done {
        Done {
            code: output.status.code(),
            out: String::from_utf8_lossy(&output.stdout).into_owned(),
            err: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    #[track_caller]
    pub fn says(&self, code: i32, parts: &[&str]) {
        assert_eq!(self.code, Some(code), "stdout:\n{}\nstderr:\n{}", self.out, self.err);
        for part in parts {
            assert!(self.err.contains(part), "{part:?} not in\n{}", self.err);
        }
    }
}

pub fn run(args: &[&str]) -> Done {
    Running::start(zlaunch().args(args)).finish()
}

pub fn kill(pid: u32, signal: i32) {
    assert!(Command::new("kill").args([format!("-{signal}"), pid.to_string()]).status().unwrap().success());
}

/// Waits until `what` holds.
#[track_caller]
pub fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < HANG, "still not: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The numbers that ranks wrote into `folder/pid.<rank>`.
pub fn pids(folder: &Path, ranks: usize) -> Vec<u32> {
    let read = |rank: usize| std::fs::read_to_string(folder.join(format!("pid.{rank}"))).ok()?.trim().parse().ok();
    until("all ranks run", || (0..ranks).all(|r| read(r).is_some()));
    (0..ranks).map(|r| read(r).unwrap()).collect()
}

/// True when a process of the group is alive (a zombie is not).
pub fn group_alive(group: u32) -> bool {
    std::fs::read_dir("/proc").unwrap().flatten().any(|entry| {
        let Ok(text) = std::fs::read_to_string(entry.path().join("stat")) else { return false };
        let Some((_, rest)) = text.rsplit_once(')') else { return false };
        let fields: Vec<&str> = rest.split_whitespace().collect();
        fields[2] == group.to_string() && !matches!(fields[0], "Z" | "X")
    })
}

#[track_caller]
pub fn nobody_left(groups: &[u32]) {
    for group in groups {
        until("the group is gone", || !group_alive(*group));
    }
}
