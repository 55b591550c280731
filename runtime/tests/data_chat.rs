//! Do chat templates give the text, the ids and the mask that transformers gives? Golden data: tests/golden/chat, made by
//! tests/tools/make_chat_golden.py. All comparisons are exact.

use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use zrt::config::{DatasetConfig, DatasetKind};
use zrt::data::{ChatTemplate, Conversation, PrepareSpec, TokenSet, Tokenizer, prepare};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/chat").join(name)
}

fn read(name: &str) -> String {
    std::fs::read_to_string(golden(name)).unwrap()
}

/// A model folder with the golden tokenizer, the special tokens of `format` and `template` in `chat_template.jinja`.
fn folder(special: &Value, template: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(golden("tokenizer.json"), dir.path().join("tokenizer.json")).unwrap();
    std::fs::write(dir.path().join("tokenizer_config.json"), special.to_string()).unwrap();
    std::fs::write(dir.path().join("chat_template.jinja"), template).unwrap();
    dir
}

fn row(case: &Value) -> Value {
    let mut row = json!({ "messages": case["messages"], "chat_template_kwargs": case["extra"] });
    if !case["tools"].is_null() {
        row["tools"] = case["tools"].clone();
    }
    row
}

fn tokens(dir: &Path, rows: &[Value], kind: DatasetKind) -> Result<TokenSet, zrt::data::DataError> {
    let path = dir.join("rows.jsonl");
    std::fs::write(&path, rows.iter().map(|r| format!("{r}\n")).collect::<String>()).unwrap();
    prepare(
        &PrepareSpec {
            datasets: vec![DatasetConfig { path, kind }],
            tokenizer_folder: dir.to_path_buf(),
            chat_template: None,
            train_on_inputs: false,
            seq_len: 1 << 20,
            cache_folder: Some(dir.join("cache")),
            now_secs: Some(0),
        },
        false,
    )
}

fn render(tokenizer: &Tokenizer, case: &Value, add_generation_prompt: bool) -> Result<String, String> {
    let tools = Some(&case["tools"]).filter(|t| !t.is_null());
    let conversation = Conversation {
        messages: case["messages"].as_array().unwrap(),
        tools,
        documents: None,
        extra: case["extra"].as_object(),
        special: tokenizer.special(),
        now_secs: 0,
    };
    tokenizer.template(tools.is_some()).unwrap().render(&conversation, add_generation_prompt).map(|r| r.text)
}

fn check(format: &str, template: &str) {
    check_but(format, template, "");
}

fn check_but(format: &str, template: &str, skipped: &str) {
    let data: Value = serde_json::from_str(&read(&format!("{format}.json"))).unwrap();
    let dir = folder(&data["special"], template);
    let tokenizer = Tokenizer::load(dir.path(), None).unwrap();
    for case in data["cases"].as_array().unwrap() {
        if case["name"] == skipped {
            continue;
        }
        let what = format!("{format} / {}", case["name"]);
        if let Some(error) = case["error"].as_str() {
            let ours = render(&tokenizer, case, false).unwrap_err();
            assert!(ours.contains(error), "{what}: transformers says {error:?}, we say {ours:?}");
            continue;
        }
        assert_eq!(render(&tokenizer, case, false).unwrap(), case["text"].as_str().unwrap(), "{what}");
        assert_eq!(render(&tokenizer, case, true).unwrap(), case["prompt_text"].as_str().unwrap(), "{what}, generation prompt");
        let set = tokens(dir.path(), &[row(case)], DatasetKind::Messages).unwrap_or_else(|e| panic!("{what}: {e}"));
        let numbers = |key: &str| -> Vec<u32> { case[key].as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect() };
        let ids = set.document(0).ids;
        assert_eq!(ids, numbers("ids"), "{what}: ids");
        let mask: Vec<u32> = set.document(0).trained.iter().map(|&t| u32::from(t)).collect();
        assert_eq!(marked_text(&tokenizer, ids, &mask), marked_text(&tokenizer, ids, &numbers("mask")), "{what}");
        assert_eq!(mask, numbers("mask"), "{what}: mask");
    }
}

