//! The rows of a study, and what charts draw of them.

use crate::chart::{Chart, Line};

/// How the global batch follows the number of devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scaling {
    /// The smallest size: where both begin.
    Base,
    /// The batch of the smallest size at every size.
    Strong,
    /// The batch grows with the devices.
    Weak,
}

impl Scaling {
    /// In tables.
    pub fn name(self) -> &'static str {
        match self {
            Scaling::Base => "base",
            Scaling::Strong => "strong",
            Scaling::Weak => "weak",
        }
    }
}

/// What one configuration is predicted to do, or did.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Found {
    /// Seconds a step: low, expected, high. Of a real run: fastest, median, slowest step.
    pub secs: [f64; 3],
    /// Tokens of a step over all devices, padding included.
    pub tokens: f64,
    /// Useful FLOPs over the peak of all devices, 0 to 1.
    pub share_of_peak: f64,
    /// Peak bytes of a device.
    pub device_bytes: f64,
    /// Usable bytes of a device.
    pub device_capacity: f64,
    /// Peak bytes of a host.
    pub host_bytes: f64,
    /// Seconds of a step in which compute waits for something else.
    pub exposed_secs: f64,
    /// US dollars for a million tokens; `None` without a price.
    pub usd_per_mtoken: Option<f64>,
    /// Hours of the whole run, where its length is known.
    pub hours: Option<f64>,
    /// What bounds the step.
    pub bound: String,
    /// Stage, homes, micro-batch, grouping and checkpointing that were chosen.
    pub plan: String,
}

impl Found {
    /// Tokens a second over all devices.
    pub fn tokens_per_s(&self) -> f64 {
        self.tokens / self.secs[1]
    }
}

/// One configuration at one size.
#[derive(Clone, Debug)]
pub struct Row {
    /// Hosts.
    pub nodes: usize,
    /// Ranks over all hosts.
    pub devices: usize,
    /// See [`Scaling`].
    pub scaling: Scaling,
    /// Sequences of a step.
    pub global_batch: usize,
    /// What the sweeps chose.
    pub choice: Vec<(String, String)>,
    /// Why it cannot run, for people, otherwise.
    pub predicted: Result<Found, String>,
    /// The real run, where there was one.
    pub measured: Option<Result<Found, String>>,
}

impl Row {
    fn found(&self) -> Option<&Found> {
        self.predicted.as_ref().ok()
    }

    /// `zero.stage=3, training.micro_batch_size=2`
    pub fn choice_name(&self) -> String {
        if self.choice.is_empty() {
            return "as configured".into();
        }
        // Without sections, which are the same for people.
        let short = |(k, v): &(String, String)| format!("{}={v}", k.rsplit('.').next().unwrap_or(k));
        self.choice.iter().map(short).collect::<Vec<_>>().join(", ")
    }
}

/// A whole study.
pub struct Study {
    /// File that was studied.
    pub file: String,
    /// Machine, for people.
    pub machine: String,
    /// When the price was read.
    pub price: String,
    /// In the order of choices, sizes, scalings.
    pub rows: Vec<Row>,
}

/// Lines of a chart at most; the rest is in the table.
const LINES: usize = 6;

impl Study {
    /// Choices that run, the fastest at its largest size first.
    fn best_choices(&self) -> Vec<String> {
        let mut best: Vec<(String, usize, f64)> = Vec::new();
        for row in &self.rows {
            let Some(found) = row.found() else { continue };
            let (name, devices, rate) = (row.choice_name(), row.devices, found.tokens_per_s());
            match best.iter_mut().find(|b| b.0 == name) {
                Some(b) if (devices, rate) > (b.1, b.2) => (b.1, b.2) = (devices, rate),
                Some(_) => {}
                None => best.push((name, devices, rate)),
            }
        }
        best.sort_by(|a, b| b.1.cmp(&a.1).then(b.2.total_cmp(&a.2)));
        best.into_iter().map(|b| b.0).collect()
    }

    /// The fastest row of the largest size, with the batch that grew.
    pub fn fastest(&self) -> Option<(&Row, &Found)> {
        let most = self.rows.iter().filter(|r| r.predicted.is_ok()).map(|r| r.devices).max()?;
        let rows = self.rows.iter().filter(|r| r.devices == most && r.scaling != Scaling::Strong);
        rows.filter_map(|r| Some((r, r.found()?))).max_by(|a, b| a.1.tokens_per_s().total_cmp(&b.1.tokens_per_s()))
    }

    /// A line for each of the best choices: `y` of its rows of `scaling` (and the base).
    fn lines(&self, scaling: Scaling, y: impl Fn(&Row, &Found) -> Option<f64>) -> Vec<Line> {
        let rows_of = |name: &str| {
            let name = name.to_string();
            self.rows.iter().filter(move |r| (r.scaling == scaling || r.scaling == Scaling::Base) && r.choice_name() == name)
        };
        let line = |name: String| {
            let points = rows_of(&name).map(|r| (r.devices as f64, r.found().and_then(|f| y(r, f)).unwrap_or(f64::NAN))).collect();
            Line { name, points, ..Line::default() }
        };
        let mut lines: Vec<Line> = self.best_choices().into_iter().take(LINES).map(line).collect();
        lines.retain(|l| l.points.iter().any(|p| p.1.is_finite()));
        lines
    }

    /// Choices that charts leave out.
    pub fn left_out(&self) -> usize {
        self.best_choices().len().saturating_sub(LINES)
    }

    /// Rate per device over that of the choice's smallest size that runs.
    fn efficiency(&self, scaling: Scaling) -> Vec<Line> {
        let mut lines = self.lines(scaling, |r, f| Some(f.tokens_per_s() / r.devices as f64));
        for line in &mut lines {
            if let Some(first) = line.points.iter().map(|p| p.1).find(|y| y.is_finite()) {
                line.points.iter_mut().for_each(|p| p.1 *= 100.0 / first);
            }
        }
        lines
    }

