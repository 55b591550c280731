//! What a person sees of a running job: one live line on a terminal, plain log lines elsewhere, and a summary at the end.

use indicatif::{ProgressBar, ProgressStyle};
use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};
use zrt::progress::{RunEnd, Saved, StepReport};

/// How output is shown.
enum Mode {
    /// Training on a terminal: one line that changes; rank 0's own lines are in its log.
    Live(ProgressBar),
    /// Training elsewhere: a line every so many steps, and rank 0's own lines.
    Plain {
        /// Steps between lines.
        every: u64,
    },
    /// Another program: all its lines, with the rank.
    Foreign,
}

/// Shows a job.
pub struct Screen {
    mode: Mode,
    started: Instant,
    begun: bool,
    step_secs: f64,
}

/// Weight of the newest step in the mean step time.
const NEWEST: f64 = 0.1;

impl Screen {
    /// For a training run that logs every `every` steps.
    pub fn training(every: u64) -> Screen {
        if !std::io::stderr().is_terminal() {
            return Screen::new(Mode::Plain { every: every.max(1) });
        }
        let bar = ProgressBar::new(0);
        if let Ok(style) = ProgressStyle::with_template("{wide_msg}") {
            bar.set_style(style);
        }
        bar.set_message("starting");
        Screen::new(Mode::Live(bar))
    }

    /// For another program.
    pub fn foreign() -> Screen {
        Screen::new(Mode::Foreign)
    }

    fn new(mode: Mode) -> Screen {
        Screen { mode, started: Instant::now(), begun: false, step_secs: 0.0 }
    }

    /// A line of a rank's output.
    pub fn line(&self, rank: usize, err: bool, line: &[u8]) {
        let prefix = match self.mode {
            Mode::Foreign => format!("[rank {rank}] "),
            Mode::Plain { .. } if rank == 0 => String::new(),
            _ => return,
        };
        let mut bytes = prefix.into_bytes();
        bytes.extend_from_slice(line);
        if !bytes.ends_with(b"\n") {
            bytes.push(b'\n');
        }
        // A closed pipe (`| head`) does not end the job.
        let _ = if err { std::io::stderr().write_all(&bytes) } else { std::io::stdout().write_all(&bytes) };
    }

    /// Something the launcher itself says.
    pub fn say(&self, text: &str) {
        match &self.mode {
            Mode::Live(bar) => bar.println(text),
            _ => {
                let _ = writeln!(std::io::stderr(), "{text}");
            }
        }
    }

    /// A finished step.
    pub fn step(&mut self, report: StepReport) {
        if !self.begun {
            self.step_secs = report.secs;
        }
        self.step_secs += NEWEST * (report.secs - self.step_secs);
        let left = report.steps.saturating_sub(report.step);
        let text = describe(&report, self.step_secs * left as f64);
        match &self.mode {
            Mode::Live(bar) => {
                if report.eval_loss.is_some() {
                    bar.println(&text);
                }
                bar.set_message(text);
            }
            Mode::Plain { every } => {
                let due = report.step.is_multiple_of(*every) || report.step == report.steps || !self.begun;
                if due || report.eval_loss.is_some() {
                    let _ = writeln!(std::io::stdout(), "{text}");
                }
            }
            Mode::Foreign => {}
        }
        self.begun = true;
    }

    /// Leaves the terminal as it was found.
    pub fn close(&self) {
        if let Mode::Live(bar) = &self.mode {
            bar.finish_and_clear();
        }
    }

    /// Steps, time, losses, tokens, and where things are.
    pub fn summary(&self, end: &RunEnd, folder: &std::path::Path) -> String {
        let done = end.first_step + end.steps;
        let mut text = match (end.steps, end.stopped) {
            (0, false) => format!("nothing left to do after step {done}"),
            (n, false) => format!("{n} step{}", if n == 1 { "" } else { "s" }),
            (_, true) => format!("stopped after step {done}; the same command continues"),
        };
        text += &format!(", {} in all", clock(self.started.elapsed()));
        if let Some(loss) = end.loss {
            text += &format!(", final loss {loss:.4}");
        }
        if let Some(loss) = end.eval_loss {
            text += &format!(", held-out loss {loss:.4}");
        }
        if end.steps > 0 && end.secs > 0.0 {
            text += &format!(", {} tokens ({:.0} tok/s)", end.tokens, end.tokens as f64 / end.secs);
        }
        if end.skipped > 0 {
            text += &format!(", {} skipped for gradients that were not finite", end.skipped);
        }
        for Saved { what, path } in &end.saved {
            text += &format!("\n  {what:<10} {}", path.display());
        }
        text + &format!("\n  {:<10} {}", "run", folder.display())
    }
}

/// `step 12/60 eta 0:34 loss 2.345 tok/s 512 peak 40% mem 1.2 GB lr 1.9e-4 grad_norm 0.98`; a narrow terminal cuts the end.
fn describe(r: &StepReport, left_secs: f64) -> String {
    let left = if left_secs.is_finite() { left_secs.clamp(0.0, 1e8) } else { 0.0 };
    let mut text = format!("step {}/{} eta {} loss {:.4}", r.step, r.steps, clock(Duration::from_secs_f64(left)), r.loss);
    if let Some(loss) = r.eval_loss {
        text += &format!(" eval_loss {loss:.4}");
    }
    if r.skipped > 0 {
        text += &format!(" skipped {}", r.skipped);
    }
    text += &format!(" tok/s {:.0}", r.tokens_per_s);
    if r.share_of_peak > 0.0 {
        text += &format!(" peak {:.0}%", 100.0 * r.share_of_peak);
    }
    text + &format!(" mem {} lr {} grad_norm {:.3}", bytes(r.memory_bytes), rate(r.lr), r.grad_norm)
}

fn rate(lr: f64) -> String {
    if lr == 0.0 { "0".into() } else { format!("{lr:.2e}") }
}

fn bytes(n: u64) -> String {
    match n {
        0..1_000_000 => format!("{:.0} kB", n as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.0} MB", n as f64 / 1e6),
        _ => format!("{:.1} GB", n as f64 / 1e9),
    }
}

/// `0:34`, `1:02:03`
fn clock(time: Duration) -> String {
    let secs = time.as_secs_f64().round() as u64;
    let (h, m, s) = (secs / 3600, secs / 60 % 60, secs % 60);
    if h > 0 { format!("{h}:{m:02}:{s:02}") } else { format!("{m}:{s:02}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_reads_as_one_line() {
        let report = StepReport {
            step: 12,
            steps: 60,
            loss: 2.3451,
            grad_norm: 0.98,
            lr: 1.9e-4,
            tokens: 1024,
            tokens_per_s: 512.4,
            memory_bytes: 1_230_000_000,
            ..StepReport::default()
        };
        assert_eq!(describe(&report, 34.2), "step 12/60 eta 0:34 loss 2.3451 tok/s 512 mem 1.2 GB lr 1.90e-4 grad_norm 0.980");
    }

    #[test]
    fn clocks_and_bytes() {
        assert_eq!(clock(Duration::from_secs(3723)), "1:02:03");
        assert_eq!(bytes(12_345_678), "12 MB");
    }
}
