"""Tiny engines, made once a module: each costs a few seconds of compilation the first time and little after that."""

from functools import cache
from pathlib import Path

import pytest

from jpaged import LLM
from tests.fakes.tiny_models import TINY_LLAMA, TINY_OPT, TINY_OPTIONS, write_random_checkpoint

CONFIGS = {"llama": TINY_LLAMA, "opt": TINY_OPT}


@pytest.fixture(scope="session")
def tiny_dirs(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: write_random_checkpoint(config, root / name) for name, config in CONFIGS.items()}


@pytest.fixture(scope="module")
def make_llm(tiny_dirs):
    """make_llm(name="llama", **options): a float32 engine with few buckets; the same options give the same engine."""

    @cache
    def make(name: str = "llama", **options) -> LLM:
        return LLM(str(tiny_dirs[name]), **(TINY_OPTIONS | options))

    return make
