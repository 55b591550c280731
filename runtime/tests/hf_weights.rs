//! Ranges of tensors, in any type, against the reference reader; damaged files; export and back.

use half::{bf16, f16};
use proptest::prelude::*;
use std::fs;
use std::path::{Path, PathBuf};
use zrt::hf::export::{TensorSpec, export_model, write_safetensors};
use zrt::hf::weights::check_finite;
use zrt::hf::{ArchConfig, Stored, Weights};
use zrt_kernels::DType;

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden")
}

fn encode(values: &[f32], dtype: Stored) -> Vec<u8> {
    match dtype {
        Stored::BF16 => values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
        Stored::F16 => values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
    }
}

fn write(path: &Path, tensors: &[(&str, Vec<usize>, Stored, Vec<u8>)]) {
    let specs: Vec<TensorSpec> = tensors.iter().map(|t| TensorSpec { name: t.0.into(), shape: t.1.clone(), dtype: t.2 }).collect();
    write_safetensors(path, &specs, &mut |spec, start, out| {
        let bytes = &tensors.iter().find(|t| t.0 == spec.name).unwrap().3;
        let at = start * spec.dtype.bytes();
        out.copy_from_slice(&bytes[at..at + out.len()]);
        Ok(())
    })
    .unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// Any range in any type equals converting the whole tensor; conversion is exact or rounds to nearest even.
    #[test]
    fn any_range_in_any_type(values in prop::collection::vec(-1e4f32..1e4, 1..300), from in 0usize..3, to in 0usize..2, cut in any::<(prop::sample::Index, prop::sample::Index)>()) {
        let dir = tempfile::tempdir().unwrap();
        let dtype = [Stored::F32, Stored::BF16, Stored::F16][from];
        let raw = encode(&values, dtype);
        write(&dir.path().join("model.safetensors"), &[("x", vec![values.len()], dtype, raw.clone()), ("other", vec![3], Stored::F16, vec![1; 6])]);
        let w = Weights::open(dir.path()).unwrap();
        let (a, b) = (cut.0.index(values.len() + 1), cut.1.index(values.len() + 1));
        let (a, b) = (a.min(b), a.max(b));
        let exact: Vec<f32> = match dtype {
            Stored::BF16 => raw.chunks(2).map(|c| bf16::from_le_bytes([c[0], c[1]]).to_f32()).collect(),
            Stored::F16 => raw.chunks(2).map(|c| f16::from_le_bytes([c[0], c[1]]).to_f32()).collect(),
            _ => values.clone(),
        };
        let (target, name) = [(DType::F32, Stored::F32), (DType::BF16, Stored::BF16)][to];
        let mut got = vec![0u8; (b - a) * target.bytes()];
        let before = w.bytes_read();
        w.read("x", a, &mut got, target).unwrap();
        prop_assert_eq!(w.bytes_read() - before, ((b - a) * dtype.bytes()) as u64);
        prop_assert_eq!(got, encode(&exact[a..b], name));
        prop_assert!(w.read("x", a, &mut vec![0u8; (values.len() - a + 1) * target.bytes()], target).is_err());
        // The reference implementation accepts what we write and sees the same bytes.
        let file = fs::read(dir.path().join("model.safetensors")).unwrap();
        let reference = safetensors::SafeTensors::deserialize(&file).unwrap();
        prop_assert_eq!(reference.tensor("x").unwrap().data(), &raw[..]);
    }
}

/// Longer than one staging buffer, so that the pieces' seams are crossed.
#[test]
fn conversion_crosses_the_staging_buffer() {
    let dir = tempfile::tempdir().unwrap();
    let values: Vec<f32> = (0..700_001).map(|i| (i as f32 * 0.37).sin()).collect();
    write(&dir.path().join("model.safetensors"), &[("x", vec![values.len()], Stored::F32, encode(&values, Stored::F32))]);
    let w = Weights::open(dir.path()).unwrap();
    let mut got = vec![0u8; (values.len() - 5) * 2];
    w.read("x", 5, &mut got, DType::BF16).unwrap();
    assert_eq!(got, encode(&values[5..], Stored::BF16));
}

#[test]
fn threads_share_one_reader() {
    let dir = golden().join("tiny_model");
    let w = Weights::open(&dir).unwrap();
    let whole = w.read_f32("model.embed_tokens.weight").unwrap();
    std::thread::scope(|s| {
        for t in 0..4 {
            let (w, whole) = (&w, &whole);
            s.spawn(move || {
                for i in (t..whole.len() - 64).step_by(997) {
                    let mut part = [0f32; 64];
                    w.read_into_f32("model.embed_tokens.weight", i, &mut part).unwrap();
                    assert_eq!(part, whole[i..i + 64]);
                }
            });
        }
    });
}

