//! Rows to tokens: the formats, their errors, truncation and dropping, and the cache. The tokenizer is the golden one; it adds a
//! begin of text, and its padding token equals its end of sequence.

use serde_json::json;
use std::path::{Path, PathBuf};
use zrt::config::{DatasetConfig, DatasetKind};
use zrt::data::{DataError, Length, PrepareSpec, Schedule, ScheduleSpec, TokenSet, Tokenizer, prepare, show};

const CHATML: &str = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}\
                      {% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Folder {
        let dir = tempfile::tempdir().unwrap();
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/chat/tokenizer.json");
        // Links, as in the Hugging Face cache.
        std::fs::create_dir(dir.path().join("blobs")).unwrap();
        std::fs::copy(golden, dir.path().join("blobs/1")).unwrap();
        std::os::unix::fs::symlink("blobs/1", dir.path().join("tokenizer.json")).unwrap();
        let config = json!({
            "bos_token": "<|begin_of_text|>",
            "eos_token": {"content": "<|im_end|>", "special": true},
            "pad_token": "<|im_end|>",
            "chat_template": [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": format!("T{CHATML}")}],
        });
        std::fs::write(dir.path().join("tokenizer_config.json"), config.to_string()).unwrap();
        Folder(dir)
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    }

    fn spec(&self, kind: DatasetKind, text: &str) -> PrepareSpec {
        PrepareSpec {
            datasets: vec![DatasetConfig { path: self.write("rows.jsonl", text), kind }],
            tokenizer_folder: self.path().to_path_buf(),
            chat_template: None,
            train_on_inputs: false,
            seq_len: 4096,
            cache_folder: Some(self.path().join("cache")),
            now_secs: Some(0),
        }
    }

    fn tokenizer(&self) -> Tokenizer {
        Tokenizer::load(self.path(), None).unwrap()
    }

    /// Text with `[...]` around what is trained.
    fn marked(&self, set: &TokenSet, document: usize) -> String {
        let tokenizer = self.tokenizer();
        let doc = set.document(document);
        let mut out = String::new();
        let mut on = 0;
        for (&id, &trained) in doc.ids.iter().zip(doc.trained) {
            if trained != on {
                out.push(if trained == 1 { '[' } else { ']' });
                on = trained;
            }
            out.push_str(&tokenizer.decode(&[id]));
        }
        if on == 1 {
            out.push(']');
        }
        out
    }
}

#[test]
fn formats_and_masks() {
    let folder = Folder::new();
    for (kind, row, expected) in [
        (
            DatasetKind::Messages,
            json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, {"role": "assistant", "content": "c"}]}),
            "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n[c<|im_end|>]\n",
        ),
        (
            DatasetKind::Messages,
            json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}], "tools": "[{\"name\": \"f\"}]"}),
            "T<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[c<|im_end|>]\n",
        ),
        (DatasetKind::PromptCompletion, json!({"prompt": "ab ", "completion": "cd"}), "<|begin_of_text|>ab [cd<|im_end|>]"),
        (
            DatasetKind::PromptCompletion,
            json!({"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}], "completion": [{"role": "assistant", "content": "d"}]}),
            "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n[d<|im_end|>]\n",
        ),
        (
            DatasetKind::Alpaca,
            json!({"instruction": "I", "input": "", "output": "O"}),
            "<|begin_of_text|>Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n### Instruction:\nI\n\n### Response:\n[O<|im_end|>]",
        ),
        (
            DatasetKind::Alpaca,
            json!({"instruction": "I", "input": "N", "output": "O"}),
            "<|begin_of_text|>Below is an instruction that describes a task, paired with an input that provides further context. Write a response that appropriately completes the request.\n\n### Instruction:\nI\n\n### Input:\nN\n\n### Response:\n[O<|im_end|>]",
        ),
        (DatasetKind::Text, json!({"text": "all"}), "[<|begin_of_text|>all<|im_end|>]"),
    ] {
        let set = prepare(&folder.spec(kind, &row.to_string()), false).unwrap();
        assert_eq!(folder.marked(&set, 0), expected, "{row}");
    }
}

