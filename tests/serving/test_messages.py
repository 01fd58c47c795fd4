"""What crosses the wire comes out as it went in."""

import pytest

from jpaged.errors import InvalidRequestError
from jpaged.params import SamplingParams
from jpaged.request import CompletionOutput, OutputDelta, RequestOutput, RequestTimes
from jpaged.serving.messages import (
    HONOURED,
    read_completion,
    read_prompt,
    read_sampling,
    write_delta,
    write_output,
    write_prompt,
    write_sampling,
)
from jpaged.v1 import inference_pb2 as pb

EVERYTHING = SamplingParams(
    n=3,
    priority=-2,
    cache_salt="salt",
    skip_reading_prefix_cache=True,
    temperature=0.7,
    top_p=0.9,
    top_k=-1,
    min_p=0.25,
    seed=2**64 - 1,
    max_tokens=None,
    stop_token_ids=(3, 4),
    ignore_eos=True,
    skip_special_tokens=False,
    detokenize=False,
)


@pytest.mark.parametrize("params", [SamplingParams(), EVERYTHING, SamplingParams(temperature=0.0, seed=0)])
def test_parameters_come_back(params):
    assert read_sampling(pb.SamplingParams.FromString(write_sampling(params).SerializeToString())) == params


def test_every_parameter_has_a_field():
    """`EVERYTHING` differs from the default in each, so the test above would see one that is lost."""
    default = SamplingParams()
    assert {name for name in HONOURED if getattr(EVERYTHING, name) != getattr(default, name)} == set(HONOURED)
    assert set(HONOURED) == set(SamplingParams.__slots__)  # type: ignore[attr-defined]


def test_unset_takes_the_default_and_zero_is_zero():
    assert read_sampling(pb.SamplingParams()) == SamplingParams()
    assert read_sampling(pb.SamplingParams(temperature=0.0)) == SamplingParams(temperature=0.0)


def refuse(messages):
    raise AssertionError(f"rendered {messages}")


@pytest.mark.parametrize("prompt", ["text", "", {"prompt_token_ids": [1, 2]}, {"prompt_token_ids": []}])
def test_prompts_come_back(prompt):
    request = pb.GenerateRequest()
    write_prompt(request, prompt)
    assert read_prompt(pb.GenerateRequest.FromString(request.SerializeToString()), refuse) == prompt


def test_conversations_come_back_and_are_rendered():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "né你🙂"}]
    request = pb.GenerateRequest()
    write_prompt(request, messages)
    seen = []

    def render(messages):
        seen.extend(messages)
        return "rendered"

    assert read_prompt(request, render) == "rendered"
    assert seen == messages
    empty = pb.GenerateRequest()
    write_prompt(empty, [])
    with pytest.raises(InvalidRequestError, match=r"chat\.messages is empty"):
        read_prompt(empty, refuse)


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
        message = write_delta(OutputDelta(output, 0, "é", [4], reason, stop, finished))
        assert read_completion(message.delta) == CompletionOutput(0, "é", [4], reason, stop)
        assert message.request_id == "r"
        assert message.HasField("usage") == finished
