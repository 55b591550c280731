#!/usr/bin/env python3
"""Golden targets of PEFT: for LoRA configurations on golden/tiny_model, which modules PEFT adapts, with what rank and scale.

Writes golden/peft/cases.json: a list of {name, config (as in adapter_config.json), targets: [[module path, r, scale], ...]}.
usage: make_peft_golden.py [--golden DIR]     (needs torch, transformers, peft)
"""
import argparse, json, os
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

ALL = "all-linear"
CASES = [
    ("suffixes", dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])),
    ("all_linear", dict(r=2, lora_alpha=3, target_modules=ALL)),
    ("longer_suffix", dict(r=2, lora_alpha=3, target_modules=["self_attn.k_proj", "1.mlp.up_proj"])),
    ("whole_path", dict(r=2, lora_alpha=3, target_modules=["model.layers.1.mlp.down_proj"])),
    ("regex", dict(r=2, lora_alpha=3, target_modules=r"model\.layers\.[01]\.self_attn\.(q|k)_proj")),
    ("regex_alternatives", dict(r=2, lora_alpha=3, target_modules=r".*q_proj|.*mlp.*_proj")),
    ("regex_lookahead", dict(r=2, lora_alpha=3, target_modules=r".*\.(?!down)\w+_proj")),
    ("rslora", dict(r=9, lora_alpha=6, use_rslora=True, target_modules=ALL)),
    ("rank_suffix", dict(r=4, lora_alpha=8, target_modules=ALL, rank_pattern={"q_proj": 8, "mlp.up_proj": 2})),
    ("rank_alternatives", dict(r=4, lora_alpha=8, target_modules=ALL, rank_pattern={"q_proj|k_proj": 16}, alpha_pattern={"k_proj": 2})),
    ("rank_anchored", dict(r=4, lora_alpha=8, target_modules=ALL, rank_pattern={r"^model\.layers\.0\.self_attn\.q_proj": 2})),
    ("rank_partial_name", dict(r=4, lora_alpha=8, target_modules=ALL, rank_pattern={r"layers\.1\..*": 6})),
    ("first_match_wins", dict(r=4, lora_alpha=8, target_modules=ALL, rank_pattern={"mlp.up_proj": 2, "up_proj": 3})),
    ("rslora_patterns", dict(r=4, lora_alpha=8, use_rslora=True, target_modules=ALL, rank_pattern={"o_proj": 16}, alpha_pattern={"o_proj": 5})),
    ("layers", dict(r=4, lora_alpha=8, target_modules=["q_proj", "up_proj"], layers_to_transform=[1])),
    ("layers_pattern", dict(r=4, lora_alpha=8, target_modules=["q_proj"], layers_to_transform=0, layers_pattern="layers")),
    ("exclude", dict(r=4, lora_alpha=8, target_modules=ALL, exclude_modules=["down_proj", "model.layers.0.self_attn.q_proj"])),
    ("exclude_regex", dict(r=4, lora_alpha=8, target_modules=ALL, exclude_modules=r".*layers\.0\..*_proj")),
]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--golden", default=os.path.join(os.path.dirname(__file__), "..", "golden"))
    golden = p.parse_args().golden
    rows = []
    for name, kw in CASES:
        config = LoraConfig(task_type="CAUSAL_LM", **kw)
        saved = {k: sorted(v) if isinstance(v, set) else v for k, v in config.to_dict().items()}
        if kw["target_modules"] == ALL:
            saved["target_modules"] = ALL
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(os.path.join(golden, "tiny_model")), config)
        targets = [[n.removeprefix("base_model.model."), m.r["default"], m.scaling["default"]]
                   for n, m in model.named_modules() if hasattr(m, "lora_A") and "default" in m.lora_A]
        saved.pop("runtime_config", None)
        rows.append(dict(name=name, config=json.loads(json.dumps(saved, default=str)), targets=targets))
    os.makedirs(os.path.join(golden, "peft"), exist_ok=True)
    with open(os.path.join(golden, "peft", "cases.json"), "w") as f:
        json.dump(rows, f, indent=1)
        f.write("\n")


if __name__ == "__main__":
    main()
