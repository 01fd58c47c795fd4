"""Paged attention one sequence and one head at a time, in float32 numpy: what the implementations are held to."""

import numpy as np


def attend_reference(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    pages_k: np.ndarray,
    pages_v: np.ndarray,
    *,
    cu_q_lens: np.ndarray,
    kv_lens: np.ndarray,
    page_table: np.ndarray,
    num_seqs: int,
    layer: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`PagedAttention.attend` on plain arrays.

    q is [T, Hq, D], k and v are [T, Hkv, D], pages_k and pages_v [L, P, page_size, Hkv, D]. Returns the output,
    float32 [T, Hq, D], and copies of the pages with the new tokens written.
    """
    pages_k, pages_v = pages_k.copy(), pages_v.copy()
    page_size = pages_k.shape[2]
    num_q_heads, num_kv_heads = q.shape[1], k.shape[1]
    out = np.zeros(q.shape, np.float32)
    for sequence in range(num_seqs):
        start, end, kv_len = int(cu_q_lens[sequence]), int(cu_q_lens[sequence + 1]), int(kv_lens[sequence])
        for row in range(start, end):
            position = kv_len - end + row
            page = page_table[sequence, position // page_size]
            pages_k[layer, page, position % page_size] = k[row].astype(pages_k.dtype)
            pages_v[layer, page, position % page_size] = v[row].astype(pages_v.dtype)

        places = [(page_table[sequence, p // page_size], p % page_size) for p in range(kv_len)]
        keys = np.array([pages_k[layer, page, offset] for page, offset in places], np.float32)
        values = np.array([pages_v[layer, page, offset] for page, offset in places], np.float32)
        for row in range(start, end):
            position = kv_len - end + row
            first = 0 if window is None else max(0, position - window + 1)
            for head in range(num_q_heads):
                kv_head = head // (num_q_heads // num_kv_heads)
                logits = keys[first : position + 1, kv_head] @ q[row, head].astype(np.float32) * np.float32(scale)
                if soft_cap is not None:
                    logits = soft_cap * np.tanh(logits / soft_cap)
                sink = -np.inf if sinks is None else sinks[head]
                top = max(logits.max(), sink)
                weights = np.exp(logits - top)
                total = weights.sum() + np.exp(sink - top)
                out[row, head] = weights @ values[first : position + 1, kv_head] / total
    return out, pages_k, pages_v
