"""What needs a tokenizer: stop strings, bad words, structured output. A tiny random model writes random bytes."""

import json
import random
import re
from dataclasses import replace
from typing import Any

import pytest

from jpaged import LLM, InvalidRequestError, SamplingParams, StructuredOutputs
from jpaged.request import OutputDelta
from tests.cli.tiny_chat_model import write_tiny_chat_model

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 160,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 16,
    "page_size": 4,
}


@pytest.fixture(scope="module")
def make_chat_llm(tmp_path_factory):
    """make_chat_llm(**options): an engine with a byte-level tokenizer; the same options give the same engine."""
    model, made = write_tiny_chat_model(tmp_path_factory.mktemp("chat")), {}

    def make(**options) -> LLM:
        key = tuple(sorted(options.items()))
        if key not in made:
            made[key] = LLM(str(model), **(OPTIONS | options))
        return made[key]

    return make


@pytest.fixture
def llm(make_chat_llm):
    """The usual engine; afterwards every page must be back and nothing compiled."""
    llm = make_chat_llm()
    before = llm.stats().compilations_after_ready
    yield llm
    llm.engine.check_invariants()
    assert (llm.stats().pages_used, llm.stats().compilations_after_ready) == (0, before)


def free(seed: int, **wishes) -> SamplingParams:
    """A long text of letters, so that strings of it can be searched."""
    letters = tuple(range(ord("A"), ord("z")))  # the first tokens of the byte-level tokenizer are the bytes
    return SamplingParams(
        **({"seed": seed, "max_tokens": 60, "ignore_eos": True, "allowed_token_ids": letters} | wishes)
    )


def stream_texts(llm: LLM, prompt: str, params: SamplingParams) -> tuple[list[str], OutputDelta]:
    deltas = list(llm.stream(prompt, params))
    return [delta.text for delta in deltas], deltas[-1]


@pytest.mark.parametrize("seed", range(6))
def test_stop_strings_end_the_text_and_never_show(llm, seed):
    [whole] = llm.generate("begin", free(seed))
    text = whole.outputs[0].text
    assert len(text) >= 60
    generator = random.Random(seed)
    for length in (1, 2, 3, 7, 19):
        place = generator.randrange(3, 60 - length)
        stop = text[place : place + length]
        ends_at = text.index(stop)
        decoys = ["\x00never", text[place : place + length - 1] + "\x00"]  # the second one nearly matches
        for include in (False, True):
            expected = text[: ends_at + (length if include else 0)]
            params = free(seed, stop=[*decoys, stop], include_stop_str_in_output=include)
            pieces, last = stream_texts(llm, "begin", params)
            [unary] = llm.generate("begin", params)
            assert "".join(pieces) == unary.outputs[0].text == expected
            assert (last.finish_reason, last.stop_reason, last.finished) == ("stop", stop, True)
            assert (unary.outputs[0].finish_reason, unary.outputs[0].stop_reason) == ("stop", stop)
            if not include:
                shown = ""
                for piece in pieces:
                    shown += piece
                    assert expected.startswith(shown), "a part of the stop string was shown"


def test_a_stop_string_counts_only_after_min_tokens(llm):
    [whole] = llm.generate("begin", free(1))
    text = whole.outputs[0].text
    stop = text[4]
    later = text.index(stop, 20) if stop in text[20:] else None
    [output] = llm.generate("begin", free(1, stop=stop, min_tokens=20))
    assert len(output.outputs[0].token_ids) >= 20
    if later is None:
        assert (output.outputs[0].text, output.outputs[0].finish_reason) == (text, "length")
    else:
        assert output.outputs[0].text == text[: text.index(stop, 19)]


def test_what_was_held_back_comes_when_the_sequence_ends_otherwise(llm):
    [whole] = llm.generate("begin", free(2))
    text = whole.outputs[0].text
    pieces, last = stream_texts(llm, "begin", free(2, stop=[text[-5:] + "\x00"]))
    assert "".join(pieces) == text and len(pieces[-1]) == 5 and last.finish_reason == "length"


def test_samples_end_at_their_own_stop_strings(llm):
    [whole] = llm.generate("begin", free(3, n=5))
    texts = [completion.text for completion in whole.outputs]
    stop = texts[0][30:32]
    [output] = llm.generate("begin", free(3, n=5, stop=stop))
    assert [completion.text for completion in output.outputs] == [text.split(stop)[0] for text in texts]
    assert output.outputs[0].stop_reason == stop


def test_bad_words_are_not_written(llm):
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    [whole] = llm.generate("begin", free(4, temperature=0.0, repetition_penalty=1.2))
    tokens = whole.outputs[0].token_ids
    words = [tokenizer.decode(tokens[place : place + length]) for place, length in ((5, 2), (20, 3), (40, 1), (3, 4))]
    [output] = llm.generate("begin", free(4, temperature=0.0, repetition_penalty=1.2, bad_words=words))
    text = output.outputs[0].text
    assert not any(word in text for word in words)
    free_text = whole.outputs[0].text
    first_changed = min(free_text.index(word) + len(word) for word in words) - 1
    assert text[:first_changed] == free_text[:first_changed], "nothing is forbidden before a word is nearly complete"
    with pytest.raises(InvalidRequestError, match=r"bad_words holds 'x+', which has 40 tokens, the limit is 16"):
        llm.generate("begin", SamplingParams(bad_words=["x" * 40]))


