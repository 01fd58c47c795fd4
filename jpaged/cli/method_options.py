"""The options of how to go on from a prompt: a field of SamplingParams or BeamSearchParams each."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from jpaged.cli.options import Option, with_options
from jpaged.errors import InvalidRequestError
from jpaged.params import BeamSearchParams, Params, SamplingParams, StructuredOutputs

_LOGITS, _SHAPE, _END, _OUTPUT = "What may be drawn", "Structured output", "When it ends", "What comes back"
_REQUEST, _SEARCH = "How the request is treated", "Beam search"
_SAMPLING_OPTIONS = {
    "temperature": Option(float, 0.0, "Divides the logits; 0 always takes the most likely token."),
    "top_p": Option(float, 1.0, "Keep the most likely tokens that make up this probability."),
    "top_k": Option(int, 0, "Keep the k most likely tokens; 0 keeps all."),
    "min_p": Option(float, 0.0, "Keep tokens at least this likely relative to the most likely one."),
    "seed": Option(int | None, None, "Makes the draw repeatable. Default: fresh noise."),
    "presence_penalty": Option(float, 0.0, "Subtracted from logits of tokens in the output.", panel=_LOGITS),
    "frequency_penalty": Option(float, 0.0, "Subtracted for each time in the output.", panel=_LOGITS),
    "repetition_penalty": Option(float, 1.0, "Above 1: against tokens in prompt and output.", panel=_LOGITS),
    "logit_bias": Option(
        list[str] | None, None, "Add VALUE to a token's logit; repeat it for more.", metavar="ID=VALUE", panel=_LOGITS
    ),
    "allowed_token_ids": Option(
        list[int] | None, None, "Draw no other token; repeat it.", "--allowed-token-id", "ID", panel=_LOGITS
    ),
    "bad_words": Option(
        list[str] | None, None, "Never write this; repeat it for more.", "--bad-word", "TEXT", panel=_LOGITS
    ),
    "json_schema": Option(Path | None, None, "JSON that this schema allows.", metavar="FILE", panel=_SHAPE),
    "json_object": Option(bool, False, "Any JSON object.", "--json-object", panel=_SHAPE),
    "regex": Option(str | None, None, "A text that this regular expression matches.", panel=_SHAPE),
    "choice": Option(list[str] | None, None, "One of these; repeat it.", metavar="TEXT", panel=_SHAPE),
    "grammar": Option(
        Path | None, None, "What this grammar allows, Lark's notation or EBNF.", metavar="FILE", panel=_SHAPE
    ),
    "max_tokens": Option(int | None, 256, "Most tokens to generate.", panel=_END),
    "min_tokens": Option(int, 0, "Fewest tokens before anything but length ends it.", panel=_END),
    "stop": Option(list[str] | None, None, "End before this text; repeat it for more.", metavar="TEXT", panel=_END),
    "include_stop_str_in_output": Option(bool, False, "End behind it.", "--include-stop", panel=_END),
    "stop_token_ids": Option(
        list[int] | None, None, "End with this token; repeat it for more.", "--stop-token-id", "ID", panel=_END
    ),
    "ignore_eos": Option(bool, False, "Go on after an end-of-sequence token.", "--ignore-eos", panel=_END),
    "skip_special_tokens": Option(
        bool, True, "Leave special tokens out.", "--skip-special-tokens/--keep-special-tokens", panel=_OUTPUT
    ),
    "spaces_between_special_tokens": Option(bool, True, "Where tokens get spaces.", panel=_OUTPUT),
    "truncate_prompt_tokens": Option(
        int | None, None, "Keep the prompt's last tokens; -1: all that fit.", metavar="N", panel=_REQUEST
    ),
    "priority": Option(int, 0, "Lower goes first, if the engine's policy is priority.", panel=_REQUEST),
    "cache_salt": Option(str, "", "Share cached prefixes only with the same salt.", panel=_REQUEST),
    "skip_reading_prefix_cache": Option(
        bool, False, "Compute the whole prompt.", "--skip-reading-prefix-cache", panel=_REQUEST
    ),
}
_METHOD_OPTIONS = _SAMPLING_OPTIONS | {
    "n": Option(int, 1, "Sequences to draw for each prompt."),
    "logprobs": Option(
        int | None, None, "Of the k most likely tokens and the drawn one; -1: of all.", metavar="K", panel=_OUTPUT
    ),
    "prompt_logprobs": Option(int | None, None, "The same for the prompt.", metavar="K", panel=_OUTPUT),
    "detokenize": Option(bool, True, "Make text, not only token ids.", panel=_OUTPUT),
    "beam_width": Option(int | None, None, "Search with this many beams instead of drawing.", panel=_SEARCH),
    "length_penalty": Option(float, 1.0, "Above 0 favours longer output.", panel=_SEARCH),
    "early_stopping": Option(str, "false", "true, false or never, as in transformers.", panel=_SEARCH),
}
_EARLY_STOPPING: dict[str, Any] = {"true": True, "false": False, "never": "never"}
_BEAM_FIELDS = frozenset(field.name for field in fields(BeamSearchParams))


def with_sampling_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the sampling options; it gets them as one SamplingParams in its parameter `params`."""
    return with_options(command, "params", _SAMPLING_OPTIONS, _read_sampling, "Sampling")


