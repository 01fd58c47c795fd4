"""Writes weights as an Orbax checkpoint, in the layout that jpaged.weights.orbax_reader describes."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp

from jpaged.errors import ModelError
from jpaged.models.spec import load_spec
from jpaged.parallel.mesh import make_mesh
from jpaged.parallel.sharding import parameter_paths
from jpaged.weights.load import load_weights
from jpaged.weights.orbax_reader import LAYOUT_VERSION, ORBAX_DIR

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


def save_orbax(model_dir: str | Path, target_dir: str | Path, dtype: jax.typing.DTypeLike | None = None) -> None:
    """Writes a copy of a checkpoint directory whose weights are an Orbax checkpoint.

    `dtype` None keeps the one that config.json names. All other files of the directory are copied as they are.

    Raises:
        ModelError: the source cannot be loaded, or the target already holds an Orbax checkpoint.
    """
    from orbax.checkpoint import v1 as ocp

    model_dir, target_dir = Path(model_dir), Path(target_dir)
    if (target_dir / ORBAX_DIR).exists():
        raise ModelError(f"{target_dir / ORBAX_DIR} already exists; remove it or choose another target")
    spec = load_spec(model_dir)
    model = load_weights(model_dir, spec, dtype or spec.checkpoint_dtype, make_mesh(1))
    target_dir.mkdir(parents=True, exist_ok=True)
    if dtype is not None:
        config = json.loads((model_dir / "config.json").read_text())
        config.pop("torch_dtype", None)  # the older spelling
        config["dtype"] = jnp.dtype(dtype).name
        (target_dir / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for path in sorted(model_dir.iterdir()):
        is_weights = path.name.endswith(_WEIGHT_SUFFIXES)
        if path.is_file() and not is_weights and not (target_dir / path.name).exists():
            shutil.copyfile(path, target_dir / path.name)
    arrays = {path: parameter.get_value() for path, parameter in parameter_paths(model).items()}
    metadata = {"layout_version": LAYOUT_VERSION, "architecture": spec.architecture}
    ocp.save(str((target_dir / ORBAX_DIR).absolute()), arrays, custom_metadata=metadata)