#[test]
fn train_on_inputs_trains_everything() {
    let folder = Folder::new();
    let row = json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}]}).to_string();
    let set = prepare(&PrepareSpec { train_on_inputs: true, ..folder.spec(DatasetKind::Messages, &row) }, false).unwrap();
    assert!(set.document(0).trained.iter().all(|&t| t == 1));
}

#[test]
fn tokenized_rows_need_no_tokenizer() {
    let folder = Folder::new();
    let rows = "{\"input_ids\": [5, 6, 7], \"labels\": [-100, 6, 7]}\n\n{\"input_ids\": [8, 9]}\n";
    let spec = PrepareSpec { tokenizer_folder: "/nonexistent".into(), ..folder.spec(DatasetKind::Tokenized, rows) };
    let set = prepare(&spec, false).unwrap();
    assert_eq!((set.document(0).ids, set.document(0).trained), (&[5, 6, 7][..], &[0, 1, 1][..]));
    assert_eq!(set.name(set.document(1).source), format!("{}:3", folder.path().join("rows.jsonl").display()));
    assert_eq!(set.report().trained, 3);
}

#[test]
fn text_is_split_and_the_rest_is_cut() {
    let folder = Folder::new();
    let text = json!({"text": "x y z ".repeat(40)}).to_string();
    let set = prepare(&PrepareSpec { seq_len: 16, ..folder.spec(DatasetKind::Text, &text) }, false).unwrap();
    assert!(set.documents() > 5 && set.longest_tokens() == 16);
    assert_eq!((set.report().truncated, set.report().split), (0, set.documents() as u64 - 1));

    let long_prompt = json!({"prompt": "x y z ".repeat(40), "completion": "c"});
    let rows = format!(
        "{}\n{}\n{long_prompt}\n",
        json!({"prompt": "a", "completion": "b"}),
        json!({"prompt": "a", "completion": "x y z ".repeat(40)})
    );
    let set = prepare(&PrepareSpec { seq_len: 16, ..folder.spec(DatasetKind::PromptCompletion, &rows) }, false).unwrap();
    let report = set.report();
    assert_eq!((report.rows, report.documents, report.truncated, report.dropped), (3, 2, 2, 1));
    assert!(report.dropped_examples[0].ends_with("rows.jsonl:3"), "{report}");
    assert!(report.to_string().contains("rows.jsonl:3"));
}

#[test]
fn errors_name_the_line_and_what_was_expected() {
    let folder = Folder::new();
    let good = json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}]});
    for (kind, bad, expected) in [
        (DatasetKind::Messages, "{\"messages\": [", "not a JSON object"),
        (DatasetKind::Messages, "[1]", "expected a JSON object"),
        (DatasetKind::Messages, "{\"conversations\": []}", "keys here: [\"conversations\"]"),
        (DatasetKind::Messages, "{\"messages\": []}", "is empty"),
        (DatasetKind::Messages, "{\"messages\": [{\"content\": \"x\"}]}", "expected \"role\""),
        (DatasetKind::Messages, "{\"messages\": [{\"role\": \"user\"}]}", "expected \"content\""),
        (DatasetKind::Messages, "{\"messages\": [{\"role\": \"user\", \"content\": [{\"type\": \"image\"}]}]}", "only text"),
    ] {
        let error = prepare(&folder.spec(kind, &format!("{good}\n{bad}\n")), false).unwrap_err().to_string();
        assert!(error.contains("rows.jsonl:2: ") && error.contains(expected), "{bad} -> {error}");
    }
    for (kind, bad, expected) in [
        (DatasetKind::PromptCompletion, "{\"prompt\": \"x\"}", "both strings or both lists"),
        (DatasetKind::Alpaca, "{\"instruction\": 3, \"output\": \"\"}", "expected \"instruction\", a string, got a number"),
        (DatasetKind::Text, "{\"txt\": \"x\"}", "expected \"text\""),
        (DatasetKind::Tokenized, "{\"input_ids\": [1, -2]}", "holds -2"),
        (DatasetKind::Tokenized, "{\"input_ids\": [1, 2], \"labels\": [2, 3]}", "not shifted"),
        (DatasetKind::Tokenized, "{\"input_ids\": [1, 2], \"labels\": [2]}", "one label per id"),
    ] {
        let error = prepare(&folder.spec(kind, bad), false).unwrap_err().to_string();
        assert!(error.contains("rows.jsonl:1: ") && error.contains(expected), "{bad} -> {error}");
    }
    let empty = prepare(&folder.spec(DatasetKind::Text, "\n \n"), false).unwrap_err();
    assert!(matches!(empty, DataError::Empty(_)), "{empty}");
    let untrained = json!({"messages": [{"role": "user", "content": "a"}]}).to_string();
    let untrained = prepare(&folder.spec(DatasetKind::Messages, &untrained), false).unwrap_err();
    assert!(untrained.to_string().contains("rows.jsonl:1"), "{untrained}");
    let missing = PrepareSpec {
        datasets: vec![DatasetConfig { path: "/nonexistent.jsonl".into(), kind: DatasetKind::Text }],
        ..folder.spec(DatasetKind::Text, "")
    };
    assert!(prepare(&missing, false).unwrap_err().to_string().contains("/nonexistent.jsonl"));
}

