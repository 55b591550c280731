//! What ends the command: a text for people and the exit code.

use std::fmt::Display;

/// Exit code for input that cannot work.
pub const USER: u8 = 2;

/// Why the command ends without having done its work.
#[derive(Debug)]
pub struct Fault {
    /// Exit code.
    pub code: u8,
    text: String,
    /// The text was written for the end of a run and has no prefix.
    bare: bool,
}

impl Fault {
    /// The user's input cannot work.
    pub fn user(text: impl Display) -> Fault {
        Fault { code: USER, text: text.to_string(), bare: false }
    }

    /// Something else failed.
    pub fn other(text: impl Display) -> Fault {
        Fault { code: 1, text: text.to_string(), bare: false }
    }

    /// The end of a job whose rank failed.
    pub fn job(code: u8, text: String) -> Fault {
        Fault { code, text, bare: true }
    }

    /// On standard error; nothing is printed after it.
    pub fn print(&self) {
        use std::io::Write;
        let mut err = std::io::stderr().lock();
        let prefix = if self.bare { "" } else { "error: " };
        // Nobody is left to tell when standard error is closed.
        let _ = writeln!(err, "{prefix}{}", self.text.trim_end());
    }
}

impl From<zrt::config::ConfigErrors> for Fault {
    fn from(e: zrt::config::ConfigErrors) -> Fault {
        let count = e.problems.len();
        if count > 1 { Fault::user(format!("{count} problems in the configuration\n{e}")) } else { Fault::user(e) }
    }
}

impl From<zrt::Error> for Fault {
    fn from(e: zrt::Error) -> Fault {
        if e.is_input() { Fault::user(e) } else { Fault::other(e) }
    }
}
