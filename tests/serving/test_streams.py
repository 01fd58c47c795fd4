"""Streams say the same as whole answers and as the offline engine, whoever else is there and however slowly they are
read."""

import asyncio
import random
from dataclasses import replace
from typing import Any

import grpc
import pytest

from jpaged import LLM
from jpaged.client import AsyncClient, Delta
from jpaged.engine.tokenizer import load_tokenizer
from jpaged.params import SamplingParams
from jpaged.request import TokensPrompt
from jpaged.serving.messages import write_chat
from jpaged.v1 import inference_pb2 as pb
from jpaged.v1.inference_pb2_grpc import InferenceStub
from tests.serving.server_process import SLOW_CONNECTION, SMALL_OPTIONS, wait_until_idle

SPLIT = ("é", "🙂")  # characters that take two tokens of the tiny model


@pytest.fixture(scope="module")
def tokenizer(model_dir):
    return load_tokenizer(model_dir)


def drawn(seed: int, max_tokens: int = 120) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=max_tokens, ignore_eos=True)


def token_ids_of(deltas: list[Delta]) -> list[int]:
    return [token_id for delta in deltas for token_id in delta.token_ids]


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


@pytest.mark.parametrize("seed", range(4))
def test_deltas_join_to_the_whole_answer(client, tokenizer, seed):
    """Fault 5: also where a character's bytes are spread over tokens."""
    answer = client.generate("a é b", drawn(seed))
    deltas = list(client.stream("a é b", drawn(seed)))
    [output] = answer.outputs
    assert (text_of(deltas), token_ids_of(deltas)) == (output.text, output.token_ids)
    assert output.text == client.detokenize(output.token_ids)
    assert sum(map(output.text.count, SPLIT)) > 3
    # U+FFFD stands only for what never became a character.
    assert sum(delta.text.count("\ufffd") for delta in deltas) == tokenizer.decode(output.token_ids).count("\ufffd")
    for delta in deltas:
        delta.text.encode("utf-8")
        assert delta.request_id == deltas[0].request_id and delta.index == 0
        assert (delta.usage is None, delta.finish_reason is None) == (delta is not deltas[-1],) * 2
    assert (deltas[-1].finish_reason, deltas[-1].usage) == ("length", replace(answer.usage, cached_tokens=4))
    assert (answer.usage.prompt_tokens, answer.usage.generated_tokens) == (len(tokenizer.encode("a é b")), 120)


def test_a_prompt_that_ends_inside_a_character_is_not_repeated(client, tokenizer):
    half = tokenizer.encode("aé")[:-1]  # "a" and the first byte of é
    completed = 0
    for seed in range(24):
        deltas = list(client.stream({"prompt_token_ids": half}, drawn(seed, max_tokens=8)))
        output = b"".join(map(tokenizer.token_bytes, tokenizer.kept(token_ids_of(deltas), skip_special_tokens=True)))
        completes = output.startswith(b"\xa9")
        completed += completes
        expected = (b"\xc3" + output if completes else output).decode(errors="replace")
        [whole] = client.generate({"prompt_token_ids": half}, drawn(seed, max_tokens=8)).outputs
        assert text_of(deltas) == expected == whole.text
    assert 0 < completed < 24


def test_text_chat_and_token_prompts_are_the_same_request(client, stub, tokenizer):
    messages = [{"role": "user", "content": "né"}]
    token_ids = tokenizer.apply_chat_template(messages)
    assert token_ids == tokenizer.encode("user né ")
    chat = pb.Chat(messages=[pb.ChatMessage(**message) for message in messages])
    assert list(stub.Tokenize(pb.TokenizeRequest(chat=chat)).token_ids) == token_ids
    assert client.tokenize("user né ") == token_ids
    answers = [
        client.generate(prompt, drawn(5)).outputs for prompt in (messages, "user né ", {"prompt_token_ids": token_ids})
    ]
    assert answers[0] == answers[1] == answers[2]


def test_tools_and_variables_reach_the_template(server, client, stub, tokenizer):
    messages: list[dict[str, Any]] = [{"role": "user", "content": "né"}]
    chat: dict[str, Any] = {
        "tools": [{"type": "function", "function": {"name": "now"}}, {"function": {"name": "here"}}],
        "chat_template_kwargs": {"ending": "well"},
    }
    rendered = "now here user né well"
    tokens = stub.Tokenize(pb.TokenizeRequest(chat=write_chat(messages, **chat))).token_ids
    assert list(tokens) == tokenizer.encode(rendered)
    expected = client.generate(rendered, drawn(5)).outputs
    assert client.generate(messages, drawn(5), **chat).outputs == expected
    assert text_of(list(client.stream(messages, drawn(5), **chat))) == expected[0].text

    async def run() -> tuple[list, str]:
        async with AsyncClient(server.address) as client:
            deltas = [delta async for delta in client.stream(messages, drawn(5), **chat)]
            return (await client.generate(messages, drawn(5), **chat)).outputs, text_of(deltas)

    assert asyncio.run(run()) == (expected, expected[0].text)


