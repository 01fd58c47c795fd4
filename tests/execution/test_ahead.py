"""A runner that compiles and never runs: on the CPU's devices here, on a TPU topology's with libtpu."""

import jax
import jax.numpy as jnp
import pytest

from jpaged.execution.ahead import AheadRunner
from jpaged.execution.runner import RunnerConfig
from jpaged.models.spec import spec_from_config
from jpaged.parallel.mesh import make_mesh
from jpaged.weights.placement import weight_bytes
from pallas_kernels.paged_attention.api import PageSpec
from pallas_kernels.paged_attention.xla import XlaPagedAttention
from tests.fakes.tiny_models import TINY_LLAMA


@pytest.mark.parametrize("num_devices", [1, 2])
def test_it_says_what_each_bucket_takes_on_a_device(num_devices: int) -> None:
    spec = spec_from_config(TINY_LLAMA)
    page_spec = PageSpec(spec.num_layers, 40, 16, spec.num_kv_heads, spec.head_dim, "float32")
    mesh = make_mesh(num_devices, spec=spec)
    runner = AheadRunner(spec, jnp.float32, XlaPagedAttention(), mesh, RunnerConfig(page_spec, 64, 8, 16))
    buckets = list(runner.compile_buckets())
    assert [(b.num_tokens, b.num_rows) for b in buckets] == [(8, 8), (16, 8)]
    for bucket in buckets:
        assert bucket.pages_are_aliased
        assert bucket.page_bytes == page_spec.page_bytes * 41 // num_devices
        assert weight_bytes(spec, jnp.float32) / num_devices <= bucket.weight_bytes <= weight_bytes(spec, jnp.float32)
        assert bucket.compile_seconds > 0
    assert not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(runner._pages))
