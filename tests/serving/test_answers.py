"""What answers say beside text: logprobs, where they stopped, and how streams are cut. Structured output too."""

import re

import grpc
import pytest

from jpaged.client import Client, Delta
from jpaged.params import OutputKind, SamplingParams, StructuredOutputs
from jpaged.request import TokenLogprobs, TokensPrompt

PROMPT = "a page table"
VOCABULARY = 128


def greedy(max_tokens: int = 12, **more) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **more)


def drawn(seed: int, max_tokens: int = 60, **more) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=max_tokens, ignore_eos=True, **more)


def logprobs_of(deltas: list[Delta]) -> list[TokenLogprobs]:
    return [known for delta in deltas for known in delta.logprobs or ()]


@pytest.mark.parametrize("k", [0, 1, 5, 20, 21, -1])
def test_logprobs_of_drawn_tokens(client: Client, k: int):
    client.generate(PROMPT, greedy())  # so that all below find the same in the cache, and compute the same
    [output] = client.generate(PROMPT, drawn(2, max_tokens=8, logprobs=k)).outputs
    assert output.logprobs is not None and len(output.logprobs) == 8
    [everything] = client.generate(PROMPT, drawn(2, max_tokens=8, logprobs=-1)).outputs
    assert everything.token_ids == output.token_ids and everything.logprobs is not None
    wanted = VOCABULARY if k < 0 else k
    for token_id, known, full in zip(output.token_ids, output.logprobs, everything.logprobs, strict=True):
        assert len(full) == VOCABULARY and next(iter(full.values())).rank == 1
        most_likely = list(full)[:wanted]
        assert set(known) == {token_id, *most_likely}
        for other, logprob in known.items():
            assert logprob.logprob == pytest.approx(full[other].logprob, abs=1e-4)
            assert (logprob.rank, logprob.decoded_token) == (full[other].rank, full[other].decoded_token)
            assert logprob.decoded_token == client.detokenize([other], skip_special_tokens=False)
    total = sum(known[token_id].logprob for token_id, known in zip(output.token_ids, output.logprobs, strict=True))
    assert output.cumulative_logprob == pytest.approx(total, abs=1e-4)
    deltas = list(client.stream(PROMPT, drawn(2, max_tokens=8, logprobs=k)))
    assert logprobs_of(deltas) == output.logprobs
    assert deltas[-1].cumulative_logprob == output.cumulative_logprob


@pytest.mark.parametrize("k", [0, 3, -1])
def test_logprobs_of_the_prompt(client: Client, k: int):
    """Fault 2: the cache is warm, the prompt longer than a step, and all the same every token gets its own."""
    prompt: TokensPrompt = {"prompt_token_ids": [3 + place * 7 % 100 for place in range(40)]}
    client.generate(prompt, greedy())
    answer = client.generate(prompt, greedy(prompt_logprobs=k))
    assert answer.prompt_token_ids == prompt["prompt_token_ids"]
    assert answer.prompt_logprobs is not None and len(answer.prompt_logprobs) == 40
    assert answer.prompt_logprobs[0] is None and answer.usage.cached_tokens == 0
    for token_id, known in zip(prompt["prompt_token_ids"][1:], answer.prompt_logprobs[1:], strict=True):
        assert known is not None and token_id in known
        assert len(known) in ((VOCABULARY,) if k < 0 else (k, k + 1) if k else (1,))
    # A token is as likely in the prompt as it was when it was drawn.
    [output] = client.generate({"prompt_token_ids": prompt["prompt_token_ids"][:20]}, greedy(logprobs=0)).outputs
    assert output.logprobs is not None
    whole: TokensPrompt = {"prompt_token_ids": prompt["prompt_token_ids"][:20] + output.token_ids}
    scored = client.generate(whole, greedy(prompt_logprobs=0)).prompt_logprobs
    assert scored is not None
    for token_id, when_drawn, in_prompt in zip(output.token_ids, output.logprobs, scored[20:], strict=True):
        assert in_prompt is not None
        assert in_prompt[token_id].logprob == pytest.approx(when_drawn[token_id].logprob, abs=1e-4)
    deltas = list(client.stream(prompt, greedy(prompt_logprobs=k)))
    assert deltas[0].prompt_logprobs == answer.prompt_logprobs
    assert all(delta.prompt_logprobs is None for delta in deltas[1:])


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_stop_string_over_several_deltas_is_never_shown(client: Client, seed: int, include: bool):
    """Fault 4: texts of every length, taken from what would have come."""
    text = client.generate(PROMPT, drawn(seed)).outputs[0].text
    for start in range(10, 40, 6):
        for length in (1, 2, 5):
            stop = text[start : start + length]
            if "\ufffd" in stop:
                continue  # no text of a token
            params = drawn(seed, stop=(stop, "never said"), include_stop_str_in_output=include)
            [output] = client.generate(PROMPT, params).outputs
            end = text.index(stop) + (len(stop) if include else 0)
            assert (output.text, output.finish_reason, output.stop_reason) == (text[:end], "stop", stop)
            deltas = list(client.stream(PROMPT, params))
            assert "".join(delta.text for delta in deltas) == output.text
            assert [token for delta in deltas for token in delta.token_ids] == output.token_ids
            assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", stop)
            shown = ""
            for delta in deltas:  # and what was shown was never taken back
                shown += delta.text
                assert output.text.startswith(shown)


