"""jax's persistent compilation cache, and a count of what was compiled when."""

import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import jax
from jax import monitoring
from jax.experimental.compilation_cache import compilation_cache

# jax reports the first for every program that is compiled or read back, and the second for those read back.
_COMPILED_OR_READ = "/jax/core/compile/backend_compile_duration"
_READ = "/jax/compilation_cache/cache_hits"


_bypass_lock = threading.Lock()


def cache_home() -> Path:
    """Where jpaged keeps what it has compiled."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jpaged"


def enable_compilation_cache() -> None:
    """Have jax keep compiled programs under $XDG_CACHE_HOME/jpaged/compiled, unless the user has chosen a place."""
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_home() / "compiled"))
    # A start that compiles nothing needs the small programs too.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


@contextmanager
def bypass_compilation_cache() -> Generator[None]:
    """Inside, jax's cache is neither read nor written, by any thread.

    XLA for CPUs cannot write a program out again that it has read: what shall be kept elsewhere must be compiled.
    """
    with _bypass_lock:
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()  # jax asks only once whether the cache is enabled
        try:
            yield
        finally:
            jax.config.update("jax_enable_compilation_cache", True)
            compilation_cache.reset_cache()


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
        before = getattr(self._thread, "starting", False)
        self._thread.starting = True
        try:
            yield
        finally:
            self._thread.starting = before

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
