//! Adapters: which layers PEFT would adapt, files in and out, and what is refused.

use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use zrt::checkpoint::BaseId;
use zrt::config::{LoraConfig, TargetModules};
use zrt::hf::{ArchConfig, Stored, Weights};
use zrt::peft::file::zero_b;
use zrt::peft::{AdapterConfig, AdapterTensor, LoraPlan, load_adapter, save_adapter};

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden")
}

fn tiny() -> ArchConfig {
    ArchConfig::load(&golden().join("tiny_model")).unwrap()
}

fn lora(targets: &[&str]) -> LoraConfig {
    LoraConfig { target_modules: TargetModules::List(targets.iter().map(|t| t.to_string()).collect()), ..LoraConfig::default() }
}

/// tests/tools/make_peft_golden.py: modules, ranks and scales for suffixes, patterns, exclusions and rsLoRA.
#[test]
fn targets_equal_those_of_peft() {
    let cases: Vec<Value> = serde_json::from_str(&fs::read_to_string(golden().join("peft/cases.json")).unwrap()).unwrap();
    assert!(cases.len() >= 18);
    for case in &cases {
        let name = case["name"].as_str().unwrap();
        let config = AdapterConfig::parse(&case["config"].to_string(), Path::new(name)).unwrap();
        let plan = LoraPlan::of(&config, &tiny()).unwrap();
        let want = case["targets"].as_array().unwrap();
        assert_eq!(plan.targets.len(), want.len(), "{name}");
        for (got, want) in plan.targets.iter().zip(want) {
            assert_eq!((got.path.as_str(), got.r as u64), (want[0].as_str().unwrap(), want[1].as_u64().unwrap()), "{name}");
            assert_eq!(got.scale, want[2].as_f64().unwrap() as f32, "{name}: {}", got.path);
        }
        // What we write is explicit, and means the same when read again.
        let again = AdapterConfig::parse(&plan.config.to_json(), Path::new(name)).unwrap();
        assert_eq!(LoraPlan::of(&again, &tiny()).unwrap().targets, plan.targets, "{name}");
        assert!(!plan.config.to_json().contains("all-linear"));
    }
}

#[test]
fn the_toml_form_plans_and_explains() {
    let plan = LoraPlan::new(&LoraConfig::default(), &tiny()).unwrap();
    assert_eq!(plan.targets.len(), 14);
    assert_eq!(plan.parameters()[1], ("base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight".to_owned(), vec![64, 8]));
    let named = |s: &str| LoraConfig { target_modules: TargetModules::Named(s.into()), ..LoraConfig::default() };
    assert_eq!(LoraPlan::new(&named("q_proj"), &tiny()).unwrap().targets.len(), 2);
    assert_eq!(LoraPlan::new(&named(r".*layers\.1\..*"), &tiny()).unwrap().targets.len(), 7);
    let refused = |config: &LoraConfig, words: &[&str]| {
        let e = LoraPlan::new(config, &tiny()).unwrap_err().to_string();
        assert!(words.iter().all(|w| e.contains(w)), "{e}");
    };
    refused(&lora(&["q_proj", "qproj"]), &["target_modules", "\"qproj\"", "q_proj, k_proj", "down_proj"]);
    refused(&lora(&["lm_head"]), &["lm_head", "not supported"]);
    refused(&named("("), &["not a regular expression"]);
    refused(&named("q_pro."), &["matches no whole module path"]);
    let ranks = |pairs: &[(&str, usize)]| LoraConfig {
        rank_pattern: pairs.iter().map(|(k, r)| (k.to_string(), *r)).collect(),
        ..lora(&["q_proj"])
    };
    refused(&ranks(&[("v_proj", 4)]), &["rank_pattern", "v_proj", "matches no adapted layer"]);
    refused(&ranks(&[("q_proj", 4), (".*proj", 2)]), &["both match", "exclusive"]);
    refused(&ranks(&[("q_proj", 0)]), &["at least 1"]);
}

#[test]
fn what_cannot_be_honoured_is_refused_with_the_reason() {
    let text = fs::read_to_string(golden().join("tiny_lora/adapter_init/adapter_config.json")).unwrap();
    let base: Value = serde_json::from_str(&text).unwrap();
    let ok = AdapterConfig::parse(&text, Path::new("a.json")).unwrap();
    assert_eq!((ok.r, ok.alpha, ok.base_model.as_deref()), (16, 32.0, Some("golden/tiny_model")));
    let minimal = json!({"peft_type": "LORA", "target_modules": ["q_proj"], "r": 4, "use_bdlora": null});
    AdapterConfig::parse(&minimal.to_string(), Path::new("a.json")).unwrap();
    for (key, value) in [
        ("use_dora", json!(true)),
        ("modules_to_save", json!(["lm_head"])),
        ("bias", json!("all")),
        ("lora_bias", json!(true)),
        ("fan_in_fan_out", json!(true)),
        ("init_lora_weights", json!("pissa")),
        ("init_lora_weights", json!("loftq")),
        ("target_parameters", json!(["experts"])),
        ("trainable_token_indices", json!([1])),
        ("use_qalora", json!(true)),
        ("some_future_method", json!({"x": 1})),
        ("peft_type", json!("IA3")),
        ("task_type", json!("SEQ_CLS")),
        ("layers_to_transform", json!("x")),
        ("r", json!(0)),
        ("r", json!(-1)),
        ("lora_alpha", json!("x")),
        ("lora_dropout", json!(1.5)),
        ("target_modules", Value::Null),
    ] {
        let mut v = base.clone();
        v[key] = value;
        let e = AdapterConfig::parse(&v.to_string(), Path::new("a.json")).expect_err(key).to_string();
        assert!(e.contains(key) && e.contains("a.json"), "{e}");
    }
}

