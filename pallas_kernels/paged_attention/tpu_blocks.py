"""Block sizes of the TPU kernels, what they take of VMEM and SMEM, and what is refused before anything is compiled."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels.paged_attention.tpu_layout import LANES, SUBLANES, TILE_TOKENS, Layout

MIB = 1 << 20
DECODE_ROWS = "decode rows"
PAGE_SIZES = (16, 32, 64, 128, 256)
DEFAULT_DEVICE_KIND = "TPU v6 lite"  # what the heuristic assumes where it is told nothing, as in the interpreter


@dataclass(frozen=True)
class Blocks:
    """Block sizes in tokens. A DMA block is fetched as one; a product is what one matrix multiplication takes of it."""

    decode_kv: int  # DMA block of decode rows and short runs
    decode_product_kv: int
    run_kv: int  # DMA block of long runs
    run_product_kv: int
    run_q: int  # query tokens of one pass over the KV
    run_product_q: int


@dataclass(frozen=True)
class Shape:
    """What the block sizes depend on: the heads are those of one device."""

    layout: Layout
    group: int  # query heads per KV head
    q_dtype: Any

    @property
    def decode_rows(self) -> int:
        """M of a decode row: its group, padded to whole registers."""
        return -(-self.group // SUBLANES) * SUBLANES

    def decode_operand_bytes(self, num_seqs: int) -> int:
        """Queries, results and new tokens of decode rows, which stay in VMEM."""
        layout = self.layout
        queries = layout.num_kv_heads * self.decode_rows * layout.q_lanes * jnp.dtype(self.q_dtype).itemsize
        new_tokens = -(-layout.rows // SUBLANES) * SUBLANES * LANES * 4
        return num_seqs * (2 * queries + new_tokens)


@dataclass(frozen=True)
class Device:
    """What matters of a TPU: bytes of its memories, of one core where it has several."""

    kind: str
    vmem_bytes: int
    smem_bytes: int
    hbm_bytes: int


# Tuned sizes go here, keyed by (device kind, page size, page dtype, KV heads of a device, query heads, head_dim): they
# take precedence over the heuristic. Nobody has tuned on hardware yet; the entry says what the published kernels for
# this chip found best for 8-billion-parameter Llamas, a longer DMA block for prompts.
TUNED: dict[tuple[str, int, str, int, int, int], Blocks] = {
    ("TPU7x", 128, "bfloat16", 8, 32, 128): Blocks(2048, 512, 2048, 512, 256, 64),
}


@cache
def device_of(kind: str) -> Device:
    """Raises ValueError for a device kind that this jax does not know."""
    abstract = AbstractDevice(device_kind=kind or DEFAULT_DEVICE_KIND, num_cores=None, platform="tpu")
    try:
        with use_abstract_mesh(AbstractMesh((), (), abstract_device=abstract)):
            info = pltpu.get_tpu_info()
    except Exception as error:  # jax raises what it likes here
        raise ValueError(f"jax does not know the TPU {kind!r}: {error}") from error
    return Device(kind, info.vmem_capacity_bytes, info.smem_capacity_bytes, info.hbm_capacity_bytes)


def choose_blocks(device: Device, shape: Shape) -> Blocks:
    """The table's sizes, or these: decode fetches as much at once as an eighth of VMEM holds (two buffers, and room
    for the rest), at most 4096 tokens; a run reads its KV once for about 1024 rows of queries per KV head, or for
    fewer where that would not fit."""
    layout = shape.layout
    heads, dtype = layout.num_kv_heads, str(jnp.dtype(layout.dtype))
    key = device.kind, layout.page_size_tokens, dtype, heads, heads * shape.group, layout.head_dim
    if key in TUNED:
        return TUNED[key]
    product = 512 if layout.pack > 1 else 256
    block_bytes = device.vmem_bytes // 8
    while product > LANES and product * layout.token_bytes > block_bytes:
        product //= 2
    decode = max(min(block_bytes // layout.token_bytes, 4096) // product, 1) * product
    product_q = TILE_TOKENS
    while 2 * product_q * shape.group <= 256:
        product_q *= 2
    run_q = max(1024 // shape.group // product_q, 1) * product_q
    run_kv = min(decode, max(1024 // product, 1) * product)
    while runs_vmem_bytes(shape, run_kv, product, run_q, product_q) > vmem_limit(device):
        if run_q > product_q:
            run_q = max(run_q // 2 // product_q, 1) * product_q
        elif run_kv > product:
            run_kv = max(run_kv // 2 // product, 1) * product
        elif product_q > TILE_TOKENS:
            product_q //= 2
            run_q = product_q
        else:
            break  # refuse_step says so
    return Blocks(decode, product, run_kv, product, run_q, product_q)


def fit_blocks(layout: Layout, pages_per_seq: int, block_tokens: int, product_tokens: int) -> tuple[int, int]:
    """Slabs of a DMA block and of a product: no longer than a sequence can be, and whole products in a block."""
    longest = pages_per_seq * layout.page_size_tokens
    product = min(product_tokens, -(-longest // LANES) * LANES)
    block = max(min(block_tokens, -(-longest // product) * product) // product, 1) * product
    return block // layout.slab_tokens, product // layout.slab_tokens


def decode_vmem_bytes(shape: Shape, blocks: Blocks, num_seqs: int) -> int:
    """VMEM of the decode launch: operands, two KV blocks, the softmax, and the logits in flight."""
    layout = shape.layout
    rows = layout.num_kv_heads * shape.decode_rows
    state = rows * (3 * LANES + layout.q_lanes) * 4  # the sinks too
    logits = 4 * rows * blocks.decode_product_kv * 4
    kv = 2 * blocks.decode_kv * layout.token_bytes
    return shape.decode_operand_bytes(num_seqs) + kv + state + logits


def runs_vmem_bytes(shape: Shape, kv: int, product_kv: int, q: int, product_q: int) -> int:
    """VMEM of a launch for runs: two KV blocks and edges, queries twice, results, the softmax, logits in flight."""
    layout = shape.layout
    rows = layout.num_kv_heads * shape.group * q
    state = rows * (2 * LANES + layout.q_lanes) * 4
    queries = 3 * rows * layout.q_lanes * jnp.dtype(shape.q_dtype).itemsize
    logits = 4 * shape.group * product_q * (product_kv + 3 * LANES) * 4
    sinks = layout.num_kv_heads * shape.group * TILE_TOKENS * LANES * 4
    return 2 * (kv // layout.slab_tokens + 1) * layout.slab_bytes + state + queries + logits + sinks


def vmem_needs(shape: Shape, blocks: Blocks, num_seqs: int) -> dict[str, int]:
    """Bytes of VMEM, launch by launch."""
    b = blocks
    return {
        DECODE_ROWS: decode_vmem_bytes(shape, b, num_seqs),
        "short runs": runs_vmem_bytes(shape, b.decode_kv, b.decode_product_kv, TILE_TOKENS, TILE_TOKENS),
        "long runs": runs_vmem_bytes(shape, b.run_kv, b.run_product_kv, b.run_q, b.run_product_q),
    }


def smem_need(num_seqs: int, pages_per_seq: int) -> int:
    """Bytes of SMEM: the page table and six numbers a sequence."""
    return 4 * num_seqs * (pages_per_seq + 6)


def refuse_layout(layout: Layout, q_dtype: Any) -> str | None:
    """Why the kernels do not take these pages and queries, or None."""
    for what, dtype in (("queries", q_dtype), ("pages", layout.dtype)):
        if str(jnp.dtype(dtype)) not in ("bfloat16", "float32"):
            return f"{what} are {jnp.dtype(dtype)}; it takes bfloat16 and float32"
    if layout.head_dim > 256:
        return f"head_dim is {layout.head_dim}; it takes at most 256"
    if layout.page_size_tokens not in PAGE_SIZES:
        sizes = ", ".join(map(str, PAGE_SIZES))
        return f"pages have {layout.page_size_tokens} tokens; it takes {sizes}; change page_size"
    return None


def refuse_step(device: Device, shape: Shape, blocks: Blocks, num_seqs: int, pages_per_seq: int) -> str | None:
    """Why a step of this many sequences does not fit, with the numbers and what to change, or None."""
    smem = smem_need(num_seqs, pages_per_seq)
    page_size = shape.layout.page_size_tokens
    # Mosaic keeps some of SMEM for itself.
    if smem > (limit := device.smem_bytes - device.smem_bytes // 16):
        return (
            f"a page table of {num_seqs} sequences x {pages_per_seq} pages takes {smem / MIB:.2f} MiB of SMEM, "
            f"{device.kind} has {limit / MIB:.2f} MiB for it; raise page_size ({page_size} now, 128 is usual), or "
            "lower max_model_len or max_num_seqs"
        )
    limit = vmem_limit(device)
    for launch, need in vmem_needs(shape, blocks, num_seqs).items():
        if need > limit:
            operands = f" ({num_seqs} decode rows alone take {shape.decode_operand_bytes(num_seqs) / MIB:.1f} MiB)"
            remedy = "lower max_num_seqs, or raise tensor_parallel_size"
            return (
                f"the launch for {launch} takes {need / MIB:.1f} MiB of VMEM, {device.kind} has {limit / MIB:.1f} MiB "
                f"for it{operands if launch == DECODE_ROWS else ''}; "
                f"{remedy if launch == DECODE_ROWS else 'raise tensor_parallel_size'}"
            )
    return None


def vmem_limit(device: Device) -> int:
    """What a kernel may take: the compiler keeps some of VMEM for itself."""
    return device.vmem_bytes - device.vmem_bytes // 8
