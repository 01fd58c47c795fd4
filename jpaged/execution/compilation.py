"""The persistent compilation cache, and a count of what was compiled when."""

import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import jax
from jax import monitoring

# jax reports the first for every program that is compiled or read back, and the second for those read back.
_COMPILED_OR_READ = "/jax/core/compile/backend_compile_duration"
_READ = "/jax/compilation_cache/cache_hits"


def enable_compilation_cache() -> None:
    """Keep compiled programs under $XDG_CACHE_HOME/jpaged/compiled, unless the user has chosen a place already."""
    if jax.config.jax_compilation_cache_dir is None:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(home / "jpaged" / "compiled"))
    # A start that compiles nothing needs the small programs too.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


class CompilationCounter:
    """Counts this process's compilations: jax has one set of listeners, so all engines of a process share it.

    A program made ready inside `starting()` belongs to a start; one made ready outside of it makes a request wait.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread = threading.local()
        self.compilations = 0  # programs that were compiled, not read back
        self.unexpected_programs = 0  # programs compiled or read back outside of a start
        monitoring.register_event_duration_secs_listener(self._on_duration)
        monitoring.register_event_listener(self._on_event)

    @contextmanager
    def starting(self) -> Generator[None]:
        """What this thread compiles inside is expected."""
        self._thread.starting = True
        try:
            yield
        finally:
            self._thread.starting = False

    def _on_duration(self, event: str, duration_secs: float, **_: object) -> None:
        if event == _COMPILED_OR_READ:
            with self._lock:
                self.compilations += 1
                self.unexpected_programs += not getattr(self._thread, "starting", False)

    def _on_event(self, event: str, **_: object) -> None:
        if event == _READ:
            with self._lock:
                self.compilations -= 1


counter = CompilationCounter()
