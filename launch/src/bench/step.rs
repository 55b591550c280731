//! Whole steps of a configuration: how fast, how near to what the processor could multiply, where the time goes, and how it grows
//! with tokens, layers and ranks.

use super::Axis;
use super::table::{Cell, Table};
use crate::fault::Fault;
use std::collections::BTreeMap;
use std::path::Path;
use zrt::config::Config;
use zrt::rate::{StepRates, steps as measure};
use zrt_kernels::DType;
use zrt_kernels::rate::Bench;

fn config(file: &Path, steps: u64, set: &[String]) -> Result<Config, Fault> {
    let mut all = vec!["training.epochs=".to_string(), format!("training.steps={steps}")];
    all.extend(set.iter().cloned());
    Ok(Config::load(file, &all)?)
}

/// Floating-point operations per second that the threads of all ranks could multiply and add.
fn ceiling(config: &Config, ranks: usize) -> Result<f64, Fault> {
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let threads = (zrt::run::threads(config, ranks) * ranks).min(cores);
    let bf16 = config.precision.compute == zrt::config::ComputeType::Bf16;
    Ok(Bench::new(threads)?.peak_flops(if bf16 { DType::BF16 } else { DType::F32 }))
}

pub fn once(file: &Path, ranks: usize, steps: u64, set: &[String]) -> Result<Vec<Table>, Fault> {
    let config = config(file, steps, set)?;
    let limit = ceiling(&config, ranks)?;
    let r = measure(&config, ranks)?;
    let secs = r.median_secs();
    let title = format!("{} on {ranks} ranks, zero.stage {}", file.display(), config.zero.stage);
    let mut rate = Table::new(title, &["steps", "secs a step", "tokens/s", "with padding", "GFLOP/s", "limit GFLOP/s", "of limit %"]);
    let tokens = r.steps.last().map_or(0, |s| s.tokens) as f64;
    rate.row(vec![
        r.steps.len().into(),
        Cell::Number(secs, 3),
        Cell::Number(tokens / secs, 0),
        Cell::Number(r.slots as f64 / secs, 0),
        Cell::Number(r.flops / secs / 1e9, 1),
        Cell::Number(limit / 1e9, 1),
        Cell::Number(100.0 * r.flops / secs / limit, 1),
    ]);
    rate.notes.push("limit: multiply-adds in registers on all threads; the median step after the first".into());
    Ok(vec![rate, by_operation(&r, secs)])
}

fn by_operation(r: &StepRates, secs: f64) -> Table {
    let mut table = Table::new("time by operation on rank 0, a step".into(), &["operation", "stream", "calls", "ms", "of step %"]);
    for op in r.ops.iter().filter(|op| op.secs > 1e-3 * secs) {
        let row = vec![
            op.op.as_str().into(),
            op.stream.as_str().into(),
            Cell::Number(op.calls, 0),
            Cell::Number(op.secs * 1e3, 2),
            Cell::Number(100.0 * op.secs / secs, 1),
        ];
        table.row(row);
    }
    table.notes.push("streams run side by side; a collective's time holds its wait for other ranks; below 0.1 % is left out".into());
    table
}

/// Slope of the least-squares line through (ln x, ln y): the exponent of growth. `None` without two sizes.
fn exponent(points: &[(f64, f64)]) -> Option<f64> {
    let logs: Vec<(f64, f64)> = points.iter().filter(|(x, y)| *x > 0.0 && *y > 0.0).map(|(x, y)| (x.ln(), y.ln())).collect();
    let n = logs.len() as f64;
    let (mx, my) = (logs.iter().map(|p| p.0).sum::<f64>() / n, logs.iter().map(|p| p.1).sum::<f64>() / n);
    let var: f64 = logs.iter().map(|p| (p.0 - mx).powi(2)).sum();
    (var > 0.0).then(|| logs.iter().map(|p| (p.0 - mx) * (p.1 - my)).sum::<f64>() / var)
}

