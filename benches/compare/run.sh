#!/usr/bin/env bash
# This runtime and PyTorch DDP in one run, alternating: tokens per second on 2 ranks x 1 thread, and seconds from launch to the first step.
# usage: benches/compare/run.sh PYTHON_WITH_requirements.txt [rounds] [steps]
# A busy machine says nothing: wait until `uptime` shows a load below 1.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=$(realpath "$1"); rounds=${2:-2}; steps=${3:-7}
torchrun="$(dirname "$1")/torchrun"
model=models/smollm2-135m
[ -f $model/model.safetensors ] || { echo "not run: $model is missing (./test.sh makes it)"; exit 0; }
cargo build --release --quiet -p zlaunch
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 GLOO_SOCKET_IFNAME=lo
ours() {  # name, --set arguments...
    local name=$1; shift
    rm -rf runs/compare
    local t0; t0=$(date +%s.%N)
    target/release/zlaunch -n 2 benches/compare/smollm2-lora.toml --set device.threads=1 --set training.steps="$steps" "$@" > runs/compare.log 2>&1 || { tail -5 runs/compare.log; return 1; }
    "$python" - "$name" "$t0" <<'PY'
import datetime, json, statistics, sys
rows = [json.loads(l) for l in open("runs/compare/metrics.jsonl")]
slots = 2 * 2 * 512          # padded tokens count for peers too
rate = statistics.median(slots / r["secs"] for r in rows[2:])
line = next(l for l in open("runs/compare/logs/rank-0.log") if "training begins" in l)
begun = datetime.datetime.fromisoformat(line.split()[0].replace("Z", "+00:00")).timestamp() - float(sys.argv[2])
print(f"{sys.argv[1]:44s} {rate:7.0f} tok/s   first step begun after {begun:.2f} s, done after {begun + rows[0]['secs']:.1f} s")
PY
}
peer() {  # name, arguments...
    local name=$1; shift
    LAUNCH_TS=$(date +%s.%N) OMP_NUM_THREADS=1 "$torchrun" --nproc-per-node 2 --master-addr 127.0.0.1 --master-port $((20000 + RANDOM % 20000)) \
        benches/compare/train_bench.py --model $model --steps "$steps" "$@" 2>/dev/null | grep RESULT | "$python" -c "
import json, sys
r = json.loads(sys.stdin.read().split('RESULT', 1)[1])
print(f'{sys.argv[1]:44s} {r[\"tok_s\"]:7.0f} tok/s   first step done after {r[\"first_step_s\"]:.1f} s, {max(r[\"peak_rss_ranks\"])} MiB')" "$name"
}
mkdir -p runs
grep -m1 "model name" /proc/cpuinfo; nproc; uptime
# Tokenizes the data: the timed starts find the cache.
target/release/zlaunch data show benches/compare/smollm2-lora.toml > /dev/null
for round in $(seq "$rounds"); do
    echo "round $round"
    ours "zlaunch, ZeRO-3, bf16"
    peer "PyTorch DDP, bf16 autocast, sdpa" --backend ddp --mb 2 --seq 512
done
