"""Runs the cases through an implementation and holds the results to the reference: for tests, and checks on devices."""

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention.api import PagedAttention
from pallas_kernels.paged_attention.cases import CASES, Case, Inputs, build

# Relative, and absolute in parts of the largest expected number: weights are rounded to the pages' type.
TOLERANCE = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 2e-2}
LITTLE_PADDING = {"padded_tokens": 12, "padded_sequences": 4, "padded_table": 4, "padded_pages": 4}


@dataclass(frozen=True)
class CaseResult:
    """What a case gave. `error` is the largest difference in parts of the largest expected number."""

    name: str
    error: float
    close: bool  # within tolerance, and zero for padding tokens
    pages_equal: bool  # every page but scratch is bit by bit as expected
    seconds: float  # compilation included

    @property
    def passed(self) -> bool:
        return self.close and self.pages_equal


def hopper_case(case: Case, padded: bool = True) -> Case:
    """The case in a form that the Hopper kernels take: 16-bit pages, and head_dim 64 at least.

    Without `padded` tables and batches are hardly padded, for the interpreter's sake.
    """
    dtype = "bfloat16" if case.dtype == "float32" else case.dtype
    sizes = {} if padded else {name: min(getattr(case, name), size) for name, size in LITTLE_PADDING.items()}
    return replace(case, dtype=dtype, head_dim=max(case.head_dim, 64), **sizes)


def hopper_cases(padded: bool = True) -> list[Case]:
    """Every case that is not a benchmark."""
    return [hopper_case(case, padded) for case in CASES if not case.benchmark]


class CaseRunner:
    """Runs cases through one kind of implementation; cases of equal shapes and options share a compiled program.

    `make` gives the implementation for a case, which must depend on nothing but its numbers of heads.
    """

    def __init__(self, make: Callable[[Case], PagedAttention]) -> None:
        self._make = make
        self._programs: dict[str, Callable[..., tuple[jax.Array, Any]]] = {}
        self._locks: defaultdict[str, Lock] = defaultdict(Lock)

    def compile(self, case: Case) -> None:
        """Compiles what `run` will need; safe to call from several threads."""
        self._program(self._make(case), build(case))

    def run(self, case: Case) -> CaseResult:
        """Runs a case on the default device and compares it with the reference."""
        attention, inputs = self._make(case), build(case)
        start = time.perf_counter()
        out, pages = self._program(attention, inputs)(*_arguments(attention, inputs))
        out = np.asarray(out, np.float32)
        seconds = time.perf_counter() - start
        expected, *expected_pages = inputs.expected()
        scale, tolerance = np.abs(expected).max(initial=1e-3), TOLERANCE[case.dtype]
        used = int(inputs.batch.cu_q_lens[-1])
        close = np.allclose(out, expected, rtol=tolerance, atol=tolerance * scale) and not out[used:].any()
        got_pages = attention.unpack_pages(pages, inputs.spec)
        pages_equal = all(
            _same_bits(got[:, :-1], wanted[:, :-1]) for got, wanted in zip(got_pages, expected_pages, strict=True)
        )
        error = float(np.abs(out - expected).max(initial=0) / scale)
        return CaseResult(case.name, error, bool(close), pages_equal, seconds)

    def _program(self, attention: PagedAttention, inputs: Inputs) -> Callable[..., tuple[jax.Array, Any]]:
        """Makes the work and attends, in one compiled program that updates the pages in place."""
        static = {name: value for name, value in inputs.options.items() if name != "sinks"}
        arguments = _arguments(attention, inputs)
        shapes = [(leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(arguments)]
        key = repr((inputs.spec, sorted(static.items()), inputs.options["sinks"] is None, shapes))

        def step(pages: Any, q: Any, k: Any, v: Any, batch: Any, layer: Any, sinks: Any) -> tuple[jax.Array, Any]:
            work = attention.make_work(batch, q.shape[0], inputs.spec)
            return attention.attend(q, k, v, pages, work, layer=layer, sinks=sinks, **static)

        with self._locks[key]:
            if key not in self._programs:
                self._programs[key] = jax.jit(step, donate_argnums=0).lower(*arguments).compile()
        return self._programs[key]


def _arguments(attention: PagedAttention, inputs: Inputs) -> tuple:
    pages = attention.pack_pages(inputs.pages_k, inputs.pages_v)
    sinks = inputs.options["sinks"]
    return pages, inputs.q, inputs.k, inputs.v, inputs.batch, jnp.int32(inputs.layer), sinks


def _same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    return bool((np.ascontiguousarray(left).view(np.uint8) == np.ascontiguousarray(right).view(np.uint8)).all())
