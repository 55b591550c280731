//! Writes the table of what compilers make of the GPU kernels: `cargo run --release -p zrt-simt --bin gates`. Compilers are found
//! as the tests find them (`.ci/tools` installs them); all must be there, so that the table stays whole.
#![forbid(unsafe_code)]

use std::process::ExitCode;
use zrt_simt::gates::{compile_all, faults, page};

fn main() -> ExitCode {
    let compiled = match compile_all() {
        Ok(compiled) => compiled,
        Err(e) => {
            eprintln!("{e}");
            return ExitCode::FAILURE;
        }
    };
    for fault in faults(&compiled) {
        eprintln!("{fault}");
    }
    for (arch, why) in &compiled.not_run {
        eprintln!("{arch}: {why}; run .ci/tools");
    }
    if !compiled.not_run.is_empty() {
        return ExitCode::FAILURE;
    }
    if let Err(e) = std::fs::write(page::path(), page::render(&compiled)) {
        eprintln!("{}: {e}", page::path().display());
        return ExitCode::FAILURE;
    }
    println!(
        "{} kernels on {} machines: {}",
        compiled.rows.len() / compiled.versions.len(),
        compiled.versions.len(),
        page::path().display()
    );
    ExitCode::SUCCESS
}
