//! `zlaunch bench`: how fast are the parts on this machine, each beside its limit? The measuring is in the crates that own the parts
//! (`zrt_kernels::rate`, `zrt_collectives::bench`, `zrt::rate`); here arguments become calls and figures become tables.

mod parts;
mod step;
mod table;

use crate::fault::Fault;
use clap::{Subcommand, ValueEnum};
use std::num::{NonZeroU64, NonZeroUsize};
use std::path::PathBuf;
use table::Table;
use zrt_kernels::DType;

/// What to measure.
#[derive(Debug, clap::Args)]
pub struct BenchArgs {
    #[command(subcommand)]
    pub what: What,
    /// One line of JSON instead of a table
    #[arg(long, global = true)]
    pub json: bool,
}

/// Element type of operands.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Type {
    F32,
    Bf16,
}

impl From<Type> for DType {
    fn from(t: Type) -> DType {
        match t {
            Type::F32 => DType::F32,
            Type::Bf16 => DType::BF16,
        }
    }
}

/// Whose layers are multiplied.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Layers {
    #[value(name = "smollm2-135m")]
    SmolLm2,
    #[value(name = "llama3-8b")]
    Llama8b,
    #[value(name = "llama3-70b")]
    Llama70b,
}

/// What a sweep changes.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Axis {
    /// micro_batch_size: more documents of the same length
    Tokens,
    /// Blocks of the model, with random weights
    Layers,
    /// Ranks, with the same micro-batch on each
    Ranks,
}

#[derive(Debug, Subcommand)]
pub enum What {
    /// Products of a model's layers: GFLOP/s beside multiply-adds that touch no memory
    Matmul {
        #[arg(long, value_enum, default_value = "smollm2-135m")]
        layers: Layers,
        /// Rows of activations
        #[arg(long, default_value = "1024")]
        tokens: NonZeroUsize,
        /// Element type [default: both]
        #[arg(long = "type", value_enum)]
        dtype: Option<Type>,
        /// Threads [default: all cores]
        #[arg(long)]
        threads: Option<NonZeroUsize>,
        /// Milliseconds for each product; it runs once at least
        #[arg(long, value_name = "MS", default_value = "300")]
        budget: u64,
    },
    /// AdamW on the host: parameters/s beside a loop that only moves the same bytes
    Adam {
        /// Parameters
        #[arg(long, default_value = "33554432")]
        params: NonZeroUsize,
        /// Threads [default: all cores]
        #[arg(long)]
        threads: Option<NonZeroUsize>,
        /// Measured updates
        #[arg(long, default_value = "15")]
        rounds: NonZeroUsize,
    },
    /// Collectives of one host: microseconds beside a copy of the same bytes
    Collectives {
        /// Ranks (threads); several are measured one after the other
        #[arg(short = 'n', long = "ranks", value_delimiter = ',', default_value = "2,4")]
        ranks: Vec<NonZeroUsize>,
        /// Bytes of the longer side [default: 1 KiB, 1 MiB, 64 MiB]
        #[arg(long, value_delimiter = ',', value_name = "BYTES")]
        bytes: Vec<NonZeroUsize>,
        /// Element type
        #[arg(long = "type", value_enum, default_value = "f32")]
        dtype: Type,
    },
    /// Loading a model: seconds beside cat FILES > /dev/null (cold) and a copy of the same bytes (warm)
    Load {
        /// A model's folder, or a hub id in the local cache
        model: String,
        /// Ranks (threads)
        #[arg(short = 'n', long = "ranks", default_value = "2")]
        ranks: NonZeroUsize,
        /// Element type in memory
        #[arg(long = "type", value_enum, default_value = "bf16")]
        dtype: Type,
        /// Give each rank its own memory instead of pages that all share
        #[arg(long)]
        no_share_pages: bool,
        /// Measured loads
        #[arg(long, default_value = "5")]
        rounds: NonZeroUsize,
    },
    /// Steps of a configuration: tokens/s, share of the matmul ceiling, time by operation; writes nothing
    Step {
        #[arg(value_name = "TRAIN.TOML")]
        file: PathBuf,
        /// Ranks (threads)
        #[arg(short = 'n', long = "ranks", default_value = "1")]
        ranks: NonZeroUsize,
        /// Steps; the first is not counted
        #[arg(long, default_value = "4")]
        steps: NonZeroU64,
        /// Override a key
        #[arg(long, value_name = "KEY=VALUE")]
        set: Vec<String>,
        /// Measure at several sizes and fit how time grows
        #[arg(long, value_enum, value_name = "AXIS")]
        sweep: Option<Axis>,
        /// Sizes of the sweep
        #[arg(long, value_delimiter = ',', value_name = "N,N,...", requires = "sweep")]
        values: Vec<NonZeroUsize>,
    },
}

/// Measures, and prints.
pub fn run(args: BenchArgs) -> Result<u8, Fault> {
    let tables: Vec<Table> = match args.what {
        What::Matmul { layers, tokens, dtype, threads, budget } => {
            vec![parts::matmul(layers, tokens.get(), dtype, cores(threads), budget)?]
        }
        What::Adam { params, threads, rounds } => vec![parts::adam(params.get(), cores(threads), rounds.get())?],
        What::Collectives { ranks, bytes, dtype } => {
            let bytes: Vec<usize> = bytes.into_iter().map(NonZeroUsize::get).collect();
            ranks.into_iter().map(|n| parts::collectives(n.get(), &bytes, dtype)).collect::<Result<_, _>>()?
        }
        What::Load { model, ranks, dtype, no_share_pages, rounds } => {
            vec![parts::load(&model, ranks.get(), dtype, !no_share_pages, rounds.get())?]
        }
        What::Step { file, ranks, steps, set, sweep: None, .. } => step::once(&file, ranks.get(), steps.get(), &set)?,
        What::Step { file, ranks, steps, set, sweep: Some(axis), values } => {
            let values: Vec<usize> = values.into_iter().map(NonZeroUsize::get).collect();
            step::sweep(&file, ranks.get(), steps.get(), &set, axis, &values)?
        }
    };
    if args.json {
        return crate::print(serde_json::Value::from(tables.iter().map(Table::json).collect::<Vec<_>>()).to_string());
    }
    crate::print(tables.iter().map(Table::text).collect::<Vec<_>>().join("\n\n"))
}

fn cores(threads: Option<NonZeroUsize>) -> usize {
    threads.or_else(|| std::thread::available_parallelism().ok()).map_or(1, NonZeroUsize::get)
}

impl From<zrt_kernels::Error> for Fault {
    fn from(e: zrt_kernels::Error) -> Fault {
        Fault::other(e)
    }
}
