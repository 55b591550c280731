//! One line of a data file to documents: the five row formats. Messages of errors say what was expected and what was there; the
//! caller adds `file:line`.

use super::mask::{assistant_spans, token_mask};
use super::template::Conversation;
use super::tokenizer::Tokenizer;
use crate::config::DatasetKind;
use serde_json::{Map, Value as Json};

/// How rows are turned into tokens.
pub(crate) struct RowReader<'a> {
    pub(crate) tokenizer: Option<&'a Tokenizer>,
    pub(crate) train_on_inputs: bool,
    pub(crate) seq_len: usize,
    pub(crate) now_secs: i64,
}

/// The documents of a row.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct RowTokens {
    /// Ids and mask of each.
    pub(crate) documents: Vec<(Vec<u32>, Vec<u8>)>,
    /// Tokens cut off beyond `seq_len`.
    pub(crate) cut_tokens: usize,
}

impl RowReader<'_> {
    /// Reads a line of kind `kind`.
    pub(crate) fn read(&self, kind: DatasetKind, line: &[u8]) -> Result<RowTokens, String> {
        let row: Json = serde_json::from_slice(line).map_err(|e| {
            let array = line.first() == Some(&b'[');
            let hint = if array { "; the file looks like one JSON array: write one object per line (jq -c '.[]')" } else { "" };
            // The line is known; serde counts its own.
            let why = e.to_string();
            let why = why.rsplit_once(" at line ").map_or(&*why, |(why, _)| why);
            format!("not a JSON object ({why}, column {}){hint}", e.column())
        })?;
        let Json::Object(row) = row else {
            return Err(format!("expected a JSON object per line, got {}", kind_of(&row)));
        };
        let (mut ids, mut trained) = match kind {
            DatasetKind::Messages => {
                let messages = messages(&row, "messages")?;
                self.chat(&row, &messages, 0)?
            }
            DatasetKind::PromptCompletion => self.prompt_completion(&row)?,
            DatasetKind::Alpaca => self.alpaca(&row)?,
            DatasetKind::Text => return self.text(&row),
            DatasetKind::Tokenized => tokenized(&row)?,
        };
        let cut_tokens = ids.len().saturating_sub(self.seq_len);
        ids.truncate(self.seq_len);
        trained.truncate(self.seq_len);
        Ok(RowTokens { documents: vec![(ids, trained)], cut_tokens })
    }

    fn tokenizer(&self) -> Result<&Tokenizer, String> {
        self.tokenizer.ok_or_else(|| "this row needs a tokenizer".into())
    }

    /// A conversation through the chat template; assistant turns from message `first_trained` on are trained.
    fn chat(&self, row: &Map<String, Json>, messages: &[Json], first_trained: usize) -> Result<(Vec<u32>, Vec<u8>), String> {
        let tokenizer = self.tokenizer()?;
        let tools = parsed_list(row, "tools")?;
        let documents = parsed_list(row, "documents")?;
        let template = tokenizer.template(tools.is_some()).map_err(|e| e.to_string())?;
        let conversation = Conversation {
            messages,
            tools: tools.as_ref(),
            documents: documents.as_ref(),
            extra: row.get("chat_template_kwargs").and_then(Json::as_object),
            special: tokenizer.special(),
            now_secs: self.now_secs,
        };
        let in_template = |e: String| format!("chat template: {e}");
        let (text, spans) = if self.train_on_inputs {
            let text = template.render(&conversation, false).map_err(in_template)?.text;
            let whole = 0..text.len();
            (text, vec![whole])
        } else {
            assistant_spans(tokenizer, template, &conversation, first_trained).map_err(in_template)?
        };
        // The template writes the beginning of the sequence itself; the tokenizer must not add another.
        let encoded = tokenizer.encode(&text, false).map_err(|e| e.to_string())?;
        let trained = token_mask(&encoded, &spans);
        Ok((encoded.ids, trained))
    }

    fn prompt_completion(&self, row: &Map<String, Json>) -> Result<(Vec<u32>, Vec<u8>), String> {
        match (row.get("prompt"), row.get("completion")) {
            (Some(Json::String(prompt)), Some(Json::String(completion))) => self.joined(prompt, completion),
            (Some(Json::Array(_)), Some(Json::Array(_))) => {
                let mut all = messages(row, "prompt")?;
                let first_trained = all.len();
                all.extend(messages(row, "completion")?);
                self.chat(row, &all, first_trained)
            }
            (prompt, completion) => Err(format!(
                "expected \"prompt\" and \"completion\", both strings or both lists of messages, got {} and {}",
                kind_of_option(prompt),
                kind_of_option(completion)
            )),
        }
    }

    fn alpaca(&self, row: &Map<String, Json>) -> Result<(Vec<u32>, Vec<u8>), String> {
        let (instruction, output) = (string(row, "instruction")?, string(row, "output")?);
        let input = match row.get("input") {
            None | Some(Json::Null) => "",
            Some(_) => string(row, "input")?,
        };
        let prompt = if input.is_empty() {
            format!(
                "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n\
                 ### Instruction:\n{instruction}\n\n### Response:\n"
            )
        } else {
            format!(
                "Below is an instruction that describes a task, paired with an input that provides further context. Write a response \
                 that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
            )
        };
        self.joined(&prompt, output)
    }

    /// Prompt and completion as one text, encoded together as at inference, then the end of the sequence.
    fn joined(&self, prompt: &str, completion: &str) -> Result<(Vec<u32>, Vec<u8>), String> {
        let start = if self.train_on_inputs { 0 } else { prompt.len() };
        self.closed(&format!("{prompt}{completion}"), start)
    }

    /// Encodes `text` with what the tokenizer puts around it and exactly one end of sequence, trained from byte `start` on.
    fn closed(&self, text: &str, start: usize) -> Result<(Vec<u32>, Vec<u8>), String> {
        let tokenizer = self.tokenizer()?;
        let eos = tokenizer.eos_id().map_err(|e| e.to_string())?;
        let mut encoded = tokenizer.encode(text, true).map_err(|e| e.to_string())?;
        let first_own = encoded.added.iter().position(|&a| !a).unwrap_or(encoded.ids.len());
        while encoded.added.len() > first_own && encoded.added.last() == Some(&true) {
            encoded.added.pop();
            encoded.ids.pop();
            encoded.offsets.pop();
        }
        let span = start..text.len();
        let mut trained = token_mask(&encoded, std::slice::from_ref(&span));
        if start == 0 {
            trained.fill(1);
        }
        encoded.ids.push(eos);
        trained.push(1);
        Ok((encoded.ids, trained))
    }

    fn text(&self, row: &Map<String, Json>) -> Result<RowTokens, String> {
        let (ids, trained) = self.closed(string(row, "text")?, 0)?;
        let pieces = ids.chunks(self.seq_len).zip(trained.chunks(self.seq_len));
        Ok(RowTokens { documents: pieces.map(|(i, t)| (i.to_vec(), t.to_vec())).collect(), cut_tokens: 0 })
    }
}

