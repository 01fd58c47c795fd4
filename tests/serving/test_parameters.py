"""Fault 11: no parameter is silently ignored. Each changes what comes back over gRPC, or is refused."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import grpc
import pytest

from jpaged.client import AsyncClient, Client
from jpaged.params import SamplingParams, StructuredOutputs
from jpaged.request import CompletionOutput
from jpaged.v1 import inference_pb2 as pb
from tests.engine.tokenizer_builds import word_level_backend
from tests.fakes.tiny_models import TINY_LLAMA, write_random_checkpoint
from tests.serving.server_process import ServerProcess

PROMPT = "a page table"  # three full pages
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True)
HOT = SamplingParams(temperature=3.0, seed=3, max_tokens=60, ignore_eos=True)  # penalties outweigh what is likely
SPECIAL_ID, EOS_ID = 1, 2  # <s>, </s>


def a_letter(output: CompletionOutput) -> str:
    """One that a token of its own has written."""
    return next(chr(ord("a") + token_id - 3) for token_id in output.token_ids if 3 <= token_id <= 28)


def always(token_id: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=12, logit_bias={token_id: 1000.0})


@dataclass(frozen=True)
class Case:
    """`value` of a field changes what `base` gives; either may depend on what plain greedy decoding gives."""

    value: Any
    base: SamplingParams | Callable[[CompletionOutput], SamplingParams] = GREEDY


CASES = {
    "temperature": Case(3.0, DRAWN),
    "top_p": Case(0.01, DRAWN),
    "top_k": Case(1, DRAWN),
    "min_p": Case(1.0, DRAWN),
    "seed": Case(4, DRAWN),
    "n": Case(2, DRAWN),
    "presence_penalty": Case(2.0, HOT),
    "frequency_penalty": Case(2.0, HOT),
    "repetition_penalty": Case(9.0, HOT),
    "logit_bias": Case({70: 1000.0}),
    "allowed_token_ids": Case((5, 6)),
    "bad_words": Case(lambda plain: (a_letter(plain),)),
    "structured_outputs": Case(StructuredOutputs(regex="[abc]{3}")),
    "max_tokens": Case(5),
    "min_tokens": Case(5, always(EOS_ID)),
    "stop": Case(lambda plain: (a_letter(plain),)),
    "include_stop_str_in_output": Case(True, lambda plain: replace(GREEDY, stop=(a_letter(plain),))),
    "stop_token_ids": Case(lambda plain: (plain.token_ids[2],)),
    "ignore_eos": Case(True, always(EOS_ID)),
    "logprobs": Case(0),
    "prompt_logprobs": Case(0),
    "detokenize": Case(False),
    "skip_special_tokens": Case(False, always(SPECIAL_ID)),
    "output_kind": Case("cumulative"),
    "truncate_prompt_tokens": Case(3),
    "cache_salt": Case("salt"),
    "skip_reading_prefix_cache": Case(True),
}
# The engine of this server does not serve by priority, and its tokenizer puts no spaces between tokens: for the two
# there is a server of their own below.
REFUSED = {"priority": 1}
ELSEWHERE = {"spaces_between_special_tokens"}


def observe(client: Client, params: SamplingParams) -> tuple[Any, ...]:
    """All that users see of a request, whole and streamed."""
    answer = client.generate(PROMPT, params)
    streamed = [
        (delta.index, delta.text, delta.token_ids, delta.logprobs, delta.prompt_logprobs)
        for delta in client.stream(PROMPT, params)
    ]
    return answer.outputs, answer.prompt_logprobs, answer.usage, streamed


def test_every_field_is_in_the_table():
    assert CASES.keys() | REFUSED.keys() | ELSEWHERE == set(pb.SamplingParams.DESCRIPTOR.fields_by_name)


@pytest.fixture(scope="module")
def plain(shared_server) -> CompletionOutput:
    with Client(shared_server.address) as client:
        return client.generate(PROMPT, GREEDY).outputs[0]


@pytest.mark.parametrize("field", CASES)
def test_a_field_changes_what_comes_back(client, plain, field):
    case = CASES[field]
    base = case.base if isinstance(case.base, SamplingParams) else case.base(plain)
    value = case.value(plain) if callable(case.value) else case.value
    client.generate(PROMPT, base)  # from here on the prompt is cached
    before = observe(client, base)
    assert observe(client, base) == before
    after = observe(client, replace(base, **{field: value}))
    assert after != before
    # No more than that: the same request still gives the same.
    assert observe(client, base) == before


@pytest.mark.parametrize("field", REFUSED)
def test_a_field_that_cannot_be_honoured_is_refused(client, field):
    with pytest.raises(grpc.RpcError) as caught:
        client.generate(PROMPT, replace(GREEDY, **{field: REFUSED[field]}))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
    assert f"{field} is {REFUSED[field]}" in caught.value.details()  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def other_server(tmp_path_factory) -> Iterator[ServerProcess]:
    """One row, by priority; a tokenizer of words."""
    path = tmp_path_factory.mktemp("words") / "model"
    backend = word_level_backend()
    write_random_checkpoint(TINY_LLAMA | {"vocab_size": 8, "eos_token_id": backend.token_to_id("</s>")}, path)
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text("{}")
    options = "--dtype float32 --max-num-seqs 1 --max-num-batched-tokens 16 --page-size 4 --num-pages 200"
    with ServerProcess(path, *options.split(), "--policy", "priority") as server:
        server.wait_until_serving()
        yield server


def test_spaces_between_special_tokens(other_server):
    params = SamplingParams(temperature=0.0, max_tokens=3, logit_bias={3: 1000.0}, skip_special_tokens=False)
    with Client(other_server.address) as client:
        assert client.generate("red", params).outputs[0].text.strip() == "<s> <s> <s>"
        touching = replace(params, spaces_between_special_tokens=False)
        assert client.generate("red", touching).outputs[0].text.strip() == "<s><s><s>"


def test_priority(other_server):
    """Of two that wait for the one row, the later and more urgent one goes first."""
    params = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)

    async def run() -> list[str]:
        order: list[str] = []

        async def read(client: AsyncClient, name: str, params: SamplingParams) -> None:
            async for _ in client.stream("green", params, request_id=name):
                if name not in order:
                    order.append(name)

        async with AsyncClient(other_server.address) as client, asyncio.TaskGroup() as group:
            group.create_task(read(client, "running", params))
            while not order:
                await asyncio.sleep(0)
            for waiting, (name, priority) in enumerate((("later", 5), ("urgent", -5)), 1):
                brief = replace(params, max_tokens=2, priority=priority)
                group.create_task(read(client, name, brief))
                while (await client.server_info()).rows_waiting < waiting and "later" not in order:
                    await asyncio.sleep(0)
        return order

    assert asyncio.run(run()) == ["running", "urgent", "later"]
