"""What users ask for and what they get back."""

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

from jpaged.errors import InvalidRequestError

MAX_SEED = 2**64 - 1
MAX_TEMPERATURE = 1e6  # beyond any use; every token is as likely as any other long before
MAX_BEAM_WIDTH = 10
MAX_LENGTH_PENALTY = 10.0  # to its power, the length of any context is still a number that floats hold


class TokensPrompt(TypedDict):
    """A prompt that is already tokenized."""

    prompt_token_ids: list[int]


Prompt = str | TokensPrompt
Message = dict[str, Any]  # of a conversation: {"role": ..., "content": ...}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn and when a sequence ends.

    Attributes:
        temperature: divides the logits; 0 takes the most likely token (greedy).
        top_p: keep the most likely tokens whose probabilities sum to at least this; 1 keeps all.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        min_p: keep tokens at least this likely relative to the most likely one; 0 keeps all.
        seed: makes the draw repeatable whatever else runs; `None` draws fresh noise.
        max_tokens: most tokens to generate; `None` goes on to the context's end.
        stop_token_ids: tokens that end the sequence; the token is kept in `token_ids`, not in the text.
        ignore_eos: go on after an end-of-sequence token.
        skip_special_tokens: leave special tokens out of the text.
        detokenize: make text at all.
        n: sequences to generate; they share the prompt, and each has its own noise.
        priority: lower goes first, where the engine's policy is "priority".
        cache_salt: requests share cached prefixes only with those of the same salt.
        skip_reading_prefix_cache: compute the whole prompt, whatever is cached.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    priority: int = 0
    cache_salt: str = ""
    skip_reading_prefix_cache: bool = False

    def __post_init__(self) -> None:
        """Raise InvalidRequestError for a value out of range, naming the field, the value and the range."""
        _whole("n", self.n, low=1)
        _whole("priority", self.priority, low=-(2**31), high=2**31 - 1)
        _text("cache_salt", self.cache_salt)
        _number("temperature", self.temperature, low=0.0, high=MAX_TEMPERATURE)
        _number("top_p", self.top_p, low=0.0, high=1.0, above_low=True)
        _number("min_p", self.min_p, low=0.0, high=1.0)
        _whole("top_k", self.top_k, low=-1, high=2**31 - 1)
        for name in ("ignore_eos", "skip_special_tokens", "detokenize", "skip_reading_prefix_cache"):
            _boolean(name, getattr(self, name))
        if self.seed is not None:
            _whole("seed", self.seed, low=0, high=MAX_SEED)
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, low=1)
        object.__setattr__(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """A search for the most likely sequences, by the rules of transformers' beam search.

    Attributes:
        beam_width: beams kept, and sequences returned, best first.
        max_tokens: most tokens to generate; `None` goes on to the context's end.
        length_penalty: a hypothesis scores sum(logprobs) / length ** length_penalty.
        temperature: divides the logits before their logprobs are taken; 0 leaves them as they are.
        early_stopping: True stops when `beam_width` hypotheses are complete; False when no running beam looks better
            at its present length; "never" when none could become better at any length.
        ignore_eos: an end-of-sequence token completes nothing.
        include_stop_str_in_output: leave the end-of-sequence token in the text.
        skip_special_tokens, detokenize, priority, cache_salt, skip_reading_prefix_cache: as in SamplingParams.
    """

    beam_width: int
    max_tokens: int | None = 16
    length_penalty: float = 1.0
    temperature: float = 0.0
    early_stopping: bool | Literal["never"] = False
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    priority: int = 0
    cache_salt: str = ""
    skip_reading_prefix_cache: bool = False

    def __post_init__(self) -> None:
        """Raise InvalidRequestError for a value out of range, naming the field, the value and the range."""
        _whole("beam_width", self.beam_width, low=1, high=MAX_BEAM_WIDTH)
        _whole("priority", self.priority, low=-(2**31), high=2**31 - 1)
        _text("cache_salt", self.cache_salt)
        _number("length_penalty", self.length_penalty, low=-MAX_LENGTH_PENALTY, high=MAX_LENGTH_PENALTY)
        _number("temperature", self.temperature, low=0.0, high=MAX_TEMPERATURE)
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, low=1)
        for name in (
            *("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"),
            "skip_reading_prefix_cache",
        ):
            _boolean(name, getattr(self, name))
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise InvalidRequestError(f'early_stopping is {self.early_stopping!r}, it must be true, false or "never"')


