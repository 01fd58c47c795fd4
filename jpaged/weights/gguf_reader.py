"""Reads GGUF files: metadata as plain Python values, tensors dequantised to float32 a few rows at a time.

The parsing and the dequantisation are the `gguf` package's. What is added here: tensors never come into memory whole,
and a broken file is a ModelError that says what is wrong with it, never a traceback from inside the parser.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, dequantize

from jpaged.errors import ModelError

GGUF_MAGIC = b"GGUF"
CHUNK_BYTES = 32 * 1024 * 1024  # of float32: what a conversion holds in memory at a time


@dataclass(frozen=True)
class GgufTensor:
    """One stored tensor. `shape` is in checkpoint (row-major) order; `data` is the mapped file: [rows, row bytes] for
    quantised types, `shape` for plain ones."""

    name: str
    shape: tuple[int, ...]
    storage: GGMLQuantizationType
    data: np.ndarray

    def float32_chunks(
        self, row_order: np.ndarray | None = None, chunk_bytes: int = CHUNK_BYTES
    ) -> Iterator[np.ndarray]:
        """The values as float32, in pieces along the first axis that join to `shape`; at least one row a piece.

        `row_order` says which stored row each row of the result is. Rows are reordered before they are dequantised,
        which is sound because quantisation blocks never cross a row.
        Raises ModelError for a storage type that cannot be dequantised.
        """
        num_rows = self.shape[0]
        row_bytes = 4 * int(np.prod(self.shape[1:], dtype=np.int64))
        step = max(1, chunk_bytes // max(1, row_bytes)) if len(self.shape) > 1 else num_rows
        for start in range(0, num_rows, step):
            rows = slice(start, start + step) if row_order is None else row_order[start : start + step]
            try:
                values = dequantize(np.asarray(self.data[rows]), self.storage)
            except NotImplementedError as error:
                raise ModelError(
                    f"tensor {self.name} is stored as {self.storage.name}, which cannot be dequantised here; "
                    "use a file quantised as Q4_0 to Q8_0, Q2_K to Q6_K, IQ*, F16, BF16 or F32"
                ) from error
            yield values.astype(np.float32, copy=False)


@dataclass(frozen=True)
class GgufFile:
    """A parsed GGUF file: metadata by key, tensors by their stored name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """Parses the header of `path`; tensor data stays on disk until it is asked for.

    Raises ModelError when the file is missing, is no GGUF file, is cut short, is one part of several, or has the
    byte order of another machine.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(len(GGUF_MAGIC))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}; check the path and its permissions") from error
    if magic != GGUF_MAGIC:
        raise ModelError(
            f"{path} is not a GGUF file: it starts with {magic!r}, expected {GGUF_MAGIC!r}; check the path"
        )
    try:
        reader = GGUFReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
        tensors = {
            tensor.name: GgufTensor(
                name=tensor.name,
                shape=tuple(int(size) for size in reversed(tensor.shape)),
                storage=tensor.tensor_type,
                data=tensor.data,
            )
            for tensor in reader.tensors
        }
    except (ValueError, KeyError, IndexError, OverflowError, TypeError) as error:
        # The parser reads past the end of a cut file and fails wherever that first hurts.
        raise ModelError(
            f"{path} ({path.stat().st_size} bytes) is damaged or cut short: {error}; download or copy it again"
        ) from error
    if reader.byte_order != "I":
        raise ModelError(f"{path} has the byte order of another machine; convert it to little-endian GGUF")
    if metadata.get("split.count", 0) > 1:
        raise ModelError(
            f"{path} is one of {metadata['split.count']} parts of a split GGUF file; merge the parts first "
            "(llama-gguf-split --merge)"
        )
    return GgufFile(path, metadata, tensors)