pub fn sweep(file: &Path, ranks: usize, steps: u64, set: &[String], axis: Axis, values: &[usize]) -> Result<Vec<Table>, Fault> {
    let base = config(file, steps, set)?;
    let layers = zrt::job::ModelPart::open(&base)?.arch.layers;
    let (name, usual) = match axis {
        Axis::Tokens => ("micro_batch_size", vec![1, 2, 4]),
        Axis::Layers => ("layers", vec![layers.div_ceil(4), layers.div_ceil(2), layers]),
        Axis::Ranks => ("ranks", vec![1, 2, 4]),
    };
    let values = if values.is_empty() { usual } else { values.to_vec() };
    let title = format!("{}, {} of {name}", file.display(), values.iter().map(usize::to_string).collect::<Vec<_>>().join(", "));
    let mut table = Table::new(title, &[name, "slots a step", "secs a step", "slots/s", "ms a slot"]);
    let mut whole: Vec<(f64, f64)> = Vec::new();
    let mut ops: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
    for &value in &values {
        let mut c = base.clone();
        // What is swept is all that changes: the global batch follows from the micro-batch and the ranks.
        c.training.global_batch_size = None;
        let mut n = ranks;
        let folder;
        match axis {
            Axis::Tokens => c.training.micro_batch_size = zrt::config::Auto::Set(value),
            Axis::Ranks => n = value,
            Axis::Layers => {
                folder = shortened(&c, value)?;
                c.model.path = folder.path().display().to_string();
                c.model.init = zrt::config::ModelInit::Random;
            }
        }
        let r = measure(&c, n)?;
        let secs = r.median_secs();
        let slots = r.slots as f64;
        table.row(vec![
            value.into(),
            r.slots.into(),
            Cell::Number(secs, 3),
            Cell::Number(slots / secs, 0),
            Cell::Number(1e3 * secs / slots, 3),
        ]);
        whole.push((value as f64, secs));
        for op in &r.ops {
            ops.entry(format!("{} ({})", op.op, op.stream)).or_default().push((value as f64, op.secs));
        }
    }
    let mut grow = Table::new(format!("how time grows: secs ~ {name}^exponent"), &["term", "exponent", "of the largest step %"]);
    let last = whole.last().map_or(0.0, |p| p.1);
    if let Some(e) = exponent(&whole) {
        grow.row(vec!["step".into(), Cell::Number(e, 2), Cell::Number(100.0, 1)]);
    }
    let mut terms: Vec<_> = ops.iter().filter_map(|(op, at)| Some((op, exponent(at)?, 100.0 * at.last()?.1 / last))).collect();
    terms.sort_by(|a, b| b.2.total_cmp(&a.2));
    for (op, exponent, share) in terms.into_iter().filter(|t| t.2 >= 0.5) {
        grow.row(vec![op.as_str().into(), Cell::Number(exponent, 2), Cell::Number(share, 1)]);
    }
    grow.notes.push(match axis {
        Axis::Tokens => "documents keep their length: attention is quadratic in it by nature".into(),
        Axis::Layers => "random weights; embedding, head and data do not grow, so the step's exponent is below 1".into(),
        Axis::Ranks => "each rank has its own micro-batch, all share the cores of this host: 1 is the cost of the arithmetic".into(),
    });
    Ok(vec![table, grow])
}

/// The model's folder without its weights and with another number of blocks.
fn shortened(config: &Config, layers: usize) -> Result<tempfile::TempDir, Fault> {
    let from = zrt::hf::folder::resolve(&config.model.path, None).map_err(Fault::user)?;
    let to = tempfile::tempdir().map_err(Fault::other)?;
    let io = |what: &Path, e: &dyn std::fmt::Display| Fault::other(format!("{}: {e}", what.display()));
    for entry in std::fs::read_dir(&from).map_err(|e| io(&from, &e))? {
        let path = entry.map_err(|e| io(&from, &e))?.path();
        let (Some(name), true) = (path.file_name(), path.is_file()) else { continue };
        if path.extension().is_some_and(|e| e == "json" || e == "jinja" || e == "model" || e == "txt") {
            std::fs::copy(&path, to.path().join(name)).map_err(|e| io(&path, &e))?;
        }
    }
    let path = to.path().join("config.json");
    let text = std::fs::read_to_string(&path).map_err(|e| io(&path, &e))?;
    let mut json: serde_json::Value = serde_json::from_str(&text).map_err(|e| io(&path, &e))?;
    json["num_hidden_layers"] = layers.into();
    // A list with an entry per block would no longer fit.
    if let Some(map) = json.as_object_mut() {
        map.remove("layer_types");
    }
    std::fs::write(&path, json.to_string()).map_err(|e| io(&path, &e))?;
    Ok(to)
}

#[cfg(test)]
mod tests {
    #[test]
    fn exponents_of_powers() {
        let points = |e: f64| [1.0, 2.0, 5.0].map(|x: f64| (x, 3.0 * x.powf(e)));
        for e in [0.0, 1.0, 2.0] {
            // Sums of a few f64 logarithms.
            assert!((super::exponent(&points(e)).unwrap() - e).abs() < 1e-12);
        }
        assert_eq!(super::exponent(&[(1.0, 2.0)]), None);
        assert_eq!(super::exponent(&[]), None);
    }
}
