"""Writes model directories: from GGUF files or Hugging Face directories, to safetensors or Orbax.

Every directory appears whole or not at all: it is written beside its place and renamed into it.
"""

import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jpaged.engine.demo_model import Progress
from jpaged.engine.gguf_tokenizer import write_tokenizer
from jpaged.engine.model_source import INDEX_FILE, resolve_model
from jpaged.errors import ConfigError, ModelError
from jpaged.weights.gguf_names import checkpoint_config, checkpoint_plan, generation_config
from jpaged.weights.gguf_reader import CHUNK_BYTES, read_gguf

DTYPES: dict[str, np.dtype] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}
SAFETENSORS_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}

WEIGHTS_FILE = "model.safetensors"
# What a model directory may hold besides its weights; anything else is left behind.
CARRIED_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


@dataclass(frozen=True)
class TensorSource:
    """A tensor to write: its name, its shape, and a function that yields its values in pieces along the first axis."""

    name: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[np.ndarray]]


def convert(
    source: str,
    target: Path,
    to: str = "safetensors",
    dtype: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """Writes `source` (anything `resolve_model` takes) as a model directory at `target`, and returns `target`.

    `to` is "safetensors" (a Hugging Face directory) or "orbax". `dtype` is the dtype of the written weights; None keeps
    that of a directory, and means bfloat16 for a GGUF file.
    Raises ConfigError for a bad `to` or `dtype` or a `target` in use, ModelError for a source that cannot be read.
    """
    if to not in ("safetensors", "orbax"):
        raise ConfigError(f"cannot convert to {to!r}; known targets: orbax, safetensors")
    if dtype is not None:
        _check_dtype(dtype)
    _check_target(target)
    is_gguf = Path(source).is_file()
    if to == "safetensors" and is_gguf:
        return convert_gguf(Path(source), target, dtype or "bfloat16", progress)
    if to == "safetensors":
        return convert_directory(resolve_model(source, progress), target, dtype, progress)

    from jpaged.weights.orbax import save_orbax  # orbax takes seconds to import

    with publish(target) as staging:
        if is_gguf:  # not through the cache, which holds bfloat16 only
            model_dir = convert_gguf(Path(source), staging / "safetensors", dtype or "bfloat16", progress)
        else:
            model_dir = resolve_model(source, progress)
        save_orbax(model_dir, staging / "model", dtype)
        shutil.rmtree(staging / "safetensors", ignore_errors=True)
        for entry in (staging / "model").iterdir():
            entry.rename(staging / entry.name)
        (staging / "model").rmdir()
    return target


def convert_gguf(gguf_path: Path, target: Path, dtype: str = "bfloat16", progress: Progress | None = None) -> Path:
    """Writes a GGUF file as a Hugging Face directory: config.json, generation_config.json, tokenizer files and weights.

    If `target` comes into being meanwhile (another process converting the same file), it is left as it is.
    Raises ModelError when the file is damaged or holds something unknown, before anything is written.
    """
    _check_dtype(dtype)
    gguf = read_gguf(gguf_path)
    config = checkpoint_config(gguf, dtype)
    plan = checkpoint_plan(gguf, config)
    if progress:
        progress(f"converting {gguf_path.name} ({len(plan)} tensors) to {target}")
    with publish(target) as staging:
        write_tokenizer(gguf.metadata, staging)
        _write_json(staging / "config.json", config)
        _write_json(staging / "generation_config.json", generation_config(gguf))
        tensors = [
            TensorSource(item.name, item.source.shape, lambda item=item: item.source.float32_chunks(item.row_order))
            for item in plan
        ]
        write_safetensors(staging / WEIGHTS_FILE, tensors, dtype)
    return target


def convert_directory(source: Path, target: Path, dtype: str | None, progress: Progress | None = None) -> Path:
    """Writes the known files of a Hugging Face directory, and its weights as one safetensors file of one dtype.

    Raises ModelError when shards or tensors are missing, of a dtype that is not floating point, or not finite.
    """
    tensors, stored_dtype = directory_tensors(source)
    dtype = dtype or stored_dtype
    if progress:
        progress(f"writing {len(tensors)} tensors as {dtype} to {target}")
    with publish(target) as staging:
        for name in CARRIED_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, staging / name)
        config = json.loads((source / "config.json").read_text())
        config.pop("dtype", None)  # the newer name of the same field
        _write_json(staging / "config.json", config | {"torch_dtype": dtype})
        write_safetensors(staging / WEIGHTS_FILE, tensors, dtype)
    return target


