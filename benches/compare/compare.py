"""This runtime beside PyTorch DDP, FSDP2 and DeepSpeed: the same model, tokens, ranks, micro-batch and machine, one row after the other.

    benches/compare/run.sh PYTHON [--rows WORD,...] [--rounds N] [--steps N] [--limit SECONDS] [--list] [--ratios]

A row is one launch. Its figures go to runs/compare.jsonl too, so that rows may be run one by one: --ratios prints what is asked of
them from the latest figures of each row. `tok/s` is the median step after the first two (padding does not occur: all rows are whole);
`peak PSS` is private memory plus the share of shared pages of the largest rank, sampled every half second until the last step ended (we save a
checkpoint and a model then, peers do not); a row that reaches the limit is ended and
prints what it had reached: a rate from the steps that ended, or `< bound` when not even the first did.
"""
import argparse, datetime, json, os, random, signal, statistics, subprocess, sys, tempfile, time

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
MODEL, OUT = "models/smollm2-135m", "runs/compare.jsonl"
RANKS, MICRO, SEQ = 2, 2, 512
SLOTS = RANKS * MICRO * SEQ
JEMALLOC = "/usr/lib/x86_64-linux-gnu/libjemalloc.so.2"

LORA, FULL = [], ["lora=", "optimizer.lr=1e-5"]
BF16, F32 = ["precision.compute=bf16"], ["precision.compute=f32"]
# name: (ranks, arguments); ours by configuration, peers by train_bench.py's.
OURS = {
    "ours lora bf16 zero-3": LORA + BF16 + ["zero.stage=3"],
    "ours lora bf16 zero-3, no shared pages": LORA + BF16 + ["zero.stage=3", "comm.share_pages=false"],
    "ours lora bf16 zero-3, offload_param": LORA + BF16 + ["zero.stage=3", "comm.share_pages=false", "zero.offload_param.device=cpu"],
    "ours lora bf16 zero-3, offload of both":
        LORA + BF16 + ["zero.stage=3", "zero.offload_param.device=cpu", "zero.offload_optimizer.device=cpu"],
    "ours lora bf16 zero-0": LORA + BF16 + ["zero.stage=0"],
    "ours lora f32 zero-3": LORA + F32 + ["zero.stage=3"],
    "ours full bf16 zero-3": FULL + BF16 + ["zero.stage=3"],
    "ours full f32 zero-3": FULL + F32 + ["zero.stage=3"],
}
EAGER = ["--attn", "eager", "--compile"]
PEERS = {}
for mode in ("lora", "full"):
    for short, dtype in (("bf16", "bf16"), ("f32", "fp32")):
        common = ["--mode", mode, "--dtype", dtype]
        for name, ranks, more in (
            ("ddp compile eager", 2, ["--backend", "ddp"] + EAGER),
            ("one process compile eager", 1, ["--backend", "single"] + EAGER),
            ("ddp sdpa", 2, ["--backend", "ddp"]),
            ("fsdp2", 2, ["--backend", "fsdp2"]),
            ("deepspeed zero-3", 2, ["--backend", "ds3"]),
            ("deepspeed zero-3, offload of both", 2, ["--backend", "ds3off"]),
            # What someone gets who changes nothing: glibc's malloc, one process, its attention.
            ("user defaults", 1, ["--backend", "single", "--fused", "0"]),
        ):
            PEERS[f"{name}, {mode} {short}"] = (ranks, common + more, name != "user defaults")


def children(pid):
    """All descendants of `pid`."""
    parent = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            parent[int(entry)] = int(open(f"/proc/{entry}/stat").read().rsplit(")", 1)[1].split()[1])
        except (OSError, IndexError):
            pass
    found, more = [pid], True
    while more:
        new = [p for p, up in parent.items() if up in found and p not in found]
        found, more = found + new, bool(new)
    return found


def pss_bytes(pid):
    try:
        for line in open(f"/proc/{pid}/smaps_rollup"):
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except (OSError, ProcessLookupError):
        pass
    return 0


