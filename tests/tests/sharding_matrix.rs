//! Sharding changes nothing: losses, gradient norms, final weights and optimizer state are bit-equal in deterministic mode over
//! stage x ranks x offload x group x pages x checkpointing x threads, for LoRA (with dropout) and full training, tied and untied heads, f32 and bf16.

use std::collections::BTreeMap;
use zrt::checkpoint::Kind;
use zrt::data::HostBatch;
use zrt::engine::EngineOptions;
use zrt_kernels::DType;
use zrt_kernels::cpu::Mode;
use zrt_tests::*;

const SEQ: usize = 24;
const ROWS: usize = 2;
const STEPS: usize = 3;

#[derive(Clone, Copy, Debug, PartialEq)]
struct Cell {
    stage: u8,
    ranks: usize,
    offload_optimizer: bool,
    offload_param: bool,
    /// 0: all.
    group: usize,
    pages: bool,
    recompute: bool,
    threads: usize,
}

const PLAIN: Cell =
    Cell { stage: 0, ranks: 1, offload_optimizer: false, offload_param: false, group: 1, pages: true, recompute: false, threads: 1 };

/// What a run leaves, as bits.
#[derive(Clone, Debug, PartialEq)]
struct Outcome {
    losses: Vec<u64>,
    norms: Vec<u32>,
    state: BTreeMap<(Kind, String), Vec<u32>>,
}

fn cells(ranks: &[usize]) -> Vec<Cell> {
    let mut out = Vec::new();
    for stage in 0..4 {
        for &ranks in ranks {
            for bits in 0..32u32 {
                let bit = |i: u32| bits >> i & 1 == 1;
                let cell = Cell {
                    stage,
                    ranks,
                    offload_optimizer: bit(0),
                    offload_param: bit(1),
                    group: usize::from(!bit(2)),
                    pages: bit(3),
                    recompute: bit(4),
                    threads: 1,
                };
                // offload_param and pages exist at stage 3 only.
                if stage == 3 || !cell.offload_param && cell.pages {
                    out.extend([cell, Cell { threads: 2, ..cell }]);
                }
            }
        }
    }
    out
}

fn batches(micro_batches: usize) -> impl Fn(usize, usize) -> HostBatch {
    let text = std::fs::read(golden("tiny_full/tokens.safetensors")).unwrap();
    move |step, index| {
        let at = 200 + (step * micro_batches + index) * SEQ * ROWS % (text.len() - 1000);
        let row: Vec<i64> = text[at..at + SEQ * ROWS].iter().map(|b| i64::from(*b)).collect();
        // Unequal numbers of trained tokens per micro-batch.
        let labels: Vec<i64> = row.iter().enumerate().map(|(i, t)| if i % SEQ < index { -100 } else { *t }).collect();
        rows(&row, &labels, SEQ)
    }
}

fn run(subject: &Subject, dtype: DType, cell: Cell, micro_batches: usize, mode: Mode) -> (Outcome, Vec<u64>) {
    let batch = batches(micro_batches);
    let results = on_ranks(cell.ranks, cell.pages, |comm| {
        let per_rank = micro_batches.div_ceil(cell.ranks);
        let options = EngineOptions {
            group: if cell.group == 0 { per_rank.next_power_of_two() } else { cell.group },
            stage: cell.stage,
            offload_param: cell.offload_param,
            offload_optimizer: cell.offload_optimizer,
            share_pages: cell.pages,
            recompute: if cell.recompute { usize::MAX } else { 0 },
            deterministic: true,
            max_grad_norm: Some(1.0),
            seed: 11,
            poison: matches!(mode, Mode::Chaos { .. }),
            ..EngineOptions::new(shape(ROWS, SEQ, dtype), micro_batches)
        };
        let mut engine = engine(subject, options, comm, device(cell.threads, mode));
        let before = engine.device().memory();
        let steps = train(&mut engine, STEPS, 1e-2, &batch);
        let count = |m: &[(_, _, zrt_kernels::MemoryUse)]| m.iter().map(|(_, _, u)| u.allocations).sum::<usize>();
        assert_eq!(count(&before), count(&engine.device().memory()), "a step allocated");
        (steps, state(&mut engine), engine.gathers())
    });
    let gathers = results.iter().map(|r| r.2).collect();
    let first = &results[0].0;
    assert!(results.iter().all(|r| r.0 == *first), "ranks disagree");
    assert!(first.iter().all(|s| s.applied));
    let losses = first.iter().map(|s| s.loss.to_bits()).collect();
    let norms = first.iter().map(|s| s.grad_norm.to_bits()).collect();
    let state = whole_state(results.into_iter().map(|r| r.1).collect());
    let state = state.into_iter().map(|(k, v)| (k, v.iter().map(|x| x.to_bits()).collect())).collect();
    (Outcome { losses, norms, state }, gathers)
}

