"""Compiles the Hopper kernels and a whole step for an H200 on a host without a GPU, and looks at what came out.

    pip install jax==0.11.2 && pip install --no-deps jax-cuda13-pjrt==0.11.2 jax-cuda13-plugin==0.11.2
    pip install nvidia-cuda-nvcc nvidia-cuda-runtime nvidia-nvvm flax jaxtyping transformers
    python scripts/check_cuda_compile.py [--kernels-only] [--quick]

in an environment of its own. Prints registers, spilled bytes, shared memory and tensor core instructions of every
kernel, and exits with 1 if one spills, lacks wgmma where it should have it, or if a step copies its page pool. Nothing
is executed.
"""

import argparse
import json
import os
import re
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DUMP = Path(tempfile.mkdtemp(prefix="cuda_compile_"))
CUDA = Path(sysconfig.get_paths()["purelib"]) / "nvidia" / "cu13"
os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "CUDA_VISIBLE_DEVICES": "-1",
    "XLA_FLAGS": f"--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false --xla_gpu_cuda_data_dir={CUDA}",
    "MOSAIC_GPU_DUMP_PTX": "1",
    "MOSAIC_GPU_DUMP_PTXAS": "1",
    "MOSAIC_GPU_DUMP_TO": str(DUMP),
}
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec  # noqa: E402

from pallas_kernels.paged_attention.api import AttentionBatch, PageSpec  # noqa: E402
from pallas_kernels.paged_attention.gpu import GpuPagedAttention  # noqa: E402

H200 = """
gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
 shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
 memory_bandwidth: 4800000000000 l2_cache_size: 62914560 clock_rate_ghz: 1.98 device_memory_size: 150754820096
 shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 }
 registers_per_core_limit: 65536 registers_per_block_limit: 65536 }
platform_name: "CUDA" dnn_version_info { major: 9 minor: 12 }
runtime_version { major: 13 minor: 0 patch: 0 } device_description_str: "NVIDIA H200"
"""
NUM_SMS = 132
NEEDS_WGMMA = ("paged_decode", "paged_prefill")


@dataclass(frozen=True)
class Shape:
    """One compilation of `attend`."""

    head_dim: int
    group: int
    page_size: int = 16
    dtype: str = "bfloat16"
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False

    @property
    def name(self) -> str:
        extras = [f"window {self.window}"] * bool(self.window) + [f"soft cap {self.soft_cap}"] * bool(self.soft_cap)
        parts = [f"D {self.head_dim}", f"G {self.group}", f"page {self.page_size}", self.dtype, *extras]
        return ", ".join(parts + ["sinks"] * self.sinks)


QUICK = (Shape(128, 4), Shape(64, 3), Shape(256, 2))
SHAPES = (
    *QUICK,
    *(Shape(head_dim, 1, page) for head_dim, page in ((64, 32), (128, 64), (256, 128))),
    *(Shape(head_dim, 8, page) for head_dim, page in ((64, 128), (128, 32), (256, 64))),
    *(Shape(head_dim, 4, window=100, soft_cap=30.0, sinks=True) for head_dim in (64, 128, 256)),
    *(Shape(head_dim, group) for head_dim, group in ((64, 32), (128, 16), (128, 32), (256, 16))),
    Shape(128, 4, dtype="float16"),
    Shape(128, 4, soft_cap=30.0),
    Shape(128, 4, window=4096),
    Shape(128, 8, sinks=True),
)


def main() -> None:
    arguments = parse_arguments()
    report = Report()
    mesh = make_mesh(1)
    for shape in QUICK if arguments.quick else SHAPES:
        report.compile(shape.name, *attend_program(shape, mesh))
    if not arguments.kernels_only:
        for size in (1,) if arguments.quick else (1, 2):
            report.compile_steps(f"step of a Llama, {size} device(s)", step_runner(make_mesh(size)))
    print(json.dumps(report.figures()))
    if report.faults:
        sys.exit("\n".join(["FAILED:", *report.faults]))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three shapes and one step")
    parser.add_argument("--kernels-only", action="store_true", help="leave the whole step out")
    return parser.parse_args()


def make_mesh(size: int) -> Mesh:
    """The first devices of an H200 host that is not there."""
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="h200", topology=f"1x1x{size}", target_config=H200
    )
    return jax.make_mesh((size,), ("tensor",), axis_types=(AxisType.Auto,), devices=topology.devices)


