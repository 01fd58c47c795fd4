"""Owns the device's state and runs plans on it."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, fields
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
from jpaged.execution.programs import Program, Programs, ReportProgress
from jpaged.execution.rows import apply_changes, enter_histories, make_rows
from jpaged.execution.scoring import PendingScores, Scorer
from jpaged.execution.step import StepParts, make_step, replicated
from jpaged.models.registry import Model
from jpaged.parallel.mesh import TENSOR_AXIS
from jpaged.step_plan import RowConstraints, ScoredToken, StepPlan, StepResult
from pallas_kernels.paged_attention.api import PagedAttention, PageSpec
from pallas_kernels.sampling.cpu import CpuSampling

PAGES_PER_CHANGE = 512  # page table entries in one call outside of a step
TOKENS_PER_CHANGE = 2048  # tokens of histories in one call

logger = logging.getLogger(__name__)


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

    __slots__ = ("_drawn", "_mover", "_scores", "plan")

    def __init__(self, plan: StepPlan, mover: PageMover, drawn: Array | None, scores: PendingScores | None) -> None:
        if drawn is not None:
            drawn.copy_to_host_async()
        self.plan, self._mover, self._drawn, self._scores = plan, mover, drawn, scores

    def is_done(self) -> bool:
        """Whether its tokens are drawn; a step that draws none is not followed any further."""
        return self._drawn is None or self._drawn.is_ready()  # type: ignore[attr-defined]

    def result(self) -> StepResult:
        self._mover.settle()
        if self._drawn is None:
            return StepResult(np.empty(0, np.int32))
        words = np.asarray(self._drawn)[: self.plan.num_seqs]
        logprobs = unpack_logprobs(words[:, 1:]) if self.plan.wants_logprobs else None
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
        self._no_masks = {num_rows: self._place(self._empty_masks(num_rows)) for num_rows in self._draw_layouts}
        compilations_before = counter.compilations
        with counter.starting():
            self._programs = Programs(mesh, self._describe_programs())
            self._add_programs()
            self._begin()
        self.compilations = counter.compilations - compilations_before

    def _describe_programs(self) -> str | None:
        """All that programs depend on beside their names, arguments and results."""
        parts = [getattr(self._parts, field.name) for field in fields(self._parts)]
        return "\n".join([*map(_describe, parts), repr(self._config)])

    def _add_programs(self) -> None:
        """Say what is to be compiled; the state is shapes for now."""
        make_state, shardings = self._describe_state()
        self._make_state = self._programs.add("make_state", make_state, out_shardings=shardings)
        shapes = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            jax.eval_shape(make_state),
            shardings,
        )
        self._pages: Any
        self._rows: Any
        self._hidden: Any
        self._constraints: Any
        self._pages, self._rows, self._hidden, self._constraints = shapes
        self._steps = {bucket: self._add_step(bucket, shardings) for bucket in self.buckets}
        self._draws = {num_rows: self._add_draw(num_rows, shardings) for num_rows in self._draw_layouts}
        self._mover = PageMover(self._programs, self._parts, self._pages, shardings[0], self._config.num_host_pages)
        changes, constraints = self._changes_layout, self._constraints_layout

        def apply(rows: Any, words: Array) -> Any:
            return apply_changes(rows, changes.unpack(words))

        def add(name: str, enter: Any, state: Any, sharding: Any, *shape: int) -> Program:
            return self._programs.add(name, enter, state, self._words(*shape), donate=(0,), out_shardings=sharding)

        self._apply_changes = add("apply_changes", apply, self._rows, shardings[1], changes.stop)
        self._enter_histories = add("enter_histories", enter_histories, self._rows, shardings[1], 3, TOKENS_PER_CHANGE)
        self._enter_constraints = add(
            "enter_constraints", constraints.enter, self._constraints, shardings[3], constraints.num_words
        )
        self._scorer = Scorer(self._programs, self._parts, self._weights, self._hidden)

    def _add_step(self, bucket: Bucket, shardings: tuple[Any, ...]) -> Program:
        layout = self._layouts[bucket]
        return self._programs.add(
            f"step_{bucket.num_tokens}_{bucket.num_rows}",
            make_step(self._parts, layout),
            *(self._weights, self._pages, self._rows, self._hidden, self._words(layout.num_words)),
            donate=(1, 2, 3),
            out_shardings=shardings[:3],
        )

    def _add_draw(self, num_rows: int, shardings: tuple[Any, ...]) -> Program:
        layout = self._draw_layouts[num_rows]
        state = self._rows, self._hidden, self._constraints
        return self._programs.add(
            f"draw_{num_rows}",
            make_draw(self._parts, layout),
            *(self._weights, *state, self._words(layout.num_words), self._no_masks[num_rows]),
            donate=(1,),
            out_shardings=(shardings[1], replicated(self._parts.mesh)),
        )

    def _begin(self) -> None:
        """Read back what was kept of the programs, and fill the pages with zeros: both go on in threads."""
        self._programs.begin_reading()
        self._programs.make_ready([self._make_state])
        # To fill gigabytes takes seconds where the system has yet to find the memory.
        threads = ThreadPoolExecutor(1, "jpaged-fill")
        self._filling = threads.submit(self.reset)
        threads.shutdown(wait=False)

    @property
    def programs(self) -> list[jax.stages.Compiled]:
        """What steps run."""
        return [program.compiled for program in (*self._steps.values(), *self._draws.values())]

    @property
    def compilations_after_ready(self) -> int:
        """Programs that this process compiled, or read back from the cache, since this runner was ready; another
        engine's start does not count."""
        return counter.unexpected_programs - self._unexpected_at_ready

    def make_ready(self, report: ReportProgress | None = None) -> None:
        """Read back or compile every program, and wait for the pages."""
        compilations_before = counter.compilations
        with counter.starting():
            self._programs.make_ready(report=report)
        wait([self._filling])
        self.compilations += counter.compilations - compilations_before

    def warm_up(self) -> MeasuredRates:
        """Make every program ready and run each once, empty; return measured rates. Nothing compiles after it."""
        self.make_ready()
        compilations_before = counter.compilations
        with counter.starting():
            try:
                self._filling.result()
                self._run_each()
            except jax.errors.JaxRuntimeError as error:
                # A kept program that does not run must not keep an engine from starting.
                if not self._programs.compile_again():
                    raise
                logger.warning("a kept program does not run (%s): compiled them all again", error)
                self.reset()
                self._run_each()
            rates = self._measure()
        self.compilations += counter.compilations - compilations_before
        self._unexpected_at_ready = counter.unexpected_programs
        return rates

    def _run_each(self) -> None:
        """Run every program, so that the first request finds all as fast as the next, and that each is known to run."""
        nothing = StepPlan(step=-1)
        for bucket in self.buckets:
            self._run(bucket, nothing).result()
        self._change_rows(nothing)
        self._enter([])
        self._constraints = self._enter_constraints(
            self._constraints, self._constraints_layout.pack(0, RowConstraints())
        )
        self._pages = self._mover.run_each(self._pages)
        token = [ScoredToken(0, 0, 0, 0, 0)]
        scores = self._scorer.start(self._weights, self._hidden, token, token)
        scores.scored()
        scores.wide()

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
        self._pages = self._rows = self._hidden = self._constraints = None  # there is not room for two pools
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
        self._pages, self._rows, self._hidden = self._steps[bucket](
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
            self._enter(tokens[first : first + TOKENS_PER_CHANGE])

    def _enter(self, tokens: list[tuple[int, int, int]]) -> None:
        """Enter tokens into histories, in one call: row, position and id of each."""
        words = np.full((3, TOKENS_PER_CHANGE), self._config.max_model_len, np.int32)  # padding: no such position
        if tokens:
            words[:, : len(tokens)] = np.array(tokens, np.int32).T
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

    def _words(self, *shape: int) -> jax.ShapeDtypeStruct:
        """What the host sends with a call."""
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=replicated(self._parts.mesh))


def _describe(value: Any) -> str:
    """The same for equal values, in every process."""
    has_repr = type(value).__repr__ is not object.__repr__
    return repr(value) if has_repr else f"{type(value)} {vars(value)}"
