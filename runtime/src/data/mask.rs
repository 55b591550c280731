//! Which characters of a rendered conversation the assistant wrote, its end of turn included, and from these which tokens are
//! trained. By position, never by id: a padding id that equals the end of turn changes nothing.
//!
//! Templates with `{% generation %}` say it themselves. For others it is found by rendering variants, the first that works:
//! 1. *prefixes*: `messages[..i]` with the generation prompt ends where turn `i` begins, `messages[..=i]` where it ends, if
//!    both are prefixes of the whole;
//! 2. *sentinel*: templates that treat the last message specially break that; then turn `i` is replaced by one character that
//!    occurs nowhere else, and what differs from the whole is the turn.
//! 3. *reply*: templates that insist on the order of roles refuse that for a tool call, whose results follow; then the results are
//!    left out too, which still shows where the turn begins, and it ends at the end-of-sequence token.
//!
//! Either way the turn must contain what the message says; a template that defeats both is an error, never a silent mask.

use super::template::{ChatTemplate, Conversation, Dialog, Rendered, message_value};
use super::tokenizer::{Encoded, Tokenizer};
use minijinja::Value;
use serde_json::Value as Json;
use std::ops::Range;

/// A rendered conversation and the byte ranges of it that are trained, ascending.
pub(crate) fn assistant_spans(
    tokenizer: &Tokenizer,
    template: &ChatTemplate,
    conversation: &Conversation<'_>,
    first_trained: usize,
) -> Result<(String, Vec<Range<usize>>), String> {
    let dialog = template.dialog(conversation)?;
    let Rendered { text, generated } = template.render_dialog(&dialog, &dialog.messages, false)?;
    let mut spans = Vec::new();
    if template.has_generation() {
        // Messages before `first_trained` are a prompt: as many blocks as they give on their own are not trained.
        let head = &dialog.messages[..first_trained];
        let skipped = if first_trained == 0 { 0 } else { template.render_dialog(&dialog, head, false)?.generated.len() };
        spans.extend(generated.into_iter().skip(skipped).map(|s| with_end_of_turn(tokenizer, &text, s)));
    } else {
        let turns = Turns { tokenizer, template, conversation, dialog: &dialog, text: &text };
        for (i, message) in conversation.messages.iter().enumerate().skip(first_trained) {
            if message["role"] != "assistant" {
                continue;
            }
            let after = spans.last().map_or(0, |s: &Range<usize>| s.end);
            let fits = |span: &Range<usize>| span.start >= after && says(&text[span.clone()], message);
            let mut span = turns.by_prefixes(i).filter(fits);
            if span.is_none() {
                // It ends where the words end, whatever they imitate, so the end of turn follows.
                let words = turns.by_sentinel(i);
                span = words.filter(fits).map(|s| s.start..following_end(tokenizer, &text, s.end));
            }
            if span.is_none() {
                span = turns.by_reply(i).filter(fits);
            }
            let span = span.ok_or_else(|| {
                format!(
                    "cannot find message {} (assistant) in what the chat template renders, so the loss mask would be wrong: put \
                     {{% generation %}} ... {{% endgeneration %}} around assistant content in a copy of the template and set \
                     data.chat_template to it",
                    i + 1
                )
            })?;
            spans.push(with_end_of_turn(tokenizer, &text, span));
        }
    }
    spans.retain(|span| !span.is_empty());
    Ok((text, spans))
}

/// Per token 1 if it overlaps a span, as transformers does it.
pub(crate) fn token_mask(encoded: &Encoded, spans: &[Range<usize>]) -> Vec<u8> {
    let mut next = 0;
    encoded
        .offsets
        .iter()
        .map(|&(start, end)| {
            while spans.get(next).is_some_and(|s| start >= s.end) {
                next += 1;
            }
            u8::from(spans.get(next).is_some_and(|s| end > s.start))
        })
        .collect()
}

/// The ways to find where a turn begins and ends in the text. A template may refuse a variant; then that way finds nothing.
struct Turns<'a> {
    tokenizer: &'a Tokenizer,
    template: &'a ChatTemplate,
    conversation: &'a Conversation<'a>,
    dialog: &'a Dialog,
    text: &'a str,
}

