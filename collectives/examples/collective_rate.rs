//! How long does a collective take on this machine? Ranks as threads and as processes, alone and through streams.
//!
//! ```text
//! cargo run --release -p zrt-collectives --example collective_rate [ranks] [f32|bf16|i32] [threads|processes]
//! ```
//!
//! Prints what [`zrt_collectives::bench`] measures: one line per (operation, bytes). The other ranks of the process runs are this program
//! again, told by the argument `rank`.

use std::error::Error;
use std::path::Path;
use std::process::Command;
use std::time::Duration;
use zrt_collectives::bench::{Size, measure};
use zrt_collectives::{Communicator, LocalComm, LocalGroup, LocalOptions, Secret, ServerOptions, TcpStore, TcpStoreServer};
use zrt_kernels::DType;

type Done<T = ()> = Result<T, Box<dyn Error + Send + Sync>>;

fn show(comm: &LocalComm, dtype: DType, kind: &str) -> Done {
    let rates = measure(comm, dtype, &Size::USUAL)?;
    for r in rates.iter().filter(|_| comm.rank() == 0) {
        let name = format!("{kind} x{} {dtype}", comm.ranks());
        println!(
            "{name:18} {:14} {:>6} KiB {:>9.2} us {:>6.2} GB/s   stream {:>9.2} us   copy {:>9.2} us",
            r.op,
            r.bytes >> 10,
            r.transport_us,
            r.gb_per_s(),
            r.stream_us,
            r.copy_us
        );
    }
    Ok(())
}

fn connect(secret: &Path, port: &str, rank: usize, ranks: usize) -> Done<LocalComm> {
    let address = ([127, 0, 0, 1], port.parse()?).into();
    let store = TcpStore::connect(address, Secret::read(secret)?, Duration::from_secs(10))?;
    Ok(LocalComm::join(&store, rank, ranks, LocalOptions::default())?)
}

fn threads(ranks: usize, dtype: DType) -> Done {
    let comms = LocalGroup::threads(ranks, LocalOptions::default())?;
    std::thread::scope(|scope| {
        let handles: Vec<_> = comms.into_iter().map(|comm| scope.spawn(move || show(&comm, dtype, "threads"))).collect();
        handles.into_iter().try_for_each(|h| h.join().unwrap_or_else(|_| Err("a rank panicked".into())))
    })
}

fn processes(ranks: usize, dtype: DType) -> Done {
    let file = std::env::temp_dir().join(format!("collective_rate.{}", std::process::id()));
    let server = TcpStoreServer::start(Secret::create(&file)?, ServerOptions::default())?;
    let port = server.address().port().to_string();
    let other = |rank: usize| {
        let words = [ranks.to_string(), dtype.to_string(), "rank".into(), rank.to_string(), port.clone(), file.display().to_string()];
        Command::new(std::env::current_exe()?).args(words).spawn()
    };
    let others = (1..ranks).map(other).collect::<Result<Vec<_>, _>>()?;
    let measured = connect(&file, &port, 0, ranks).and_then(|comm| show(&comm, dtype, "processes"));
    let _ = std::fs::remove_file(&file);
    for mut other in others {
        other.wait()?;
    }
    measured
}

fn main() -> Done {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let word = |i: usize| args.get(i).map(String::as_str);
    let ranks = word(0).unwrap_or("2").parse()?;
    let dtype = match word(1).unwrap_or("f32") {
        "f32" => DType::F32,
        "bf16" => DType::BF16,
        "i32" => DType::I32,
        other => return Err(format!("'{other}' has no sum; expected f32, bf16 or i32").into()),
    };
    match word(2) {
        Some("rank") => show(&connect(Path::new(&args[5]), &args[4], args[3].parse()?, ranks)?, dtype, "processes"),
        Some("threads") => threads(ranks, dtype),
        Some("processes") => processes(ranks, dtype),
        _ => threads(ranks, dtype).and_then(|()| processes(ranks, dtype)),
    }
}
