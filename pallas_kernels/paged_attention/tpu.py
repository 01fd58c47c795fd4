"""Paged attention for TPU: Pallas kernels around a layout of their own (`tpu_layout`).

A step is one launch for its decode rows and, if it has any other sequences, one for short runs of tokens and one for
long ones. All three write the new K and V into the pages, which go from one to the next in place.

Letters in shapes: T tokens, S sequences, N page ids, Hq query heads, Hkv KV heads, G query heads per KV head,
D head_dim, L layers, R rows of a slab.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

from pallas_kernels.paged_attention import tpu_layout
from pallas_kernels.paged_attention.api import AttentionBatch, PageSpec
from pallas_kernels.paged_attention.tpu_blocks import (
    Blocks,
    Shape,
    choose_blocks,
    device_of,
    fit_blocks,
    refuse_step,
    vmem_limit,
)
from pallas_kernels.paged_attention.tpu_decode import decode_kernel
from pallas_kernels.paged_attention.tpu_layout import LANES, SUBLANES, TILE_TOKENS, Layout, TpuWork
from pallas_kernels.paged_attention.tpu_runs import runs_kernel
from pallas_kernels.paged_attention.tpu_stream import FLOOR, Launch


@partial(jax.tree_util.register_dataclass, data_fields=["slabs"], meta_fields=["page_size_tokens", "dtype"])
@dataclass(frozen=True)
class TpuPages:
    """The pool: uint32 [L, (num_pages + 1) * slabs_per_page, R, 8, 128]; as host pages, the same with axes
    [N, L, slabs_per_page, R, 8, 128]."""

    slabs: Any
    page_size_tokens: int
    dtype: str


@dataclass(frozen=True)
class _Call:
    """The arguments of one `attend` that its launches share."""

    layout: Layout
    shape: Shape
    blocks: Blocks
    work: TpuWork
    layer: jax.Array  # int32 [1]
    scale: float
    window: int | None
    soft_cap: float | None
    sinks: jax.Array  # float32 [Hkv, G]; FLOOR where there are none
    vmem_limit_bytes: int
    interpret: Any

    @property
    def pages_per_seq(self) -> int:
        return self.work.page_table.shape[0] // self.work.kv_lens.shape[0]

    def launch(self, block_tokens: int, product_tokens: int, q_tokens: int = 0, product_q_tokens: int = 0) -> Launch:
        block_slabs, compute_slabs = fit_blocks(self.layout, self.pages_per_seq, block_tokens, product_tokens)
        return Launch(
            layout=self.layout,
            pages_per_seq=self.pages_per_seq,
            scale=self.scale,
            window=self.window,
            soft_cap=self.soft_cap,
            block_slabs=block_slabs,
            compute_slabs=compute_slabs,
            q_tiles=q_tokens // TILE_TOKENS,
            compute_tiles=product_q_tokens // TILE_TOKENS,
        )

    def compiler_params(self) -> Any:
        return pltpu.CompilerParams(vmem_limit_bytes=self.vmem_limit_bytes)


class TpuPagedAttention:
    """PagedAttention for TPU.

    Args:
        device_kind: as jax.Device.device_kind says; block sizes follow from it.
        blocks: takes the place of the sizes that would be chosen.
        interpret: InterpretParams to run the kernels on a CPU.
    """

    def __init__(self, device_kind: str = "", blocks: Blocks | None = None, interpret: Any = False) -> None:
        self._device = device_of(device_kind)
        self._blocks = blocks
        self._interpret = interpret

    def make_pages(self, spec: PageSpec) -> TpuPages:
        layout = Layout.of(spec)
        shape = layout.pages_shape(spec.num_layers, spec.num_pages + 1)
        return TpuPages(jnp.zeros(shape, jnp.uint32), spec.page_size_tokens, str(spec.dtype))

    def make_work(self, batch: AttentionBatch, num_tokens: int, spec: PageSpec) -> TpuWork:
        return tpu_layout.make_work(batch, num_tokens, Layout.of(spec))

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        pages: TpuPages,
        work: TpuWork,
        *,
        layer: jax.Array | int,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, TpuPages]:
        """Raises ValueError, before anything is compiled, for a step that does not fit SMEM or VMEM."""
        (num_tokens, num_q_heads, head_dim), num_kv_heads = q.shape, k.shape[1]
        layout = Layout(num_kv_heads, head_dim, pages.page_size_tokens, jnp.dtype(pages.dtype))
        shape = Shape(layout, num_q_heads // num_kv_heads, q.dtype)
        blocks = self._blocks or choose_blocks(self._device, shape)
        num_seqs = work.kv_lens.shape[0]
        if refusal := refuse_step(self._device, shape, blocks, num_seqs, work.page_table.shape[0] // num_seqs):
            raise ValueError(refusal)
        if sinks is None:
            sinks = jnp.full(num_q_heads, FLOOR, jnp.float32)
        call = _Call(
            layout=layout,
            shape=shape,
            blocks=blocks,
            work=work,
            layer=jnp.asarray(layer, jnp.int32).reshape(1),
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            sinks=sinks.astype(jnp.float32).reshape(num_kv_heads, shape.group),
            vmem_limit_bytes=vmem_limit(self._device),
            interpret=self._interpret,
        )
        rows = tpu_layout.to_rows(layout, k, v)
        decoded, slabs = _decode(call, q, rows, pages.slabs)
        padding = ((0, num_tokens - len(decoded)), (0, 0), (0, 0))
        kind = work.token_kind[:, None, None]
        out = jnp.where(kind == 1, jnp.pad(decoded, padding), 0)
        # Most steps are decode rows alone: they shall not pay for laying out runs.
        out, slabs = lax.cond(
            work.num_short[0] + work.num_long[0] > 0,
            lambda out, slabs: _runs(call, q, rows, slabs, out),
            lambda out, slabs: (out, slabs),
            out,
            slabs,
        )
        return out, replace(pages, slabs=slabs)

    def copy_pages(self, pages: TpuPages, source_ids: jax.Array, target_ids: jax.Array) -> TpuPages:
        by_page = _by_page(pages)
        return _with(pages, by_page.at[:, target_ids].set(by_page[:, source_ids]))

    def read_pages(self, pages: TpuPages, ids: jax.Array) -> TpuPages:
        return replace(pages, slabs=_by_page(pages)[:, ids].swapaxes(0, 1))

    def write_pages(self, pages: TpuPages, ids: jax.Array, host_pages: TpuPages) -> TpuPages:
        return _with(pages, _by_page(pages).at[:, ids].set(host_pages.slabs.swapaxes(0, 1)))

    def pack_pages(self, k: np.ndarray, v: np.ndarray) -> TpuPages:
        layers, num_pages, page_size, num_heads, head_dim = k.shape
        layout = Layout(num_heads, head_dim, page_size, k.dtype)
        words = tpu_layout.pack_slabs(layout, tpu_layout.to_rows(layout, jnp.asarray(k), jnp.asarray(v)))
        return TpuPages(words.reshape(layout.pages_shape(layers, num_pages)), page_size, str(k.dtype))

    def unpack_pages(self, pages: TpuPages, spec: PageSpec) -> tuple[np.ndarray, np.ndarray]:
        layout = Layout.of(spec)
        k, v = tpu_layout.from_rows(layout, tpu_layout.unpack_slabs(layout, _by_page(pages)))
        return np.asarray(k), np.asarray(v)

    def page_sharding(self, spec: PageSpec, axis_name: str) -> TpuPages:
        split = PartitionSpec(None, None, axis_name, None, None)
        return TpuPages(split, spec.page_size_tokens, str(spec.dtype))


def _by_page(pages: TpuPages) -> jax.Array:
    """The slabs as [L, num_pages + 1, slabs_per_page, R, 8, 128]."""
    layers, _, *slab = pages.slabs.shape
    per_page = pages.page_size_tokens * jnp.dtype(pages.dtype).itemsize // (4 * SUBLANES)
    return pages.slabs.reshape(layers, -1, per_page, *slab)


def _with(pages: TpuPages, by_page: jax.Array) -> TpuPages:
    return replace(pages, slabs=by_page.reshape(pages.slabs.shape))


def _decode(call: _Call, q: jax.Array, rows: jax.Array, slabs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Decode rows are the first of the batch: returns [min(S, T), Hq, D], junk for others, and the slabs."""
    layout, work = call.layout, call.work
    num_rows, num_q_heads = min(work.kv_lens.shape[0], len(q)), q.shape[1]
    group, padded = call.shape.group, call.shape.decode_rows
    heads = q[:num_rows].reshape(num_rows, layout.num_kv_heads, group, layout.head_dim)
    heads = jnp.pad(heads, ((0, 0), (0, 0), (0, padded - group), (0, layout.q_lanes - layout.head_dim)))
    sinks = jnp.pad(call.sinks, ((0, 0), (0, padded - group)), constant_values=FLOOR)
    launch = call.launch(call.blocks.decode_kv, call.blocks.decode_product_kv)
    state = (layout.num_kv_heads, padded)
    scalars = call.layer, work.num_decode, work.kv_lens, work.page_table
    vmem, hbm = pl.BlockSpec(memory_space=pltpu.VMEM), pl.BlockSpec(memory_space=pl.ANY)
    out, slabs = pl.pallas_call(
        partial(decode_kernel, launch),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(1,),
            in_specs=[vmem, vmem, vmem, hbm],
            out_specs=[vmem, hbm],
            scratch_shapes=[
                pltpu.VMEM((2, launch.block_slabs, *slabs.shape[2:]), jnp.uint32),
                pltpu.VMEM((*state, LANES), jnp.float32),
                pltpu.VMEM((*state, LANES), jnp.float32),
                pltpu.VMEM((*state, layout.q_lanes), jnp.float32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA(()),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(heads.shape, q.dtype), jax.ShapeDtypeStruct(slabs.shape, slabs.dtype)],
        input_output_aliases={len(scalars) + 3: 1},
        compiler_params=call.compiler_params(),
        interpret=call.interpret,
        name="paged_attention_decode",
    )(
        *scalars,
        heads,
        tpu_layout.spread_token(layout, rows[:num_rows]),
        jnp.broadcast_to(sinks[..., None], (*state, LANES)),
        slabs,
    )
    values = out[:, :, :group, layout.v_lane : layout.v_lane + layout.head_dim]
    return values.reshape(num_rows, num_q_heads, layout.head_dim), slabs


def _runs(call: _Call, q: jax.Array, rows: jax.Array, slabs: jax.Array, out: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Everything but decode rows: fills its tokens into `out`, [T, Hq, D]."""
    work, blocks = call.work, call.blocks
    tiles = tpu_layout.lay_out_queries(call.layout, q, work)
    new = tpu_layout.lay_out_new_tokens(call.layout, rows, work)
    short = call.launch(blocks.decode_kv, blocks.decode_product_kv, TILE_TOKENS, TILE_TOKENS)
    tiles, slabs = _launch_runs(call, short, work.num_short, work.short_runs, new, tiles, slabs, "short")
    if len(q) > TILE_TOKENS:
        long = call.launch(blocks.run_kv, blocks.run_product_kv, blocks.run_q, blocks.run_product_q)
        tiles, slabs = _launch_runs(call, long, work.num_long, work.long_runs, new, tiles, slabs, "long")
    results = tpu_layout.collect_results(call.layout, tiles, work)
    return jnp.where(work.token_kind[:, None, None] == 2, results, out), slabs


def _launch_runs(
    call: _Call,
    launch: Launch,
    num_runs: jax.Array,
    runs: jax.Array,
    new: jax.Array,
    tiles: jax.Array,
    slabs: jax.Array,
    name: str,
) -> tuple[jax.Array, jax.Array]:
    """Puts the results of `num_runs` runs in the place of their queries, and their new slabs into the pages."""
    layout, work = call.layout, call.work
    tile, slab = tiles.shape[1:], slabs.shape[2:]
    heads, rows, lanes = tile
    sinks = jnp.repeat(call.sinks, TILE_TOKENS, axis=1)[..., None]
    scalars = call.layer, num_runs, runs, work.kv_lens, work.q_lens, work.first_tiles, work.first_slabs
    scalars = (*scalars, work.page_table)
    vmem, hbm = pl.BlockSpec(memory_space=pltpu.VMEM), pl.BlockSpec(memory_space=pl.ANY)
    state = (layout.num_kv_heads, launch.q_tiles, rows)
    return pl.pallas_call(
        partial(runs_kernel, launch),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(1,),
            in_specs=[hbm, vmem, hbm, hbm],
            out_specs=[hbm, hbm],
            scratch_shapes=[
                pltpu.VMEM((2, launch.block_slabs, *slab), jnp.uint32),
                pltpu.VMEM((2, *slab), jnp.uint32),
                pltpu.VMEM((2, launch.q_tiles, *tile), tiles.dtype),
                pltpu.VMEM((launch.q_tiles, *tile), tiles.dtype),
                pltpu.VMEM((*state, LANES), jnp.float32),
                pltpu.VMEM((*state, LANES), jnp.float32),
                pltpu.VMEM((*state, lanes), jnp.float32),
                *[pltpu.SemaphoreType.DMA((2,))] * 3,
                *[pltpu.SemaphoreType.DMA(())] * 3,
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (tiles, slabs)],
        input_output_aliases={len(scalars) + 2: 0, len(scalars) + 3: 1},
        compiler_params=call.compiler_params(),
        interpret=call.interpret,
        name=f"paged_attention_{name}_runs",
    )(*scalars, new, jnp.broadcast_to(sinks, (heads, rows, LANES)), tiles, slabs)
