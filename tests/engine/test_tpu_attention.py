"""The engine with the TPU's attention, run by the TPU interpreter: the same tokens as with XLA's."""

from typing import Any

import pytest
from jax.experimental.pallas import tpu as pltpu

from jpaged import LLM, SamplingParams
from jpaged.engine import startup
from jpaged.request import TokensPrompt
from pallas_kernels.paged_attention.tpu import TpuPagedAttention
from tests.fakes.tiny_models import TINY_LLAMA, write_random_checkpoint

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 24,
    "max_model_len": 128,
    "page_size": 16,
    "num_pages": 32,
    "tensor_parallel_size": 2,
}


@pytest.mark.slow
@pytest.mark.matrix
def test_tokens_are_those_of_the_xla_implementation(tmp_path, monkeypatch) -> None:
    model = str(write_random_checkpoint(TINY_LLAMA, tmp_path / "model"))
    prompts: list[TokensPrompt] = [
        {"prompt_token_ids": [(7 * i + j) % 120 + 3 for j in range(length)]} for i, length in enumerate((3, 40, 17))
    ]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)

    def generate() -> list[list[int]]:
        llm = LLM(model, **OPTIONS)
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]

    expected = generate()
    attention = TpuPagedAttention(interpret=pltpu.InterpretParams())
    monkeypatch.setattr(startup, "choose", lambda *_, **__: (attention, "for the test"))
    assert generate() == expected
