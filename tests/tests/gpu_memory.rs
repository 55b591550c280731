//! Memory of a GPU is what was planned: on emulated devices of both vendors the trainer holds, by place and category, what the simulated
//! device counted for this machine, and no step allocates.

use std::sync::Arc;
use zrt::config::Config;
use zrt::engine::{Engine, EngineOptions};
use zrt::run::simulate;
use zrt_collectives::MemoryStore;
use zrt_kernels::DType;
use zrt_tests::*;

const SEQ: usize = 24;
const MICRO_BATCHES: usize = 4;

fn cells() -> Vec<EngineOptions> {
    let mut out = Vec::new();
    for (i, stage) in [0, 1, 2, 3, 3, 3, 3, 0, 2].into_iter().enumerate() {
        out.push(EngineOptions {
            stage,
            offload_optimizer: i % 2 == 1,
            offload_param: stage == 3 && i > 3,
            share_pages: false,
            group: if i % 3 == 0 { 2 } else { 1 },
            recompute: if i % 4 == 0 { usize::MAX } else { 0 },
            deterministic: i % 3 != 1,
            resident_bytes: if i == 5 { 0 } else { u64::MAX },
            max_grad_norm: Some(1.0),
            ..EngineOptions::new(shape(2, SEQ, if i % 2 == 0 { DType::F32 } else { DType::BF16 }), MICRO_BATCHES)
        });
    }
    out
}

/// Gathers are the library's: whether copies are used is decided by what both processes of a pair find when they start.
fn config(kind: &str) -> Config {
    let library = zrt_driver::library().unwrap();
    let here = std::path::Path::new(".");
    let libraries = ["driver", "compiler", "collectives"].map(|role| format!("{role} = \"{}\"\n", library.display())).concat();
    let kernels = env!("CARGO_TARGET_TMPDIR");
    let text = format!(
        "[model]\npath = \"m\"\n[[dataset]]\npath = \"d.jsonl\"\n[training]\nsteps = 1\nseq_len = 8\n[comm]\ngather = \"library\"\n\
         [device]\nkind = \"{kind}\"\nthreads = 1\nkernel_folder = \"{kernels}\"\n[device.libraries]\n{libraries}"
    );
    Config::parse(&text, here, here, &[]).unwrap()
}

fn check(kind: &str) {
    let text: Vec<i64> = (0..2 * SEQ as i64).map(|i| i * i * 7 % 251).collect();
    for (i, options) in cells().into_iter().enumerate() {
        let ranks = 1 + i % 2;
        let subject = if i % 3 == 0 { Subject::full(golden("tiny_arch/qwen2")) } else { Subject::fresh_lora(golden("tiny_model"), 4, 0.1) };
        let config = config(kind);
        let sim = zrt::device::simulated(&config, ranks).unwrap();
        let _held = zrt::device::simulated_comm(&config, &sim, ranks).unwrap();
        let plan = simulate(subject.open(SEQ).0, options.clone(), ranks, sim).unwrap();
        let store = Arc::new(MemoryStore::new());
        let run = |rank: usize| {
            let computes = zrt::device::open(&config, rank, ranks, false).unwrap();
            let comm = computes.join(&config, store.clone(), rank, ranks).unwrap();
            let (model, source) = subject.open(SEQ);
            let mut engine = Engine::new(computes.device(), comm, model, options.clone()).unwrap();
            let made = engine.device().memory();
            engine.load(&source).unwrap();
            train(&mut engine, 1, 1e-3, &|_, _| rows(&text, &text, SEQ));
            (made, engine.device().memory())
        };
        let held: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..ranks).map(|rank| scope.spawn(move || run(rank))).collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        for (made, trained) in held {
            assert!(made == trained, "{kind} {options:?}: loading or a step allocated:\n{made:#?}\n{trained:#?}");
            let now = |memory: &[(_, _, zrt_kernels::MemoryUse)]| memory.iter().map(|(p, c, u)| (*p, *c, u.bytes)).collect::<Vec<_>>();
            assert_eq!(now(&plan.memory), now(&trained), "{kind} {ranks} ranks {options:?}: planned, then held");
        }
    }
    println!("{kind}: {} cells hold what was planned, to the byte", cells().len());
}

#[test]
fn cuda() {
    check("cuda");
}

#[test]
fn hip() {
    check("hip");
}
