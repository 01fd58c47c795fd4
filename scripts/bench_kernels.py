"""Times the attention kernels of this machine's device.

    python scripts/bench_kernels.py [--tiny] [--json FILE] [--implementation xla]

For each case: time, useful bytes / time against a measured device copy, FLOPs / time against a measured bf16 matmul,
and the same of what a JAX user would use instead (`jax.nn.dot_product_attention` with cuDNN on contiguous KV; JAX's own
paged attention for GPU). Useful bytes are those of true lengths; FLOPs are causal, 4 Hq D (C S + C (C + 1) / 2) for a
chunk of C tokens on top of S. Times are medians of several runs; a run repeats the kernel inside one program, so that
the host's part is not in it. Prints a table and, last, one JSON line.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.paged_attention.api import AttentionBatch, PagedAttention, PageSpec
from pallas_kernels.paged_attention.dispatch import choose
from pallas_kernels.paged_attention.gpu import GpuPagedAttention
from pallas_kernels.paged_attention.xla import XlaPagedAttention

RUNS = 5
# Calls in one program. The number is static: XLA would ask the host after each turn of a loop of unknown length.
REPEATS = 20


@dataclass(frozen=True)
class Bench:
    """One case: rows of (tokens in the cache, new tokens)."""

    name: str
    rows: tuple[tuple[int, int], ...]
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    window: int | None = None
    span_tokens: int | None = None  # the longest sequence that goes through decode, if not the default
    baseline: bool = True

    @property
    def useful_bytes(self) -> int:
        """K and V of the true lengths, queries and results; two bytes a number."""
        tokens = sum(min(context, self.window or context) + new for context, new in self.rows)
        new = sum(new for _, new in self.rows)
        return 2 * self.head_dim * (2 * tokens * self.num_kv_heads + 2 * new * self.num_q_heads)

    @property
    def flops(self) -> int:
        pairs = sum(new * context + new * (new + 1) // 2 for context, new in self.rows)
        return 4 * self.num_q_heads * self.head_dim * pairs


# The shortest useful ones first.
BENCHES = (
    Bench("decode 64 x 4096", ((4095, 1),) * 64),
    Bench("prefill 2048 on 2048", ((2048, 2048),)),
    Bench("decode 1 x 4096", ((4095, 1),)),
    Bench("decode 1 x 32768 + 63 x 256", ((32767, 1), *((255, 1),) * 63), baseline=False),
    Bench("decode 64 x 300, demo model", ((299, 1),) * 64, num_q_heads=9, num_kv_heads=3, head_dim=64),
    Bench("spans 64 x 5 on 4096, decode", ((4091, 5),) * 64, span_tokens=8, baseline=False),
    Bench("spans 64 x 5 on 4096, prefill", ((4091, 5),) * 64, span_tokens=1, baseline=False),
    Bench("prefill 512 on 0", ((0, 512),)),
    Bench("mixed 48 x 2048 + 464", (*((2047, 1),) * 48, (512, 464)), baseline=False),
    Bench("decode 64 x 4096, window 1024", ((4095, 1),) * 64, window=1024, baseline=False),
    Bench("decode 64 x 4096, head_dim 256", ((4095, 1),) * 64, num_q_heads=16, num_kv_heads=4, head_dim=256),
    Bench("prefill 2048 on 2048, head_dim 64", ((2048, 2048),), head_dim=64),
)


def main() -> None:
    arguments = parse_arguments()
    deadline = time.monotonic() + arguments.seconds
    device = jax.devices()[0]
    figures: dict[str, Any] = {"device": device.device_kind, "jax": jax.__version__, "cases": []}
    figures |= measure_ceilings(arguments.tiny)
    print(f"{device.device_kind}: copy {figures['copy_gb_s']:.0f} GB/s, matmul {figures['matmul_tflop_s']:.1f} TFLOP/s")
    for bench in BENCHES:
        if time.monotonic() > deadline:
            print(f"{bench.name}: left out, {arguments.seconds} s are over")
            continue
        bench = shrink(bench) if arguments.tiny else bench
        figures["cases"].append(measure(bench, arguments.implementation, figures))
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(figures, indent=1))
    print(json.dumps(figures))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="sizes for trying the script on a CPU")
    parser.add_argument("--implementation", choices=("auto", "xla"), default="auto")
    parser.add_argument("--seconds", type=float, default=240.0, help="start no case after this long")
    parser.add_argument("--json", help="a file that is written after each case")
    return parser.parse_args()


def shrink(bench: Bench) -> Bench:
    rows = tuple((context // 64, max(1, new // 64) if new > 8 else new) for context, new in bench.rows[:4])
    return replace(bench, rows=rows, num_q_heads=bench.num_q_heads // bench.num_kv_heads, num_kv_heads=1)


def measure(bench: Bench, implementation: str, ceilings: dict[str, Any]) -> dict[str, Any]:
    """One case's figures; an implementation that fails has its error instead of a time."""
    inputs = make_inputs(bench)
    entry: dict[str, Any] = {"name": bench.name, "useful_bytes": bench.useful_bytes, "flops": bench.flops}
    candidates = {"jpaged": lambda: time_paged(bench, inputs, implementation)}
    if bench.baseline:
        candidates |= baselines(bench, inputs)
    for name, run in candidates.items():
        try:
            seconds, flops = run()
        except Exception as error:
            entry[name] = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
            print(f"{bench.name:36} {name:12} {entry[name]['error'][:100]}", flush=True)
            continue
        entry[name] = {
            "microseconds": round(seconds * 1e6, 1),
            "copy_share": round(bench.useful_bytes / seconds / 1e9 / ceilings["copy_gb_s"], 3),
            "matmul_share": round(flops / seconds / 1e12 / ceilings["matmul_tflop_s"], 3),
        }
        print(
            f"{bench.name:36} {name:12} {seconds * 1e6:9.1f} us  {entry[name]['copy_share']:6.1%} of copy  "
            f"{entry[name]['matmul_share']:6.1%} of matmul",
            flush=True,
        )
    return entry


