#!/usr/bin/env bash
# Runs every check, in order of speed, and stops at the first that fails. Arguments go to pytest:
#
#   scripts/test.sh
#   scripts/test.sh -m 'not slow' -k paging
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_environment.sh"
ensure_environment dev

stage() {
    local name="$1"
    shift
    printf '\n==> %s\n' "$name"
    "$@" || {
        local status=$?
        printf '\nFAILED: %s (exit status %d)\n' "$name" "$status" >&2
        exit "$status"
    }
}

stage "ruff check" "$VENV/bin/python" -m ruff check .
stage "ruff format" "$VENV/bin/python" -m ruff format --check .
stage "proto freshness" scripts/generate_proto.sh --check
stage "lint-imports" "$VENV/bin/lint-imports" --no-logo
stage "pyright" "$VENV/bin/python" -m pyright --pythonpath "$VENV/bin/python"
stage "pytest" "$VENV/bin/python" -m pytest "$@"
