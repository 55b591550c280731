#!/usr/bin/env bash
# The GPU kernels on a real GPU: every call of training against the CPU, then the time of each call of an 8B block beside the machine's own
# copy and product, and beside PyTorch (Liger, FlashAttention, PEFT where installed). Needs a driver and NVRTC or hipRTC, no network;
# NVRTC is also found in PyTorch's own packages. Takes less than 8 minutes once built.
# usage: benches/gpu.sh [PYTHON]      benches/gpu.sh --emulate sm_90    the same checks on the emulator
set -euo pipefail
cd "$(dirname "$0")/.."
bench=target/release/gpu_kernels
# A program that was built elsewhere will do.
cargo build --release --quiet -p zrt-simt --bin gpu_kernels || { [ -x $bench ] && echo "not built here: using $bench as it is" >&2; }
[ "${1:-}" = "--emulate" ] && exec "$bench" "$@"
python=${1:-python3}
if "$python" -c "import torch; assert torch.cuda.is_available()" 2> /dev/null; then
    # The libraries that come with PyTorch.
    libraries=$("$python" -c "
import glob, os, site, sys
roots = site.getsitepackages() + [site.getusersitepackages()]
print(':'.join(sorted({os.path.dirname(p) for r in roots for p in glob.glob(r + '/nvidia/*/lib/libnvrtc.so.*')})))" || true)
    [ -z "$libraries" ] || export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$libraries"
    peers=target/gpu_peers.tsv
    "$bench" --list | timeout 200 "$python" benches/compare/gpu.py > "$peers" || echo "PyTorch's side stopped early" >&2
    timeout 280 "$bench" "$peers"
else
    timeout 280 "$bench"
fi