fn tokenized(row: &Map<String, Json>) -> Result<(Vec<u32>, Vec<u8>), String> {
    let list = |key: &str| match row.get(key) {
        Some(Json::Array(list)) => Ok(list),
        other => Err(format!("expected \"{key}\", a list of integers, got {}", kind_of_option(other))),
    };
    let ids: Vec<u32> = list("input_ids")?
        .iter()
        .map(|v| {
            v.as_u64()
                .filter(|&id| id <= i32::MAX as u64)
                .map(|id| id as u32)
                .ok_or_else(|| format!("\"input_ids\" holds {v}, expected an id in 0..2^31"))
        })
        .collect::<Result<_, _>>()?;
    if matches!(row.get("labels"), None | Some(Json::Null)) {
        let trained = vec![1; ids.len()];
        return Ok((ids, trained));
    }
    let labels = list("labels")?;
    if labels.len() != ids.len() {
        return Err(format!("\"labels\" has {} entries, \"input_ids\" {}: give one label per id (not shifted)", labels.len(), ids.len()));
    }
    let trained = ids.iter().zip(labels).enumerate().map(|(i, (&id, label))| match label.as_i64() {
        Some(-100) => Ok(0),
        Some(l) if l == i64::from(id) => Ok(1),
        _ => Err(format!("\"labels\"[{i}] is {label}, expected -100 or the id at the same place, {id} (labels are not shifted)")),
    });
    let trained = trained.collect::<Result<_, _>>()?;
    Ok((ids, trained))
}