fn subjects() -> Vec<(&'static str, Subject)> {
    vec![
        ("lora untied", Subject::fresh_lora(golden("tiny_model"), 4, 0.1)),
        ("full untied", Subject::full(golden("tiny_model"))),
        ("lora tied", Subject::fresh_lora(golden("tiny_arch/qwen2"), 3, 0.1)),
        ("full tied", Subject::full(golden("tiny_arch/qwen2"))),
    ]
}

fn explain(a: &Outcome, b: &Outcome) -> String {
    if a.losses != b.losses {
        return format!("losses differ: {:?} and {:?}", floats(&a.losses), floats(&b.losses));
    }
    if a.norms != b.norms {
        return format!("norms differ: {:?} and {:?}", a.norms, b.norms);
    }
    let differ: Vec<_> = a.state.iter().filter(|(k, v)| b.state.get(*k) != Some(v)).map(|(k, _)| k.clone()).collect();
    format!("{} of {} state tensors differ, first {:?}", differ.len(), a.state.len(), differ.first())
}

fn floats(bits: &[u64]) -> Vec<f64> {
    bits.iter().map(|b| f64::from_bits(*b)).collect()
}

fn check(name: &str, dtype: DType, subject: &Subject, cells: &[Cell], micro_batches: usize, mode: Mode) {
    let (want, _) = run(subject, dtype, PLAIN, micro_batches, Mode::Threaded);
    for cell in cells {
        let (got, _) = run(subject, dtype, *cell, micro_batches, mode);
        assert!(got == want, "{name} {dtype} {cell:?}: {}", explain(&got, &want));
    }
    println!("{name} {dtype}, {micro_batches} micro-batches: {} cells bit-equal to stage 0 on one rank", cells.len());
}

#[test]
fn all_cells_f32() {
    for (name, subject) in subjects() {
        check(name, DType::F32, &subject, &cells(&[1, 2, 4]), 8, Mode::Threaded);
    }
}

#[test]
fn all_cells_bf16() {
    for (name, subject) in subjects() {
        check(name, DType::BF16, &subject, &cells(&[1, 2, 4]), 8, Mode::Threaded);
    }
}

/// Micro-batches that do not fill the tree: missing leaves count as zero.
#[test]
fn ragged_trees() {
    for (name, subject) in &subjects()[..2] {
        for micro_batches in [5, 6, 7] {
            let some: Vec<Cell> = cells(&[2, 4]).into_iter().filter(|c| c.threads == 1 && c.recompute == c.offload_optimizer).collect();
            check(name, DType::F32, subject, &some, micro_batches, Mode::Threaded);
        }
    }
}

/// Random delays, memory filled with NaN, and the access tracker: a missing wait fails here.
#[test]
fn chaos() {
    for (i, (name, subject)) in subjects().iter().enumerate() {
        let wanted = |c: &Cell| c.threads == 1 && c.recompute == (i % 2 == 1) && (c.ranks == 2 || c.ranks == 4 && c.stage == 3);
        let some: Vec<Cell> = cells(&[2, 4]).into_iter().filter(wanted).collect();
        check(name, DType::F32, subject, &some, 8, Mode::Chaos { seed: i as u64 });
    }
}

