//! Makes `docs/validation.md` and what it is made of:
//!
//! ```text
//! validation measure MODEL FROM TO   real runs of settings FROM .. TO, added to benches/validation/runs.csv
//! validation fit                     benches/validation/efficiency.toml, from the calibration rows
//! validation page MODEL              docs/validation.md
//! ```
#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use zrt::error::{Error, Result};
use zrt_benches::validation::{data, local, page, published};

fn write(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text).map_err(|source| Error::Io { path: path.display().to_string(), source })
}

fn efficiency() -> Result<published::Efficiency> {
    let path = data("efficiency.toml");
    let text = std::fs::read_to_string(&path).map_err(|source| Error::Io { path: path.display().to_string(), source })?;
    toml::from_str(&text).map_err(|e| Error::Input(format!("{}: {e}", path.display())))
}

fn measure(file: &Path, from: usize, to: usize) -> Result<()> {
    let path = data("runs.csv");
    let mut runs = local::from_csv(&std::fs::read_to_string(&path).unwrap_or_default());
    for (i, setting) in local::settings().iter().enumerate().take(to).skip(from) {
        let measured = local::measure(file, i, setting)?;
        println!("{i:>3} {:<40} {} ranks {:.3} s", setting.name, setting.ranks, measured.secs);
        runs.retain(|r| r.index != i);
        runs.push(measured);
        runs.sort_by_key(|r| r.index);
        write(&path, &local::to_csv(&runs))?;
    }
    Ok(())
}

fn run(arguments: &[String]) -> Result<()> {
    let usage = || Error::Input("usage: validation measure MODEL FROM TO | fit | page MODEL".into());
    let number = |i: usize| arguments.get(i).and_then(|a| a.parse::<usize>().ok()).ok_or_else(usage);
    let scratch = tempfile::tempdir().map_err(|source| Error::Io { path: "a temporary folder".into(), source })?;
    let file = |i: usize| {
        let model = arguments.get(i).ok_or_else(usage)?;
        let model = std::path::absolute(model).unwrap_or_else(|_| PathBuf::from(model));
        local::prepare(scratch.path(), &model)
    };
    let corpus = published::corpus(&data("published.toml"))?;
    match arguments.first().map(String::as_str) {
        Some("measure") => measure(&file(1)?, number(2)?, number(3)?),
        Some("fit") => {
            let fitted = published::Predictions::new(&corpus)?.fit()?;
            let row = |(part, s): (&String, &published::Shares)| {
                format!("\n[{part}]\nmatmul = {:.3}\nattention = {:.2}\n", s.matmul, s.attention)
            };
            let rows: String = fitted.iter().map(row).collect();
            let head =
                "# What training reaches of a part's highest product rate, and of the catalogue's attention: made by `validation fit`.";
            write(&data("efficiency.toml"), &format!("{head}\n{rows}"))
        }
        Some("page") => {
            let predictions = published::Predictions::new(&corpus)?;
            let efficiency = efficiency()?;
            let outcomes = predictions.outcomes(&efficiency)?;
            let runs = local::from_csv(&std::fs::read_to_string(data("runs.csv")).unwrap_or_default());
            let sheet = data("machine.toml");
            let here = local::compare(&file(1)?, &sheet, &runs)?;
            let cluster = local::machine(&sheet, 1)?;
            let source = &cluster.part.memory.bandwidth.source;
            // How disturbed the machine was, in the words of whoever made the runs.
            let note = std::fs::read_to_string(data("runs-note.txt")).unwrap_or_default();
            let machine = format!("{} cores, {source}. {}", cluster.machine.host.cores, note.trim());
            let text = page::markdown(&corpus, &efficiency, &outcomes, &here, &machine);
            let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/validation.md");
            write(&path, &text)?;
            println!("written: {}", path.display());
            Ok(())
        }
        _ => Err(usage()),
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::FAILURE
        }
    }
}
