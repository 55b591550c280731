//! Loading reads every byte of the model's files once per job, whatever the stage and the number of ranks, and peaks at what stays
//! plus at most one staging tensor per rank.

use std::sync::Arc;
use zrt::engine::{Engine, EngineOptions};
use zrt::hf::{ArchConfig, Weights};
use zrt::model::decoder::Decoder;
use zrt::source::Sources;
use zrt::store::WeightSource;
use zrt_kernels::DType;
use zrt_kernels::cpu::Mode;
use zrt_tests::processes::{run, smollm2_job};
use zrt_tests::*;

/// Bytes of all tensors that a model uses, as they are stored.
fn stored_bytes(folder: &std::path::Path) -> u64 {
    let (arch, weights) = (ArchConfig::load(folder).unwrap(), Weights::open(folder).unwrap());
    let bytes = |name: &str| weights.tensor(name).map(|t| (t.elems() * t.dtype.bytes()) as u64).unwrap();
    arch.parameters().iter().map(|(name, _)| bytes(name)).sum()
}

/// The tiny model on threads as ranks: full training, so that masters are loaded too.
#[test]
fn each_byte_is_read_once_per_job() {
    for name in ["tiny_model", "tiny_arch/qwen2"] {
        let folder = golden(name);
        let want = stored_bytes(&folder);
        for dtype in [DType::F32, DType::BF16] {
            for stage in 0..4 {
                for (ranks, pages, offload) in [(1, false, false), (2, false, false), (2, true, true), (4, true, false), (4, false, true)] {
                    let read = on_ranks(ranks, pages, |comm| {
                        let weights = Arc::new(Weights::open(&folder).unwrap());
                        let before = weights.bytes_read();
                        let sources = Sources { base: Some(weights.clone()), seed: 1, ..Sources::default() };
                        let source: Arc<dyn WeightSource> = Arc::new(sources);
                        let model = Decoder::new(ArchConfig::load(&folder).unwrap(), 16, None, 0.0).unwrap();
                        let options = EngineOptions {
                            stage,
                            share_pages: pages,
                            offload_param: offload && stage == 3,
                            offload_optimizer: offload,
                            ..EngineOptions::new(shape(1, 16, dtype), 4)
                        };
                        let mut engine = Engine::new(device(1, Mode::Threaded), comm, Arc::new(model), options).unwrap();
                        engine.load(&source).unwrap();
                        weights.bytes_read() - before
                    });
                    assert_eq!(read.iter().sum::<u64>(), want, "{name} {dtype} stage {stage}, {ranks} ranks, pages {pages}: {read:?}");
                }
            }
        }
        println!("{name}: {want} bytes read once per job at stages 0-3 on 1, 2 and 4 ranks");
    }
}

/// SmolLM2 on processes, measured by the kernel: bf16 files into bf16 (read straight into place) and into f32 (converted).
#[test]
fn loading_peaks_at_what_stays_and_one_staging_tensor() {
    for ranks in [2, 4] {
        for set in [&["zero.stage=3"][..], &["zero.stage=3", "comm.share_pages=false", "precision.compute=\"f32\""], &["zero.stage=0"]] {
            let dir = tempfile::tempdir().unwrap();
            let Some((config, path)) = smollm2_job(dir.path(), ranks, set) else {
                println!("not run: models/smollm2-135m is missing");
                return;
            };
            let folder = std::path::PathBuf::from(&config.model.path);
            let measured = run(env!("CARGO_BIN_EXE_measured_rank"), "load", &path, ranks);
            let field = |name: &str| measured.ranks.iter().map(|r| r[name].as_u64().unwrap()).collect::<Vec<_>>();
            let (peak, resident, read) = (field("peak"), field("resident"), field("bytes_read"));
            assert_eq!(read.iter().sum::<u64>(), stored_bytes(&folder), "{ranks} ranks {set:?}: {read:?}");
            let arch = ArchConfig::load(&folder).unwrap();
            let staging_bytes = (arch.vocab * arch.hidden * 2) as u64;
            let above: Vec<u64> = peak.iter().zip(&resident).map(|(p, r)| p - r.min(p)).collect();
            println!(
                "{ranks} ranks {set:?}: bytes read per rank {read:?}, resident {resident:?}, peak above it {above:?}, largest tensor {staging_bytes}"
            );
            assert!(above.iter().all(|a| *a <= staging_bytes), "{above:?} above what stays, a staging tensor has {staging_bytes}");
        }
    }
}
