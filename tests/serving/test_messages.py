"""What crosses the wire comes out as it went in."""

import math
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.errors import InvalidRequestError
from jpaged.params import (
    MAX_BEAM_WIDTH,
    MAX_LOGIT_BIAS,
    MAX_REPETITION_PENALTY,
    MAX_SEED,
    OUTPUT_KINDS,
    BeamSearchParams,
    SamplingParams,
    StructuredOutputs,
)
from jpaged.request import CompletionOutput, Logprob, OutputDelta, RequestOutput, RequestTimes, TokenLogprobs
from jpaged.serving.messages import (
    read_chat,
    read_completion,
    read_prompt,
    read_prompt_logprobs,
    write_chat,
    write_delta,
    write_output,
    write_prompt,
)
from jpaged.serving.method_messages import read_beam_search, read_method, read_sampling, write_method, write_sampling
from jpaged.v1 import inference_pb2 as pb

texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
token_ids = st.integers(0, 2**31 - 1)
STRUCTURED = st.one_of(
    st.builds(StructuredOutputs, json_schema=st.dictionaries(texts, st.integers() | texts)),
    st.builds(StructuredOutputs, regex=texts),
    st.builds(StructuredOutputs, choice=st.lists(texts, min_size=1).map(tuple)),
    st.builds(StructuredOutputs, grammar=texts),
    st.just(StructuredOutputs(json_object=True)),
)
SHARED: dict[str, st.SearchStrategy] = {
    "max_tokens": st.none() | st.integers(100, 2**31 - 1),
    "ignore_eos": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "detokenize": st.booleans(),
    "priority": st.integers(-(2**31), 2**31 - 1),
    "cache_salt": texts | st.just(""),
    "skip_reading_prefix_cache": st.booleans(),
    "temperature": st.floats(0, 10),
}
SAMPLING = SHARED | {
    "n": st.integers(1, 2**31 - 1),
    "top_p": st.floats(0, 1, exclude_min=True),
    "top_k": st.integers(-1, 2**31 - 1),
    "min_p": st.floats(0, 1),
    "seed": st.none() | st.integers(0, MAX_SEED),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0, MAX_REPETITION_PENALTY, exclude_min=True),
    "logit_bias": st.none() | st.dictionaries(token_ids, st.floats(-MAX_LOGIT_BIAS, MAX_LOGIT_BIAS), min_size=1),
    "allowed_token_ids": st.none() | st.lists(token_ids, min_size=1).map(tuple),
    "bad_words": st.lists(texts).map(tuple),
    "structured_outputs": st.none() | STRUCTURED,
    "min_tokens": st.integers(0, 100),
    "stop": st.lists(texts).map(tuple),
    "stop_token_ids": st.lists(token_ids).map(tuple),
    "logprobs": st.none() | st.integers(-1, 2**31 - 1),
    "prompt_logprobs": st.none() | st.integers(-1, 2**31 - 1),
    "spaces_between_special_tokens": st.booleans(),
    "output_kind": st.sampled_from(OUTPUT_KINDS),
    "truncate_prompt_tokens": st.none() | st.just(-1) | st.integers(1, 2**31 - 1),
}
SEARCH = SHARED | {
    "beam_width": st.integers(1, MAX_BEAM_WIDTH),
    "length_penalty": st.floats(-10, 10),
    "early_stopping": st.sampled_from([True, False, "never"]),
}


def over_the_wire[M](message: M) -> M:
    return type(message).FromString(message.SerializeToString())  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("python", "wire", "strategies"),
    [
        (SamplingParams, pb.SamplingParams, SAMPLING),
        (BeamSearchParams, pb.BeamSearchParams, SEARCH),
    ],
)
def test_both_sides_have_the_same_fields_and_all_are_drawn_below(python, wire, strategies):
    names = {field.name for field in fields(python)}
    assert names == set(wire.DESCRIPTOR.fields_by_name) == set(strategies)


@settings(max_examples=300)
@given(st.fixed_dictionaries({}, optional=SAMPLING))
def test_sampling_parameters_come_back(values):
    if not values.get("detokenize", True):
        values.pop("stop", None)
    if values.get("min_tokens"):
        values["max_tokens"] = values.get("max_tokens", 100)
    params = SamplingParams(**values)
    request = pb.GenerateRequest()
    write_method(request, params)
    assert read_method(over_the_wire(request)) == params


