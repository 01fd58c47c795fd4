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
from numpy.typing import NDArray

from jpaged.execution.batch import BatchLayout, ChangesLayout, DrawLayout
from jpaged.execution.buckets import Bucket, choose_bucket, make_buckets
from jpaged.execution.compilation import counter
from jpaged.execution.constraints import ConstraintsLayout, make_constraints, num_words
from jpaged.execution.draw import make_draw
from jpaged.execution.logprobs import unpack_logprobs
from jpaged.execution.page_moves import PageMover
from jpaged.execution.rows import apply_changes, enter_histories, make_rows
from jpaged.execution.scoring import PendingScores, Scorer
from jpaged.execution.step import StepParts, make_step, replicated
from jpaged.models.registry import Model
from jpaged.parallel.mesh import TENSOR_AXIS
from jpaged.step_plan import StepPlan, StepResult
from pallas_kernels.paged_attention.api import PagedAttention, PageSpec
from pallas_kernels.sampling.cpu import CpuSampling

PAGES_PER_CHANGE = 512  # page table entries in one call outside of a step
TOKENS_PER_CHANGE = 2048  # tokens of histories in one call

# Called with what was just compiled, how many shapes are done, and how many there are (0 before that is known).
ReportProgress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """Sizes of the running state, of the largest step and of the host tier; `one_row_alone` says that a step of one row
    has a program of its own, for devices on which it is faster than one of a few."""

    page_spec: PageSpec
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_host_pages: int = 0
    one_row_alone: bool = False


@dataclass(frozen=True, slots=True)
class MeasuredRates:
    """What the warm-up measured. A swap is there and back; without a host tier it costs nothing and is never asked."""

    swap_seconds_per_page: float
    compute_seconds_per_token: float


class PendingStep:
    """A dispatched step; `result` waits for it, and for the pages that left for the host tier with it."""

    __slots__ = ("_drawn", "_mover", "_plan", "_scores")

    def __init__(self, plan: StepPlan, mover: PageMover, drawn: Array | None, scores: PendingScores | None) -> None:
        if drawn is not None:
            drawn.copy_to_host_async()
        self._plan, self._mover, self._drawn, self._scores = plan, mover, drawn, scores

    def result(self) -> StepResult:
        self._mover.settle()
        if self._drawn is None:
            return StepResult(np.empty(0, np.int32))
        words = np.asarray(self._drawn)[: self._plan.num_seqs]
        logprobs = unpack_logprobs(words[:, 1:]) if self._plan.wants_logprobs else None
        if self._scores is None:
            return StepResult(words[:, 0], logprobs)
        return StepResult(words[:, 0], logprobs, self._scores.scored(), self._scores.wide())


