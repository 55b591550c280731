//! Conversations to text: the model's Jinja chat template, rendered byte for byte as transformers renders it (Jinja2 with
//! `trim_blocks` and `lstrip_blocks`, Python's way of printing values, transformers' own `tojson`, `{% generation %}` blocks).
//!
//! Templates are code from strangers: they get no loader and no files, a budget of instructions and a limit on output.

use super::python;
use minijinja::value::{Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, UndefinedBehavior};
use serde_json::{Map, Value as Json};
use std::collections::BTreeMap;
use std::ops::Range;

/// Instructions per rendering: a thousand messages need some 10^5.
const FUEL: u64 = 20_000_000;
const OUTPUT_LIMIT_BYTES: usize = 64 << 20;
/// Noncharacters mark `{% generation %}` blocks within the output; any that the conversation contains is not used.
const MARKS: std::ops::RangeInclusive<char> = '\u{fdd0}'..='\u{fdef}';

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    env: Environment<'static>,
    source: String,
    has_generation: bool,
}

/// What a template is applied to.
#[derive(Clone, Copy, Debug)]
pub struct Conversation<'a> {
    /// Messages, each an object with `role` and `content`.
    pub messages: &'a [Json],
    /// Tools, as JSON schemas.
    pub tools: Option<&'a Json>,
    /// Documents for retrieval templates.
    pub documents: Option<&'a Json>,
    /// Further variables (`enable_thinking`, ...).
    pub extra: Option<&'a Map<String, Json>>,
    /// Special tokens by name (`bos_token`, ...).
    pub special: &'a Map<String, Json>,
    /// Seconds since 1970, for `strftime_now`.
    pub now_secs: i64,
}

/// A rendered conversation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rendered {
    /// The text.
    pub text: String,
    /// Byte ranges inside `{% generation %}` blocks, ascending; a block may be empty.
    pub generated: Vec<Range<usize>>,
}