@settings(max_examples=100)
@given(st.fixed_dictionaries({}, optional=SEARCH))
def test_search_parameters_come_back(values):
    params = BeamSearchParams(**{"beam_width": 2} | values)
    request = pb.GenerateRequest()
    write_method(request, params)
    assert read_method(over_the_wire(request)) == params


def test_unset_takes_the_default_and_zero_is_zero():
    assert read_sampling(pb.SamplingParams()) == SamplingParams()
    assert read_sampling(pb.SamplingParams(temperature=0.0)) == SamplingParams(temperature=0.0)
    assert read_sampling(pb.SamplingParams(logprobs=0)) == SamplingParams(logprobs=0)
    unspecified = pb.SamplingParams(output_kind=pb.OUTPUT_KIND_UNSPECIFIED)
    assert unspecified.HasField("output_kind") and read_sampling(unspecified) == SamplingParams()
    assert read_beam_search(pb.BeamSearchParams(beam_width=2)) == BeamSearchParams(beam_width=2)
    assert read_method(pb.GenerateRequest()) == SamplingParams()


@pytest.mark.parametrize(
    ("structured_outputs", "message"),
    [
        (pb.StructuredOutputs(), "structured_outputs sets nothing; set exactly one"),
        (pb.StructuredOutputs(json_object=False), "structured_outputs sets nothing"),
        (pb.StructuredOutputs(choice=pb.Choices()), "structured_outputs.choice is empty"),
    ],
)
def test_empty_structured_outputs_are_refused(structured_outputs, message):
    with pytest.raises(InvalidRequestError, match=message):
        read_sampling(pb.SamplingParams(structured_outputs=structured_outputs))


def test_unknown_enum_values_are_refused():
    with pytest.raises(InvalidRequestError, match=r"sampling\.output_kind is 9"):
        read_sampling(pb.SamplingParams(output_kind=9))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match=r"beam_search\.early_stopping is 9"):
        read_beam_search(pb.BeamSearchParams(beam_width=2, early_stopping=9))  # type: ignore[arg-type]


@pytest.mark.parametrize("where", ["the request", "sampling", "beam_search", "sampling.structured_outputs", "chat"])
def test_fields_of_a_newer_client_are_refused_not_dropped(where):
    """Fault 11, also for parameters that this server has never heard of."""
    newer = bytes.fromhex("a83f2a")  # field 1013 is 42
    request = pb.GenerateRequest.FromString(newer if where == "the request" else b"")
    if where == "sampling":
        request.sampling.MergeFromString(newer)
    elif where == "beam_search":
        request.beam_search.MergeFromString(newer)
    elif where == "sampling.structured_outputs":
        request.sampling.structured_outputs.MergeFromString(newer)
    elif where == "chat":
        request.chat.MergeFromString(newer)
    with pytest.raises(InvalidRequestError, match=rf"{where} has fields that this server does not know.* 1013;"):
        if where == "chat":
            read_prompt(over_the_wire(request), refuse)
        else:
            read_method(over_the_wire(request))


def test_numbers_beyond_the_wire_are_refused_by_name():
    for params, message in (
        (SamplingParams(logprobs=2**31), "logprobs is 2147483648"),
        (SamplingParams(logit_bias={2**40: 1.0}), "logit_bias is"),
        (SamplingParams(stop_token_ids=(2**31,)), "stop_token_ids is"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            write_sampling(params)
    with pytest.raises(InvalidRequestError, match="prompt_token_ids holds"):
        write_prompt(pb.GenerateRequest(), {"prompt_token_ids": [2**31]})


def refuse(*chat):
    raise AssertionError(f"rendered {chat}")


@pytest.mark.parametrize("prompt", ["text", "", {"prompt_token_ids": [1, 2]}, {"prompt_token_ids": []}])
def test_prompts_come_back(prompt):
    request = pb.GenerateRequest()
    write_prompt(request, prompt)
    assert read_prompt(over_the_wire(request), refuse) == prompt


def test_conversations_come_back_and_are_rendered():
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "name": "Zoë", "content": "né你🙂"},
        {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": {"b": 1, "a": 2.5}}}]},
        {"role": "tool", "tool_call_id": "1", "content": ""},
        {"role": "assistant", "content": None, "reasoning_content": "hm"},
        {"role": "user", "content": [{"type": "text", "text": "part"}]},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"z": 1, "a": {"type": "object"}}}}]
    variables = {"enable_thinking": False, "depth": 3}
    request = pb.GenerateRequest()
    write_prompt(request, messages, tools=tools, chat_template_kwargs=variables)
    seen: list[Any] = []

    def render(*chat):
        seen.extend(chat)
        return "rendered"

    assert read_prompt(over_the_wire(request), render) == "rendered"
    assert seen == [messages, tools, variables]
    # Templates print what they get: order and whole numbers are to stay.
    assert repr(seen[1:]) == repr([tools, variables]) and repr(seen[0][2]) == repr(messages[2])
    assert read_chat(write_chat(messages)) == (messages, None, None)


