//! Watching the ranks of a job to their end: the first that fails decides, nobody is left behind, and the last thing said is
//! which rank failed and why.
//!
//! One thread, one loop, one state: events of ranks, signals and a clock arrive in order, so there are no races to think about.
//! Running -> Failing (a moment for the reasons of others to arrive) -> Ending (SIGTERM, then SIGKILL to every group) -> over.

use crate::fault::Fault;
use crate::oom;
use crate::proc;
use crate::screen::Screen;
use crate::spawn::{Event, Process};
use crate::verdict::{self, End, Evidence};
use rustix::process::Signal;
use std::time::{Duration, Instant};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc::UnboundedReceiver;
use zrt::progress::ErrorReport;
use zrt_collectives::store::MemoryStore;

/// After the first failure: others may be dying of the same cause, and say more about it.
const REASONS: Duration = Duration::from_millis(300);
/// Between SIGTERM and SIGKILL, once the job has failed.
const TERM: Duration = Duration::from_secs(3);
/// The same for trainers: without the failed rank they can finish no step, so they only say their last words.
const TERM_TRAINER: Duration = Duration::from_secs(1);
/// For output still in pipes after the last rank has ended; a grandchild may hold a pipe open for ever.
const DRAIN: Duration = Duration::from_millis(500);
/// For processes to vanish after SIGKILL.
const VANISH: Duration = Duration::from_secs(1);
const TICK: Duration = Duration::from_millis(50);

/// What counts as a failure beyond an exit code.
pub struct Rules {
    /// A rank that is stopped for so long is lost.
    pub heartbeat: Duration,
    /// Once a rank has ended with code 0, the others must end within this; `None`: they need not.
    pub together: Option<Duration>,
    /// The ranks are trainers: they save before they end when asked to.
    pub trainer: bool,
}

impl Rules {
    fn grace(&self) -> Duration {
        if self.trainer { TERM_TRAINER } else { TERM }
    }
}

enum Phase {
    Running,
    Failing { since: Instant },
    Ending { since: Instant, killed: bool },
}

/// A job under way.
pub struct Supervisor {
    processes: Vec<Process>,
    events: UnboundedReceiver<Event>,
    store: MemoryStore,
    screen: Screen,
    rules: Rules,
    oom: oom::Counters,
    started: Instant,
    phase: Phase,
    /// The signal that asked the job to stop.
    asked: Option<i32>,
    /// It was asked twice.
    insisted: bool,
    last_tick: Instant,
}

impl Supervisor {
    /// Takes over `processes`, whose news come from `events`.
    pub fn new(
        processes: Vec<Process>,
        events: UnboundedReceiver<Event>,
        store: MemoryStore,
        screen: Screen,
        rules: Rules,
        oom: oom::Counters,
    ) -> Supervisor {
        let now = Instant::now();
        Supervisor {
            processes,
            events,
            store,
            screen,
            rules,
            oom,
            started: now,
            phase: Phase::Running,
            asked: None,
            insisted: false,
            last_tick: now,
        }
    }

    /// Until all ranks are gone. Returns the screen for the summary, or how the job failed.
    pub async fn run(mut self) -> Result<Screen, Fault> {
        let listen = |kind| signal(kind).map_err(|e| Fault::other(format!("signals cannot be received: {e}")));
        let mut interrupt = listen(SignalKind::interrupt())?;
        let mut terminate = listen(SignalKind::terminate())?;
        let mut hangup = listen(SignalKind::hangup())?;
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        while !self.over() {
            tokio::select! {
                Some(event) = self.events.recv() => self.on_event(event),
                Some(()) = interrupt.recv() => self.on_signal(Signal::INT),
                Some(()) = terminate.recv() => self.on_signal(Signal::TERM),
                Some(()) = hangup.recv() => self.on_signal(Signal::HUP),
                _ = tick.tick() => self.on_tick(),
            }
        }
        self.clean_up().await;
        while let Ok(event) = self.events.try_recv() {
            self.on_event(event);
        }
        self.screen.close();
        self.conclude()
    }

