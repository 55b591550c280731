//! A plan as a table: who holds what, before anything is started.

use std::fmt::Write;
use zrt::config::{Config, Resolved};
use zrt::plan::Segment;
use zrt::run::DryRun;

/// Units alike in a row are one line.
pub fn table(plan: &DryRun, batch: &Resolved, config: &Config) -> String {
    let mut out = String::new();
    let (all, trained) = plan.parameters;
    let share = 100.0 * trained as f64 / all.max(1) as f64;
    let _ = writeln!(out, "{all} parameters, {trained} trained ({share:.2} %), zero.stage {}, {} ranks", config.zero.stage, plan.ranks);
    let _ = writeln!(
        out,
        "step: {} sequences of {} tokens = micro_batch_size {} x ranks {} x accumulation {}, {} micro-batches share a gather",
        batch.global_batch_size, config.training.seq_len, batch.micro_batch_size, batch.ranks, batch.accumulation, batch.group
    );

    let _ = writeln!(out, "\n{:<24} {:>6} {:>8} {:>14} {:>14} {:>14}", "unit", "type", "trained", "elements", "padded", "per rank");
    let mut i = 0;
    while i < plan.units.len() {
        let (name, segments) = &plan.units[i];
        let shape = |s: &[Segment]| s.iter().map(|s| (s.dtype, s.trainable, s.elems, s.padded)).collect::<Vec<_>>();
        let alike = plan.units[i..].iter().take_while(|(_, s)| shape(s) == shape(segments)).count();
        let name = if alike > 1 { format!("{name} .. {} ({alike}x)", plan.units[i + alike - 1].0) } else { name.clone() };
        for (n, s) in segments.iter().enumerate() {
            let name = if n == 0 { name.as_str() } else { "" };
            let trained = if s.trainable { "yes" } else { "no" };
            let _ = writeln!(out, "{name:<24} {:>6} {trained:>8} {:>14} {:>14} {:>14}", s.dtype.name(), s.elems, s.padded, s.shard);
        }
        i += alike;
    }

    let _ = writeln!(out, "\n{:<24} {:>10} {:>14}", "memory of a rank", "place", "peak bytes");
    for (place, category, used) in plan.memory.iter().filter(|(_, _, used)| used.peak_bytes > 0) {
        let _ = writeln!(out, "{:<24} {:>10} {:>14}", category.name(), format!("{place:?}").to_lowercase(), used.peak_bytes);
    }
    let _ = writeln!(out, "{:<24} {:>10} {:>14}", "pages shared by ranks", "", plan.shared_bytes);
    let _ = writeln!(out, "{:<24} {:>10} {:>14}", "per rank", "", plan.rank_bytes);
    let _ = writeln!(out, "{:<24} {:>10} {:>14}", "per host", "", plan.host_bytes);

    let c = &plan.collectives;
    let _ = writeln!(
        out,
        "\nper step and rank: {:.3} TFLOP; all_gather {}, reduce_scatter {}, all_reduce {}, all_to_all {}, broadcast {}; {:.1} MB moved",
        plan.ops.flops() as f64 / 1e12,
        c.all_gather,
        c.reduce_scatter,
        c.all_reduce,
        c.all_to_all,
        c.broadcast,
        c.bytes as f64 / 1e6
    );
    out
}
