"""The cases every implementation of paged attention is tested and benchmarked with."""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention.api import AttentionBatch, PageSpec
from pallas_kernels.paged_attention.reference import attend_reference

DECODE_CONTEXT = 300


@dataclass(frozen=True)
class Case:
    """One step's shape. `sequences` are (tokens already in the cache, new tokens); decode rows come first. `shared` are
    (sequences, tokens): so many of the first sequences have so many of their first tokens in the same (whole) pages.

    The padded sizes are lower bounds; most cases share them, and with them one compilation. EXACT has none.
    """

    name: str
    sequences: tuple[tuple[int, int], ...]
    shared: tuple[tuple[int, int], ...] = ()
    dtype: str = "float32"
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    page_size_tokens: int = 16
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    padded_tokens: int = 600
    padded_sequences: int = 45
    padded_table: int = 130  # pages per sequence
    padded_pages: int = 300
    num_layers: int = 2
    benchmark: bool = False  # too large for the tests

    @property
    def num_decode(self) -> int:
        """Leading sequences with one token."""
        return next((i for i, (_, new) in enumerate(self.sequences) if new != 1), len(self.sequences))


@dataclass(frozen=True)
class Inputs:
    """What `attend` takes; the pages are plain arrays, for `pack_pages`."""

    spec: PageSpec
    batch: AttentionBatch
    q: Any
    k: Any
    v: Any
    pages_k: np.ndarray  # [num_layers, num_pages + 1, page_size, Hkv, D]
    pages_v: np.ndarray
    layer: int
    options: dict[str, Any]  # scale, window, soft_cap, sinks

    def expected(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The reference's output, float32 [T, Hq, D], and pages."""
        batch, sinks = self.batch, self.options["sinks"]
        return attend_reference(
            np.asarray(self.q),
            np.asarray(self.k),
            np.asarray(self.v),
            self.pages_k,
            self.pages_v,
            cu_q_lens=np.asarray(batch.cu_q_lens),
            kv_lens=np.asarray(batch.kv_lens),
            page_table=np.asarray(batch.page_table),
            num_seqs=int(batch.num_seqs),
            layer=self.layer,
            **{**self.options, "sinks": None if sinks is None else np.asarray(sinks)},
        )


def build(case: Case, seed: int = 0) -> Inputs:
    """Random inputs for a case: page ids shuffled, every slot that holds no token poisoned with nan or infinity."""
    rng = np.random.default_rng(seed)
    page_size, dtype = case.page_size_tokens, jnp.dtype(case.dtype)
    kv_lens = [context + new for context, new in case.sequences]
    pages_of = [-(-length // page_size) for length in kv_lens]
    num_pages = max(sum(pages_of), case.padded_pages)
    spec = PageSpec(case.num_layers, num_pages, page_size, case.num_kv_heads, case.head_dim, dtype)

    def random(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32).astype(dtype)

    num_seqs = len(case.sequences)
    rows = max(num_seqs, case.padded_sequences)
    ids = rng.permutation(num_pages)
    table = rng.integers(0, num_pages + 1, (rows, max([*pages_of, case.padded_table])))
    shape = (case.num_layers, num_pages + 1, page_size, case.num_kv_heads, case.head_dim)
    pages_k = np.full(shape, np.nan, dtype)
    pages_v = np.full(shape, np.nan, dtype)
    pages_k[:, :, 1::2] = np.inf
    pages_v[:, 1::2] = -np.inf
    for sequence, (context, _) in enumerate(case.sequences):
        table[sequence, : pages_of[sequence]], ids = ids[: pages_of[sequence]], ids[pages_of[sequence] :]
        shared = max([tokens for count, tokens in case.shared if sequence < count], default=0) if sequence else 0
        table[sequence, : shared // page_size] = table[0, : shared // page_size]
        for start in range(shared, context, page_size):
            page, n = table[sequence, start // page_size], min(page_size, context - start)
            pages_k[:, page, :n] = random(case.num_layers, n, case.num_kv_heads, case.head_dim)
            pages_v[:, page, :n] = random(case.num_layers, n, case.num_kv_heads, case.head_dim)

    new = np.array([new for _, new in case.sequences], np.int32)
    cu_q_lens = np.concatenate([[0], np.cumsum(new), np.full(rows - num_seqs, new.sum())])
    kv_lens = np.concatenate([kv_lens, np.zeros(rows - num_seqs)])
    batch = AttentionBatch(
        cu_q_lens=jnp.asarray(cu_q_lens, jnp.int32),
        kv_lens=jnp.asarray(kv_lens, jnp.int32),
        page_table=jnp.asarray(table, jnp.int32),
        num_decode=jnp.int32(case.num_decode),
        num_seqs=jnp.int32(num_seqs),
    )
    tokens = max(int(new.sum()), case.padded_tokens)
    return Inputs(
        spec=spec,
        batch=batch,
        q=jnp.asarray(random(tokens, case.num_q_heads, case.head_dim)),
        k=jnp.asarray(random(tokens, case.num_kv_heads, case.head_dim)),
        v=jnp.asarray(random(tokens, case.num_kv_heads, case.head_dim)),
        pages_k=pages_k,
        pages_v=pages_v,
        layer=case.num_layers - 1,
        options={
            "scale": case.head_dim**-0.5,
            "window": case.window,
            "soft_cap": case.soft_cap,
            "sinks": jnp.asarray(rng.standard_normal(case.num_q_heads, np.float32)) if case.sinks else None,
        },
    )


def _family(base: Case, **variants: dict[str, Any]) -> list[Case]:
    """`base` with some fields replaced, one case per keyword."""
    return [replace(base, name=f"{base.name}-{name.replace('_', '-')}", **fields) for name, fields in variants.items()]


MIXED = Case("mixed", ((40, 1), (0, 1), (15, 1), (130, 1), (0, 70), (33, 5), (20, 40), (7, 1), (0, 9), (64, 8)))
EXACT: dict[str, Any] = {"padded_tokens": 0, "padded_sequences": 0, "padded_table": 0, "padded_pages": 0}
P = MIXED.page_size_tokens
SMOL = Case(
    "smollm2-decode",
    ((DECODE_CONTEXT - 1, 1),) * 64,
    dtype="bfloat16",
    num_q_heads=9,
    num_kv_heads=3,
    head_dim=64,
    num_layers=30,
    benchmark=True,
    **EXACT,
)
SMOL_MIXED = replace(
    SMOL,
    name="smollm2-mixed",
    sequences=(*SMOL.sequences[:56], (0, 200), (100, 156), (0, 100)),
    padded_sequences=64,
    padded_tokens=512,
)

# A prompt's samples, some of which share more, beside others.
SHARED = Case(
    "decode-shared",
    (*((544 + 7 * i, 1) for i in range(16)), *((256 + 9 * i, 1) for i in range(20)), (30, 1), (600, 1), (540, 5)),
    shared=((36, 256), (16, 512), (2, 544)),
    padded_pages=1300,
)

CASES: tuple[Case, ...] = (
    MIXED,
    *_family(
        MIXED,
        bfloat16={"dtype": "bfloat16"},
        mha_float16={"dtype": "float16", "num_kv_heads": 4},
        mqa_soft_cap={"num_kv_heads": 1, "soft_cap": 2.0},
        three_by_three={"num_q_heads": 9, "num_kv_heads": 3},
        head_dim_64_page_32_window_100={"head_dim": 64, "page_size_tokens": 32, "window": 100},
        head_dim_128_bfloat16={"head_dim": 128, "dtype": "bfloat16"},
        head_dim_256={"head_dim": 256, "num_q_heads": 2, "num_kv_heads": 1},
        page_128={"page_size_tokens": 128},
        page_128_window_bfloat16={"page_size_tokens": 128, "window": 40, "dtype": "bfloat16"},
        window_1={"window": 1},
        window_17={"window": 17},
        sinks={"sinks": True},
        window_soft_cap_sinks_bfloat16={"window": 24, "soft_cap": 5.0, "sinks": True, "dtype": "bfloat16"},
        no_padding=EXACT,
        long_table={"padded_table": 3000},
    ),
    Case("one-token", ((0, 1),)),
    Case("one-token-no-padding", ((0, 1),), **EXACT),
    Case("no-sequences", ()),
    Case("decode-one-row", ((700, 1),)),
    Case("decode-one-row-window", ((700, 1),), window=17),
    Case("decode-one-row-no-padding", ((299, 1),), **EXACT),
    Case("decode-page-edges", tuple((n, 1) for n in (P - 2, P - 1, P, P + 1, 4 * P - 1, 4 * P, 8 * P - 1, 8 * P))),
    Case("decode-skewed", ((2000, 1), *((n, 1) for n in range(40)))),
    Case("decode-skewed-bfloat16", ((1000, 1), *((n, 1) for n in range(20))), dtype="bfloat16"),
    SHARED,
    *_family(
        SHARED,
        bfloat16={"dtype": "bfloat16"},
        three_by_three_bfloat16={"num_q_heads": 9, "num_kv_heads": 3, "head_dim": 64, "dtype": "bfloat16"},
        page_32_soft_cap_sinks={"page_size_tokens": 32, "soft_cap": 5.0, "sinks": True},
        window={"window": 100},
    ),
    Case("prefill-page-edges", tuple((0, n) for n in (P - 1, P, P + 1, 2 * P))),
    Case("prefill-tile-edges", tuple((0, n) for n in (63, 64, 65, 8, 9, 127, 128, 129))),
    Case("prefill-chunk-on-context", ((300, 65), (1, 64), (63, 130))),
    Case("prefill-chunk-on-context-window", ((600, 65), (1, 64), (63, 130)), window=17),
    Case("prefill-chunk-on-context-bfloat16", ((300, 65), (1, 64), (63, 130)), dtype="bfloat16"),
    Case("verification-spans", ((40, 1), (16, 4), (15, 5), (0, 2), (200, 8), (100, 3), (90, 5), (31, 5), (60, 5))),
    Case("verification-spans-window", ((16, 4), (15, 5), (0, 2), (200, 8), (100, 3)), window=1),
    SMOL,
    replace(SMOL, name="smollm2-decode-float32", dtype="float32"),
    SMOL_MIXED,
    replace(SMOL_MIXED, name="smollm2-mixed-float32", dtype="float32"),
    replace(SMOL, name="smollm2-decode-1-row", sequences=SMOL.sequences[:1], padded_sequences=8, padded_tokens=8),
    replace(SMOL, name="smollm2-spans", sequences=((DECODE_CONTEXT - 5, 5),) * 64),
    replace(SMOL, name="smollm2-prefill-2048", sequences=((0, 2048),)),
    Case(
        "llama-8b-decode",
        ((2047, 1),) * 32,
        dtype="bfloat16",
        num_q_heads=32,
        num_kv_heads=8,
        head_dim=128,
        benchmark=True,
        **EXACT,
    ),
)