@pytest.mark.parametrize("n", [1, 2])
def test_kinds_of_streams_say_the_same(client: Client, n: int):
    def stream(kind: OutputKind) -> list[Delta]:
        return list(client.stream(PROMPT, drawn(4, n=n, logprobs=1, output_kind=kind)))

    def of(index: int, deltas: list[Delta]) -> list[Delta]:
        return [delta for delta in deltas if delta.index == index]

    whole = client.generate(PROMPT, drawn(4, n=n, logprobs=1, output_kind="final_only"))
    pieces, cumulative, final = (stream(kind) for kind in ("delta", "cumulative", "final_only"))
    assert len(final) == n and len(cumulative) == len(pieces) > 50
    for output in whole.outputs:
        text, token_ids = "", []
        for piece, so_far in zip(of(output.index, pieces), of(output.index, cumulative), strict=True):
            text, token_ids = text + piece.text, token_ids + piece.token_ids
            assert (so_far.text, so_far.token_ids) == (text, token_ids)
            assert len(so_far.logprobs or ()) == len(token_ids)
            assert so_far.cumulative_logprob == piece.cumulative_logprob
        [end] = of(output.index, final)
        last = of(output.index, cumulative)[-1]
        for said in (end, last, output):
            assert (said.text, said.token_ids, said.logprobs) == (output.text, output.token_ids, output.logprobs)
            assert (said.finish_reason, said.cumulative_logprob) == (output.finish_reason, output.cumulative_logprob)
    for deltas in (pieces, cumulative, final):
        assert [delta.usage is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
        assert deltas[-1].usage is not None and deltas[-1].usage.generated_tokens == 60 * n


@pytest.mark.parametrize(
    ("structured_outputs", "pattern"),
    [
        (StructuredOutputs(regex="(ab|cd){3}z"), "(ab|cd){3}z"),
        (StructuredOutputs(choice=("yes", "no", "a é b")), "yes|no|a é b"),
        (StructuredOutputs(grammar='start: word " " word\nword: /[a-c]/ /[x-z]/'), "[a-c][x-z] [a-c][x-z]"),
        (StructuredOutputs(grammar='root ::= ("ab" | "ba") "é"'), "(ab|ba)é"),
    ],
)
def test_output_has_the_structure_that_was_asked_for(client: Client, structured_outputs, pattern):
    seen = set()
    for seed in range(8):
        params = SamplingParams(temperature=30.0, seed=seed, max_tokens=40, structured_outputs=structured_outputs)
        [output] = client.generate(PROMPT, params).outputs
        assert re.fullmatch(pattern, output.text), output.text
        assert output.finish_reason == "stop" and output.stop_reason is None
        assert "".join(delta.text for delta in client.stream(PROMPT, params)) == output.text
        seen.add(output.text)
    assert len(seen) > 1


def test_structure_that_the_vocabulary_cannot_spell_is_refused(client: Client):
    """This tokenizer has no braces: no fault of the server's."""
    with pytest.raises(grpc.RpcError) as caught:
        client.generate(PROMPT, SamplingParams(structured_outputs=StructuredOutputs(json_object=True)))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
