//! A rank's output: whole into its log, the last lines kept for the report of its death.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

const LINES: usize = 12;
const LINE_BYTES: usize = 400;

/// Where one rank's output goes.
pub struct Output {
    log: Option<(PathBuf, File)>,
    last: VecDeque<String>,
}

impl Output {
    /// With `logs`, appends to `rank-<rank>.log` there: an earlier attempt's output stays readable.
    pub fn new(rank: usize, logs: Option<&Path>) -> std::io::Result<Output> {
        let log = match logs {
            None => None,
            Some(folder) => {
                let path = folder.join(format!("rank-{rank}.log"));
                let file = OpenOptions::new().create(true).append(true).open(&path)?;
                Some((path, file))
            }
        };
        Ok(Output { log, last: VecDeque::new() })
    }

    /// Takes one line, with its line end if it had one.
    pub fn take(&mut self, line: &[u8]) {
        if let Some((_, file)) = &mut self.log {
            // A full disk must not end the run here: the rank's own saving reports it.
            let _ = file.write_all(line);
        }
        let text = String::from_utf8_lossy(line);
        let text = text.trim_end();
        if text.is_empty() {
            return;
        }
        if self.last.len() == LINES {
            self.last.pop_front();
        }
        let cut = text.char_indices().nth(LINE_BYTES).map_or(text.len(), |(i, _)| i);
        self.last.push_back(text[..cut].to_owned());
    }

    /// The last lines, oldest first.
    pub fn last(&self) -> impl Iterator<Item = &str> {
        self.last.iter().map(String::as_str)
    }

    /// The log's path.
    pub fn log(&self) -> Option<&Path> {
        self.log.as_ref().map(|(path, _)| path.as_path())
    }
}
