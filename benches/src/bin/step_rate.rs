//! Tokens per second and share of the processor's peak of a configuration, step by step:
//!
//! ```text
//! cargo run --release -p zrt-benches --bin step_rate -- RANKS CONFIG.toml [KEY=VALUE...]
//! ```
#![forbid(unsafe_code)]

use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (Some(Ok(ranks)), Some(file)) = (arguments.first().map(|r| r.parse::<usize>()), arguments.get(1)) else {
        eprintln!("usage: step_rate RANKS CONFIG.toml [KEY=VALUE...]");
        return ExitCode::from(2);
    };
    match zrt_benches::step_rates(Path::new(file), &arguments[2..], ranks) {
        Ok(steps) => {
            println!("{:>5} {:>9} {:>8} {:>9} {:>9}", "step", "seconds", "tok/s", "of peak", "loss");
            for s in steps {
                println!("{:>5} {:>9.3} {:>8.0} {:>8.1}% {:>9.4}", s.step, s.secs, s.tokens_per_s, 100.0 * s.share_of_peak, s.loss);
            }
            ExitCode::SUCCESS
        }
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::FAILURE
        }
    }
}