NAMES = ["né", "你好", "🙂"]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": NAMES},
        "sizes": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "sizes"],
    "additionalProperties": False,
}
REGEX = "[a-f]{3,9}-(你|🙂)+[0-9]{2}!"
CHOICE = ("yes", "yesterday", "né你")
WISHES = {
    "regex": (StructuredOutputs(regex=REGEX), lambda text: re.fullmatch(REGEX, text)),
    "choice": (StructuredOutputs(choice=CHOICE), lambda text: text in CHOICE),
    "schema": (StructuredOutputs(json_schema=SCHEMA), lambda text: json.loads(text)["name"] in NAMES),
    "lark": (StructuredOutputs(grammar='start: "(" start ")" | "x"'), lambda text: re.fullmatch(r"\(*x\)*", text)),
}


def structured(kind: str, seed: int, **wishes) -> SamplingParams:
    return SamplingParams(structured_outputs=WISHES[kind][0], seed=seed, max_tokens=100, **wishes)


def test_structured_outputs_are_what_was_asked_for_in_mixed_company(make_chat_llm):
    """Whatever else runs, with and without overlap, through preemptions, token for token."""
    requests = [(kind, seed) for seed in range(6) for kind in WISHES]
    params = [structured(kind, seed, n=1 + seed % 2) for kind, seed in requests]
    prompts = [f"{kind} {seed}" for kind, seed in requests]
    mixed = params + [free(seed) for seed in range(8)]
    outputs = make_chat_llm().generate(prompts + ["free"] * 8, mixed)
    finished = 0
    for (kind, _), output in zip(requests, outputs, strict=False):
        for completion in output.outputs:
            if completion.finish_reason == "stop":
                finished += 1
                assert WISHES[kind][1](completion.text), (kind, completion.text)
                assert completion.stop_reason is None
    assert finished >= 24
    tokens = [[completion.token_ids for completion in output.outputs] for output in outputs]
    for options in ({"overlap": False}, {"num_pages": 64, "host_tier_gib": 0.001}):
        others = make_chat_llm(**options).generate(prompts + ["free"] * 8, mixed)
        assert [[completion.token_ids for completion in output.outputs] for output in others] == tokens
    assert make_chat_llm(num_pages=64, host_tier_gib=0.001).stats().preemptions > 0


def test_a_json_object_is_one(llm):
    params = SamplingParams(structured_outputs=StructuredOutputs(json_object=True), max_tokens=140, seed=1)
    outputs = llm.generate(["a", "b", "c", "d", "e", "f"], params)
    done = [output.outputs[0].text for output in outputs if output.outputs[0].finish_reason == "stop"]
    assert done and all(isinstance(json.loads(text), dict) for text in done)


def test_what_cannot_be_compiled_is_refused_with_its_reason(llm):
    for wish, reason in (
        (StructuredOutputs(json_schema='{"type": "nonsense"}'), "json_schema cannot be compiled"),
        (StructuredOutputs(json_schema="{"), "json_schema"),
        (StructuredOutputs(regex="(unclosed"), "regex cannot be compiled"),
        (StructuredOutputs(grammar="start: unknown"), "grammar cannot be compiled"),
    ):
        with pytest.raises(InvalidRequestError, match=reason):
            llm.generate("x", SamplingParams(structured_outputs=wish))


def test_constraints_that_leave_no_token_end_the_sequence_with_an_error(llm):
    letters = free(0).allowed_token_ids
    wish = SamplingParams(structured_outputs=StructuredOutputs(regex="[0-9]+"), allowed_token_ids=letters)
    outputs = llm.generate(["x", "y"], [wish, free(5)])
    assert (outputs[0].outputs[0].finish_reason, outputs[0].outputs[0].text) == ("error", "")
    assert "no token" in outputs[0].outputs[0].stop_reason
    assert outputs[1].outputs[0].finish_reason == "length"


def test_logprobs_name_their_tokens(llm):
    [output] = llm.generate("begin", free(6, max_tokens=5, logprobs=3, prompt_logprobs=1))
    completion = output.outputs[0]
    texts = [entry[token].decoded_token for entry, token in zip(completion.logprobs, completion.token_ids, strict=True)]
    assert "".join(texts) == completion.text
    assert [
        entry[t].decoded_token for entry, t in zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
    ]
    [silent] = llm.generate("begin", replace(free(6, max_tokens=5, logprobs=3), detokenize=False))
    assert silent.outputs[0].text == "" and silent.outputs[0].logprobs[0][completion.token_ids[0]].decoded_token is None


def test_chat_takes_tools_and_template_variables(llm):
    """The tiny template writes <s>role:content</s> for each message, and <s> where an answer may begin."""
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well, "}]
    decode = lambda prompt: llm.tokenizer.decode(prompt["prompt_token_ids"], skip_special_tokens=False)  # noqa: E731
    assert decode(llm.render_chat(messages)) == "<s>user:hi</s><s>assistant:well, </s><s>"
    assert decode(llm.render_chat(messages, None, {"add_generation_prompt": False})).endswith("well, </s>")
    continued = llm.render_chat(messages, None, {"continue_final_message": True})
    assert decode(continued) == "<s>user:hi</s><s>assistant:well,"
    params = free(7, max_tokens=5)
    [output] = llm.chat(messages, params, chat_template_kwargs={"continue_final_message": True})
    assert output.prompt_token_ids == continued["prompt_token_ids"]
    for wishes, message in (
        ((None, {"messages": []}), "chat_template_kwargs holds messages"),
        (([{"name": "f"}], None), "has no place for tools"),
        ((None, {"continue_final_message": True, "add_generation_prompt": True}), "choose one"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            llm.render_chat(messages, *wishes)
    with pytest.raises(InvalidRequestError, match="the last message's content is not in the prompt"):
        llm.render_chat([{"role": "user", "content": ""}], None, {"continue_final_message": True})
