"""Programs that are kept: read back when all is the same, compiled when anything differs or a file is damaged."""

import hashlib
import logging
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding, PartitionSpec

from jpaged.execution import program_store
from jpaged.execution.compilation import counter
from jpaged.execution.programs import Programs
from jpaged.parallel.mesh import make_mesh

MESH = make_mesh(1)
WHOLE = NamedSharding(MESH, PartitionSpec())


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "jpaged" / "programs"


def shape(*sizes: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=WHOLE)


def twice(x):
    return {"twice": 2 * x}


def make(facts: str = "facts", name: str = "twice", argument=None, function=twice, out_shardings=WHOLE, donate=()):
    """One program, ready."""
    programs = Programs(MESH, facts)
    program = programs.add(name, function, argument or shape(4), out_shardings=out_shardings, donate=donate)
    programs.make_ready()
    return program


def no_threads_are_left() -> bool:
    left = [thread for thread in threading.enumerate() if thread.name.startswith("jpaged-")]
    for thread in left:
        thread.join(60)
    return not any(thread.is_alive() for thread in left)


def test_a_kept_program_is_read_back_and_compiles_nothing(home):
    first = make(donate=(0,))
    before = counter.compilations, counter.unexpected_programs
    second = make(donate=(0,))
    assert (first.was_read, second.was_read) == (False, True)
    assert (counter.compilations, counter.unexpected_programs) == before
    given = jax.device_put(np.arange(4, dtype=np.float32), WHOLE)
    assert second(given)["twice"].tolist() == [0, 2, 4, 6]
    assert given.is_deleted()
    assert home.stat().st_mode & 0o777 == 0o700
    assert no_threads_are_left()


