"""Which dtype a CPU computes faster in, by trying both: what "auto" means there."""

import time

import jax
import jax.numpy as jnp

from jpaged.layers.linear import project
from pallas_kernels.matmul.cpu import CpuMatmul
from pallas_kernels.native.build import processor_features

# One row reads weights, 64 compute with them.
PROBE_ROWS = (1, 64)
PROBE_FEATURES = 1024
REPEATS = 5
# How much faster than expected the other dtype must be. A close race must not be run anew at every start: the dtype
# decides the tokens and which compiled programs fit.
MARGIN = 1.3


def probe_dtype(matmul: CpuMatmul | None) -> str:
    """Returns "bfloat16" or "float32": what the processor is made for, unless the other is faster by a clear margin."""
    bfloat16_seconds, float32_seconds = (
        sum(_product_seconds(dtype, rows, matmul) for rows in PROBE_ROWS) for dtype in ("bfloat16", "float32")
    )
    has_bfloat16 = not processor_features().isdisjoint(("avx512_bf16", "amx_bf16"))
    return decide(bfloat16_seconds, float32_seconds, has_bfloat16=has_bfloat16)


def decide(bfloat16_seconds: float, float32_seconds: float, *, has_bfloat16: bool) -> str:
    """The probe's rule."""
    if has_bfloat16:
        return "float32" if float32_seconds * MARGIN < bfloat16_seconds else "bfloat16"
    return "bfloat16" if bfloat16_seconds * MARGIN < float32_seconds else "float32"


def _product_seconds(dtype: str, rows: int, matmul: CpuMatmul | None) -> float:
    """The best of a few, with what a step would use."""
    x = jnp.ones((rows, PROBE_FEATURES), jnp.float32)
    weights = jnp.ones((1, PROBE_FEATURES, PROBE_FEATURES), dtype)
    if matmul is not None:
        weights = matmul.pack(weights)
        product = jax.jit(lambda x, w: matmul(x, w, 0, PROBE_FEATURES))
    else:
        product = jax.jit(lambda x, w: project(x, w[0]))
    product(x, weights).block_until_ready()
    best = float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        product(x, weights).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return best
