"""Between the wire's messages and the engine's values."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any, Literal

from jpaged.errors import InvalidRequestError
from jpaged.params import BeamSearchParams, Params, SamplingParams
from jpaged.request import CompletionOutput, Message, OutputDelta, Prompt, RequestOutput
from jpaged.v1 import inference_pb2 as pb

# Fields of the wire's SamplingParams that the engine honours, under the same names.
HONOURED = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "max_tokens",
    "stop_token_ids",
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "priority",
    "cache_salt",
    "skip_reading_prefix_cache",
)
# What max_tokens says on the wire to go on to the context's end.
UNLIMITED_TOKENS = -1
# The value with which a field that the engine cannot honour yet asks for nothing. Fields that are in neither list are
# refused whenever they are set.
NEUTRAL: dict[str, Any] = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
    "include_stop_str_in_output": False,
    "spaces_between_special_tokens": True,
}
_EARLY_STOPPING: dict[Any, bool | Literal["never"]] = {
    pb.EARLY_STOPPING_FALSE: False,
    pb.EARLY_STOPPING_TRUE: True,
    pb.EARLY_STOPPING_NEVER: "never",
}
_FINISH_REASONS = {"stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH}
_FINISH_NAMES = {number: name for name, number in _FINISH_REASONS.items()}


def read_prompt(request: pb.GenerateRequest, render_chat: Callable[[list[Message]], Prompt]) -> Prompt:
    """Raises InvalidRequestError if there is none, or the chat cannot be put into the model's template."""
    kind = request.WhichOneof("prompt")
    if kind == "text":
        return request.text
    if kind == "token_ids":
        return {"prompt_token_ids": list(request.token_ids.ids)}
    if kind == "chat":
        return render_chat(read_messages(request.chat))
    raise InvalidRequestError("prompt is not set; give text, token_ids or chat")


def read_prefix(request: pb.PinPrefixRequest) -> Prompt:
    """Raises InvalidRequestError if there is none."""
    kind = request.WhichOneof("prefix")
    if kind is None:
        raise InvalidRequestError("prefix is not set; give text or token_ids")
    return request.text if kind == "text" else {"prompt_token_ids": list(request.token_ids.ids)}


def read_messages(chat: pb.Chat) -> list[Message]:
    """Raises InvalidRequestError for an empty conversation."""
    if not chat.messages:
        raise InvalidRequestError("chat.messages is empty; give at least one message")
    return [{"role": message.role, "content": message.content} for message in chat.messages]


def read_sampling(message: pb.SamplingParams) -> SamplingParams:
    """Raises InvalidRequestError for a value out of range, and for a field that cannot be honoured."""
    values: dict[str, Any] = {}
    for field, value in message.ListFields():
        if field.name in HONOURED:
            values[field.name] = tuple(value) if field.is_repeated else value
        elif field.name not in NEUTRAL:
            raise InvalidRequestError(
                f"sampling.{field.name} is set, but this server does not support it; leave it out"
            )
        elif value != NEUTRAL[field.name]:
            raise InvalidRequestError(
                f"sampling.{field.name} is {value!r}, this server supports only {NEUTRAL[field.name]!r}; leave it out"
            )
    _read_max_tokens(values)
    return SamplingParams(**values)


def read_method(request: pb.GenerateRequest) -> Params:
    """Raises InvalidRequestError as `read_sampling`."""
    if request.WhichOneof("method") == "beam_search":
        return read_beam_search(request.beam_search)
    return read_sampling(request.sampling)


def read_beam_search(message: pb.BeamSearchParams) -> BeamSearchParams:
    """Raises InvalidRequestError for a value out of range."""
    values = {field.name: value for field, value in message.ListFields()}
    values["beam_width"] = message.beam_width
    _read_max_tokens(values)
    stopping = values.pop("early_stopping", pb.EARLY_STOPPING_FALSE)
    if stopping not in _EARLY_STOPPING:
        raise InvalidRequestError(f"beam_search.early_stopping is {stopping}, which is none of the known values")
    return BeamSearchParams(**values, early_stopping=_EARLY_STOPPING[stopping])


def _read_max_tokens(values: dict[str, Any]) -> None:
    if values.get("max_tokens") == UNLIMITED_TOKENS:
        values["max_tokens"] = None


def write_method(request: pb.GenerateRequest, params: Params) -> None:
    """Put the parameters of either method into a request."""
    if isinstance(params, BeamSearchParams):
        values = {field.name: getattr(params, field.name) for field in fields(params)}
        if params.max_tokens is None:
            values["max_tokens"] = UNLIMITED_TOKENS
        stopping = values.pop("early_stopping")
        number = next(number for number, value in _EARLY_STOPPING.items() if value == stopping)
        given = {name: value for name, value in values.items() if value is not None}
        request.beam_search.CopyFrom(pb.BeamSearchParams(**given, early_stopping=number))
    else:
        request.sampling.CopyFrom(write_sampling(params))


def write_sampling(params: SamplingParams) -> pb.SamplingParams:
    """The inverse of `read_sampling`."""
    values = {name: getattr(params, name) for name in HONOURED}
    if params.max_tokens is None:
        values["max_tokens"] = UNLIMITED_TOKENS  # unset means the default
    return pb.SamplingParams(**{name: value for name, value in values.items() if value is not None})


def write_prompt(request: pb.GenerateRequest, prompt: Prompt | list[Message]) -> None:
    """Put a text, token ids or a conversation into a request."""
    if isinstance(prompt, str):
        request.text = prompt
    elif isinstance(prompt, dict):
        request.token_ids.ids.extend(prompt["prompt_token_ids"])
        request.token_ids.SetInParent()
    else:
        request.chat.messages.extend(pb.ChatMessage(**message) for message in prompt)
        request.chat.SetInParent()


def write_delta(delta: OutputDelta) -> pb.GenerateStreamResponse:
    response = pb.GenerateStreamResponse(request_id=delta.request.request_id, delta=_write_completion(delta))
    if delta.finished:
        response.usage.CopyFrom(_usage(delta.request))
    return response


def write_output(output: RequestOutput) -> pb.GenerateResponse:
    completions = [_write_completion(completion) for completion in output.outputs]
    return pb.GenerateResponse(request_id=output.request_id, completions=completions, usage=_usage(output))


def read_completion(completion: pb.Completion) -> CompletionOutput:
    stop_reason = completion.WhichOneof("stop_reason")
    return CompletionOutput(
        index=completion.index,
        text=completion.text,
        token_ids=list(completion.token_ids),
        finish_reason=_FINISH_NAMES.get(completion.finish_reason),
        stop_reason=None if stop_reason is None else getattr(completion, stop_reason),
        cumulative_logprob=completion.cumulative_logprob if completion.HasField("cumulative_logprob") else None,
        score=completion.score if completion.HasField("score") else None,
    )


def _write_completion(source: CompletionOutput | OutputDelta) -> pb.Completion:
    """A sequence, or what is new of one: the two say it in the same words."""
    completion = pb.Completion(
        index=source.index,
        text=source.text,
        token_ids=source.token_ids,
        cumulative_logprob=source.cumulative_logprob,
        score=source.score,
    )
    if source.finish_reason is not None:
        completion.finish_reason = _FINISH_REASONS[source.finish_reason]
    if isinstance(source.stop_reason, str):
        completion.stop_string = source.stop_reason
    elif source.stop_reason is not None:
        completion.stop_token_id = source.stop_reason
    return completion


def _usage(output: RequestOutput) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=len(output.prompt_token_ids),
        cached_tokens=output.num_cached_tokens,
        generated_tokens=sum(len(completion.token_ids) for completion in output.outputs),
    )
