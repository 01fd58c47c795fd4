"""The device mesh. One device is a mesh of one; tensor parallelism splits KV heads, features and the vocabulary."""

from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh

from jpaged.errors import ConfigError
from jpaged.models.spec import ModelSpec

TENSOR_AXIS = "tensor"


def make_mesh(
    tensor_parallel_size: int, devices: Sequence[jax.Device] | None = None, spec: ModelSpec | None = None
) -> Mesh:
    """A mesh of the first `tensor_parallel_size` devices, axis "tensor". With a spec, checks that it can be split.

    Raises:
        ConfigError: fewer devices than asked for, or a model that does not split evenly.
    """
    devices = jax.devices() if devices is None else list(devices)
    if tensor_parallel_size < 1:
        raise ConfigError(f"tensor_parallel_size must be at least 1, got {tensor_parallel_size}")
    if tensor_parallel_size > len(devices):
        raise ConfigError(
            f"tensor_parallel_size is {tensor_parallel_size}, but there are {len(devices)} "
            f"{devices[0].platform} devices; lower it to at most {len(devices)}"
        )
    if spec is not None:
        check_tensor_parallel(spec, tensor_parallel_size)
    # Auto: the step is written for one device and XLA's partitioner splits it by the placement of its weights.
    return jax.make_mesh(
        (tensor_parallel_size,),
        (TENSOR_AXIS,),
        axis_types=(AxisType.Auto,),
        devices=devices[:tensor_parallel_size],
    )


def check_tensor_parallel(spec: ModelSpec, tensor_parallel_size: int) -> None:
    """Raises ConfigError, with the sizes that would work, if the model does not split evenly."""
    sizes = {
        "num_heads": spec.num_heads,
        "num_kv_heads": spec.num_kv_heads,
        "intermediate_size": spec.intermediate_size,
    }
    uneven = [f"{name} {size}" for name, size in sizes.items() if size % tensor_parallel_size]
    if uneven:
        possible = [n for n in range(1, spec.num_kv_heads + 1) if not any(size % n for size in sizes.values())]
        raise ConfigError(
            f"tensor_parallel_size {tensor_parallel_size} does not divide {' and '.join(uneven)}; "
            f"this model can use {', '.join(map(str, possible))}"
        )
