"""PyTorch's times of the calls that gpu_kernels measures, for benches/gpu.sh: reads `operation<TAB>sizes` lines from standard input,
prints `operation<TAB>sizes<TAB>microseconds<TAB>by what`. Liger's norm and SwiGLU, FlashAttention and PEFT are measured where installed.

bf16 activations and weights, f32 adapters cast to bf16 as PEFT under autocast does. A backward is timed as autograd runs it, with the
forward that it needs taken off.
"""

import re
import sys
import time

import torch
import torch.nn.functional as F

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cuda"
BF16 = torch.bfloat16


def randn(*shape, dtype=BF16, grad=False):
    return torch.randn(*shape, device=DEVICE, dtype=dtype, requires_grad=grad)


def sync():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def micros(f, budget=0.15):
    """Mean microseconds of f, between events."""
    for _ in range(2):
        f()
    sync()
    start = time.perf_counter()
    f()
    sync()
    runs = int(min(200, max(3, budget / max(time.perf_counter() - start, 1e-6))))
    if DEVICE != "cuda":
        start = time.perf_counter()
        for _ in range(3):
            f()
        return (time.perf_counter() - start) / 3 * 1e6
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record()
    for _ in range(runs):
        f()
    b.record()
    sync()
    return a.elapsed_time(b) / runs * 1e3


def backward(forward, inputs, of=None):
    """Microseconds of the backward of forward() alone: the graph is kept."""
    out = forward()
    grad = torch.randn_like(out)
    return micros(lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True))


def rms(x, w):
    return F.rms_norm(x, (x.shape[-1],), w, 1e-5)


