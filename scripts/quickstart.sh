#!/usr/bin/env bash
# From a fresh clone to an answer: makes the environment, starts a server with the demo model on a free loopback port,
# streams one answer over gRPC, says what happened, and stops the server. Needs Python 3.12 and a package registry, no
# accelerator. On one: JPAGED_EXTRAS=cuda scripts/quickstart.sh (or tpu).
#
#   scripts/quickstart.sh ["PROMPT"]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_environment.sh"
ensure_environment

log="$(mktemp)"
"$VENV/bin/jpaged" serve demo --port 0 --max-model-len 2048 2>"$log" &
server=$!
# The log is shown only if something went wrong before the answer.
trap 'status=$?; kill "$server" 2>/dev/null; wait "$server" 2>/dev/null || true; ((status == 0)) || cat "$log" >&2; rm -f "$log"' EXIT

echo "Starting jpaged serve demo; the first time it downloads the model and compiles, which takes a minute or two"
address=""
until [[ -n $address ]]; do
    kill -0 "$server" 2>/dev/null || _fail "the server ended while starting"
    address="$(sed -n 's/.*listening on \(.*\)$/\1/p' "$log")"
    [[ -n $address ]] || sleep 0.2
done
"$VENV/bin/jpaged" client health --address "$address" --wait-seconds 600 >/dev/null
sed -n 's/.*\(ready after.*\)/Server \1/p' "$log"

echo
"$VENV/bin/jpaged" client generate "${@:-Explain what a page table is, in two sentences.}" \
    --address "$address" --chat --stats
echo
kill -TERM "$server"
wait "$server"
echo "The server has stopped."
