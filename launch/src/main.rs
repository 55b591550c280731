//! `zlaunch`: one command that starts, watches and ends the ranks of a job.
//!
//! This file turns arguments into one of the things that can be done and an outcome into an exit code: 0 done, 2 the user's input
//! cannot work, else the code of the rank that failed (128 + signal when it was killed).
#![forbid(unsafe_code)]

mod args;
mod bench;
mod calibrate;
mod chart;
mod choose;
mod doctor;
mod dry;
mod fault;
mod folder;
mod job;
mod kernels;
mod last_words;
mod oom;
mod plan;
mod proc;
mod rank;
mod scale;
mod screen;
mod spawn;
mod supervise;
mod verdict;
mod work;

use args::{Action, Args, ConfigAction, DataAction, KernelsAction};
use clap::Parser;
use fault::Fault;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use zrt::config::Config;

fn main() -> ExitCode {
    let args = Args::parse();
    let ours = matches!(args.action, Some(Action::Rank(_)));
    let level = if ours { "warn,zrt=info,zrt_collectives=info,zrt_kernels=info" } else { "warn" };
    // A fixed filter: environment variables do not configure the product.
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::new(level))
        .with_writer(std::io::stderr)
        .with_ansi(!ours && std::io::stderr().is_terminal())
        .with_target(false)
        .init();
    match dispatch(args) {
        Ok(code) => ExitCode::from(code),
        Err(fault) => {
            fault.print();
            ExitCode::from(fault.code)
        }
    }
}

fn dispatch(args: Args) -> Result<u8, Fault> {
    match args.action {
        None if !args.run.program.is_empty() => job::launch_program(&args.run),
        None => job::launch_training(&args.run),
        Some(Action::Merge { run, out }) => work::merge(&run, &out).and_then(print),
        Some(Action::Data { action: DataAction::Show { file, rows, set } }) => {
            let config = Config::load(&file, &set)?;
            work::data_show(&config, rows, std::io::stdout().is_terminal()).and_then(print)
        }
        Some(Action::Config { action: ConfigAction::Show { file, set } }) => print(Config::load(&file, &set)?.to_toml()?),
        Some(Action::Plan(what)) => plan::run(&what).and_then(print),
        Some(Action::Bench(what)) => bench::run(what),
        Some(Action::Calibrate(args)) => calibrate::run(&args),
        Some(Action::Doctor(args)) => doctor::run(&args),
        Some(Action::Kernels { action: KernelsAction::Build(args) }) => kernels::build(&args).and_then(print),
        Some(Action::Scale(args)) => scale::run(&args),
        Some(Action::Rank(inner)) => rank::run(inner),
        Some(Action::Exec { parent, program }) => rank::exec(parent, &program),
    }
}

/// A reader that has seen enough (`| head`) is no error.
fn print(text: String) -> Result<u8, Fault> {
    let mut out = std::io::stdout().lock();
    let end = if text.ends_with('\n') { "" } else { "\n" };
    let _ = write!(out, "{text}{end}").and_then(|()| out.flush());
    Ok(0)
}
