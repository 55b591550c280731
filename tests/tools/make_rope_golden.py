#!/usr/bin/env python3
"""Golden rotary numbers of transformers, for every supported variant, on CPU.

Writes golden/rope/cases.json: a list of {name, config (as in config.json), seq_len, inv_freq, attention_factor, positions,
cos, sin}, where cos and sin are the first half of each row (the second half repeats it) for the positions listed.
usage: make_rope_golden.py [--out DIR]     (needs torch, transformers 5)
"""
import argparse, json, os
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

BASE = dict(architectures=["LlamaForCausalLM"], vocab_size=64, hidden_size=256, intermediate_size=64, num_hidden_layers=1,
            num_attention_heads=4, num_key_value_heads=2)
CASES = [
    ("default", dict(max_position_embeddings=2048, rope_theta=10000.0), 32),
    ("default_theta", dict(max_position_embeddings=8192, head_dim=128, rope_theta=1000000), 32),
    ("v4_linear", dict(max_position_embeddings=4096, rope_theta=10000.0, rope_scaling={"type": "linear", "factor": 2.5}), 32),
    ("v5_linear", dict(max_position_embeddings=4096, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 50000.0}), 32),
    ("dynamic_short", dict(max_position_embeddings=64, rope_theta=10000.0, rope_scaling={"rope_type": "dynamic", "factor": 2.0}), 48),
    ("dynamic_long", dict(max_position_embeddings=64, rope_theta=10000.0, rope_scaling={"rope_type": "dynamic", "factor": 2.0}), 200),
    ("llama3", dict(max_position_embeddings=131072, head_dim=128, rope_theta=500000.0, rope_scaling={
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}), 32),
    ("llama3_32", dict(max_position_embeddings=131072, rope_parameters={
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192}), 32),
    ("yarn_qwen", dict(max_position_embeddings=32768, head_dim=128, rope_theta=1000000.0, rope_scaling={
        "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}), 32),
    ("yarn_betas", dict(max_position_embeddings=16384, rope_parameters={
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 2048, "beta_fast": 16, "beta_slow": 2,
        "truncate": False}), 32),
    ("yarn_mscale", dict(max_position_embeddings=16384, rope_parameters={
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 2048, "mscale": 1.0,
        "mscale_all_dim": 0.707}), 32),
    ("yarn_attention_factor", dict(max_position_embeddings=4096, rope_parameters={
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 2048, "attention_factor": 1.25}), 32),
    ("yarn_null_factor", dict(max_position_embeddings=8192, rope_parameters={
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": None, "original_max_position_embeddings": 2048}), 32),
]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--out", default=os.path.join(os.path.dirname(__file__), "..", "golden", "rope"))
    out = p.parse_args().out
    os.makedirs(out, exist_ok=True)
    rows = []
    for name, extra, seq_len in CASES:
        config = json.loads(json.dumps({**BASE, **extra}))
        emb = LlamaRotaryEmbedding(LlamaConfig(**json.loads(json.dumps(config))))
        ids = torch.arange(seq_len)[None]
        cos, sin = emb(torch.zeros(1, dtype=torch.float32), ids)   # dynamic updates its frequencies here
        half = cos.shape[-1] // 2
        positions = sorted({0, 1, 7, seq_len - 1})
        rows.append(dict(name=name, config=config, seq_len=seq_len, inv_freq=emb.inv_freq.tolist(), attention_factor=emb.attention_scaling,
                         positions=positions, cos=[cos[0, p, :half].tolist() for p in positions], sin=[sin[0, p, :half].tolist() for p in positions]))
    with open(os.path.join(out, "cases.json"), "w") as f:
        json.dump(rows, f)
        f.write("\n")


if __name__ == "__main__":
    main()
