"""Owns the device's state and runs plans on it."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpaged.execution.batch import BatchLayout
from jpaged.execution.buckets import Bucket, choose_bucket, make_buckets
from jpaged.execution.compilation import counter
from jpaged.execution.rows import make_rows
from jpaged.execution.step import StepParts, make_step
from jpaged.parallel.mesh import TENSOR_AXIS
from jpaged.step_plan import StepPlan, StepResult
from pallas_kernels.paged_attention.api import PagedAttention, PageSpec

# Called with what was just compiled, how many shapes are done, and how many there are.
ReportProgress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """Sizes of the running state and of the largest step."""

    page_spec: PageSpec
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int


class PendingStep:
    """A dispatched step; `result` waits for it."""

    __slots__ = ("_drawn", "_num_seqs")

    def __init__(self, drawn: Array, num_seqs: int) -> None:
        drawn.copy_to_host_async()
        self._drawn = drawn
        self._num_seqs = num_seqs

    def result(self) -> StepResult:
        return StepResult(token_ids=np.asarray(self._drawn)[: self._num_seqs])


class Runner:
    """One jitted step per bucket over donated pages and rows.

    Nothing here decides: `start` executes a plan as it is. The weights stay; pages and rows are replaced by each step.
    """

    def __init__(self, model: nnx.Module, attention: PagedAttention, mesh: Mesh, config: RunnerConfig) -> None:
        self.model = model
        graph, self._weights = nnx.split(model)
        self._parts = StepParts(graph, attention, config.page_spec, mesh)
        self._config = config
        self._executables: dict[Bucket, jax.stages.Compiled] = {}
        self._layouts = {
            bucket: BatchLayout(
                bucket, config.page_spec.page_size_tokens, config.max_num_seqs, config.page_spec.scratch_page
            )
            for bucket in make_buckets(config.max_num_batched_tokens, config.max_num_seqs)
        }
        self.buckets = sorted(self._layouts)
        self._unexpected_at_ready = 0
        compilations_before = counter.compilations
        with counter.starting():
            self._make_state, self._shardings = self._compile_state()
            self._pages, self._rows = self._make_state()
        self.compilations = counter.compilations - compilations_before

    @property
    def compilations_after_ready(self) -> int:
        """Programs that this process compiled, or read back from the cache, since this runner was ready; another
        engine's start does not count."""
        return counter.unexpected_programs - self._unexpected_at_ready

    def warm_up(self, report: ReportProgress | None = None) -> float:
        """Compile every bucket and run each once, empty; return the seconds it took. Nothing compiles after it."""
        start = time.monotonic()
        compilations_before = counter.compilations
        with counter.starting():
            for done, bucket in enumerate(self.buckets):
                self._executables[bucket] = self._compile(bucket)
                self._run(bucket, StepPlan(step=-1)).result()
                if report is not None:
                    report(f"{bucket.num_tokens} tokens, {bucket.num_rows} rows", done + 1, len(self.buckets))
        self.compilations += counter.compilations - compilations_before
        self._unexpected_at_ready = counter.unexpected_programs
        return time.monotonic() - start

    def reset(self) -> None:
        """Start over with empty pages and rows; after a failed step they are in no known state."""
        self._pages, self._rows = self._make_state()

    def start(self, plan: StepPlan) -> PendingStep:
        """Dispatch a plan and return at once."""
        return self._run(choose_bucket(self.buckets, plan.num_tokens, plan.num_seqs), plan)

    def _run(self, bucket: Bucket, plan: StepPlan) -> PendingStep:
        words = self._layouts[bucket].pack(plan)
        self._pages, self._rows, drawn = self._executables[bucket](self._weights, self._pages, self._rows, words)
        return PendingStep(drawn, plan.num_seqs)

    def _compile_state(self) -> tuple[Callable[[], tuple[Any, Any]], tuple[Any, Any]]:
        """Return what makes empty pages and rows, and their shardings: pages split over KV heads, rows everywhere."""
        config, spec, mesh = self._config, self._config.page_spec, self._parts.mesh
        pages_per_seq = -(-config.max_model_len // spec.page_size_tokens)

        def make() -> tuple[Any, Any]:
            rows = make_rows(config.max_num_seqs, config.max_model_len, pages_per_seq, spec.scratch_page)
            return self._parts.attention.make_pages(spec), rows

        page_shardings = jax.tree.map(
            lambda partition: NamedSharding(mesh, partition),
            self._parts.attention.page_sharding(spec, TENSOR_AXIS),
            is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
        )
        replicated = NamedSharding(mesh, PartitionSpec())
        shardings = page_shardings, jax.tree.map(lambda _: replicated, jax.eval_shape(make)[1])
        return jax.jit(make, out_shardings=shardings).lower().compile(), shardings

    def _compile(self, bucket: Bucket) -> jax.stages.Compiled:
        layout = self._layouts[bucket]
        replicated = NamedSharding(self._parts.mesh, PartitionSpec())
        step = jax.jit(
            make_step(self._parts, layout),
            donate_argnums=(1, 2),
            out_shardings=(*self._shardings, replicated),
        )
        words = jax.ShapeDtypeStruct((layout.num_words,), jnp.int32, sharding=replicated)
        return step.lower(self._weights, self._pages, self._rows, words).compile()
