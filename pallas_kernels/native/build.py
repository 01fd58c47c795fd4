"""Builds native kernels with this machine's C++ compiler when they are first used, and keeps them in the cache.

A kernel is one C++ file that defines XLA FFI handlers. It is compiled for one instruction set; which one is decided on
the machine that runs it.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from importlib.metadata import version as installed_version
from pathlib import Path

import jax

SHARED_SOURCES = Path(__file__).parent  # headers
INSTRUCTION_SET_VARIABLE = "JPAGED_INSTRUCTION_SET"
COMPILE_TIMEOUT_SECONDS = 300
_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "fma", "avx2")


class BuildError(RuntimeError):
    """A native kernel cannot be had on this machine; the message says why."""


@dataclass(frozen=True)
class InstructionSet:
    """What a kernel is compiled for: the names are those of both /proc/cpuinfo and the compiler's -m options."""

    name: str
    features: tuple[str, ...]

    @property
    def compiler_options(self) -> list[str]:
        return [f"-m{_COMPILER_NAMES.get(feature, feature)}" for feature in self.features]


_COMPILER_NAMES = {"avx512_bf16": "avx512bf16", "amx_tile": "amx-tile", "amx_bf16": "amx-bf16"}

# The best first.
INSTRUCTION_SETS = (
    InstructionSet("amx", (*_AVX512, "avx512_bf16", "amx_tile", "amx_bf16")),
    InstructionSet("avx512_bf16", (*_AVX512, "avx512_bf16")),
    InstructionSet("avx512", _AVX512),
    InstructionSet("avx2", ("fma", "avx2")),
    InstructionSet("plain", ()),
)


@functools.cache
def runnable_instruction_sets() -> tuple[InstructionSet, ...]:
    """The instruction sets that this machine's processor and system run, the best first."""
    has = processor_features()
    return tuple(
        candidate
        for candidate in INSTRUCTION_SETS
        if has.issuperset(candidate.features) and ("amx_tile" not in candidate.features or _may_use_tiles())
    )


def choose_instruction_set() -> InstructionSet:
    """The best this machine runs, or the one that the environment variable JPAGED_INSTRUCTION_SET names.

    Raises:
        BuildError: the variable names one that this machine does not run.
    """
    runnable = {candidate.name: candidate for candidate in runnable_instruction_sets()}
    wanted = os.environ.get(INSTRUCTION_SET_VARIABLE) or next(iter(runnable))
    if wanted not in runnable:
        raise BuildError(f"{INSTRUCTION_SET_VARIABLE} is {wanted!r}, this machine runs {', '.join(runnable)}")
    return runnable[wanted]


@functools.cache
def build(source: Path, instruction_set: InstructionSet) -> ctypes.CDLL:
    """The library made of one C++ file and the headers beside it, from the cache if the same was built before.

    Processes may build the same at once: each writes its own file, and the last to finish stays.

    Raises:
        BuildError: no compiler, or it failed.
    """
    compiler = find_compiler()
    options = [
        "-std=c++20",
        "-O3",
        "-fPIC",
        "-shared",
        "-fvisibility=hidden",
        "-Wno-psabi",
        *instruction_set.compiler_options,
        *shlex.split(os.environ.get("JPAGED_CXXFLAGS", "")),
    ]
    target = _cache_dir() / f"{source.stem}-{instruction_set.name}-{_key(source, compiler, options)}.so"
    if not target.exists():
        _compile([*compiler, *options, f"-I{SHARED_SOURCES}", f"-isystem{jax.ffi.include_dir()}"], source, target)
    try:
        return ctypes.CDLL(str(target))
    except OSError as error:
        raise BuildError(f"{target} cannot be loaded: {error}") from error


def _compile(command: list[str], source: Path, target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as directory:
            unfinished = Path(directory) / target.name
            done = subprocess.run(
                [*command, str(source), "-o", str(unfinished)],
                capture_output=True,
                text=True,
                timeout=COMPILE_TIMEOUT_SECONDS,
                check=False,
            )
            if done.returncode:
                lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
                raise BuildError(f"{command[0]} cannot compile {source.name}: {(lines or ['no message'])[0]}")
            unfinished.replace(target)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{source.name} cannot be built: {error}") from error


def find_compiler() -> list[str]:
    """The compiler's command: $CXX, or the first of the usual names."""
    if wanted := shlex.split(os.environ.get("CXX", "")):
        if shutil.which(wanted[0]) is None:
            raise BuildError(f"the C++ compiler that CXX names, {wanted[0]!r}, is not there")
        return wanted
    for name in ("g++", "clang++", "c++"):
        if path := shutil.which(name):
            return [path]
    raise BuildError("no C++ compiler (g++, clang++ or c++) is installed")


def _key(source: Path, compiler: list[str], options: list[str]) -> str:
    """Names everything a build depends on."""
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, timeout=60, check=False)
    digest = hashlib.sha256()
    for part in (*compiler, version.stdout, *options, installed_version("jaxlib"), platform.machine()):
        digest.update(part.encode() + b"\0")
    for file in (source, *sorted(source.parent.glob("*.h")), *sorted(SHARED_SOURCES.glob("*.h"))):
        digest.update(file.read_bytes() + b"\0")
    return digest.hexdigest()[:20]


def _cache_dir() -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "jpaged" / "native"


def processor_features() -> frozenset[str]:
    """What /proc/cpuinfo calls flags; none where there are no x86 instruction sets to choose from."""
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    return frozenset()


def _may_use_tiles() -> bool:
    """Linux gives a process the AMX tile registers when it asks for them, for all its threads."""
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0