fn marked_text(tokenizer: &Tokenizer, ids: &[u32], mask: &[u32]) -> String {
    ids.iter().zip(mask).map(|(&id, &m)| if m == 1 { format!("[{}]", tokenizer.decode(&[id])) } else { tokenizer.decode(&[id]) }).collect()
}

#[test]
fn chatml() {
    check("chatml", &read("chatml.jinja"));
    check("chatml", &read("chatml.marked.jinja"));
}

#[test]
fn llama3() {
    check("llama3", &read("llama3.jinja"));
    check("llama3", &read("llama3.marked.jinja"));
}

#[test]
fn mistral() {
    check("mistral", &read("mistral.jinja"));
    check("mistral", &read("mistral.marked.jinja"));
}

#[test]
fn qwen3() {
    check("qwen3", &read("qwen3.jinja"));
}

/// Under markers an empty reasoning block is trained even where the generation prompt holds it already; the case with
/// `enable_thinking = false` is therefore for the derived mask alone.
#[test]
fn qwen3_with_generation_markers() {
    check_but("qwen3", &read("qwen3.marked.jinja"), "no_thinking");
}

#[test]
fn markers_that_stop_before_the_end_of_turn_still_train_it() {
    let whole = "            {{- message['content'] + '<|im_end|>' }}\n        {%- endgeneration %}\n        {{- '\\n' }}";
    let short = "            {{- message['content'] }}\n        {%- endgeneration %}\n        {{- '<|im_end|>\\n' }}";
    let template = read("chatml.marked.jinja");
    assert!(template.contains(whole));
    check("chatml", &template.replace(whole, short));
}

/// Contents that imitate the format: the mask that is derived equals the one that the markers give.
#[test]
fn derived_masks_equal_marked_masks() {
    let pieces =
        ["ok", " ", "\n", "<|im_end|>", "assistant\n", "<|im_start|>", "é", "</s>", "[INST] ok", "<|eot_id|>", "\u{fdd0}", "{{ x }}"];
    let content = |seed: u32| -> String {
        let word = zrt_kernels::philox::philox4x32([seed, 0, 0, 0], [7, 7]);
        // One visible word, so that no answer is empty.
        let picked: String = word[..3].iter().map(|w| pieces[*w as usize % pieces.len()]).collect();
        format!("{picked}w{picked}")
    };
    for format in ["chatml", "llama3", "mistral", "qwen3"] {
        let data: Value = serde_json::from_str(&read(&format!("{format}.json"))).unwrap();
        let rows: Vec<Value> = (0..60u32)
            .map(|i| {
                let turns = 1 + i % 3;
                let mut messages: Vec<Value> = (0..2 * turns)
                    .map(|t| json!({"role": if t % 2 == 0 { "user" } else { "assistant" }, "content": content(i * 100 + t)}))
                    .collect();
                if i % 2 == 0 {
                    messages.insert(0, json!({"role": "system", "content": content(i)}));
                }
                json!({ "messages": messages })
            })
            .collect();
        let [derived, marked] = ["jinja", "marked.jinja"].map(|kind| {
            let dir = folder(&data["special"], &read(&format!("{format}.{kind}")));
            tokens(dir.path(), &rows, DatasetKind::Messages).unwrap()
        });
        for (d, row) in rows.iter().enumerate() {
            let (a, b) = (derived.document(d), marked.document(d));
            assert_eq!((a.ids, a.trained), (b.ids, b.trained), "{format}: {row}");
        }
    }
}

#[test]
fn values_print_as_in_python() {
    let data: Value = serde_json::from_str(&read("values.json")).unwrap();
    let template = ChatTemplate::new(&read("values.jinja")).unwrap();
    let special = Map::new();
    let conversation = Conversation {
        messages: data["messages"].as_array().unwrap(),
        tools: None,
        documents: None,
        extra: None,
        special: &special,
        now_secs: 0,
    };
    let ours = template.render(&conversation, false).unwrap().text;
    let golden = data["text"].as_str().unwrap();
    let differing: Vec<_> = ours.split('\n').zip(golden.split('\n')).filter(|(a, b)| a != b).collect();
    assert_eq!(ours, golden, "{differing:#?}");
}
