"""Where each parameter lies on the mesh, after Megatron-LM (Shoeybi et al. 2019): the first projection of a block is
split by its outputs, the second by its inputs, so that a block needs one all-reduce."""

from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpaged.parallel.mesh import TENSOR_AXIS

# Parameter -> its partitioned axis, counted from the end (so that stacking layers in front changes nothing).
# Parameters that are not listed are replicated.
_SPLIT_AXIS = {
    "attention.qkv.weight": -3,  # [H, (G + 2) * D, E]: KV heads
    "attention.qkv.bias": -2,
    "attention.output.weight": -1,  # [E, heads * D]: the heads it sums over
    "mlp.gate_up.weight": -3,  # [B, 2 * F / B, E]: blocks of intermediate features
    "mlp.gate_up.bias": -2,
    "mlp.up.weight": -2,
    "mlp.up.bias": -1,
    "mlp.down.weight": -1,  # [E, F]
    "embedding.weight": -2,  # [V, E]: vocabulary
    "head.weight": -2,
}
# Split only where the size allows it: a vocabulary is often not a multiple of the number of devices.
_SPLIT_IF_EVEN = ("embedding.weight", "head.weight")


def partition_spec(path: str, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """The placement of the parameter at a dotted path, for example "layers.attention.qkv.weight"."""
    suffix = path.removeprefix("layers.")
    size = mesh.shape[TENSOR_AXIS]
    axis = _SPLIT_AXIS.get(suffix)
    if axis is None or size == 1 or (suffix in _SPLIT_IF_EVEN and shape[axis] % size):
        return PartitionSpec()
    axes: list[str | None] = [None] * len(shape)
    axes[axis] = TENSOR_AXIS
    return PartitionSpec(*axes)


def parameter_sharding(path: str, shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """partition_spec as a sharding on the mesh."""
    return NamedSharding(mesh, partition_spec(path, shape, mesh))


def parameter_paths(model: nnx.Module) -> dict[str, Any]:
    """Dotted path -> nnx.Param, for every parameter of a model, in a fixed order."""
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, path)): parameter for path, parameter in flat}


def weight_shardings(weights: nnx.State, mesh: Mesh) -> Any:
    """The shardings of a model's weights, as a pytree of the same structure: for jit's in_shardings or device_put."""
    return jax.tree.map_with_path(lambda path, leaf: parameter_sharding(_dotted(path), leaf.shape, mesh), weights)


def _dotted(path: tuple[Any, ...]) -> str:
    """jax's key path of an nnx.State leaf, without the step inside the variable itself."""
    names = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
    return ".".join(name for name in names if name and name != "value")
