"""The demo model behind a server: what many read at once is what the engine says offline."""

import asyncio
import random

from jpaged import LLM, SamplingParams
from jpaged.client import AsyncClient, Client, Delta
from jpaged.engine.model_source import DEMO
from jpaged.request import TokensPrompt
from tests.serving.server_process import ServerProcess, wait_until_idle

NUM_STREAMS = 32
OPTIONS = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 32, "max_num_batched_tokens": 64, "num_pages": 400}
FLAGS = [word for name, value in OPTIONS.items() for word in (f"--{name.replace('_', '-')}", str(value))]
TEXTS = ["A page table is", "你好,世界。", "Once upon a time", "🙂🎉", "def fibonacci(n):", "The café on the corner"]


def test_32_concurrent_streams_equal_the_offline_tokens():
    llm = LLM(DEMO, **OPTIONS)
    assert llm.tokenizer is not None
    generator = random.Random(0)
    texts = [TEXTS[place % len(TEXTS)] * generator.randint(1, 4) for place in range(NUM_STREAMS)]
    prompts: list[TokensPrompt] = [{"prompt_token_ids": llm.tokenizer.encode(text)} for text in texts]
    params = [
        SamplingParams(temperature=0.0, max_tokens=generator.randint(8, 24), ignore_eos=True)
        for _ in range(NUM_STREAMS)
    ]
    offline = [output.outputs[0] for output in llm.generate(prompts, params)]

    async def one(client: AsyncClient, place: int) -> list[Delta]:
        prompt = texts[place] if place % 2 else prompts[place]
        return [delta async for delta in client.stream(prompt, params[place])]

    async def all_at_once(address: str) -> list[list[Delta]]:
        async with AsyncClient(address) as client:
            return await asyncio.gather(*(one(client, place) for place in range(NUM_STREAMS)))

    with ServerProcess(DEMO, *FLAGS) as server:
        server.wait_until_serving()
        streams = asyncio.run(all_at_once(server.address))
        with Client(server.address) as client:
            assert wait_until_idle(client).compilations_after_ready == 0
        server.terminate()
        assert server.wait() == 0

    assert [[token for delta in deltas for token in delta.token_ids] for deltas in streams] == [
        output.token_ids for output in offline
    ]
    assert ["".join(delta.text for delta in deltas) for deltas in streams] == [output.text for output in offline]
    for deltas, prompt, output in zip(streams, prompts, offline, strict=True):
        usage = deltas[-1].usage
        assert usage is not None
        assert (usage.prompt_tokens, usage.generated_tokens) == (len(prompt["prompt_token_ids"]), len(output.token_ids))
