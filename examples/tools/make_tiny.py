#!/usr/bin/env python3
"""Make what examples/pretrain-tiny.toml starts from: a byte-level tokenizer, a config.json, and plain text to train on.

Text: the docstrings of the Python standard library that runs this script (PSF License 2.0), one a line of pretrain.jsonl.
Tokenizer: the 256 bytes, and <|im_start|>, <|im_end|>, <|pad|>; ChatML template.
The weights are then trained by this runtime:

    python3 examples/tools/make_tiny.py
    zlaunch -n 2 examples/pretrain-tiny.toml
    python3 examples/tools/make_tiny.py --weights runs/pretrain-tiny/model/model.safetensors     # rounds them to bf16

usage: make_tiny.py [--out examples] [--weights FILE]      (standard library only)
"""
import argparse, array, ast, hashlib, inspect, json, os, struct, sysconfig

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|pad|>"]
TEMPLATE = ("{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
            "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


def byte_chars():
    """GPT-2's printable character for each byte."""
    keep = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    chars, extra = {b: chr(b) for b in keep}, 0
    for b in range(256):
        if b not in chars:
            chars[b] = chr(256 + extra)
            extra += 1
    return [chars[b] for b in range(256)]


def docstrings(limit):
    lib, out, seen = sysconfig.get_paths()["stdlib"], [], set()
    for root, dirs, files in os.walk(lib):
        dirs[:] = sorted(d for d in dirs if d not in ("test", "tests", "site-packages", "lib2to3", "idlelib", "__pycache__", "turtledemo"))
        for f in sorted(files):
            if not f.endswith(".py"):
                continue
            try:
                tree = ast.parse(open(os.path.join(root, f), encoding="utf-8").read())
            except (SyntaxError, UnicodeDecodeError):
                continue
            for node in ast.walk(tree):
                if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                    doc = ast.get_docstring(node)
                    if doc and 60 <= len(doc) <= 2000 and doc not in seen:
                        seen.add(doc)
                        out.append(inspect.cleandoc(doc))
    out.sort(key=lambda d: hashlib.sha256(d.encode()).hexdigest())
    total = 0
    for d in out:
        total += len(d)
        if total > limit:
            break
        yield d


def to_bf16(source, target):
    """Rounds the f32 tensors of a safetensors file to bf16 (nearest, ties to even)."""
    raw = open(source, "rb").read()
    n = struct.unpack("<Q", raw[:8])[0]
    header, out, blobs, at = json.loads(raw[8:8 + n]), {"__metadata__": {"format": "pt"}}, [], 0
    for name in sorted(k for k in header if k != "__metadata__"):
        a, b = header[name]["data_offsets"]
        words = array.array("I", raw[8 + n + a:8 + n + b])
        half = array.array("H", [(w + 0x7FFF + (w >> 16 & 1)) >> 16 for w in words]).tobytes()
        out[name] = {"dtype": "BF16", "shape": header[name]["shape"], "data_offsets": [at, at + len(half)]}
        blobs.append(half)
        at += len(half)
    text = json.dumps(out, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(target, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + b"".join(blobs))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--out", default="examples")
    ap.add_argument("--bytes", type=int, default=1_200_000)
    ap.add_argument("--weights")
    a = ap.parse_args()
    if a.weights:
        return to_bf16(a.weights, os.path.join(a.out, "tiny", "model.safetensors"))
    tiny = os.path.join(a.out, "tiny")
    os.makedirs(tiny, exist_ok=True)

    def dump(name, obj):
        with open(os.path.join(tiny, name), "w", encoding="utf-8", newline="\n") as f:
            json.dump(obj, f, indent=1, ensure_ascii=False)
            f.write("\n")

    added = [{"id": 256 + i, "content": s, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
             for i, s in enumerate(SPECIAL)]
    vocab = {c: b for b, c in enumerate(byte_chars())} | {s: 256 + i for i, s in enumerate(SPECIAL)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    dump("tokenizer.json", {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None, "pre_tokenizer": level,
        "post_processor": None, "decoder": level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": vocab, "merges": []}})
    dump("tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|pad|>",
        "model_max_length": 1024, "clean_up_tokenization_spaces": False, "chat_template": TEMPLATE,
        "added_tokens_decoder": {str(d["id"]): {k: v for k, v in d.items() if k != "id"} for d in added}})
    dump("config.json", {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 272, "hidden_size": 192, "intermediate_size": 512,
        "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
        "attention_dropout": 0.0, "initializer_range": 0.04, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "bos_token_id": None, "eos_token_id": 257, "pad_token_id": 258, "use_cache": True})
    os.makedirs(os.path.join(a.out, "data"), exist_ok=True)
    with open(os.path.join(a.out, "data", "pretrain.jsonl"), "w", encoding="utf-8", newline="\n") as f:
        n = 0
        for d in docstrings(a.bytes):
            f.write(json.dumps({"text": d}, ensure_ascii=False) + "\n")
            n += 1
    print(f"{n} texts, {os.path.getsize(f.name)} bytes")


if __name__ == "__main__":
    main()