impl ChatTemplate {
    /// Compiles `source`. The error says what is wrong and in which line.
    pub fn new(source: &str) -> Result<ChatTemplate, String> {
        let (rewritten, has_generation) = rewrite_generation(source);
        let mut env = Environment::new();
        env.set_trim_blocks(true);
        env.set_lstrip_blocks(true);
        env.set_undefined_behavior(UndefinedBehavior::Lenient);
        env.set_recursion_limit(200);
        env.set_fuel(Some(FUEL));
        env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        env.set_formatter(|out, _, value| out.write_str(&python::str_of(value)).map_err(Error::from));
        env.set_unknown_method_callback(method);
        env.add_filter("tojson", python::tojson);
        env.add_filter("string", |value: &Value| python::str_of(value));
        env.add_filter("trim", |value: &Value, chars: Option<String>| strip(&python::str_of(value), chars.as_deref(), true, true));
        env.add_filter("join", |values: &Value, separator: Option<String>| -> Result<String, Error> {
            let parts: Vec<String> = values.try_iter()?.map(|v| python::str_of(&v)).collect();
            Ok(parts.join(separator.as_deref().unwrap_or("")))
        });
        env.add_filter("_generation", |state: &State, body: String| {
            let mark = |name: &str| state.lookup(name).map(|v| python::str_of(&v)).unwrap_or_default();
            format!("{}{body}{}", mark("_generation_open"), mark("_generation_close"))
        });
        env.add_test("sequence", |v: &Value| matches!(v.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::String));
        env.add_test("number", |v: &Value| matches!(v.kind(), ValueKind::Number | ValueKind::Bool));
        env.add_function("raise_exception", |message: Value| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, format!("the template refuses: {}", python::str_of(&message))))
        });
        env.add_function("strftime_now", |state: &State, format: String| {
            let now = state.lookup("_now_secs").and_then(|v| i64::try_from(v).ok()).unwrap_or(0);
            python::strftime(now, &format)
        });
        env.add_template_owned("chat", rewritten).map_err(|e| describe(&e))?;
        Ok(ChatTemplate { env, source: source.to_owned(), has_generation })
    }

    /// The source it was compiled from.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// It marks what the assistant says with `{% generation %}`.
    pub fn has_generation(&self) -> bool {
        self.has_generation
    }

    /// Renders a conversation, with or without the opening of the next assistant turn.
    pub fn render(&self, conversation: &Conversation<'_>, add_generation_prompt: bool) -> Result<Rendered, String> {
        let dialog = self.dialog(conversation)?;
        self.render_dialog(&dialog, &dialog.messages, add_generation_prompt)
    }

    /// Converts a conversation once, for many renderings.
    pub(crate) fn dialog(&self, conversation: &Conversation<'_>) -> Result<Dialog, String> {
        let mut variables: BTreeMap<String, Value> = BTreeMap::new();
        for (name, value) in conversation.special.iter().chain(conversation.extra.into_iter().flatten()) {
            variables.insert(name.clone(), Value::from_serialize(value));
        }
        variables.insert("tools".into(), Value::from_serialize(conversation.tools));
        variables.insert("documents".into(), Value::from_serialize(conversation.documents));
        variables.insert("_now_secs".into(), conversation.now_secs.into());
        let given = conversation.messages.iter().chain(conversation.tools).chain(conversation.documents);
        let marks = unused_marks(given.chain(conversation.extra.into_iter().flat_map(Map::values)))?;
        variables.insert("_generation_open".into(), marks[0].to_string().into());
        variables.insert("_generation_close".into(), marks[1].to_string().into());
        Ok(Dialog { messages: conversation.messages.iter().map(message_value).collect(), variables, marks })
    }

    /// Renders `messages`, those of `dialog` or variants of them.
    pub(crate) fn render_dialog(&self, dialog: &Dialog, messages: &[Value], add_generation_prompt: bool) -> Result<Rendered, String> {
        let mut context = dialog.variables.clone();
        context.insert("messages".into(), messages.to_vec().into());
        context.insert("add_generation_prompt".into(), add_generation_prompt.into());
        let mut out = Limited(Vec::new());
        let template = self.env.get_template("chat").map_err(|e| describe(&e))?;
        template.render_captured_to(&context, &mut out).map_err(|e| describe(&e))?;
        let text = String::from_utf8(out.0).map_err(|_| "the output is not UTF-8".to_owned())?;
        if self.has_generation { take_marks(&text, dialog.marks) } else { Ok(Rendered { text, generated: Vec::new() }) }
    }
}

/// A conversation as templates see it. Values are shared, not copied, by the contexts of its renderings.
pub(crate) struct Dialog {
    /// The messages.
    pub(crate) messages: Vec<Value>,
    variables: BTreeMap<String, Value>,
    /// Two noncharacters that occur nowhere in the conversation.
    pub(crate) marks: [char; 2],
}

/// A message as templates see it.
pub(crate) fn message_value(message: &Json) -> Value {
    Value::from_serialize(normalized(message))
}

/// As transformers hands messages to templates: keys that are null are absent, and reasoning is found under its usual names.
fn normalized(message: &Json) -> Json {
    let Json::Object(fields) = message else { return message.clone() };
    let present = || fields.iter().filter(|(_, v)| !v.is_null());
    let reasoning = ["reasoning_content", "thinking", "reasoning"].iter().find_map(|k| fields.get(*k).filter(|v| !v.is_null()));
    let mut out = Map::new();
    if let Some(reasoning) = reasoning {
        out.insert("thinking".into(), reasoning.clone());
    }
    out.extend(present().map(|(k, v)| (k.clone(), v.clone())));
    if let Some(reasoning) = reasoning {
        out.insert("reasoning_content".into(), reasoning.clone());
    }
    Json::Object(out)
}

