//! `docs/validation.md`.

use super::local::{Compared, settings};
use super::published::{Corpus, Efficiency, Outcome, Role};
use super::{mean_and_worst, median};
use std::fmt::Write as _;

/// Families in the order of the file, of one role.
fn families<'a>(outcomes: &'a [Outcome<'a>], role: Role) -> Vec<&'a str> {
    let mut out: Vec<&str> = Vec::new();
    for o in outcomes.iter().filter(|o| o.run.role == role) {
        if !out.contains(&o.run.family.as_str()) {
            out.push(&o.run.family);
        }
    }
    out
}

fn role_name(role: Role) -> &'static str {
    match role {
        Role::Calibration => "calibrated",
        Role::HeldOut => "held out",
        Role::Other => "other",
    }
}

fn errors(outcomes: &[Outcome], keep: impl Fn(&Outcome) -> bool) -> Vec<f64> {
    outcomes.iter().filter(|o| keep(o)).filter_map(|o| o.error).collect()
}

/// The page.
pub fn markdown(corpus: &Corpus, efficiency: &Efficiency, outcomes: &[Outcome], here: &[Compared], machine: &str) -> String {
    let mut out = String::from(
        "# Validation\n\nMade by `cargo run --release -p zrt-benches --bin validation -- page` from `benches/validation`; predictions are those of \
         `zlaunch plan`. Errors of published rows are of the rate: +10 % is \
         10 % too fast.\n\n",
    );
    local(&mut out, here, machine);
    published(&mut out, corpus, efficiency, outcomes);
    out
}

fn local(out: &mut String, here: &[Compared], machine: &str) {
    let secs: Vec<f64> = here.iter().map(Compared::error).collect();
    let (mean, worst) = mean_and_worst(&secs);
    let exact = here.iter().filter(|c| c.bytes == c.measured.bytes).count();
    let within = here.iter().filter(|c| c.secs[0] <= c.measured.secs && c.measured.secs <= c.secs[2]).count();
    let _ = writeln!(
        out,
        "## Real runs on one machine\n\nSmolLM2-135M, LoRA r16 unless it says all weights, bf16 unless it says f32, 4 sequences of 256 tokens a step; \
         {machine} Every rate is from `zlaunch calibrate` on that machine (`benches/validation/machine.toml`); no run was used to fit any.\n\n\
         Seconds of a step (below zero: predicted too fast): median error {:.1} %, mean {mean:.1} %, worst {worst:.1} % over {} runs (asked: median 10 %, worst 25 %, 24 runs); \
         {within} lie between low and high. Memory of rank 0: planned as held, to the byte, in {exact} of {}.\n",
        median(&secs),
        here.len(),
        here.len()
    );
    let _ = writeln!(
        out,
        "| ranks | run | measured s | predicted s | low - high | error % | held bytes | planned - held |\n|---|---|---|---|---|---|---|---|"
    );
    for c in here {
        let s = &settings()[c.measured.index];
        let _ = writeln!(
            out,
            "| {} | {} | {:.3} | {:.3} | {:.3} - {:.3} | {:+.1} | {} | {} |",
            s.ranks,
            s.name,
            c.measured.secs,
            c.secs[1],
            c.secs[0],
            c.secs[2],
            c.error(),
            c.measured.bytes,
            c.bytes as i64 - c.measured.bytes as i64
        );
    }
}

fn published(out: &mut String, corpus: &Corpus, efficiency: &Efficiency, outcomes: &[Outcome]) {
    let of = |role: Role| mean_and_worst(&errors(outcomes, |o| o.run.role == role));
    let (calibrated, held) = (of(Role::Calibration), of(Role::HeldOut));
    let shares: Vec<String> = efficiency.iter().map(|(part, s)| format!("{part} {:.3} and {:.2}", s.matmul, s.attention)).collect();
    let _ = writeln!(
        out,
        "\n## Published runs\n\nTwo numbers a part are fitted, to the calibrated families alone, and then frozen: the share of the part's highest \
         product rate that training reaches, and a factor on the catalogue's attention, 1 where no calibration row has long sequences ({}). Nothing is fitted to a row or a family. Other programs are predicted as if they were ours, so \
         their own losses are errors here.\n\nMean absolute error {:.1} % (worst {:.1} %) in the calibrated families, {:.1} % (worst {:.1} %) held \
         out; asked: 10 % and 15 %.\n",
        shares.join(", "),
        calibrated.0,
        calibrated.1,
        held.0,
        held.1
    );
    let _ = writeln!(out, "| family | role | rows | mean error % | mean absolute % | worst % |\n|---|---|---|---|---|---|");
    for role in [Role::Calibration, Role::HeldOut, Role::Other] {
        for family in families(outcomes, role) {
            let errors = errors(outcomes, |o| o.run.family == family);
            let (mean, worst) = mean_and_worst(&errors);
            let bias = errors.iter().sum::<f64>() / errors.len().max(1) as f64;
            let _ = writeln!(out, "| {family} | {} | {} | {bias:+.1} | {mean:.1} | {worst:.1} |", role_name(role), errors.len());
        }
    }
    let _ = writeln!(
        out,
        "\n| row | family | machine | model | tokens | measured | predicted | error % | GiB published / planned | assumed |\n|---|---|---|---|---|---|---|---|---|---|"
    );
    for o in outcomes {
        let r = o.run;
        let error = match (o.refused, o.error) {
            (true, _) => "refused: above the ceiling".into(),
            (_, Some(e)) => format!("{e:+.1}"),
            (_, None) => "cannot run".into(),
        };
        let predicted = o.predicted.as_ref().map_or_else(|e| e.replace('|', "/"), |p| format!("{:.4}", p.0));
        let planned = o.predicted.as_ref().map_or(0.0, |p| p.1 / f64::from(1 << 30));
        let memory = r.memory_gib.map_or(String::new(), |m| format!("{m:.1} / {planned:.1}"));
        let _ = writeln!(
            out,
            "| {} | {} | {} | {} | {} | {} {} | {predicted} | {error} | {memory} | {} |",
            r.row, r.family, r.machine, r.model, r.seq, r.measured, r.unit, r.assumed
        );
    }
    let worst: Vec<String> = outcomes
        .iter()
        .filter(|o| o.run.role != Role::Other && o.error.is_some_and(|e| e.abs() > 15.0))
        .map(|o| format!("row {} ({}, {})", o.run.row, o.run.model, o.run.machine))
        .collect();
    let _ = writeln!(out, "\nFailures, off by more than 15 %: {}.\n", if worst.is_empty() { "none".into() } else { worst.join("; ") });
    let _ = writeln!(out, "### Refused claims\n\n| claim | needs, times the highest rate of the part | source |\n|---|---|---|");
    for c in corpus.claim.iter().filter(|c| c.excess() > 1.0) {
        let _ = writeln!(out, "| {} | {:.2} | {} |", c.name, c.excess(), c.source);
    }
    let _ = writeln!(out, "\n### Rows outside the scope\n\n| rows | why |\n|---|---|");
    for o in &corpus.outside {
        let rows: Vec<String> = o.rows.iter().map(u32::to_string).collect();
        let _ = writeln!(out, "| {} | {} |", rows.join(", "), o.why);
    }
    let _ = writeln!(out, "\nSources of each row: `benches/validation/published.toml`.");
}
