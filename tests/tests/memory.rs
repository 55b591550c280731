//! Memory is what was planned: the simulated device, which runs the trainer without touching memory, counts what the real one holds, by
//! place and category, and no step allocates; and processes on a real model stay within a tenth of the plan.

use zrt::engine::EngineOptions;
use zrt::run::{dry_run, simulate};
use zrt_kernels::cpu::Mode;
use zrt_kernels::sim::{SimDevice, SimOptions};
use zrt_kernels::{Category, DType, MemoryUse, Place};
use zrt_tests::processes::{run, smollm2_job};
use zrt_tests::*;

const SEQ: usize = 24;
const MICRO_BATCHES: usize = 4;

fn cells(ranks: usize, dtype: DType) -> Vec<EngineOptions> {
    let mut out = Vec::new();
    for stage in 0..4 {
        for bits in 0..32u32 {
            let bit = |i: u32| bits >> i & 1 == 1;
            let options = EngineOptions {
                stage,
                offload_optimizer: bit(0),
                offload_param: bit(1),
                share_pages: bit(2),
                group: if bit(3) { MICRO_BATCHES / ranks } else { 1 },
                recompute: if bit(4) { usize::MAX } else { 0 },
                deterministic: bits.count_ones() % 2 == 0,
                resident_bytes: if bits.count_ones() % 3 == 0 { u64::MAX } else { 0 },
                max_grad_norm: Some(1.0),
                ..EngineOptions::new(shape(2, SEQ, dtype), MICRO_BATCHES)
            };
            // offload_param and pages exist at stage 3 only.
            if stage == 3 || !options.offload_param && options.share_pages {
                out.push(options);
            }
        }
    }
    out
}

fn table(memory: &[(Place, Category, MemoryUse)]) -> String {
    memory.iter().map(|(p, c, u)| format!("  {p:?} {} {u:?}\n", c.name())).collect()
}

#[test]
fn bytes_allocated_are_the_bytes_planned() {
    let subjects = [
        ("lora untied", Subject::fresh_lora(golden("tiny_model"), 4, 0.1)),
        ("full untied", Subject::full(golden("tiny_model"))),
        ("lora tied", Subject::fresh_lora(golden("tiny_arch/qwen2"), 3, 0.0)),
        ("full tied", Subject::full(golden("tiny_arch/qwen2"))),
    ];
    let mut turns = 0;
    let text: Vec<i64> = (0..2 * SEQ as i64).map(|i| i * i * 7 % 251).collect();
    for (name, subject) in subjects {
        for dtype in [DType::F32, DType::BF16] {
            turns += 1;
            let mut count = 0;
            // Every third cell of a (subject, type, ranks), others in turn: each cell is met on several of them.
            let turn = |ranks: usize, i: usize| (i + ranks + turns).is_multiple_of(3);
            let all = [1, 2, 4].into_iter().flat_map(|r| cells(r, dtype).into_iter().enumerate().map(move |(i, o)| (r, i, o)));
            for (ranks, _, options) in all.filter(|(ranks, i, _)| turn(*ranks, *i)) {
                let plan =
                    simulate(subject.open(SEQ).0, options.clone(), ranks, SimDevice::new(SimOptions { threads: 1 }).unwrap()).unwrap();
                let held = on_ranks(ranks, options.share_pages, |comm| {
                    let (model, source) = subject.open(SEQ);
                    let mut engine = zrt::engine::Engine::new(device(1, Mode::Threaded), comm, model, options.clone()).unwrap();
                    let made = engine.device().memory();
                    engine.load(&source).unwrap();
                    train(&mut engine, 2, 1e-3, &|_, _| rows(&text, &text, SEQ));
                    let trained = engine.device().memory();
                    assert!(
                        made == trained,
                        "{name} {dtype} {options:?}: loading or a step allocated:\n{}{}",
                        table(&made),
                        table(&trained)
                    );
                    (trained, engine.shared_bytes())
                });
                for (memory, shared_bytes) in &held {
                    assert!(
                        *memory == plan.memory && *shared_bytes == plan.shared_bytes,
                        "{name} {dtype} {ranks} ranks {options:?}: planned, then held:\n{}{}",
                        table(&plan.memory),
                        table(memory)
                    );
                }
                count += 1;
            }
            println!("{name} {dtype}: {count} cells hold what was planned, by place and category, in as many allocations");
        }
    }
}

/// ZeRO-3 on two processes. Beside what is planned a process holds its code, stacks and small data: a tenth of the plan must do.
#[test]
fn processes_stay_within_the_plan() {
    for set in [&[][..], &["comm.share_pages=false"]] {
        let dir = tempfile::tempdir().unwrap();
        let Some((config, path)) = smollm2_job(dir.path(), 2, set) else {
            println!("not run: models/smollm2-135m is missing");
            return;
        };
        let plan = dry_run(&config, 2).unwrap();
        let measured = run(env!("CARGO_BIN_EXE_measured_rank"), "train", &path, 2);
        let mb = |bytes: u64| bytes as f64 / 1e6;
        let own_shard = plan.shared_bytes as u64 / 2;
        for (rank, r) in measured.ranks.iter().enumerate() {
            let (anon, planned) = (r["anon_peak"].as_u64().unwrap() + own_shard, plan.rank_bytes as u64);
            println!(
                "{set:?} rank {rank}: private memory and own shard {:.1} MB, planned {:.1} MB ({:+.1} %); {r}",
                mb(anon),
                mb(planned),
                100.0 * (anon as f64 / planned as f64 - 1.0)
            );
            assert_eq!(r["steps"], 2);
            assert!(anon as f64 <= 1.1 * planned as f64, "rank {rank}: {anon} bytes, planned {planned}");
        }
        let (pss, planned) = (measured.pss_peak, plan.host_bytes as u64);
        println!(
            "{set:?} job: PSS {:.1} MB, planned {:.1} MB ({:+.1} %)",
            mb(pss),
            mb(planned),
            100.0 * (pss as f64 / planned as f64 - 1.0)
        );
        assert!(pss as f64 <= 1.1 * planned as f64, "{pss} bytes, planned {planned}");
    }
}
