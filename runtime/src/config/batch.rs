//! Batch arithmetic: how many sequences a step has and who computes them, once the number of ranks is known.
//!
//! global_batch_size = micro_batch_size x ranks x accumulation. One of the outer two is written, the other follows; what does
//! not come out whole is an error that shows the numbers.

use super::problem::{ConfigErrors, Place, Problem};
use super::{Config, GroupSize};

/// The batch of every step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resolved {
    /// Number of ranks.
    pub ranks: usize,
    /// Sequences of one micro-batch.
    pub micro_batch_size: usize,
    /// Micro-batches of one step on each rank.
    pub accumulation: usize,
    /// Micro-batches of one step over all ranks.
    pub micro_batches: usize,
    /// Sequences of one step over all ranks.
    pub global_batch_size: usize,
    /// Micro-batches of one rank that share a gather: a power of two. `"all"`, or more than a rank has, becomes the first power
    /// of two that holds all of a rank's micro-batches.
    pub group: usize,
}

impl Config {
    /// The batch of a step over `ranks` ranks. Errors show the arithmetic that does not come out.
    pub fn resolve(&self, ranks: usize) -> Result<Resolved, ConfigErrors> {
        let t = &self.training;
        let fail = |what: String| Err(ConfigErrors { file: Default::default(), problems: vec![Problem { place: Place::Nowhere, what }] });
        let Some(micro) = t.micro_batch_size.set() else { return fail(unresolved("training.micro_batch_size")) };
        if ranks == 0 || micro == 0 {
            return fail(format!("a step needs at least one rank and one sequence: ranks {ranks}, micro_batch_size {micro}"));
        }
        let accumulation = match (t.global_batch_size, t.gradient_accumulation_steps) {
            (Some(_), Some(_)) => {
                return fail("training.global_batch_size and training.gradient_accumulation_steps are both given: keep one".into());
            }
            (None, accumulation) => accumulation.unwrap_or(1),
            (Some(global), None) => match accumulation_of(global, micro, ranks) {
                Ok(accumulation) => accumulation,
                Err(what) => return fail(what),
            },
        };
        let Some(global_batch_size) = accumulation.checked_mul(ranks).and_then(|m| m.checked_mul(micro)).filter(|g| *g > 0) else {
            return fail(format!("micro_batch_size {micro} x ranks {ranks} x accumulation {accumulation} is no batch size"));
        };
        let all = accumulation.next_power_of_two();
        let group = match &t.micro_batch_group {
            group if group.is_auto() => return fail(unresolved("training.micro_batch_group")),
            GroupSize::Count(n) => (*n).clamp(1, all),
            GroupSize::Named(_) => all,
        };
        Ok(Resolved { ranks, micro_batch_size: micro, accumulation, micro_batches: accumulation * ranks, global_batch_size, group })
    }
}

/// What to say of a key that the planner has not chosen yet.
pub(crate) fn unresolved(key: &str) -> String {
    format!("{key} = \"auto\" is not chosen yet: zlaunch does it before it starts ranks, a library user by zrt::auto::choose")
}

fn accumulation_of(global: usize, micro: usize, ranks: usize) -> Result<usize, String> {
    let per_pass = micro.checked_mul(ranks).ok_or_else(|| format!("micro_batch_size {micro} x ranks {ranks} is no batch size"))?;
    if global.is_multiple_of(per_pass) && global > 0 {
        return Ok(global / per_pass);
    }
    let arithmetic =
        format!("global_batch_size {global} = micro_batch_size {micro} x ranks {ranks} x accumulation {}", ratio(global, per_pass));
    if global.is_multiple_of(micro) && global / micro < ranks {
        let micro_batches = global / micro;
        return Err(format!(
            "{arithmetic}: a step has {micro_batches} micro-batch{} of {micro}, fewer than {ranks} ranks; \
             use -n {micro_batches} or fewer, or global_batch_size = {per_pass}",
            if micro_batches == 1 { "" } else { "es" }
        ));
    }
    let below = global / per_pass * per_pass;
    let near = if below == 0 { per_pass.to_string() } else { format!("{below} or {}", below + per_pass) };
    Err(format!("{arithmetic}, which is not whole: make training.global_batch_size a multiple of {per_pass}, such as {near}"))
}

/// `a / b` for people: at most three decimals, none that say nothing.
pub(super) fn ratio(a: usize, b: usize) -> String {
    let text = format!("{:.3}", a as f64 / b as f64);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arithmetic_that_does_not_divide_is_shown() {
        let text = accumulation_of(10, 2, 2).unwrap_err();
        assert!(text.starts_with("global_batch_size 10 = micro_batch_size 2 x ranks 2 x accumulation 2.5, which"), "{text}");
        assert!(text.contains("8 or 12"), "{text}");
        let text = accumulation_of(4, 2, 4).unwrap_err();
        assert!(text.contains("a step has 2 micro-batches of 2, fewer than 4 ranks; use -n 2"), "{text}");
        assert_eq!(accumulation_of(16, 2, 4), Ok(2));
    }

    #[test]
    fn ratios_read_well() {
        assert_eq!(ratio(10, 4), "2.5");
        assert_eq!(ratio(10, 3), "3.333");
        assert_eq!(ratio(100, 10), "10");
    }
}