#[test]
fn a_template_that_hides_the_answer_is_an_error() {
    let folder = Folder::new();
    let template = folder.write("t.jinja", "{% for m in messages %}{{ m.role }}: {{ m.content | upper }}\n{% endfor %}");
    let row = json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}]}).to_string();
    let spec = PrepareSpec { chat_template: Some(template), ..folder.spec(DatasetKind::Messages, &row) };
    let error = prepare(&spec, false).unwrap_err().to_string();
    assert!(error.contains("generation") && error.contains("data.chat_template"), "{error}");
}

#[test]
fn hostile_templates_are_stopped() {
    let folder = Folder::new();
    let row = json!({"messages": [{"role": "user", "content": "a"}]}).to_string();
    for (source, expected) in [
        ("{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}", "instructions"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("{% include '/etc/passwd' %}", "chat template"),
        ("{% for %}", "line 1"),
        ("{{ raise_exception('no thanks') }}", "no thanks"),
    ] {
        let template = folder.write("t.jinja", source);
        let spec = PrepareSpec { chat_template: Some(template), ..folder.spec(DatasetKind::Messages, &row) };
        let error = prepare(&spec, false).unwrap_err().to_string();
        assert!(error.contains(expected), "{source} -> {error}");
    }
}

#[test]
fn hostile_tokenizers_are_errors() {
    let folder = Folder::new();
    std::fs::remove_file(folder.path().join("tokenizer.json")).unwrap();
    for text in
        ["", "{}", "[]", "{\"version\": \"1.0\", \"model\": {\"type\": \"BPE\", \"vocab\": {\"a\": 4294967295}, \"merges\": [\"a b\"]}}"]
    {
        folder.write("tokenizer.json", text);
        let error = Tokenizer::load(folder.path(), None).unwrap_err().to_string();
        assert!(error.contains("tokenizer.json"), "{error}");
    }
}

#[test]
fn the_cache_is_used_and_rebuilt_when_damaged() {
    let folder = Folder::new();
    let rows = format!("{}\n{}\n", json!({"text": "one two"}), json!({"text": "three"}));
    let spec = folder.spec(DatasetKind::Text, &rows);
    let built = prepare(&spec, false).unwrap();
    let cached = || {
        let files = std::fs::read_dir(folder.path().join("cache")).unwrap();
        files.map(|f| f.unwrap().path()).collect::<Vec<_>>()
    };
    let same = |a: &TokenSet, b: &TokenSet| {
        assert_eq!((a.fingerprint(), a.report(), a.documents()), (b.fingerprint(), b.report(), b.documents()));
        for d in 0..a.documents() {
            let (x, y) = (a.document(d), b.document(d));
            assert_eq!((x.ids, x.trained, x.source), (y.ids, y.trained, y.source));
        }
    };
    let file = cached().pop().unwrap();
    let written = std::fs::metadata(&file).unwrap().modified().unwrap();
    same(&built, &prepare(&spec, false).unwrap());
    assert_eq!(std::fs::metadata(&file).unwrap().modified().unwrap(), written, "a hit does not write");

    let bytes = std::fs::read(&file).unwrap();
    for damage in [0, bytes.len() / 2, bytes.len() - 1] {
        let mut broken = bytes.clone();
        broken[damage] ^= 1;
        std::fs::write(&file, &broken).unwrap();
        same(&built, &prepare(&spec, false).unwrap());
        assert_eq!(std::fs::read(&file).unwrap(), bytes, "rebuilt");
    }
    std::fs::write(&file, &bytes[..bytes.len() / 2]).unwrap();
    same(&built, &prepare(&spec, false).unwrap());

    // What the tokens depend on gives another key; where the file lies does not.
    let moved = folder.write("moved.jsonl", &rows);
    let datasets = vec![DatasetConfig { path: moved.clone(), kind: DatasetKind::Text }];
    let set = prepare(&PrepareSpec { datasets, ..spec.clone() }, false).unwrap();
    assert_eq!(set.fingerprint(), built.fingerprint());
    assert_eq!(set.files(), [moved]);
    assert_eq!(cached().len(), 1);
    let other = prepare(&PrepareSpec { seq_len: 64, ..spec.clone() }, false).unwrap();
    assert_ne!(other.fingerprint(), built.fingerprint());
    assert_eq!(cached().len(), 2);
}

#[test]
fn concurrent_preparation_and_a_folder_that_cannot_be_written() {
    let folder = Folder::new();
    let rows: String = (0..500).map(|i| format!("{}\n", json!({"text": format!("row {i}")}))).collect();
    let spec = folder.spec(DatasetKind::Text, &rows);
    let sets: Vec<TokenSet> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(|| prepare(&spec, false).unwrap())).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert!(sets.iter().all(|s| s.fingerprint() == sets[0].fingerprint() && s.tokens() == sets[0].tokens()));
    assert_eq!(std::fs::read_dir(folder.path().join("cache")).unwrap().count(), 1, "no temporary files remain");

    let file = folder.write("not-a-folder", "");
    let set = prepare(&PrepareSpec { cache_folder: Some(file.join("cache")), ..spec }, false).unwrap();
    assert_eq!(set.fingerprint(), sets[0].fingerprint());
}

