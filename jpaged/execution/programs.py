"""Makes compiled programs ready: those that an earlier start kept are read back, the others are compiled."""

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jpaged.execution.compilation import bypass_compilation_cache, counter
from jpaged.execution.program_store import ProgramStore, describe_arguments

MAX_THREADS = 8  # each compilation takes memory
# Part of the names under which programs call back into Python. Such a call cannot be kept, and jaxlib crashes trying.
CALLBACK = "_callback"

# Called with what was just compiled, how many programs are done, and how many there are (0 before that is known).
ReportProgress = Callable[[str, int, int], None]


class Program:
    """A function for arguments of fixed shapes; callable once it is ready."""

    def __init__(self, name: str, jitted: Any, arguments: tuple[Any, ...], path: Path | None) -> None:
        self.name, self.path = name, path
        self._jitted, self._arguments = jitted, arguments
        self.compiled: Any = None  # jax.stages.Compiled, once it is ready
        self.reading: Future[None] | None = None
        self.was_read = False

    def __call__(self, *arguments: Any) -> Any:
        return self.compiled(*arguments)

    def lower(self) -> jax.stages.Lowered:
        return self._jitted.lower(*self._arguments)


class Programs:
    """The programs of one runner. `facts` is everything that they depend on beside names, arguments and results.

    Programs are traced in the caller's thread, and compiled, read and written in others, none of which outlives the
    call that waits for it.
    """

    def __init__(self, mesh: Mesh, facts: str | None) -> None:
        """Without `facts` nothing is kept; where nothing can be kept, jax's own cache does what it can."""
        self._store: ProgramStore | None = None
        if facts is not None and jax.process_count() == 1 and jax.config.jax_enable_compilation_cache:
            self._store = ProgramStore.open(list(mesh.devices.flat), facts)
        self._programs: list[Program] = []

    def add(
        self,
        name: str,
        function: Callable[..., Any],
        *arguments: Any,
        out_shardings: Any,
        donate: Sequence[int] = (),
    ) -> Program:
        """A program to make ready. Arguments are arrays or their shapes, with shardings."""
        arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), arguments)
        jitted = jax.jit(function, donate_argnums=tuple(donate), out_shardings=out_shardings)
        path = None
        if self._store is not None:
            signature = f"{describe_arguments(arguments)}\n{donate}\n{out_shardings}"
            path = self._store.path(name, signature)
        program = Program(name, jitted, arguments, path)
        self._programs.append(program)
        return program

    def begin_reading(self) -> None:
        """Read back in threads what was kept of the programs added so far."""
        new = [program for program in self._programs if program.reading is None and program.path is not None]
        threads = ThreadPoolExecutor(_num_threads(), "jpaged-read")
        for program in new:
            program.reading = threads.submit(self._read, program)
        threads.shutdown(wait=False)  # they end with what they were given

    def make_ready(self, programs: Sequence[Program] = (), report: ReportProgress | None = None) -> None:
        """Have these programs ready, or all; raises what tracing or compiling one of them raises."""
        self.begin_reading()
        programs = programs or self._programs
        for program in programs:
            if program.reading is not None:
                program.reading.result()
        self._compile_all([program for program in programs if program.compiled is None], report)

    def compile_again(self, report: ReportProgress | None = None) -> bool:
        """Compile anew what was read back; `False` if nothing was."""
        read = [program for program in self._programs if program.was_read]
        for program in read:
            program.was_read = False
        self._compile_all(read, report)
        return bool(read)

    def _compile_all(self, programs: list[Program], report: ReportProgress | None) -> None:
        if not programs:
            return
        compiling: deque[tuple[Program, Future[None]]] = deque()
        done = 0

        def wait_for_first() -> None:
            nonlocal done
            program, future = compiling.popleft()
            future.result()
            done += 1
            if report is not None:
                report(program.name, done, len(programs))

        with nullcontext() if self._store is None else bypass_compilation_cache():
            threads = ThreadPoolExecutor(_num_threads(), "jpaged-compile")
            try:
                for program in programs:
                    compiling.append((program, threads.submit(self._compile, program, program.lower())))
                    while compiling and compiling[0][1].done():
                        wait_for_first()
                while compiling:
                    wait_for_first()
            finally:
                threads.shutdown(cancel_futures=True)
        if self._store is not None:
            self._store.prune()

    def _compile(self, program: Program, lowered: jax.stages.Lowered) -> None:
        with counter.starting():
            program.compiled = lowered.compile()
        if self._store is not None and program.path is not None and CALLBACK not in lowered.as_text():
            self._store.write(program.path, program.compiled)

    def _read(self, program: Program) -> None:
        if self._store is not None and program.path is not None:
            program.compiled = self._store.read(program.path)
            program.was_read = program.compiled is not None


def _num_threads() -> int:
    return min(os.cpu_count() or 1, MAX_THREADS)