#[test]
fn inline_streams() {
    let (name, subject) = &subjects()[0];
    let some: Vec<Cell> = cells(&[1]).into_iter().filter(|c| c.threads == 1).collect();
    check(name, DType::F32, subject, &some, 8, Mode::Inline);
}

/// Three ranks have another tree: the same numbers within 1e-6 relative (f32 sums of 8 terms in another order).
#[test]
fn three_ranks() {
    for (name, subject) in subjects() {
        let (want, _) = run(&subject, DType::F32, PLAIN, 6, Mode::Threaded);
        for stage in 0..4 {
            let cell = Cell { stage, ranks: 3, ..PLAIN };
            let (got, _) = run(&subject, DType::F32, cell, 6, Mode::Threaded);
            for (a, b) in floats(&got.losses).iter().zip(floats(&want.losses)) {
                assert!((a - b).abs() <= 1e-6 * b, "{name} {cell:?}: {a} and {b}");
            }
        }
    }
}

/// Outside deterministic mode the numbers are the same within rounding, at every stage.
#[test]
fn fast_mode_agrees() {
    let subject = &subjects()[1].1;
    let batch = batches(8);
    let (want, _) = run(subject, DType::F32, PLAIN, 8, Mode::Threaded);
    for stage in 0..4 {
        for (ranks, group, offload) in [(1, 1, false), (2, 1, false), (2, 4, true), (4, 2, false), (2, 2, true)] {
            let losses = on_ranks(ranks, false, |comm| {
                let options = EngineOptions {
                    group,
                    stage,
                    offload_optimizer: offload,
                    share_pages: false,
                    max_grad_norm: Some(1.0),
                    seed: 11,
                    poison: true,
                    ..EngineOptions::new(shape(ROWS, SEQ, DType::F32), 8)
                };
                let mut engine = engine(subject, options, comm, device(1, Mode::Chaos { seed: 3 }));
                train(&mut engine, STEPS, 1e-2, &batch).iter().map(|s| s.loss).collect::<Vec<_>>()
            });
            for (a, b) in losses[0].iter().zip(floats(&want.losses)) {
                // f32 sums of 8 leaves in another order, three steps.
                assert!((a - b).abs() <= 2e-6 * b, "stage {stage}, {ranks} ranks, group {group}: {a} and {b}");
            }
        }
    }
}

/// With pages off: frozen resident units are gathered once; others as a ring of `1 + prefetch_depth` slots needs.
#[test]
fn gather_counts() {
    let subject = Subject::fresh_lora(golden("tiny_model"), 4, 0.0);
    for (resident, depth) in [(0, 0), (0, 1), (u64::MAX, 0), (u64::MAX, 1)] {
        let batch = batches(8);
        let counts = on_ranks(2, false, |comm| {
            let options = EngineOptions {
                stage: 3,
                share_pages: false,
                deterministic: true,
                resident_bytes: resident,
                prefetch_depth: depth,
                ..EngineOptions::new(shape(ROWS, SEQ, DType::F32), 8)
            };
            let mut engine = engine(&subject, options, comm, device(1, Mode::Threaded));
            train(&mut engine, STEPS, 1e-2, &batch);
            engine.gathers()
        });
        // Units: embed, two blocks (frozen and trained segments), head; 4 groups of 2 ranks in each of 3 steps.
        let (passes, steps) = (4 * STEPS as u64, STEPS as u64);
        let frozen = match (resident, depth) {
            (0, 0) => {
                // One slot for both blocks: forward 0 (hit after the first pass: backward ended there), 1; backward 1 hit, 0. Embed and head once.
                2 + 1 + passes + passes
            }
            _ => 4,
        };
        // Adapters change each step; two slots hold both blocks, one slot has to swap as above.
        let trained = if depth == 0 { steps + 2 * passes } else { 2 * steps };
        assert_eq!(counts, vec![frozen + trained; 2], "resident {resident}, depth {depth}");
    }
}
