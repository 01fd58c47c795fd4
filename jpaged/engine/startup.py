"""Turns a configuration into the parts of an engine, checking what can be checked before it costs anything."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jpaged.config import EngineConfig
from jpaged.engine.dtype_probe import probe_dtype
from jpaged.engine.model_source import resolve_model
from jpaged.engine.tokenizer import Tokenizer, load_tokenizer
from jpaged.errors import ConfigError, ModelError
from jpaged.execution.allocator import keep_large_blocks
from jpaged.execution.buckets import make_buckets
from jpaged.execution.compilation import counter, enable_compilation_cache
from jpaged.execution.kv_cache import (
    ACCELERATOR_FRACTION,
    CPU_FRACTION,
    GIB,
    DeviceMemory,
    MemoryNeeds,
    device_memory,
    host_memory,
    size_pool,
)
from jpaged.execution.runner import ReportProgress, Runner, RunnerConfig
from jpaged.layers.linear import use_matmul
from jpaged.models.registry import build_model
from jpaged.models.spec import ModelSpec, load_spec
from jpaged.parallel.mesh import make_mesh
from jpaged.scheduling.preemption import CostModel
from jpaged.scheduling.scheduler import Scheduler, SchedulerConfig
from jpaged.weights.load import load_weights
from jpaged.weights.placement import abstract_model, weight_bytes
from pallas_kernels.matmul import cpu as cpu_matmul
from pallas_kernels.matmul.cpu import CpuMatmul
from pallas_kernels.native.build import BuildError, build, choose_instruction_set
from pallas_kernels.paged_attention import cpu as cpu_attention
from pallas_kernels.paged_attention.api import PagedAttention, PageSpec
from pallas_kernels.paged_attention.dispatch import choose
from pallas_kernels.sampling import cpu as cpu_sampling
from pallas_kernels.sampling.cpu import CpuSampling

logger = logging.getLogger(__name__)
DEFAULT_PAGE_SIZE_TOKENS = 16
TPU_PAGE_SIZE_TOKENS = 128
NATIVE_SOURCES = (cpu_matmul.SOURCE, cpu_attention.SOURCE, cpu_sampling.SOURCE)


@dataclass(frozen=True)
class EngineParts:
    """A ready engine's parts. `tokenizer` is `None` for a model directory without one; `phase_seconds` says what its
    start went to."""

    config: EngineConfig
    spec: ModelSpec
    max_model_len: int
    dtype: str
    tokenizer: Tokenizer | None
    runner: Runner
    scheduler: Scheduler
    phase_seconds: dict[str, float]

    @property
    def ready_seconds(self) -> float:
        """From the start of the engine until it was ready."""
        return sum(self.phase_seconds.values())

    @property
    def page_size_tokens(self) -> int:
        return self.scheduler.config.page_size_tokens


def start_up(config: EngineConfig, report: ReportProgress | None = None) -> EngineParts:
    """Load the model, size the pool, compile everything.

    Raises:
        ModelError: the model cannot be found, read or mapped.
        ConfigError: the configuration does not fit the model or the machine; raised before weights are loaded.
    """
    watch = _Stopwatch()
    enable_compilation_cache()
    model_dir = resolve_model(config.model, report and (lambda what: report(what, 0, 0)))
    spec = load_spec(model_dir)
    mesh = make_mesh(config.tensor_parallel_size, spec=spec)
    if mesh.devices.flat[0].platform == "cpu":
        keep_large_blocks()
    watch.lap("find the model")
    _build_native_kernels(mesh)
    matmul = _native("matmul", CpuMatmul.make, mesh)
    sizes = choose_sizes(config, spec, mesh, device_memory(mesh.devices.flat[0]), matmul)
    watch.lap("choose kernels and sizes")
    max_model_len, dtype, page_spec = sizes.max_model_len, sizes.dtype, sizes.page_spec
    num_host_pages = _size_host_tier(config, page_spec)
    network = build_model(spec, dtype)
    if matmul is not None:
        use_matmul(network, matmul)
    # Reading programs back and filling the pool goes on in threads while weights are loaded.
    runner = Runner(
        abstract_model(network, mesh),
        sizes.attention,
        mesh,
        RunnerConfig(
            page_spec,
            max_model_len,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            num_host_pages,
            one_row_alone=matmul is not None,  # XLA pads one row to several
        ),
        _native("sampling", CpuSampling.make, mesh),
    )
    watch.lap("begin to fill the pool and to read programs")
    tokenizer = _load_tokenizer(model_dir)
    watch.lap("load the tokenizer")
    model = load_weights(model_dir, spec, jnp.dtype(dtype), mesh)
    if matmul is not None:
        with counter.starting():
            use_matmul(model, matmul)
    runner.replace_weights(model)
    watch.lap("load weights")
    runner.make_ready(report)
    watch.lap("compile, and wait for the pool")
    rates = runner.warm_up()
    watch.lap("run each program once")
    costs = CostModel(rates.swap_seconds_per_page, rates.compute_seconds_per_token)
    scheduler = Scheduler(_scheduler_config(config, page_spec, num_host_pages), costs)
    return EngineParts(config, spec, max_model_len, dtype, tokenizer, runner, scheduler, watch.seconds)


def _scheduler_config(config: EngineConfig, page_spec: PageSpec, num_host_pages: int) -> SchedulerConfig:
    pinned_fraction = config.max_pinned_fraction if config.enable_prefix_caching else 0.0
    return SchedulerConfig(
        num_pages=page_spec.num_pages,
        page_size_tokens=page_spec.page_size_tokens,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        policy=config.policy,
        num_host_pages=num_host_pages,
        max_pinned_pages=int(page_spec.num_pages * pinned_fraction),
        enable_prefix_caching=config.enable_prefix_caching,
        preemption=config.preemption,
    )


class _Stopwatch:
    """Seconds by phase, each from the end of the one before."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, phase: str) -> None:
        now = time.monotonic()
        self.seconds[phase] = now - self._last
        self._last = now


