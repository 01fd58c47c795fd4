#!/usr/bin/env bash
# From a fresh clone to an answer: makes the environment, then lets the demo model stream one. Needs Python 3.12 and a
# package registry, no accelerator. On one: JPAGED_EXTRAS=cuda scripts/quickstart.sh (or tpu).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_environment.sh"
ensure_environment

exec "$VENV/bin/jpaged" generate demo "${@:-Explain what a page table is, in two sentences.}" \
    --chat --stats --max-model-len 2048
