"""Sets the device up before anything imports jax: CPU only, eight fake devices for the tensor-parallel tests."""

import gc
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import pytest
from hypothesis import settings

# A machine that is busy is no failure.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(scope="module", autouse=True)
def forget_compiled_programs():
    """Compiled programs take memory maps, of which Linux gives a process 65,530: too few for those of a whole run.

    So a module's engines go with it (its fixtures are of that scope), and what `jax.jit` has kept for its tests.
    """
    yield
    gc.collect()
    jax.clear_caches()