def with_method_options(command: Callable[..., None]) -> Callable[..., None]:
    """As `with_sampling_options`, and with what only whole answers have: samples, logprobs, beams. The command gets a
    SamplingParams or a BeamSearchParams."""
    return with_options(command, "params", _METHOD_OPTIONS, _read_method, "Sampling")


def _read_method(values: dict[str, Any]) -> Params:
    beams = {name: values.pop(name) for name in ("beam_width", "length_penalty", "early_stopping")}
    if beams["beam_width"] is None:
        return _read_sampling(values)
    shared = {name: value for name, value in values.items() if name in _BEAM_FIELDS}
    drawn = [name for name in values.keys() - shared if values[name] not in (_METHOD_OPTIONS[name].default, [])]
    if drawn:
        raise InvalidRequestError(
            f"{', '.join(sorted(drawn))} cannot go with beam_width: a search only looks for the most likely"
        )
    beams["early_stopping"] = _EARLY_STOPPING.get(beams["early_stopping"], beams["early_stopping"])
    return BeamSearchParams(**beams, **shared)


def _read_sampling(values: dict[str, Any]) -> SamplingParams:
    """Raises InvalidRequestError for a value out of range, or a file that cannot be read."""
    wanted = {name: values.pop(name) for name in ("json_schema", "json_object", "regex", "choice", "grammar")}
    for name in ("json_schema", "grammar"):
        wanted[name] = read_text_file(name, wanted[name])
    wanted["choice"] = tuple(wanted["choice"] or ()) or None
    if any(value not in (None, False) for value in wanted.values()):
        values["structured_outputs"] = StructuredOutputs(**wanted)
    values["logit_bias"] = dict(map(_read_bias, values["logit_bias"] or ())) or None
    values["allowed_token_ids"] = values["allowed_token_ids"] or None
    for name in ("bad_words", "stop", "stop_token_ids"):
        values[name] = tuple(values[name] or ())
    return SamplingParams(**values)


def read_text_file(name: str, path: Path | None) -> str | None:
    """Raises InvalidRequestError if the file that an option names cannot be read."""
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"{name} names {path}, which cannot be read: {error}") from error


def _read_bias(text: str) -> tuple[int, float]:
    token_id, _, value = text.partition("=")
    try:
        return int(token_id), float(value)
    except ValueError as error:
        raise InvalidRequestError(f"logit_bias is {text!r}, it must be ID=VALUE, such as 42=-1.5") from error
