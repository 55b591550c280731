//! How fast is a LoRA step of an 8B model, with weights in device memory, and streamed from the host? Llama 3.1 8B's shape with random
//! weights, so that nothing must be fetched: arithmetic and bytes are those of the real one.

use super::{Job, Line, Machine, Step};
use std::time::Duration;

/// Tokens of a row.
const SEQ_LEN: usize = 2048;
/// Rows of a micro-batch.
const ROWS: usize = 4;
/// Steps of a run.
const STEPS: usize = 6;
/// Steps that start cold: kernels are compiled, products are chosen.
const COLD: usize = 2;
/// Making random weights takes most of it.
const LIMIT: Duration = Duration::from_secs(200);

/// With weights at home on the device, and on the host, from where each unit is copied before it computes.
pub fn lines(machine: &Machine) -> Vec<Line> {
    let host = ["zero.stage=3", "zero.offload_param=cpu", "zero.resident_bytes=0"];
    let homes: [(&str, &[&str]); 2] = [("weights on the device", &["zero.stage=0"]), ("weights at home on the host", &host)];
    let mut out = Vec::new();
    for ranks in machine.ranks() {
        for (home, sets) in homes {
            let part = format!("8B-shaped LoRA step, bf16, {ROWS} x {SEQ_LEN} tokens a GPU, {home}");
            let line = Line { part, ranks, ..Line::default() };
            out.push(if machine.emulator.is_some() {
                Line { outcome: "not run: too large for an emulator".into(), ..line }
            } else {
                measured(line, job(machine, ranks).and_then(|job| machine.train(ranks, &job, sets, LIMIT)))
            });
        }
    }
    out
}

fn job(machine: &Machine, ranks: usize) -> Result<Job, String> {
    let model = std::path::absolute(machine.root.join("examples/models/llama-3.1-8b")).map_err(|e| e.to_string())?;
    let more = format!(
        "[lora]\nr = 16\nalpha = 32\ntarget_modules = \"all-linear\"\n\
         [training]\nseq_len = {SEQ_LEN}\nmicro_batch_size = {ROWS}\nglobal_batch_size = {}\nsteps = {STEPS}\n[optimizer]\nlr = 1e-4\n\
         [precision]\ncompute = \"bf16\"\n[activation_checkpoint]\nmode = \"none\"\n",
        ROWS * ranks
    );
    // Any tokens cost the same.
    let row = |r: usize| (0..SEQ_LEN).map(|t| ((r * 7919 + t * 104_729) % 128_000) as i64).collect::<Vec<_>>();
    let rows: Vec<Vec<i64>> = (0..ROWS * ranks * STEPS).map(row).collect();
    let rows: Vec<&[i64]> = rows.iter().map(Vec::as_slice).collect();
    Ok(Job::new(&format!("path = \"{}\"\ninit = \"random\"", model.display()), &more, &rows))
}

fn measured(line: Line, steps: Result<Vec<Step>, String>) -> Line {
    let mut warm: Vec<Step> = match steps {
        Ok(steps) => steps.into_iter().skip(COLD).collect(),
        Err(why) => return Line { outcome: format!("FAILED: {why}"), wrong: true, ..line },
    };
    warm.sort_by(|a, b| a.secs.total_cmp(&b.secs));
    match warm.get(warm.len() / 2) {
        Some(s) if s.loss.is_finite() => {
            Line { outcome: format!("ran, loss {:.3}", s.loss), speed: Some([s.secs, s.tokens_per_s, s.share_of_peak]), ..line }
        }
        _ => Line { outcome: "FAILED: no steps, or no finite loss".into(), wrong: true, ..line },
    }
}
