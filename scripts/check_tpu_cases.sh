#!/usr/bin/env bash
# Every case of the TPU kernels in the TPU interpreter, with race detection, and the compiler's checks where libtpu is
# installed: what the default test run leaves out because it takes long. Arguments go to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_environment.sh"
ensure_environment dev
exec "$VENV/bin/python" -m pytest -m 'matrix or not matrix' tests/pallas_kernels/test_tpu_paged_attention.py \
    tests/pallas_kernels/test_tpu_compile.py tests/engine/test_tpu_attention.py "$@"