#[test]
fn the_date_is_part_of_the_key_only_where_it_is_printed() {
    let folder = Folder::new();
    let row = json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}]}).to_string();
    let spec = folder.spec(DatasetKind::Messages, &row);
    let at = |spec: &PrepareSpec, days: i64| prepare(&PrepareSpec { now_secs: Some(days * 86_400 + 7), ..spec.clone() }, false).unwrap();
    assert_eq!(at(&spec, 0).fingerprint(), at(&spec, 1).fingerprint());
    let template = folder.write("t.jinja", &format!("{{{{ strftime_now('%d %b %Y') }}}}{CHATML}"));
    let dated = PrepareSpec { chat_template: Some(template), ..spec };
    assert_ne!(at(&dated, 0).fingerprint(), at(&dated, 1).fingerprint());
    assert!(folder.marked(&at(&dated, 365), 0).starts_with("01 Jan 1971<|im_start|>user"));
}

#[test]
fn show_marks_what_is_trained() {
    let folder = Folder::new();
    let rows = format!("{}\n{}\n", json!({"prompt": "ab ", "completion": "é\u{1b}"}), json!({"prompt": "q ", "completion": "r"}));
    let set = prepare(&folder.spec(DatasetKind::PromptCompletion, &rows), false).unwrap();
    let spec = ScheduleSpec {
        seq_len: 64,
        micro_batch_size: 1,
        global_batch_size: 1,
        packing: true,
        shuffle: false,
        seed: 0,
        length: Length::Steps(1),
    };
    let schedule = Schedule::new(set.into(), spec).unwrap();
    let text = show(&schedule, Some(&folder.tokenizer()), 2, false);
    assert!(text.contains("<|begin_of_text|>ab [é\\u{1b}<|im_end|>]"), "{text}");
    assert!(text.contains("rows.jsonl:2: "), "both documents share the row: {text}");
    assert!(show(&schedule, Some(&folder.tokenizer()), 1, true).contains("\x1b[32m"));
}
