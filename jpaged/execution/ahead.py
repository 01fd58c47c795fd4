"""Compiles what a runner compiles for devices that are not there, and says what it found; nothing runs."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from jpaged.execution.runner import Runner, RunnerConfig
from jpaged.execution.step import replicated
from jpaged.models.registry import build_model
from jpaged.models.spec import ModelSpec
from jpaged.weights.placement import abstract_model
from pallas_kernels.paged_attention.api import PagedAttention


@dataclass(frozen=True, slots=True)
class CompiledBucket:
    """What the compiler says of one bucket's step and of its draw; bytes are of one device."""

    num_tokens: int
    num_rows: int
    compile_seconds: float
    weight_bytes: int
    page_bytes: int
    temporary_bytes: int
    pages_are_aliased: bool


class AheadRunner(Runner):
    """A runner whose weights and state are shapes: it compiles, and cannot run."""

    def __init__(
        self, spec: ModelSpec, dtype: jax.typing.DTypeLike, attention: PagedAttention, mesh: Mesh, config: RunnerConfig
    ) -> None:
        super().__init__(abstract_model(build_model(spec, dtype), mesh), attention, mesh, config)

    def compile_buckets(self) -> Iterator[CompiledBucket]:
        """Compile the step of every bucket, smallest first, and with the first of each number of rows its draw."""
        draws: dict[int, Any] = {}
        for bucket in self.buckets:
            start = time.monotonic()
            compiled = self._steps[bucket].lower().compile()
            if bucket.num_rows not in draws:
                draws[bucket.num_rows] = self._draws[bucket.num_rows].lower().compile()
            seconds = time.monotonic() - start
            memory, draw_memory = compiled.memory_analysis(), draws[bucket.num_rows].memory_analysis()
            assert memory is not None and draw_memory is not None
            page_bytes = _device_bytes(self._pages)
            yield CompiledBucket(
                num_tokens=bucket.num_tokens,
                num_rows=bucket.num_rows,
                compile_seconds=seconds,
                weight_bytes=_device_bytes(self._weights),
                page_bytes=page_bytes,
                temporary_bytes=max(memory.temp_size_in_bytes, draw_memory.temp_size_in_bytes),
                pages_are_aliased=memory.alias_size_in_bytes >= page_bytes,
            )

    def _describe_programs(self) -> None:
        return None  # nothing is kept

    def _begin(self) -> None:
        pass

    def _place(self, array: NDArray[Any]) -> Any:
        return jax.ShapeDtypeStruct(array.shape, np.dtype(array.dtype), sharding=replicated(self._parts.mesh))


def _device_bytes(tree: Any) -> int:
    """Bytes that one device holds of a tree of shapes."""
    leaves = jax.tree.leaves(tree)
    return sum(int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize for x in leaves)
