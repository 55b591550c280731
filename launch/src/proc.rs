//! What /proc and the system say about processes.

use rustix::process::{Pid, Signal};

/// This host's name.
pub fn host() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// The state letter of a process (`T`: stopped); `None` when it is gone.
pub fn state(pid: u32) -> Option<char> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name stands in parentheses and may hold some itself.
    text.rsplit_once(')')?.1.trim_start().chars().next()
}

/// True when `pid` is stopped by a signal or a debugger.
pub fn is_stopped(pid: u32) -> bool {
    matches!(state(pid), Some('T' | 't'))
}

/// Signals all processes of the group that `leader` leads. A group that is gone is fine.
pub fn signal_group(leader: u32, signal: Signal) {
    if let Some(pid) = i32::try_from(leader).ok().and_then(Pid::from_raw) {
        let _ = rustix::process::kill_process_group(pid, signal);
    }
}

/// True while the group has members, also dead ones that nobody waited for.
pub fn group_exists(leader: u32) -> bool {
    i32::try_from(leader).ok().and_then(Pid::from_raw).is_some_and(|pid| rustix::process::test_kill_process_group(pid).is_ok())
}

/// Name of a signal.
pub fn signal_name(signal: i32) -> String {
    let name = match signal {
        1 => "SIGHUP",
        2 => "SIGINT",
        3 => "SIGQUIT",
        4 => "SIGILL",
        5 => "SIGTRAP",
        6 => "SIGABRT",
        7 => "SIGBUS",
        8 => "SIGFPE",
        9 => "SIGKILL",
        10 => "SIGUSR1",
        11 => "SIGSEGV",
        12 => "SIGUSR2",
        13 => "SIGPIPE",
        14 => "SIGALRM",
        15 => "SIGTERM",
        19 => "SIGSTOP",
        24 => "SIGXCPU",
        25 => "SIGXFSZ",
        31 => "SIGSYS",
        _ => return format!("signal {signal}"),
    };
    format!("signal {signal} ({name})")
}
