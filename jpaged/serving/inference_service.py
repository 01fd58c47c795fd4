"""The gRPC service over an AsyncLLM."""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import grpc

from jpaged.engine.async_llm import AsyncLLM
from jpaged.errors import (
    AbortedError,
    CapacityError,
    EngineClosedError,
    EngineFailedError,
    InvalidRequestError,
    JpagedError,
    QueueFullError,
)
from jpaged.params import SamplingParams
from jpaged.request import OutputDelta
from jpaged.serving.messages import read_chat, read_prefix, read_prompt, write_delta, write_output
from jpaged.serving.method_messages import read_method
from jpaged.v1 import inference_pb2 as pb
from jpaged.v1 import inference_pb2_grpc

logger = logging.getLogger(__name__)
STATUS_OF_ERROR: dict[type[JpagedError], grpc.StatusCode] = {
    InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    CapacityError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    QueueFullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    AbortedError: grpc.StatusCode.CANCELLED,
    EngineClosedError: grpc.StatusCode.UNAVAILABLE,
    EngineFailedError: grpc.StatusCode.INTERNAL,
}
RETRY_AFTER_KEY = "retry-after-ms"
RETRY_AFTER_MS = 1000
Context = grpc.aio.ServicerContext


class _StatusError(Exception):
    """Ends a call with a status."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True)
class _CallLog:
    """What is logged of a Generate call: no text and no token of it."""

    request_id: str
    start: float
    prompt_tokens: int = 0
    generated_tokens: int = 0
    outcome: str = "CANCELLED"

    def write(self) -> None:
        logger.info(
            "request %.200r: %s, %d prompt tokens, %d generated, %.3f s",
            self.request_id,
            self.outcome,
            self.prompt_tokens,
            self.generated_tokens,
            time.monotonic() - self.start,
        )


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """Serves once `open` has given it an engine, refuses new work from `drain` on.

    Attributes:
        model_name: what clients may call the model.
    """

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self._llm: AsyncLLM | None = None
        self._state = pb.SERVER_STATE_STARTING
        self._start = time.monotonic()
        self._num_active = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def open(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._state = pb.SERVER_STATE_READY

    async def drain(self, seconds: float) -> bool:
        """Refuse new work and wait for the calls in progress; `False` if some are left after `seconds`."""
        self._state = pb.SERVER_STATE_DRAINING
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        async with self._call(request, context) as log, aclosing(self._deltas(request, log, whole=True)) as deltas:
            last: OutputDelta | None = None
            async for delta in deltas:
                last = delta
            assert last is not None
            return write_output(last.request)
        raise AssertionError("an aborted call does not get here")

    async def GenerateStream(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        async with self._call(request, context) as log, aclosing(self._deltas(request, log)) as deltas:
            is_first = True
            async for delta in deltas:
                yield write_delta(delta, is_first=is_first)
                is_first = False

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        return await _answer(context, self._tokenize(request))

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        return await _answer(context, self._detokenize(request))

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:
        return await _answer(context, self._model_info(request))

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.GetServerInfoResponse:
        return await _answer(context, self._server_info())

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        return await _answer(context, self._abort(request))

    async def PinPrefix(self, request: pb.PinPrefixRequest, context: Context) -> pb.PinPrefixResponse:
        return await _answer(context, self._pin(request))

    async def UnpinPrefix(self, request: pb.UnpinPrefixRequest, context: Context) -> pb.UnpinPrefixResponse:
        return await _answer(context, self._unpin(request))

    async def FlushPrefixCache(
        self, request: pb.FlushPrefixCacheRequest, context: Context
    ) -> pb.FlushPrefixCacheResponse:
        return await _answer(context, self._flush())

    @asynccontextmanager
    async def _call(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[_CallLog]:
        """What all Generate calls share: admission, the client's deadline, the status for an error, the log line."""
        log = _CallLog(request.request_id or uuid.uuid4().hex, time.monotonic())
        deadline_seconds = context.time_remaining()
        self._num_active += 1
        self._idle.clear()
        context.add_done_callback(lambda _: self._call_done())  # type: ignore[arg-type]
        try:
            with _as_status(log):
                async with asyncio.timeout(deadline_seconds):
                    yield log
        except _StatusError as error:
            await _abort(context, error)
        finally:
            # When the deadline has passed, grpc's own cancellation may come first.
            if log.outcome == "CANCELLED" and deadline_seconds is not None and not context.time_remaining():
                log.outcome = "DEADLINE_EXCEEDED"
            log.write()

    def _call_done(self) -> None:
        """Called when a call's last message and its status are out, so that draining cuts none off."""
        self._num_active -= 1
        if not self._num_active:
            self._idle.set()

    async def _deltas(
        self, request: pb.GenerateRequest, log: _CallLog, *, whole: bool = False
    ) -> AsyncGenerator[OutputDelta]:
        """What the engine yields for a request; if only the `whole` matters, without what `output_kind` costs."""
        llm = self._open_llm(request.model)
        if self._state == pb.SERVER_STATE_DRAINING:
            raise _StatusError(grpc.StatusCode.UNAVAILABLE, "the server is draining; use another one")
        params = read_method(request)
        if whole and isinstance(params, SamplingParams):
            params = replace(params, output_kind="delta")
        prompt = await asyncio.to_thread(read_prompt, request, llm.render_chat)
        async with aclosing(llm.generate(prompt, params, log.request_id)) as stream:
            async for delta in stream:
                log.prompt_tokens = len(delta.request.prompt_token_ids)
                log.generated_tokens = sum(len(completion.token_ids) for completion in delta.request.outputs)
                yield delta

    async def _tokenize(self, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
        llm = self._open_llm(request.model)
        kind = request.WhichOneof("input")
        if kind is None:
            raise InvalidRequestError("input is not set; give text or chat")
        if kind == "chat":
            rendered = await asyncio.to_thread(llm.render_chat, *read_chat(request.chat))
            assert isinstance(rendered, dict)
            return pb.TokenizeResponse(token_ids=rendered["prompt_token_ids"])
        special = request.add_special_tokens if request.HasField("add_special_tokens") else True
        token_ids = await asyncio.to_thread(_tokenizer(llm).encode, request.text, add_special_tokens=special)
        return pb.TokenizeResponse(token_ids=token_ids)

    async def _detokenize(self, request: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
        llm = self._open_llm(request.model)
        size = llm.parts.spec.vocab_size
        outside = next((token_id for token_id in request.token_ids if not 0 <= token_id < size), None)
        if outside is not None:
            raise InvalidRequestError(f"token_ids holds {outside}, the vocabulary has ids 0..{size - 1}")
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        text = await asyncio.to_thread(_tokenizer(llm).decode, list(request.token_ids), skip_special_tokens=skip)
        return pb.DetokenizeResponse(text=text)

    async def _model_info(self, request: pb.GetModelInfoRequest) -> pb.GetModelInfoResponse:
        llm = self._open_llm(request.model)
        parts, tokenizer = llm.parts, llm.tokenizer
        return pb.GetModelInfoResponse(
            model=self.model_name,
            architecture=parts.spec.architecture,
            dtype=parts.dtype,
            vocabulary_size=parts.spec.vocab_size,
            max_model_len=parts.max_model_len,
            eos_token_ids=parts.spec.eos_token_ids,
            has_tokenizer=tokenizer is not None,
            has_chat_template=tokenizer is not None and tokenizer.chat_template is not None,
        )

    async def _server_info(self) -> pb.GetServerInfoResponse:
        info = pb.GetServerInfoResponse(
            version=version("jpaged"), state=self._state, uptime_seconds=time.monotonic() - self._start
        )
        if self._llm is not None:
            config, stats = self._llm.parts.config, self._llm.stats()
            info.page_size_tokens = self._llm.parts.page_size_tokens
            info.max_num_seqs, info.max_num_batched_tokens = config.max_num_seqs, config.max_num_batched_tokens
            for field in (
                *("pages_total", "pages_free", "pages_used", "pages_cached", "pages_pinned"),
                *("host_pages_total", "host_pages_used", "host_pages_cached", "rows_running", "rows_waiting"),
                *("prefix_cache_queries_tokens", "prefix_cache_hits_tokens"),
                *("preemptions", "steps", "buckets", "compilations_after_ready", "ready_seconds"),
            ):
                setattr(info, field, getattr(stats, field))
        return info

    async def _abort(self, request: pb.AbortRequest) -> pb.AbortResponse:
        llm = self._open_llm("")
        if not request.request_id:
            raise InvalidRequestError("request_id is empty; name the request to abort")
        return pb.AbortResponse(aborted=await llm.abort(request.request_id))

    async def _pin(self, request: pb.PinPrefixRequest) -> pb.PinPrefixResponse:
        llm = self._open_llm("")
        if not request.name:
            raise InvalidRequestError("name is empty; name the prefix, so that it can be unpinned")
        return pb.PinPrefixResponse(pinned_tokens=await llm.pin_prefix(request.name, read_prefix(request)))

    async def _unpin(self, request: pb.UnpinPrefixRequest) -> pb.UnpinPrefixResponse:
        return pb.UnpinPrefixResponse(unpinned=await self._open_llm("").unpin_prefix(request.name))

    async def _flush(self) -> pb.FlushPrefixCacheResponse:
        await self._open_llm("").flush_prefix_cache()
        return pb.FlushPrefixCacheResponse()

    def _open_llm(self, model: str) -> AsyncLLM:
        if self._llm is None:
            raise _StatusError(grpc.StatusCode.UNAVAILABLE, "the server is starting; try again later")
        if model not in ("", self.model_name):
            raise _StatusError(
                grpc.StatusCode.NOT_FOUND, f"model is {model!r}, this server has {self.model_name!r}; leave it empty"
            )
        return self._llm


def _tokenizer(llm: AsyncLLM) -> Any:
    if llm.tokenizer is None:
        raise InvalidRequestError("this model has no tokenizer; use token ids")
    return llm.tokenizer


class _as_status:
    """Turns the errors of the engine into statuses, and notes the outcome in a call's log."""

    def __init__(self, log: _CallLog | None = None) -> None:
        self._log = log

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        status = None if error is None else _status_of(error)
        if self._log is not None:
            self._log.outcome = "OK" if error is None else "CANCELLED" if status is None else status.code.name
        if status is not None and status is not error:
            raise status from error


def _status_of(error: BaseException) -> _StatusError | None:
    """The status for an error; `None` for what is no error of the call, such as its cancellation."""
    if isinstance(error, _StatusError):
        return error
    if isinstance(error, TimeoutError):
        return _StatusError(grpc.StatusCode.DEADLINE_EXCEEDED, "the client's deadline has passed; its work has ended")
    if isinstance(error, JpagedError):
        code = STATUS_OF_ERROR.get(type(error), grpc.StatusCode.INTERNAL)
        failed = _StatusError(code, str(error))
        failed.__cause__ = error
        return failed
    if isinstance(error, Exception):
        logger.exception("a call failed", exc_info=error)
        return _StatusError(grpc.StatusCode.INTERNAL, f"a bug: {type(error).__name__}; the server's log has more")
    return None


async def _answer[T](context: Context, coroutine: Coroutine[Any, Any, T]) -> T:
    """Await a call's answer, and end the call with the status of its error."""
    try:
        with _as_status():
            return await coroutine
    except _StatusError as error:
        await _abort(context, error)
    raise AssertionError("an aborted call does not get here")


async def _abort(context: Context, error: _StatusError) -> None:
    if isinstance(error.__cause__, QueueFullError):
        context.set_trailing_metadata(((RETRY_AFTER_KEY, str(RETRY_AFTER_MS)),))
    try:
        await context.abort(error.code, str(error))
    except grpc.aio.AbortError:
        raise
    except Exception as failure:
        # grpc's class for this is private: the call has ended meanwhile, and nobody is left to be told.
        raise asyncio.CancelledError from failure