def is_rank(pid, alone):
    try:
        if alone is not None:
            return pid == alone
        env = open(f"/proc/{pid}/environ", "rb").read().split(b"\0")
        line = open(f"/proc/{pid}/cmdline", "rb").read()
    except OSError:
        return False
    # A rank itself, not a helper that it started (compilers, resource trackers).
    return any(e.startswith(b"RANK=") for e in env) and (b"train_bench.py" in line or b"\0rank\0" in line) and b"multiprocessing" not in line


def launch(command, env, limit, alone, trains=lambda: True):
    """Runs it; (start, seconds, ended by itself, output, peak PSS of each rank while it `trains`)."""
    log = tempfile.TemporaryFile("w+")
    started = time.time()
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True)
    peak, ended = {}, True
    while process.poll() is None:
        time.sleep(0.5)
        for pid in children(process.pid):
            if is_rank(pid, process.pid if alone else None) and trains():
                peak[pid] = max(peak.get(pid, 0), pss_bytes(pid))
        if time.time() - started > limit:
            ended = False
            for pid in reversed(children(process.pid)):
                try:
                    os.kill(pid, signal.SIGKILL)
                except OSError:
                    pass
            process.wait()
    log.seek(0)
    return started, time.time() - started, ended and process.returncode == 0, log.read(), sorted(peak.values(), reverse=True)


def rate(secs):
    warm = secs[2:] or secs[1:] or secs
    return SLOTS_OF_ROW[0] / statistics.median(warm) if warm else None


SLOTS_OF_ROW = [SLOTS]


def ours(name, steps, limit):
    folder = "runs/compare"
    subprocess.run(["rm", "-rf", folder])
    sets = OURS[name] + [f"training.steps={steps}", "device.threads=1", 'dataset.0.path="runs/compare-tokens.jsonl"', 'dataset.0.type="tokenized"']
    command = ["target/release/zlaunch", "-n", str(RANKS), "benches/compare/smollm2-lora.toml"]
    for s in sets:
        command += ["--set", s]
    # The timed start finds the tokens in the cache.
    shown = subprocess.run(["target/release/zlaunch", "data", "show", "--rows", "1", *command[3:]], capture_output=True, text=True)
    if shown.returncode != 0:
        return {"error": shown.stderr.strip().splitlines()[-1:]}
    SLOTS_OF_ROW[0] = SLOTS

    def trains():
        try:
            return sum(1 for _ in open(f"{folder}/metrics.jsonl")) < steps
        except OSError:
            return True

    started, took, done, log, peak = launch(command, os.environ.copy(), limit, False, trains)
    try:
        rows = [json.loads(line) for line in open(f"{folder}/metrics.jsonl")]
        line = next(line for line in open(f"{folder}/logs/rank-0.log") if "training begins" in line)
        begun = datetime.datetime.fromisoformat(line.split()[0].replace("Z", "+00:00")).timestamp() - started
    except (OSError, StopIteration, ValueError):
        return {"error": log.strip().splitlines()[-3:]}
    secs = [r["secs"] for r in rows]
    first = begun + secs[0] if secs else None
    return {"tok_s": rate(secs), "steps": len(secs), "begun_s": begun, "first_s": first, "pss": peak, "done": done, "loss": [r["loss"] for r in rows][-1:]}