class Runner:
    """One jitted step per bucket over donated pages and rows, and one jitted draw per number of rows behind it.

    Nothing here decides: `start` executes a plan as it is. The weights stay; pages, rows and the hidden states of the
    last step are replaced by each step, constraints by each row that is taken with some.
    """

    def __init__(
        self,
        model: Model,
        attention: PagedAttention,
        mesh: Mesh,
        config: RunnerConfig,
        sampling: CpuSampling | None = None,
    ) -> None:
        self.model = model
        graph, self._weights = nnx.split(model)
        self._parts = StepParts(graph, attention, config.page_spec, mesh, sampling)
        self._config = config
        self._executables: dict[Bucket, jax.stages.Compiled] = {}
        self._draws: dict[int, jax.stages.Compiled] = {}  # by number of rows
        self._layouts = {
            bucket: BatchLayout(
                bucket, config.page_spec.page_size_tokens, config.max_num_seqs, config.page_spec.scratch_page
            )
            for bucket in make_buckets(
                config.max_num_batched_tokens, config.max_num_seqs, one_row_alone=config.one_row_alone
            )
        }
        self.buckets = sorted(self._layouts)
        self._draw_layouts = {
            bucket.num_rows: DrawLayout(bucket.num_rows, config.max_num_seqs) for bucket in self.buckets
        }
        self._constraints_layout = ConstraintsLayout(model.spec.vocab_size)
        self._changes_layout = ChangesLayout(
            config.max_num_seqs, PAGES_PER_CHANGE, config.max_num_seqs, config.page_spec.scratch_page
        )
        self._unexpected_at_ready = 0
        compilations_before = counter.compilations
        with counter.starting():
            self._make_state, self._shardings = self._compile_state()
            self._pages, self._rows, self._hidden, self._constraints = self._make_state()
            self._mover = PageMover(self._parts, self._pages, self._shardings[0], config.num_host_pages)
            self._apply_changes = self._compile_changes()
            self._enter_histories = self._compile_histories()
            self._enter_constraints = self._compile_constraints()
            self._scorer = Scorer(self._parts, self._weights, self._hidden)
            self._no_masks = {num_rows: self._place(self._empty_masks(num_rows)) for num_rows in self._draw_layouts}
        self.compilations = counter.compilations - compilations_before

    @property
    def programs(self) -> list[jax.stages.Compiled]:
        """What steps run."""
        return [*self._executables.values(), *self._draws.values()]

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
                if bucket.num_rows not in self._draws:
                    self._draws[bucket.num_rows] = self._compile_draw(bucket.num_rows)
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

    def replace_weights(self, model: Model) -> None:
        """Go on with other weights of the same shapes and placement; pages hold KV of the old ones."""
        graph, weights = nnx.split(model)
        assert graph == self._parts.graph, "the model is another one"
        self.model, self._weights = model, weights

    def reset(self) -> None:
        """Start over with empty pages and rows; after a failed step they are in no known state."""
        self._mover.forget_pending()
        self._pages, self._rows, self._hidden, self._constraints = self._make_state()

    def start(self, plan: StepPlan) -> PendingStep:
        """Dispatch a plan and return at once."""
        if plan.has_moves:
            self._pages = self._mover.run(self._pages, plan)
        self._prepare_rows(plan)
        if not plan.num_seqs:
            self._change_rows(plan)
            return PendingStep(plan, self._mover, None, None)
        return self._run(choose_bucket(self.buckets, plan.num_tokens, plan.num_seqs), plan)

    def _run(self, bucket: Bucket, plan: StepPlan) -> PendingStep:
        layout = self._layouts[bucket]
        fits = layout.changes.holds(plan)
        if not fits:
            self._change_rows(plan)
        words = layout.pack(plan, with_changes=fits)
        self._pages, self._rows, self._hidden = self._executables[bucket](
            self._weights, self._pages, self._rows, self._hidden, words
        )
        self._rows, drawn = self._draws[bucket.num_rows](
            self._weights,
            self._rows,
            self._hidden,
            self._constraints,
            self._draw_layouts[bucket.num_rows].pack(plan),
            self._masks(plan, bucket.num_rows),
        )
        scores = None
        if plan.scored or plan.wide:
            scores = self._scorer.start(self._weights, self._hidden, plan.scored, plan.wide)
        return PendingStep(plan, self._mover, drawn, scores)

    def _masks(self, plan: StepPlan, num_rows: int) -> Array | NDArray[np.uint32]:
        """The step's grammar masks; what lies on the device already if there are none."""
        if not plan.masks:
            return self._no_masks[num_rows]
        masks = self._empty_masks(num_rows)
        for place, bits in plan.masks:
            masks[place] = bits
        return masks

    def _empty_masks(self, num_rows: int) -> NDArray[np.uint32]:
        return np.zeros((num_rows, num_words(self._constraints_layout.vocabulary_size)), np.uint32)

    def _prepare_rows(self, plan: StepPlan) -> None:
        """Enter what few rows have: constraints, and histories that the device did not compute."""
        for row, sampling in plan.rows_taken:
            if sampling.constraints is not None:
                words = self._constraints_layout.pack(row, sampling.constraints)
                self._constraints = self._enter_constraints(self._constraints, words)
        tokens = [
            (row, position, token_id)
            for row, token_ids in plan.histories
            for position, token_id in enumerate(token_ids)
        ]
        for first in range(0, len(tokens), TOKENS_PER_CHANGE):
            part = tokens[first : first + TOKENS_PER_CHANGE]
            words = np.full((3, TOKENS_PER_CHANGE), self._config.max_model_len, np.int32)  # padding: no such position
            words[:, : len(part)] = np.array(part, np.int32).T
            self._rows = self._enter_histories(self._rows, words)

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

    def _compile_state(self) -> tuple[Callable[[], tuple[Any, ...]], tuple[Any, ...]]:
        make, shardings = self._describe_state()
        return jax.jit(make, out_shardings=shardings).lower().compile(), shardings

    def _place(self, array: NDArray[Any]) -> Array:
        """Put the same array on every device."""
        return jax.device_put(array, replicated(self._parts.mesh))

    def _describe_state(self) -> tuple[Callable[[], tuple[Any, ...]], tuple[Any, ...]]:
        """Return what makes empty pages, rows, hidden states and constraints, and their shardings: pages split over KV
        heads, the rest everywhere."""
        config, spec, mesh = self._config, self._config.page_spec, self._parts.mesh
        pages_per_seq = -(-config.max_model_len // spec.page_size_tokens)

        def make() -> tuple[Any, ...]:
            rows = make_rows(config.max_num_seqs, config.max_model_len, pages_per_seq, spec.scratch_page)
            hidden = jnp.zeros((self.buckets[-1].num_tokens, self.model.spec.hidden_size), jnp.float32)
            constraints = make_constraints(config.max_num_seqs, self.model.spec.vocab_size)
            return self._parts.attention.make_pages(spec), rows, hidden, constraints

        page_shardings = jax.tree.map(
            lambda partition: NamedSharding(mesh, partition),
            self._parts.attention.page_sharding(spec, TENSOR_AXIS),
            is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
        )
        rest = jax.tree.map(lambda _: replicated(mesh), jax.eval_shape(make)[1:])
        return make, (page_shardings, *rest)

    def _compile_changes(self) -> Any:
        layout = self._changes_layout

        def change(rows: Any, words: Array) -> Any:
            return apply_changes(rows, layout.unpack(words))

        return self._compile_entry(change, self._rows, self._shardings[1], (layout.stop,))

    def _compile_histories(self) -> Any:
        return self._compile_entry(enter_histories, self._rows, self._shardings[1], (3, TOKENS_PER_CHANGE))

    def _compile_constraints(self) -> Any:
        layout = self._constraints_layout
        return self._compile_entry(layout.enter, self._constraints, self._shardings[3], (layout.num_words,))

    def _compile_entry(self, enter: Any, state: Any, shardings: Any, shape: tuple[int, ...]) -> Any:
        """Compile enter(state, int32 words [*shape]) -> state, with the state donated."""
        return jax.jit(enter, donate_argnums=0, out_shardings=shardings).lower(state, self._words(*shape)).compile()

    def _compile(self, bucket: Bucket) -> jax.stages.Compiled:
        step = jax.jit(
            make_step(self._parts, self._layouts[bucket]), donate_argnums=(1, 2, 3), out_shardings=self._shardings[:3]
        )
        state = self._pages, self._rows, self._hidden
        return step.lower(self._weights, *state, self._words(self._layouts[bucket].num_words)).compile()

    def _compile_draw(self, num_rows: int) -> jax.stages.Compiled:
        layout, shardings = self._draw_layouts[num_rows], (self._shardings[1], replicated(self._parts.mesh))
        draw = jax.jit(make_draw(self._parts, layout), donate_argnums=1, out_shardings=shardings)
        state = self._rows, self._hidden, self._constraints
        words, masks = self._words(layout.num_words), self._no_masks[num_rows]
        return draw.lower(self._weights, *state, words, masks).compile()

    def _words(self, *shape: int) -> jax.ShapeDtypeStruct:
        """What the host sends with a call."""
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=replicated(self._parts.mesh))