class Report:
    """Compiles, prints, and remembers what was wrong."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.kernels: list[dict[str, Any]] = []

    def compile(self, name: str, function: Callable[..., Any], arguments: tuple, pages_at: int) -> None:
        """Compile a function for the GPU that its arguments' shardings name, with the page pool donated."""
        forget_dumps()
        start = time.perf_counter()
        compiled = jax.jit(function, donate_argnums=pages_at).lower(*arguments).compile()
        memory: Any = compiled.memory_analysis()
        pool_bytes = sum(_shard_bytes(leaf) for leaf in jax.tree.leaves(arguments[pages_at]))
        is_aliased = memory.alias_size_in_bytes >= pool_bytes
        self._add(name, time.perf_counter() - start, pool_bytes, is_aliased, memory.temp_size_in_bytes)

    def compile_steps(self, name: str, runner: Any) -> None:
        """Compile the steps and draws of all buckets."""
        forget_dumps()
        for step in runner.compile_buckets():
            title = f"{name}, {step.num_tokens} tokens, {step.num_rows} rows"
            self._add(title, step.compile_seconds, step.page_bytes, step.pages_are_aliased, step.temporary_bytes)
            forget_dumps()

    def _add(self, name: str, seconds: float, pool_bytes: int, is_aliased: bool, temporary_bytes: int) -> None:
        """Print and judge a program and the kernels that it was made of, which the dump holds."""
        print(
            f"\n{name}: {seconds:.1f} s\n  pool {pool_bytes >> 20} MiB, {'' if is_aliased else 'NOT '}aliased, "
            f"temporary {temporary_bytes / 2**20:.1f} MiB"
        )
        if not is_aliased or temporary_bytes > pool_bytes / 4:
            self.faults.append(f"{name}: the pool of {pool_bytes} bytes is not updated in place")
        for ptxas in sorted(DUMP.glob("*.ptxas")):
            self._add_kernel(name, read_kernel(ptxas))

    def _add_kernel(self, name: str, kernel: dict[str, Any]) -> None:
        self.kernels.append({"program": name, **kernel})
        print(
            "  {kernel:14} {registers:4} registers, {spilled_bytes} bytes spilled, {shared_bytes:6} bytes shared, "
            "{wgmma:3} wgmma {shapes}".format(**kernel)
        )
        if kernel["spilled_bytes"]:
            self.faults.append(f"{name}: {kernel['kernel']} spills {kernel['spilled_bytes']} bytes")
        if kernel["kernel"] in NEEDS_WGMMA and not kernel["wgmma"]:
            self.faults.append(f"{name}: {kernel['kernel']} has no wgmma in its PTX")

    def figures(self) -> dict[str, Any]:
        return {"compiled_kernels": len(self.kernels), "faults": len(self.faults), "kernels": self.kernels}


def forget_dumps() -> None:
    for file in DUMP.iterdir():
        file.unlink()


def _shard_bytes(leaf: Any) -> int:
    size = leaf.dtype.itemsize
    for length in leaf.sharding.shard_shape(leaf.shape):
        size *= length
    return size


def read_kernel(ptxas: Path) -> dict[str, Any]:
    """What ptxas and the PTX say of one kernel. Raises if the dump is not of a form known here."""
    text, ptx = ptxas.read_text(), ptxas.with_suffix(".ptx").read_text()
    resources = ptxas.with_suffix(".resources.txt").read_text()
    instructions = re.findall(r"wgmma\.mma_async\.sync\.aligned\.(m\d+n\d+k\d+)", ptx)
    spilled = [int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", text)]
    assert spilled, f"{ptxas} says nothing of spills"
    return {
        "kernel": re.sub(r"_\d+$", "", ptxas.stem),
        "registers": int(re.findall(r"Used (\d+) registers", text)[0]),
        "spilled_bytes": max(spilled),
        "shared_bytes": int(re.findall(r"smem_scratch_bytes=(\d+)", resources)[0]),
        "wgmma": len(instructions),
        "shapes": " ".join(sorted(set(instructions))),
    }


def attend_program(shape: Shape, mesh: Mesh, num_kv_heads: int = 4, num_layers: int = 4) -> tuple:
    """`attend` inside a scan over layers: the function, its abstract arguments, and which of them is the pool."""
    spec = PageSpec(num_layers, 8191, shape.page_size, num_kv_heads, shape.head_dim, shape.dtype)
    attention = GpuPagedAttention(shape.group, num_sms=NUM_SMS)
    num_tokens, num_seqs, pages_per_seq = 512, 64, 256
    heads = shape.group * num_kv_heads

    def run(pages: Any, q: jax.Array, kv: jax.Array, batch: AttentionBatch, sinks: jax.Array | None) -> tuple:
        work = attention.make_work(batch, num_tokens, spec)

        def layer_step(carry: tuple, layer: jax.Array) -> tuple:
            q, pages = carry
            options = {"scale": 0.1, "window": shape.window, "soft_cap": shape.soft_cap, "sinks": sinks}
            return attention.attend(q, kv, kv, pages, work, layer=layer, **options), None

        return jax.lax.scan(layer_step, (q, pages), jnp.arange(num_layers, dtype=jnp.int32))[0]

    def abstract(dtype: Any, *sizes: int) -> Any:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    pages = jax.tree.map(lambda x: abstract(x.dtype, *x.shape), jax.eval_shape(lambda: attention.make_pages(spec)))
    batch = AttentionBatch(
        abstract(jnp.int32, num_seqs + 1),
        abstract(jnp.int32, num_seqs),
        abstract(jnp.int32, num_seqs, pages_per_seq),
        abstract(jnp.int32),
        abstract(jnp.int32),
    )
    q = abstract(shape.dtype, num_tokens, heads, shape.head_dim)
    kv = abstract(shape.dtype, num_tokens, num_kv_heads, shape.head_dim)
    return run, (pages, q, kv, batch, abstract(jnp.float32, heads) if shape.sinks else None), 0


def step_runner(mesh: Mesh) -> Any:
    """What compiles the engine's steps for a Llama 3 8B of four layers."""
    from jpaged.execution.ahead import AheadRunner
    from jpaged.execution.runner import RunnerConfig
    from jpaged.models.spec import spec_from_config

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    }
    spec = spec_from_config(config)
    page_spec = PageSpec(spec.num_layers, 16383, 16, spec.num_kv_heads, spec.head_dim, "bfloat16")
    attention = GpuPagedAttention(spec.num_heads // spec.num_kv_heads, num_sms=NUM_SMS)
    sizes = RunnerConfig(page_spec, max_model_len=4096, max_num_seqs=64, max_num_batched_tokens=512)
    return AheadRunner(spec, jnp.bfloat16, attention, mesh, sizes)


if __name__ == "__main__":
    main()
