"""What users ask for and what they get back."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypedDict

from jpaged.errors import InvalidRequestError
from jpaged.params import Params, validate_token_ids
from jpaged.step_plan import RowConstraints


class TokensPrompt(TypedDict):
    """A prompt that is already tokenized."""

    prompt_token_ids: list[int]


Prompt = str | TokensPrompt
Message = dict[str, Any]  # of a conversation: {"role": ..., "content": ...}


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that has been checked: it can be served. `prompt` is `None` when the prompt came as token ids;
    `max_length` is the most tokens of prompt and output; `constraints` are what its rows keep on the device, and
    `grammar` is what `structured_outputs` was compiled to, if there is any."""

    prompt: str | None
    prompt_token_ids: list[int]
    params: Params
    max_length: int
    constraints: RowConstraints | None = None
    grammar: Any = None


class Logprob(NamedTuple):
    """A token's natural log of its probability under the model's own distribution, before any parameter acts on it;
    its rank in that distribution, 1 for the most likely token; and its text, if text is made."""

    logprob: float
    rank: int
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]  # at one position: the token that is there and the most likely ones, by token id


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence.

    Attributes:
        finish_reason: "stop" or "length"; `None` while it runs.
        stop_reason: the stop token id or stop string that ended it, `None` if that was the model's own end-of-sequence
            token or the end of what the grammar allows.
        logprobs: one entry for each token, the most likely first; `None` unless asked for.
        cumulative_logprob: the sum of the drawn tokens' logprobs, for a beam or if logprobs were asked for.
        score: of a beam, its logprob over its length to the power of the length penalty.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None
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
    """Everything known of a request. `prompt` is `None` when the prompt came as token ids; `prompt_logprobs` has one
    entry for each token of the prompt, `None` for the first, if it was asked for."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    times: RequestTimes
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None


@dataclass(slots=True)
class OutputDelta:
    """What a step added to one sequence of a request, or, in a cumulative stream, all that it has so far.

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
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    score: float | None = None


def validate_prompt_token_ids(token_ids: SequenceOf[Any], vocabulary_size: int, max_model_len: int) -> list[int]:
    """Return the ids as a list. Raise InvalidRequestError if empty, out of the vocabulary, or too long.

    One position is kept free for the first generated token.
    """
    ids = validate_token_ids("prompt_token_ids", token_ids)
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
