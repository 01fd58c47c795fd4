"""The mesh, and what it refuses."""

import jax
import pytest
from jax.sharding import AxisType

from jpaged.errors import ConfigError
from jpaged.models.spec import spec_from_config
from jpaged.parallel.mesh import TENSOR_AXIS, check_tensor_parallel, make_mesh
from tests.fakes.tiny_models import TINY_LLAMA


def test_one_device_is_a_mesh_of_one():
    mesh = make_mesh(1)
    assert dict(mesh.shape) == {TENSOR_AXIS: 1}
    assert mesh.axis_types == (AxisType.Auto,)


def test_the_first_devices_are_taken():
    mesh = make_mesh(2, jax.devices()[4:])
    assert list(mesh.devices.flat) == jax.devices()[4:6]


def test_too_few_devices():
    with pytest.raises(ConfigError, match="is 9, but there are 8 cpu devices; lower it to at most 8"):
        make_mesh(9)
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        make_mesh(0)


def test_a_model_that_does_not_split_evenly():
    spec = spec_from_config(TINY_LLAMA | {"intermediate_size": 90})  # 8 heads, 4 KV heads
    check_tensor_parallel(spec, 2)
    with pytest.raises(ConfigError, match=r"8 does not divide num_kv_heads 4 and intermediate_size 90.* 1, 2$"):
        make_mesh(8, spec=spec)
    with pytest.raises(ConfigError, match=r"3 does not divide num_heads 8 and num_kv_heads 4; .* 1, 2$"):
        make_mesh(3, spec=spec)
