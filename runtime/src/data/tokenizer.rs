//! Text to ids, as the model's folder says: `tokenizer.json` for the tokens, `tokenizer_config.json` (and the older
//! `special_tokens_map.json`) for the names of special tokens, and the chat template from wherever transformers looks for it.
//! These files come from strangers, so sizes are limited and a panic of the tokenizer library is an error.

use super::DataError;
use super::template::ChatTemplate;
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

const TOKENIZER_LIMIT_BYTES: u64 = 256 << 20;
const CONFIG_LIMIT_BYTES: u64 = 32 << 20;
const TEMPLATE_LIMIT_BYTES: u64 = 4 << 20;
const SPECIAL_NAMES: [&str; 7] = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// A text as tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Encoded {
    /// Token ids.
    pub ids: Vec<u32>,
    /// Per token: the bytes of the text it covers.
    pub offsets: Vec<(usize, usize)>,
    /// Per token: added around the text by the tokenizer (begin and end of sequence).
    pub added: Vec<bool>,
}

/// The files of a tokenizer, read but not parsed: enough to know whether its tokens are in the cache.
pub(crate) struct TokenizerFiles {
    folder: PathBuf,
    json: Vec<u8>,
    special: Map<String, Value>,
    /// Chat templates as (name, source, origin).
    templates: Vec<(String, String, String)>,
}

impl TokenizerFiles {
    pub(crate) fn read(folder: &Path, chat_template: Option<&Path>) -> Result<TokenizerFiles, DataError> {
        let path = folder.join("tokenizer.json");
        if !path.exists() {
            return Err(DataError::tokenizer(
                &path,
                "no such file: the model folder needs a tokenizer.json (save_pretrained of a fast tokenizer writes it)",
            ));
        }
        let json = read_limited(&path, TOKENIZER_LIMIT_BYTES)?;
        let config = read_json(&folder.join("tokenizer_config.json"))?;
        let legacy = read_json(&folder.join("special_tokens_map.json"))?;
        let mut special = Map::new();
        for name in SPECIAL_NAMES {
            let text = |source: &Map<String, Value>| source.get(name).and_then(token_text).map(str::to_owned);
            if let Some(text) = text(&config).or_else(|| text(&legacy)) {
                special.insert(name.into(), Value::String(text));
            }
        }
        let templates = template_sources(folder, chat_template, &config)?;
        Ok(TokenizerFiles { folder: folder.to_path_buf(), json, special, templates })
    }

    /// Everything that tokens depend on, for the key of the cache.
    pub(crate) fn material(&self, mut part: impl FnMut(&[u8])) {
        part(&self.json);
        part(Value::Object(self.special.clone()).to_string().as_bytes());
        for (name, source, _) in &self.templates {
            part(name.as_bytes());
            part(source.as_bytes());
        }
    }

    /// A chat template prints the date.
    pub(crate) fn dated(&self) -> bool {
        self.templates.iter().any(|(_, source, _)| source.contains("strftime_now"))
    }

    pub(crate) fn parse(self) -> Result<Tokenizer, DataError> {
        let path = self.folder.join("tokenizer.json");
        let parsed = std::panic::catch_unwind(|| tokenizers::Tokenizer::from_bytes(&self.json));
        let mut inner = match parsed {
            Ok(Ok(tokenizer)) => tokenizer,
            Ok(Err(e)) => return Err(DataError::tokenizer(&path, format!("not a tokenizer that can be read: {e}"))),
            Err(_) => return Err(DataError::tokenizer(&path, "not a tokenizer that can be read (the tokenizer library panicked)")),
        };
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|e| DataError::tokenizer(&path, e.to_string()))?;
        let compile = |(name, source, origin): (String, String, String)| {
            let template = ChatTemplate::new(&source).map_err(|e| format!("{origin}: {e}"));
            (name, template)
        };
        let templates = self.templates.into_iter().map(compile).collect();
        let mut special_texts: Vec<String> =
            inner.get_added_tokens_decoder().into_values().filter(|t| t.special && !t.content.is_empty()).map(|t| t.content).collect();
        special_texts.sort_by_key(|t| std::cmp::Reverse(t.len()));
        Ok(Tokenizer { inner, folder: self.folder, special: self.special, special_texts, templates })
    }
}

/// The tokenizer of a model folder.
#[derive(Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    folder: PathBuf,
    /// Names of special tokens (`"eos_token"`, ...) to their text, as the chat template sees them.
    special: Map<String, Value>,
    /// Texts of all special tokens, longest first.
    special_texts: Vec<String>,
    /// Templates by name; the plain one is "default". One that does not compile matters only to those who need it.
    templates: Vec<(String, Result<ChatTemplate, String>)>,
}

impl Tokenizer {
    /// Loads the tokenizer of `folder`. `chat_template` replaces the model's own template.
    pub fn load(folder: &Path, chat_template: Option<&Path>) -> Result<Tokenizer, DataError> {
        TokenizerFiles::read(folder, chat_template)?.parse()
    }

