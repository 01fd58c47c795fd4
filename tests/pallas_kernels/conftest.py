"""Kernels in interpreters call back into Python, and writing such a program to the compilation cache crashes jaxlib."""

import jax
import pytest


@pytest.fixture(autouse=True)
def nothing_goes_to_the_compilation_cache():
    """Engines of other tests may have turned the cache on: let no program be worth its place there."""
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)
    yield
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before)
