"""Reads the safetensors files of a checkpoint directory, one tensor at a time."""

import json
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy, which safetensors looks up by name)
import numpy as np

from jpaged.errors import ModelError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_DTYPES = ("F32", "BF16", "F16")


class SafetensorsCheckpoint:
    """A context manager over the file, or the sharded files, of one directory. `shapes` maps names to shapes."""

    def __init__(self, model_dir: Path):
        """Opens every file and reads the headers; raises ModelError for anything unreadable."""
        from safetensors import SafetensorError, safe_open

        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: list[Any] = []
        self._owner: dict[str, Any] = {}
        self._errors = (SafetensorError, OSError, ValueError, KeyError, TypeError)
        expected = _expected_names(model_dir)
        try:
            for path, names in expected.items():
                try:
                    file = safe_open(str(path), framework="np")
                    self._files.append(file)
                    self._read_header(file, path, names)
                except FileNotFoundError:
                    raise ModelError(f"{path} does not exist, but {INDEX_FILE} names it; copy it again") from None
                except self._errors as error:
                    raise ModelError(
                        f"{path} is not a complete safetensors file ({error}); copy or download it again"
                    ) from error
        except BaseException:
            self.close()
            raise

    def _read_header(self, file: Any, path: Path, names: set[str] | None) -> None:
        present = set(file.keys())
        if names is not None and present != names:
            raise ModelError(
                f"{INDEX_FILE} and {path.name} disagree: only in the index {sorted(names - present)}, "
                f"only in the file {sorted(present - names)}; copy or download both again"
            )
        for name in sorted(present):
            tensor = file.get_slice(name)
            if tensor.get_dtype() not in _DTYPES:
                raise ModelError(
                    f"{name} in {path} is {tensor.get_dtype()}; jpaged reads {', '.join(_DTYPES)} and no "
                    "quantised checkpoints"
                )
            if name in self._owner:
                raise ModelError(f"{name} is in two files of {path.parent}; remove the one that does not belong")
            self.shapes[name] = tuple(tensor.get_shape())
            self._owner[name] = file

    def read(self, name: str) -> np.ndarray:
        """The tensor, in the dtype it was stored in."""
        try:
            return self._owner[name].get_tensor(name)
        except self._errors as error:
            raise ModelError(f"{name} cannot be read ({error}); copy or download the checkpoint again") from error

    def close(self) -> None:
        """Unmaps the files."""
        self._files.clear()
        self._owner.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _expected_names(model_dir: Path) -> dict[Path, set[str] | None]:
    """File -> the tensors that the index says it holds, or None where there is no index."""
    single, index_path = model_dir / SINGLE_FILE, model_dir / INDEX_FILE
    if single.exists():
        return {single: None}
    try:
        weight_map = json.loads(index_path.read_text())["weight_map"]
        files: dict[Path, set[str] | None] = {}
        for name, file_name in weight_map.items():
            if Path(file_name).name != file_name:
                raise ValueError(f"{file_name!r} is not a plain file name")
            names = files.setdefault(model_dir / file_name, set())
            assert names is not None
            names.add(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index_path} is not a safetensors index ({error!r}); copy or download it again") from error
    return files