/// Two noncharacters that occur in none of `values`.
fn unused_marks<'a>(values: impl Iterator<Item = &'a Json>) -> Result<[char; 2], String> {
    fn visit(value: &Json, used: &mut u32) {
        let bits = |s: &str| s.chars().filter(|c| MARKS.contains(c)).fold(0, |bits, c| bits | 1 << (c as u32 - 0xfdd0));
        match value {
            Json::String(s) => *used |= bits(s),
            Json::Array(list) => list.iter().for_each(|v| visit(v, used)),
            Json::Object(map) => map.iter().for_each(|(k, v)| {
                *used |= bits(k);
                visit(v, used);
            }),
            _ => {}
        }
    }
    let mut used = 0;
    values.for_each(|v| visit(v, &mut used));
    let mut free = MARKS.filter(|&c| used >> (c as u32 - 0xfdd0) & 1 == 0);
    match (free.next(), free.next()) {
        (Some(open), Some(close)) => Ok([open, close]),
        _ => Err("the conversation uses all noncharacters U+FDD0..U+FDEF: remove some".into()),
    }
}

/// Removes the marks and returns where they were.
fn take_marks(text: &str, [open, close]: [char; 2]) -> Result<Rendered, String> {
    let mut rendered = Rendered { text: String::with_capacity(text.len()), generated: Vec::new() };
    let (mut depth, mut start) = (0usize, 0);
    for piece in text.split_inclusive([open, close]) {
        let body = piece.trim_end_matches([open, close]);
        rendered.text.push_str(body);
        let at = rendered.text.len();
        match piece[body.len()..].chars().next() {
            Some(c) if c == open => {
                if depth == 0 {
                    start = at;
                }
                depth += 1;
            }
            Some(_) => {
                depth = depth.checked_sub(1).ok_or("a {% generation %} block was cut apart by the template itself")?;
                if depth == 0 {
                    rendered.generated.push(start..at);
                }
            }
            None => {}
        }
    }
    if depth != 0 {
        return Err("a {% generation %} block was cut apart by the template itself".into());
    }
    Ok(rendered)
}

/// Replaces `{% generation %}` and `{% endgeneration %}` (an extension of transformers) by a filter block that marks its output.
/// The inner `with` gives the block its own scope, as in Jinja2; white space control stays on the outer edges.
fn rewrite_generation(source: &str) -> (String, bool) {
    let mut out = String::with_capacity(source.len());
    let (mut rest, mut found, mut raw) = (source, false, false);
    while let Some(at) = rest.find("{") {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        let end = match tag.as_bytes().get(1) {
            Some(b'#') if !raw => tag.find("#}").map(|e| e + 2),
            Some(b'%') => tag_end(tag, "%}"),
            Some(b'{') if !raw => tag_end(tag, "}}"),
            _ => Some(1),
        };
        let Some(end) = end else {
            rest = tag;
            break;
        };
        let (whole, after) = tag.split_at(end);
        rest = after;
        if !whole.starts_with("{%") {
            out.push_str(whole);
            continue;
        }
        let inner = &whole[2..whole.len() - 2];
        let left = if inner.starts_with(['-', '+']) { &inner[..1] } else { "" };
        let right = if inner.len() > 1 && inner.ends_with(['-', '+']) { &inner[inner.len() - 1..] } else { "" };
        match inner[left.len()..inner.len() - right.len()].trim() {
            "raw" => raw = true,
            "endraw" => raw = false,
            "generation" if !raw => {
                found = true;
                out.push_str(&format!("{{%{left} filter _generation %}}{{% with {right}%}}"));
                continue;
            }
            "endgeneration" if !raw => {
                out.push_str(&format!("{{%{left} endwith %}}{{% endfilter {right}%}}"));
                continue;
            }
            _ => {}
        }
        out.push_str(whole);
    }
    out.push_str(rest);
    (out, found)
}

