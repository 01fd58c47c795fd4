"""Puts numbers into an abstract model, one parameter at a time, each at its place on the mesh."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jpaged.models.registry import Model, build_model
from jpaged.models.spec import ModelSpec
from jpaged.parallel.sharding import parameter_paths, parameter_sharding, weight_shardings


def fill_model(
    spec: ModelSpec,
    dtype: jax.typing.DTypeLike,
    mesh: Mesh,
    produce: Callable[[str, tuple[int, ...], np.dtype], np.ndarray],
) -> Model:
    """A model whose parameters are `produce(path, shape, dtype)`, placed on the mesh.

    Only one parameter at a time is held twice (on the host and on the device), so that a model that fits the device
    never needs twice its size.
    """
    model = build_model(spec, dtype)
    for path, parameter in parameter_paths(model).items():
        abstract = parameter.get_value()
        host = produce(path, abstract.shape, abstract.dtype)
        assert host.shape == abstract.shape and host.dtype == abstract.dtype, (path, host.shape, host.dtype)
        set_parameter(model, path, jax.device_put(host, parameter_sharding(path, host.shape, mesh)))
    return model


def abstract_model(model: Model, mesh: Mesh) -> Model:
    """A model of the same shapes, which has shapes in place of weights, each with its place on the mesh."""
    graph, weights = nnx.split(model)
    shardings = weight_shardings(weights, mesh)
    abstract = jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), weights, shardings)
    return nnx.merge(graph, abstract)


def set_parameter(model: nnx.Module, path: str, value: jax.Array) -> None:
    """Replaces the value of the parameter at a dotted path."""
    owner = model
    *modules, name = path.split(".")
    for module in modules:
        owner = getattr(owner, module)
    getattr(owner, name).set_value(value)


def weight_bytes(spec: ModelSpec, dtype: jax.typing.DTypeLike) -> int:
    """Bytes of all parameters together, from the shapes alone."""
    parameters = parameter_paths(build_model(spec, dtype)).values()
    return sum(math.prod(p.get_value().shape) * jnp.dtype(p.get_value().dtype).itemsize for p in parameters)
