"""When a sequence ends."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a sequence ended: `reason` is "stop" or "length"; `stop_reason` is the stop token id that the user named,
    `None` for the model's own end-of-sequence token."""

    reason: str
    stop_reason: int | None = None


@dataclass(frozen=True, slots=True)
class StopRules:
    """What ends a sequence.

    Attributes:
        eos_token_ids: the model's end-of-sequence tokens; empty if the request ignores them.
        stop_token_ids: tokens the request named.
        max_length: prompt and output together may have this many tokens.
    """

    eos_token_ids: frozenset[int]
    stop_token_ids: frozenset[int]
    max_length: int

    def check(self, token_id: int, length: int) -> Finish | None:
        """Judge a sequence that has just reached `length` tokens with `token_id`."""
        if token_id in self.stop_token_ids:
            return Finish("stop", token_id)
        if token_id in self.eos_token_ids:
            return Finish("stop")
        if length >= self.max_length:
            return Finish("length")
        return None
