//! Sharding changes nothing on a real model either: a covering subset of the matrix on SmolLM2-135M, bit-equal losses, gradient
//! norms (which depend on all weights of the step) and, for LoRA, final adapters.
//! Not run where the model was not made (`tests/tools/make_smollm2.py --out models/smollm2-135m`).

use zrt::engine::EngineOptions;
use zrt_kernels::DType;
use zrt_kernels::cpu::Mode;
use zrt_tests::*;

const SEQ: usize = 96;
const MICRO_BATCHES: usize = 4;
const STEPS: usize = 2;

#[derive(Clone, Copy, Debug)]
struct Cell {
    stage: u8,
    ranks: usize,
    offload: bool,
    group: usize,
    pages: bool,
    recompute: usize,
    threads: usize,
}

const PLAIN: Cell = Cell { stage: 0, ranks: 1, offload: false, group: 1, pages: true, recompute: 0, threads: 2 };

/// Bits of losses and norms, and a digest of the final adapter (of nothing in full training: gigabytes).
fn run(lora: bool, compute: DType, cell: Cell) -> Vec<u64> {
    let folder = smollm2().unwrap();
    let subject = if lora { Subject::fresh_lora(folder, 8, 0.1) } else { Subject::full(folder) };
    let (_, tokens) = ids("smollm2_lora/tokens.safetensors", "input_ids");
    let results = on_ranks(cell.ranks, cell.pages, |comm| {
        let options = EngineOptions {
            group: cell.group,
            stage: cell.stage,
            offload_param: cell.offload && cell.stage == 3,
            offload_optimizer: cell.offload,
            share_pages: cell.pages,
            recompute: cell.recompute,
            deterministic: true,
            max_grad_norm: Some(1.0),
            seed: 3,
            ..EngineOptions::new(shape(1, SEQ, compute), MICRO_BATCHES)
        };
        let mut engine = engine(&subject, options, comm, device(cell.threads, Mode::Threaded));
        let batch = |s: usize, i: usize| {
            let at = (s * MICRO_BATCHES + i) * SEQ;
            rows(&tokens[at..at + SEQ], &tokens[at..at + SEQ], SEQ)
        };
        let steps = train(&mut engine, STEPS, 1e-3, &batch);
        (steps, if lora { state(&mut engine) } else { Default::default() })
    });
    let mut out = Vec::new();
    for step in &results[0].0 {
        assert!(step.applied);
        out.extend([step.loss.to_bits(), u64::from(step.grad_norm.to_bits())]);
    }
    for ((kind, name), values) in whole_state(results.into_iter().map(|r| r.1).collect()) {
        let bits: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let digest = bits.chunks(8).fold(kind as u64, |h, c| c.iter().fold(h, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3)));
        out.push(digest ^ name.len() as u64);
    }
    out
}

#[test]
fn a_covering_subset_is_bit_equal() {
    if smollm2().is_none() {
        return println!("not run: models/smollm2-135m is missing");
    }
    let c = |stage, ranks, offload, group, pages, recompute, threads| Cell { stage, ranks, offload, group, pages, recompute, threads };
    let cells = [
        c(1, 2, true, 1, true, 0, 1),
        c(2, 4, false, 1, true, usize::MAX, 1),
        c(3, 2, false, 2, true, 0, 1),
        c(3, 2, true, 1, false, usize::MAX, 1),
        c(3, 4, false, 1, false, 7, 1),
        c(3, 1, true, 4, false, 0, 1),
    ];
    for (lora, compute) in [(true, DType::BF16), (false, DType::F32)] {
        let want = run(lora, compute, PLAIN);
        for cell in cells.iter().filter(|cell| lora || cell.ranks == 2) {
            assert!(run(lora, compute, *cell) == want, "lora {lora} {compute} {cell:?}");
        }
        println!("lora {lora} {compute}: bit-equal to stage 0 on one rank");
    }
}
