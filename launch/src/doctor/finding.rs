//! What did the doctor find? One thing looked at: how bad it is, what was expected, what is there, and what to do about it.

use super::tree::Unread;
use serde::Serialize;

/// How bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// As it should be.
    Ok,
    /// Worth knowing; also what could not be read.
    Note,
    /// Costs speed.
    Warning,
    /// Something will fail.
    Problem,
}

/// Under which heading it is printed, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Group {
    /// Devices and their drivers.
    Devices,
    /// The vendors' libraries.
    Libraries,
    /// Links between devices.
    Links,
    /// Nodes of memory.
    Numa,
    /// Settings of the kernel.
    Kernel,
    /// What this process may use.
    Limits,
    /// How this host is reached.
    Network,
    /// Measurements.
    Speed,
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Finding {
    /// Its heading.
    pub group: Group,
    /// How bad it is.
    pub level: Level,
    /// What was looked at.
    pub what: String,
    /// What it should be; empty where anything is fine.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub expected: String,
    /// What it is.
    pub found: String,
    /// What to do: commands where there are some; empty where there is nothing to do.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub fix: String,
}

impl Finding {
    /// A finding that asks for nothing.
    pub fn new(level: Level, group: Group, what: impl Into<String>, found: impl Into<String>) -> Finding {
        Finding { group, level, what: what.into(), expected: String::new(), found: found.into(), fix: String::new() }
    }

    /// As it should be.
    pub fn ok(group: Group, what: impl Into<String>, found: impl Into<String>) -> Finding {
        Finding::new(Level::Ok, group, what, found)
    }

    /// Something could not be read: nothing follows from that.
    pub fn unread(group: Group, what: impl Into<String>, why: &Unread) -> Finding {
        Finding::new(Level::Note, group, what, why.to_string())
    }

    /// The same, with what it should be.
    pub fn expected(self, expected: impl Into<String>) -> Finding {
        Finding { expected: expected.into(), ..self }
    }

    /// The same, with what to do.
    pub fn fix(self, fix: impl Into<String>) -> Finding {
        Finding { fix: fix.into(), ..self }
    }

    /// The same, no worse than a note: on a host where it changes nothing.
    pub fn softened(self) -> Finding {
        Finding { level: self.level.min(Level::Note), ..self }
    }
}
