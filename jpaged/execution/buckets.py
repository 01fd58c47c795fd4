"""The padded shapes that are compiled before the engine is ready, and which of them a step takes."""

from bisect import bisect_left
from dataclasses import dataclass

MIN_ROWS = 8  # fewer rows mostly run no faster: matrix products pad to this
SMALL_PREFILL_TOKENS = 64  # a short prompt alone must not wait for the full budget's shape


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """A compiled shape: a flat batch of `num_tokens` tokens that belong to at most `num_rows` sequences."""

    num_tokens: int
    num_rows: int


def make_buckets(max_num_batched_tokens: int, max_num_seqs: int, *, one_row_alone: bool = False) -> list[Bucket]:
    """Return the shapes to compile, smallest first: decode ladders in rows, mixed ladders in tokens.

    Decode: 8, 16, ... rows of one token, up to the most sequences a step can hold. Mixed: a short prompt on few rows,
    then doubling token counts at full rows. The token budget itself is always the largest shape. With `one_row_alone`
    a decode step of one row has a shape of its own.
    """
    max_rows = _at_least_min(min(max_num_seqs, max_num_batched_tokens))
    max_tokens = max(max_num_batched_tokens, max_rows)
    shapes = {(rows, rows) for rows in _doubling(MIN_ROWS, max_rows)}
    if one_row_alone:
        shapes.add((1, 1))
    if max_tokens > SMALL_PREFILL_TOKENS:
        shapes.add((SMALL_PREFILL_TOKENS, MIN_ROWS))
    if max_rows > MIN_ROWS:
        shapes.add((max_tokens, MIN_ROWS))
    shapes |= {(tokens, max_rows) for tokens in _doubling(2 * max_rows, max_tokens)}
    return sorted(Bucket(*shape) for shape in shapes)


def choose_bucket(buckets: list[Bucket], num_tokens: int, num_rows: int) -> Bucket:
    """Return the smallest bucket that holds a step; the list is sorted and its largest bucket holds any."""
    for bucket in buckets[bisect_left(buckets, Bucket(num_tokens, num_rows)) :]:
        if bucket.num_rows >= num_rows:
            return bucket
    raise AssertionError(f"no bucket holds {num_tokens} tokens of {num_rows} sequences; the largest is {buckets[-1]}")


def _at_least_min(rows: int) -> int:
    return max(rows, MIN_ROWS)


def _doubling(first: int, last: int) -> list[int]:
    """first, 2 first, 4 first, ... and `last` itself."""
    sizes: list[int] = []
    while first < last:
        sizes.append(first)
        first *= 2
    return [*sizes, last]
