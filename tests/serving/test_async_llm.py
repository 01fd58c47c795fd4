"""AsyncLLM without a server: what crosses between its thread and its callers."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable

import pytest

from jpaged import AsyncLLM, CapacityError, InvalidRequestError, SamplingParams
from jpaged.engine.async_llm import MAX_BUFFERED_DELTAS, EngineClosedError, _Stream
from jpaged.errors import AbortedError, EngineFailedError, QueueFullError
from jpaged.execution.runner import PendingStep
from jpaged.request import OutputDelta, RequestOutput, RequestTimes, TokensPrompt
from tests.serving.server_process import PATIENCE_SECONDS, SMALL_OPTIONS

PROMPT: TokensPrompt = {"prompt_token_ids": [3, 4, 5]}
ENDLESS = SamplingParams(temperature=0.0, max_tokens=2300, ignore_eos=True)
NUM_ROWS = SMALL_OPTIONS["max_num_seqs"]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def delta(index: int, token_id: int, finished: bool = False) -> OutputDelta:
    request = RequestOutput("r", None, [1], [], finished, RequestTimes(0.0))
    reason = "length" if finished else None
    return OutputDelta(request, index, f"{token_id} ", [token_id], finish_reason=reason, finished=finished)


def test_a_streams_buffer_is_bounded_and_loses_nothing():
    async def read() -> list[OutputDelta]:
        stream = _Stream(asyncio.get_running_loop())
        for token_id in range(1000):
            stream.push(delta(token_id % 2, token_id, finished=token_id >= 998))
            assert len(stream._deltas) <= MAX_BUFFERED_DELTAS
        stream.fail(AbortedError("later"))
        deltas = [await stream.next() for _ in range(MAX_BUFFERED_DELTAS)]
        with pytest.raises(AbortedError, match="later"):
            await stream.next()
        return deltas

    deltas = asyncio.run(read())
    for index in (0, 1):
        own = [part for part in deltas if part.index == index]
        assert [token_id for part in own for token_id in part.token_ids] == list(range(index, 1000, 2))
        assert "".join(part.text for part in own).split() == [str(token_id) for token_id in range(index, 1000, 2)]
        assert [part.finished for part in own] == [False] * (len(own) - 1) + [True]
        assert own[-1].finish_reason == "length"


@pytest.fixture(scope="module")
def shared_llm(model_dir):
    llm = AsyncLLM(str(model_dir), **SMALL_OPTIONS)
    yield llm
    llm.close()


@pytest.fixture
def llm(shared_llm: AsyncLLM):
    """Afterwards nothing may be left in the engine."""
    yield shared_llm
    stats = shared_llm.stats()
    assert (stats.pages_used, stats.rows_running, stats.rows_waiting) == (0, 0, 0)
    assert not shared_llm._streams
    shared_llm._engine.check_invariants()


async def tokens(stream: AsyncGenerator[OutputDelta]) -> list[int]:
    return [token_id async for delta in stream for token_id in delta.token_ids]


async def idle(llm: AsyncLLM) -> None:
    """Wait until the engine's thread has nothing to do; a command that it has carried out lets this go on."""
    while llm._engine.has_work or llm._streams:
        await llm.abort("nothing of this name")


async def started(llm: AsyncLLM, count: int, request_id: str) -> list[AsyncGenerator[OutputDelta]]:
    """Requests that have each given a token."""
    streams = [llm.generate(PROMPT, ENDLESS, f"{request_id}-{number}") for number in range(count)]
    await asyncio.gather(*(anext(stream) for stream in streams))
    return streams


def test_many_callers_get_what_each_would_get_alone(llm):
    async def run() -> None:
        prompts: list[TokensPrompt] = [{"prompt_token_ids": [3 + number, 9]} for number in range(20)]
        together = await asyncio.gather(*(tokens(llm.generate(prompt, greedy(12))) for prompt in prompts))
        assert [await tokens(llm.generate(prompt, greedy(12))) for prompt in prompts] == together

    asyncio.run(run())


def test_what_is_refused_reaches_its_caller_alone(llm):
    async def run() -> None:
        [other] = await started(llm, 1, "other")
        with pytest.raises(InvalidRequestError, match="no tokens"):
            await tokens(llm.generate({"prompt_token_ids": []}))
        with pytest.raises(CapacityError, match="the pool has 600"):
            await tokens(llm.generate(PROMPT, greedy(3000)))
        with pytest.raises(InvalidRequestError, match="'other-0' is in use"):
            await tokens(llm.generate(PROMPT, greedy(3), "other-0"))
        assert (await anext(other)).token_ids
        await other.aclose()
        await idle(llm)

    asyncio.run(run())


def test_abort_reaches_the_reader_and_says_whether_there_was_one(llm):
    async def run() -> None:
        [stream] = await started(llm, 1, "aborted")
        assert await llm.abort("aborted-0")
        assert not await llm.abort("aborted-0")
        with pytest.raises(AbortedError, match="'aborted-0' was aborted"):
            await tokens(stream)
        await idle(llm)

    asyncio.run(run())


def test_a_full_queue_refuses(llm, monkeypatch):
    monkeypatch.setattr(llm, "_max_queued_requests", 2)

    async def run() -> None:
        running = await started(llm, NUM_ROWS, "running")
        waiting = [asyncio.create_task(tokens(llm.generate(PROMPT, greedy(5), f"waiting-{n}"))) for n in range(2)]
        while llm.stats().rows_waiting < 2:
            await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="2 requests wait already, the limit is 2"):
            await tokens(llm.generate(PROMPT, greedy(5)))
        for stream in running:
            await stream.aclose()
        assert [len(answer) for answer in await asyncio.gather(*waiting)] == [5, 5]
        await idle(llm)

    asyncio.run(run())


