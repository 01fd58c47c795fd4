"""Reads weights that are an Orbax checkpoint: already fused and stacked, so each device reads only its own share.

A directory has `orbax/` beside config.json and the tokenizer's files. The checkpoint is a flat mapping from parameter
path ("layers.attention.qkv.weight") to array. orbax is imported only when used: importing it is slow.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jpaged.errors import ModelError
from jpaged.models.registry import Model, build_model
from jpaged.models.spec import ModelSpec
from jpaged.parallel.sharding import parameter_paths, parameter_sharding
from jpaged.weights.names import report_mismatch
from jpaged.weights.placement import set_parameter

ORBAX_DIR = "orbax"
# Raised whenever the fused layouts change, so that an old checkpoint is refused instead of misread.
LAYOUT_VERSION = 1


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
