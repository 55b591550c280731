"""Products of linear layers: ours beside PyTorch's (MKL and oneDNN), alternating in one run, and the multiply-add peak.

usage: python benches/compare/matmul.py [--shapes smollm2|llama8b|llama70b|lora] [--threads 1,2] [--type f32|bf16] [--tokens N] [--rounds N]

Three products per layer, N tokens: forward y = x W^T, dgrad dx = dy W, wgrad dw = dy^T x (f32 result). Ours packs whatever it packs
within the call. For PyTorch the best of torch.mm (MKL for f32) and oneDNN's linear counts, outputs preallocated where the interface
allows. A busy machine says nothing: wait until `uptime` shows a load below 1.
"""

import argparse
import os
import subprocess
import time

parser = argparse.ArgumentParser()
parser.add_argument("--shapes", default="smollm2")
parser.add_argument("--threads", default="1,2")
parser.add_argument("--type", default="f32", choices=["f32", "bf16"])
parser.add_argument("--tokens", type=int, default=0)
parser.add_argument("--rounds", type=int, default=2)
args = parser.parse_args()

import torch  # noqa: E402, after --help

SHAPES = {  # name, outputs, inputs; default tokens
    "smollm2": (1024, [("q, o", 576, 576), ("k, v", 192, 576), ("gate, up", 1536, 576), ("down", 576, 1536)]),
    "llama8b": (512, [("q, o", 4096, 4096), ("k, v", 1024, 4096), ("gate, up", 14336, 4096), ("down", 4096, 14336)]),
    "llama70b": (512, [("q, o", 8192, 8192), ("k, v", 1024, 8192), ("gate, up", 28672, 8192)]),
    "lora": (1024, [("A of 576", 16, 576), ("B to 576", 576, 16), ("A of 4096", 16, 4096)]),
}
ROOT = os.path.join(os.path.dirname(__file__), "..", "..")
OURS = os.path.join(ROOT, "target", "release", "examples", "matmul_rate")


def fastest(flops, threads, f):
    """GFLOP/s of the fastest run."""
    best = float("inf")
    for _ in range(max(2, min(1000, int(3e10 * threads / flops)))):
        start = time.perf_counter()
        f()
        best = min(best, time.perf_counter() - start)
    return flops / best / 1e9


def ours(threads, n, o, i):
    line = subprocess.run([OURS, "best", str(threads), args.type, str(n), str(o), str(i)], check=True, capture_output=True, text=True)
    return [float(v) for v in line.stdout.split()]


def peer(threads, n, o, i):
    """For each of the three products {library: GFLOP/s}."""
    torch.set_num_threads(threads)
    dtype = torch.float32 if args.type == "f32" else torch.bfloat16
    x, w, dy = (torch.full(s, 0.01, dtype=dtype) for s in ((n, i), (o, i), (n, o)))
    y, dx, dw = (torch.empty(s, dtype=dtype) for s in ((n, o), (n, i), (o, i)))
    flops = 2.0 * n * o * i
    onednn = torch.ops.mkldnn._linear_pointwise
    ways = [
        {"mm": lambda: torch.mm(x, w.t(), out=y), "onednn": lambda: onednn(x, w, None, "none", [], "")},
        {"mm": lambda: torch.mm(dy, w, out=dx), "onednn": lambda: onednn(dy, w.t(), None, "none", [], "")},
        {"mm": lambda: torch.mm(dy.t(), x, out=dw), "onednn": lambda: onednn(dy.t(), x.t(), None, "none", [], "")},
    ]
    found = []
    for way in ways:
        rates = {}
        for name, f in way.items():
            try:
                rates[name] = fastest(flops, threads, f)
            except RuntimeError as why:
                print(f"not run: {name}: {str(why).splitlines()[0]}")
        found.append(rates)
    return found


if not os.path.exists(OURS):
    raise SystemExit("build it first: cargo build --release -p zrt-kernels --example matmul_rate")
tokens, shapes = SHAPES[args.shapes]
tokens = args.tokens or tokens
print(f"{args.type}, {tokens} tokens, torch {torch.__version__}; GFLOP/s (ours % of the f32 multiply-add peak, x = ours / theirs)")
head = f"{'threads':>7} {'layer':<10} {'outputs':>7} {'inputs':>7} {'peak':>6}"
print(head + "".join(f" | {p:^28}" for p in ("forward", "dgrad", "wgrad")))
print(" " * len(head) + f" | {'ours':>12} {'torch':>9} {'x':>5}" * 3)
for threads in [int(t) for t in args.threads.split(",")]:
    for name, o, i in shapes:
        mine, theirs = [0.0] * 4, [{}, {}, {}]
        for _ in range(args.rounds):
            mine = [max(a, b) for a, b in zip(mine, ours(threads, tokens, o, i))]
            for best, now in zip(theirs, peer(threads, tokens, o, i)):
                best.update({k: max(v, best.get(k, 0.0)) for k, v in now.items()})
        line = f"{threads:>7} {name:<10} {o:>7} {i:>7} {mine[0]:>6.0f}"
        for rate, rates in zip(mine[1:], theirs):
            library, best = max(rates.items(), key=lambda kv: kv[1])
            line += f" | {rate:>6.0f} {100 * rate / mine[0]:>4.0f}% {best:>5.0f} {library[:3]:<3} {rate / best:>5.2f}"
        print(line, flush=True)
