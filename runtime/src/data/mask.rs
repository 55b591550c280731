//! Which characters of a rendered conversation the assistant wrote, its end of turn included, and from these which tokens are
//! trained. By position, never by id: a padding id that equals the end of turn changes nothing.
//!
//! Templates with `{% generation %}` say it themselves. For others it is found by rendering, twice if need be:
//! 1. *prefixes*: `messages[..i]` with the generation prompt ends where turn `i` begins, `messages[..=i]` where it ends, if
//!    both are prefixes of the whole;
//! 2. *sentinel*: templates that treat the last message specially break that; then turn `i` is replaced by one character that
//!    occurs nowhere else, and what differs from the whole is the turn.
//!
//! Either way the turn must contain what the message says; a template that defeats both is an error, never a silent mask.

use super::template::{ChatTemplate, Conversation, Rendered, unused_marks};
use super::tokenizer::{Encoded, Tokenizer};
use serde_json::Value as Json;
use std::ops::Range;

/// A rendered conversation and the byte ranges of it that are trained, ascending.
pub(crate) fn assistant_spans(
    tokenizer: &Tokenizer,
    template: &ChatTemplate,
    conversation: &Conversation<'_>,
    first_trained: usize,
) -> Result<(String, Vec<Range<usize>>), String> {
    let Rendered { text, generated } = template.render(conversation, false)?;
    let mut spans = Vec::new();
    if template.has_generation() {
        // Turns before `first_trained` are a prompt; what they render to is a prefix here, since markers are the template's own word.
        let prompt_bytes = if first_trained == 0 { 0 } else { prompt_bytes(template, conversation, first_trained, &text)? };
        let starts = |span: &Range<usize>| span.start >= prompt_bytes;
        spans.extend(generated.into_iter().filter(starts).map(|s| with_end_of_turn(tokenizer, &text, s)));
    } else {
        for (i, message) in conversation.messages.iter().enumerate().skip(first_trained) {
            if message["role"] != "assistant" {
                continue;
            }
            let span = match by_prefixes(template, conversation, i, &text)? {
                Some(span) if says(&text[span.clone()], message) => span,
                _ => by_sentinel(template, conversation, i, &text)?.filter(|span| says(&text[span.clone()], message)).ok_or_else(|| {
                    format!(
                        "cannot find message {} (assistant) in what the chat template renders, so the loss mask would be wrong: put \
                         {{% generation %}} ... {{% endgeneration %}} around assistant content in a copy of the template and set \
                         data.chat_template to it",
                        i + 1
                    )
                })?,
            };
            spans.push(with_end_of_turn(tokenizer, &text, span));
        }
    }
    spans.dedup_by(|next, previous| {
        let overlaps = next.start < previous.end;
        if overlaps {
            previous.end = previous.end.max(next.end);
        }
        overlaps
    });
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

fn prompt_bytes(template: &ChatTemplate, conversation: &Conversation<'_>, messages: usize, text: &str) -> Result<usize, String> {
    let head = Conversation { messages: &conversation.messages[..messages], ..*conversation };
    for add_generation_prompt in [true, false] {
        let prompt = template.render(&head, add_generation_prompt)?.text;
        if text.starts_with(&prompt) {
            return Ok(prompt.len());
        }
    }
    Err("the rendered prompt is not the beginning of the rendered prompt and completion: use a \"messages\" dataset instead".into())
}

/// Where turn `i` begins and ends, if its prefixes nest.
fn by_prefixes(template: &ChatTemplate, conversation: &Conversation<'_>, i: usize, text: &str) -> Result<Option<Range<usize>>, String> {
    let prefix = |messages: usize, add_generation_prompt: bool| {
        let head = Conversation { messages: &conversation.messages[..messages], ..*conversation };
        template.render(&head, add_generation_prompt).map(|r| r.text)
    };
    // A template may refuse a conversation that ends early; then its prefixes do not nest.
    let (Ok(before), Ok(plain), Ok(through)) = (prefix(i, true), prefix(i, false), prefix(i + 1, false)) else { return Ok(None) };
    // Without an effect of the generation prompt the header of the turn would be taken for its content.
    let nests = before != plain && through.len() > before.len() && text.starts_with(&before) && text.starts_with(&through);
    Ok(nests.then_some(before.len()..through.len()))
}

/// Where the text changes when turn `i` says one unique character instead.
fn by_sentinel(template: &ChatTemplate, conversation: &Conversation<'_>, i: usize, text: &str) -> Result<Option<Range<usize>>, String> {
    let [mark, _] = unused_marks(conversation.messages.iter().chain(conversation.tools))?;
    let mut messages = conversation.messages.to_vec();
    if let Json::Object(fields) = &mut messages[i] {
        for field in ["tool_calls", "reasoning_content", "thinking", "reasoning"] {
            fields.remove(field);
        }
        fields.insert("content".into(), mark.to_string().into());
    }
    let Ok(changed) = template.render(&Conversation { messages: &messages, ..*conversation }, false) else { return Ok(None) };
    let changed = changed.text;
    let (Some(first), Some(last)) = (changed.find(mark), changed.rfind(mark)) else { return Ok(None) };
    let after = &changed[last + mark.len_utf8()..];
    let common = changed[..first].char_indices().zip(text.chars()).find(|((_, a), b)| a != b).map_or(first, |((at, _), _)| at);
    let start = common.min(text.len());
    // What follows the turn must be unchanged, else the change reached beyond it and the end is unknown.
    let fits = text.ends_with(after) && start < text.len() - after.len();
    Ok(fits.then(|| start..text.len() - after.len()))
}

/// The turn holds the message's words (templates may trim them, and drop reasoning before `</think>`).
fn says(turn: &str, message: &Json) -> bool {
    let Some(content) = message["content"].as_str() else { return true };
    let answer = content.rsplit("</think>").next().unwrap_or(content);
    turn.contains(content.trim()) || turn.contains(answer.trim())
}

/// Ends a span right after the end of turn: blanks after a closing special token are not trained, and a special token that
/// directly follows the span is.
fn with_end_of_turn(tokenizer: &Tokenizer, text: &str, span: Range<usize>) -> Range<usize> {
    let turn = text[span.clone()].trim_end();
    let closed = (0..turn.len())
        .rev()
        .filter(|&at| turn.is_char_boundary(at))
        .take(64)
        .find(|&at| tokenizer.leading_special(&turn[at..]).is_some_and(|t| t.len() == turn.len() - at));
    if closed.is_some() {
        return span.start..span.start + turn.len();
    }
    let rest = &text[span.end..];
    if let Some(token) = tokenizer.leading_special(rest) {
        return span.start..span.end + token.len();
    }
    let blanks = rest.len() - rest.trim_start().len();
    match tokenizer.eos_text() {
        Some(eos) if !eos.is_empty() && rest[blanks..].starts_with(eos) => span.start..span.end + blanks + eos.len(),
        _ => span,
    }
}