/// Bytes up to and with `close`, string literals skipped.
fn tag_end(tag: &str, close: &str) -> Option<usize> {
    let bytes = tag.as_bytes();
    let mut i = 2;
    while i < bytes.len() {
        match bytes[i] {
            quote @ (b'"' | b'\'') => {
                i += 1;
                while i < bytes.len() && bytes[i] != quote {
                    i += if bytes[i] == b'\\' { 2 } else { 1 };
                }
                i += 1;
            }
            _ if bytes[i..].starts_with(close.as_bytes()) => return Some(i + close.len()),
            _ => i += 1,
        }
    }
    None
}

fn strip(text: &str, chars: Option<&str>, left: bool, right: bool) -> String {
    let out = |c: char| chars.map_or_else(|| python::is_space(c), |set| set.contains(c));
    let text = if left { text.trim_start_matches(out) } else { text };
    if right { text.trim_end_matches(out) } else { text }.to_owned()
}

/// Python's methods of strings, lists and dicts: those that minijinja-contrib lacks or that differ, then its own.
fn method(state: &State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    use minijinja::value::from_args;
    let Some(text) = value.as_str() else {
        return minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args);
    };
    let position = |found: Option<usize>| Value::from(found.map_or(-1, |byte| text[..byte].chars().count() as i64));
    match name {
        "strip" | "lstrip" | "rstrip" => {
            let (chars,): (Option<&str>,) = from_args(args)?;
            Ok(strip(text, chars, name != "rstrip", name != "lstrip").into())
        }
        "split" if args.first().is_none_or(Value::is_none) && args.len() < 2 => {
            Ok(text.split(python::is_space).filter(|part| !part.is_empty()).map(Value::from).collect())
        }
        "find" | "rfind" => {
            let (what,): (&str,) = from_args(args)?;
            Ok(position(if name == "find" { text.find(what) } else { text.rfind(what) }))
        }
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            Ok(text.strip_prefix(prefix).unwrap_or(text).into())
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            Ok(text.strip_suffix(suffix).unwrap_or(text).into())
        }
        "partition" | "rpartition" => {
            let (separator,): (&str,) = from_args(args)?;
            let found = if name == "partition" { text.split_once(separator) } else { text.rsplit_once(separator) };
            Ok(match found {
                Some((a, b)) => [a, separator, b].into_iter().map(Value::from).collect(),
                None if name == "partition" => [text, "", ""].into_iter().map(Value::from).collect(),
                None => ["", "", text].into_iter().map(Value::from).collect(),
            })
        }
        "rsplit" => {
            let (separator, limit): (&str, Option<i64>) = from_args(args)?;
            let count = limit.filter(|&n| n >= 0).map_or(usize::MAX, |n| n as usize + 1);
            let mut parts: Vec<&str> = text.rsplitn(count, separator).collect();
            parts.reverse();
            Ok(parts.into_iter().map(Value::from).collect())
        }
        "join" => {
            let (values,): (&Value,) = from_args(args)?;
            let parts: Vec<String> = values.try_iter()?.map(|v| python::str_of(&v)).collect();
            Ok(parts.join(text).into())
        }
        _ => minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args),
    }
}

/// Message, line and innermost cause of a template error.
fn describe(error: &Error) -> String {
    let mut text = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    if error.kind() == ErrorKind::OutOfFuel {
        text = format!("it ran more than {FUEL} instructions and was stopped");
    }
    if let Some(source) = std::error::Error::source(error) {
        text = format!("{text}: {source}");
    }
    if let Some(line) = error.line() {
        text = format!("{text} (line {line} of the template)");
    }
    text
}

/// A buffer that refuses to grow without end.
struct Limited(Vec<u8>);

impl std::io::Write for Limited {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.0.len() + bytes.len() > OUTPUT_LIMIT_BYTES {
            return Err(std::io::Error::other(format!("more than {OUTPUT_LIMIT_BYTES} bytes of output")));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