    fn over(&self) -> bool {
        let gone = self.processes.iter().all(|p| p.exited);
        let quiet = self.processes.iter().all(|p| p.pipes == 0 || p.ended.elapsed() > DRAIN);
        gone && quiet
    }

    fn on_event(&mut self, event: Event) {
        match event {
            Event::Line(rank, err, line) => {
                self.processes[rank].output.take(&line);
                self.screen.line(rank, err, &line);
            }
            Event::Closed(rank) => self.processes[rank].pipes -= 1,
            Event::Step(report) => self.screen.step(report),
            Event::Exit(rank, status) => self.on_exit(rank, status),
        }
    }

    fn on_exit(&mut self, rank: usize, status: std::io::Result<std::process::ExitStatus>) {
        use std::os::unix::process::ExitStatusExt;
        let end = match &status {
            Ok(s) => s.code().map(End::Code).or(s.signal().map(End::Signal)).unwrap_or(End::Code(1)),
            Err(_) => End::Code(1),
        };
        let asked = self.asked.is_some() && matches!(end, End::Signal(15) | End::Code(143));
        let ending = matches!(self.phase, Phase::Ending { .. });
        let p = &mut self.processes[rank];
        (p.exited, p.ended) = (true, Instant::now());
        if ending || asked {
            p.ours = true;
            return;
        }
        p.end = end;
        if end.failed() && matches!(self.phase, Phase::Running) {
            self.phase = Phase::Failing { since: Instant::now() };
        }
    }

    fn on_signal(&mut self, signal: Signal) {
        let first = self.asked.is_none();
        self.asked.get_or_insert(signal.as_raw());
        if first && matches!(self.phase, Phase::Running) {
            self.signal_all(Signal::TERM);
            self.screen.say(if self.rules.trainer {
                "stopping after this step, again to end at once"
            } else {
                "sent SIGTERM to all ranks, again to end at once"
            });
            return;
        }
        self.insisted = true;
        self.asked = Some(signal.as_raw());
        self.signal_all(Signal::KILL);
        self.phase = Phase::Ending { since: Instant::now(), killed: true };
    }

    fn on_tick(&mut self) {
        // Time in which this process did not run (it was stopped itself) says nothing about ranks.
        let passed = self.last_tick.elapsed().min(4 * TICK);
        self.last_tick = Instant::now();
        match self.phase {
            Phase::Running => {
                self.look_for_stopped(passed);
                self.look_for_deserters();
            }
            Phase::Failing { since } if since.elapsed() >= REASONS => self.end_all(),
            Phase::Ending { since, killed: false } if since.elapsed() >= self.rules.grace() => {
                self.signal_all(Signal::KILL);
                self.phase = Phase::Ending { since, killed: true };
            }
            _ => {}
        }
    }

    fn look_for_stopped(&mut self, passed: Duration) {
        let mut lost = false;
        for p in self.processes.iter_mut().filter(|p| !p.exited) {
            p.stopped = if proc::is_stopped(p.pid) { p.stopped + passed } else { Duration::ZERO };
            if p.stopped >= self.rules.heartbeat {
                (p.end, p.ended) = (End::Stopped(p.stopped), Instant::now());
                lost = true;
            }
        }
        if lost {
            self.end_all();
        }
    }

    fn look_for_deserters(&mut self) {
        let Some(together) = self.rules.together else { return };
        if self.processes.iter().all(|p| p.exited) {
            return;
        }
        let first = self.processes.iter_mut().filter(|p| p.exited).min_by_key(|p| p.ended);
        if let Some(p) = first.filter(|p| p.ended.elapsed() >= together) {
            p.end = End::Deserted(p.ended.elapsed());
            self.end_all();
        }
    }

    /// From here on what ranks do is our doing.
    fn end_all(&mut self) {
        for p in self.processes.iter_mut().filter(|p| !p.exited) {
            // Victims notice a stopped rank too, perhaps a little before its time is up here.
            if p.stopped > Duration::ZERO && proc::is_stopped(p.pid) && p.end == End::Running {
                (p.end, p.ended) = (End::Stopped(p.stopped), Instant::now());
            }
            // A stopped process acts on SIGKILL alone.
            let signal = if matches!(p.end, End::Stopped(_)) { Signal::KILL } else { Signal::TERM };
            proc::signal_group(p.pid, signal);
        }
        self.phase = Phase::Ending { since: Instant::now(), killed: false };
    }