def directory_tensors(source: Path) -> tuple[list[TensorSource], str]:
    """Every tensor in the safetensors files of `source`, read lazily, and the dtype that most of them have."""
    index_path = source / INDEX_FILE
    if index_path.is_file():
        wanted: Mapping[str, str] = json.loads(index_path.read_text())["weight_map"]
        files = sorted(set(wanted.values()))
    else:
        wanted, files = {}, sorted(path.name for path in source.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{source} has no *.safetensors; only safetensors weights can be converted")
    absent = [name for name in files if not (source / name).is_file()]
    if absent:
        raise ModelError(f"{source} lacks the weight files {', '.join(absent)}; download it again")
    by_name = {code: name for name, code in SAFETENSORS_NAMES.items()}
    tensors: dict[str, TensorSource] = {}
    counts: dict[str, int] = {}
    strange: list[str] = []
    for file_name in files:
        with _open_safetensors(source / file_name) as file:
            for name in file.keys():
                piece = file.get_slice(name)
                shape, code = tuple(piece.get_shape()), piece.get_dtype()
                if code not in by_name:
                    strange.append(f"{name} is {code}")
                    continue
                counts[by_name[code]] = counts.get(by_name[code], 0) + int(np.prod(shape))
                tensors[name] = TensorSource(name, shape, lambda p=source / file_name, n=name: _file_chunks(p, n))
    if strange:
        raise ModelError(f"{source} holds weights that are not F32, F16 or BF16: {', '.join(strange)}")
    missing = sorted(wanted.keys() - tensors.keys())
    if missing:
        raise ModelError(f"the index of {source} names tensors that its files lack: {', '.join(missing)}")
    return [tensors[name] for name in sorted(tensors)], max(counts, key=lambda name: counts[name])


def write_safetensors(path: Path, tensors: list[TensorSource], dtype: str) -> None:
    """Writes `tensors` in the given order as one file, holding one piece of one tensor in memory at a time.

    The layout is the format's: the length of the header (8 bytes, little-endian), the header as JSON, then the values.
    Raises ModelError for values that are not finite in `dtype`.
    """
    item_bytes = DTYPES[dtype].itemsize
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + item_bytes * int(np.prod(tensor.shape, dtype=np.int64))
        header[tensor.name] = {
            "dtype": SAFETENSORS_NAMES[dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # so that the values are aligned
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for tensor in tensors:
            for chunk in tensor.chunks():
                file.write(_cast(chunk, dtype, tensor.name).tobytes())
        file.flush()
        os.fsync(file.fileno())
    written = path.stat().st_size
    assert written == 8 + len(encoded) + end, f"{path} has {written} bytes, expected {8 + len(encoded) + end}"


@contextmanager
def publish(target: Path) -> Iterator[Path]:
    """A new directory to fill, renamed to `target` on success and removed on failure.

    When another process has published `target` first, that one stays and this one's work is dropped.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = target.parent / f".{target.name}.{uuid.uuid4().hex}"
    staging.mkdir()
    try:
        yield staging
        try:
            staging.rename(target)  # replaces an empty directory, refuses a full one
        except OSError:
            if not (target / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _check_dtype(dtype: str) -> None:
    if dtype not in DTYPES:
        raise ConfigError(f"cannot write weights as {dtype!r}; known dtypes: {', '.join(sorted(DTYPES))}")


def _check_target(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"the target {target} exists and is not an empty directory; name another or remove it")


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


@contextmanager
def _open_safetensors(path: Path) -> Iterator:
    try:
        with safe_open(path, framework="numpy") as file:
            yield file
    except SafetensorError as error:
        raise ModelError(f"{path} is damaged or cut short: {error}; download or copy it again") from error


def _file_chunks(path: Path, name: str) -> Iterator[np.ndarray]:
    with _open_safetensors(path) as file:
        piece = file.get_slice(name)
        shape = piece.get_shape()
        if not shape:
            yield file.get_tensor(name)
            return
        step = max(1, CHUNK_BYTES // max(1, 4 * int(np.prod(shape[1:], dtype=np.int64))))
        for start in range(0, shape[0], step):
            yield piece[start : start + step]


def _cast(values: np.ndarray, dtype: str, name: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        cast = values.astype(DTYPES[dtype], copy=False)
    if not np.isfinite(cast.astype(np.float32, copy=False)).all():
        if np.isfinite(values.astype(np.float32, copy=False)).all():
            raise ModelError(f"{name} has values beyond the range of {dtype}; convert to bfloat16 or float32")
        raise ModelError(f"{name} has values that are not finite (NaN or infinity); the source is damaged")
    return np.ascontiguousarray(cast)
