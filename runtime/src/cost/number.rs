//! A number of the hardware catalogue, and where it comes from: a prediction is worth what its inputs are worth.

use serde::{Deserialize, Serialize};

/// Where a number comes from; decides how far off it may be when it states no range of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum How {
    /// By `zlaunch calibrate`, on the machine itself.
    Measured,
    /// Measured by others; `source` says by whom.
    Published,
    /// The maker's figure.
    Specification,
    /// A specification times an efficiency that is usual for such parts.
    Efficiency,
    /// Nobody measured it: what similar parts have.
    Guess,
}

impl How {
    /// What the true value may be of the stated one, as (low, high) factors.
    pub fn spread(self) -> (f64, f64) {
        match self {
            How::Measured => (0.95, 1.05),
            How::Published => (0.92, 1.08),
            How::Specification => (0.95, 1.0),
            How::Efficiency => (0.85, 1.1),
            How::Guess => (0.7, 1.3),
        }
    }

    /// For tables.
    pub fn name(self) -> &'static str {
        match self {
            How::Measured => "measured here",
            How::Published => "published",
            How::Specification => "specification",
            How::Efficiency => "specification x usual efficiency",
            How::Guess => "a guess",
        }
    }
}

/// A value with its origin. In TOML: `{ value = 5.3e12, how = "specification", source = "data sheet" }`, with `low` and `high` where
/// they are known.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Number {
    /// In the unit that the field's documentation states.
    pub value: f64,
    /// Where it comes from.
    pub how: How,
    /// Who says so, or how it was measured, with a date.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub source: String,
    /// Lowest plausible value; absent: from [`How::spread`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub low: Option<f64>,
    /// Highest plausible value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub high: Option<f64>,
}

impl Number {
    /// A number with a source.
    pub fn new(value: f64, how: How, source: impl Into<String>) -> Number {
        Number { value, how, source: source.into(), low: None, high: None }
    }

    /// Lowest plausible value.
    pub fn low(&self) -> f64 {
        self.low.unwrap_or(self.value * self.how.spread().0)
    }

    /// Highest plausible value.
    pub fn high(&self) -> f64 {
        self.high.unwrap_or(self.value * self.how.spread().1)
    }

    /// The pessimistic, the expected and the optimistic value of a rate: see [`Case`].
    pub fn rate(&self, case: Case) -> f64 {
        match case {
            Case::Slow => self.low(),
            Case::Expected => self.value,
            Case::Fast => self.high(),
        }
    }

    /// The same of something that costs, such as a latency: slow is high.
    pub fn cost(&self, case: Case) -> f64 {
        match case {
            Case::Slow => self.high(),
            Case::Expected => self.value,
            Case::Fast => self.low(),
        }
    }

    /// What is wrong with it, if something is.
    pub(crate) fn problem(&self, positive: bool) -> Option<String> {
        let Number { value, .. } = *self;
        if !value.is_finite() || value < 0.0 || positive && value == 0.0 {
            return Some(format!("{value} is not a {} number", if positive { "positive" } else { "non-negative" }));
        }
        (self.low() > value || self.high() < value).then(|| format!("{value} is outside its range {} .. {}", self.low(), self.high()))
    }
}

/// Which end of the catalogue's ranges a prediction takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Case {
    /// Every rate at its lowest: the high end of the time.
    Slow,
    /// Every rate as stated.
    Expected,
    /// Every rate at its highest: the low end of the time.
    Fast,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_follow_the_origin_unless_stated() {
        let n = Number::new(100.0, How::Guess, "");
        assert_eq!((n.low(), n.high()), (70.0, 130.0));
        let n = Number { low: Some(99.0), ..n };
        assert_eq!((n.rate(Case::Slow), n.cost(Case::Slow), n.rate(Case::Fast)), (99.0, 130.0, 130.0));
        assert_eq!(n.problem(true), None);
        assert!(Number { low: Some(101.0), ..n.clone() }.problem(true).unwrap().contains("outside its range"));
        assert!(Number { value: f64::NAN, ..n }.problem(false).is_some());
    }
}
