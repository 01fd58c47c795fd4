"""A small typed client of jpaged's gRPC service; needs no jax and no model.

    with Client("127.0.0.1:50051") as client:
        print(client.generate("Once upon a time", SamplingParams(max_tokens=50)).outputs[0].text)
        for delta in client.stream([{"role": "user", "content": "Hello!"}]):
            print(delta.text, end="")

A prompt is a text, {"prompt_token_ids": [...]}, or a conversation (a list of messages), which the server puts through
the model's chat template, with `tools` (functions as in OpenAI's interface) and `chat_template_kwargs` (further
variables of the template). Errors are grpc.RpcError with the server's status, and InvalidRequestError for what cannot
even be sent.
"""

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jpaged.params import Params
from jpaged.request import CompletionOutput, Message, Prompt, TokenLogprobs
from jpaged.serving.messages import read_completion, read_prompt_logprobs, write_prefix, write_prompt
from jpaged.serving.method_messages import write_method
from jpaged.v1 import inference_pb2 as pb
from jpaged.v1 import inference_pb2_grpc

# Logprobs of a whole vocabulary are long.
_CHANNEL_OPTIONS = [("grpc.max_receive_message_length", -1)]


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished request. `prompt_logprobs` and, with them, `prompt_token_ids` are as in RequestOutput."""

    request_id: str
    outputs: list[CompletionOutput]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """What a message of a stream says of the sequence `index`: what is new, or what else `output_kind` asks for. The
    first one brings the prompt's logprobs, the last one the usage."""

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    usage: Usage | None
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    score: float | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None


class Client:
    """Blocking calls. `timeout` is the deadline in seconds; the server ends the work when it has passed."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, _CHANNEL_OPTIONS)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)  # the package has no types

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def generate(
        self,
        prompt: Prompt | list[Message],
        params: Params | None = None,
        *,
        request_id: str = "",
        timeout: float | None = None,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> Answer:
        request = _request(prompt, params, request_id, tools, chat_template_kwargs)
        return _answer(self._stub.Generate(request, timeout=timeout))

    def stream(
        self,
        prompt: Prompt | list[Message],
        params: Params | None = None,
        *,
        request_id: str = "",
        timeout: float | None = None,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> Iterator[Delta]:
        """Yield deltas; closing the iterator cancels the request."""
        request = _request(prompt, params, request_id, tools, chat_template_kwargs)
        call = self._stub.GenerateStream(request, timeout=timeout)
        try:
            for message in call:
                yield _delta(message)
        finally:
            call.cancel()

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        request = pb.TokenizeRequest(text=text, add_special_tokens=add_special_tokens)
        return list(self._stub.Tokenize(request).token_ids)

    def detokenize(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        request = pb.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return self._stub.Detokenize(request).text

    def model_info(self) -> pb.GetModelInfoResponse:
        return self._stub.GetModelInfo(pb.GetModelInfoRequest())

    def server_info(self) -> pb.GetServerInfoResponse:
        return self._stub.GetServerInfo(pb.GetServerInfoRequest())

    def abort(self, request_id: str) -> bool:
        """End a request by its id; `False` if there is none."""
        return self._stub.Abort(pb.AbortRequest(request_id=request_id)).aborted

    def pin_prefix(self, name: str, prefix: Prompt) -> int:
        """Compute a prompt prefix once and keep it on the device; return how many of its tokens are in full pages."""
        request = pb.PinPrefixRequest(name=name)
        write_prefix(request, prefix)
        return self._stub.PinPrefix(request).pinned_tokens

    def unpin_prefix(self, name: str) -> bool:
        """`False` if no prefix of that name is pinned."""
        return self._stub.UnpinPrefix(pb.UnpinPrefixRequest(name=name)).unpinned

    def flush_prefix_cache(self) -> None:
        """Have the server forget all cached prefixes."""
        self._stub.FlushPrefixCache(pb.FlushPrefixCacheRequest())

    def health(self) -> str:
        """SERVING or NOT_SERVING."""
        return _health_name(self._health.Check(health_pb2.HealthCheckRequest()))

    def wait_until_serving(self, timeout: float) -> str:
        """Wait for the server to be there and ready; return SERVING, or what it still is after `timeout` seconds.

        Raises:
            grpc.RpcError: DEADLINE_EXCEEDED if no server was reached.
        """
        status = None
        try:
            for response in self._health.Watch(health_pb2.HealthCheckRequest(), timeout=timeout, wait_for_ready=True):
                status = _health_name(response)
                if status == "SERVING":
                    return status
        except grpc.RpcError:
            if status is None:
                raise
        return status or "NOT_SERVING"


class AsyncClient:
    """The same for asyncio."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, _CHANNEL_OPTIONS)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close()

    async def generate(
        self,
        prompt: Prompt | list[Message],
        params: Params | None = None,
        *,
        request_id: str = "",
        timeout: float | None = None,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> Answer:
        request = _request(prompt, params, request_id, tools, chat_template_kwargs)
        return _answer(await self._stub.Generate(request, timeout=timeout))

    async def stream(
        self,
        prompt: Prompt | list[Message],
        params: Params | None = None,
        *,
        request_id: str = "",
        timeout: float | None = None,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> AsyncIterator[Delta]:
        """Yield deltas; closing the iterator cancels the request."""
        request = _request(prompt, params, request_id, tools, chat_template_kwargs)
        call = self._stub.GenerateStream(request, timeout=timeout)
        try:
            async for message in call:
                yield _delta(message)
        finally:
            call.cancel()

    async def abort(self, request_id: str) -> bool:
        return (await self._stub.Abort(pb.AbortRequest(request_id=request_id))).aborted

    async def server_info(self) -> pb.GetServerInfoResponse:
        return await self._stub.GetServerInfo(pb.GetServerInfoRequest())


def _request(
    prompt: Prompt | list[Message], params: Params | None, request_id: str, tools: Any, chat_template_kwargs: Any
) -> pb.GenerateRequest:
    request = pb.GenerateRequest(request_id=request_id)
    write_prompt(request, prompt, tools=tools, chat_template_kwargs=chat_template_kwargs)
    if params is not None:
        write_method(request, params)
    return request


def _answer(response: pb.GenerateResponse) -> Answer:
    outputs = [read_completion(completion) for completion in response.completions]
    return Answer(response.request_id, outputs, _usage(response.usage), *read_prompt_logprobs(response))


def _delta(response: pb.GenerateStreamResponse) -> Delta:
    part = read_completion(response.delta)
    prompt_token_ids, prompt_logprobs = read_prompt_logprobs(response)
    return Delta(
        request_id=response.request_id,
        index=part.index,
        text=part.text,
        token_ids=part.token_ids,
        finish_reason=part.finish_reason,
        stop_reason=part.stop_reason,
        usage=_usage(response.usage) if response.HasField("usage") else None,
        logprobs=part.logprobs,
        cumulative_logprob=part.cumulative_logprob,
        score=part.score,
        prompt_token_ids=prompt_token_ids,
        prompt_logprobs=prompt_logprobs,
    )


def _usage(usage: pb.Usage) -> Usage:
    return Usage(usage.prompt_tokens, usage.cached_tokens, usage.generated_tokens)


def _health_name(response: health_pb2.HealthCheckResponse) -> str:
    return health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
