"""Compiles the TPU kernels, and whole steps of models, for TPUs that are not there (libtpu brings the compiler).

    python scripts/check_tpu_compile.py                       # the kernels for v5e, v6e and TPU7x
    python scripts/check_tpu_compile.py --steps               # and whole steps on v6e:2x2: demo model, 8-B Llama
    python scripts/check_tpu_compile.py --topology v5e:1x1 --small    # what the tests do

It prints seconds, VMEM and whether the pages are updated in place, and exits with 1 if they are not. Nothing runs.
"""

import argparse
import sys
import time
from dataclasses import dataclass, replace
from functools import partial

import jax
from jax.sharding import SingleDeviceSharding

from jpaged.config import EngineConfig
from jpaged.engine.ahead import compile_spec_ahead, find_topology
from jpaged.models.spec import ModelSpec, spec_from_config
from pallas_kernels.paged_attention.api import AttentionBatch, PageSpec
from pallas_kernels.paged_attention.dispatch import choose
from pallas_kernels.paged_attention.tpu import TpuPagedAttention
from pallas_kernels.paged_attention.tpu_blocks import Shape, choose_blocks, device_of, vmem_needs
from pallas_kernels.paged_attention.tpu_layout import Layout

MIB = 1 << 20
TOPOLOGIES = ("v5e:1x1", "v6e:1x1", "tpu7x:2x2x1")
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
SMOLLM2 = LLAMA_8B | {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class KernelShape:
    """One step of one attention layer."""

    name: str
    num_tokens: int = 64
    num_seqs: int = 64
    context: int = 4096
    page_size: int = 128
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"
    window: int | None = None
    soft_cap: float | None = None

    @property
    def page_spec(self) -> PageSpec:
        num_pages = self.num_seqs * self.context // self.page_size
        return PageSpec(2, num_pages, self.page_size, self.num_kv_heads, self.head_dim, self.dtype)


KERNELS = (
    KernelShape("8 B, 64 decode rows, page 16", page_size=16),
    KernelShape("8 B, 64 decode rows, page 128"),
    KernelShape("8 B, 2048 mixed tokens, page 16", num_tokens=2048, page_size=16),
    KernelShape("8 B, 2048 mixed tokens, page 128", num_tokens=2048),
    KernelShape("8 B, window and soft cap", num_tokens=2048, window=1024, soft_cap=30.0),
    KernelShape("8 B, float32", num_tokens=512, context=1024, dtype="float32"),
    KernelShape("head_dim 64, 9 and 3 heads", num_tokens=512, num_q_heads=9, num_kv_heads=3, head_dim=64),
    KernelShape("head_dim 256", num_tokens=512, context=2048, num_q_heads=16, head_dim=256),
)
SMALL = (
    KernelShape("small, page 16", num_tokens=32, num_seqs=8, context=256, page_size=16, num_q_heads=4, num_kv_heads=2),
    KernelShape(
        "small, head_dim 64", num_tokens=32, num_seqs=8, context=256, num_q_heads=6, num_kv_heads=3, head_dim=64
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", action="append", help=f"default: {', '.join(TOPOLOGIES)}")
    parser.add_argument("--small", action="store_true", help="small shapes alone")
    parser.add_argument("--steps", action="store_true", help="whole steps of models too, on v6e:2x2")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    in_place = True
    for topology in options.topology or TOPOLOGIES:
        device = find_topology(topology)[0]
        for shape in SMALL if options.small else KERNELS:
            in_place &= check_kernel(topology, device, shape)
    if options.steps:
        in_place &= check_steps("demo model", spec_from_config(SMOLLM2), tensor_parallel_size=1)
        in_place &= check_steps("8-B Llama", spec_from_config(LLAMA_8B), tensor_parallel_size=4)
    sys.exit(0 if in_place else 1)


def check_kernel(topology: str, device: jax.Device, shape: KernelShape) -> bool:
    """Compile one layer's attention; returns whether the pages are updated in place."""
    spec, seconds = shape.page_spec, time.monotonic()
    attention, _ = choose(
        "tpu",
        spec,
        num_q_heads=shape.num_q_heads,
        q_dtype=shape.dtype,
        device_kind=device.device_kind,
        num_seqs=shape.num_seqs,
        pages_per_seq=shape.context // shape.page_size,
    )
    assert isinstance(attention, TpuPagedAttention)
    sharding = SingleDeviceSharding(device)

    def array(*size: int, dtype: str = "int32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(size, dtype, sharding=sharding)

    def step(q, k, v, pages, batch, layer):
        work = attention.make_work(batch, shape.num_tokens, spec)
        options = {"scale": shape.head_dim**-0.5, "window": shape.window, "soft_cap": shape.soft_cap}
        return attention.attend(q, k, v, pages, work, layer=layer, **options)

    batch: AttentionBatch = AttentionBatch(
        cu_q_lens=array(shape.num_seqs + 1),  # pyright: ignore[reportArgumentType]
        kv_lens=array(shape.num_seqs),  # pyright: ignore[reportArgumentType]
        page_table=array(shape.num_seqs, shape.context // shape.page_size),  # pyright: ignore[reportArgumentType]
        num_decode=array(),  # pyright: ignore[reportArgumentType]
        num_seqs=array(),  # pyright: ignore[reportArgumentType]
    )
    pages = jax.eval_shape(partial(attention.make_pages, spec))
    pages = replace(pages, slabs=array(*pages.slabs.shape, dtype="uint32"))
    q = array(shape.num_tokens, shape.num_q_heads, shape.head_dim, dtype=shape.dtype)
    kv = array(shape.num_tokens, shape.num_kv_heads, shape.head_dim, dtype=shape.dtype)
    traced = jax.jit(step, donate_argnums=3).trace(q, kv, kv, pages, batch, array())
    memory = traced.lower(lowering_platforms=("tpu",)).compile().memory_analysis()
    assert memory is not None
    pool_bytes = pages.slabs.size * 4
    in_place = memory.alias_size_in_bytes >= pool_bytes and memory.temp_size_in_bytes < pool_bytes
    tpu = device_of(device.device_kind)
    sizes = Shape(Layout.of(spec), shape.num_q_heads // shape.num_kv_heads, spec.dtype)
    needs = vmem_needs(sizes, choose_blocks(tpu, sizes), shape.num_seqs)
    vmem = ", ".join(f"{launch} {need / MIB:.1f}" for launch, need in needs.items())
    print(
        f"{topology} ({device.device_kind}): {shape.name}: {time.monotonic() - seconds:.1f} s; pool "
        f"{pool_bytes / MIB:.0f} MiB {'in place' if in_place else 'COPIED'}, temporaries "
        f"{memory.temp_size_in_bytes / MIB:.1f} MiB; VMEM at most, in MiB of {tpu.vmem_bytes / MIB:.0f}: {vmem}",
        flush=True,
    )
    return in_place


def check_steps(name: str, spec: ModelSpec, tensor_parallel_size: int) -> bool:
    """Compile a model's smallest decode step and its largest step."""
    config = EngineConfig(
        name,
        max_model_len=4096,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        tensor_parallel_size=tensor_parallel_size,
    )
    compilation, in_place = compile_spec_ahead(config, spec, "v6e:2x2"), True
    for bucket in compilation.buckets:
        in_place &= bucket.pages_are_aliased
        print(
            f"v6e:2x2 ({compilation.device_kind}): {name} on {tensor_parallel_size} of {compilation.num_devices}: step "
            f"of {bucket.num_tokens} tokens, {bucket.num_rows} rows: {bucket.compile_seconds:.1f} s; MiB a device: "
            f"weights {bucket.weight_bytes / MIB:.1f}, pages {bucket.page_bytes / MIB:.1f} "
            f"{'in place' if bucket.pages_are_aliased else 'COPIED'}, temporaries {bucket.temporary_bytes / MIB:.1f}; "
            f"{compilation.kv_tokens} KV tokens fit",
            flush=True,
        )
    return in_place


if __name__ == "__main__":
    main()
