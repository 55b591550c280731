"""AdamW on the host: this runtime's beside torch's fused AdamW and DeepSpeedCPUAdam, each with its copy of the new weights in bf16.

    cargo build --release -p zlaunch && PYTHON benches/compare/adam.py [--params N] [--threads N] [--rounds N]

All do what mixed-precision training needs of a step: clip (a multiplication of the gradient), update, bf16 weights. Ours does it in one pass;
the peers' clipping is left out (it would be another pass for them), so only update and copy count. Rounds alternate; figures are medians.
"""
import argparse, json, os, statistics, subprocess, time

ap = argparse.ArgumentParser()
ap.add_argument("--params", type=int, default=32 << 20)
ap.add_argument("--threads", type=int, default=os.cpu_count())
ap.add_argument("--rounds", type=int, default=3)
a = ap.parse_args()
os.environ["OMP_NUM_THREADS"] = str(a.threads)
import torch

torch.set_num_threads(a.threads)
kw = dict(lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)


def peer(make):
    """One parameter, its optimizer, its bf16 copy."""
    p = torch.nn.Parameter(torch.full((a.params,), 0.02))
    p.grad = torch.full((a.params,), 1e-3)
    return p, make([p]), torch.empty(a.params, dtype=torch.bfloat16)


def rate(p, optimizer, out, copy, calls=7):
    def step():
        optimizer.step()
        if copy:
            out.copy_(p.data)
    step()
    secs = []
    for _ in range(calls):
        begun = time.perf_counter()
        step()
        secs.append(time.perf_counter() - begun)
    return a.params / statistics.median(secs) / 1e6


def ours():
    command = ["target/release/zlaunch", "bench", "adam", "--json", "--params", str(a.params), "--threads", str(a.threads), "--rounds", "7"]
    rows = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)[0]["rows"]
    return {r["update"]: (r["M parameters/s"], r["limit M parameters/s"]) for r in rows}


peers = {"torch fused": peer(lambda p: torch.optim.AdamW(p, fused=True, **kw))}
try:
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    peers["DeepSpeedCPUAdam"] = peer(lambda p: DeepSpeedCPUAdam(p, adamw_mode=True, **kw))
except Exception as e:
    print(f"not run: DeepSpeedCPUAdam: {e}")
found = {}
for _ in range(a.rounds):
    for name, (mine, limit) in ours().items():
        found.setdefault(f"ours, {name}", []).append(mine)
        found.setdefault(f"limit, {name}", []).append(limit)
    for name, (p, optimizer, out) in peers.items():
        found.setdefault(name, []).append(rate(p, optimizer, out, False))
        found.setdefault(f"{name} and bf16 copy", []).append(rate(p, optimizer, out, True))
best = {name: statistics.median(rates) for name, rates in found.items()}
for name, value in best.items():
    print(f"{name:34s} {value:6.0f} M parameters/s")
copy = best["ours, f32 and bf16 copy"]
print(f"of the limit: {100 * copy / best['limit, f32 and bf16 copy']:.1f} % (asked 95 %)")
for name in peers:
    print(f"ours / {name}, both with the copy: {copy / best[name + ' and bf16 copy']:.2f} (asked 1.1)")
