"""Weights as an Orbax checkpoint: already fused and stacked, so that each device reads only its own share.

A directory has `orbax/` beside config.json and the tokenizer's files. The checkpoint is a flat mapping from parameter
path ("layers.attention.qkv.weight") to array. orbax is imported only when used: importing it is slow.
"""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jpaged.errors import ModelError
from jpaged.models.registry import Model, build_model
from jpaged.models.spec import ModelSpec, load_spec
from jpaged.parallel.mesh import make_mesh
from jpaged.parallel.sharding import parameter_paths, parameter_sharding
from jpaged.weights.names import report_mismatch
from jpaged.weights.placement import set_parameter

ORBAX_DIR = "orbax"
# Raised whenever the fused layouts change, so that an old checkpoint is refused instead of misread.
LAYOUT_VERSION = 1
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_INDEX_SUFFIX = ".index.json"


def save_orbax(model_dir: str | Path, target_dir: str | Path, dtype: jax.typing.DTypeLike | None = None) -> None:
    """Writes a copy of a checkpoint directory whose weights are an Orbax checkpoint.

    `dtype` None keeps the one that config.json names. All other files of the directory are copied as they are.

    Raises:
        ModelError: the source cannot be loaded, or the target already holds an Orbax checkpoint.
    """
    from orbax.checkpoint import v1 as ocp

    from jpaged.weights.load import load_weights

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
        is_weights = path.name.endswith((*_WEIGHT_SUFFIXES, _INDEX_SUFFIX))
        if path.is_file() and not is_weights and not (target_dir / path.name).exists():
            shutil.copyfile(path, target_dir / path.name)
    arrays = {path: parameter.get_value() for path, parameter in parameter_paths(model).items()}
    metadata = {"layout_version": LAYOUT_VERSION, "architecture": spec.architecture}
    ocp.save(str((target_dir / ORBAX_DIR).absolute()), arrays, custom_metadata=metadata)


def load_orbax(model_dir: Path, spec: ModelSpec, dtype: jax.typing.DTypeLike, mesh: Mesh) -> Model:
    """The model with the weights of `model_dir`/orbax, converted to `dtype` and placed on the mesh.

    Raises:
        ModelError: not a complete checkpoint, another layout, or parameters that do not fit the spec.
    """
    from orbax.checkpoint import v1 as ocp

    source = str((model_dir / ORBAX_DIR).absolute())
    model = build_model(spec, dtype)
    expected = {path: parameter.get_value() for path, parameter in parameter_paths(model).items()}
    try:
        description = ocp.metadata(source)
        found = {str(path): tuple(array.shape) for path, array in description.metadata.items()}
        custom = description.custom_metadata
        version = custom.get("layout_version") if isinstance(custom, dict) else None
    except Exception as error:  # orbax and tensorstore raise many unrelated types
        raise ModelError(f"{source} is not a complete Orbax checkpoint ({error}); convert the model again") from error
    if version != LAYOUT_VERSION:
        raise ModelError(
            f"{source} has layout version {version}, this jpaged reads {LAYOUT_VERSION}; convert the model again"
        )
    report_mismatch(
        source,
        spec,
        missing=[path for path in expected if path not in found],
        extra=[path for path in found if path not in expected],
        misshapen=[
            f"{path} is {list(found[path])}, expected {list(array.shape)}"
            for path, array in expected.items()
            if path in found and found[path] != array.shape
        ],
    )
    targets = {
        path: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=parameter_sharding(path, a.shape, mesh))
        for path, a in expected.items()
    }
    try:
        arrays = ocp.load(source, targets)
    except Exception as error:
        raise ModelError(f"{source} cannot be read ({error}); convert the model again") from error
    for path, array in arrays.items():
        if array.dtype == jnp.float16 and not bool(jnp.isfinite(array).all()):
            raise ModelError(f"{path} has values that float16 cannot hold; use bfloat16 or float32")
        set_parameter(model, path, array)
    return model
