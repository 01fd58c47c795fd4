"""The engine's loop in a thread of its own; requests and outputs cross by queues.

Callers live in asyncio event loops. The engine thread never waits for them: what a step produced is handed to each
event loop in one call, and a stream whose reader is slow merges what piles up, so its buffer stays bounded.
"""

import asyncio
import logging
import queue
import threading
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Any

from jpaged.config import EngineConfig
from jpaged.engine.engine import Engine
from jpaged.engine.llm import render_chat
from jpaged.engine.publishing import OutputShaper, merge
from jpaged.engine.tokenizer import Tokenizer
from jpaged.errors import AbortedError, EngineClosedError, EngineFailedError, JpagedError, QueueFullError
from jpaged.execution.runner import ReportProgress
from jpaged.metrics import EngineStats, Observer
from jpaged.params import Params, SamplingParams
from jpaged.request import Message, OutputDelta, PreparedRequest, Prompt

logger = logging.getLogger(__name__)
MAX_BUFFERED_DELTAS = 64


class _Stream:
    """What one request's reader has not read yet. Lives in the reader's event loop; other threads touch only `loop`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._deltas: deque[OutputDelta] = deque()
        self._error: JpagedError | None = None
        self._news = asyncio.Event()

    def push(self, delta: OutputDelta) -> None:
        if len(self._deltas) >= MAX_BUFFERED_DELTAS:
            for place in range(len(self._deltas) - 1, -1, -1):
                if self._deltas[place].index == delta.index:
                    self._deltas[place] = merge(self._deltas[place], delta)
                    return
        self._deltas.append(delta)
        self._news.set()

    def fail(self, error: JpagedError) -> None:
        """The reader gets the error after what was buffered before it."""
        self._error = error
        self._news.set()

    async def next(self) -> OutputDelta:
        while not self._deltas:
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        return self._deltas.popleft()


class AsyncLLM:
    """Serves any number of concurrent callers from one engine. The constructor blocks until the engine is ready.

    Args:
        model, options: as for LLM.
        max_queued_requests: requests that may wait for a row; more are refused with QueueFullError.
        observer: is told what happens, in the engine's thread.
    """

    def __init__(
        self,
        model: str,
        *,
        max_queued_requests: int = 1024,
        observer: Observer | None = None,
        report: ReportProgress | None = None,
        **options: Any,
    ) -> None:
        self._max_queued_requests = max_queued_requests
        self._engine = Engine(EngineConfig.from_options(model, options), report, observer)
        self._streams: dict[str, _Stream] = {}  # belongs to the engine's thread
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closed = False
        self._send_lock = threading.Lock()  # nothing is put into the queue once `_closed` is set
        self._thread = threading.Thread(target=self._run, name="jpaged-engine", daemon=True)
        self._thread.start()

    @property
    def parts(self):
        return self._engine.parts

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._engine.tokenizer

    def stats(self) -> EngineStats:
        return self._engine.stats()

    async def generate(
        self, prompt: Prompt, params: Params | None = None, request_id: str | None = None
    ) -> AsyncGenerator[OutputDelta]:
        """Yield what each step adds to a request, or what its `output_kind` says; the last delta is `finished`. Closing
        the iterator ends the work.

        Raises:
            InvalidRequestError, CapacityError: the request is refused.
            QueueFullError: too many requests wait.
            AbortedError: `abort` ended it.
            EngineClosedError: `close` ended it, or came before it.
            EngineFailedError: a bug.
        """
        # Tokenizing a long text takes milliseconds: neither the event loop nor the engine waits for it.
        request = await asyncio.to_thread(self._engine.prepare, prompt, params or SamplingParams())
        name = request_id or uuid.uuid4().hex
        stream = _Stream(asyncio.get_running_loop())
        self._send(lambda: self._add(name, request, stream))
        shaper, finished = OutputShaper(getattr(params, "output_kind", "delta")), False
        try:
            while not finished:
                delta = await stream.next()
                finished = delta.finished
                shaped = shaper.push(delta)
                if shaped is not None:
                    yield shaped
        finally:
            if not finished:
                with suppress(EngineClosedError):
                    self._send(lambda: self._forget(name, stream))

    def render_chat(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> Prompt:
        """As LLM.render_chat."""
        return render_chat(self.tokenizer, messages, tools, chat_template_kwargs)

    async def abort(self, request_id: str) -> bool:
        """End a request; its reader gets AbortedError. `False` if there is no such request."""
        error = AbortedError(f"request {request_id!r} was aborted")
        return await self._ask(lambda: self._fail(request_id, error))

    async def pin_prefix(self, name: str, prefix: Prompt) -> int:
        """Compute a prompt prefix and keep its full pages on the device; return how many tokens they hold.

        Raises:
            InvalidRequestError, CapacityError: as `generate`, and as Engine.pin_prefix.
        """
        token_ids: list[int] = []
        async for delta in self.generate(prefix, SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)):
            token_ids = delta.request.prompt_token_ids
        return await self._ask(lambda: self._engine.pin_prefix(name, token_ids))

    async def unpin_prefix(self, name: str) -> bool:
        """`False` if no prefix of that name is pinned."""
        return await self._ask(lambda: self._engine.unpin_prefix(name))

    async def flush_prefix_cache(self) -> None:
        """Forget what is cached."""
        await self._ask(self._engine.flush_prefix_cache)

    async def reload_weights(self, model: str | None = None) -> None:
        """Serve other weights of the same model from now on, as Engine.reload_weights. Callers wait while they load."""
        await self._ask(lambda: self._engine.reload_weights(model))

    def close(self) -> None:
        """End all requests and the thread."""
        self._commands.put(None)
        self._thread.join()

    def _send(self, command: Callable[[], None]) -> None:
        """Let the engine's thread carry out a command; it will, unless this raises EngineClosedError."""
        with self._send_lock:
            if self._closed:
                raise EngineClosedError("the engine is closed; use another one")
            self._commands.put(command)

    async def _ask[T](self, question: Callable[[], T]) -> T:
        """Have the engine's thread answer, between two steps; what it raises is raised here."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def command() -> None:
            try:
                value = question()
            except Exception as error:
                _call(loop, lambda error=error: answer.done() or answer.set_exception(error))
                if not isinstance(error, JpagedError):
                    raise
            else:
                _call(loop, lambda: answer.done() or answer.set_result(value))

        self._send(command)
        return await answer

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        finally:
            # Also if the engine could not recover: nobody may wait for a thread that has ended.
            with self._send_lock:
                self._closed = True
            while not self._commands.empty():
                command = self._commands.get()
                if command is not None:
                    command()
            self._fail_all(EngineClosedError("the engine is closing; use another one"))
            self._engine.end_profile()

    def _turn(self) -> bool:
        """Carry out what callers asked for, then one step. `False` ends the loop."""
        try:
            if not self._obey():
                return False
            if self._engine.has_work:
                self._deliver(self._engine.step())
        except Exception:
            # The device's state is lost with the step; what else is here must live on.
            logger.exception("a step failed; its requests are lost")
            self._fail_all(_engine_failed())
            self._engine.reset()
        return True

    def _obey(self) -> bool:
        """Carry out what callers asked for; wait for it if there is nothing else to do. `False` ends the loop."""
        try:
            while True:
                command = self._commands.get(block=not self._engine.has_work)
                if command is None:
                    return False
                command()
        except queue.Empty:
            return True

    def _add(self, request_id: str, request: PreparedRequest, stream: _Stream) -> None:
        stats = self._engine.stats()
        # Those who came since the last step wait for no row as long as there are free ones.
        waiting = stats.rows_waiting - (self.parts.config.max_num_seqs - stats.rows_running)
        try:
            if waiting >= self._max_queued_requests:
                raise QueueFullError(
                    f"{waiting} requests wait already, the limit is {self._max_queued_requests}; try again later"
                )
            self._engine.add_request(request_id, request)
        except JpagedError as error:
            _call(stream.loop, stream.fail, error)
        except Exception:
            _call(stream.loop, stream.fail, _engine_failed())
            raise
        else:
            self._streams[request_id] = stream

    def _forget(self, request_id: str, stream: _Stream) -> None:
        """End a request whose reader has gone; not another one that took its id since."""
        if self._streams.get(request_id) is stream:
            del self._streams[request_id]
            self._engine.abort_request(request_id)

    def _fail(self, request_id: str, error: JpagedError) -> bool:
        stream = self._streams.pop(request_id, None)
        if stream is None:
            return False
        self._engine.abort_request(request_id)
        _call(stream.loop, stream.fail, error)
        return True

    def _fail_all(self, error: JpagedError) -> None:
        for request_id in list(self._streams):
            self._fail(request_id, error)

    def _deliver(self, deltas: list[OutputDelta]) -> None:
        """Hand each event loop its deltas in one call."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, OutputDelta]]] = {}
        for delta in deltas:
            request_id = delta.request.request_id
            stream = self._streams[request_id]
            if delta.finished:
                del self._streams[request_id]
            by_loop.setdefault(stream.loop, []).append((stream, delta))
        for loop, items in by_loop.items():
            _call(loop, _push_all, items)


def _push_all(items: list[tuple[_Stream, OutputDelta]]) -> None:
    for stream, delta in items:
        stream.push(delta)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., Any], *arguments: Any) -> None:
    """Call in another loop's thread; a loop that was closed has no readers left."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *arguments)


def _engine_failed() -> EngineFailedError:
    return EngineFailedError("the engine failed in a step, which is a bug; try again")
