"""A small typed client of jpaged's gRPC service; needs no jax and no model.

    with Client("127.0.0.1:50051") as client:
        print(client.generate("Once upon a time", SamplingParams(max_tokens=50)).outputs[0].text)
        for delta in client.stream([{"role": "user", "content": "Hello!"}]):
            print(delta.text, end="")

A prompt is a text, {"prompt_token_ids": [...]}, or a conversation (a list of messages), which the server puts through
the model's chat template. Errors are grpc.RpcError with the server's status.
"""

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jpaged.params import Params
from jpaged.request import CompletionOutput, Message, Prompt
from jpaged.serving.messages import read_completion, write_method, write_prompt
from jpaged.v1 import inference_pb2 as pb
from jpaged.v1 import inference_pb2_grpc


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished request."""

    request_id: str
    outputs: list[CompletionOutput]
    usage: Usage


@dataclass(frozen=True, slots=True)
class Delta:
    """What a message of a stream adds to the sequence `index`; the last one brings the usage."""

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    usage: Usage | None


class Client:
    """Blocking calls. `timeout` is the deadline in seconds; the server ends the work when it has passed."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address)
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
    ) -> Answer:
        return _answer(self._stub.Generate(_request(prompt, params, request_id), timeout=timeout))

    def stream(
        self,
        prompt: Prompt | list[Message],
        params: Params | None = None,
        *,
        request_id: str = "",
        timeout: float | None = None,
    ) -> Iterator[Delta]:
        """Yield deltas; closing the iterator cancels the request."""
        call = self._stub.GenerateStream(_request(prompt, params, request_id), timeout=timeout)
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
        if isinstance(prefix, str):
            request.text = prefix
        else:
            request.token_ids.ids.extend(prefix["prompt_token_ids"])
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
        self._channel = grpc.aio.insecure_channel(address)
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
    ) -> Answer:
        return _answer(await self._stub.Generate(_request(prompt, params, request_id), timeout=timeout))

    async def stream(
        self,
        prompt: Prompt | list[Message],
        params: Params | None = None,
        *,
        request_id: str = "",
        timeout: float | None = None,
    ) -> AsyncIterator[Delta]:
        """Yield deltas; closing the iterator cancels the request."""
        call = self._stub.GenerateStream(_request(prompt, params, request_id), timeout=timeout)
        try:
            async for message in call:
                yield _delta(message)
        finally:
            call.cancel()

    async def abort(self, request_id: str) -> bool:
        return (await self._stub.Abort(pb.AbortRequest(request_id=request_id))).aborted

    async def server_info(self) -> pb.GetServerInfoResponse:
        return await self._stub.GetServerInfo(pb.GetServerInfoRequest())


def _request(prompt: Prompt | list[Message], params: Params | None, request_id: str) -> pb.GenerateRequest:
    request = pb.GenerateRequest(request_id=request_id)
    write_prompt(request, prompt)
    if params is not None:
        write_method(request, params)
    return request


def _answer(response: pb.GenerateResponse) -> Answer:
    outputs = [read_completion(completion) for completion in response.completions]
    return Answer(response.request_id, outputs, _usage(response.usage))


def _delta(response: pb.GenerateStreamResponse) -> Delta:
    part = read_completion(response.delta)
    return Delta(
        request_id=response.request_id,
        index=part.index,
        text=part.text,
        token_ids=part.token_ids,
        finish_reason=part.finish_reason,
        stop_reason=part.stop_reason,
        usage=_usage(response.usage) if response.HasField("usage") else None,
    )


def _usage(usage: pb.Usage) -> Usage:
    return Usage(usage.prompt_tokens, usage.cached_tokens, usage.generated_tokens)


def _health_name(response: health_pb2.HealthCheckResponse) -> str:
    return health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