/// Cut anywhere, the file is refused at opening, with words a user understands; a changed byte in the header never panics.
#[test]
fn truncated_and_flipped_files_are_refused() {
    let bytes = fs::read(golden().join("tiny_model/model.safetensors")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    for keep in [0, 7, 8, 100, 2000, bytes.len() / 2, bytes.len() - 1] {
        fs::write(&path, &bytes[..keep]).unwrap();
        let e = Weights::open(dir.path()).unwrap_err().to_string();
        assert!(e.contains("truncated"), "{keep}: {e}");
    }
    let mut state = 12345u32;
    for _ in 0..500 {
        let mut damaged = bytes[..4096.min(bytes.len())].to_vec();
        state = state.wrapping_mul(1664525).wrapping_add(1013904223);
        let at = state as usize >> 8;
        let n = damaged.len();
        damaged[at % n] ^= 1 << (state & 7);
        fs::write(&path, &damaged).unwrap();
        assert!(Weights::open(dir.path()).is_err());
    }
    fs::write(&path, [&u64::MAX.to_le_bytes()[..], b"{}"].concat()).unwrap();
    assert!(Weights::open(dir.path()).unwrap_err().to_string().contains("is this really safetensors"));
}

#[test]
fn validate_reports_everything_at_once() {
    let arch = ArchConfig::load(&golden().join("tiny_arch/qwen3")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let zero = |n: usize| vec![0u8; n * 4];
    let mut tensors: Vec<(String, Vec<usize>)> = arch.parameters();
    tensors.retain(|t| t.0 != "model.layers.1.mlp.up_proj.weight");
    for t in &mut tensors {
        if t.0 == "model.norm.weight" {
            t.1 = vec![3];
        }
    }
    tensors.push(("lm_head.weight".into(), vec![arch.vocab, arch.hidden]));
    tensors.push(("model.layers.0.self_attn.rotary_emb.inv_freq".into(), vec![4]));
    tensors.push(("extra".into(), vec![2]));
    let list: Vec<_> = tensors.iter().map(|(n, s)| (n.as_str(), s.clone(), Stored::F32, zero(s.iter().product()))).collect();
    write(&dir.path().join("model.safetensors"), &list);
    let e = Weights::open(dir.path()).unwrap().validate(&arch).unwrap_err().to_string();
    assert!(
        e.contains("up_proj.weight: missing")
            && e.contains("model.norm.weight: expected shape [64], got [3]")
            && e.contains("extra: unexpected"),
        "{e}"
    );
    assert!(!e.contains("lm_head") && !e.contains("inv_freq"), "{e}");
}

#[test]
fn values_that_are_not_finite_are_located() {
    let mut v = vec![1f32; 100];
    check_finite("w", bytemuck::cast_slice(&v), DType::F32).unwrap();
    v[40] = f32::NEG_INFINITY;
    v[70] = f32::NAN;
    let e = check_finite("w", bytemuck::cast_slice(&v), DType::F32).unwrap_err().to_string();
    assert!(e.contains("'w': element 40 is -inf; 2 of 100"), "{e}");
    let e = check_finite("w", &encode(&v, Stored::BF16), DType::BF16).unwrap_err().to_string();
    assert!(e.contains("element 40"), "{e}");
}

/// Written in shards and read again: the same bits, an index, the companions, the dtype in config.json.
#[test]
fn export_in_shards_reads_back() {
    let base = golden().join("tiny_model");
    let source = Weights::open(&base).unwrap();
    let arch = ArchConfig::load(&base).unwrap();
    let top = tempfile::tempdir().unwrap();
    let out = top.path().join("out");
    for (dtype, target, max) in [(Stored::F32, DType::F32, 100_000), (Stored::BF16, DType::BF16, u64::MAX)] {
        let specs: Vec<TensorSpec> = arch.parameters().into_iter().map(|(name, shape)| TensorSpec { name, shape, dtype }).collect();
        let exported =
            export_model(&out, &base, &specs, max, &mut |s, start, bytes| Ok(source.read(&s.name, start, bytes, target)?)).unwrap();
        assert_eq!(exported.files.len() > 1, max < u64::MAX);
        let back = Weights::open(&out).unwrap();
        assert_eq!(ArchConfig::load(&out).unwrap().dtype.as_deref(), Some(if dtype == Stored::F32 { "float32" } else { "bfloat16" }));
        back.validate(&arch).unwrap();
        for name in source.names() {
            let n = source.tensor(name).unwrap().elems() * target.bytes();
            let (mut a, mut b) = (vec![0u8; n], vec![0u8; n]);
            source.read(name, 0, &mut a, target).unwrap();
            back.read(name, 0, &mut b, target).unwrap();
            assert_eq!(a, b, "{name}");
        }
        assert_eq!(out.join("model.safetensors.index.json").is_file(), max < u64::MAX);
    }
    // A producer that fails, and a tensor whose shards were never gathered: the old directory stays, nothing is left beside it.
    let before = fs::read(out.join("model.safetensors")).unwrap();
    let one = |shape: Vec<usize>| [TensorSpec { name: "w".into(), shape, dtype: Stored::F32 }];
    assert!(
        export_model(&out, &base, &one(vec![8]), u64::MAX, &mut |_, _, _| Err("rank 1 is gone".into()))
            .unwrap_err()
            .to_string()
            .contains("rank 1 is gone")
    );
    assert!(export_model(&out, &base, &one(vec![0]), u64::MAX, &mut |_, _, _| Ok(())).unwrap_err().to_string().contains("not gathered"));
    assert_eq!(fs::read(out.join("model.safetensors")).unwrap(), before);
    assert_eq!(fs::read_dir(top.path()).unwrap().count(), 1);
}
