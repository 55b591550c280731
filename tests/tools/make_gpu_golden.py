#!/usr/bin/env python3
"""Golden data of single operations, for the question whether a GPU kernel's error against f64 is at most twice PyTorch's in bf16.

Writes golden/gpu/ops.safetensors: inputs (bf16, adapters f32), results in float64 rounded to f32, names "operation.tensor"; and
golden/gpu/errors.json: by result, the relative L2 distance from float64 of the same operation in PyTorch bf16 on the CPU, the
way Hugging Face's models and PEFT write it.
usage: make_gpu_golden.py [--out DIR]
"""
import argparse, json, os
import torch
import torch.nn.functional as F
from safetensors.torch import save_file


def rotate_half(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def attention(t, x):
    """[tokens, heads, dim], causal, query heads in groups that share a kv head; the best kernel that PyTorch has."""
    q, k, v = (x[n].transpose(0, 1)[None] for n in ("q", "k", "v"))
    k, v = (a.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for a in (k, v))
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1)
    return {"o": o}


def lora(t, x):
    low = F.linear(x["x"], x["a"].to(t))
    return {"y": x["y0"] + 2.0 * F.linear(low, x["b"].to(t))}


def linear(t, x):
    return {"y": F.linear(x["x"], x["w"])}


def rmsnorm(t, x):
    wide = x["x"] if t == torch.float64 else x["x"].float()
    y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    return {"y": x["w"] * y.to(t)}


def swiglu(t, x):
    return {"h": F.silu(x["gate"]) * x["up"]}


def rope(t, x):
    cos, sin = (x["table"][:, None, :32].to(t).repeat(1, 1, 2), x["table"][:, None, 32:].to(t).repeat(1, 1, 2))
    return {"y": x["x"] * cos + rotate_half(x["x"]) * sin}


def cross_entropy(t, x):
    logits = F.linear(x["x"], x["w"])
    labels = torch.tensor([-100 if n % 5 == 3 else n * 37 % 160 for n in range(24)])
    return {"loss": F.cross_entropy(logits if t == torch.float64 else logits.float(), labels, ignore_index=-100, reduction="none")}


# Inputs by shape; those in WIDE stay f32, those in FIXED have no gradient.
CASES = {
    "attention": (attention, dict(q=(40, 2, 64), k=(40, 1, 64), v=(40, 1, 64))),
    "lora": (lora, dict(x=(48, 64), a=(8, 64), b=(96, 8), y0=(48, 96))),
    "linear": (linear, dict(x=(48, 64), w=(72, 64))),
    "rmsnorm": (rmsnorm, dict(x=(16, 256), w=(256,))),
    "swiglu": (swiglu, dict(gate=(1024,), up=(1024,))),
    "rope": (rope, dict(x=(16, 2, 64), table=(16, 64))),
    "cross_entropy": (cross_entropy, dict(x=(24, 32), w=(160, 32))),
}
WIDE, FIXED = {"a", "b", "table"}, {"y0", "table"}


def run(f, t, inputs, above):
    x = {n: v.to(torch.float64 if t == torch.float64 else v.dtype).requires_grad_(n not in FIXED) for n, v in inputs.items()}
    (name, y), = f(t, x).items()
    y.backward(above.to(y.dtype))
    return {name: y.detach().double()} | {f"d{n}": v.grad.double() for n, v in x.items() if v.grad is not None}


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--out", default=os.path.join(os.path.dirname(__file__), "../golden/gpu"))
    out = p.parse_args().out
    torch.manual_seed(20)
    torch.set_num_threads(1)
    tensors, errors = {}, {}
    for case, (f, shapes) in CASES.items():
        inputs = {n: torch.randn(s) * (0.25 if n in ("a", "b") else 1.0) for n, s in shapes.items()}
        if case == "rope":
            angle = torch.rand(16, 32) * 6.28
            inputs["table"] = torch.cat((angle.cos(), angle.sin()), dim=-1)
        inputs = {n: v if n in WIDE else v.bfloat16() for n, v in inputs.items()}
        (_, y), = f(torch.float64, {n: v.double() for n, v in inputs.items()}).items()
        # The loss's gradient is a factor of all tokens.
        above = torch.full(y.shape, 0.125) if case == "cross_entropy" else torch.randn(y.shape).bfloat16()
        want, got = run(f, torch.float64, inputs, above), run(f, torch.bfloat16, inputs, above)
        tensors |= {f"{case}.{n}": v for n, v in inputs.items()}
        if case != "cross_entropy":
            tensors[f"{case}.above"] = above
        for n, w in want.items():
            tensors[f"{case}.{n}"] = w.float()
            errors[f"{case}.{n}"] = float((got[n] - w).norm() / w.norm())
    os.makedirs(out, exist_ok=True)
    save_file({k: v.contiguous() for k, v in sorted(tensors.items())}, f"{out}/ops.safetensors", metadata={"format": "pt"})
    with open(f"{out}/errors.json", "w") as file:
        json.dump({"torch": torch.__version__.split("+")[0], "errors": errors}, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main()
