//! Are predictions true? Published training speeds, and real runs on this machine, beside what is predicted of them.
//!
//! `docs/validation.md` is made by the binary `validation` from `benches/validation`: `published.toml` (transcribed rows),
//! `efficiency.toml` (one number a part, fitted to the calibration rows and frozen), `machine.toml` (from `zlaunch calibrate`) and
//! `runs.csv` (real runs on that machine). Predictions are computed anew each time.

pub mod local;
pub mod page;
pub mod published;

use std::path::PathBuf;

/// A file of `benches/validation`.
pub fn data(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("validation").join(name)
}

/// Mean and largest of absolute values; zero without any.
pub fn mean_and_worst(errors: &[f64]) -> (f64, f64) {
    let sizes = errors.iter().map(|e| e.abs());
    (sizes.clone().sum::<f64>() / errors.len().max(1) as f64, sizes.fold(0.0, f64::max))
}

/// Median of absolute values; zero without any.
pub fn median(errors: &[f64]) -> f64 {
    let mut sizes: Vec<f64> = errors.iter().map(|e| e.abs()).collect();
    sizes.sort_by(f64::total_cmp);
    match sizes.len() {
        0 => 0.0,
        n if n % 2 == 1 => sizes[n / 2],
        n => (sizes[n / 2 - 1] + sizes[n / 2]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summaries() {
        assert_eq!(mean_and_worst(&[-3.0, 1.0]), (2.0, 3.0));
        assert_eq!((median(&[]), median(&[-5.0, 1.0, 2.0]), median(&[4.0, -2.0])), (0.0, 2.0, 3.0));
    }
}