    fn signal_all(&self, signal: Signal) {
        for p in self.processes.iter().filter(|p| !p.exited || signal == Signal::KILL) {
            proc::signal_group(p.pid, signal);
        }
    }

    /// What ranks started themselves ends with them.
    async fn clean_up(&self) {
        let deadline = Instant::now() + VANISH;
        self.signal_all(Signal::KILL);
        while self.processes.iter().any(|p| proc::group_exists(p.pid)) && Instant::now() < deadline {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    fn evidence(&self) -> Vec<Evidence> {
        let reports: Vec<ErrorReport> =
            self.store.list("error/").into_iter().filter_map(|(_, json)| serde_json::from_slice(&json).ok()).collect();
        let report = |rank| reports.iter().find(|r| r.rank == rank).cloned();
        let of = |p: &Process| Evidence { rank: p.rank, end: p.end, at: p.ended.duration_since(self.started), report: report(p.rank) };
        self.processes.iter().map(of).collect()
    }

    fn conclude(self) -> Result<Screen, Fault> {
        let asked = self.asked.map(|signal| (u8::try_from(128 + signal).unwrap_or(1), proc::signal_name(signal)));
        let evidence = self.evidence();
        // A rank that failed before anyone pressed a key is still the news.
        if let (true, false, Some((code, name))) = (self.insisted, evidence.iter().any(|e| e.end.failed()), &asked) {
            return Err(Fault::job(*code, format!("ended at once, on {name}")));
        }
        if evidence.iter().any(|e| e.end.failed()) {
            return Err(self.blame(&evidence));
        }
        match asked {
            Some((code, name)) if self.processes.iter().any(|p| p.ours) => Err(Fault::job(code, format!("ended on {name}"))),
            _ => Ok(self.screen),
        }
    }

    /// The last thing printed.
    fn blame(&self, evidence: &[Evidence]) -> Fault {
        let Some((first, p)) = verdict::culprit(evidence).map(|rank| (&evidence[rank], &self.processes[rank])) else {
            return Fault::other("the job failed");
        };
        // It has said why it fails, and would have ended had it not been ended before.
        let failing = !first.end.failed() && first.report.as_ref().is_some_and(|r| r.culprit.is_none());
        let end = if failing { "failed, and was ended before its end".to_string() } else { first.end.describe() };
        let mut text = format!("rank {} (pid {}, host {}) {end}", p.rank, p.pid, proc::host());
        let last: Vec<&str> = p.output.last().collect();
        let said = |text: &str| text.lines().all(|l| last.iter().any(|w| w.contains(l.trim())));
        if let Some(report) = first.report.as_ref().filter(|r| !said(&r.text)) {
            text += &format!("\n  error: {}", report.text.replace('\n', "\n    "));
        }
        let accuser = evidence.iter().filter(|e| e.rank != p.rank).filter_map(|e| e.report.as_ref()).find(|r| r.culprit == Some(p.rank));
        if let (Some(accuser), None) = (accuser, &first.report) {
            text += &format!("\n  rank {} reports: {}", accuser.rank, accuser.text.replace('\n', "\n    "));
        }
        if !last.is_empty() {
            text += &format!("\n  its last words:\n    {}", last.join("\n    "));
        }
        if first.end == End::Signal(9)
            && let Some(hint) = self.oom.hint()
        {
            text += &format!("\n  {hint}");
        }
        if let Some(log) = p.output.log() {
            text += &format!("\n  log: {}", log.display());
        }
        let others: Vec<String> = evidence
            .iter()
            .filter(|e| e.rank != p.rank && e.end.failed())
            .map(|e| format!("rank {} {}", e.rank, e.end.describe()))
            .collect();
        if !others.is_empty() {
            text += &format!("\n  after it: {}", others.join(", "));
        }
        let code = if first.end.failed() || failing { first.end.exit_code() } else { zrt::progress::VICTIM_EXIT_CODE as u8 };
        Fault::job(code, text)
    }
}
