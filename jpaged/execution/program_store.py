"""Compiled programs in the user's cache, each under a digest of everything that it was made from.

jax's own compilation cache knows a program by its lowered text, so that a start must trace all of them, which takes
longer than reading them back. Here nothing is traced: the digest covers this code, the versions of what it is made
with, the machine, jax's settings, and what the caller says that the program depends on. One of them changed, and the
program is another.

The files hold pickles and machine code, as jax writes them (jax.experimental.serialize_executable): whoever can write
them can run code as the user. So the directory is made for the user alone, and left alone if others may write to it.
"""

import functools
import hashlib
import logging
import os
import pickle
import platform
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize

import pallas_kernels
from jpaged.execution.compilation import cache_home

logger = logging.getLogger(__name__)
# The rooms whose code can be in a program; device code imports no others.
ROOMS = (".", "execution", "layers", "models", "parallel")
SOURCE_SUFFIXES = (".py", ".cc", ".h")
DISTRIBUTIONS = ("jax", "jaxlib", "flax", "numpy", "ml_dtypes")
VARIABLES = ("XLA_", "LIBTPU_", "JPAGED_")  # beginnings of names
PROCESSOR_LINES = ("model name", "flags", "Features", "CPU implementer", "CPU variant", "CPU part")
DIGEST_BYTES = 32
KEPT_BYTES = 2 << 30  # beyond them what was not used for longest goes


class ProgramStore:
    """Programs for some devices. `facts` is what its programs depend on beside their names and arguments, and what is
    found out here. All methods may be called by several threads."""

    def __init__(self, devices: Sequence[jax.Device], facts: str, directory: Path) -> None:
        self._devices, self._directory = devices, directory
        placed = [(device.id, device.device_kind) for device in devices]
        self._facts = "\n".join((_source_digest(), _machine(), _settings(), repr(placed), facts))

    @staticmethod
    def open(devices: Sequence[jax.Device], facts: str) -> "ProgramStore | None":
        """The user's store; `None` if there is no directory for it, or others may write to it."""
        directory = cache_home() / "programs"
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = directory.stat()
        except OSError as error:
            logger.warning("no compiled programs are kept: %s", error)
            return None
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            logger.warning("no compiled programs are kept: others may write to %s; chmod it to 700", directory)
            return None
        return ProgramStore(devices, facts, directory)

    def path(self, name: str, signature: str) -> Path:
        """Where a program of this name, arguments and results is kept."""
        digest = hashlib.sha256("\n".join((self._facts, name, signature)).encode()).hexdigest()
        return self._directory / f"{name}-{digest}"

    def read(self, path: Path) -> jax.stages.Compiled | None:
        """The program, or `None` if it is not there or the file is damaged."""
        try:
            content = path.read_bytes()
            os.utime(path)
        except OSError:
            return None
        digest, body = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
        if hashlib.sha256(body).digest() != digest:
            logger.warning("%s is damaged: compiling again", path)
            return None
        try:
            program, in_tree, out_tree = pickle.loads(body)
            return deserialize_and_load(
                program, in_tree, out_tree, backend=self._devices[0].client, execution_devices=self._devices
            )
        except Exception as error:  # whatever pickle, jax and the backend raise
            logger.warning("%s cannot be read (%s): compiling again", path, error)
            return None

    def write(self, path: Path, compiled: jax.stages.Compiled) -> None:
        """Keep a program. One that came out of a cache itself must not be given: XLA loses parts of those."""
        try:
            body = pickle.dumps(serialize(compiled))
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
                file.write(hashlib.sha256(body).digest() + body)
            Path(file.name).replace(path)
        except Exception as error:  # a full disk, a backend that cannot; the start goes on without
            logger.warning("%s cannot be kept (%s): the next start compiles it again", path.name, error)

    def prune(self) -> None:
        """Delete what was not used for longest, until the rest is small enough."""
        found = []
        for path in self._directory.iterdir():
            try:
                status = path.stat()
            except FileNotFoundError:  # another process prunes too
                continue
            found.append((status.st_mtime, status.st_size, path))
        total = 0
        for _, size, path in sorted(found, reverse=True):
            total += size
            if total > KEPT_BYTES:
                path.unlink(missing_ok=True)


def describe_arguments(arguments: Any) -> str:
    """The structure of a program's arguments, and the shape, type and place of each array."""
    leaves, tree = jax.tree.flatten(arguments)
    return "\n".join([str(tree), *(f"{leaf.dtype}{leaf.shape} {leaf.sharding}" for leaf in leaves)])


@functools.cache
def _source_digest() -> str:
    """Of all code that can be in a program."""
    package = Path(__file__).parents[1]
    files = [path for room in ROOMS for path in (package / room).glob("*.py")]
    files += [path for path in Path(pallas_kernels.__path__[0]).rglob("*") if path.suffix in SOURCE_SUFFIXES]
    digest = hashlib.sha256()
    for path in sorted(files):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package.parent)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


@functools.cache
def _machine() -> str:
    """What compiles, and for what."""
    client = jax.devices()[0].client
    facts = [platform.python_version(), platform.machine(), client.platform, client.platform_version]
    facts += [f"{name} {version(name)}" for name in DISTRIBUTIONS]
    facts += [f"{len(jax.devices())} devices, {os.cpu_count()} cores"]
    try:
        lines = set(Path("/proc/cpuinfo").read_text().splitlines())
    except OSError:  # not Linux
        lines = set()
    return "\n".join(facts + sorted(line for line in lines if line.split("\t")[0] in PROCESSOR_LINES))


def _settings() -> str:
    """jax's settings, those of this thread too, and the environment's. Where caches lie changes no program."""
    configured = {
        name: getattr(jax.config, name, value) for name, value in jax.config.values.items() if "cache" not in name
    }
    environment = {name: value for name, value in os.environ.items() if name.startswith(VARIABLES)}
    return repr((sorted(configured.items()), sorted(environment.items()), jax.sharding.get_abstract_mesh()))