@dataclass(frozen=True)
class Inputs:
    """A step's batch over shuffled pages."""

    spec: PageSpec
    batch: AttentionBatch
    q: jax.Array
    k: jax.Array
    v: jax.Array
    table: np.ndarray


def make_inputs(bench: Bench, page_size: int = 16) -> Inputs:
    rng = np.random.default_rng(0)
    lengths = np.array([context + new for context, new in bench.rows], np.int32)
    new = np.array([new for _, new in bench.rows], np.int32)
    pages = -(-lengths // page_size)
    num_pages = int(pages.sum())
    ids = rng.permutation(num_pages).astype(np.int32)
    table = np.zeros((len(lengths), int(pages.max())), np.int32)
    for row, count in enumerate(pages):
        table[row, :count], ids = ids[:count], ids[count:]
    is_decode = new == 1
    batch = AttentionBatch(
        cu_q_lens=jnp.asarray(np.concatenate([[0], np.cumsum(new)]), jnp.int32),
        kv_lens=jnp.asarray(lengths),
        page_table=jnp.asarray(table),
        num_decode=jnp.int32(len(new) if is_decode.all() else int(np.argmin(is_decode))),
        num_seqs=jnp.int32(len(new)),
    )
    spec = PageSpec(1, num_pages, page_size, bench.num_kv_heads, bench.head_dim, "bfloat16")
    keys = jax.random.split(jax.random.key(0), 3)
    shape = int(new.sum()), bench.head_dim
    q, k, v = (
        jax.random.normal(key, (shape[0], heads, shape[1]), jnp.bfloat16)
        for key, heads in zip(keys, (bench.num_q_heads, bench.num_kv_heads, bench.num_kv_heads), strict=True)
    )
    return Inputs(spec, batch, q, k, v, table)


def implementation_for(bench: Bench, spec: PageSpec, wanted: str) -> PagedAttention:
    if wanted == "xla":
        return XlaPagedAttention()
    device = jax.devices()[0]
    attention, _ = choose(
        device.platform, spec, num_q_heads=bench.num_q_heads, q_dtype=spec.dtype, device_kind=device.device_kind
    )
    if isinstance(attention, GpuPagedAttention) and bench.span_tokens is not None:
        return GpuPagedAttention(attention.group, span_tokens=bench.span_tokens)
    return attention


def time_paged(bench: Bench, inputs: Inputs, wanted: str) -> tuple[float, int]:
    """Seconds of one `attend` over random pages, the writing of the new tokens included."""
    attention = implementation_for(bench, inputs.spec, wanted)
    empty = jax.eval_shape(lambda: attention.make_pages(inputs.spec))
    pages = jax.tree.map(lambda x: jax.random.normal(jax.random.key(1), x.shape, jnp.bfloat16), empty)

    def repeat(pages: Any, q: jax.Array, k: jax.Array, v: jax.Array, batch: AttentionBatch) -> Any:
        work = attention.make_work(batch, len(q), inputs.spec)

        def attend(_: jax.Array, carry: tuple) -> tuple:
            q, pages = carry
            return attention.attend(q, k, v, pages, work, layer=0, scale=bench.head_dim**-0.5, window=bench.window)

        return lax.fori_loop(0, REPEATS, attend, (q, pages))

    compiled = jax.jit(repeat, donate_argnums=0)
    state = [pages]

    def run() -> Any:
        out, state[0] = compiled(state[0], inputs.q, inputs.k, inputs.v, inputs.batch)
        return out

    return time_repeats(run), bench.flops


def baselines(bench: Bench, inputs: Inputs) -> dict[str, Callable[[], tuple[float, int]]]:
    rows, (context, new) = len(bench.rows), bench.rows[0]
    length = context + new
    on_gpu = jax.devices()[0].platform == "gpu"
    keys = jax.random.split(jax.random.key(2), 3)

    def random(key: jax.Array, *shape: int) -> jax.Array:
        return jax.random.normal(key, shape, jnp.bfloat16)

    def contiguous() -> tuple[float, int]:
        """Decode over contiguous KV; for prefill the whole causal square, judged by its own FLOPs."""
        square = new > 1
        q = random(keys[0], rows, length if square else 1, bench.num_q_heads, bench.head_dim)
        k, v = (random(key, rows, length, bench.num_kv_heads, bench.head_dim) for key in keys[1:])

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            backend = "cudnn" if on_gpu else "xla"
            return jax.nn.dot_product_attention(q, k, v, is_causal=square, implementation=backend)

        flops = 4 * bench.num_q_heads * bench.head_dim * length * (length + 1) // 2 if square else bench.flops
        return time_chain(attend, q, k, v), flops

    def jax_paged() -> tuple[float, int]:
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

        shape = bench.num_kv_heads, inputs.spec.num_pages, inputs.spec.page_size_tokens, bench.head_dim
        table, lengths = jnp.asarray(inputs.table), inputs.batch.kv_lens
        # Its default of 16 splits must divide the table.
        table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % 128)))

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return paged_attention(q * bench.head_dim**-0.5, k, v, table, lengths).astype(q.dtype)

        return time_chain(attend, inputs.q, random(keys[1], *shape), random(keys[2], *shape)), bench.flops

    found: dict[str, Callable[[], tuple[float, int]]] = {"contiguous": contiguous}
    if new == 1 and on_gpu:
        found["jax paged"] = jax_paged
    return found


