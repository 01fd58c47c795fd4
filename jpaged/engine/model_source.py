"""From the name a user gives to a directory that can be loaded."""

import hashlib
import json
import os
import re
from pathlib import Path

from jpaged.engine.demo_model import Progress, ensure_demo_model, models_cache_dir
from jpaged.errors import ModelError
from jpaged.weights.safetensors_reader import INDEX_FILE, SINGLE_FILE

DEMO = "demo"
ORBAX_DIR = "orbax"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_PATTERNS = ["model*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
# Part of a cached conversion's name: raise it when conversions come out differently.
CONVERSION_VERSION = 1
DIGESTED_BYTES = 1024 * 1024


def resolve_model(name: str | os.PathLike[str], progress: Progress | None = None) -> Path:
    """A directory with config.json and weights (safetensors, or Orbax in `orbax/`) for what `name` says.

    `name` is `demo`, a directory, a GGUF file (converted once, into the cache), or a hub id "org/model".
    Raises ModelError saying what was tried and what to do.
    """
    name = os.fspath(name)
    if name == DEMO:
        return ensure_demo_model(progress)
    path = Path(name).expanduser()
    if path.is_dir():
        return _checked_directory(path)
    if path.is_file():
        return _converted_gguf(path, progress)
    if HUB_ID.fullmatch(name) and path.suffix != ".gguf":
        return _checked_directory(_download(name, progress))
    raise ModelError(
        f"no model {name!r}: there is no such directory or file, and it is not of the form org/model of a hub id; "
        f"give a model directory, a .gguf file, a hub id, or {DEMO!r}"
    )


def _checked_directory(path: Path) -> Path:
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} has no config.json, so it is not a model directory; check the path")
    if any((path / name).exists() for name in (ORBAX_DIR, SINGLE_FILE, INDEX_FILE)):
        return path
    others = ("*.safetensors", "*.bin", "*.pth", "*.gguf", "*.msgpack")
    found = sorted(entry.name for pattern in others for entry in path.glob(pattern))
    raise ModelError(
        f"{path} has no weights: neither {SINGLE_FILE}, {INDEX_FILE} nor {ORBAX_DIR}/"
        f"{', only ' + ', '.join(found) if found else ''}; name a .gguf file itself, or save the weights as safetensors"
    )


def _converted_gguf(path: Path, progress: Progress | None) -> Path:
    """The cached conversion of a GGUF file, made on first use."""
    from jpaged.engine.gguf_tokenizer import convert_gguf  # other starts need not load the GGUF reader

    target = models_cache_dir() / f"{path.stem}-{_gguf_key(path)}"
    if (target / "config.json").is_file():
        return target
    return convert_gguf(path, target, "bfloat16", progress)


def _gguf_key(path: Path) -> str:
    """Names a file's content without reading all of it: its first MiB (names, shapes, vocabulary), size and time."""
    try:
        with path.open("rb") as file:
            head = file.read(DIGESTED_BYTES)
        status = path.stat()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}; check the path and its permissions") from error
    if not head.startswith(b"GGUF"):
        raise ModelError(f"{path} is a file but not a GGUF file; give a .gguf file or a model directory")
    facts = json.dumps([CONVERSION_VERSION, status.st_size, status.st_mtime_ns]).encode()
    return hashlib.sha256(facts + head).hexdigest()[:16]


def _download(name: str, progress: Progress | None) -> Path:
    """The hub's snapshot of `name`: weights, configuration and tokenizer, no other file."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if progress:
        progress(f"fetching {name} from the hub")
    try:
        return Path(snapshot_download(name, allow_patterns=HUB_PATTERNS))
    except GatedRepoError as error:
        raise ModelError(f"{name} is gated on the hub; accept its terms there and set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"no model {name!r}: there is no such directory, and the hub has no such repository (or it is private: "
            "set HF_TOKEN)"
        ) from error
    except Exception as error:  # the client lets its HTTP library's own errors through
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"no model {name!r}: there is no such directory, and the hub cannot be reached ({reason}); "
            "check the network, or give the path of a model directory"
        ) from error
