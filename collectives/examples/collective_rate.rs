//! How long does a collective take on this machine? Two ranks, as threads and as processes, called inline.
//!
//! ```text
//! cargo run --release -p zrt-collectives --example collective_rate
//! ```
//!
//! Prints the median time of one call and the bytes of the full length per second. The second rank of the process runs is
//! this program again, with the argument `rank`.

use std::error::Error;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};
use zrt_collectives::{Communicator, LocalComm, LocalGroup, LocalOptions, Secret, ServerOptions, TcpStore, TcpStoreServer};
use zrt_kernels::cpu::{CpuDevice, CpuOptions, Mode};
use zrt_kernels::{Category, DType, Device, Place};

type Done = Result<(), Box<dyn Error + Send + Sync>>;

const RANKS: usize = 2;
/// Bytes of the full length, and measured calls.
const SIZES: [(usize, usize); 3] = [(1 << 10, 2000), (1 << 20, 200), (64 << 20, 11)];

fn measure(comm: &dyn Communicator, kind: &str) -> Done {
    let device = CpuDevice::new(CpuOptions { threads: 1, mode: Mode::Inline, ..CpuOptions::default() })?;
    let s = device.stream("comm")?;
    for (bytes, calls) in SIZES {
        let whole = device.alloc("whole", bytes, Place::Device, Category::Slots)?.all(DType::F32)?;
        let part = device.alloc("part", bytes / RANKS, Place::Device, Category::Slots)?.all(DType::F32)?;
        // Touched before: the first call must not pay for the pages.
        s.fill(&whole, 1.0)?;
        s.fill(&part, 1.0)?;
        let run = |op: &str| match op {
            "all_reduce" => comm.all_reduce(&whole, op, &*s),
            "all_gather" => comm.all_gather(&whole, &part, op, &*s),
            _ => comm.reduce_scatter(&part, &whole, op, &*s),
        };
        for op in ["all_reduce", "all_gather", "reduce_scatter"] {
            run(op)?;
            comm.barrier("start", &*s)?;
            let mut times = Vec::with_capacity(calls);
            for _ in 0..calls {
                let begun = Instant::now();
                run(op)?;
                times.push(begun.elapsed());
            }
            times.sort();
            let median = times[calls / 2];
            if comm.rank() == 0 {
                let rate = bytes as f64 / median.as_secs_f64() / 1e9;
                println!("{kind:9} {op:14} {:>8} KiB {:>10.1} us {rate:>7.2} GB/s", bytes >> 10, median.as_secs_f64() * 1e6);
            }
        }
    }
    Ok(())
}

fn connect(secret: &Path, port: &str, rank: usize) -> Result<LocalComm, Box<dyn Error + Send + Sync>> {
    let address = ([127, 0, 0, 1], port.parse()?).into();
    let store = TcpStore::connect(address, Secret::read(secret)?, Duration::from_secs(10))?;
    Ok(LocalComm::join(&store, rank, RANKS, options())?)
}

/// The optional last argument (first, or fourth of a rank) is the segment length in KiB.
fn options() -> LocalOptions {
    let args: Vec<String> = std::env::args().collect();
    let place = if args.get(1).is_some_and(|a| a == "rank") { 4 } else { 1 };
    let kib = args.get(place).and_then(|a| a.parse::<usize>().ok());
    let usual = LocalOptions::default();
    LocalOptions { segment_bytes: kib.map_or(usual.segment_bytes, |k| k << 10), ..usual }
}

fn main() -> Done {
    let args: Vec<String> = std::env::args().collect();
    if args.get(1).is_some_and(|a| a == "rank") {
        return measure(&connect(Path::new(&args[2]), &args[3], 1)?, "processes");
    }
    let comms = LocalGroup::threads(RANKS, options())?;
    std::thread::scope(|scope| {
        let handles: Vec<_> = comms.into_iter().map(|comm| scope.spawn(move || measure(&*comm, "threads"))).collect();
        handles.into_iter().try_for_each(|h| h.join().unwrap_or_else(|_| Err("a rank panicked".into())))
    })?;

    let file = std::env::temp_dir().join(format!("collective_rate.{}", std::process::id()));
    let server = TcpStoreServer::start(Secret::create(&file)?, ServerOptions::default())?;
    let port = server.address().port().to_string();
    let mut rest = vec!["rank".to_string(), file.display().to_string(), port.clone()];
    rest.extend(args.get(1).cloned());
    let mut other = Command::new(std::env::current_exe()?).args(rest).spawn()?;
    let measured = connect(&file, &port, 0).and_then(|comm| measure(&comm, "processes"));
    let _ = std::fs::remove_file(&file);
    other.wait()?;
    measured
}