/// The messages under `key`, checked, with lists of text parts joined.
fn messages(row: &Map<String, Json>, key: &str) -> Result<Vec<Json>, String> {
    let Some(Json::Array(list)) = row.get(key) else {
        let have: Vec<&String> = row.keys().take(8).collect();
        return Err(format!(
            "expected \"{key}\", a list of {{\"role\", \"content\"}}, got {}; keys here: {have:?}",
            kind_of_option(row.get(key))
        ));
    };
    if list.is_empty() {
        return Err(format!("\"{key}\" is empty, expected at least one message"));
    }
    list.iter().enumerate().map(|(i, message)| checked_message(message).map_err(|e| format!("\"{key}\"[{i}]: {e}"))).collect()
}

fn checked_message(message: &Json) -> Result<Json, String> {
    let Json::Object(fields) = message else {
        return Err(format!("expected an object with \"role\" and \"content\", got {}", kind_of(message)));
    };
    if !fields.get("role").is_some_and(Json::is_string) {
        return Err(format!("expected \"role\", a string, got {}", kind_of_option(fields.get("role"))));
    }
    let mut fields = fields.clone();
    match fields.get("content") {
        Some(Json::String(_)) => {}
        Some(Json::Array(parts)) => {
            let texts: Option<Vec<&str>> =
                parts.iter().map(|p| p.as_str().or_else(|| p.get("text").filter(|_| p["type"] == "text")?.as_str())).collect();
            let Some(texts) = texts else {
                return Err("\"content\" has parts that are not {\"type\": \"text\", \"text\"}: only text can be trained on".into());
            };
            let joined = texts.concat();
            fields.insert("content".into(), joined.into());
        }
        None | Some(Json::Null) if ["tool_calls", "reasoning_content", "thinking", "reasoning"].iter().any(|k| fields.contains_key(*k)) => {
        }
        other => return Err(format!("expected \"content\", a string or a list of text parts, got {}", kind_of_option(other))),
    }
    Ok(Json::Object(fields))
}

/// A list under `key`, or the JSON text of one (tables store nested values so); absent or null is none.
fn parsed_list(row: &Map<String, Json>, key: &str) -> Result<Option<Json>, String> {
    let parsed = match row.get(key) {
        None | Some(Json::Null) => return Ok(None),
        Some(Json::String(text)) if text.trim().is_empty() => return Ok(None),
        Some(Json::String(text)) => serde_json::from_str(text).map_err(|e| format!("\"{key}\" is a string but not JSON: {e}"))?,
        Some(value) => value.clone(),
    };
    if parsed.is_null() {
        return Ok(None);
    }
    if parsed.is_array() { Ok(Some(parsed)) } else { Err(format!("expected \"{key}\", a list, got {}", kind_of(&parsed))) }
}

fn string<'a>(row: &'a Map<String, Json>, key: &str) -> Result<&'a str, String> {
    row.get(key).and_then(Json::as_str).ok_or_else(|| {
        let have: Vec<&String> = row.keys().take(8).collect();
        format!("expected \"{key}\", a string, got {}; keys here: {have:?}", kind_of_option(row.get(key)))
    })
}

fn kind_of_option(value: Option<&Json>) -> &'static str {
    value.map_or("nothing", kind_of)
}

fn kind_of(value: &Json) -> &'static str {
    match value {
        Json::Null => "null",
        Json::Bool(_) => "a boolean",
        Json::Number(_) => "a number",
        Json::String(_) => "a string",
        Json::Array(_) => "a list",
        Json::Object(_) => "an object",
    }
}
