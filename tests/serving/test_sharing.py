"""Samples, beams and pinned prefixes over gRPC."""

import grpc
import pytest

from jpaged.client import Client
from jpaged.params import BeamSearchParams, SamplingParams
from jpaged.request import TokensPrompt

PROMPT: TokensPrompt = {"prompt_token_ids": [3, 4, 5, 6, 7, 8, 9]}


def test_samples_stream_by_index_and_join_to_the_whole_answers(client: Client):
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=9, ignore_eos=True)
    answer = client.generate(PROMPT, params)
    assert [output.index for output in answer.outputs] == [0, 1, 2]
    assert len({tuple(output.token_ids) for output in answer.outputs}) == 3
    streamed: dict[int, list[int]] = {0: [], 1: [], 2: []}
    deltas = list(client.stream(PROMPT, params))
    for delta in deltas:
        streamed[delta.index] += delta.token_ids
    assert streamed == {output.index: output.token_ids for output in answer.outputs}
    assert deltas[-1].usage is not None and deltas[-1].usage.generated_tokens == 27
    assert all(delta.usage is None for delta in deltas[:-1])


def test_beams_come_best_first_in_one_piece_or_streamed(client: Client):
    params = BeamSearchParams(beam_width=4, max_tokens=8, length_penalty=0.7, early_stopping="never")
    answer = client.generate(PROMPT, params)
    scores = [output.score for output in answer.outputs]
    assert len(scores) == 4 and scores == sorted(scores, reverse=True)  # type: ignore[type-var]
    for output in answer.outputs:
        assert output.score == pytest.approx(output.cumulative_logprob / len(output.token_ids) ** 0.7)  # type: ignore[operator]
    streamed = list(client.stream(PROMPT, params))
    assert [delta.token_ids for delta in streamed] == [output.token_ids for output in answer.outputs]
    assert [delta.usage is not None for delta in streamed] == [False, False, False, True]


def test_beam_parameters_out_of_range_are_refused(client: Client, stub):
    from jpaged.v1 import inference_pb2 as pb

    for beam_search, message in (
        (pb.BeamSearchParams(), "beam_width is 0"),
        (pb.BeamSearchParams(beam_width=11), "beam_width is 11"),
        (pb.BeamSearchParams(beam_width=2, max_tokens=0), "max_tokens is 0"),
        (pb.BeamSearchParams(beam_width=2, early_stopping=9), "early_stopping is 9"),  # type: ignore[arg-type]
        (pb.BeamSearchParams(beam_width=9), "a step holds 8 sequences"),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            stub.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[3]), beam_search=beam_search))
        assert message in (caught.value.details() or "")


def test_a_prefix_is_pinned_used_flushed_and_unpinned(client: Client):
    prefix = list(range(10, 31))  # five full pages of four and one token
    assert client.pin_prefix("system", {"prompt_token_ids": prefix}) == 20
    assert client.server_info().pages_pinned == 5
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    assert client.generate({"prompt_token_ids": [*prefix, 40]}, params).usage.cached_tokens == 20
    with pytest.raises(grpc.RpcError) as caught:
        client.pin_prefix("system", {"prompt_token_ids": prefix})
    assert "is pinned already" in (caught.value.details() or "")
    client.flush_prefix_cache()
    assert client.generate({"prompt_token_ids": [*prefix, 40]}, params).usage.cached_tokens == 0
    assert client.unpin_prefix("system") and not client.unpin_prefix("system")
    info = client.server_info()
    assert (info.pages_pinned, info.pages_used) == (0, 0)
