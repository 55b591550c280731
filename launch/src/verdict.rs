//! Who is to blame? From how each rank ended and what it reported, the one rank that failed first; the others are its victims.
//!
//! When one rank dies, the rest fail a moment later because it is gone, each with a long message of its own. The person needs
//! one: so a rank that blames another is never the culprit while there is a better one.

use std::time::Duration;
use zrt::progress::{ErrorReport, VICTIM_EXIT_CODE};

/// How a rank ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Still there.
    Running,
    /// Exit code.
    Code(i32),
    /// Killed by this signal.
    Signal(i32),
    /// Stopped (SIGSTOP), for so long.
    Stopped(Duration),
    /// Others were left waiting for it, for so long, after it had ended with code 0.
    Deserted(Duration),
}

impl End {
    /// True for an end that is a failure of the job.
    pub fn failed(self) -> bool {
        !matches!(self, End::Running | End::Code(0))
    }

    /// For people.
    pub fn describe(self) -> String {
        match self {
            End::Running => "is alive".into(),
            End::Code(0) => "ended".into(),
            End::Code(code) => format!("failed: exit code {code}"),
            End::Signal(signal) => format!("died: {}", crate::proc::signal_name(signal)),
            End::Stopped(time) => format!("is stopped (SIGSTOP): no sign of life for {:.0} s", time.as_secs_f64()),
            End::Deserted(time) => format!("ended with code 0, but the others did not within {} s", time.as_secs()),
        }
    }

    /// The exit code of a job that failed so.
    pub fn exit_code(self) -> u8 {
        match self {
            End::Code(code) => u8::try_from(code).ok().filter(|c| *c != 0).unwrap_or(1),
            End::Signal(signal) => u8::try_from(128 + signal).unwrap_or(1),
            _ => 1,
        }
    }
}

/// What is known of one rank when the job has failed. Only what happened before the launcher itself began to end ranks.
#[derive(Clone, Debug)]
pub struct Evidence {
    /// The rank.
    pub rank: usize,
    /// How it ended.
    pub end: End,
    /// When, since the start.
    pub at: Duration,
    /// What it reported.
    pub report: Option<ErrorReport>,
}

impl Evidence {
    fn blames(&self) -> Option<usize> {
        self.report.as_ref().and_then(|r| r.culprit).filter(|c| *c != self.rank)
    }

    /// It failed only because of another rank.
    pub fn is_victim(&self) -> bool {
        self.end == End::Code(VICTIM_EXIT_CODE) || (self.blames().is_some() && !matches!(self.end, End::Signal(_) | End::Stopped(_)))
    }
}

/// Deaths closer than this may be seen in any order; of those a signal comes first, since it has no cause within the job.
const SIMULTANEOUS: Duration = Duration::from_millis(100);

/// The rank to name first.
pub fn culprit(all: &[Evidence]) -> Option<usize> {
    let causes: Vec<&Evidence> = all.iter().filter(|e| e.end.failed() && !e.is_victim()).collect();
    if let Some(first) = causes.iter().map(|e| e.at).min() {
        let near = causes.iter().filter(|e| e.at <= first + SIMULTANEOUS);
        return near.min_by_key(|e| (!matches!(e.end, End::Signal(_)), e.at)).map(|e| e.rank);
    }
    let named = |rank: usize| all.iter().filter(|e| e.blames() == Some(rank)).count();
    let most = all.iter().map(|e| e.rank).filter(|r| named(*r) > 0).max_by_key(|r| (named(*r), std::cmp::Reverse(*r)));
    most.or_else(|| all.iter().filter(|e| e.end.failed()).min_by_key(|e| e.at).map(|e| e.rank))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn evidence(rank: usize, end: End, ms: u64, blames: Option<usize>) -> Evidence {
        let report = blames.map(|culprit| ErrorReport { rank, culprit: Some(culprit), text: "peer lost".into() });
        Evidence { rank, end, at: Duration::from_millis(ms), report }
    }

    #[test]
    fn a_killed_rank_comes_before_those_that_missed_it() {
        let all = [
            evidence(0, End::Code(VICTIM_EXIT_CODE), 10, Some(1)),
            evidence(1, End::Signal(9), 12, None),
            evidence(2, End::Code(1), 15, Some(1)),
        ];
        assert_eq!(culprit(&all), Some(1));
        assert!(all[2].is_victim());
    }

    #[test]
    fn of_two_causes_the_first_counts_and_at_once_the_signal() {
        let all = [evidence(0, End::Code(3), 10, None), evidence(1, End::Signal(6), 400, None)];
        assert_eq!(culprit(&all), Some(0));
        let all = [evidence(0, End::Code(1), 10, None), evidence(1, End::Signal(9), 11, None)];
        assert_eq!(culprit(&all), Some(1));
    }

    #[test]
    fn a_rank_that_only_others_accuse_is_named() {
        let all = [
            evidence(0, End::Code(VICTIM_EXIT_CODE), 10, Some(2)),
            evidence(1, End::Code(VICTIM_EXIT_CODE), 10, Some(2)),
            evidence(2, End::Running, 0, None),
        ];
        assert_eq!(culprit(&all), Some(2));
    }

    #[test]
    fn victims_alone_still_give_one() {
        let all = [evidence(0, End::Running, 0, None), evidence(1, End::Code(VICTIM_EXIT_CODE), 10, None)];
        assert_eq!(culprit(&all), Some(1));
        assert_eq!(culprit(&[evidence(0, End::Code(0), 1, None)]), None);
    }

    #[test]
    fn exit_codes() {
        assert_eq!(End::Code(7).exit_code(), 7);
        assert_eq!(End::Signal(9).exit_code(), 137);
        assert_eq!(End::Stopped(Duration::from_secs(3)).exit_code(), 1);
    }
}