def test_conversations_that_are_none_are_refused():
    empty = pb.GenerateRequest()
    write_prompt(empty, [])
    with pytest.raises(InvalidRequestError, match=r"chat\.messages is empty"):
        read_prompt(empty, refuse)
    one = [pb.ChatMessage(role="user", content="a")]
    for chat, message in (
        (pb.Chat(messages=one, tools_json="{"), r"chat\.tools_json is no JSON"),
        (pb.Chat(messages=one, tools_json="{}"), r"chat\.tools_json is '{}', it must be a list"),
        (pb.Chat(messages=one, template_kwargs_json="[" * 100_000), r"chat\.template_kwargs_json is no JSON"),
        (pb.Chat(messages=[*one, pb.ChatMessage(further_json="[]")]), r"messages\[1\]\.further_json .* an object"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            read_chat(chat)
    with pytest.raises(InvalidRequestError, match="tools cannot be sent as JSON"):
        write_prompt(pb.GenerateRequest(), [{"role": "user"}], tools=[{"f": refuse}])
    with pytest.raises(InvalidRequestError, match="go with a conversation"):
        write_prompt(pb.GenerateRequest(), "text", tools=[{}])


@pytest.mark.parametrize(
    ("reason", "stop"), [(None, None), ("stop", None), ("stop", 0), ("stop", "end"), ("length", None)]
)
def test_completions_come_back(reason, stop):
    completion = CompletionOutput(0, "né", [3, 4], reason, stop)
    output = RequestOutput("r", None, [1, 2], [completion], True, RequestTimes(0.0), num_cached_tokens=1)
    response = write_output(output)
    assert [read_completion(message) for message in response.completions] == [completion]
    usage = response.usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.generated_tokens) == (2, 1, 2)

    for finished in (False, True):
        message = write_delta(OutputDelta(output, 0, "é", [4], reason, stop, finished), is_first=False)
        assert read_completion(message.delta) == CompletionOutput(0, "é", [4], reason, stop)
        assert message.request_id == "r"
        assert message.HasField("usage") == finished


def test_logprobs_come_back():
    drawn_is_likely: TokenLogprobs = {4: Logprob(-0.25, 1, "é"), 9: Logprob(-1.5, 2, "\ufffd")}
    drawn_is_not: TokenLogprobs = {9: Logprob(-0.5, 1, ""), 4: Logprob(-1.0, 2, "é"), 3: Logprob(-math.inf, 50, None)}
    known = [drawn_is_likely, drawn_is_not]
    completion = CompletionOutput(0, "né", [4, 3], logprobs=known, cumulative_logprob=-1.25)
    prompt_logprobs: list[TokenLogprobs | None] = [None, {2: Logprob(-3.0, 7, "x")}]
    output = RequestOutput("r", None, [1, 2], [completion], True, RequestTimes(0.0), prompt_logprobs=prompt_logprobs)
    response = over_the_wire(write_output(output))
    [read] = map(read_completion, response.completions)
    assert read == completion
    assert [list(one) for one in read.logprobs or ()] == [[4, 9], [9, 4, 3]]  # the most likely first
    assert read_prompt_logprobs(response) == ([1, 2], prompt_logprobs)
    assert [(one.token.token_id, len(one.alternatives)) for one in response.completions[0].logprobs] == [(4, 1), (3, 2)]

    delta = OutputDelta(output, 0, "é", [3], logprobs=[drawn_is_not], cumulative_logprob=-1.25)
    first, later = (over_the_wire(write_delta(delta, is_first=is_first)) for is_first in (True, False))
    assert read_completion(first.delta).logprobs == [drawn_is_not]
    assert read_prompt_logprobs(first) == ([1, 2], prompt_logprobs)
    assert read_prompt_logprobs(later) == (None, None)
