//! What the trainer sees, as text for a terminal: which tokens are trained, which are masked, and where documents begin and end in
//! a packed row. A wrong mask is visible at a glance; no other check finds a wrong template.

use super::schedule::{HostBatch, IGNORE, Schedule};
use super::tokenizer::Tokenizer;
use std::fmt::Write;

/// The first `rows` rows of training, in its order. With `color`: trained tokens green, masked ones dim; else trained ones in
/// `[...]`. Without a tokenizer ids are shown.
pub fn show(schedule: &Schedule, tokenizer: Option<&Tokenizer>, rows: usize, color: bool) -> String {
    let set = schedule.set();
    let spec = schedule.spec();
    let mut out = String::new();
    let _ = writeln!(out, "{}", set.report());
    let (fill, epoch_rows) = (100.0 * schedule.fill(), schedule.rows());
    let _ = writeln!(
        out,
        "{epoch_rows} rows of {} tokens an epoch, {fill:.1} % filled; {} steps of {} rows in {} micro-batches",
        spec.seq_len,
        schedule.total_steps(),
        spec.global_batch_size,
        schedule.micro_batches()
    );
    let mut shown = 0;
    for step in 0..schedule.total_steps() {
        for micro_batch in 0..schedule.micro_batches() {
            let batch = schedule.batch(step, micro_batch);
            for row in 0..spec.micro_batch_size {
                if shown == rows {
                    return out;
                }
                let range = row * spec.seq_len..(row + 1) * spec.seq_len;
                let samples: Vec<_> = batch.samples.iter().filter(|s| range.contains(&s.start)).collect();
                if samples.is_empty() {
                    return out;
                }
                let used: usize = samples.iter().map(|s| s.tokens).sum();
                let _ = writeln!(out, "\n== step {step}, micro-batch {micro_batch}, row {row}: {used} of {} tokens", spec.seq_len);
                for sample in samples {
                    let trained = trained(&batch, sample.start, sample.tokens);
                    let name = set.name(set.document(sample.document).source);
                    let count = trained.iter().filter(|&&t| t).count();
                    let _ = writeln!(out, "-- {name}: {} tokens, {count} trained", sample.tokens);
                    let ids = &batch.ids[sample.start..sample.start + sample.tokens];
                    let ids: Vec<u32> = ids.iter().map(|&id| id as u32).collect();
                    write_runs(&mut out, tokenizer, &ids, &trained, color);
                    out.push('\n');
                }
                shown += 1;
            }
        }
    }
    out
}

/// Per token of a document: something predicts it and is trained to.
fn trained(batch: &HostBatch, start: usize, tokens: usize) -> Vec<bool> {
    (start..start + tokens).map(|i| i > start && batch.labels[i - 1] != IGNORE).collect()
}

fn write_runs(out: &mut String, tokenizer: Option<&Tokenizer>, ids: &[u32], trained: &[bool], color: bool) {
    let decode = |ids: &[u32]| match tokenizer {
        Some(tokenizer) => tokenizer.decode(ids),
        None => ids.iter().map(|id| format!("{id} ")).collect(),
    };
    let mut before = String::new();
    let mut start = 0;
    while start < ids.len() {
        let end = (start..ids.len()).find(|&i| trained[i] != trained[start]).unwrap_or(ids.len());
        // Decoders trim the beginning of what they are given, so a run is what it adds to the text before it.
        let through = decode(&ids[..end]);
        let text = through.strip_prefix(before.as_str()).map_or_else(|| decode(&ids[start..end]), str::to_owned);
        before = through;
        let (open, close) = match (color, trained[start]) {
            (true, true) => ("\x1b[32m", "\x1b[0m"),
            (true, false) => ("\x1b[2m", "\x1b[0m"),
            (false, true) => ("[", "]"),
            (false, false) => ("", ""),
        };
        let _ = write!(out, "{open}{}{close}", printable(&text));
        start = end;
    }
}

/// Data may hold escape sequences; a terminal must not obey them.
fn printable(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\u{21b5}\n"),
            '\t' => out.push(c),
            c if c.is_control() => out.extend(c.escape_unicode()),
            c => out.push(c),
        }
    }
    out
}
