#!/usr/bin/env bash
# Makes jpaged/v1/ from proto/; with --check it only says whether that is needed.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_environment.sh"
ensure_environment dev

generate() {
    "$VENV/bin/python" -m grpc_tools.protoc -I proto --python_out="$1" --pyi_out="$1" --grpc_python_out="$1" \
        proto/jpaged/v1/*.proto
}

if [[ "${1:-}" != --check ]]; then
    generate .
    exit
fi
fresh="$(mktemp -d)"
trap 'rm -rf "$fresh"' EXIT
generate "$fresh"
for file in "$fresh"/jpaged/v1/*; do
    cmp -s "$file" "jpaged/v1/$(basename "$file")" ||
        _fail "jpaged/v1/$(basename "$file") is not what proto/ gives; run scripts/generate_proto.sh"
done
