#!/usr/bin/env bash
# Checks and measures jpaged on a GPU, from the source tree alone: no network, no weights, jax 0.11.2 or newer.
#
#   scripts/gpu_check.sh [--json FILE] [--model DIR] [--seconds N]
#
# PYTHON names the interpreter (default python3). See scripts/gpu_check.py for what is done and in which order.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# Each stage is a process of its own and may take the whole device, but need not reserve it.
export XLA_PYTHON_CLIENT_MEM_FRACTION="${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.9}" PYTHONUNBUFFERED=1
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" scripts/gpu_check.py "$@"