Params = SamplingParams | BeamSearchParams


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that has been checked: it can be served. `prompt` is `None` when the prompt came as token ids;
    `max_length` is the most tokens of prompt and output."""

    prompt: str | None
    prompt_token_ids: list[int]
    params: Params
    max_length: int


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence. `cumulative_logprob` and `score` (the logprob over the length to the power of the length
    penalty) are those of a beam. `finish_reason` is "stop" or "length", or `None` while it runs; `stop_reason` is the
    stop token id that ended it, `None` if that was the model's own end-of-sequence token."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    score: float | None = None


@dataclass(slots=True)
class RequestTimes:
    """When things happened, in seconds of `time.monotonic()`; `None` (for `last_token` 0) if not yet."""

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float = 0.0
    finished: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """Everything known of a request. `prompt` is `None` when the prompt came as token ids."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    times: RequestTimes
    num_cached_tokens: int = 0
    num_preemptions: int = 0


@dataclass(slots=True)
class OutputDelta:
    """What a step added to one sequence of a request.

    `request` holds everything so far, and goes on changing; what is said here stays. `finish_reason` and `stop_reason`
    are those of the sequence if this was its end; `finished` says whether it was the end of the whole request.
    """

    request: RequestOutput
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    finished: bool = False
    cumulative_logprob: float | None = None
    score: float | None = None


def validate_prompt_token_ids(token_ids: SequenceOf[Any], vocabulary_size: int, max_model_len: int) -> list[int]:
    """Return the ids as a list. Raise InvalidRequestError if empty, out of the vocabulary, or too long.

    One position is kept free for the first generated token.
    """
    ids = _token_ids("prompt_token_ids", token_ids)
    if not ids:
        raise InvalidRequestError("the prompt has no tokens; give at least one")
    if len(ids) >= max_model_len:
        raise InvalidRequestError(
            f"the prompt has {len(ids)} tokens, the limit is {max_model_len - 1} (a context of {max_model_len}"
            " less one token to generate); shorten it, or raise max_model_len if the model allows it"
        )
    worst = max(ids)
    if worst >= vocabulary_size:
        raise InvalidRequestError(
            f"prompt_token_ids holds {worst}, the vocabulary has ids 0..{vocabulary_size - 1};"
            " was the prompt made with another tokenizer?"
        )
    return list(ids)


def _token_ids(name: str, values: SequenceOf[Any]) -> tuple[int, ...]:
    ids: list[int] = []
    try:
        iter(values)
    except TypeError as error:
        raise InvalidRequestError(f"{name} is {values!r}, it must be a list of token ids") from error
    for value in values:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise InvalidRequestError(f"{name} holds {value!r}, token ids are whole numbers")
        token_id = int(value)
        if token_id < 0:
            raise InvalidRequestError(f"{name} holds {token_id}, token ids are at least 0")
        ids.append(token_id)
    return tuple(ids)


def _number(name: str, value: object, *, low: float, high: float, above_low: bool = False) -> None:
    fits = isinstance(value, int | float) and not isinstance(value, bool) and value == value
    if not fits or not low <= value <= high or (above_low and value == low):  # type: ignore[operator]
        upper = "" if high == math.inf else f" and at most {high:g}"
        raise InvalidRequestError(
            f"{name} is {value!r}, it must be {'above' if above_low else 'at least'} {low:g}{upper}"
        )


def _text(name: str, value: object) -> None:
    # Surrogates are the only characters that no encoding takes.
    if not isinstance(value, str) or any("\ud800" <= character <= "\udfff" for character in value):
        raise InvalidRequestError(f"{name} is {value!r}, it must be a text that UTF-8 can hold")


def _boolean(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{name} is {value!r}, it must be true or false")


def _whole(name: str, value: object, *, low: int, high: int | None = None) -> None:
    fits = isinstance(value, int) and not isinstance(value, bool)
    if not fits or value < low or (high is not None and value > high):  # type: ignore[operator]
        upper = "" if high is None else f" and at most {high}"
        raise InvalidRequestError(f"{name} is {value!r}, it must be a whole number of at least {low}{upper}")
