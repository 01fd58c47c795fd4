"""The TPU kernels, compiled by the real compiler for one TPU that is not there. Needs libtpu: jpaged[tpu]."""

import json
import subprocess
import sys

import pytest

from tests.fakes.tiny_models import TINY_LLAMA

pytest.importorskip("libtpu", reason="the TPU compiler is not installed: pip install -e '.[tpu]'")
pytestmark = pytest.mark.slow


def run(*arguments: str) -> str:
    """In a process of its own: libtpu is loaded once, with one environment."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_kernels_compile_with_pages_in_place() -> None:
    lines = run("scripts/check_tpu_compile.py", "--topology", "v5e:1x1", "--small").splitlines()
    assert len(lines) == 2
    assert all("in place" in line for line in lines)


def test_whole_steps_of_a_tiny_model_compile_with_pages_in_place(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    options = "--max-num-seqs 8 --max-num-batched-tokens 16 --max-model-len 256 --tensor-parallel-size 2".split()
    out = run("-c", "from jpaged.cli import main; main()", "compile", str(tmp_path), "--topology", "v5e:2x2", *options)
    rows = [line.split() for line in out.splitlines() if "yes" in line or "NO" in line]
    assert len(rows) == 2
    assert all("yes" in row for row in rows)