@pytest.fixture
def jax_s_cache(tmp_path):
    """jax's own cache, on and empty."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path / "jax"),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": 0,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield tmp_path / "jax"
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_jax_s_own_cache_does_not_serve_what_is_kept(jax_s_cache):
    """XLA cannot write again what it has read: kept after that, a program would lack functions."""
    jax.jit(twice, out_shardings=WHOLE).lower(shape(4)).compile()
    assert list(jax_s_cache.iterdir())
    jax.clear_caches()  # what it has in memory
    before = counter.compilations
    assert not make().was_read
    assert counter.compilations == before + 1
    assert make()(jax.device_put(jnp.ones(4), WHOLE))["twice"].tolist() == [2, 2, 2, 2]
    jax.clear_caches()
    before = counter.compilations
    jax.jit(twice, out_shardings=WHOLE).lower(shape(4)).compile()  # the cache is back for others
    assert counter.compilations == before


@pytest.mark.parametrize(
    "other",
    [
        {"facts": "others"},
        {"name": "thrice"},
        {"argument": shape(5)},
        {"argument": shape(4, dtype="int32")},
        {"donate": (0,)},
        {"out_shardings": NamedSharding(MESH, PartitionSpec("tensor"))},
    ],
    ids=str,
)
def test_another_program_is_another(other):
    make()
    assert make().was_read
    assert not make(**other).was_read
    assert make(**other).was_read


def test_another_setting_environment_source_version_or_device_is_another(monkeypatch):
    make()
    with jax.default_matmul_precision("highest"):
        assert not make().was_read
    with monkeypatch.context() as patch:
        patch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"] + " --xla_cpu_enable_fast_math=false")
        assert not make().was_read
    for name in ("_source_digest", "_machine"):
        with monkeypatch.context() as patch:
            patch.setattr(program_store, name, lambda: "other")
            assert not make().was_read
    other = jax.make_mesh((1,), ("tensor",), axis_types=MESH.axis_types, devices=jax.devices()[1:2])
    programs = Programs(other, "facts")
    place = NamedSharding(other, PartitionSpec())
    argument = jax.ShapeDtypeStruct((4,), "float32", sharding=place)
    program = programs.add("twice", twice, argument, out_shardings=place)
    programs.make_ready()
    assert not program.was_read
    assert make().was_read


@pytest.mark.parametrize("damage", ["shorter", "changed", "empty", "no pickle", "another pickle"])
def test_a_damaged_file_is_compiled_again_and_replaced(home, damage, caplog):
    make()
    [path] = home.iterdir()
    content = path.read_bytes()
    other = b"no pickle" if damage == "no pickle" else pickle.dumps(("a", "b", "c"))
    changed = {
        "shorter": content[:-1],
        "changed": content[:1000] + bytes([content[1000] ^ 1]) + content[1001:],
        "empty": b"",
    }
    path.write_bytes(changed.get(damage, hashlib.sha256(other).digest() + other))
    with caplog.at_level(logging.WARNING, "jpaged"):
        assert not make().was_read
    assert "compiling again" in caplog.text
    assert make().was_read
    assert [file.name for file in home.iterdir()] == [path.name]


def test_a_directory_that_others_may_write_to_is_left_alone(home, caplog):
    make()
    home.chmod(0o777)
    with caplog.at_level(logging.WARNING, "jpaged"):
        assert not make().was_read
    assert "chmod" in caplog.text
    home.chmod(0o700)
    assert make().was_read


def test_without_facts_or_with_caching_off_nothing_is_kept(home):
    programs = Programs(MESH, None)
    program = programs.add("twice", twice, shape(4), out_shardings=WHOLE)
    programs.make_ready()
    assert program.compiled is not None
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        assert not make().was_read
        assert not jax.config.jax_enable_compilation_cache
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    assert not home.exists()


def test_a_program_that_calls_back_into_python_is_not_kept(home):
    def calls(x):
        return jax.pure_callback(lambda x: np.asarray(x) + 1, x, x)

    program = make(function=calls)
    assert program(jax.device_put(jnp.ones(4), WHOLE)).tolist() == [2, 2, 2, 2]
    assert not list(home.iterdir())


def test_what_was_not_used_for_longest_goes(home, monkeypatch):
    for place, name in enumerate(("a", "b", "c")):
        make(name=name)
        [path] = home.glob(f"{name}-*")
        os.utime(path, (place, place))
    size = path.stat().st_size
    monkeypatch.setattr(program_store, "KEPT_BYTES", 3 * size + size // 2)
    assert make(name="a").was_read  # used just now
    make(name="d")
    assert sorted(path.name[0] for path in home.iterdir()) == ["a", "c", "d"]


def test_errors_and_interruptions_end_a_start_and_its_threads():
    def broken(x):
        raise ValueError("broken")

    programs = Programs(MESH, "facts")
    for place in range(6):
        programs.add(f"fine_{place}", twice, shape(4 + place), out_shardings=WHOLE)
    programs.add("broken", broken, shape(4), out_shardings=WHOLE)
    with pytest.raises(ValueError, match="broken"):
        programs.make_ready()
    assert jax.config.jax_enable_compilation_cache and no_threads_are_left()

    def interrupt(*_):
        raise KeyboardInterrupt

    programs = Programs(MESH, "others")
    for place in range(6):
        programs.add(f"fine_{place}", twice, shape(4 + place), out_shardings=WHOLE)
    with pytest.raises(KeyboardInterrupt):
        programs.make_ready(report=interrupt)
    assert jax.config.jax_enable_compilation_cache and no_threads_are_left()


def test_progress_counts_what_is_compiled():
    reports = []
    programs = Programs(MESH, "facts")
    for place in range(3):
        programs.add(f"p{place}", twice, shape(4 + place), out_shardings=WHOLE)
    programs.make_ready(report=lambda *report: reports.append(report))
    assert reports == [("p0", 1, 3), ("p1", 2, 3), ("p2", 3, 3)]
    programs.make_ready(report=lambda *report: reports.append(report))
    assert len(reports) == 3


def test_all_code_that_can_be_in_a_program_counts():
    code = "import jpaged.execution.runner, sys; print(*(m for m in sys.modules if m.startswith('jpaged.')))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    rooms = {name.split(".")[1] for name in out.stdout.split() if name.count(".") > 1}
    assert rooms and rooms <= set(program_store.ROOMS)
