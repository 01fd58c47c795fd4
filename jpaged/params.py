"""What users may ask for: how tokens are drawn, when a sequence ends, what comes back. Validated in one place."""

import json
import math
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, fields
from typing import Any, Literal, cast

from jpaged.errors import InvalidRequestError

MAX_SEED = 2**64 - 1
MAX_TEMPERATURE = 1e6  # beyond any use; every token is as likely as any other long before
MAX_BEAM_WIDTH = 10
MAX_LENGTH_PENALTY = 10.0  # to its power, the length of any context is still a number that floats hold
MAX_ADDITIVE_PENALTY = 2.0  # what OpenAI's interface allows
MAX_REPETITION_PENALTY = 1e3
MAX_LOGIT_BIAS = 1e4  # far beyond any logit, and float32 still tells biased logits apart
# Sizes of what a row keeps on the device.
MAX_LOGIT_BIASES = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_BAD_WORDS = 128
MAX_BAD_WORD_TOKENS = 16
# Every character of output costs work for each of them.
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARACTERS = 4096
WHOLE_VOCABULARY = -1  # logprobs of every token

OutputKind = Literal["delta", "cumulative", "final_only"]
OUTPUT_KINDS: tuple[OutputKind, ...] = ("delta", "cumulative", "final_only")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """What the output must look like; exactly one field is set.

    Attributes:
        json_schema: a JSON schema, as text or as a mapping.
        regex: a regular expression that the whole output matches.
        choice: texts, one of which the output is.
        grammar: a context-free grammar, in Lark's notation or in EBNF.
        json_object: any JSON object.
    """

    json_schema: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: SequenceOf[str] | None = None
    grammar: str | None = None
    json_object: bool = False

    def __post_init__(self) -> None:
        """Raise InvalidRequestError unless exactly one field is set, to a value of its type. Whether a schema, an
        expression or a grammar can be followed shows when the request is prepared."""
        _boolean("structured_outputs.json_object", self.json_object)
        given = [field.name for field in fields(self) if getattr(self, field.name) not in (None, False)]
        if len(given) != 1:
            raise InvalidRequestError(
                f"structured_outputs sets {', '.join(given) or 'nothing'}; set exactly one of"
                f" {', '.join(field.name for field in fields(self))}"
            )
        for name in ("regex", "grammar"):
            if getattr(self, name) is not None:
                _text(f"structured_outputs.{name}", getattr(self, name))
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", _schema_text(self.json_schema))
        if self.choice is not None:
            choice = _texts("structured_outputs.choice", self.choice)
            if not choice:
                raise InvalidRequestError("structured_outputs.choice is empty; give at least one text")
            object.__setattr__(self, "choice", choice)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn, when a sequence ends and what comes back.

    The order on the device: logprobs are taken from the model's own logits. Then, in float32, allowed_token_ids (and
    structured_outputs), bad_words, min_tokens, logit_bias, and the penalties (repetition, frequency, presence). Greedy
    rows take the most likely token; the others divide by the temperature and apply min_p, top_k and top_p.

    Attributes:
        n: sequences to generate; they share the prompt, and each has its own noise.
        temperature: divides the logits; 0 takes the most likely token (greedy).
        top_p: keep the most likely tokens whose probabilities sum to at least this; 1 keeps all.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        min_p: keep tokens at least this likely relative to the most likely one; 0 keeps all.
        seed: makes the draw repeatable whatever else runs; `None` draws fresh noise.
        presence_penalty: subtracted from the logits of tokens that were generated before.
        frequency_penalty: subtracted once for each time that a token was generated before.
        repetition_penalty: divides positive logits of tokens in the prompt or output, multiplies negative ones.
        logit_bias: {token id: what is added to its logit}.
        allowed_token_ids: no other token is drawn; `None` allows all.
        bad_words: texts that are never completed: the token that would do it is not drawn.
        structured_outputs: what the text must look like.
        max_tokens: most tokens to generate; `None` goes on to the context's end.
        min_tokens: fewest tokens before an end-of-sequence token, a stop token id or a stop string may end it.
        stop: texts that end the sequence; the text ends before the one that was met.
        include_stop_str_in_output: the text ends behind it instead.
        stop_token_ids: tokens that end the sequence; the token is kept in `token_ids`, not in the text.
        ignore_eos: go on after an end-of-sequence token.
        logprobs: give logprobs of the k most likely tokens and of the drawn one; -1 gives all.
        prompt_logprobs: the same for each token of the prompt but the first; the prompt is then computed whole.
        detokenize: make text at all.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: put spaces between them, where the tokenizer's decoder puts them between tokens.
        output_kind: what a stream yields: what is new ("delta"), all so far ("cumulative"), or each sequence when it
            has ended ("final_only").
        truncate_prompt_tokens: keep only so many of the prompt's last tokens; -1 keeps as many as the context holds.
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
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: SequenceOf[int] | None = None
    bad_words: SequenceOf[str] = ()
    structured_outputs: StructuredOutputs | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: SequenceOf[str] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: SequenceOf[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    output_kind: OutputKind = "delta"
    truncate_prompt_tokens: int | None = None
    priority: int = 0
    cache_salt: str = ""
    skip_reading_prefix_cache: bool = False

    def __post_init__(self) -> None:
        """Raise InvalidRequestError for a value out of range, naming the field, the value and the range."""
        _whole("n", self.n, low=1)
        _number("temperature", self.temperature, low=0.0, high=MAX_TEMPERATURE)
        _number("top_p", self.top_p, low=0.0, high=1.0, above_low=True)
        _number("min_p", self.min_p, low=0.0, high=1.0)
        _whole("top_k", self.top_k, low=-1, high=2**31 - 1)
        for name in ("presence_penalty", "frequency_penalty"):
            _number(name, getattr(self, name), low=-MAX_ADDITIVE_PENALTY, high=MAX_ADDITIVE_PENALTY)
        _number("repetition_penalty", self.repetition_penalty, low=0.0, high=MAX_REPETITION_PENALTY, above_low=True)
        if self.seed is not None:
            _whole("seed", self.seed, low=0, high=MAX_SEED)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), low=WHOLE_VOCABULARY)
        if self.output_kind not in OUTPUT_KINDS:
            raise InvalidRequestError(
                f"output_kind is {self.output_kind!r}, it must be one of {', '.join(OUTPUT_KINDS)}"
            )
        if self.truncate_prompt_tokens is not None:
            _whole("truncate_prompt_tokens", self.truncate_prompt_tokens, low=-1)
            if self.truncate_prompt_tokens == 0:
                raise InvalidRequestError("truncate_prompt_tokens is 0, it must be -1 or at least 1")
        for name in ("include_stop_str_in_output", "spaces_between_special_tokens"):
            _boolean(name, getattr(self, name))
        _validate_common(self)
        self._validate_constraints()
        self._validate_stops()

    def _validate_constraints(self) -> None:
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _logit_bias(self.logit_bias))
        if self.allowed_token_ids is not None:
            allowed = validate_token_ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise InvalidRequestError("allowed_token_ids is empty, so no token could be drawn; leave it out")
            object.__setattr__(self, "allowed_token_ids", allowed)
        bad_words = _texts("bad_words", self.bad_words)
        if len(bad_words) > MAX_BAD_WORDS:
            raise InvalidRequestError(f"bad_words holds {len(bad_words)} words, at most {MAX_BAD_WORDS} are possible")
        object.__setattr__(self, "bad_words", bad_words)
        structured = cast(object, self.structured_outputs)
        if structured is not None and not isinstance(structured, StructuredOutputs):
            raise InvalidRequestError(
                f"structured_outputs is {self.structured_outputs!r}, it must be a StructuredOutputs object"
            )

    def _validate_stops(self) -> None:
        stop_token_ids = validate_token_ids("stop_token_ids", self.stop_token_ids)
        if len(stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequestError(
                f"stop_token_ids holds {len(stop_token_ids)} ids, at most {MAX_STOP_TOKEN_IDS} are possible"
            )
        object.__setattr__(self, "stop_token_ids", stop_token_ids)
        stop = _texts("stop", (self.stop,) if isinstance(self.stop, str) and self.stop else self.stop or ())
        if len(stop) > MAX_STOP_STRINGS or any(len(text) > MAX_STOP_STRING_CHARACTERS for text in stop):
            raise InvalidRequestError(
                f"stop holds {len(stop)} texts of up to {max(map(len, stop))} characters, at most {MAX_STOP_STRINGS} of"
                f" up to {MAX_STOP_STRING_CHARACTERS} are possible"
            )
        object.__setattr__(self, "stop", stop)
        if stop and not self.detokenize:
            raise InvalidRequestError("stop is set, but detokenize is false: without text no stop string can be found")
        _whole("min_tokens", self.min_tokens, low=0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens is {self.min_tokens}, it must be at most max_tokens, which is {self.max_tokens}"
            )


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
        _number("length_penalty", self.length_penalty, low=-MAX_LENGTH_PENALTY, high=MAX_LENGTH_PENALTY)
        _number("temperature", self.temperature, low=0.0, high=MAX_TEMPERATURE)
        _boolean("include_stop_str_in_output", self.include_stop_str_in_output)
        _validate_common(self)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise InvalidRequestError(f'early_stopping is {self.early_stopping!r}, it must be true, false or "never"')


Params = SamplingParams | BeamSearchParams


def _validate_common(params: "Params") -> None:
    """Check the fields that both methods have."""
    if params.max_tokens is not None:
        _whole("max_tokens", params.max_tokens, low=1)
    for name in ("ignore_eos", "skip_special_tokens", "detokenize", "skip_reading_prefix_cache"):
        _boolean(name, getattr(params, name))
    _whole("priority", params.priority, low=-(2**31), high=2**31 - 1)
    _text("cache_salt", params.cache_salt)


def _logit_bias(values: object) -> dict[int, float]:
    if not isinstance(values, Mapping):
        raise InvalidRequestError(f"logit_bias is {values!r}, it must map token ids to numbers")
    given = cast(Mapping[Any, Any], values)
    ids = validate_token_ids("logit_bias", list(given))
    if len(ids) > MAX_LOGIT_BIASES:
        raise InvalidRequestError(f"logit_bias holds {len(ids)} ids, at most {MAX_LOGIT_BIASES} are possible")
    for token_id, bias in given.items():
        _number(f"logit_bias[{token_id}]", bias, low=-MAX_LOGIT_BIAS, high=MAX_LOGIT_BIAS)
    return dict(zip(ids, map(float, given.values()), strict=True))


def _schema_text(schema: object) -> str:
    """A JSON schema as text."""
    if not isinstance(schema, str):
        try:
            return json.dumps(schema)
        except (TypeError, ValueError) as error:
            raise InvalidRequestError(f"structured_outputs.json_schema is not JSON: {error}") from error
    _text("structured_outputs.json_schema", schema)
    return schema


def _texts(name: str, values: object) -> tuple[str, ...]:
    if isinstance(values, str) or not isinstance(values, SequenceOf):
        raise InvalidRequestError(f"{name} is {values!r}, it must be a list of texts")
    texts = tuple(cast(SequenceOf[str], values))
    for text in texts:
        _text(name, text)
        if not text:
            raise InvalidRequestError(f"{name} holds an empty text; leave it out")
    return texts


def validate_token_ids(name: str, values: SequenceOf[Any]) -> tuple[int, ...]:
    """Return the ids of a list of whole numbers of at least 0; raise InvalidRequestError for anything else."""
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
