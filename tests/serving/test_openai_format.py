"""OpenAI's bodies: what each field becomes, what is refused, and what the answers look like."""

import json
import math
from typing import Any

import pytest

from jpaged.engine.tokenizer import Tokenizer
from jpaged.errors import InvalidRequestError
from jpaged.params import SamplingParams, StructuredOutputs
from jpaged.request import CompletionOutput, Logprob, RequestOutput, RequestTimes, TokenLogprobs
from jpaged.serving.openai_format import CHAT_URL, COMPLETIONS_URL, read_chat, read_params, write_body
from tests.engine.tokenizer_builds import byte_level_backend

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
USER = {"role": "user", "content": "hello"}

SAME = [
    ("n", 3),
    ("temperature", 0.5),
    ("top_p", 0.5),
    ("top_k", 7),
    ("min_p", 0.25),
    ("seed", 5),
    ("max_tokens", 9),
    ("min_tokens", 3),
    ("presence_penalty", -0.5),
    ("frequency_penalty", 0.5),
    ("repetition_penalty", 1.5),
    ("ignore_eos", True),
    ("include_stop_str_in_output", True),
    ("skip_special_tokens", False),
    ("spaces_between_special_tokens", False),
    ("prompt_logprobs", 2),
    ("truncate_prompt_tokens", 4),
    ("priority", -1),
    ("cache_salt", "salt"),
    ("skip_reading_prefix_cache", True),
]
LISTS = [
    ("stop", ["a", "b"]),
    ("stop_token_ids", [3, 4]),
    ("allowed_token_ids", [3, 4]),
    ("bad_words", ["a"]),
]
TRANSLATED = [
    ({"stop": "a"}, {"stop": ("a",)}),
    ({"logit_bias": {"5": 1, "6": -2.5}}, {"logit_bias": {5: 1.0, 6: -2.5}}),
    ({"logit_bias": {}}, {"logit_bias": {}}),
    ({"response_format": {"type": "text"}}, {}),
    ({"response_format": {"type": "json_object"}}, {"structured_outputs": StructuredOutputs(json_object=True)}),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}},
        {"structured_outputs": StructuredOutputs(json_schema=SCHEMA)},
    ),
    ({"structured_outputs": {"json": SCHEMA}}, {"structured_outputs": StructuredOutputs(json_schema=SCHEMA)}),
    ({"structured_outputs": {"regex": "a", "json": None}}, {"structured_outputs": StructuredOutputs(regex="a")}),
    ({"guided_json": json.dumps(SCHEMA)}, {"structured_outputs": StructuredOutputs(json_schema=SCHEMA)}),
    ({"guided_regex": "a+"}, {"structured_outputs": StructuredOutputs(regex="a+")}),
    ({"guided_choice": ["a", "b"]}, {"structured_outputs": StructuredOutputs(choice=("a", "b"))}),
    ({"guided_grammar": "start: A"}, {"structured_outputs": StructuredOutputs(grammar="start: A")}),
    ({"guided_json_object": True}, {"structured_outputs": StructuredOutputs(json_object=True)}),
    ({"model": "x", "user": "u", "metadata": {}, "store": True, "safety_identifier": "s"}, {}),
    ({"stream": False, "echo": False, "best_of": 1, "parallel_tool_calls": True, "service_tier": "auto"}, {}),
]


@pytest.mark.parametrize("url", [CHAT_URL, COMPLETIONS_URL])
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        *(({name: value}, {name: value}) for name, value in SAME),
        *(({name: value}, {name: tuple(value)}) for name, value in LISTS),
        *TRANSLATED,
    ],
    ids=str,
)
def test_a_field_becomes_a_parameter(url, body, expected):
    default = {"max_tokens": None} if url == CHAT_URL else {}
    nothing = dict.fromkeys(("stop", "logit_bias", "n", "tools" if url == CHAT_URL else "logprobs"))
    assert read_params(nothing | body, url) == SamplingParams(**(default | expected))


@pytest.mark.parametrize(
    ("url", "body", "logprobs"),
    [
        (CHAT_URL, {"logprobs": True}, 0),
        (CHAT_URL, {"logprobs": True, "top_logprobs": 5}, 5),
        (CHAT_URL, {"logprobs": False}, None),
        (COMPLETIONS_URL, {"logprobs": 0}, 0),
        (COMPLETIONS_URL, {"logprobs": 5}, 5),
    ],
)
def test_the_two_ways_to_ask_for_logprobs(url, body, logprobs):
    assert read_params(body, url).logprobs == logprobs


