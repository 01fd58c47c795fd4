"""Moves pages within the device and between it and the host tier, all layers at once, in few calls of fixed shapes."""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jpaged.execution.programs import Program, Programs
from jpaged.execution.step import StepParts
from jpaged.step_plan import StepPlan

# Pages per call. A list of moves takes as many large calls as it fills, then small ones.
LARGE_MOVE, SMALL_MOVE = 64, 8


class PageMover:
    """Compiled page moves, and the host tier's memory.

    Swapped-out pages arrive asynchronously: they are written into the host tier when a swap-in needs it, or when the
    next step's result is read, whichever is first.
    """

    def __init__(
        self, programs: Programs, parts: StepParts, pages: Any, page_shardings: Any, num_host_pages: int
    ) -> None:
        self._scratch_page = parts.page_spec.scratch_page
        self._pending: list[tuple[list[int], Any]] = []
        replicated = NamedSharding(parts.mesh, PartitionSpec())
        attention = parts.attention
        self._copy: dict[int, Program] = {}
        self._read: dict[int, Program] = {}
        self._write: dict[int, Program] = {}
        self._host: Any = None
        for count in (SMALL_MOVE, LARGE_MOVE):
            ids = jax.ShapeDtypeStruct((count,), jnp.int32, sharding=replicated)
            self._copy[count] = programs.add(
                f"copy_pages_{count}", attention.copy_pages, pages, ids, ids, donate=(0,), out_shardings=page_shardings
            )
            if not num_host_pages:
                continue
            content = jax.eval_shape(attention.read_pages, pages, ids)
            content = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated), content)
            self._read[count] = programs.add(
                f"read_pages_{count}", attention.read_pages, pages, ids, out_shardings=replicated
            )
            self._write[count] = programs.add(
                *(f"write_pages_{count}", attention.write_pages, pages, ids, content),
                donate=(0,),
                out_shardings=page_shardings,
            )
            if self._host is None:
                self._host = jax.tree.map(lambda x: np.zeros((num_host_pages, *x.shape[1:]), x.dtype), content)

    def run(self, pages: Any, plan: StepPlan) -> Any:
        """Carry out a plan's moves: swap-outs, then swap-ins, then copies; return the pages, the old ones donated."""
        if plan.swap_outs:
            self._swap_out(pages, plan.swap_outs)
        if plan.swap_ins:
            self.settle()
            pages = self._swap_in(pages, plan.swap_ins)
        for part in _parts(plan.page_copies):
            sources, targets = self._ids([s for s, _ in part]), self._ids([t for _, t in part])
            pages = self._copy[len(sources)](pages, sources, targets)
        return pages

    def run_each(self, pages: Any) -> Any:
        """Run every program once, on the scratch page alone; return the pages, the old ones donated."""
        for count, copy in self._copy.items():
            ids = self._ids([self._scratch_page] * count)
            pages = copy(pages, ids, ids)
            if self._host is not None:
                self._swap_out(pages, [(self._scratch_page, 0)] * count)
                self.settle()
                pages = self._swap_in(pages, [(0, self._scratch_page)] * count)
        return pages

    def settle(self) -> None:
        """Wait for the pages that are on their way out, and put them into the host tier."""
        for host_pages, content in self._pending:
            for memory, new in zip(jax.tree.leaves(self._host), jax.tree.leaves(content), strict=True):
                memory[host_pages] = np.asarray(new)[: len(host_pages)]
        self._pending.clear()

    def forget_pending(self) -> None:
        """After a failed step: what was on its way out is lost."""
        self._pending.clear()

    def measure_swap_seconds_per_page(self, pages: Any) -> tuple[float, Any]:
        """Time a large swap of the scratch page out and in; return seconds a page, both ways, and the pages."""
        moves = [(self._scratch_page, 0)] * LARGE_MOVE
        best = float("inf")
        for _ in range(2):
            start = time.monotonic()
            self._swap_out(pages, moves)
            self.settle()
            pages = self._swap_in(pages, [(0, self._scratch_page)] * LARGE_MOVE)
            jax.block_until_ready(pages)
            best = min(best, time.monotonic() - start)
        return best / LARGE_MOVE, pages

    def _swap_out(self, pages: Any, moves: list[tuple[int, int]]) -> None:
        for part in _parts(moves):
            ids = self._ids([page for page, _ in part])
            content = self._read[len(ids)](pages, ids)
            for leaf in jax.tree.leaves(content):
                leaf.copy_to_host_async()
            self._pending.append(([host_page for _, host_page in part], content))

    def _swap_in(self, pages: Any, moves: list[tuple[int, int]]) -> Any:
        for part in _parts(moves):
            ids = self._ids([page for _, page in part])
            host_pages = [host_page for host_page, _ in part]
            host_pages += [host_pages[0]] * (len(ids) - len(part))  # what goes to the scratch page does not matter
            content = jax.tree.map(lambda memory, which=host_pages: memory[which], self._host)
            pages = self._write[len(ids)](pages, ids, content)
        return pages

    def _ids(self, pages: list[int]) -> np.ndarray:
        size = SMALL_MOVE if len(pages) <= SMALL_MOVE else LARGE_MOVE
        ids = np.full(size, self._scratch_page, np.int32)
        ids[: len(pages)] = pages
        return ids


def _parts(moves: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    return [moves[first : first + LARGE_MOVE] for first in range(0, len(moves), LARGE_MOVE)]