/// Golden adapter -> memory -> our folder -> memory: the same names, bits and meaning.
#[test]
fn a_golden_adapter_survives_saving() {
    let source = golden().join("tiny_lora/adapter_final");
    let adapter = load_adapter(&source, &tiny()).unwrap();
    assert!(adapter.plan.targets.iter().all(|t| t.scale == 2.0 && t.r == 16));
    let values: BTreeMap<String, Vec<f32>> =
        adapter.weights.names().iter().map(|n| (n.clone(), adapter.weights.read_f32(n).unwrap())).collect();
    let tensors: Vec<AdapterTensor> =
        adapter.plan.parameters().into_iter().map(|(name, shape)| AdapterTensor { values: &values[&name], name, shape }).collect();
    let top = tempfile::tempdir().unwrap();
    let dir = top.path().join("adapter");
    let base = BaseId::of(&golden().join("tiny_model"), &Weights::open(&golden().join("tiny_model")).unwrap()).unwrap();
    save_adapter(&dir, &adapter.plan.config, &tensors, Some(&base)).unwrap();
    let again = load_adapter(&dir, &tiny()).unwrap();
    assert_eq!(again.plan.targets, adapter.plan.targets);
    assert_eq!(again.base.as_ref(), Some(&base));
    for (name, v) in &values {
        assert_eq!(again.weights.read_f32(name).unwrap(), *v);
    }
    assert!(zero_b(&tensors).is_empty());

    // Whatever is refused leaves the saved adapter and nothing else.
    let bytes = fs::read(dir.join("adapter_model.safetensors")).unwrap();
    let poisoned = [1.0, f32::NAN];
    let bad: [(&[f32], Vec<usize>, &str); 3] =
        [(&[], vec![0, 4], "at least one element"), (&[1.0], vec![2, 2], "got 1 elements"), (&poisoned, vec![2], "NaN")];
    for (values, shape, word) in bad {
        let t = [AdapterTensor { name: "base_model.model.x.lora_B.weight".into(), shape, values }];
        let e = save_adapter(&dir, &adapter.plan.config, &t, None).unwrap_err().to_string();
        assert!(e.contains(word) && e.contains("lora_B"), "{e}");
    }
    let blocked = top.path().join("adapter/adapter_config.json/sub");
    assert!(save_adapter(&blocked, &adapter.plan.config, &tensors, None).unwrap_err().to_string().contains("cannot create"));
    assert_eq!(fs::read(dir.join("adapter_model.safetensors")).unwrap(), bytes);
    assert_eq!(fs::read_dir(top.path()).unwrap().count(), 1);
}

#[test]
fn a_fresh_adapter_is_recognized_as_dead() {
    let adapter = load_adapter(&golden().join("tiny_lora/adapter_init"), &tiny()).unwrap();
    let b = adapter.b(&adapter.plan.targets[0]).unwrap();
    let t = [AdapterTensor { name: adapter.plan.targets[0].b_name(), shape: vec![64, 16], values: &b }];
    assert_eq!(zero_b(&t), ["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"]);
}

#[test]
fn adapters_of_other_shapes_or_names_are_named() {
    let e =
        load_adapter(&golden().join("tiny_lora/adapter_init"), &ArchConfig::load(&golden().join("tiny_arch/qwen3")).unwrap()).unwrap_err();
    let e = e.to_string();
    assert!(e.contains("mlp.up_proj.lora_B.weight: expected shape [96, 16], got [176, 16]"), "{e}");
    let top = tempfile::tempdir().unwrap();
    let dir = top.path();
    fs::copy(golden().join("tiny_lora/adapter_init/adapter_config.json"), dir.join("adapter_config.json")).unwrap();
    fs::write(dir.join("adapter_model.bin"), b"x").unwrap();
    assert!(load_adapter(dir, &tiny()).unwrap_err().to_string().contains("pickle"));
    let spec = [zrt::hf::export::TensorSpec {
        name: "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight".into(),
        shape: vec![1],
        dtype: Stored::F32,
    }];
    zrt::hf::export::write_safetensors(&dir.join("adapter_model.safetensors"), &spec, &mut |_, _, _| Ok(())).unwrap();
    let e = load_adapter(dir, &tiny()).unwrap_err().to_string();
    assert!(e.contains("missing") && e.contains("lora_A.default.weight: unexpected"), "{e}");
}

/// `lora.adapter_path`: the adapter's own numbers win, and a key that says otherwise is an error.
#[test]
fn continuing_from_an_adapter() {
    let path = golden().join("tiny_lora/adapter_final");
    let from = |change: &dyn Fn(&mut LoraConfig)| {
        let mut c = LoraConfig { adapter_path: Some(path.clone()), ..LoraConfig::default() };
        change(&mut c);
        LoraPlan::new(&c, &tiny())
    };
    assert_eq!(from(&|_| {}).unwrap().targets[0].r, 16);
    assert_eq!(from(&|c| c.r = 16).unwrap().targets.len(), 14);
    assert!(from(&|c| c.r = 4).unwrap_err().to_string().contains("lora.r is 4"));
    assert!(from(&|c| c.alpha = 1.0).unwrap_err().to_string().contains("lora.alpha is 1"));
    assert!(from(&|c| c.target_modules = TargetModules::List(vec!["q_proj".into()])).unwrap_err().to_string().contains("target_modules"));
}
