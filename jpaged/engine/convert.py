"""Writes model directories: from GGUF files or Hugging Face directories, to safetensors or Orbax.

Every directory appears whole or not at all: it is written beside its place and renamed into it.
"""

import json
import math
import shutil
from pathlib import Path

from jpaged.engine.demo_model import Progress
from jpaged.engine.gguf_tokenizer import convert_gguf, publish
from jpaged.engine.model_source import resolve_model
from jpaged.errors import ConfigError, ModelError
from jpaged.weights.gguf_names import DTYPES, TensorSource, write_json, write_safetensors
from jpaged.weights.safetensors_reader import INDEX_FILE, SINGLE_FILE, SafetensorsCheckpoint

# What a model directory may hold besides its weights; anything else is left behind.
CARRIED_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


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
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"cannot write weights as {dtype!r}; known dtypes: {', '.join(sorted(DTYPES))}")
    _check_target(target)
    is_gguf = Path(source).is_file()
    if to == "safetensors" and is_gguf:
        return convert_gguf(Path(source), target, dtype or "bfloat16", progress)
    if to == "safetensors":
        return convert_directory(resolve_model(source, progress), target, dtype, progress)

    from jpaged.weights.orbax import save_orbax  # orbax takes seconds to import

    with publish(target) as staging:
        scratch = staging / "source"
        if is_gguf:  # not through the cache, which holds bfloat16 only
            model_dir = convert_gguf(Path(source), scratch, dtype or "bfloat16", progress)
        else:
            model_dir = resolve_model(source, progress)
        save_orbax(model_dir, staging, dtype)
        shutil.rmtree(scratch, ignore_errors=True)
        if dtype is not None:
            write_json(staging / "config.json", _config_with_dtype(staging, dtype))
    return target


def convert_directory(source: Path, target: Path, dtype: str | None, progress: Progress | None = None) -> Path:
    """Writes the known files of a Hugging Face directory, and its weights as one safetensors file of one dtype.

    Raises ModelError when files or tensors are missing, damaged, not floating point, or not finite.
    """
    if not any((source / name).is_file() for name in (SINGLE_FILE, INDEX_FILE)):
        raise ModelError(f"{source} has neither {SINGLE_FILE} nor {INDEX_FILE}; only safetensors can be copied")
    with SafetensorsCheckpoint(source) as checkpoint, publish(target) as staging:
        dtype = dtype or _stored_dtype(checkpoint)
        if progress:
            progress(f"writing {len(checkpoint.shapes)} tensors as {dtype} to {target}")
        for name in CARRIED_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, staging / name)
        write_json(staging / "config.json", _config_with_dtype(source, dtype))
        tensors = [
            TensorSource(name, shape, lambda name=name: [checkpoint.read(name)])
            for name, shape in sorted(checkpoint.shapes.items())
        ]
        write_safetensors(staging / SINGLE_FILE, tensors, dtype)
    return target


def _stored_dtype(checkpoint: SafetensorsCheckpoint) -> str:
    """That of the largest tensor: norms are sometimes kept wider than the weights."""
    largest = max(checkpoint.shapes, key=lambda name: math.prod(checkpoint.shapes[name]))
    stored = checkpoint.read(largest).dtype
    return next(name for name, dtype in DTYPES.items() if dtype == stored)


def _config_with_dtype(model_dir: Path, dtype: str) -> dict[str, object]:
    config = json.loads((model_dir / "config.json").read_text())
    config.pop("dtype", None)  # the newer name of the same field
    return config | {"torch_dtype": dtype}


def _check_target(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"the target {target} exists and is not an empty directory; name another or remove it")
