//! Rotary frequencies and tables against transformers (tests/tools/make_rope_golden.py).

use serde_json::Value;
use std::path::Path;
use zrt::hf::{ArchConfig, rope};

fn floats(v: &Value) -> Vec<f32> {
    v.as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect()
}

#[test]
fn every_variant_equals_transformers() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/rope/cases.json");
    let cases: Vec<Value> = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    assert!(cases.len() >= 12);
    for case in &cases {
        let name = case["name"].as_str().unwrap();
        let arch = ArchConfig::parse(&case["config"].to_string(), Path::new(name)).unwrap();
        let seq_len = case["seq_len"].as_u64().unwrap() as usize;
        let (inv, factor) = rope::inverse_frequencies(&arch, seq_len);
        let want = floats(&case["inv_freq"]);
        assert_eq!(inv.len(), want.len(), "{name}");
        for (i, (got, want)) in inv.iter().zip(&want).enumerate() {
            // PyTorch's vector pow is good to one unit in the last place (6e-8 relative), ours to half of one; later divisions and the ramps add as much again.
            assert!((got - want).abs() <= 3e-7 * want.abs(), "{name}: inv_freq[{i}] = {got}, expected {want}");
        }
        assert!((f64::from(factor) - case["attention_factor"].as_f64().unwrap()).abs() <= 1e-7, "{name}: factor {factor}");
        let table = rope::rope_table(&arch, seq_len);
        let (d, half) = (arch.head_dim, arch.head_dim / 2);
        assert_eq!(table.len(), seq_len * d);
        for (k, p) in case["positions"].as_array().unwrap().iter().enumerate() {
            let p = p.as_u64().unwrap() as usize;
            let row = &table[p * d..(p + 1) * d];
            for (got, want) in row.iter().zip(floats(&case["cos"][k]).iter().chain(&floats(&case["sin"][k]))) {
                // An angle of p radians carries p times the relative error of its frequency; cos and sin pass it on at most once.
                let tolerance = 3e-7 * (p as f32 + 2.0) * factor;
                assert!((got - want).abs() <= tolerance, "{name}: position {p}: {got}, expected {want}");
            }
            assert_eq!(row.len(), 2 * half);
        }
    }
}