async def while_queued(llm: AsyncLLM) -> asyncio.Task:
    task = asyncio.create_task(tokens(llm.generate(PROMPT, ENDLESS, "victim")))
    while not llm.stats().rows_waiting:
        await asyncio.sleep(0)
    return task


async def in_prefill(llm: AsyncLLM) -> asyncio.Task:
    """A prompt that takes more than a hundred steps."""
    prompt: TokensPrompt = {"prompt_token_ids": [3] * 2000}
    task = asyncio.create_task(tokens(llm.generate(prompt, greedy(50), "victim")))
    while llm.stats().rows_running < NUM_ROWS or llm.stats().pages_used < 100:
        await asyncio.sleep(0)
    return task


async def in_decode(llm: AsyncLLM) -> asyncio.Task:
    got_token = asyncio.Event()

    async def read() -> None:
        async for _ in llm.generate(PROMPT, ENDLESS, "victim"):
            got_token.set()

    task = asyncio.create_task(read())
    await got_token.wait()
    return task


@pytest.mark.parametrize(("moment", "company"), [(while_queued, NUM_ROWS), (in_prefill, 7), (in_decode, 7)])
def test_a_cancelled_caller_gives_its_pages_back_within_two_steps(llm, monkeypatch, moment, company):
    """The others keep the engine busy, so steps go on while the cancellation is on its way."""
    steps_asked: list[int] = []
    steps_done: list[int] = []
    send, abort_request = llm._send, llm._engine.abort_request

    def noted_send(command: Callable[[], None]) -> None:
        send(command)
        steps_asked.append(llm.stats().steps)

    def noted_abort(request_id: str) -> bool:
        pages = llm.stats().pages_used
        aborted = abort_request(request_id)
        if request_id == "victim":
            steps_done.append(llm.stats().steps)
            assert aborted and (moment is while_queued or llm.stats().pages_used < pages)
        return aborted

    async def run() -> None:
        others = await started(llm, company, "other")
        victim = await moment(llm)
        monkeypatch.setattr(llm, "_send", noted_send)
        monkeypatch.setattr(llm._engine, "abort_request", noted_abort)
        victim.cancel()
        with pytest.raises(asyncio.CancelledError):
            await victim
        assert len(steps_asked) == 1
        for stream in others:
            assert (await anext(stream)).token_ids
            await stream.aclose()
        await idle(llm)

    asyncio.run(run())
    assert len(steps_done) == 1
    assert steps_done[0] - steps_asked[0] <= 2


def fail_next_start(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    start, failed = llm._engine._runner.start, []

    def failing(plan):
        if not failed:
            failed.append(plan)
            raise RuntimeError("the device is on fire")
        return start(plan)

    monkeypatch.setattr(llm._engine._runner, "start", failing)


def fail_next_result(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    result, failed = PendingStep.result, []

    def failing(pending):
        if not failed:
            failed.append(pending)
            raise RuntimeError("the device is on fire")
        return result(pending)

    monkeypatch.setattr(PendingStep, "result", failing)


@pytest.mark.parametrize("fail_next", [fail_next_start, fail_next_result])
def test_a_failed_step_loses_its_requests_and_nothing_else(llm, monkeypatch, fail_next):
    async def run() -> None:
        expected = await tokens(llm.generate(PROMPT, greedy(30)))
        fail_next(llm, monkeypatch)
        with pytest.raises(EngineFailedError):  # a request's first step
            await tokens(llm.generate(PROMPT, ENDLESS))

        running = await started(llm, NUM_ROWS, "running")
        waiting = asyncio.create_task(tokens(llm.generate(PROMPT, ENDLESS)))
        while not llm.stats().rows_waiting:
            await asyncio.sleep(0)
        fail_next(llm, monkeypatch)
        for end in [waiting, *map(tokens, running)]:
            with pytest.raises(EngineFailedError, match="try again"):
                await end
        assert await tokens(llm.generate(PROMPT, greedy(30))) == expected
        await idle(llm)

    asyncio.run(asyncio.wait_for(run(), PATIENCE_SECONDS))


def run_with_own_engine(model_dir, use: Callable[[AsyncLLM], Awaitable[None]]) -> None:
    llm = AsyncLLM(str(model_dir), **SMALL_OPTIONS)
    try:
        asyncio.run(asyncio.wait_for(use(llm), PATIENCE_SECONDS))
    finally:
        llm.close()
    assert not llm._thread.is_alive()


def test_close_ends_what_runs_and_refuses_what_comes(model_dir):
    async def use(llm: AsyncLLM) -> None:
        streams = await started(llm, 3, "running")
        await asyncio.to_thread(llm.close)
        for stream in streams:
            with pytest.raises(EngineClosedError, match="closing"):
                await tokens(stream)
        with pytest.raises(EngineClosedError, match="closed"):
            await tokens(llm.generate(PROMPT))
        with pytest.raises(EngineClosedError):
            await llm.abort("running-0")
        assert llm.stats().pages_used == 0

    run_with_own_engine(model_dir, use)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_cannot_recover_leaves_nobody_waiting(model_dir, monkeypatch):
    def broken() -> None:
        raise RuntimeError("no pages any more")

    async def use(llm: AsyncLLM) -> None:
        fail_next_start(llm, monkeypatch)
        monkeypatch.setattr(llm._engine._runner, "reset", broken)
        with pytest.raises(EngineFailedError):
            await tokens(llm.generate(PROMPT, ENDLESS))
        await asyncio.to_thread(llm._thread.join)
        with pytest.raises(EngineClosedError):
            await tokens(llm.generate(PROMPT, greedy(3)))

    run_with_own_engine(model_dir, use)
