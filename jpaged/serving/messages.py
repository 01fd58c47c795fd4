"""Between the wire's prompts and answers and the engine's values."""

import json
from collections.abc import Callable, Iterable
from typing import Any

from jpaged.errors import InvalidRequestError
from jpaged.request import CompletionOutput, Logprob, Message, OutputDelta, Prompt, RequestOutput, TokenLogprobs
from jpaged.serving.method_messages import refuse_unknown
from jpaged.v1 import inference_pb2 as pb

# (messages, tools, chat_template_kwargs) -> prompt
RenderChat = Callable[[list[Message], list[dict[str, Any]] | None, dict[str, Any] | None], Prompt]
_FINISH_REASONS = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "error": pb.FINISH_REASON_ERROR,
}
_FINISH_NAMES = {number: name for name, number in _FINISH_REASONS.items()}


def read_prompt(request: pb.GenerateRequest, render_chat: RenderChat) -> Prompt:
    """Raises InvalidRequestError if there is none, or the chat cannot be put into the model's template."""
    kind = request.WhichOneof("prompt")
    if kind == "text":
        return request.text
    if kind == "token_ids":
        return {"prompt_token_ids": list(request.token_ids.ids)}
    if kind == "chat":
        return render_chat(*read_chat(request.chat))
    raise InvalidRequestError("prompt is not set; give text, token_ids or chat")


def read_prefix(request: pb.PinPrefixRequest) -> Prompt:
    """Raises InvalidRequestError if there is none."""
    kind = request.WhichOneof("prefix")
    if kind is None:
        raise InvalidRequestError("prefix is not set; give text or token_ids")
    return request.text if kind == "text" else {"prompt_token_ids": list(request.token_ids.ids)}


def read_chat(chat: pb.Chat) -> tuple[list[Message], list[dict[str, Any]] | None, dict[str, Any] | None]:
    """Return messages, tools and further variables of the template.

    Raises:
        InvalidRequestError: the conversation is empty, or what should be JSON is not.
    """
    refuse_unknown("chat", chat)
    if not chat.messages:
        raise InvalidRequestError("chat.messages is empty; give at least one message")
    messages = [_read_message(place, message) for place, message in enumerate(chat.messages)]
    tools = read_json("chat.tools_json", chat.tools_json, list)
    return messages, tools, read_json("chat.template_kwargs_json", chat.template_kwargs_json, dict)


def write_chat(
    messages: Iterable[Message],
    tools: list[dict[str, Any]] | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> pb.Chat:
    """The inverse of `read_chat`.

    Raises:
        InvalidRequestError: there is something that JSON cannot hold, or a message is none.
    """
    return pb.Chat(
        messages=map(_write_message, messages),
        tools_json=_json_text("tools", tools) if tools else "",
        template_kwargs_json=_json_text("chat_template_kwargs", chat_template_kwargs) if chat_template_kwargs else "",
    )


def write_prompt(request: pb.GenerateRequest, prompt: Prompt | list[Message], **chat: Any) -> None:
    """Put a text, token ids or a conversation into a request; `chat` are the tools and variables of `write_chat`.

    Raises:
        InvalidRequestError: as `write_chat`; there are tools or variables, but no conversation.
    """
    if isinstance(prompt, str | dict) and any(chat.values()):
        raise InvalidRequestError("tools and chat_template_kwargs go with a conversation: give a list of messages")
    if isinstance(prompt, str):
        request.text = prompt
    elif isinstance(prompt, dict):
        request.token_ids.CopyFrom(_token_ids(prompt["prompt_token_ids"]))
    else:
        request.chat.CopyFrom(write_chat(prompt, **chat))


def write_prefix(request: pb.PinPrefixRequest, prefix: Prompt) -> None:
    """The inverse of `read_prefix`."""
    if isinstance(prefix, str):
        request.text = prefix
    else:
        request.token_ids.CopyFrom(_token_ids(prefix["prompt_token_ids"]))


def write_delta(delta: OutputDelta, *, is_first: bool) -> pb.GenerateStreamResponse:
    """What the first and the last message of a stream have more than the others depends on where it stands."""
    response = pb.GenerateStreamResponse(request_id=delta.request.request_id, delta=_write_completion(delta))
    if is_first:
        response.prompt_logprobs.extend(_write_prompt_logprobs(delta.request))
    if delta.finished:
        response.usage.CopyFrom(_usage(delta.request))
    return response


def write_output(output: RequestOutput) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        request_id=output.request_id,
        completions=map(_write_completion, output.outputs),
        usage=_usage(output),
        prompt_logprobs=_write_prompt_logprobs(output),
    )


