//! What the planner decides for a command: machine, configuration without `"auto"`, and what to say about it.

use crate::fault::Fault;
use std::path::Path;
use zrt::auto::{self, Choice};
use zrt::config::Config;
use zrt::cost::{Catalogue, Cluster, Prediction, Predictor};

/// The machine that a command plans for: `spec` (on so many `hosts`), or this host with one rank for each of `ranks`.
pub fn cluster(config: &Config, catalogue: &Catalogue, spec: Option<&str>, hosts: Option<usize>, ranks: usize) -> Result<Cluster, Fault> {
    let cluster = match spec {
        Some(spec) => catalogue.cluster(spec)?,
        None => zrt::device::cluster(config, catalogue, ranks)?,
    };
    Ok(match hosts {
        Some(hosts) => cluster.with_hosts(hosts)?,
        None => cluster,
    })
}

/// The catalogue with the user's folder.
pub fn catalogue(folder: Option<&Path>) -> Result<Catalogue, Fault> {
    Ok(Catalogue::load(folder)?)
}

/// For a start on this host: `config` with every `"auto"` chosen, and lines that say what and why. An explicit choice is returned as it
/// is; where this host was calibrated, with a line if another plan is much faster.
pub fn for_start(config: Config, ranks: usize) -> Result<(Config, Option<String>), Fault> {
    let open = auto::open_keys(&config);
    let catalogue = match catalogue(None) {
        // A broken hardware file is no reason not to do what was asked for explicitly.
        Err(_) if open.is_empty() => return Ok((config, None)),
        found => found?,
    };
    if open.is_empty() && !catalogue.knows_this_host() && !zrt::device::uses_gpu(&config) {
        return Ok((config, None));
    }
    let cluster = match cluster(&config, &catalogue, None, None, ranks) {
        // A GPU that the catalogue does not know trains as it was told.
        Err(_) if open.is_empty() => return Ok((config, None)),
        found => found?,
    };
    let predictor = Predictor::default();
    if open.is_empty() {
        // Only a remark: whatever is wrong with the configuration is told by who starts it.
        let faster = predictor.predict(&config, &cluster).ok().and_then(|now| {
            let choice = auto::much_faster(&predictor, &catalogue, &config, &cluster, &now)?;
            Some(much_faster(&choice.best, &now))
        });
        return Ok((config, faster));
    }
    let choice = auto::choose(&predictor, &catalogue, &config, &cluster)?;
    let text = reason(&choice, &open);
    Ok((choice.config, Some(text)))
}

/// The line about a plan that is much faster than what was asked for.
pub fn much_faster(best: &Prediction, now: &Prediction) -> String {
    format!(
        "a much faster plan: {}: {:.3} s a step expected, {:.1} times as fast (\"auto\" chooses it)",
        best.shape.line(),
        best.secs.expected,
        now.secs.expected / best.secs.expected
    )
}

/// The plan and those it was preferred to.
pub fn reason(choice: &Choice, open: &[&str]) -> String {
    let best = &choice.best;
    let mut out = format!(
        "chosen ({} \"auto\"): {}: {:.3} s a step expected, the fastest of {} plans that fit ({} do not)",
        open.join(", "),
        best.shape.line(),
        best.secs.expected,
        choice.timed,
        choice.too_large
    );
    for other in choice.runners_up.iter().take(4) {
        out += &format!(
            "\n  instead of {}: {:.3} s ({:+.0} %)",
            other.shape.line(),
            other.secs.expected,
            100.0 * (other.secs.expected / best.secs.expected - 1.0)
        );
    }
    out
}