def reload_weights(parts: EngineParts, model: str | None = None) -> None:
    """Replace a ready engine's weights by those of `model` (`None`: the same place again); nothing is compiled.

    The new weights are loaded beside the old ones, so there must be room for both.

    Raises:
        ModelError: they cannot be found or read, or belong to a model of other shapes; the old ones stay then.
    """
    model_dir = resolve_model(model or parts.config.model, None)
    spec = load_spec(model_dir)
    if spec != parts.spec:
        names = [field.name for field in fields(spec) if getattr(spec, field.name) != getattr(parts.spec, field.name)]
        raise ModelError(
            f"{model_dir} differs from the running model in {', '.join(names)}; start an engine of its own for it"
        )
    mesh = make_mesh(parts.config.tensor_parallel_size, spec=spec)
    loaded = load_weights(model_dir, spec, jnp.dtype(parts.dtype), mesh)
    if (matmul := _native("matmul", CpuMatmul.make, mesh)) is not None:
        use_matmul(loaded, matmul)
    parts.runner.replace_weights(loaded)


@dataclass(frozen=True)
class Sizes:
    """What follows from a configuration, a model and a mesh, before any weight is loaded."""

    max_model_len: int
    dtype: str
    page_spec: PageSpec
    attention: PagedAttention


def choose_sizes(
    config: EngineConfig, spec: ModelSpec, mesh: Mesh, memory: DeviceMemory, matmul: CpuMatmul | None = None
) -> Sizes:
    """Choose the attention and size the pool for devices of this much memory; raises ConfigError if nothing fits."""
    max_model_len = _choose_max_model_len(config, spec)
    device = mesh.devices.flat[0]
    dtype = choose_dtype(config.dtype, device.platform, matmul)
    page_spec = PageSpec(
        num_layers=spec.num_layers,
        num_pages=1,
        page_size_tokens=config.page_size
        or (TPU_PAGE_SIZE_TOKENS if device.platform == "tpu" else DEFAULT_PAGE_SIZE_TOKENS),
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=jnp.dtype(dtype),
    )
    try:
        attention, reason = choose(
            device.platform,
            page_spec,
            num_q_heads=spec.num_heads,
            q_dtype=page_spec.dtype,
            device_kind=device.device_kind,
            num_devices=config.tensor_parallel_size,
            num_seqs=make_buckets(config.max_num_batched_tokens, config.max_num_seqs)[-1].num_rows,
            pages_per_seq=-(-max_model_len // page_spec.page_size_tokens),
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    logger.info("attention: %s", reason)
    fraction = config.kv_memory_fraction or (CPU_FRACTION if device.platform == "cpu" else ACCELERATOR_FRACTION)
    page_spec = _size_pages(config, spec, page_spec, attention, max_model_len, memory, fraction)
    return Sizes(max_model_len, dtype, page_spec, attention)


def _build_native_kernels(mesh: Mesh) -> None:
    """All at once, as each takes a compiler seconds the first time. What cannot be built is found out where it is used,
    which says why."""
    if mesh.devices.flat[0].platform != "cpu":
        return
    with suppress(BuildError):
        instruction_set = choose_instruction_set()
        with ThreadPoolExecutor(len(NATIVE_SOURCES)) as threads:
            for source in NATIVE_SOURCES:
                threads.submit(build, source, instruction_set)


def _native[T](what: str, make: Callable[[], T], mesh: Mesh) -> T | None:
    """What computes in place of XLA, on a mesh of one CPU if it can be built there."""
    if mesh.size > 1 or mesh.devices.flat[0].platform != "cpu":
        return None
    try:
        return make()
    except BuildError as error:
        logger.info("%s: xla (native: %s)", what, error)
        return None


def choose_dtype(wanted: str, platform: str, matmul: CpuMatmul | None) -> str:
    """Resolve "auto": bfloat16 on accelerators, on a CPU what it computes faster in."""
    if wanted != "auto":
        return wanted
    if platform != "cpu":
        return "bfloat16"
    with counter.starting():
        return probe_dtype(matmul)


def _choose_max_model_len(config: EngineConfig, spec: ModelSpec) -> int:
    if config.max_model_len is None:
        return spec.max_position
    if config.max_model_len > spec.max_position:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, the model was made for {spec.max_position} positions; lower it"
        )
    return config.max_model_len


def _size_pages(
    config: EngineConfig,
    spec: ModelSpec,
    page_spec: PageSpec,
    attention: PagedAttention,
    max_model_len: int,
    memory: DeviceMemory,
    fraction: float,
) -> PageSpec:
    """Return the page spec with its number of pages."""
    share = config.tensor_parallel_size
    needs = MemoryNeeds(
        weight_bytes=weight_bytes(spec, page_spec.dtype) // share,
        step_bytes=_step_bytes(config, spec, max_model_len),
        page_bytes=_page_bytes(attention, page_spec) // share,
    )
    num_pages = size_pool(
        needs,
        memory=memory,
        fraction=fraction,
        pages_per_seq=-(-max_model_len // page_spec.page_size_tokens),
        max_num_seqs=config.max_num_seqs,
        num_pages=config.num_pages,
    )
    return replace(page_spec, num_pages=num_pages)


def _page_bytes(attention: PagedAttention, page_spec: PageSpec) -> int:
    """Bytes of one page as the implementation lays it out, padding included."""
    with_scratch = jax.eval_shape(lambda: attention.make_pages(replace(page_spec, num_pages=1)))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(with_scratch)) // 2


def _size_host_tier(config: EngineConfig, page_spec: PageSpec) -> int:
    """Return how many pages the host tier holds. Raises ConfigError if the host has not that much memory free."""
    wanted_bytes = int(config.host_tier_gib * GIB)
    if wanted_bytes > (free_bytes := host_memory().free_bytes):
        raise ConfigError(
            f"host_tier_gib is {config.host_tier_gib}, the host has {free_bytes / GIB:.2f} GiB free; lower it"
        )
    if 0 < wanted_bytes < page_spec.page_bytes:
        raise ConfigError(
            f"host_tier_gib is {config.host_tier_gib}, one page takes {page_spec.page_bytes} bytes; raise it"
        )
    return wanted_bytes // page_spec.page_bytes


def _step_bytes(config: EngineConfig, spec: ModelSpec, max_model_len: int) -> int:
    """An upper estimate, in bytes, of what the largest step keeps beside weights and pages: float32 activations of one
    layer, a few copies of the logits, and the rows' token histories."""
    tokens = config.max_num_batched_tokens
    features = 6 * spec.hidden_size + 3 * spec.intermediate_size + 4 * spec.num_heads * spec.head_dim
    logits = 4 * config.max_num_seqs * spec.vocab_size
    histories = (config.max_num_seqs + 1) * max_model_len
    return 4 * (tokens * features + logits + histories)


def _load_tokenizer(model_dir: Path) -> Tokenizer | None:
    if not any((model_dir / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return None
    return load_tokenizer(model_dir)
