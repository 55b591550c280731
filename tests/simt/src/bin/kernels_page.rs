//! Writes docs/kernels.md: `cargo run --release -p zrt-simt --bin kernels_page`, after `gates`, whose table it reads.
#![forbid(unsafe_code)]

use std::process::ExitCode;
use zrt_simt::page;

fn main() -> ExitCode {
    let written =
        page::render().and_then(|text| std::fs::write(page::path(), text).map_err(|e| format!("{}: {e}", page::path().display())));
    match written {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("{e}");
            ExitCode::FAILURE
        }
    }
}
