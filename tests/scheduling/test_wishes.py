"""What requests want beyond tokens: masks of grammars, histories for penalties, logprobs of prompts and of tokens."""

import random
from typing import Any

import numpy as np
import pytest

from jpaged.decoding.stopping import Finish
from jpaged.step_plan import ON_DEVICE, RowConstraints, RowSampling
from tests.fakes.loop import Loop, prompt
from tests.fakes.simulated_runner import VOCABULARY, generate, next_allowed, next_token, score

PENALISED = RowSampling(repetition_penalty=1.5)


class Steps:
    """A grammar: token i of the output leaves remainder i when divided by 5; `length` tokens are all."""

    failure = None

    def __init__(self, length: int, position: int = 0) -> None:
        self.length, self.position = length, position

    def next_mask(self):
        allowed = np.arange(-(-VOCABULARY // 32) * 32) % 5 == self.position % 5
        return np.packbits(allowed, bitorder="little").view(np.uint32)

    def accept(self, token_id: int) -> bool:
        allowed = token_id % 5 == self.position % 5
        self.position += 1
        return allowed

    @property
    def is_finished(self) -> bool:
        return self.position == self.length

    def copy(self) -> "Steps":
        return Steps(self.length, self.position)


def follow(tokens: list[int], length: int, sample_index: int = 0) -> list[int]:
    """What a sequence under `Steps` must generate."""
    grammar, tokens, start = Steps(length), list(tokens), len(tokens)
    while not grammar.is_finished:
        tokens.append(next_allowed(next_token(tokens, sample_index), grammar.next_mask()))
        grammar.accept(tokens[-1])
    return tokens[start:]


@pytest.mark.parametrize("overlap", [False, True])
def test_grammars_are_followed_in_any_company(overlap):
    loop = Loop(num_pages=13, rows=4, overlap=overlap, num_host_pages=8)
    for index in range(6):
        loop.add(prompt(3 + index, index), 16, grammar=Steps(7 + index), n=1 + index % 2)
        loop.add(prompt(5, 100 + index), 24)
    loop.run()
    for sequence in loop.sequences:
        group = sequence.group
        grammar: Any = sequence.grammar
        if grammar is None:
            assert sequence.output_token_ids == generate(group.prompt_token_ids, 24)
        else:
            length = grammar.length
            assert sequence.output_token_ids == follow(group.prompt_token_ids, length, sequence.sampling.sample_index)
            assert sequence.finish == Finish("stop")
    assert sum(loop.scheduler.preemptions.values()) > 0, "the pool was to be too small"


def test_a_grammar_row_sits_out_the_plan_after_its_token_and_nobody_else_does():
    loop = Loop(overlap=True)
    followed, free = loop.add(prompt(3), 30, grammar=Steps(8)), loop.add(prompt(3, 1), 16)
    loop.run()
    steps_of = lambda sequence: [p.step for p in loop.plans if sequence.sequence_id in p.sequence_ids]  # noqa: E731
    assert np.diff(steps_of(followed)).tolist() == [2] * 7
    assert np.diff(steps_of(free)).tolist() == [1] * 15
    for plan in loop.plans:
        assert [plan.sequence_ids[place] for place, _ in plan.masks] == [
            id for id in plan.sequence_ids if id == followed.sequence_id
        ]


def test_a_token_that_the_grammar_forbids_ends_the_sequence_with_an_error():
    class Broken(Steps):
        def accept(self, token_id: int) -> bool:
            return super().accept(token_id) and self.position < 4

        def copy(self) -> "Broken":
            return Broken(self.length)

    loop = Loop()
    sequence, other = loop.add(prompt(5), 20, grammar=Broken(9)), loop.add(prompt(4, 1), 9)
    loop.run()
    assert sequence.finish is not None and sequence.finish.reason == "error"
    assert sequence.output_token_ids == follow(prompt(5), 3)  # the forbidden token is not part of it
    assert other.output_token_ids == generate(prompt(4, 1), 9)
    assert loop.scheduler.pool.num_free == 64


@pytest.mark.parametrize("seed", range(4))
def test_penalties_see_every_token_of_prefixes_forks_and_preempted_sequences(seed):
    """The simulated device compares what it knows of each row with the row's tokens."""
    random_ = random.Random(seed)
    loop = Loop(num_pages=24, rows=5, budget=11, num_host_pages=random_.choice([0, 30]), enable_prefix_caching=True)
    bad_words = RowSampling(constraints=RowConstraints(bad_words=((1, 2),)))
    for index in range(16):
        loop.add(
            prompt(random_.randint(1, 22)),
            random_.randint(1, 14),
            n=random_.choice([1, 1, 2, 3]),
            sampling=[PENALISED, bad_words, RowSampling()][index % 3],
        )
        for _ in range(random_.randint(0, 6)):
            loop.step()
    loop.run()
    assert any(plan.histories for plan in loop.plans), "no prefix was found and nothing swapped in"
    assert all(plan.histories == [] or plan.rows_taken for plan in loop.plans)
    for sequence in loop.sequences:
        index, count = sequence.sampling.sample_index, len(sequence.output_token_ids)
        assert sequence.output_token_ids == generate(sequence.group.prompt_token_ids, count, sample_index=index)


@pytest.mark.parametrize("overlap", [False, True])
def test_each_token_of_a_prompt_is_scored_once_whatever_the_chunks(overlap):
    loop = Loop(num_pages=16, rows=3, budget=5, overlap=overlap)
    wants = [
        loop.add(prompt(length, length), 6, num_prompt_logprobs=2, n=n, reads_cache=False)
        for length, n in ((1, 1), (9, 1), (17, 2), (13, 1))
    ]
    loop.add(prompt(9, 9), 20)
    loop.run()
    expected = {
        (sequence.group.group_id, position): float(score(sequence.group.prompt_token_ids[: position + 1]))
        for sequence in wants
        for position in range(1, len(sequence.group.prompt_token_ids))
    }
    assert loop.prompt_scores == expected


def test_only_wide_wishes_take_the_wide_way():
    loop = Loop(overlap=False)
    best = loop.add(prompt(4), 3, num_logprobs=20, num_prompt_logprobs=0)
    wide = loop.add(prompt(4, 1), 3, num_logprobs=21, num_prompt_logprobs=-1)
    loop.add(prompt(4, 2), 3)
    loop.run()
    scored = [token for plan in loop.plans for token in plan.scored]
    assert [(t.group_id, t.position) for t in scored] == [(best.group.group_id, p) for p in (1, 2, 3)]
    wide_tokens = [token for plan in loop.plans for token in plan.wide]
    assert {t.group_id for t in wide_tokens} == {wide.group.group_id}
    assert [t.position for t in wide_tokens if t.token_id != ON_DEVICE] == [1, 2, 3]
    assert [t.position for t in wide_tokens if t.token_id == ON_DEVICE] == [4, 5, 6]
    assert all(plan.wants_logprobs for plan in loop.plans)


def test_plain_requests_want_nothing():
    loop = Loop()
    loop.add(prompt(9), 8, sampling=PENALISED)
    loop.run()
    assert not any(plan.wants_logprobs or plan.masks or plan.scored or plan.wide for plan in loop.plans)


def test_a_sequence_ended_by_its_text_frees_its_pages_and_drops_its_token_in_flight():
    loop = Loop(overlap=True)
    sequence, other = loop.add(prompt(9), 30), loop.add(prompt(5, 1), 12)
    for _ in range(6):
        loop.step()
    count = len(sequence.output_token_ids)
    assert sequence.num_in_flight == 1
    loop.scheduler.finish(sequence, Finish("stop", "\n\n"))
    loop.scheduler.check_invariants()
    loop.run()
    assert (len(sequence.output_token_ids), sequence.finish) == (count, Finish("stop", "\n\n"))
    assert other.output_token_ids == generate(prompt(5, 1), 12)
    assert loop.scheduler.pool.num_free == 64