def test_every_parameter_can_be_asked_for():
    """All but those that a whole answer in JSON has no use for."""
    reached = {name for name, _ in [*SAME, *LISTS]} | {"logit_bias", "logprobs", "structured_outputs"}
    assert set(SamplingParams.__dataclass_fields__) - reached == {"detokenize", "output_kind"}


@pytest.mark.parametrize(
    ("url", "body", "message"),
    [
        (CHAT_URL, {"reasoning_effort": "high"}, "body.reasoning_effort is not supported; supported are "),
        (CHAT_URL, {"prompt": "a"}, "body.prompt is not supported"),
        (COMPLETIONS_URL, {"messages": [USER]}, "body.messages is not supported"),
        (COMPLETIONS_URL, {"tools": []}, "body.tools is not supported"),
        (COMPLETIONS_URL, {"suffix": "b"}, "body.suffix is not supported"),
        (CHAT_URL, {"stream": True}, "body.stream is True, only False is supported"),
        (CHAT_URL, {"stream": 0}, "body.stream is 0, only False"),
        (COMPLETIONS_URL, {"echo": True}, "body.echo is True"),
        (COMPLETIONS_URL, {"best_of": 2}, "body.best_of is 2"),
        (CHAT_URL, {"parallel_tool_calls": False}, "body.parallel_tool_calls is False"),
        (CHAT_URL, {"logprobs": 1}, "body.logprobs is 1, it must be true or false"),
        (CHAT_URL, {"top_logprobs": 1}, "body.top_logprobs is 1, which needs logprobs"),
        (CHAT_URL, {"logprobs": True, "top_logprobs": -2}, "logprobs is -2, it must be a whole number of at least -1"),
        (COMPLETIONS_URL, {"logprobs": True}, "logprobs is True, it must be a whole number"),
        (CHAT_URL, {"max_tokens": 1, "max_completion_tokens": 1}, "say the same; give one of them"),
        (CHAT_URL, {"logit_bias": [5]}, "body.logit_bias is [5], it must map"),
        (CHAT_URL, {"logit_bias": {"five": 1}}, "body.logit_bias is {'five': 1}, it must map"),
        (CHAT_URL, {"logit_bias": {"5": "much"}}, "logit_bias[5] is 'much'"),
        (CHAT_URL, {"response_format": "json"}, "body.response_format is json, it must be"),
        (CHAT_URL, {"response_format": {"type": "structural_tag"}}, "body.response_format is {'type'"),
        (CHAT_URL, {"response_format": {"type": "json_schema"}}, "body.response_format is {'type'"),
        (CHAT_URL, {"structured_outputs": {"json": {}, "regex": "a"}}, "sets json_schema, regex; set exactly one"),
        (CHAT_URL, {"structured_outputs": {"whitespace": 1}}, "it must be an object with one of json, "),
        (CHAT_URL, {"guided_regex": "a", "guided_choice": ["a"]}, "body.guided_regex and body.guided_choice are set"),
        (CHAT_URL, {"stop": 5}, "stop is 5, it must be a list of texts"),
        (CHAT_URL, {"frequency_penalty": 3}, "frequency_penalty is 3, it must be at least -2 and at most 2"),
    ],
    ids=str,
)
def test_what_cannot_be_honoured_is_refused_by_name(url, body, message):
    with pytest.raises(InvalidRequestError) as caught:
        read_params(body, url)
    assert message in str(caught.value)


def test_a_conversation_is_read_as_templates_expect_it():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": [2]}'}}
    tools = [{"type": "function", "function": {"name": "f"}}]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "3"},
    ]
    body = {"messages": messages, "tools": tools, "chat_template_kwargs": {"enable_thinking": False}}
    read, read_tools, variables = read_chat(body)
    assert read[0] == {"role": "user", "content": "one\ntwo"}
    assert read[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"b": 1, "a": [2]}}
    assert read[2] == messages[2]
    assert (read_tools, variables) == (tools, {"enable_thinking": False})
    assert json.loads(call["function"]["arguments"])  # the body is left as it was
    assert read_chat(body | {"tool_choice": "auto"})[1] == tools
    assert read_chat(body | {"tool_choice": "none"})[1] is None


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": []}, "body.messages is '[]'"),
        ({"messages": [USER], "tools": {}}, "body.tools is '{}', it must be a list"),
        ({"messages": [USER], "tool_choice": "required"}, "body.tool_choice is 'required'"),
        ({"messages": [USER], "chat_template_kwargs": []}, "body.chat_template_kwargs is '[]'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]},
            "only text is supported",
        ),
    ],
    ids=str,
)
def test_a_conversation_that_cannot_be_honoured_is_refused(body, message):
    with pytest.raises(InvalidRequestError) as caught:
        read_chat(body)
    assert message in str(caught.value)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level_backend())


