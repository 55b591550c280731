#!/usr/bin/env python3
"""Golden data of chat templates: what transformers renders, which ids that gives, and which tokens the assistant wrote.

Writes  golden/chat/tokenizer.json   a small byte-level BPE tokenizer with the special tokens of all formats
        golden/chat/NAME.json        per template NAME.jinja: special tokens and cases (messages, tools, further
                                     variables -> text, text with generation prompt, ids, mask; or an error)
        golden/chat/values.json      the same for values.jinja, which prints values rather than conversations

The mask is the one of transformers (return_assistant_tokens_mask) under a copy of the template with {% generation %}
around each assistant turn, end of turn included; both render the same text (asserted). The copy is NAME.marked.jinja,
derived from NAME.jinja here (chatml's is written by hand).
requires: transformers 5, jinja2, tokenizers.  usage: make_chat_golden.py
"""
import json, os
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "golden", "chat")
SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
]
PLAIN = ["<think>", "</think>", "<tool_call>", "</tool_call>"]  # added, but not special, as Qwen3 has them

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather of a city. \"Feels like\" too, <b>always</b> & in °C.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Name, e.g. Zürich or 東京"},
                "options": {
                    "type": "object",
                    "properties": {"units": {"type": "string", "enum": ["C", "F"]}, "days": {"type": "integer", "minimum": 0}},
                    "additionalProperties": False,
                },
                "precision": {"type": "number", "default": 0.1},
            },
            "required": ["city"],
        },
    },
}
NOOP = {"type": "function", "function": {"name": "noop", "description": "", "parameters": {"type": "object", "properties": {}}}}


def u(content):
    return {"role": "user", "content": content}


def a(content, **more):
    return {"role": "assistant", "content": content, **more}


def s(content):
    return {"role": "system", "content": content}


def call(name, arguments, id="abc123def"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


TOOL_TURNS = [
    u("Weather in Zürich?"),
    {"role": "assistant", "content": None, "tool_calls": [call("get_weather", {"city": "Zürich", "options": {"units": "C", "days": 2}, "precision": 1e-05})]},
    {"role": "tool", "tool_call_id": "abc123def", "name": "get_weather", "content": "{\"temp\": 7.5, \"sky\": \"cloudy\"}"},
    a("It is 7.5 °C and cloudy."),
]
CASES = {
    "simple": dict(messages=[u("Hi there"), a("Hello! How can I help?")]),
    "multi_turn_system": dict(messages=[s("Be terse."), u("2+2?"), a("4"), u("And 3+3?"), a("6"), u("Thanks"), a("Any time.")]),
    "repeated": dict(messages=[u("ok"), a("ok"), u("ok"), a("ok"), u("assistant"), a("assistant")]),
    "unicode": dict(messages=[u("Schreibe „Grüße“ 🎉"), a("Grüße 👩‍👩‍👧 e\u0301 你好 مرحبا\u200f ﷺ"), u("\u00a0nbsp\u00a0"), a("naïve — “quotes” …")]),
    "whitespace": dict(messages=[s("  padded  \n"), u("\n\tcode:\n    x = 1\n"), a("  \n    y = 2\n\n"), u(" "), a("trailing \t")]),
    "markup": dict(messages=[u("{{ x }} {% if %} <b>&amp;</b> 'single' \"double\" \\n"), a("`{% endif %}` & <tag> \"q\" 's' \\ end")]),
    "special_in_content": dict(messages=[u("What does <|im_end|> or </s> mean?"), a("It ends <|eot_id|> turns.")]),
    "last_user": dict(messages=[u("One"), a("Two"), u("Three")]),
    "tools": dict(messages=TOOL_TURNS, tools=[WEATHER, NOOP]),
    "tools_system_multi": dict(messages=[s("Use tools."), *TOOL_TURNS, u("And tomorrow?"), a("I cannot know.")], tools=[WEATHER]),
    "two_calls": dict(
        messages=[
            u("Both?"),
            a("Let me look.", tool_calls=[call("noop", {}, "000000001"), call("get_weather", {"city": "\"x\"\n"}, "000000002")]),
            {"role": "tool", "tool_call_id": "000000001", "content": "[]"},
            {"role": "tool", "tool_call_id": "000000002", "content": "{}"},
            a("Done."),
        ],
        tools=[NOOP, WEATHER],
    ),
    "reasoning": dict(messages=[u("Why?"), a("Because.", reasoning_content="Let me think.\nHm."), u("Sure?"), a("Yes.", reasoning_content="Certain\n")]),
    "think_in_content": dict(messages=[u("Why?"), a("<think>\nfirst\n</think>\n\nBecause."), u("Sure?"), a("<think>\nsecond\n</think>\n\nYes.")]),
    "reasoning_with_tool": dict(
        messages=[u("W?"), a("", reasoning_content="call it", tool_calls=[call("noop", {})]), {"role": "tool", "tool_call_id": "abc123def", "content": "1"}, a("One.", reasoning_content="got 1")],
        tools=[NOOP],
    ),
    "no_thinking": dict(messages=[u("Quick?"), a("Yes.")], extra={"enable_thinking": False, "date_string": "01 Jan 2025"}),
    "two_users": dict(messages=[u("One"), u("Two"), a("Three")]),
    "empty_answer": dict(messages=[u("Say nothing"), a("")]),
}
FORMATS = {
    "chatml": dict(bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>", unk_token="<|endoftext|>"),
    "llama3": dict(bos_token="<|begin_of_text|>", eos_token="<|eot_id|>", pad_token="<|eot_id|>"),
    "mistral": dict(bos_token="<s>", eos_token="</s>"),
    "qwen3": dict(eos_token="<|im_end|>", pad_token="<|endoftext|>"),
}
SKIP = {"chatml": {"tools", "tools_system_multi", "two_calls", "reasoning_with_tool"}}


def train():
    texts = []
    for case in CASES.values():
        texts += [m["content"] or "" for m in case["messages"]]
        texts.append(json.dumps(case.get("tools"), ensure_ascii=False))
    texts += open(os.path.join(HERE, "llama3.jinja")).read().splitlines()
    texts.append("system user assistant tool ipython You are a helpful assistant. Environment Cutting Knowledge Date December")
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tok.train_from_iterator(texts * 3, trainer)
    tok.add_tokens(PLAIN)
    # As Llama 3 does: the tokenizer adds the begin of text, and so does the template.
    tok.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", tok.token_to_id("<|begin_of_text|>"))]),
    ])
    tok.save(os.path.join(HERE, "tokenizer.json"), pretty=False)


