"""Facts and decisions are plain host code: importing all their modules must leave the device libraries unloaded."""

import subprocess
import sys

import pytest

DEVICE_LIBRARIES = ("jax", "jaxlib", "flax", "transformers", "torch")

# Imports a module with all its submodules in a fresh interpreter, prints which device libraries came along.
PROBE = f"""
import importlib, pkgutil, sys
module = importlib.import_module(sys.argv[1])
for found in pkgutil.walk_packages(getattr(module, "__path__", []), module.__name__ + "."):
    importlib.import_module(found.name)
print(*[name for name in {DEVICE_LIBRARIES!r} if name in sys.modules])
"""


def loaded_device_libraries(module_name: str) -> list[str]:
    """The device libraries that importing `module_name`, submodules included, loads in a fresh interpreter."""
    probe = subprocess.run([sys.executable, "-c", PROBE, module_name], capture_output=True, text=True, check=False)
    assert probe.returncode == 0, probe.stderr
    return probe.stdout.split()


@pytest.mark.parametrize("room", ["paging", "decoding", "scheduling"])
def test_decisions_leave_jax_unloaded(room: str) -> None:
    assert loaded_device_libraries(f"jpaged.{room}") == []


@pytest.mark.parametrize("fact", ["config", "errors", "metrics", "request", "step_plan"])
def test_facts_leave_jax_unloaded(fact: str) -> None:
    assert loaded_device_libraries(f"jpaged.{fact}") == []


def test_the_probe_sees_jax_where_it_is_used() -> None:
    assert "jax" in loaded_device_libraries("pallas_kernels")