def finished(tokenizer: Tokenizer, logprobs: int) -> tuple[SamplingParams, RequestOutput]:
    """An answer of the tokens of "h" and of each byte of "é", the second likely and the others not."""
    h, *halves = (tokenizer.encode("h") + tokenizer.encode("é"))[:3]
    assert [tokenizer.token_bytes(half) for half in halves] == [b"\xc3", b"\xa9"]
    other = tokenizer.encode("x")[0]

    def known(token_id: int, text: str, rank: int, logprob: float = -2.0) -> TokenLogprobs:
        likely = {other: Logprob(-0.5, 1, "x")} if rank > 1 else {}
        return likely | {token_id: Logprob(logprob, rank, text)} | ({} if likely else {other: Logprob(-2.5, 2, "x")})

    completion = CompletionOutput(0, "hé", [h, *halves], "stop", stop_reason="end")
    completion.logprobs = [
        known(h, "h", 2),
        known(halves[0], "\ufffd", 1, -0.25),
        known(halves[1], "\ufffd", 3, -math.inf),
    ]
    output = RequestOutput("r", None, [7, 8], [completion], True, RequestTimes(0.0), num_cached_tokens=1)
    output.prompt_logprobs = [None, {8: Logprob(-1.0, 4, "y")}]
    return SamplingParams(logprobs=logprobs), output


def test_logprobs_of_a_chat(tokenizer):
    body = write_body(CHAT_URL, *finished(tokenizer, 1), "tiny", tokenizer)
    [choice] = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hé"}
    x = {"token": "x", "logprob": -0.5, "bytes": [ord("x")]}
    first_half = {"token": "\ufffd", "logprob": -0.25, "bytes": [0xC3]}
    assert choice["logprobs"] == {
        "content": [
            {"token": "h", "logprob": -2.0, "bytes": [ord("h")], "top_logprobs": [x]},
            first_half | {"top_logprobs": [first_half]},
            {"token": "\ufffd", "logprob": -9999.0, "bytes": [0xA9], "top_logprobs": [x]},
        ],
        "refusal": None,
    }
    assert body["prompt_logprobs"] == [None, {"8": {"logprob": -1.0, "rank": 4, "decoded_token": "y"}}]
    json.dumps(body, allow_nan=False)
    none = write_body(CHAT_URL, *finished(tokenizer, 0), "tiny", tokenizer)["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in none] == [[], [], []]


def test_logprobs_of_a_completion(tokenizer):
    body = write_body(COMPLETIONS_URL, *finished(tokenizer, 1), "tiny", tokenizer)
    [choice] = body["choices"]
    assert choice["logprobs"] == {
        "tokens": ["h", "\ufffd", "\ufffd"],
        "token_logprobs": [-2.0, -0.25, -9999.0],
        "top_logprobs": [{"x": -0.5, "h": -2.0}, {"\ufffd": -0.25}, {"x": -0.5, "\ufffd": -9999.0}],
        "text_offset": [0, 1, 1],
    }
    assert choice["prompt_logprobs"][0] is None and "prompt_logprobs" not in body
    none = write_body(COMPLETIONS_URL, *finished(tokenizer, 0), "tiny", tokenizer)["choices"][0]["logprobs"]
    assert none["top_logprobs"] == [None, None, None]


def test_what_else_an_answer_says(tokenizer):
    params, output = finished(tokenizer, 0)
    output.outputs.append(CompletionOutput(1, "h", [3], "length"))
    output.prompt_logprobs = None
    for url in (CHAT_URL, COMPLETIONS_URL):
        body: dict[str, Any] = write_body(url, params, output, "tiny", tokenizer)
        assert [choice["index"] for choice in body["choices"]] == [0, 1]
        assert [(choice["finish_reason"], choice["stop_reason"]) for choice in body["choices"]] == [
            ("stop", "end"),
            ("length", None),
        ]
        assert body["choices"][1]["logprobs"] is None and "prompt_logprobs" not in body | body["choices"][0]
        assert body["usage"] == {
            "prompt_tokens": 2,
            "completion_tokens": 4,
            "total_tokens": 6,
            "prompt_tokens_details": {"cached_tokens": 1},
        }