def test_zero_is_not_unset(stub):
    def tokens(sampling: pb.SamplingParams | None) -> list[int]:
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[3, 4]), sampling=sampling)
        return list(stub.Generate(request).completions[0].token_ids)

    greedy = pb.SamplingParams(temperature=0.0, ignore_eos=True)
    assert tokens(greedy) == tokens(greedy)
    assert len(tokens(greedy)) == 16  # the default of max_tokens
    assert len({tuple(tokens(pb.SamplingParams(ignore_eos=True))) for _ in range(4)}) == 4  # that of temperature is 1
    assert tokens(pb.SamplingParams(seed=0)) == tokens(pb.SamplingParams(seed=0))


def test_what_ends_a_sequence_is_reported(client):
    prompt: TokensPrompt = {"prompt_token_ids": [3, 4, 5]}
    [free] = client.generate(prompt, drawn(1, max_tokens=40)).outputs
    place = next(place for place in range(5, 40) if free.token_ids[place] not in free.token_ids[:place])
    stop = free.token_ids[place]
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=40, ignore_eos=True, stop_token_ids=(stop,))
    [stopped] = client.generate(prompt, params).outputs
    last = list(client.stream(prompt, params))[-1]
    assert stopped.token_ids == free.token_ids[: place + 1]
    for end in (stopped, last):
        assert (end.finish_reason, end.stop_reason) == ("stop", stop)


def test_32_concurrent_streams_equal_the_offline_tokens(server, model_dir):
    generator = random.Random(0)
    prompts: list[TokensPrompt] = [
        {"prompt_token_ids": [generator.randrange(3, 128) for _ in range(generator.randint(1, 60))]} for _ in range(32)
    ]
    params = [
        SamplingParams(temperature=place % 2, seed=place, max_tokens=10 + place, ignore_eos=True) for place in range(32)
    ]
    offline = LLM(str(model_dir), **SMALL_OPTIONS).generate(prompts, params)

    async def one(client: AsyncClient, place: int) -> list[Delta]:
        return [delta async for delta in client.stream(prompts[place], params[place])]

    async def all_at_once() -> list[list[Delta]]:
        async with AsyncClient(server.address) as client:
            return await asyncio.gather(*(one(client, place) for place in range(32)))

    streams = asyncio.run(all_at_once())
    assert [token_ids_of(deltas) for deltas in streams] == [output.outputs[0].token_ids for output in offline]
    assert [text_of(deltas) for deltas in streams] == [output.outputs[0].text for output in offline]


@pytest.fixture
def slow_channel(server):
    with grpc.insecure_channel(server.address, options=SLOW_CONNECTION) as channel:
        yield channel


def slow_request(max_tokens: int) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(temperature=1.0, seed=7, max_tokens=max_tokens, ignore_eos=True)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=[3, 4]), sampling=sampling)


def test_a_slow_reader_delays_nobody_and_gets_everything(client, slow_channel):
    call = InferenceStub(slow_channel).GenerateStream(slow_request(2000))
    messages = [next(call)]
    # It reads no more; the engine finishes it all the same, and answers others.
    assert client.generate("a", drawn(0)).usage.generated_tokens == 120
    wait_until_idle(client)
    messages += call
    whole = client.generate({"prompt_token_ids": [3, 4]}, drawn(7, max_tokens=2000)).outputs[0]
    assert [token_id for message in messages for token_id in message.delta.token_ids] == whole.token_ids
    assert "".join(message.delta.text for message in messages) == whole.text
    assert messages[-1].usage.generated_tokens == 2000
    assert len(messages) < 500  # what piled up was merged


def test_a_stalled_reader_that_goes_away_leaves_nothing_behind(server, client, slow_channel):
    request = slow_request(2300)
    request.request_id = "stalled"
    call = InferenceStub(slow_channel).GenerateStream(request)
    next(call)
    slow_channel.close()
    server.wait_for_log("request 'stalled': CANCELLED")
    wait_until_idle(client)
