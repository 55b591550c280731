//! `config.json` as transformers 4 and 5 write it, hostile numbers, and the names and shapes of real files.

use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use zrt::hf::{ArchConfig, Architecture, Rope, Weights};

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden")
}

fn parse(v: &Value) -> Result<ArchConfig, String> {
    ArchConfig::parse(&v.to_string(), Path::new("config.json")).map_err(|e| e.to_string())
}

fn llama() -> Value {
    json!({"architectures": ["LlamaForCausalLM"], "vocab_size": 256, "hidden_size": 64, "intermediate_size": 176,
           "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5})
}

fn with(mut v: Value, pairs: &[(&str, Value)]) -> Value {
    for (k, x) in pairs {
        v[*k] = x.clone();
    }
    v
}

/// Names and shapes derived from each configuration are exactly those in the file that transformers wrote.
#[test]
fn parameters_equal_the_files_of_transformers() {
    for dir in ["tiny_model", "tiny_arch/llama3_rope", "tiny_arch/mistral", "tiny_arch/qwen2", "tiny_arch/qwen3"] {
        let dir = golden().join(dir);
        let arch = ArchConfig::load(&dir).unwrap();
        let weights = Weights::open(&dir).unwrap();
        weights.validate(&arch).unwrap();
        let elems: usize = weights.names().iter().map(|n| weights.tensor(n).unwrap().elems()).sum();
        assert_eq!(arch.parameter_count(), elems as u64, "{}", dir.display());
        assert_eq!(arch.parameters().len(), weights.names().len());
    }
}

#[test]
fn versions_4_and_5_say_the_same() {
    let scaling = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64});
    let four = with(llama(), &[("rope_theta", json!(500000)), ("rope_scaling", scaling.clone()), ("torch_dtype", json!("bfloat16"))]);
    let mut inner = scaling;
    inner["rope_theta"] = json!(500000.0);
    let five = with(llama(), &[("rope_parameters", inner), ("dtype", json!("bfloat16"))]);
    let (four, five) = (parse(&four).unwrap(), parse(&five).unwrap());
    assert_eq!(four, five);
    assert_eq!(four.rope, Rope::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original_max: 64 });
    assert_eq!((four.rope_theta, four.dtype.as_deref()), (500000.0, Some("bfloat16")));
    let old = with(llama(), &[("rope_scaling", json!({"type": "linear", "factor": 2}))]);
    assert_eq!(parse(&old).unwrap().rope, Rope::Linear { factor: 2.0 });
    assert_eq!(parse(&with(llama(), &[("rope_scaling", Value::Null)])).unwrap().rope, Rope::Default);
}

#[test]
fn families_differ_as_in_transformers() {
    let named = |name: &str, pairs: &[(&str, Value)]| {
        let v = with(llama(), &[("architectures", json!([name]))]);
        parse(&with(v, pairs)).unwrap()
    };
    let l = named("LlamaForCausalLM", &[("attention_bias", json!(true)), ("mlp_bias", json!(true))]);
    assert!(l.qkv_bias && l.o_bias && l.mlp_bias && !l.qk_norm);
    assert_eq!(l.head_dim, 16);
    let q2 = named("Qwen2ForCausalLM", &[]);
    assert!(q2.qkv_bias && !q2.o_bias && !q2.mlp_bias);
    let q3 = named("Qwen3ForCausalLM", &[]);
    assert!(q3.qk_norm && !q3.qkv_bias);
    assert_eq!((q3.architecture, q3.head_dim), (Architecture::Qwen3, 128));
    // The class default of Mistral is a window of 4096; null turns it off.
    assert_eq!(named("MistralForCausalLM", &[]).windows, [Some(4096); 2]);
    assert_eq!(named("MistralForCausalLM", &[("sliding_window", Value::Null)]).windows, [None; 2]);
    let sliding = [("use_sliding_window", json!(true)), ("sliding_window", json!(128)), ("max_window_layers", json!(1))];
    assert_eq!(named("Qwen2ForCausalLM", &sliding).windows, [None, Some(128)]);
    let off = [("sliding_window", json!(128)), ("max_window_layers", json!(0))];
    assert_eq!(named("Qwen2ForCausalLM", &off).windows, [None; 2]);
    let types = [
        ("use_sliding_window", json!(true)),
        ("sliding_window", json!(8)),
        ("layer_types", json!(["sliding_attention", "full_attention"])),
    ];
    assert_eq!(named("Qwen3ForCausalLM", &types).windows, [Some(8), None]);
    assert_eq!(named("LlamaForCausalLM", &[("sliding_window", json!(8))]).windows, [None; 2]);
}

/// Every message names the key, what was expected and what is there.
#[test]
fn hostile_numbers_are_named() {
    let cases: &[(&str, Value, &[&str])] = &[
        ("hidden_size", json!(0), &["hidden_size", "from 1", "got 0"]),
        ("hidden_size", json!(-64), &["hidden_size", "got -64"]),
        ("hidden_size", json!(1u64 << 60), &["hidden_size", "got 1152921504606846976"]),
        ("hidden_size", json!(65), &["hidden_size", "multiple of num_attention_heads (4)", "got 65"]),
        ("num_attention_heads", json!("4"), &["num_attention_heads", "got \"4\""]),
        ("num_key_value_heads", json!(3), &["num_key_value_heads", "divisor of num_attention_heads (4)", "got 3"]),
        ("head_dim", json!(15), &["head_dim", "even", "15"]),
        ("num_hidden_layers", json!(1_000_000_000), &["num_hidden_layers", "4096"]),
        ("vocab_size", Value::Null, &["vocab_size", "got nothing"]),
        ("rms_norm_eps", json!(-1.0), &["rms_norm_eps", "got -1.0"]),
        ("rope_theta", json!(0.0), &["rope_theta", "got 0.0"]),
        ("rope_scaling", json!({"type": "longrope"}), &["rope_scaling.type", "yarn", "longrope"]),
        ("rope_scaling", json!({"type": "linear"}), &["rope_scaling.factor", "got nothing"]),
        ("rope_scaling", json!({"type": "linear", "factor": 0.0}), &["rope_scaling.factor", "got 0.0"]),
        ("rope_parameters", json!(7), &["rope_parameters", "object"]),
        ("hidden_act", json!("gelu"), &["hidden_act", "silu", "gelu"]),
        ("tie_word_embeddings", json!("yes"), &["tie_word_embeddings", "true or false"]),
        ("architectures", json!(["GPT2LMHeadModel"]), &["GPT2LMHeadModel", "LlamaForCausalLM", "Qwen3ForCausalLM"]),
        ("architectures", json!([]), &["architectures"]),
        ("quantization_config", json!({"bits": 4}), &["quantized"]),
        ("partial_rotary_factor", json!(0.5), &["partial_rotary_factor", "0.5"]),
    ];
    for (key, value, words) in cases {
        let mut v = with(llama(), &[(key, value.clone())]);
        if value.is_null() {
            v.as_object_mut().unwrap().remove(*key);
        }
        let e = parse(&v).expect_err(key);
        for word in *words {
            assert!(e.contains(word), "{key}: '{word}' is not in: {e}");
        }
    }
    let cut = ArchConfig::parse("{\"architectures\": [", Path::new("x/config.json")).unwrap_err().to_string();
    assert!(cut.contains("x/config.json") && cut.contains("line 1"), "{cut}");
}