impl Turns<'_> {
    fn render(&self, messages: &[Value], add_generation_prompt: bool) -> Option<String> {
        self.template.render_dialog(self.dialog, messages, add_generation_prompt).ok().map(|r| r.text)
    }

    /// If the renderings of the messages before turn `i` and through it are prefixes of the whole.
    fn by_prefixes(&self, i: usize) -> Option<Range<usize>> {
        let messages = &self.dialog.messages;
        let (before, through) = (self.render(&messages[..i], true)?, self.render(&messages[..=i], false)?);
        if through.len() <= before.len() || !self.text.starts_with(&before) || !self.text.starts_with(&through) {
            return None;
        }
        let mut start = before.len();
        if self.render(&messages[..i], false)? == before {
            // The generation prompt has no effect, so a header may follow, which is not content: what any other answer has in common.
            let mut messages = messages[..i].to_vec();
            messages.push(message_value(&serde_json::json!({"role": "assistant", "content": self.dialog.marks[0].to_string()})));
            start = start.max(common_bytes(&self.render(&messages, false)?, self.text));
        }
        // The blanks that separate turns are not for the model to write.
        let turn = self.text.get(start..through.len())?;
        let end = start + closed_bytes(self.tokenizer, turn).unwrap_or(turn.len());
        (start < end).then_some(start..end)
    }

    /// Where the text changes when turn `i` says one unique character instead.
    fn by_sentinel(&self, i: usize) -> Option<Range<usize>> {
        let mark = self.dialog.marks[0];
        let mut messages = self.dialog.messages.clone();
        messages[i] = saying(&self.conversation.messages[i], mark);
        let changed = self.render(&messages, false)?;
        let (first, last) = (changed.find(mark)?, changed.rfind(mark)?);
        let after = &changed[last + mark.len_utf8()..];
        let start = common_bytes(&changed[..first], self.text);
        // What follows the turn must be unchanged, else the change reached beyond it and the end is unknown.
        let end = self.text.strip_suffix(after)?.len();
        (start < end).then_some(start..end)
    }

    /// Where a tool call begins, if the model had answered in one unique character instead, until the end of the sequence.
    fn by_reply(&self, i: usize) -> Option<Range<usize>> {
        let message = &self.conversation.messages[i];
        let eos = self.tokenizer.eos_text().filter(|eos| !eos.is_empty() && !message["tool_calls"].is_null())?;
        let mut messages = self.dialog.messages[..i].to_vec();
        messages.push(saying(message, self.dialog.marks[0]));
        let rest = self.conversation.messages.iter().zip(&self.dialog.messages).skip(i + 1);
        messages.extend(rest.skip_while(|(m, _)| m["role"] != "user").map(|(_, value)| value.clone()));
        let changed = self.render(&messages, false)?;
        let start = common_bytes(&changed[..changed.find(self.dialog.marks[0])?], self.text);
        self.text[start..].find(eos).map(|at| start..start + at + eos.len())
    }
}

/// The message with `mark` as its only content.
fn saying(message: &Json, mark: char) -> Value {
    let mut message = message.clone();
    if let Json::Object(fields) = &mut message {
        for field in ["tool_calls", "reasoning_content", "thinking", "reasoning"] {
            fields.remove(field);
        }
        fields.insert("content".into(), mark.to_string().into());
    }
    message_value(&message)
}

/// Bytes of the longest common prefix, whole characters only.
fn common_bytes(a: &str, b: &str) -> usize {
    let differs = a.char_indices().zip(b.chars()).find(|((_, x), y)| x != y);
    differs.map_or(a.len().min(b.len()), |((at, _), _)| at)
}

/// The turn holds what the message says. Templates may trim words, drop reasoning before `</think>`, and drop words beside calls.
fn says(turn: &str, message: &Json) -> bool {
    let calls = message["tool_calls"].as_array().map_or(&[][..], |calls| calls.as_slice());
    if !calls.is_empty() {
        let mut names = calls.iter().filter_map(|call| call.get("function").unwrap_or(call).get("name")?.as_str());
        return names.all(|name| turn.contains(name));
    }
    let content = message["content"].as_str().unwrap_or("");
    let answer = content.rsplit("</think>").next().unwrap_or(content);
    turn.contains(content.trim()) || turn.contains(answer.trim())
}

/// Extends a span over the end of turn that directly follows, unless it ends with one already.
fn with_end_of_turn(tokenizer: &Tokenizer, text: &str, span: Range<usize>) -> Range<usize> {
    let end = if closed_bytes(tokenizer, &text[span.clone()]).is_some() { span.end } else { following_end(tokenizer, text, span.end) };
    span.start..end
}

/// Bytes of a turn through the special token that closes it, if only blanks follow that.
fn closed_bytes(tokenizer: &Tokenizer, turn: &str) -> Option<usize> {
    const LONGEST_SPECIAL_BYTES: usize = 64;
    let turn = turn.trim_end();
    (turn.len().saturating_sub(LONGEST_SPECIAL_BYTES)..turn.len())
        .filter(|&at| turn.is_char_boundary(at))
        .any(|at| tokenizer.leading_special(&turn[at..]).is_some_and(|t| t.len() == turn.len() - at))
        .then_some(turn.len())
}

/// The end of the special token that follows at `end`; the end-of-sequence token may follow after blanks.
fn following_end(tokenizer: &Tokenizer, text: &str, end: usize) -> usize {
    let rest = &text[end..];
    if let Some(token) = tokenizer.leading_special(rest) {
        return end + token.len();
    }
    let blanks = rest.len() - rest.trim_start().len();
    match tokenizer.eos_text() {
        Some(eos) if !eos.is_empty() && rest[blanks..].starts_with(eos) => end + blanks + eos.len(),
        _ => end,
    }
}