def read_completion(completion: pb.Completion) -> CompletionOutput:
    stop_reason = completion.WhichOneof("stop_reason")
    return CompletionOutput(
        index=completion.index,
        text=completion.text,
        token_ids=list(completion.token_ids),
        finish_reason=_FINISH_NAMES.get(completion.finish_reason),
        stop_reason=None if stop_reason is None else getattr(completion, stop_reason),
        logprobs=[_read_logprobs(logprobs) for logprobs in completion.logprobs] or None,
        cumulative_logprob=completion.cumulative_logprob if completion.HasField("cumulative_logprob") else None,
        score=completion.score if completion.HasField("score") else None,
    )


def read_prompt_logprobs(
    response: pb.GenerateResponse | pb.GenerateStreamResponse,
) -> tuple[list[int] | None, list[TokenLogprobs | None] | None]:
    """Return the prompt's token ids and their logprobs; `None` if they were not asked for."""
    token_ids = [logprobs.token.token_id for logprobs in response.prompt_logprobs]
    return token_ids or None, [_read_logprobs(logprobs) or None for logprobs in response.prompt_logprobs] or None


def _token_ids(ids: Iterable[int]) -> pb.TokenIds:
    try:
        return pb.TokenIds(ids=ids)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"prompt_token_ids holds something that is no token id: {error}") from error


def _read_message(place: int, message: pb.ChatMessage) -> Message:
    refuse_unknown(f"chat.messages[{place}]", message)
    read: Message = {"role": message.role}
    if message.HasField("content"):
        read["content"] = message.content
    return read | (read_json(f"chat.messages[{place}].further_json", message.further_json, dict) or {})


def _write_message(message: Message) -> pb.ChatMessage:
    further = dict(message)
    written = pb.ChatMessage(role=further.pop("role", ""))
    if isinstance(further.get("content"), str):
        written.content = further.pop("content")
    if further:
        written.further_json = _json_text("a message", further)
    return written


def read_json(name: str, text: str | None, kind: type[list | dict]) -> Any:
    """Raises InvalidRequestError for a text that is not JSON of this kind; `None` for none, or an empty one."""
    if not text:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{name} is no JSON ({error}): {text[:80]!r}") from error
    if not isinstance(value, kind):
        wanted = "a list" if kind is list else "an object"
        raise InvalidRequestError(f"{name} is {text[:80]!r}, it must be {wanted}")
    return value


def _json_text(name: str, value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"{name} cannot be sent as JSON: {error}") from error


def _write_completion(source: CompletionOutput | OutputDelta) -> pb.Completion:
    """A sequence, or what a stream says of one: the two say it in the same words."""
    completion = pb.Completion(
        index=source.index,
        text=source.text,
        token_ids=source.token_ids,
        cumulative_logprob=source.cumulative_logprob,
        score=source.score,
    )
    if source.finish_reason is not None:
        completion.finish_reason = _FINISH_REASONS[source.finish_reason]
    if source.finish_reason == "error":
        completion.error = str(source.stop_reason)
    elif isinstance(source.stop_reason, str):
        completion.stop_string = source.stop_reason
    elif source.stop_reason is not None:
        completion.stop_token_id = source.stop_reason
    if source.logprobs is not None:
        completion.logprobs.extend(map(_write_logprobs, source.token_ids, source.logprobs))
    return completion


def _write_prompt_logprobs(output: RequestOutput) -> list[pb.TokenLogprobs]:
    if output.prompt_logprobs is None:
        return []
    return [
        pb.TokenLogprobs(token=pb.TokenLogprob(token_id=token_id))
        if logprobs is None
        else _write_logprobs(token_id, logprobs)
        for token_id, logprobs in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
    ]


def _write_logprobs(token_id: int, logprobs: TokenLogprobs) -> pb.TokenLogprobs:
    others = sorted((item for item in logprobs.items() if item[0] != token_id), key=lambda item: item[1].rank)
    return pb.TokenLogprobs(
        token=_write_logprob(token_id, logprobs[token_id]),
        alternatives=[_write_logprob(*other) for other in others],
    )


def _write_logprob(token_id: int, logprob: Logprob) -> pb.TokenLogprob:
    return pb.TokenLogprob(token_id=token_id, logprob=logprob.logprob, rank=logprob.rank, text=logprob.decoded_token)


def _read_logprobs(message: pb.TokenLogprobs) -> TokenLogprobs:
    """The most likely token first; nothing for a token without a probability."""
    given = [message.token, *message.alternatives] if message.token.HasField("logprob") else []
    return {
        one.token_id: Logprob(one.logprob, one.rank, one.text if one.HasField("text") else None)
        for one in sorted(given, key=lambda one: one.rank)
    }


def _usage(output: RequestOutput) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=len(output.prompt_token_ids),
        cached_tokens=output.num_cached_tokens,
        generated_tokens=sum(len(completion.token_ids) for completion in output.outputs),
    )