    /// Throughput, efficiency, memory, cost; strong and weak scaling.
    pub fn charts(&self) -> Vec<Chart> {
        let chart = |title: &str, y: &str, lines| Chart { title: title.into(), x: "devices".into(), y: y.into(), lines };
        let mut rate = self.lines(Scaling::Weak, |_, f| Some(f.tokens_per_s()));
        if let Some(first) = rate.first_mut() {
            let range = |r: &Row| r.found().map(|f| (r.devices as f64, f.tokens / f.secs[2], f.tokens / f.secs[0]));
            let name = first.name.clone();
            first.band = self.rows.iter().filter(|r| r.scaling != Scaling::Strong && r.choice_name() == name).filter_map(range).collect();
        }
        let begins = rate.iter().filter_map(|l| l.points.iter().find(|p| p.1.is_finite()).copied());
        let ideal = begins.min_by(|a, b| a.0.total_cmp(&b.0).then(b.1.total_cmp(&a.1)));
        let sizes: Vec<f64> = rate.iter().flat_map(|l| l.points.iter().map(|p| p.0)).collect();
        if let (Some((x, y)), Some(last)) = (ideal, sizes.iter().copied().max_by(f64::total_cmp).filter(|_| sizes.len() > 1)) {
            // A point at every size: on a logarithmic axis this is no straight line.
            let mut points: Vec<(f64, f64)> = sizes.iter().filter(|s| (x..=last).contains(*s)).map(|s| (*s, y * s / x)).collect();
            points.sort_by(|a, b| a.0.total_cmp(&b.0));
            points.dedup();
            rate.push(Line { name: "proportional".into(), points, dashed: true, ..Line::default() });
        }
        let mut memory = self.lines(Scaling::Weak, |_, f| Some(f.device_bytes / 1e9));
        if let Some(capacity) = self.rows.iter().find_map(|r| r.found().map(|f| f.device_capacity / 1e9)).filter(|c| *c > 0.0) {
            let points = memory.iter().flat_map(|l| l.points.iter().map(|p| p.0));
            let (first, last) = points.fold((f64::INFINITY, 0.0), |(a, b): (f64, f64), x| (a.min(x), b.max(x)));
            memory.push(Line { name: "usable".into(), points: vec![(first, capacity), (last, capacity)], dashed: true, ..Line::default() });
        }
        let mut charts = vec![
            chart("Throughput (weak scaling)", "tokens/s; band: low to high of the fastest", rate),
            chart(
                "Share of peak (weak scaling)",
                "% of peak, useful FLOPs",
                self.lines(Scaling::Weak, |_, f| Some(100.0 * f.share_of_peak)),
            ),
            chart(
                "Strong scaling: the same batch on more devices",
                "tokens/s per device, % of the smallest",
                self.efficiency(Scaling::Strong),
            ),
            chart(
                "Weak scaling: the batch grows with the devices",
                "tokens/s per device, % of the smallest",
                self.efficiency(Scaling::Weak),
            ),
            chart("Memory of a device", "GB", memory),
        ];
        if self.rows.iter().any(|r| r.found().is_some_and(|f| f.usd_per_mtoken.is_some())) {
            charts.push(chart("Cost (weak scaling)", "US$ for a million tokens", self.lines(Scaling::Weak, |_, f| f.usd_per_mtoken)));
        }
        charts
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// Two choices at two sizes, of which the second does not fit at the first.
    pub fn study() -> Study {
        let row = |devices: usize, scaling, stage: &str, predicted| Row {
            nodes: devices / 8,
            devices,
            scaling,
            global_batch: 64,
            choice: vec![("zero.stage".into(), stage.into())],
            predicted,
            measured: None,
        };
        let found = |secs: f64, tokens: f64| {
            let rest = Found { device_bytes: 40e9, device_capacity: 85e9, usd_per_mtoken: Some(0.5), ..Found::default() };
            Ok(Found {
                secs: [0.9 * secs, secs, 1.2 * secs],
                tokens,
                share_of_peak: 0.4,
                bound: "compute".into(),
                plan: "zero 3".into(),
                ..rest
            })
        };
        let rows = vec![
            row(8, Scaling::Base, "3", found(1.0, 1e5)),
            row(16, Scaling::Strong, "3", found(0.6, 1e5)),
            row(16, Scaling::Weak, "3", found(1.1, 2e5)),
            row(8, Scaling::Base, "0", Err("1,000 bytes over, \"too\" much".into())),
            row(16, Scaling::Strong, "0", found(0.5, 1e5)),
            row(16, Scaling::Weak, "0", found(1.0, 2e5)),
        ];
        Study { file: "train.toml".into(), machine: "H100".into(), price: "2026-06".into(), rows }
    }

    #[test]
    fn lines_follow_the_best_and_leave_gaps_where_nothing_fits() {
        let study = study();
        assert_eq!(study.best_choices(), ["stage=0", "stage=3"]);
        let charts = study.charts();
        assert_eq!(charts.len(), 6);
        let strong = &charts[2].lines;
        assert_eq!(strong[1].points[0], (8.0, 100.0));
        // 1e5 / 0.6 / 16 over 1e5 / 8.
        assert!((strong[1].points[1].1 - 100.0 / 1.2).abs() < 1e-9);
        assert!(strong[0].points[0].1.is_nan(), "the size that does not fit is a gap");
        assert_eq!(charts[0].lines.last().unwrap().name, "proportional");
        assert_eq!(charts[4].lines.last().unwrap().points[0].1, 85.0);
    }
}
