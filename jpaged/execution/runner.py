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

from jpaged.execution.batch import BatchLayout, ChangesLayout
from jpaged.execution.buckets import Bucket, choose_bucket, make_buckets
from jpaged.execution.compilation import counter
from jpaged.execution.page_moves import PageMover
from jpaged.execution.rows import apply_changes, make_rows
from jpaged.execution.step import StepParts, make_step
from jpaged.parallel.mesh import TENSOR_AXIS
from jpaged.step_plan import MAX_CANDIDATES, Logprobs, StepPlan, StepResult
from pallas_kernels.paged_attention.api import PagedAttention, PageSpec

PAGES_PER_CHANGE = 512  # page table entries in one call outside of a step

# Called with what was just compiled, how many shapes are done, and how many there are (0 before that is known).
ReportProgress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """Sizes of the running state, of the largest step and of the host tier."""

    page_spec: PageSpec
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_host_pages: int = 0


@dataclass(frozen=True, slots=True)
class MeasuredRates:
    """What the warm-up measured. A swap is there and back; without a host tier it costs nothing and is never asked."""

    swap_seconds_per_page: float
    compute_seconds_per_token: float


class PendingStep:
    """A dispatched step; `result` waits for it, and for the pages that left for the host tier with it."""

    __slots__ = ("_drawn", "_mover", "_num_seqs")

    def __init__(self, drawn: Array | None, num_seqs: int, mover: PageMover) -> None:
        if drawn is not None:
            drawn.copy_to_host_async()
        self._drawn = drawn
        self._num_seqs = num_seqs
        self._mover = mover

    def result(self) -> StepResult:
        self._mover.settle()
        if self._drawn is None:
            return StepResult(np.empty(0, np.int32))
        words = np.asarray(self._drawn)[: self._num_seqs]
        candidates = words[:, 1:].reshape(-1, 2, MAX_CANDIDATES)
        nothing = np.zeros(self._num_seqs)
        logprobs = Logprobs(
            nothing.astype(np.float32), nothing.astype(np.int32), candidates[:, 0], candidates[:, 1].view(np.float32)
        )
        return StepResult(words[:, 0], logprobs)


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
        self._changes_layout = ChangesLayout(
            config.max_num_seqs, PAGES_PER_CHANGE, config.max_num_seqs, config.page_spec.scratch_page
        )
        self._unexpected_at_ready = 0
        compilations_before = counter.compilations
        with counter.starting():
            self._make_state, self._shardings = self._compile_state()
            self._pages, self._rows = self._make_state()
            self._mover = PageMover(self._parts, self._pages, self._shardings[0], config.num_host_pages)
            self._apply_changes = self._compile_changes()
        self.compilations = counter.compilations - compilations_before

    @property
    def compilations_after_ready(self) -> int:
        """Programs that this process compiled, or read back from the cache, since this runner was ready; another
        engine's start does not count."""
        return counter.unexpected_programs - self._unexpected_at_ready

    def warm_up(self, report: ReportProgress | None = None) -> MeasuredRates:
        """Compile every bucket and run each once, empty; return measured rates. Nothing compiles after it."""
        compilations_before = counter.compilations
        with counter.starting():
            for done, bucket in enumerate(self.buckets, 1):
                self._executables[bucket] = self._compile(bucket)
                self._run(bucket, StepPlan(step=-1)).result()
                if report is not None:
                    report(f"{bucket.num_tokens} tokens, {bucket.num_rows} rows", done, len(self.buckets))
            rates = self._measure()
        self.compilations += counter.compilations - compilations_before
        self._unexpected_at_ready = counter.unexpected_programs
        return rates

    def _measure(self) -> MeasuredRates:
        """Time the largest step without attention and head, which is most of a prompt's cost, and a swap."""
        largest = self.buckets[-1]
        start = time.monotonic()
        self._run(largest, StepPlan(step=-1)).result()
        compute_seconds = (time.monotonic() - start) / largest.num_tokens
        swap_seconds = 0.0
        if self._config.num_host_pages:
            swap_seconds, self._pages = self._mover.measure_swap_seconds_per_page(self._pages)
        return MeasuredRates(swap_seconds, compute_seconds)

    def reset(self) -> None:
        """Start over with empty pages and rows; after a failed step they are in no known state."""
        self._mover.forget_pending()
        self._pages, self._rows = self._make_state()

    def start(self, plan: StepPlan) -> PendingStep:
        """Dispatch a plan and return at once."""
        if plan.has_moves:
            self._pages = self._mover.run(self._pages, plan)
        if not plan.num_seqs:
            self._change_rows(plan)
            return PendingStep(None, 0, self._mover)
        return self._run(choose_bucket(self.buckets, plan.num_tokens, plan.num_seqs), plan)

    def _run(self, bucket: Bucket, plan: StepPlan) -> PendingStep:
        layout = self._layouts[bucket]
        fits = layout.changes.holds(plan)
        if not fits:
            self._change_rows(plan)
        words = layout.pack(plan, with_changes=fits)
        self._pages, self._rows, drawn = self._executables[bucket](self._weights, self._pages, self._rows, words)
        return PendingStep(drawn, plan.num_seqs, self._mover)

    def _change_rows(self, plan: StepPlan) -> None:
        """Enter row changes that no step has room for: a long prefix from the cache, a swapped-in sequence."""
        layout = self._changes_layout
        for first in range(0, max(len(plan.new_pages), 1), layout.max_pages):
            part = StepPlan(plan.step, new_pages=plan.new_pages[first : first + layout.max_pages])
            if first == 0:
                part.rows_taken, part.row_copies = plan.rows_taken, plan.row_copies
            words = np.zeros(layout.stop, np.int32)
            layout.pack(words, part)
            self._rows = self._apply_changes(self._rows, words)

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

    def _compile_changes(self) -> Any:
        layout = self._changes_layout
        replicated = NamedSharding(self._parts.mesh, PartitionSpec())

        def change(rows: Any, words: Array) -> Any:
            return apply_changes(rows, layout.unpack(words))

        words = jax.ShapeDtypeStruct((layout.stop,), jnp.int32, sharding=replicated)
        jitted = jax.jit(change, donate_argnums=0, out_shardings=self._shardings[1])
        return jitted.lower(self._rows, words).compile()

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
