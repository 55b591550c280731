//! Real runs of a study's points on this machine, through the launcher as a person would start them.

use super::study::{Found, Row};
use super::{Point, run_folder};
use crate::fault::Fault;
use std::path::Path;
use std::process::{Command, Stdio};
use zrt::progress::StepReport;

/// Runs `steps` of every point that is predicted to fit, one after the other, and notes what it took in `rows`; `out` is absolute.
pub fn measure(out: &Path, steps: u64, points: &[Point], rows: &mut [Row]) -> Result<(), Fault> {
    let program = std::env::current_exe().map_err(|e| Fault::other(format!("the command's own path: {e}")))?;
    for (i, (point, row)) in points.iter().zip(rows).enumerate() {
        let (Ok(config), Ok(_)) = (&point.config, &row.predicted) else { continue };
        eprintln!("running {} on {} rank{}", row.choice_name(), row.devices, if row.devices == 1 { "" } else { "s" });
        let folder = run_folder(out, i);
        // The resolved configuration is the point's own, whatever the sweeps did to the file.
        let mut config = config.clone();
        config.checkpoint.folder = folder.clone();
        config.checkpoint.interval = 0;
        config.training.steps = Some(steps.max(2));
        config.training.epochs = None;
        config.eval_dataset.clear();
        let file = out.join(format!("run-{i:04}.toml"));
        let text = config.to_toml()?;
        std::fs::write(&file, text).map_err(|e| Fault::other(format!("{}: {e}", file.display())))?;
        // What an earlier study left would be continued.
        let _ = std::fs::remove_dir_all(&folder);
        let mut command = Command::new(&program);
        command.args(["-n", &row.devices.to_string()]).arg(&file).stdin(Stdio::null());
        let done = command.output().map_err(|e| Fault::other(format!("{}: {e}", program.display())))?;
        let text = std::fs::read_to_string(folder.join("metrics.jsonl")).unwrap_or_default();
        let steps: Vec<StepReport> = text.lines().filter_map(|l| serde_json::from_str(l).ok()).collect();
        row.measured = Some(if done.status.success() && steps.len() > 1 {
            Ok(found(&steps, row))
        } else {
            let said = String::from_utf8_lossy(&done.stderr);
            Err(said.lines().rev().find(|l| !l.trim().is_empty()).unwrap_or("no step was made").to_string())
        });
        let _ = std::fs::remove_dir_all(&folder);
        let _ = std::fs::remove_file(&file);
    }
    let _ = std::fs::remove_dir(out.join("runs"));
    Ok(())
}

/// Of the steps after the first, which starts cold.
fn found(steps: &[StepReport], row: &Row) -> Found {
    let mut secs: Vec<f64> = steps.iter().skip(1).map(|s| s.secs).collect();
    secs.sort_by(f64::total_cmp);
    let last = steps.last();
    Found {
        secs: [secs[0], secs[secs.len() / 2], secs[secs.len() - 1]],
        tokens: row.predicted.as_ref().map_or(0.0, |p| p.tokens),
        share_of_peak: last.map_or(0.0, |s| s.share_of_peak),
        device_bytes: last.map_or(0.0, |s| s.memory_bytes as f64),
        ..Found::default()
    }
}
