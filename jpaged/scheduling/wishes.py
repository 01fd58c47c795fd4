"""What a request wants of a step beyond its tokens."""

from jpaged.scheduling.sequence import Sequence
from jpaged.step_plan import MAX_CANDIDATES, ON_DEVICE, ScoredToken, StepPlan


def note_wishes(plan: StepPlan, sequence: Sequence, end: int, samples: bool) -> None:
    """Put into the plan what its next entry, a sequence's tokens up to `end`, needs beyond them.

    That is the grammar's mask, and logprobs of the token that is drawn and of the prompt.
    """
    group, place, first_index = sequence.group, len(plan.sequence_ids), len(plan.token_ids)
    start = sequence.num_planned_tokens
    for position in range(max(start + 1, group.num_scored), min(end + 1, group.prompt_length)):
        wanted = plan.wide if is_wide(group.num_prompt_logprobs) else plan.scored
        index = first_index + position - 1 - start
        wanted.append(ScoredToken(place, index, group.group_id, position, group.prompt_token_ids[position]))
        group.num_scored = position + 1
    if not samples:
        return
    plan.wants_logprobs |= group.beams is not None or group.num_logprobs is not None
    if sequence.grammar is not None:
        plan.masks.append((place, sequence.grammar.next_mask()))
    if is_wide(group.num_logprobs):
        plan.wide.append(ScoredToken(place, first_index + end - 1 - start, group.group_id, end, ON_DEVICE))


def is_wide(num_logprobs: int | None) -> bool:
    """Whether more logprobs are wanted than a step's result has room for."""
    return num_logprobs is not None and not 0 <= num_logprobs <= MAX_CANDIDATES
