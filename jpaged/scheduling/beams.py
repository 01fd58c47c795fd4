"""Lets the beams of a group go on: they take over each other's sequences by forking; nothing is computed again."""

from jpaged.scheduling.books import Books
from jpaged.scheduling.sequence import Sequence, SequenceGroup
from jpaged.step_plan import StepResult


def advance_beams(books: Books, group: SequenceGroup, places: list[int], result: StepResult) -> None:
    """Give each beam its next token, or end the group when its search is done.

    Args:
        places: where the group's sequences stand in the result, in their order.
    """
    beams, parents = group.beams, list(group.live)
    found = result.logprobs
    assert beams is not None and found is not None
    chosen = beams.advance(
        [sequence.output_token_ids for sequence in parents],
        [(found.candidate_ids[place].tolist(), found.candidate_logprobs[place].tolist()) for place in places],
    )
    if not chosen:
        for sequence in parents:
            books.end(sequence)
        return
    # The first child of a beam goes on in its place; the others take places whose beams have no children.
    heirs = {child.parent: parents[child.parent] for child in chosen}
    childless = [sequence for place, sequence in enumerate(parents) if place not in heirs]
    live: list[Sequence] = []
    for child in chosen:
        sequence = heirs.pop(child.parent, None)
        if sequence is None:
            sequence = childless.pop() if childless else _new_beam(books, group)
            parent = parents[child.parent]
            books.give_up_names(sequence)
            sequence.become_fork_of(parent, parent.num_planned_tokens)
            sequence.token_ids = list(parent.token_ids)
            books.row_copies.append((parent, sequence))
        live.append(sequence)
    for sequence in childless:
        _retire_beam(books, sequence)
    group.live = live
    if live[0].num_planned_tokens == 0:  # its pages were dropped meanwhile: the prompt is computed once for all again
        group.is_forked = len(live) == 1
    for sequence, child in zip(live, chosen, strict=True):
        sequence.token_ids.append(child.token_id)
        books.publish(sequence, books.next_step - 1)


def _new_beam(books: Books, group: SequenceGroup) -> Sequence:
    first = group.live[0]
    sequence = Sequence(books.new_sequence_id(), group, first.index, first.sampling, books.new_page_table())
    books.sequences[sequence.sequence_id] = sequence
    if first.row >= 0:
        sequence.row = group.spare_rows.pop()
    return sequence


def _retire_beam(books: Books, sequence: Sequence) -> None:
    del books.sequences[sequence.sequence_id]
    books.give_up_names(sequence)
    sequence.table.release()
    if sequence.row >= 0:
        sequence.group.spare_rows.append(sequence.row)
        sequence.row = -1
