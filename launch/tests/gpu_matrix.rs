//! Do emulated GPUs give the same bits however a run is sharded? A set of cells in which every two values of any two settings meet, each in
//! processes through `zlaunch`, against the run on one GPU at stage 0. The emulated library adds in a random order of ranks, so that
//! a sum that is not the runtime's own tree would show.

mod common;

use common::gpu::{CUDA, Gpu, GpuRun, HIP, can_run};
use common::tiny::{Dice, Tiny};
use std::collections::{BTreeMap, BTreeSet};

/// Settings and their values: what differs in bits by design (trained weights, precision) is in the first two.
const FACTORS: [(&str, &[&str]); 9] = [
    ("trained", &["lora", "all"]),
    ("precision.compute", &["f32", "bf16"]),
    ("ranks", &["1", "2", "4"]),
    ("zero.stage", &["0", "1", "2", "3"]),
    ("zero.offload_param", &["none", "cpu"]),
    ("zero.offload_optimizer", &["none", "cpu"]),
    ("training.micro_batch_group", &["1", "all"]),
    ("activation_checkpoint.mode", &["none", "full"]),
    ("device.mode", &["threaded", "chaos"]),
];
const REFERENCE: [usize; 7] = [0; 7];
/// At least so many cells.
const CELLS: usize = 24;
const STEPS: u64 = 2;

/// A value of each factor, by index.
type Cell = [usize; FACTORS.len()];

/// Weights are kept on the host at stage 3 alone.
fn is_allowed(cell: &Cell) -> bool {
    cell[4] == 0 || FACTORS[3].1[cell[3]] == "3"
}

fn all_cells() -> Vec<Cell> {
    let mut cells = vec![[0; FACTORS.len()]];
    for (f, (_, values)) in FACTORS.iter().enumerate() {
        cells = cells
            .into_iter()
            .flat_map(|c| (0..values.len()).map(move |v| std::array::from_fn(|i| if i == f { v } else { c[i] })))
            .collect();
    }
    cells.retain(is_allowed);
    cells
}

fn pairs(cell: &Cell) -> impl Iterator<Item = (usize, usize, usize, usize)> + '_ {
    (0..cell.len()).flat_map(move |a| (a + 1..cell.len()).map(move |b| (a, cell[a], b, cell[b])))
}

/// Cells that cover all pairs that can meet, chosen one by one by how many new ones they bring; the same set every time.
fn covering() -> Vec<Cell> {
    let all = all_cells();
    let mut left: BTreeSet<_> = all.iter().flat_map(pairs).collect();
    let mut chosen: Vec<Cell> = Vec::new();
    let mut dice = Dice(5);
    while !left.is_empty() || chosen.len() < CELLS {
        let brings = |c: &Cell| pairs(c).filter(|p| left.contains(p)).count();
        let best = all.iter().map(brings).max().unwrap_or(0);
        let candidates: Vec<&Cell> = all.iter().filter(|c| brings(c) == best && !chosen.contains(c)).collect();
        let cell = *candidates[dice.below(candidates.len() as u64) as usize];
        pairs(&cell).for_each(|p| {
            left.remove(&p);
        });
        chosen.push(cell);
    }
    chosen
}

fn value(cell: &Cell, factor: usize) -> &'static str {
    FACTORS[factor].1[cell[factor]]
}

/// What must be the same: losses and gradient norms of all steps, and the bytes that were trained.
type Outcome = (BTreeMap<u64, (u64, u64)>, Vec<u8>);

fn run(gpu: Gpu, cell: &Cell) -> Outcome {
    let tiny = Tiny::new(STEPS);
    let ranks: usize = value(cell, 2).parse().unwrap();
    let mut sets: Vec<String> = [1, 3, 4, 5, 6, 7, 8].iter().map(|&f| format!("{}={}", FACTORS[f].0, value(cell, f))).collect();
    let lora = value(cell, 0) == "lora";
    if !lora {
        sets.push("lora=".into());
    }
    sets.push("comm.heartbeat_timeout_seconds=60".into());
    let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
    GpuRun { tiny: &tiny, gpu, ranks, emulator: "reduce_seed=3" }.train(&sets);
    let trained = if lora { tiny.adapter("out") } else { std::fs::read(tiny.path("out/model/model.safetensors")).unwrap() };
    (tiny.losses("out"), trained)
}

fn matrix(gpu: Gpu) {
    if !can_run() {
        return;
    }
    let mut references: BTreeMap<(usize, usize), Outcome> = BTreeMap::new();
    let cells = covering();
    assert!(cells.len() >= CELLS);
    for cell in &cells {
        let key = (cell[0], cell[1]);
        let reference = references.entry(key).or_insert_with(|| {
            let mut first = [0; FACTORS.len()];
            (first[0], first[1]) = key;
            first[2..].copy_from_slice(&REFERENCE);
            run(gpu, &first)
        });
        let names: Vec<&str> = (0..FACTORS.len()).map(|f| value(cell, f)).collect();
        let got = run(gpu, cell);
        assert_eq!(got.0, reference.0, "losses and norms on {} with {names:?}", gpu.0);
        assert!(got.1 == reference.1, "other weights on {} with {names:?}", gpu.0);
    }
    println!("{}: {} cells with the bits of one GPU at stage 0", gpu.0, cells.len());
}

#[test]
fn cuda() {
    matrix(CUDA);
}

#[test]
fn hip() {
    matrix(HIP);
}