    /// Encodes `text`; with `add_special`, the tokens that the tokenizer puts around a text are added.
    /// Text that a chat template made has them already: encode it with `false`.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Encoded, DataError> {
        let fail = |why: String| DataError::tokenizer(&self.folder, format!("cannot encode: {why}"));
        let encode = std::panic::AssertUnwindSafe(|| self.inner.encode(text, add_special));
        let encoding = match std::panic::catch_unwind(encode) {
            Ok(encoding) => encoding.map_err(|e| fail(e.to_string()))?,
            Err(_) => return Err(fail("the tokenizer library panicked".into())),
        };
        Ok(Encoded {
            ids: encoding.get_ids().to_vec(),
            offsets: encoding.get_offsets().to_vec(),
            added: encoding.get_special_tokens_mask().iter().map(|&m| m != 0).collect(),
        })
    }

    /// Text of `ids`, special tokens included.
    pub fn decode(&self, ids: &[u32]) -> String {
        self.inner.decode(ids, false).unwrap_or_else(|_| ids.iter().map(|id| format!("<{id}>")).collect())
    }

    /// Id of a named special token (`"bos_token"`, `"eos_token"`, `"pad_token"`, ...), if the model has it.
    pub fn special_id(&self, name: &str) -> Option<u32> {
        self.special.get(name).and_then(Value::as_str).and_then(|text| self.inner.token_to_id(text))
    }

    /// Id of the end-of-sequence token.
    pub fn eos_id(&self) -> Result<u32, DataError> {
        self.special_id("eos_token").ok_or_else(|| {
            let path = self.folder.join("tokenizer_config.json");
            DataError::tokenizer(&path, "names no \"eos_token\" that is in the vocabulary: add one, since completions must learn to end")
        })
    }

    /// Number of ids.
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// The chat template: for conversations with tools the one named `tool_use` if there is one, else `default`.
    pub fn template(&self, tools: bool) -> Result<&ChatTemplate, DataError> {
        let named = |wanted: &str| self.templates.iter().find(|(name, _)| name == wanted).map(|(_, t)| t);
        let found = if tools { named("tool_use").or_else(|| named("default")) } else { named("default") };
        if let Some(template) = found {
            return template.as_ref().map_err(|e| DataError::Template(e.clone()));
        }
        Err({
            let have: Vec<&str> = self.templates.iter().map(|(n, _)| n.as_str()).collect();
            let folder = self.folder.display();
            DataError::Template(if have.is_empty() {
                format!(
                    "{folder} has none (base models often lack one): set data.chat_template to a Jinja file, or use another dataset type"
                )
            } else {
                format!("{folder} has only {have:?}, none is \"default\": set data.chat_template to a Jinja file")
            })
        })
    }

    /// Special tokens by name, the variables `bos_token`, `eos_token`, ... of templates.
    pub fn special(&self) -> &Map<String, Value> {
        &self.special
    }

    /// The special token that `text` starts with.
    pub(crate) fn leading_special<'a>(&self, text: &'a str) -> Option<&'a str> {
        self.special_texts.iter().find(|t| text.starts_with(t.as_str())).map(|t| &text[..t.len()])
    }

    /// The text of the end-of-sequence token.
    pub(crate) fn eos_text(&self) -> Option<&str> {
        self.special.get("eos_token").and_then(Value::as_str)
    }
}

/// A special token is written as a string or as an object with `content`.
fn token_text(value: &Value) -> Option<&str> {
    value.as_str().or_else(|| value.get("content")?.as_str())
}

/// Templates as (name, source, origin), in transformers' order of precedence: override, `chat_template.jinja` (with
/// `additional_chat_templates/`), `tokenizer_config.json`.
fn template_sources(
    folder: &Path,
    chat_template: Option<&Path>,
    config: &Map<String, Value>,
) -> Result<Vec<(String, String, String)>, DataError> {
    let from_file = |name: &str, path: &Path| -> Result<(String, String, String), DataError> {
        let text = String::from_utf8(read_limited(path, TEMPLATE_LIMIT_BYTES)?)
            .map_err(|_| DataError::Template(format!("{} is not UTF-8", path.display())))?;
        Ok((name.to_owned(), text, path.display().to_string()))
    };
    if let Some(path) = chat_template {
        return Ok(vec![from_file("default", path)?]);
    }
    let own = folder.join("chat_template.jinja");
    if own.exists() {
        let mut found = vec![from_file("default", &own)?];
        let tools = folder.join("additional_chat_templates").join("tool_use.jinja");
        if tools.exists() {
            found.push(from_file("tool_use", &tools)?);
        }
        return Ok(found);
    }
    let path = folder.join("tokenizer_config.json");
    let broken = || DataError::tokenizer(&path, "\"chat_template\" must be a string, or a list of {\"name\", \"template\"} with strings");
    match config.get("chat_template") {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::String(text)) => Ok(vec![("default".into(), text.clone(), path.display().to_string())]),
        Some(Value::Array(list)) => list
            .iter()
            .map(|entry| {
                let text = |key: &str| entry.get(key).and_then(Value::as_str).map(str::to_owned).ok_or_else(broken);
                let name = text("name")?;
                let origin = format!("{} (template {name:?})", path.display());
                Ok((name, text("template")?, origin))
            })
            .collect(),
        Some(_) => Err(broken()),
    }
}

fn read_limited(path: &Path, limit_bytes: u64) -> Result<Vec<u8>, DataError> {
    let bytes = std::fs::metadata(path).map_err(|e| DataError::io("read", path, e))?.len();
    if bytes > limit_bytes {
        return Err(DataError::tokenizer(path, format!("{bytes} bytes are more than the {limit_bytes} that such a file may have")));
    }
    std::fs::read(path).map_err(|e| DataError::io("read", path, e))
}

/// A JSON object, empty if the file does not exist.
fn read_json(path: &Path) -> Result<Map<String, Value>, DataError> {
    if !path.exists() {
        return Ok(Map::new());
    }
    match serde_json::from_slice(&read_limited(path, CONFIG_LIMIT_BYTES)?) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => Err(DataError::tokenizer(path, "must hold a JSON object")),
        Err(e) => Err(DataError::tokenizer(path, format!("is not JSON: {e}"))),
    }
}
