//! Inside a rank's process: bind its life to the launcher's, then become the trainer or another program.

use crate::args::RankArgs;
use crate::fault::Fault;
use crate::work::{self, RankOptions};
use rustix::process::{Pid, Signal};
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use zrt::config::Config;
use zrt::progress::VICTIM_EXIT_CODE;
use zrt::rank::RankEnv;

/// Asks to be killed when the launcher dies.
fn live_with(parent: u32) -> Result<(), Fault> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|e| Fault::other(format!("this rank cannot be bound to the launcher's life: {e}")))?;
    // The launcher may have died before the kernel was asked.
    let now = rustix::process::getppid().map(Pid::as_raw_nonzero).map(|p| p.get().unsigned_abs());
    if now == Some(parent) { Ok(()) } else { Err(Fault::other("the launcher is gone")) }
}

/// `zlaunch exec`: becomes `program`.
pub fn exec(parent: u32, program: &[OsString]) -> Result<u8, Fault> {
    live_with(parent)?;
    let (name, arguments) = program.split_first().ok_or_else(|| Fault::user("no program"))?;
    let error = std::process::Command::new(name).args(arguments).exec();
    // As shells have it: 127 not found, 126 not executable.
    let code = if error.kind() == std::io::ErrorKind::NotFound { 127 } else { 126 };
    Err(Fault::job(code, format!("zlaunch: cannot run {}: {error}", name.to_string_lossy())))
}

/// `zlaunch rank`: trains.
pub fn run(args: RankArgs) -> Result<u8, Fault> {
    live_with(args.parent)?;
    let env = RankEnv::read().map_err(Fault::user)?.ok_or_else(|| Fault::user("RANK is not set: start with zlaunch -n"))?;
    let config = Config::load(&args.file, &[])?;
    match work::train_rank(config, env.clone(), RankOptions { trace: args.trace }) {
        Ok(()) => Ok(0),
        Err(error) => {
            let culprit = error.culprit().filter(|c| *c != env.rank);
            let text = error.to_string();
            let code = match culprit {
                Some(_) => VICTIM_EXIT_CODE as u8,
                None if error.is_input() => crate::fault::USER,
                None => 1,
            };
            Err(Fault::job(code, format!("error: {text}")))
        }
    }
}
