#!/usr/bin/env bash
# The kernels and the trainer on real GPUs. First every call of training against the CPU, the host's time for an operation, then the time of
# each call of an 8B block beside the machine's own copy and product, and beside PyTorch (Liger, FlashAttention, PEFT where installed). Then
# whole runs through zlaunch: losses of the tiny model beside PyTorch's, of SmolLM2 beside the CPU's, and steps of an 8B-shaped model with
# weights on the device and at home on the host. Needs a driver and NVRTC or hipRTC, no network; NVRTC is also found in PyTorch's own
# packages. Takes less than 8 minutes for kernels and 8 for runs, once built. Without a GPU each part says "not run".
# usage: benches/gpu.sh [PYTHON]      benches/gpu.sh --emulate sm_90    what an emulated GPU can do, to prove the script itself
set -euo pipefail
cd "$(dirname "$0")/.."
emulate=
[ "${1:-}" = "--emulate" ] && emulate=${2:-sm_90}
folder=target/release
kernels=$folder/gpu_kernels train=$folder/gpu_train zlaunch=$folder/zlaunch
# Programs that were built elsewhere will do.
cargo build --release --quiet -p zrt-simt -p zlaunch -p zrt-benches ${emulate:+-p zrt-driver} ||
    { [ -x $kernels ] && [ -x $train ] && [ -x $zlaunch ] && echo "not built here: using what is in $folder" >&2; }
wrong=0
if [ -n "$emulate" ]; then
    driver=$folder/libzrt_driver.so
    "$kernels" --emulate "$emulate" || wrong=1
    ZRT_EMULATED_GPU="null=1;arch=$emulate" "$kernels" --host "$driver" "$emulate" || wrong=1
    "$train" "$zlaunch" "$driver" "$emulate" || wrong=1
    exit $wrong
fi
python=${1:-python3}
peers=()
if "$python" -c "import torch; assert torch.cuda.is_available()" 2> /dev/null; then
    # The libraries that come with PyTorch.
    libraries=$("$python" -c "
import glob, os, site, sys
roots = site.getsitepackages() + [site.getusersitepackages()]
print(':'.join(sorted({os.path.dirname(p) for r in roots for p in glob.glob(r + '/nvidia/*/lib/libnvrtc.so.*')})))" || true)
    [ -z "$libraries" ] || export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$libraries"
    peers=(target/gpu_peers.tsv)
    "$kernels" --list | timeout 200 "$python" benches/compare/gpu.py > "${peers[0]}" || echo "PyTorch's side stopped early" >&2
fi
echo "kernels:"
timeout 280 "$kernels" "${peers[@]}" || wrong=1
echo "runs:"
timeout 500 "$train" "$zlaunch" || wrong=1
exit $wrong
