//! The learning rate of each step, a function of the step alone: never of ranks or accumulation.
//!
//! Steps count from 0. Warm-up is transformers': step s has `lr * s / warmup`, so the first step has 0.

use crate::config::{LrSchedule, LrSchedulerConfig};

/// Learning rate at `step` of `total`, with peak `lr`.
pub fn lr_at(config: &LrSchedulerConfig, lr: f64, step: u64, total: u64) -> f64 {
    let warmup = warmup_steps(config, total);
    if step < warmup {
        return lr * step as f64 / warmup as f64;
    }
    let floor = config.min_lr_ratio;
    let rest = total.saturating_sub(warmup).max(1);
    let done = ((step - warmup) as f64 / rest as f64).min(1.0);
    let share = match config.kind {
        LrSchedule::Constant => 1.0,
        LrSchedule::Linear => floor + (1.0 - floor) * (1.0 - done),
        LrSchedule::Cosine => floor + (1.0 - floor) * 0.5 * (1.0 + (std::f64::consts::PI * done).cos()),
        LrSchedule::Wsd => {
            let decay = ((config.decay_ratio * total as f64).round() as u64).clamp(1, rest);
            let start = total.saturating_sub(decay);
            let fallen = step.saturating_sub(start) as f64 / decay as f64;
            floor + (1.0 - floor) * (1.0 - fallen.min(1.0))
        }
    };
    lr * share
}

/// Warm-up in steps.
pub fn warmup_steps(config: &LrSchedulerConfig, total: u64) -> u64 {
    match (config.warmup_steps, config.warmup_ratio) {
        (Some(steps), _) => steps,
        (None, Some(ratio)) => (ratio * total as f64).ceil() as u64,
        (None, None) => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(kind: LrSchedule, step: u64) -> f64 {
        let config = LrSchedulerConfig { kind, warmup_steps: Some(10), min_lr_ratio: 0.1, decay_ratio: 0.2, ..Default::default() };
        lr_at(&config, 1.0, step, 110)
    }

    #[test]
    fn shapes() {
        for kind in [LrSchedule::Constant, LrSchedule::Linear, LrSchedule::Cosine, LrSchedule::Wsd] {
            assert_eq!(at(kind, 0), 0.0);
            assert_eq!(at(kind, 5), 0.5);
            assert_eq!(at(kind, 10), 1.0);
        }
        assert_eq!(at(LrSchedule::Constant, 109), 1.0);
        assert!((at(LrSchedule::Linear, 60) - 0.55).abs() < 1e-12);
        assert!((at(LrSchedule::Cosine, 60) - 0.55).abs() < 1e-12);
        assert!((at(LrSchedule::Cosine, 110) - 0.1).abs() < 1e-12);
        assert_eq!(at(LrSchedule::Wsd, 88), 1.0);
        assert!((at(LrSchedule::Wsd, 99) - 0.55).abs() < 1e-12);
    }
}