def rope(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def rmsnorm(n, c):
    x, w = randn(n, c, grad=True), randn(c)
    yield "rmsnorm", "torch", lambda: micros(lambda: rms(x.detach(), w))
    yield "rmsnorm_backward", "torch", lambda: backward(lambda: rms(x, w), [x])
    try:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction as L
    except ImportError:
        return
    yield "rmsnorm", "liger", lambda: micros(lambda: L.apply(x.detach(), w, 1e-5))
    yield "rmsnorm_backward", "liger", lambda: backward(lambda: L.apply(x, w, 1e-5), [x])


def linear(n, i, o):
    x, w, dy = randn(n, i), randn(o, i), randn(n, o)
    yield "linear", "torch", lambda: micros(lambda: F.linear(x, w))
    yield "linear_backward", "torch", lambda: micros(lambda: dy @ w)


def lora(n, i, outputs, rank):
    x = randn(n, i, grad=True)
    a = [randn(rank, i, grad=True) for _ in outputs]
    b = [randn(o, rank, grad=True) for o in outputs]
    base = [randn(n, o) for o in outputs]

    def forward():
        return [y + F.linear(F.linear(x, p), q) * 2.0 for y, p, q in zip(base, a, b)]

    def without_graph():
        with torch.no_grad():
            return forward()

    def gradients():
        out = forward()
        dy = [torch.randn_like(y) for y in out]
        return micros(lambda: torch.autograd.grad(out, [x] + a + b, dy, retain_graph=True))

    yield "lora", "torch", lambda: micros(without_graph)
    yield "lora_backward", "torch", gradients


def attention(n, h, k, d):
    q, kk, v = (randn(1, m, n, d, grad=True) for m in (h, k, k))

    def sdpa():
        return F.scaled_dot_product_attention(q, kk, v, is_causal=True, enable_gqa=True)

    yield "attention", "torch", lambda: micros(sdpa)
    yield "attention_backward", "torch", lambda: backward(sdpa, [q, kk, v])
    try:
        from flash_attn import flash_attn_func
    except ImportError:
        return
    q2, k2, v2 = (randn(1, n, m, d, grad=True) for m in (h, k, k))
    flash = lambda: flash_attn_func(q2, k2, v2, causal=True)  # noqa: E731
    yield "attention", "flash-attn", lambda: micros(flash)
    yield "attention_backward", "flash-attn", lambda: backward(flash, [q2, k2, v2])


def ropes(n, h, d):
    x, cos, sin = randn(n, h, d, grad=True), randn(n, 1, d), randn(n, 1, d)
    yield "rope", "torch", lambda: micros(lambda: rope(x.detach(), cos, sin))
    yield "rope_backward", "torch", lambda: backward(lambda: rope(x, cos, sin), [x])


def swiglu(n, f):
    g, u = randn(n, f, grad=True), randn(n, f, grad=True)
    yield "swiglu", "torch", lambda: micros(lambda: F.silu(g.detach()) * u.detach())
    yield "swiglu_backward", "torch", lambda: backward(lambda: F.silu(g) * u, [g, u])
    try:
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction as L
    except ImportError:
        return
    yield "swiglu", "liger", lambda: micros(lambda: L.apply(g.detach(), u.detach()))


def cast(n, c):
    x = randn(n, c, dtype=torch.float32)
    yield "cast", "torch", lambda: micros(lambda: x.to(BF16))


def add_into(n, c):
    x, y = randn(n, c, dtype=torch.float32), randn(n, c)
    yield "add_into", "torch", lambda: micros(lambda: y.add_(x))


def embedding(n, c, v):
    table, ids = randn(v, c), torch.randint(0, v, (n,), device=DEVICE)
    yield "embedding", "torch", lambda: micros(lambda: F.embedding(ids, table))


def cross_entropy(n, c, v):
    x, w, labels = randn(n, c, grad=True), randn(v, c), torch.randint(0, v, (n,), device=DEVICE)

    def both():
        return torch.autograd.grad(F.cross_entropy(F.linear(x, w).float(), labels), [x])

    yield "linear_cross_entropy", "torch", lambda: micros(both)
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as L
    except ImportError:
        return
    fused = lambda: L.apply(x, w, labels)  # noqa: E731
    yield "linear_cross_entropy", "liger", lambda: micros(lambda: torch.autograd.grad((lambda o: o[0] if isinstance(o, tuple) else o)(fused()), [x]))


def adamw(n):
    p = torch.nn.Parameter(randn(n, dtype=torch.float32))
    p.grad = torch.randn_like(p)
    optimizer = torch.optim.AdamW([p], fused=DEVICE == "cuda")
    yield "adamw", "torch fused", lambda: micros(optimizer.step)


def squares(n):
    x = randn(n, dtype=torch.float32)
    yield "sum_squares", "torch", lambda: micros(lambda: torch.linalg.vector_norm(x))


class Block(torch.nn.Module):
    """A Llama block with adapters on all linear layers, as PEFT computes it."""

    def __init__(self, c=4096, h=32, k=8, f=14336, rank=16):
        super().__init__()
        self.h, self.k, self.d = h, k, c // h
        frozen = lambda i, o: torch.nn.Linear(i, o, bias=False, device=DEVICE, dtype=BF16).requires_grad_(False)  # noqa: E731
        names = dict(q=(c, c), k=(c, k * self.d), v=(c, k * self.d), o=(c, c), gate=(c, f), up=(c, f), down=(f, c))
        self.base = torch.nn.ModuleDict({m: frozen(*s) for m, s in names.items()})
        self.a = torch.nn.ParameterDict({m: torch.nn.Parameter(randn(rank, s[0]) * 0.01) for m, s in names.items()})
        self.b = torch.nn.ParameterDict({m: torch.nn.Parameter(randn(s[1], rank) * 0.01) for m, s in names.items()})
        self.n1, self.n2 = randn(c), randn(c)

    def lin(self, m, x):
        return self.base[m](x) + F.linear(F.linear(x, self.a[m]), self.b[m]) * 2.0

    def forward(self, x, cos, sin):
        n, y = x.shape[0], rms(x, self.n1)
        heads = lambda t, h: t.view(n, h, self.d)  # noqa: E731
        q, k, v = (heads(self.lin(m, y), h) for m, h in (("q", self.h), ("k", self.k), ("v", self.k)))
        q, k = rope(q, cos, sin), rope(k, cos, sin)
        at = [t.transpose(0, 1)[None] for t in (q, k, v)]
        o = F.scaled_dot_product_attention(*at, is_causal=True, enable_gqa=True)[0].transpose(0, 1).reshape(n, -1)
        x = x + self.lin("o", o)
        y = rms(x, self.n2)
        return x + self.lin("down", F.silu(self.lin("gate", y)) * self.lin("up", y))


def block(n, rank):
    m, x, cos, sin = Block(rank=rank), randn(n, 4096, grad=True), randn(n, 1, 128), randn(n, 1, 128)

    def both():
        out = m(x, cos, sin)
        out.backward(out.detach())

    return micros(both, 0.5)


def group(sizes, numbers):
    """Outputs of the adapters that share this input, of the 8B model."""
    name = sizes.split(", ")[1]
    return {"q/k/v": [4096, 1024, 1024], "o": [4096], "gate/up": [14336, 14336], "down": [4096]}[name]


def cases(op, sizes):
    n = [int(s) for s in re.findall(r"\d+", sizes)]
    base = op.removesuffix("_backward")
    return {
        "rmsnorm": lambda: rmsnorm(*n),
        "linear": lambda: linear(*n),
        "lora": lambda: lora(n[0], n[1], group(sizes, n), n[-1]),
        "cast": lambda: cast(*n[:2]),
        "add_into": lambda: add_into(*n[:2]),
        "rope": lambda: ropes(*n),
        "attention": lambda: attention(*n),
        "swiglu": lambda: swiglu(*n),
        "embedding": lambda: embedding(*n, 128256),
        "linear_cross_entropy": lambda: cross_entropy(*n[:3]),
        "adamw": lambda: adamw(n[0]),
        "sum_squares": lambda: squares(n[0]),
    }[base]()


def report(op, sizes, whose, f):
    try:
        print(f"{op}\t{sizes}\t{f():.2f}\t{whose}", flush=True)
    except Exception as e:  # one call that a version of a library does not take must not end the rest
        print(f"{op} {sizes} by {whose}: {type(e).__name__}: {e}", file=sys.stderr)


def main():
    lines = [line.rstrip("\n").split("\t") for line in sys.stdin if "\t" in line]
    torch.manual_seed(0)
    if DEVICE == "cuda":
        a, b = randn(8192, 8192), randn(8192, 8192)
        report("matmul", "8192 x 8192 x 8192", "torch", lambda: micros(lambda: a @ b, 0.5))
        del a, b
        report("block", "2048 tokens, rank 16", f"torch {torch.__version__}", lambda: block(2048, 16))
    for op, sizes in lines:
        try:
            found = list(cases(op, sizes))
        except Exception as e:
            print(f"{op} {sizes}: {type(e).__name__}: {e}", file=sys.stderr)
            continue
        for name, whose, f in found:
            if name == op:
                report(op, sizes, whose, f)


main()
