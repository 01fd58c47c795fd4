"""Every status of the service's contract, from a running server that must outlive all of it."""

import asyncio
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import grpc
import pytest

from jpaged.client import AsyncClient, Client
from jpaged.params import SamplingParams
from jpaged.v1 import inference_pb2 as pb
from tests.serving.server_process import MAX_MESSAGE_BYTES, MODEL_NAME

PROMPT = pb.TokenIds(ids=[3, 4, 5])
LONG = SamplingParams(temperature=0.0, max_tokens=2300, ignore_eos=True)
GARBAGE = b"\xff\xff\xff"


def status_of(call: Callable[[], Any]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        answer = call()
        if isinstance(answer, Iterable):
            list(answer)
    return caught.value.code(), caught.value.details()  # type: ignore[attr-defined]


BAD_REQUESTS = {
    "no prompt": ({}, "prompt is not set"),
    "empty text": ({"text": ""}, "no tokens"),
    "empty ids": ({"token_ids": pb.TokenIds()}, "no tokens"),
    "empty chat": ({"chat": pb.Chat()}, "chat.messages is empty"),
    "id beyond the vocabulary": ({"token_ids": pb.TokenIds(ids=[3, 128])}, "prompt_token_ids holds 128.*0..127"),
    "negative id": ({"token_ids": pb.TokenIds(ids=[-1])}, "prompt_token_ids holds -1.*at least 0"),
    "too long": ({"token_ids": pb.TokenIds(ids=[3] * 4096)}, "4096 tokens, the limit is 4095"),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_a_bad_prompt_is_refused(stub, name):
    fields, message = BAD_REQUESTS[name]
    request = pb.GenerateRequest(**fields)
    for call in (stub.Generate, stub.GenerateStream):
        code, details = status_of(lambda call=call: call(request))
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert re.search(message, details)


SCHEMA = "structured_outputs.json_schema"
BAD_VALUES: list[tuple[str, Any, str]] = [
    ("n", 0, "n is 0, it must be a whole number of at least 1"),
    ("temperature", -0.5, "temperature is -0.5, it must be at least 0"),
    ("temperature", math.nan, "temperature is nan"),
    ("temperature", math.inf, "temperature is inf"),
    ("temperature", 2e6, "temperature is 2000000.0, it must be at least 0 and at most 1e+06"),
    ("top_p", 0.0, "top_p is 0.0, it must be above 0 and at most 1"),
    ("top_p", 1.5, "top_p is 1.5"),
    ("min_p", -0.1, "min_p is -0.1, it must be at least 0 and at most 1"),
    ("top_k", -2, "top_k is -2, it must be a whole number of at least -1"),
    ("presence_penalty", 2.5, "presence_penalty is 2.5, it must be at least -2 and at most 2"),
    ("frequency_penalty", -2.5, "frequency_penalty is -2.5, it must be at least -2 and at most 2"),
    ("repetition_penalty", 0.0, "repetition_penalty is 0.0, it must be above 0 and at most 1000"),
    ("repetition_penalty", math.nan, "repetition_penalty is nan"),
    ("logit_bias", {3: 2e4}, "logit_bias[3] is 20000.0, it must be at least -10000 and at most 10000"),
    ("logit_bias", {3: math.nan}, "logit_bias[3] is nan"),
    ("logit_bias", {-1: 1.0}, "logit_bias holds -1, token ids are at least 0"),
    ("logit_bias", {128: 1.0}, "logit_bias holds 128, the vocabulary has ids 0..127"),
    ("logit_bias", dict.fromkeys(range(1025), 1.0), "logit_bias holds 1025 ids, at most 1024 are possible"),
    ("allowed_token_ids", [-1], "allowed_token_ids holds -1"),
    ("allowed_token_ids", [128], "allowed_token_ids holds 128, the vocabulary has ids 0..127"),
    ("bad_words", [""], "bad_words holds an empty text"),
    ("bad_words", ["a"] * 129, "bad_words holds 129 words, at most 128 are possible"),
    ("bad_words", ["a" * 17], "which has 17 tokens, the limit is 16"),
    ("max_tokens", 0, "max_tokens is 0, it must be a whole number of at least 1"),
    ("max_tokens", -2, "max_tokens is -2"),
    ("min_tokens", -1, "min_tokens is -1, it must be a whole number of at least 0"),
    ("min_tokens", 17, "min_tokens is 17, it must be at most max_tokens, which is 16"),
    ("stop", [""], "stop holds an empty text"),
    ("stop", ["a"] * 65, "stop holds 65 texts of up to 1 characters, at most 64 of up to 4096 are possible"),
    ("stop", ["a" * 4097], "stop holds 1 texts of up to 4097 characters"),
    ("stop_token_ids", [-1], "stop_token_ids holds -1"),
    ("stop_token_ids", [128], "stop_token_ids holds 128, the vocabulary has ids 0..127"),
    ("stop_token_ids", [3] * 129, "stop_token_ids holds 129 ids, at most 128 are possible"),
    ("logprobs", -2, "logprobs is -2, it must be a whole number of at least -1"),
    ("logprobs", 129, "logprobs is 129, it must be at most the vocabulary's 128"),
    ("prompt_logprobs", -2, "prompt_logprobs is -2"),
    ("prompt_logprobs", 129, "prompt_logprobs is 129, it must be at most the vocabulary's 128"),
    ("output_kind", 9, "output_kind is 9"),
    ("truncate_prompt_tokens", 0, "truncate_prompt_tokens is 0, it must be -1 or at least 1"),
    ("truncate_prompt_tokens", -2, "truncate_prompt_tokens is -2"),
    ("priority", 1, 'priority is 1, but the engine serves by "fcfs"'),
    ("structured_outputs", pb.StructuredOutputs(), "structured_outputs sets nothing; set exactly one of"),
    ("structured_outputs", pb.StructuredOutputs(json_schema="{"), f"{SCHEMA} cannot be compiled: it is not JSON"),
    ("structured_outputs", pb.StructuredOutputs(json_schema='{"type": "x"}'), f"{SCHEMA} cannot be compiled: "),
    ("structured_outputs", pb.StructuredOutputs(regex="("), "structured_outputs.regex cannot be compiled: "),
    ("structured_outputs", pb.StructuredOutputs(choice=pb.Choices()), "structured_outputs.choice is empty"),
    ("structured_outputs", pb.StructuredOutputs(grammar="?"), "structured_outputs.grammar cannot be compiled: "),
]
# Fields of which every value that the wire can hold is one that is possible.
WITHOUT_BAD_VALUES = {
    *("seed", "include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens", "cache_salt"),
    *("spaces_between_special_tokens", "skip_reading_prefix_cache"),
}


def test_every_field_with_a_limit_is_in_the_table():
    assert {field for field, _, _ in BAD_VALUES} | WITHOUT_BAD_VALUES == set(
        pb.SamplingParams.DESCRIPTOR.fields_by_name
    )


@pytest.mark.parametrize(("field", "value", "message"), BAD_VALUES, ids=lambda value: str(value)[:30])
def test_a_parameter_out_of_range_is_refused_with_its_name_value_and_range(stub, field, value, message):
    request = pb.GenerateRequest(token_ids=PROMPT, sampling=pb.SamplingParams(**{field: value}))
    for call in (stub.Generate, stub.GenerateStream):
        code, details = status_of(lambda call=call: call(request))
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert message in details


def test_parameters_that_contradict_each_other_are_refused(stub):
    sampling = pb.SamplingParams(stop=["a"], detokenize=False)
    code, details = status_of(lambda: stub.Generate(pb.GenerateRequest(token_ids=PROMPT, sampling=sampling)))
    assert code == grpc.StatusCode.INVALID_ARGUMENT and "stop is set, but detokenize is false" in details


def test_a_field_that_the_server_does_not_know_is_refused(channel):
    unknown = b"\xa8\x3f\x2a"  # field 1013 is 42
    request = pb.GenerateRequest(token_ids=PROMPT).SerializeToString() + unknown
    code, details = status_of(lambda: channel.unary_unary("/jpaged.v1.Inference/Generate")(request))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert "does not know, of the numbers 1013" in details


def test_a_request_that_never_fits_is_told_so(client, stub):
    request = pb.GenerateRequest(token_ids=PROMPT, sampling=pb.SamplingParams(max_tokens=3000))
    for call in (stub.Generate, stub.GenerateStream):
        code, details = status_of(lambda call=call: call(request))
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "the pool has 600" in details and "lower max_tokens" in details
    # Without a limit of its own it gets what the pool holds.
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    answer = client.generate({"prompt_token_ids": [3] * 2390}, params)
    assert (answer.usage.generated_tokens, answer.outputs[0].finish_reason) == (11, "length")


def test_an_unknown_model_is_not_found(stub):
    requests = {
        stub.Generate: pb.GenerateRequest(model="other", token_ids=PROMPT),
        stub.GenerateStream: pb.GenerateRequest(model="other", token_ids=PROMPT),
        stub.Tokenize: pb.TokenizeRequest(model="other", text="a"),
        stub.Detokenize: pb.DetokenizeRequest(model="other", token_ids=[3]),
        stub.GetModelInfo: pb.GetModelInfoRequest(model="other"),
    }
    for call, request in requests.items():
        code, details = status_of(lambda call=call, request=request: call(request))
        assert code == grpc.StatusCode.NOT_FOUND
        assert "'other'" in details and f"'{MODEL_NAME}'" in details
    request = pb.GenerateRequest(model=MODEL_NAME, token_ids=PROMPT)
    assert stub.Generate(request).usage.prompt_tokens == 3


def test_abort_ends_a_call_with_cancelled(server, client):
    async def abort_both() -> None:
        async with AsyncClient(server.address) as aborter:
            stream = aborter.stream({"prompt_token_ids": [3]}, LONG, request_id="streamed")
            unary = asyncio.create_task(aborter.generate({"prompt_token_ids": [3]}, LONG, request_id="whole"))
            assert (await anext(stream)).token_ids
            while not await aborter.abort("whole"):
                assert not unary.done()
            assert await aborter.abort("streamed")
            for call in (unary, drain(stream)):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
                assert caught.value.code() == grpc.StatusCode.CANCELLED
                assert "was aborted" in (caught.value.details() or "")
            assert not await aborter.abort("streamed")

    asyncio.run(abort_both())
    code, details = status_of(lambda: client.abort(""))
    assert code == grpc.StatusCode.INVALID_ARGUMENT and "request_id is empty" in details


async def drain(stream) -> None:
    async for _ in stream:
        pass


def test_an_id_in_use_is_refused_and_free_again_afterwards(client):
    stream = client.stream({"prompt_token_ids": [3]}, LONG, request_id="mine")
    next(stream)
    code, details = status_of(lambda: client.generate({"prompt_token_ids": [3]}, request_id="mine"))
    assert code == grpc.StatusCode.INVALID_ARGUMENT and "'mine' is in use" in details
    assert client.abort("mine")
    with pytest.raises(grpc.RpcError):
        list(stream)
    assert client.generate({"prompt_token_ids": [3]}, request_id="mine").request_id == "mine"


def test_tokenize_and_detokenize_refuse_what_they_cannot_do(stub):
    code, details = status_of(lambda: stub.Tokenize(pb.TokenizeRequest()))
    assert code == grpc.StatusCode.INVALID_ARGUMENT and "input is not set" in details
    code, details = status_of(lambda: stub.Tokenize(pb.TokenizeRequest(chat=pb.Chat())))
    assert code == grpc.StatusCode.INVALID_ARGUMENT and "chat.messages is empty" in details
    for bad in (-1, 128):
        code, details = status_of(lambda bad=bad: stub.Detokenize(pb.DetokenizeRequest(token_ids=[3, bad])))
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert f"token_ids holds {bad}, the vocabulary has ids 0..127" in details


@pytest.mark.parametrize("method", ["Generate", "GenerateStream", "Tokenize", "GetServerInfo", "Abort"])
def test_bytes_that_are_no_message_are_refused(channel, method):
    path = f"/jpaged.v1.Inference/{method}"
    call = channel.unary_stream(path) if method == "GenerateStream" else channel.unary_unary(path)
    code, details = status_of(lambda: call(GARBAGE))
    assert code == grpc.StatusCode.INVALID_ARGUMENT and "no valid message" in details


def test_a_message_over_the_limit_is_refused(channel):
    for call in (
        channel.unary_unary("/jpaged.v1.Inference/Generate"),
        channel.unary_stream("/jpaged.v1.Inference/GenerateStream"),
    ):
        code, details = status_of(lambda call=call: call(b"\x0a" * (MAX_MESSAGE_BYTES + 1)))
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert f"{MAX_MESSAGE_BYTES + 1} vs. {MAX_MESSAGE_BYTES}" in details


def test_an_unknown_method_is_unimplemented(channel):
    code, _ = status_of(lambda: channel.unary_unary("/jpaged.v1.Inference/Nothing")(b""))
    assert code == grpc.StatusCode.UNIMPLEMENTED


def test_a_bad_request_leaves_the_others_alone(server, client: Client):
    """Fault 19: an oversize request must not end the ones beside it."""
    prompt, params = {"prompt_token_ids": [3, 4]}, SamplingParams(temperature=0.0, max_tokens=600, ignore_eos=True)
    expected = client.generate(prompt, params).outputs[0].token_ids  # type: ignore[arg-type]
    stream = client.stream(prompt, params)  # type: ignore[arg-type]
    token_ids = next(stream).token_ids
    for bad in ([], [-1], [3] * 4096):
        code, _ = status_of(lambda bad=bad: client.generate({"prompt_token_ids": bad}))
        assert code == grpc.StatusCode.INVALID_ARGUMENT
    code, _ = status_of(lambda: client.generate({"prompt_token_ids": [3]}, SamplingParams(max_tokens=3000)))
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert token_ids + [token for delta in stream for token in delta.token_ids] == expected


def test_the_log_has_one_line_for_each_request_without_its_text(server, client):
    client.generate("secret", SamplingParams(max_tokens=3, ignore_eos=True), request_id="two\nlines")
    [line] = server.wait_for_log(r"request 'two\\nlines': (.*)")
    assert line[1].startswith("OK, 6 prompt tokens, 3 generated, ")
    assert "secret" not in server.log
