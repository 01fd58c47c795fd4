"""Loads a checkpoint directory's weights onto the mesh, whatever the format they are stored in."""

from collections import defaultdict
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from jpaged.errors import ModelError
from jpaged.models.registry import Model
from jpaged.models.spec import ModelSpec
from jpaged.weights.names import checkpoint_slots, match_names, slot_view
from jpaged.weights.orbax_reader import ORBAX_DIR, load_orbax
from jpaged.weights.placement import fill_model
from jpaged.weights.safetensors_reader import INDEX_FILE, SINGLE_FILE, SafetensorsCheckpoint


def load_weights(model_dir: str | Path, spec: ModelSpec, dtype: jax.typing.DTypeLike, mesh: Mesh) -> Model:
    """The model with the weights of `model_dir`: an Orbax checkpoint in `orbax/`, or safetensors.

    Raises:
        ModelError: no weights in a format that jpaged reads, damaged files, tensors that do not fit the spec, or
            numbers that float16 cannot hold.
    """
    model_dir = Path(model_dir)
    if (model_dir / ORBAX_DIR).is_dir():
        return load_orbax(model_dir, spec, dtype, mesh)
    if (model_dir / SINGLE_FILE).exists() or (model_dir / INDEX_FILE).exists():
        return _load_safetensors(model_dir, spec, dtype, mesh)
    raise ModelError(_no_weights(model_dir))


def _load_safetensors(model_dir: Path, spec: ModelSpec, dtype: jax.typing.DTypeLike, mesh: Mesh) -> Model:
    slots = checkpoint_slots(spec)
    with SafetensorsCheckpoint(model_dir) as checkpoint:
        names = match_names(checkpoint.shapes, slots, spec, str(model_dir))
        by_path = defaultdict(list)
        for slot_name, slot in slots.items():
            by_path[slot.path].append((names[slot_name], slot))

        def produce(path: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
            parameter = np.empty(shape, dtype)
            for name, slot in by_path[path]:
                view = slot_view(parameter, slot, spec)
                with np.errstate(over="ignore"):
                    view[...] = checkpoint.read(name).reshape(view.shape)
                if dtype == np.float16 and not np.isfinite(view).all():
                    raise ModelError(f"{name} has values that float16 cannot hold; use bfloat16 or float32")
            return parameter

        return fill_model(spec, dtype, mesh, produce)


def _no_weights(model_dir: Path) -> str:
    if not model_dir.is_dir():
        return f"{model_dir} is not a directory"
    torch_files = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in model_dir.glob(pattern))
    if torch_files:
        return (
            f"{model_dir} has its weights only as PyTorch files ({', '.join(torch_files)}), which jpaged does not "
            "read; save them as safetensors first: AutoModelForCausalLM.from_pretrained(directory)."
            "save_pretrained(target, safe_serialization=True)"
        )
    return (
        f"{model_dir} holds no weights: expected {SINGLE_FILE}, {INDEX_FILE} with the files it names, or an Orbax "
        f"checkpoint in {ORBAX_DIR}/"
    )