def time_chain(attend: Callable[..., jax.Array], q: jax.Array, *others: jax.Array) -> float:
    """Seconds of one call whose result has the queries' shape and is the next call's queries."""
    loop = jax.jit(lambda q, *others: lax.fori_loop(0, REPEATS, lambda _, q: attend(q, *others), q))
    return time_repeats(lambda: loop(q, *others))


def time_repeats(run: Callable[[], Any]) -> float:
    """Seconds of one of the REPEATS calls in `run`: the median of several runs, after one to warm up."""
    jax.block_until_ready(run())

    def seconds() -> float:
        start = time.perf_counter()
        jax.block_until_ready(run())
        return time.perf_counter() - start

    return statistics.median(seconds() for _ in range(RUNS)) / REPEATS


def measure_ceilings(tiny: bool) -> dict[str, float]:
    """A device copy, bytes read and written, and a bf16 matmul of random numbers."""
    numbers, width = (1 << 20, 256) if tiny else (1 << 29, 8192)
    source = jnp.zeros(numbers, jnp.bfloat16)
    copy_seconds = time_chain(lambda x: x + 1, source)
    keys = jax.random.split(jax.random.key(3), 2)
    left, right = (jax.random.normal(key, (width, width), jnp.bfloat16) for key in keys)
    matmul_seconds = time_chain(lambda x, y: x @ y, left, right / width**0.5)
    return {
        "copy_gb_s": round(2 * source.nbytes / copy_seconds / 1e9, 1),
        "matmul_tflop_s": round(2 * width**3 / matmul_seconds / 1e12, 4),
    }


if __name__ == "__main__":
    main()