def peer(name, steps, limit, python):
    ranks, arguments, jemalloc = PEERS[name]
    env = os.environ.copy()
    # Extensions are compiled on first use, by the ninja beside the interpreter.
    env["PATH"] = os.path.dirname(python) + os.pathsep + env["PATH"]
    env.update(TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", GLOO_SOCKET_IFNAME="lo", DS_ACCELERATOR="cpu", MASTER_ADDR="127.0.0.1",
               OMP_NUM_THREADS=str(max(1, RANKS // ranks)), LAUNCH_TS=repr(time.time()))
    if jemalloc and os.path.exists(JEMALLOC):
        env.update(LD_PRELOAD=JEMALLOC, THP_MEM_ALLOC_ENABLE="1", MALLOC_CONF="oversize_threshold:1,background_thread:true,metadata_thp:auto,"
                   "dirty_decay_ms:-1,muzzy_decay_ms:-1")
    script = ["benches/compare/train_bench.py", "--model", MODEL, "--mb", str(MICRO), "--seq", str(SEQ), "--steps", str(steps), *arguments]
    if ranks == 1:
        command = [python, *script]
        env.update(MASTER_PORT=str(random.randrange(20000, 60000)))
    else:
        torchrun = os.path.join(os.path.dirname(python), "torchrun")
        command = [torchrun, "--nproc-per-node", str(ranks), "--master-addr", "127.0.0.1", "--master-port", str(random.randrange(20000, 60000)), *script]
    SLOTS_OF_ROW[0] = ranks * MICRO * SEQ
    started, took, done, log, peak = launch(command, env, limit, ranks == 1)
    ready = [float(line.split()[1]) for line in log.splitlines() if line.startswith("READY ")]
    secs = [float(line.split()[2]) for line in log.splitlines() if line.startswith("STEP ")]
    out = {"tok_s": rate(secs), "steps": len(secs), "first_s": ready[0] + secs[0] if ready and secs else None, "pss": peak, "done": done,
           "jemalloc": "LD_PRELOAD" in env}
    if not secs and ready:
        out["below"] = SLOTS_OF_ROW[0] / (took - ready[0])
    elif not secs:
        out["error"] = [line for line in log.strip().splitlines() if line.strip()][-3:] if not took >= limit else [f"not ready after {limit} s"]
    return out


def show(name, r):
    if "error" in r:
        return f"{name:48s} failed: {' | '.join(map(str, r['error']))[:300]}"
    speed = f"{r['tok_s']:7.0f} tok/s" if r.get("tok_s") else f"< {r.get('below', 0):5.0f} tok/s"
    memory = f"{max(r['pss']) / 1e6:6.0f} MB a rank" if r["pss"] else "             "
    begun = f"first step begun {r['begun_s']:.2f} s, " if r.get("begun_s") else ""
    first = f"{begun}done {r['first_s']:.1f} s" if r.get("first_s") else "first step not done"
    ended = "" if r["done"] else f"; ended at the limit after {r['steps']} steps"
    return f"{name:48s} {speed}  {memory}  {first}{ended}"


def ratios(rows):
    """What is asked: the strongest of PyTorch's rows is the bar."""
    def best(words, key, pick):
        found = {n: r for n, r in rows.items() if n in PEERS and all(w in n for w in words) and r.get(key)}
        return pick(found, key=lambda n: found[n][key] if key != "pss" else max(found[n]["pss"])) if found else None

    def line(what, got, ok, note=""):
        print(f"{what:78s} {got:7.2f}  {'reached' if ok else 'NOT reached'}{note}")

    def speed(name, words, factor, what):
        ours, other = rows.get(name), best(words, "tok_s", max)
        if ours and ours.get("tok_s") and other:
            x = ours["tok_s"] / rows[other]["tok_s"]
            line(f"{what}: {name} / {other}", x, x >= factor, f" (asked {factor}x)")

    for words, factor in ((["deepspeed zero-3", "lora bf16"], 4), (["lora bf16"], 2)):
        speed("ours lora bf16 zero-3", words, factor, "speed")
    # Where PyTorch's bf16 is slower than its f32, the bar for bf16 is its f32.
    speed("ours lora bf16 zero-3", ["lora"], 2, "speed, its faster type")
    speed("ours full bf16 zero-3", ["full bf16"], 1.8, "speed")
    speed("ours full bf16 zero-3", ["full"], 1.8, "speed, its faster type")
    speed("ours lora f32 zero-3", ["lora f32"], 1.25, "speed")
    speed("ours full f32 zero-3", ["full f32"], 1.25, "speed")

    def cost(name, against, most):
        a, b = rows.get(name), rows.get(against)
        if a and b and a.get("tok_s") and b.get("tok_s"):
            x = b["tok_s"] / a["tok_s"]
            line(f"cost: {against} / {name}", x, x <= most, f" (asked at most {most})")

    cost("ours lora bf16 zero-3, no shared pages", "ours lora bf16 zero-0", 1.10)
    cost("ours lora bf16 zero-3, offload_param", "ours lora bf16 zero-3, no shared pages", 1.05)

    def memory(name, words, most):
        a, other = rows.get(name), best(words, "pss", min)
        if a and a.get("pss") and other:
            x = max(a["pss"]) / max(rows[other]["pss"])
            line(f"memory of a rank: {name} / {other}", x, x <= most, f" (asked at most {most})")

    memory("ours lora bf16 zero-3", ["deepspeed zero-3, lora bf16"], 0.35)
    memory("ours lora bf16 zero-3", ["ddp sdpa, lora bf16"], 0.45)
    memory("ours full bf16 zero-3", ["deepspeed zero-3, full bf16"], 0.35)
    memory("ours full bf16 zero-3", ["ddp sdpa, full bf16"], 0.45)
    memory("ours lora f32 zero-3", ["deepspeed zero-3, lora f32"], 0.35)
    memory("ours lora f32 zero-3", ["ddp sdpa, lora f32"], 0.45)
    r = rows.get("ours lora bf16 zero-3", {})
    if r.get("begun_s"):
        line("start: first step begun, seconds", r["begun_s"], r["begun_s"] <= 0.8, " (asked at most 0.8)")
        line("start: first step done, seconds", r["first_s"], r["first_s"] <= 2.5, " (asked at most 2.5)")


def tokens():
    """The peers' tokens as whole documents of one sequence, so that both sides attend to and train on the same."""
    import struct
    with open("tests/golden/smollm2_lora/tokens.safetensors", "rb") as f:
        header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))["input_ids"]
        count = (header["data_offsets"][1] - header["data_offsets"][0]) // 8
        ids = struct.unpack(f"<{count}q", f.read(8 * count))
    with open("runs/compare-tokens.jsonl", "w") as f:
        for start in range(0, count - SEQ + 1, SEQ):
            f.write(json.dumps({"input_ids": ids[start:start + SEQ], "labels": ids[start:start + SEQ]}) + "\n")


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("python", nargs="?", help="an interpreter with requirements.txt")
    ap.add_argument("--rows", default="", help="run rows whose name has one of these words; all of a word's +parts must be there: 'ours,ddp+lora'")
    ap.add_argument("--rounds", type=int, default=1)
    ap.add_argument("--steps", type=int, default=6)
    ap.add_argument("--limit", type=float, default=100, help="seconds for a row")
    ap.add_argument("--list", action="store_true", help="print the rows' names")
    ap.add_argument("--ratios", action="store_true", help="only print what is asked, from the latest figures")
    a = ap.parse_args()
    os.chdir(ROOT)
    names = [n for n in [*OURS, *PEERS] if not a.rows or any(all(w in n for w in part.split("+")) for part in a.rows.split(","))]
    if a.list:
        print("\n".join(names))
        return
    os.makedirs("runs", exist_ok=True)
    if not a.ratios:
        if not os.path.exists(f"{MODEL}/model.safetensors"):
            print(f"not run: {MODEL} is missing (./test.sh makes it)")
            return
        if a.python is None and any(n in PEERS for n in names):
            sys.exit("give the interpreter that has benches/compare/requirements.txt, or --rows ours")
        if not os.path.exists(JEMALLOC):
            print(f"note: {JEMALLOC} is missing (Debian: libjemalloc2), peers run with glibc's malloc")
        cpu = next((l.split(":")[1].strip() for l in open("/proc/cpuinfo") if l.startswith("model name")), "?")
        print(f"{datetime.date.today()}, {cpu}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
        tokens()
        for _ in range(a.rounds):
            for name in names:
                r = ours(name, a.steps, a.limit) if name in OURS else peer(name, a.steps, a.limit, os.path.abspath(a.python))
                print(show(name, r), flush=True)
                with open(OUT, "a") as f:
                    f.write(json.dumps({"name": name, "at": time.time(), **r}) + "\n")
    rows = {}
    if os.path.exists(OUT):
        for line in open(OUT):
            r = json.loads(line)
            rows[r["name"]] = r
    print()
    ratios(rows)


if __name__ == "__main__":
    main()
