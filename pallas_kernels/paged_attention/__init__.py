"""Attention over a paged KV cache: one contract, one implementation per platform."""

from pallas_kernels.paged_attention.api import AttentionBatch, PagedAttention, PageSpec
from pallas_kernels.paged_attention.dispatch import NoImplementationError, choose

__all__ = ["AttentionBatch", "NoImplementationError", "PageSpec", "PagedAttention", "choose"]
