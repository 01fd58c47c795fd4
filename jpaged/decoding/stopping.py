"""When a sequence ends."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a sequence ended.

    Attributes:
        reason: "stop", "length", or "error" if its own constraints left no token.
        stop_reason: the stop token id or stop string that the user named; `None` for the model's own end-of-sequence
            token, and where the grammar was complete; of an error, what went wrong.
        by_token: its last token is what ended it, and no part of the text.
    """

    reason: str
    stop_reason: int | str | None = None
    by_token: bool = False


@dataclass(frozen=True, slots=True)
class StopRules:
    """What ends a sequence.

    Attributes:
        eos_token_ids: the model's end-of-sequence tokens; empty if the request ignores them.
        stop_token_ids: tokens the request named.
        max_length: prompt and output together may have this many tokens.
        min_length: a token stops nothing before so many of prompt and output.
    """

    eos_token_ids: frozenset[int]
    stop_token_ids: frozenset[int]
    max_length: int
    min_length: int = 0

    def check(self, token_id: int, length: int) -> Finish | None:
        """Judge a sequence that has just reached `length` tokens with `token_id`."""
        if length > self.min_length:
            if token_id in self.stop_token_ids:
                return Finish("stop", token_id, by_token=True)
            if token_id in self.eos_token_ids:
                return Finish("stop", by_token=True)
        if length >= self.max_length:
            return Finish("length")
        return None
