//! Starting one rank: its variables, its own process group, its pipes.
//!
//! The launcher runs itself again (`zlaunch rank`, `zlaunch exec`); that process asks the kernel to be killed when its parent
//! dies, before it becomes the rank. So no rank outlives a launcher that was killed with SIGKILL. The own process group keeps the
//! terminal's Ctrl-C away from ranks: the launcher decides what an interrupt means.

use crate::fault::Fault;
use crate::last_words::Output;
use crate::verdict::End;
use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};
use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};
use tokio::process::Command;
use tokio::sync::mpsc::UnboundedSender;
use zrt::progress::StepReport;

/// What ranks and the store tell the supervisor.
pub enum Event {
    /// A line of a rank's output; true for standard error.
    Line(usize, bool, Vec<u8>),
    /// One of a rank's two pipes has ended.
    Closed(usize),
    /// A rank ended.
    Exit(usize, std::io::Result<ExitStatus>),
    /// Rank 0 finished a step.
    Step(StepReport),
}

/// What all ranks are.
pub enum Program {
    /// The trainer on this resolved configuration.
    Trainer {
        /// Resolved configuration.
        config: PathBuf,
        /// Write a timeline.
        trace: bool,
        /// Variables of the GPU vendor's libraries.
        environment: Vec<(&'static str, &'static str)>,
    },
    /// Any program and its arguments.
    Foreign(Vec<OsString>),
}

/// What all ranks of a job share.
pub struct Launch {
    /// What they run.
    pub program: Program,
    /// Their number.
    pub ranks: usize,
    /// MASTER_ADDR and MASTER_PORT.
    pub master: SocketAddr,
    /// File of the job's secret.
    pub secret: PathBuf,
    /// Where logs go.
    pub logs: Option<PathBuf>,
}

/// A rank as the supervisor sees it.
pub struct Process {
    /// Its number.
    pub rank: usize,
    /// Its process, which leads a group of the same number.
    pub pid: u32,
    /// How it ended.
    pub end: End,
    /// When it ended.
    pub ended: Instant,
    /// The process has been waited for.
    pub exited: bool,
    /// The end came after the launcher began to end ranks, so it says nothing.
    pub ours: bool,
    /// Its output.
    pub output: Output,
    /// Pipes not yet at their end.
    pub pipes: usize,
    /// How long it has been stopped.
    pub stopped: Duration,
}

/// Threads per rank that libraries of foreign programs may use, as torchrun sets it: without it every rank takes all cores.
const OMP_NUM_THREADS: &str = "OMP_NUM_THREADS";

impl Launch {
    fn command(&self, rank: usize) -> Command {
        // The path of our own binary may be replaced while we run; this link cannot.
        let mut command = Command::new("/proc/self/exe");
        command.arg0("zlaunch");
        let parent = std::process::id().to_string();
        match &self.program {
            Program::Trainer { config, trace, environment } => {
                command.envs(environment.iter().copied());
                command.args(["rank", "--parent", &parent]).args(trace.then_some("--trace")).arg(config);
            }
            Program::Foreign(program) => {
                command.args(["exec", "--parent", &parent, "--"]).args(program);
                if std::env::var_os(OMP_NUM_THREADS).is_none() && self.ranks > 1 {
                    command.env(OMP_NUM_THREADS, "1");
                }
            }
        }
        let number = |n: usize| n.to_string();
        command
            .env("RANK", number(rank))
            .env("WORLD_SIZE", number(self.ranks))
            .env("LOCAL_RANK", number(rank))
            .env("LOCAL_WORLD_SIZE", number(self.ranks))
            .env("MASTER_ADDR", self.master.ip().to_string())
            .env("MASTER_PORT", self.master.port().to_string())
            .env("ZLAUNCH_JOB", &self.secret)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .kill_on_drop(true);
        command
    }

    /// Starts `rank`; what it says and its end come as events.
    pub fn spawn(&self, rank: usize, events: &UnboundedSender<Event>) -> Result<Process, Fault> {
        let output = Output::new(rank, self.logs.as_deref())
            .map_err(|e| Fault::user(format!("log of rank {rank} in {}: {e}", shown(self.logs.as_deref()))))?;
        let mut child = self.command(rank).spawn().map_err(|e| Fault::other(format!("rank {rank} could not be started: {e}")))?;
        let pid = child.id().ok_or_else(|| Fault::other(format!("rank {rank} ended before it had begun")))?;
        let mut pipes = 0;
        if let Some(pipe) = child.stdout.take() {
            pipes += 1;
            tokio::spawn(read_lines(rank, false, pipe, events.clone()));
        }
        if let Some(pipe) = child.stderr.take() {
            pipes += 1;
            tokio::spawn(read_lines(rank, true, pipe, events.clone()));
        }
        let exits = events.clone();
        tokio::spawn(async move {
            let status = child.wait().await;
            // Nobody listens any more when the launcher is ending.
            let _ = exits.send(Event::Exit(rank, status));
        });
        Ok(Process {
            rank,
            pid,
            end: End::Running,
            ended: Instant::now(),
            exited: false,
            ours: false,
            output,
            pipes,
            stopped: Duration::ZERO,
        })
    }
}

fn shown(path: Option<&Path>) -> String {
    path.map_or_else(String::new, |p| p.display().to_string())
}

/// A program that never ends a line must not fill our memory: longer ones are cut into several.
const LINE_BYTES: usize = 64 << 10;

async fn read_lines(rank: usize, err: bool, pipe: impl AsyncRead + Unpin, events: UnboundedSender<Event>) {
    let mut reader = BufReader::new(pipe);
    let mut line = Vec::new();
    loop {
        let (taken, whole) = match reader.fill_buf().await {
            Ok([]) | Err(_) => break,
            Ok(bytes) => {
                let end = bytes.iter().position(|b| *b == b'\n');
                let part = end.map_or(bytes, |n| &bytes[..=n]);
                line.extend_from_slice(part);
                (part.len(), end.is_some())
            }
        };
        reader.consume(taken);
        if (whole || line.len() >= LINE_BYTES) && events.send(Event::Line(rank, err, std::mem::take(&mut line))).is_err() {
            return;
        }
    }
    if !line.is_empty() {
        let _ = events.send(Event::Line(rank, err, line));
    }
    let _ = events.send(Event::Closed(rank));
}
