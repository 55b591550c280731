//! The command line.

use clap::{Parser, Subcommand};
use std::ffi::OsString;
use std::num::NonZeroUsize;
use std::path::PathBuf;

/// Starts, watches and ends the ranks of a job.
#[derive(Debug, Parser)]
#[command(
    name = "zlaunch",
    version,
    about = "Trains large language models over several ranks: zlaunch -n 2 train.toml",
    args_conflicts_with_subcommands = true,
    arg_required_else_help = true,
    after_help = "Examples:\n  zlaunch -n 2 train.toml --set zero.stage=3 --set training.steps=20\n  \
                  zlaunch -n 2 --dry-run train.toml\n  zlaunch -n 4 -- ./my_trainer --its --args\n  \
                  zlaunch merge out --out merged\n  zlaunch data show train.toml\n  \
                  zlaunch plan examples/train70b.toml --machine 2xMI300X\n  \
                  zlaunch scale train.toml --machine H100x8 --nodes 1,2,...,64 --sweep zero.stage=0,3 --out study\n  \
                  zlaunch bench step -n 2 train.toml\n\n\
                  Ctrl-C ends the run after the current step, with a checkpoint; a second one at once.\n\
                  Exit code: 0 done, 2 wrong input, else that of the rank that failed (128 + signal)."
)]
pub struct Args {
    #[command(subcommand)]
    pub action: Option<Action>,
    #[command(flatten)]
    pub run: RunArgs,
}

/// Training, or any program.
#[derive(Debug, clap::Args)]
pub struct RunArgs {
    /// Ranks (processes) to start on this host
    #[arg(short = 'n', long = "ranks", value_name = "RANKS", default_value = "1")]
    pub ranks: NonZeroUsize,
    /// The configuration to train
    #[arg(value_name = "TRAIN.TOML")]
    pub file: Option<PathBuf>,
    /// Override a key: section.key=value (a TOML value or a bare string; an empty value removes the key)
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Write a timeline of streams and events (Chrome/Perfetto) into the run folder
    #[arg(long)]
    pub trace: bool,
    /// Print ranks, units, segments and bytes per rank and per host, and stop
    #[arg(long)]
    pub dry_run: bool,
    /// With a program: write each rank's output to DIR/rank-N.log too
    #[arg(long, value_name = "DIR")]
    pub logs: Option<PathBuf>,
    /// With a program: seconds after which a stopped rank is lost
    #[arg(long, value_name = "SECONDS", default_value = "10")]
    pub heartbeat_timeout: u64,
    /// With a program: the port in MASTER_PORT; 0 takes a free one
    #[arg(long, value_name = "PORT", default_value = "0")]
    pub master_port: u16,
    /// Any program and its arguments, started once per rank with torchrun's variables (RANK, WORLD_SIZE, ...)
    #[arg(last = true, value_name = "PROGRAM")]
    pub program: Vec<OsString>,
}

/// Everything but starting a job.
#[derive(Debug, Subcommand)]
pub enum Action {
    /// Merge a run's adapter into its base: a Hugging Face directory
    Merge {
        /// The run folder, or an adapter folder
        run: PathBuf,
        /// The folder to write
        #[arg(long)]
        out: PathBuf,
    },
    /// Look at training data
    Data {
        #[command(subcommand)]
        action: DataAction,
    },
    /// Look at a configuration
    Config {
        #[command(subcommand)]
        action: ConfigAction,
    },
    /// Predict memory, time and money on a machine that need not be here; no weights needed
    Plan(crate::plan::PlanArgs),
    /// Measure this machine: products, optimizer, loading, whole steps, each beside its limit
    Bench(crate::bench::BenchArgs),
    /// Measure this machine in about a minute and keep the figures, on which plans and studies of runs here rest
    Calibrate(crate::calibrate::CalibrateArgs),
    /// Look at this machine's drivers, links, limits and speed: each finding with its fix
    Doctor(crate::doctor::DoctorArgs),
    /// GPU kernels
    Kernels {
        #[command(subcommand)]
        action: KernelsAction,
    },
    /// Study a configuration over many sizes and choices: a table and a report with charts
    Scale(crate::scale::ScaleArgs),
    #[command(hide = true)]
    Rank(RankArgs),
    #[command(hide = true)]
    Exec {
        #[arg(long)]
        parent: u32,
        #[arg(last = true, required = true)]
        program: Vec<OsString>,
    },
}

/// One rank of a training job, as the launcher starts it.
#[derive(Debug, clap::Args)]
pub struct RankArgs {
    /// Resolved configuration.
    pub file: PathBuf,
    #[arg(long)]
    pub parent: u32,
    #[arg(long)]
    pub trace: bool,
}

#[derive(Debug, Subcommand)]
pub enum DataAction {
    /// Print the tokens as the trainer sees them: which are trained, which masked, how documents are packed
    Show {
        #[arg(value_name = "TRAIN.TOML")]
        file: PathBuf,
        /// Rows to print
        #[arg(long, default_value = "4")]
        rows: usize,
        /// Override a key
        #[arg(long, value_name = "KEY=VALUE")]
        set: Vec<String>,
    },
}

#[derive(Debug, Subcommand)]
pub enum KernelsAction {
    /// Compile all kernels for machines that need not be here; runs then need no compiler
    Build(crate::kernels::BuildArgs),
}

#[derive(Debug, Subcommand)]
pub enum ConfigAction {
    /// Check a configuration and print it with all defaults
    Show {
        #[arg(value_name = "TRAIN.TOML")]
        file: PathBuf,
        /// Override a key
        #[arg(long, value_name = "KEY=VALUE")]
        set: Vec<String>,
    },
}
