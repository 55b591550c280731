#!/usr/bin/env bash
# This runtime beside PyTorch DDP, FSDP2 and DeepSpeed on 2 ranks x 1 thread: builds it, then runs compare.py, which documents the rest.
# usage: benches/compare/run.sh PYTHON_WITH_requirements.txt [--rows WORD,...] [--rounds N] [--steps N] [--limit SECONDS] [--list] [--ratios]
# A busy machine says nothing: wait until `uptime` shows a load below 1.
set -euo pipefail
cd "$(dirname "$0")/../.."
cargo build --release --quiet -p zlaunch
exec python3 benches/compare/compare.py "$@"
