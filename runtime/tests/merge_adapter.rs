//! Merging: the sum in f32, rounded once, in every base type; and what stops it.

use half::{bf16, f16};
use std::fs;
use std::path::{Path, PathBuf};
use zrt::checkpoint::BaseId;
use zrt::hf::export::{TensorSpec, export_model};
use zrt::hf::{ArchConfig, Stored, Weights};
use zrt::merge::{Options, merge};
use zrt::peft::load_adapter;

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden")
}

/// The golden base in another type, with a stored copy of the untied head.
fn base_as(dir: &Path, dtype: Stored) -> Weights {
    let base = golden().join("tiny_model");
    let source = Weights::open(&base).unwrap();
    let specs: Vec<TensorSpec> =
        ArchConfig::load(&base).unwrap().parameters().into_iter().map(|(name, shape)| TensorSpec { name, shape, dtype }).collect();
    export_model(dir, &base, &specs, u64::MAX, &mut |s, start, bytes| {
        let mut v = vec![0f32; bytes.len() / dtype.bytes()];
        source.read_into_f32(&s.name, start, &mut v)?;
        let encoded: Vec<u8> = match dtype {
            Stored::BF16 => v.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
            Stored::F16 => v.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect(),
            _ => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
        };
        bytes.copy_from_slice(&encoded);
        Ok(())
    })
    .unwrap();
    Weights::open(dir).unwrap()
}

#[test]
fn merged_weights_are_the_rounded_sum() {
    let adapter_dir = golden().join("tiny_lora/adapter_final");
    // Rounding once: half a unit in the last place, 2^-p relative for p significant bits (24, 8, 11). The f32 sum of 16 products adds 18 roundings of 2^-24.
    for (dtype, half_ulp) in [(Stored::F32, 2f64.powi(-24)), (Stored::BF16, 2f64.powi(-8)), (Stored::F16, 2f64.powi(-11))] {
        let top = tempfile::tempdir().unwrap();
        let (base_dir, out) = (top.path().join("base"), top.path().join("out"));
        let base = base_as(&base_dir, dtype);
        let arch = ArchConfig::load(&base_dir).unwrap();
        let adapter = load_adapter(&adapter_dir, &arch).unwrap();
        let report = merge(&base_dir, &adapter_dir, &out, &Options { max_shard_bytes: 60_000, ..Options::default() }).unwrap();
        assert_eq!((report.merged, report.tensors), (14, base.names().len()));
        assert!(report.written.files.len() > 1 && report.update_rms > 0.0 && !report.base_checked);
        assert_eq!(report.rounding_rms == 0.0, dtype == Stored::F32);
        let merged = Weights::open(&out).unwrap();
        merged.validate(&arch).unwrap();
        for name in base.names() {
            assert_eq!(merged.tensor(name).unwrap().dtype, dtype);
            let (w, got) = (base.read_f32(name).unwrap(), merged.read_f32(name).unwrap());
            let Some(t) = adapter.plan.targets.iter().find(|t| t.weight_name() == *name) else {
                assert_eq!(w, got, "{name} is not adapted and must not change");
                continue;
            };
            let (a, b) = (adapter.a(t).unwrap(), adapter.b(t).unwrap());
            for o in 0..t.outputs {
                for i in 0..t.inputs {
                    let products = (0..t.r).map(|k| f64::from(b[o * t.r + k]) * f64::from(a[k * t.inputs + i]));
                    let (sum, size) = products.fold((0.0, 0.0), |(s, m), p| (s + p, m + p.abs()));
                    let exact = f64::from(w[o * t.inputs + i]) + f64::from(t.scale) * sum;
                    let tolerance =
                        half_ulp * exact.abs() * 1.0001 + 18.0 * 2f64.powi(-24) * (f64::from(t.scale) * size + exact.abs()) + 1e-9;
                    let got = f64::from(got[o * t.inputs + i]);
                    assert!((got - exact).abs() <= tolerance, "{dtype} {name}[{o},{i}] = {got}, expected {exact}");
                }
            }
        }
    }
}

#[test]
fn another_base_and_a_bad_output_are_refused() {
    let top = tempfile::tempdir().unwrap();
    let base_dir = golden().join("tiny_model");
    let adapter = top.path().join("adapter");
    fs::create_dir(&adapter).unwrap();
    for name in ["adapter_config.json", "adapter_model.safetensors"] {
        fs::copy(golden().join("tiny_lora/adapter_final").join(name), adapter.join(name)).unwrap();
    }
    let out = top.path().join("out");
    let id = BaseId::of(&base_dir, &Weights::open(&base_dir).unwrap()).unwrap();
    fs::write(adapter.join("base_id.json"), id.to_json()).unwrap();
    assert!(merge(&base_dir, &adapter, &out, &Options::default()).unwrap().base_checked);

    let error = |base: &Path, out: &Path, options: &Options| merge(base, &adapter, out, options).unwrap_err().to_string();
    let e = error(&base_dir, &out, &Options::default());
    assert!(e.contains("it exists"), "{e}");
    let overwrite = Options { overwrite: true, ..Options::default() };
    merge(&base_dir, &adapter, &out, &overwrite).unwrap();
    for inside in [top.path(), &adapter] {
        let e = error(&base_dir, inside, &overwrite);
        assert!(e.contains("it is or contains the adapter"), "{e}");
    }
    // The model fully trained from the same base has the same shapes and other weights.
    let other = top.path().join("other");
    fs::create_dir(&other).unwrap();
    fs::copy(base_dir.join("config.json"), other.join("config.json")).unwrap();
    fs::copy(golden().join("tiny_full/model_final.safetensors"), other.join("model.safetensors")).unwrap();
    let e = error(&other, &top.path().join("o2"), &Options::default());
    assert!(e.contains("was not trained on") && e.contains("the weights are others"), "{e}");
    assert!(!top.path().join("o2").exists());
    merge(&other, &adapter, &top.path().join("o2"), &Options { allow_other_base: true, ..Options::default() }).unwrap();
    let e = error(&golden().join("tiny_arch/qwen3"), &top.path().join("o3"), &Options::default());
    assert!(e.contains("expected shape"), "{e}");
}
