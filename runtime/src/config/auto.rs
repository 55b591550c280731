//! A value, or `"auto"`: the planner chooses it for the machine (`zrt::auto`) before anything starts.

use serde::{Deserialize, Serialize};

/// A value or `"auto"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(untagged)]
pub enum Auto<T> {
    /// As written.
    Set(T),
    /// `"auto"`.
    Auto(Word),
}

/// The word itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Word {
    /// `"auto"`.
    Auto,
}

impl<T: Copy> Auto<T> {
    /// `"auto"`.
    pub const AUTO: Auto<T> = Auto::Auto(Word::Auto);

    /// The value, unless it is to be chosen.
    pub fn set(&self) -> Option<T> {
        match self {
            Auto::Set(value) => Some(*value),
            Auto::Auto(_) => None,
        }
    }

    /// To be chosen.
    pub fn is_auto(&self) -> bool {
        self.set().is_none()
    }
}

impl<T: std::fmt::Display + Copy> std::fmt::Display for Auto<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.set() {
            Some(value) => value.fmt(f),
            None => f.write_str("auto"),
        }
    }
}