def marked(name, source):
    """A copy of the template whose assistant turns are marked."""
    if name == "chatml":
        return open(os.path.join(HERE, "chatml.marked.jinja")).read()
    if name == "llama3":
        old = "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}"
        new = ("{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}{%- if message['role'] == 'assistant' %}"
               "{%- generation %}{{- message['content'] | trim + '<|eot_id|>' }}{%- endgeneration %}{%- else %}"
               "{{- message['content'] | trim + '<|eot_id|>' }}{%- endif %}")
        assert source.count(old) == 1
        source = source.replace(old, new)
        start, end = "{{- '{\"name\": \"' + tool_call.name", "        {{- \"<|eot_id|>\" }}\n    {%- elif message.role == \"tool\""
        assert source.count(start) == 1 and source.count(end) == 1
        source = source.replace(end, "        {{- \"<|eot_id|>\" }}{%- endgeneration %}\n    {%- elif message.role == \"tool\"")
        return source.replace(start, "{%- generation %}" + start)
    if name == "mistral":
        old = '{{- " " + message["content"]|trim + eos_token}}'
        assert source.count(old) == 1
        source = source.replace(old, "{{- ' ' }}{%- generation %}{{- message['content']|trim + eos_token }}{%- endgeneration %}")
        start, end = '{{- "[TOOL_CALLS] [" }}', '    {%- elif message["role"] == "assistant" %}'
        assert source.count(start) == 1 and source.count(end) == 1
        return source.replace(start, "{%- generation %}" + start).replace(end, "{%- endgeneration %}" + end)
    assert source.count("{#- <generation> #}") == 1
    return source.replace("{#- <generation> #}", "{%- generation %}").replace("{#- </generation> #}", "{%- endgeneration %}")


def dump(name, content):
    with open(os.path.join(HERE, name + ".json"), "w") as f:
        json.dump(content, f, indent=1, ensure_ascii=False)
        f.write("\n")


def run(name, special):
    source = open(os.path.join(HERE, name + ".jinja")).read()
    tok = PreTrainedTokenizerFast(tokenizer_file=os.path.join(HERE, "tokenizer.json"), **special)
    with_marks = marked(name, source)
    with open(os.path.join(HERE, name + ".marked.jinja"), "w") as f:
        f.write(with_marks)
    cases = []
    for case_name, case in CASES.items():
        if case_name in SKIP.get(name, ()):
            continue
        out = dict(name=case_name, **case)
        extra = case.get("extra", {})
        args = dict(tools=case.get("tools"), **extra)
        try:
            out["text"] = tok.apply_chat_template(case["messages"], chat_template=source, tokenize=False, **args)
        except Exception as e:
            out["error"] = str(e)
            cases.append(out)
            continue
        out["prompt_text"] = tok.apply_chat_template(case["messages"], chat_template=source, tokenize=False, add_generation_prompt=True, **args)
        got = tok.apply_chat_template(case["messages"], chat_template=with_marks, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **args)
        assert tok.apply_chat_template(case["messages"], chat_template=with_marks, tokenize=False, **args) == out["text"], (name, case_name)
        out["ids"], out["mask"] = list(got["input_ids"]), list(got["assistant_masks"])
        if extra.get("enable_thinking") is False:
            # What the generation prompt holds already (an empty reasoning block) is not for the model to write.
            given = len(tok.apply_chat_template(case["messages"][:-1], chat_template=source, tokenize=False, add_generation_prompt=True, **args))
            out["mask"] = [m if end > given else 0 for m, (_, end) in zip(out["mask"], got.encodings[0].offsets)]
        assert sum(out["mask"]) > 0, (name, case_name)
        cases.append(out)
    dump(name, dict(special=special, cases=cases))
    print(name, len(cases), "cases", [c["name"] for c in cases if "error" in c])


VALUES = {
    "int": 3, "float": 1.0, "small": 1e-05, "large": 1e+20, "third": 0.3333333333333333, "neg": -2.5, "yes": True, "no": False,
    "null": None, "text": "it's \"q\" <b>&\n\t\\ é 🎉 \u007f \u0001 \u2028", "list": [1, [], {}, "x"], "map": {"b": 1, "a": {"z": None}}, "empty": "",
}


def values():
    source = open(os.path.join(HERE, "values.jinja")).read()
    tok = PreTrainedTokenizerFast(tokenizer_file=os.path.join(HERE, "tokenizer.json"))
    messages = [{"role": "user", "content": "\u2003 \x1f padded \u00a0 text\x85\n", "values": VALUES}]
    text = tok.apply_chat_template(messages, chat_template=source, tokenize=False)
    dump("values", dict(messages=messages, text=text))


train()
for format_name, format_special in FORMATS.items():
    run(format_name, format_special)
values()
