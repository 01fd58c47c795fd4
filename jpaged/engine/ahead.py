"""Compiles a model's steps for TPUs that are not there: the compiler comes with libtpu and needs no TPU."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from jpaged.config import EngineConfig
from jpaged.engine.model_source import resolve_model
from jpaged.engine.startup import Sizes, choose_sizes
from jpaged.errors import ConfigError
from jpaged.execution.ahead import AheadRunner, CompiledBucket
from jpaged.execution.kv_cache import DeviceMemory
from jpaged.execution.runner import RunnerConfig
from jpaged.models.spec import ModelSpec, load_spec
from jpaged.parallel.mesh import make_mesh
from pallas_kernels.paged_attention.tpu_blocks import device_of

# What libtpu asks a machine with TPUs, answered for one without.
_NO_TPU_HERE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # there is no TPU that two processes could meet on
}


@dataclass(frozen=True)
class AheadCompilation:
    """What is about to be compiled; `buckets` compiles as it is iterated over."""

    device_kind: str
    num_devices: int  # of the topology; tensor_parallel_size of them are used
    sizes: Sizes
    buckets: Iterator[CompiledBucket]

    @property
    def kv_tokens(self) -> int:
        """Tokens whose K and V fit into the pool."""
        return self.sizes.page_spec.num_pages * self.sizes.page_spec.page_size_tokens


def find_topology(name: str) -> list[jax.Device]:
    """The devices of a topology such as "v6e:2x2".

    Raises ConfigError if libtpu is not installed or does not know the topology.
    """
    if find_spec("libtpu") is None:
        raise ConfigError("compiling for a TPU needs its compiler, which libtpu brings; install jpaged[tpu]")
    for variable, value in _NO_TPU_HERE.items():
        os.environ.setdefault(variable, value)
    try:
        return list(topologies.get_topology_desc(topology_name=name, platform="tpu").devices)
    except Exception as error:  # whatever libtpu says
        raise ConfigError(f"libtpu does not know the topology {name!r} ({error}); for example v6e:2x2") from error


def compile_ahead(config: EngineConfig, topology: str) -> AheadCompilation:
    """Prepare to compile every bucket of a model for a TPU topology. The model needs a config.json and no weights.

    Raises:
        ModelError: the model cannot be found or read.
        ConfigError: the configuration does not fit the model or the TPU.
    """
    is_plain_config = (Path(config.model) / "config.json").is_file()
    spec = load_spec(config.model if is_plain_config else resolve_model(config.model))
    return compile_spec_ahead(config, spec, topology)


def compile_spec_ahead(config: EngineConfig, spec: ModelSpec, topology: str) -> AheadCompilation:
    """As `compile_ahead`, for a network that is described already."""
    if config.profile_directory is not None:
        raise ConfigError("there is nothing to profile where nothing runs; leave profile_directory out")
    devices = find_topology(topology)
    mesh = make_mesh(config.tensor_parallel_size, devices, spec)
    kind = devices[0].device_kind
    hbm_bytes = device_of(kind).hbm_bytes
    sizes = choose_sizes(config, spec, mesh, DeviceMemory(hbm_bytes, hbm_bytes))
    runner_config = RunnerConfig(
        sizes.page_spec, sizes.max_model_len, config.max_num_seqs, config.max_num_batched_tokens
    )
    runner = AheadRunner(spec, jnp.dtype(sizes.dtype), sizes.attention, mesh, runner_config)
    return AheadCompilation(kind, len(devices), sizes, runner.compile_buckets())
