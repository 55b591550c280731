//! How a bad configuration is told: every problem at once, each with its place, what is wrong, and what to do.
//!
//! A person fixes a file in one go only if one run names all that is wrong with it; so checks collect [`Problem`]s instead of
//! returning at the first.

use std::fmt;
use std::path::{Path, PathBuf};

/// Where a value was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// In the TOML file, counted from 1.
    File {
        /// Line.
        line: usize,
        /// Column, in characters.
        column: usize,
    },
    /// In this `--set` argument.
    Set(String),
    /// Nowhere: something is missing, or the value came from code.
    Nowhere,
}

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Where.
    pub place: Place,
    /// What, and what to do about it.
    pub what: String,
}

/// All that is wrong with a configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigErrors {
    /// The TOML file, empty when the configuration came from code.
    pub file: PathBuf,
    /// At least one problem, in the order of the file.
    pub problems: Vec<Problem>,
}

impl ConfigErrors {
    /// Sorts by place; `None` when there is nothing wrong.
    pub(super) fn of(file: &Path, mut problems: Vec<Problem>) -> Option<ConfigErrors> {
        problems.sort_by_key(|p| match p.place {
            Place::File { line, column } => (0, line, column),
            Place::Set(_) => (1, 0, 0),
            Place::Nowhere => (2, 0, 0),
        });
        problems.dedup();
        (!problems.is_empty()).then(|| ConfigErrors { file: file.to_path_buf(), problems })
    }
}

impl fmt::Display for ConfigErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let file = self.file.display();
        for (i, problem) in self.problems.iter().enumerate() {
            if i > 0 {
                writeln!(f)?;
            }
            match &problem.place {
                Place::File { line, column } => write!(f, "{file}:{line}:{column}: {}", problem.what)?,
                Place::Set(argument) => write!(f, "--set {argument}: {}", problem.what)?,
                Place::Nowhere if self.file.as_os_str().is_empty() => write!(f, "configuration: {}", problem.what)?,
                Place::Nowhere => write!(f, "{file}: {}", problem.what)?,
            }
        }
        Ok(())
    }
}

impl std::error::Error for ConfigErrors {}
