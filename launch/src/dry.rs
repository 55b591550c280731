//! A plan as a table: who holds what, before anything is started.

use std::fmt::Write;
use zrt::config::{Config, Resolved};
use zrt::plan::Segment;
use zrt::run::DryRun;

/// The plan in one line, for every start.
pub fn line(plan: &DryRun, config: &Config) -> String {
    let (all, trained) = plan.parameters;
    let mb = |bytes: usize| bytes as f64 / 1e6;
    format!(
        "{:.1} M parameters, {:.1} M trained; zero.stage {} on {} rank{}; {:.0} MB per rank, {:.0} MB per host (--dry-run shows all)",
        all as f64 / 1e6,
        trained as f64 / 1e6,
        config.zero.stage,
        plan.ranks,
        if plan.ranks == 1 { "" } else { "s" },
        mb(plan.rank_bytes),
        mb(plan.host_bytes)
    )
}

/// Units alike in a row are one line.
pub fn table(plan: &DryRun, batch: &Resolved, config: &Config) -> String {
    let mut out = String::new();
    let (all, trained) = plan.parameters;
    let share = 100.0 * trained as f64 / all.max(1) as f64;
    let _ = writeln!(
        out,
        "{} parameters, {} trained ({share:.2} %), zero.stage {}, {} ranks",
        grouped(all),
        grouped(trained),
        config.zero.stage,
        plan.ranks
    );
    let _ = writeln!(
        out,
        "step: {} sequences of {} tokens = micro_batch_size {} x ranks {} x accumulation {}; {}",
        batch.global_batch_size,
        config.training.seq_len,
        batch.micro_batch_size,
        batch.ranks,
        batch.accumulation,
        match batch.group {
            1 => "each micro-batch gathers for itself".into(),
            n => format!("{n} micro-batches share a gather"),
        }
    );

    let _ = writeln!(out, "\n{:<28} {:>6} {:>8} {:>14} {:>14} {:>14}", "unit", "type", "trained", "elements", "padded", "per rank");
    let mut i = 0;
    while i < plan.units.len() {
        let (name, segments) = &plan.units[i];
        let shape = |s: &[Segment]| s.iter().map(|s| (s.dtype, s.trainable, s.elems, s.padded)).collect::<Vec<_>>();
        let alike = plan.units[i..].iter().take_while(|(_, s)| shape(s) == shape(segments)).count();
        let name = if alike > 1 { format!("{name} .. {} ({alike}x)", plan.units[i + alike - 1].0) } else { name.clone() };
        for (n, s) in segments.iter().enumerate() {
            let name = if n == 0 { name.as_str() } else { "" };
            let trained = if s.trainable { "yes" } else { "no" };
            let _ = writeln!(
                out,
                "{name:<28} {:>6} {trained:>8} {:>14} {:>14} {:>14}",
                s.dtype.name(),
                grouped(s.elems),
                grouped(s.padded),
                grouped(s.shard)
            );
        }
        i += alike;
    }

    let _ = writeln!(out, "\n{:<28} {:>10} {:>14}", "memory of a rank", "place", "peak bytes");
    for (place, category, used) in plan.memory.iter().filter(|(_, _, used)| used.peak_bytes > 0) {
        let _ = writeln!(out, "{:<28} {:>10} {:>14}", category.name(), format!("{place:?}").to_lowercase(), grouped(used.peak_bytes));
    }
    let _ = writeln!(out, "{:<28} {:>10} {:>14}", "pages shared by ranks", "", grouped(plan.shared_bytes));
    let _ = writeln!(out, "{:<28} {:>10} {:>14}", "per rank", "", grouped(plan.rank_bytes));
    let _ = writeln!(out, "{:<28} {:>10} {:>14}", "per host", "", grouped(plan.host_bytes));

    let c = &plan.collectives;
    let _ = writeln!(
        out,
        "\nper step and rank: {:.1} GFLOP; all_gather {}, reduce_scatter {}, all_reduce {}, all_to_all {}, broadcast {}; {:.1} MB moved",
        plan.ops.flops() as f64 / 1e9,
        c.all_gather,
        c.reduce_scatter,
        c.all_reduce,
        c.all_to_all,
        c.broadcast,
        c.bytes as f64 / 1e6
    );
    out
}

/// `1,234,567`: exact, and read at a glance.
fn grouped(n: usize) -> String {
    let digits = n.to_string();
    let head = digits.len() % 3;
    let groups = [&digits[..head]].into_iter().filter(|g| !g.is_empty()).map(str::as_bytes).chain(digits.as_bytes()[head..].chunks(3));
    groups.map(String::from_utf8_lossy).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    #[test]
    fn digits_are_grouped_by_three() {
        assert_eq!([0, 12, 123, 1234, 123_456, 12_345_678].map(super::grouped), ["0", "12", "123", "1,234", "123,456", "12,345,678"]);
    }
}
