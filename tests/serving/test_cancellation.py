"""Fault 13: whoever goes away, at whatever moment and by whatever means, leaves nothing behind."""

import asyncio
import random
import re
import subprocess
import sys

import grpc

from jpaged.client import AsyncClient, Client
from jpaged.params import SamplingParams
from jpaged.request import TokensPrompt
from jpaged.v1 import inference_pb2 as pb
from jpaged.v1.inference_pb2_grpc import InferenceStub
from tests.serving.server_process import ROOT, ServerProcess, wait_until_idle

NUM_REQUESTS = 200
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]
# Longer than any of these tests waits.
ENDLESS = SamplingParams(temperature=0.0, max_tokens=2000, ignore_eos=True)
CLOCK = SamplingParams(temperature=0.0, max_tokens=2390, ignore_eos=True)


def request(prompt_tokens: int, request_id: str, token_id: int = 5) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(temperature=0.0, max_tokens=ENDLESS.max_tokens, ignore_eos=True)
    return pb.GenerateRequest(
        request_id=request_id, token_ids=pb.TokenIds(ids=[token_id] * prompt_tokens), sampling=sampling
    )


def assert_back_within_two_steps(client: Client) -> None:
    """To be called when the server knows that nobody waits any more."""
    steps = client.server_info().steps
    assert wait_until_idle(client).steps - steps <= 2


def test_200_requests_cancelled_at_random_moments(server, client):
    """The tokens of one more request are the clock: it is the oldest, so every step gives it one. Moments are such that
    many have found a row by then, and are in prefill or decode, and many still wait for one."""
    generator = random.Random(0)

    async def one(number: int, started: asyncio.Event, cancelled: asyncio.Event) -> None:
        streaming, closing = number % 2 == 0, number % 4 >= 2
        async with grpc.aio.insecure_channel(server.address, options=OWN_CONNECTION) as channel:
            await channel.channel_ready()
            await started.wait()
            stub, message = (
                InferenceStub(channel),
                request(
                    generator.randint(1, 100),
                    f"random-{number}",
                    3 + number % 100,  # most share no prefix, so that nobody waits for another one's
                ),
            )
            call = stub.GenerateStream(message) if streaming else stub.Generate(message)
            reader = asyncio.ensure_future(read_all(call) if streaming else call)
            await cancelled.wait()
            if closing:
                await channel.close()
            else:
                call.cancel()
            [outcome] = await asyncio.gather(reader, return_exceptions=True)
            assert isinstance(outcome, asyncio.CancelledError | grpc.aio.AioRpcError), outcome

    async def run() -> None:
        started, cancelled = asyncio.Event(), [asyncio.Event() for _ in range(NUM_REQUESTS)]
        moments = sorted((5 * number + generator.randrange(200), number) for number in range(NUM_REQUESTS))
        requests = [asyncio.create_task(one(number, started, cancelled[number])) for number in range(NUM_REQUESTS)]
        async with AsyncClient(server.address) as watcher:
            clock = watcher.stream({"prompt_token_ids": [3]}, CLOCK)
            await anext(clock)
            started.set()
            while (info := await watcher.server_info()).rows_waiting + info.rows_running <= NUM_REQUESTS:
                assert info.rows_running, "the clock has ended before all had come"
            tick = 0
            async for delta in clock:
                tick += len(delta.token_ids)
                while moments and moments[0][0] <= tick:
                    cancelled[moments.pop(0)[1]].set()
                if not moments:
                    break
            assert not moments, "the clock has ended before the last was cancelled"
            await asyncio.gather(*requests)

    asyncio.run(run())
    lines = server.wait_for_log(r"request 'random-\d+': (\w+), (\d+) prompt tokens, (\d+) generated", NUM_REQUESTS)
    assert {line[1] for line in lines} == {"CANCELLED"}
    assert_back_within_two_steps(client)
    decoding = sum(line[3] != "0" for line in lines)
    assert 0 < decoding < NUM_REQUESTS


async def read_all(call) -> None:
    async for _ in call:
        pass


def test_deadlines_end_the_work_of_running_and_queued_requests(server, client):
    def start(number: int):
        message = request(20, f"deadline-{number}")
        call = stub.GenerateStream if number % 2 else stub.Generate.future
        return call(message, timeout=0.5)

    before = client.server_info().steps
    with grpc.insecure_channel(server.address) as channel:
        stub = InferenceStub(channel)
        for call in [start(number) for number in range(24)]:
            assert call.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    steps = wait_until_idle(client).steps - before
    assert 0 < steps < 2000  # one request alone would have taken so many
    # The client's clock may be first, and then its deadline arrives as a cancellation.
    outcomes = [line[1] for line in server.wait_for_log(r"request 'deadline-\d+': (\w+)", 24)]
    assert set(outcomes) <= {"DEADLINE_EXCEEDED", "CANCELLED"}


CLIENT_THAT_NEVER_ENDS = """
import sys
from jpaged.client import Client
from jpaged.params import SamplingParams

params = SamplingParams(temperature=0.0, max_tokens=2000, ignore_eos=True)
client = Client(sys.argv[1])
streams = [client.stream({"prompt_token_ids": [3] * 50}, params, request_id=f"killed-{n}") for n in range(6)]
for stream in streams:
    next(stream)
print("streaming", flush=True)
for stream in streams:
    for delta in stream:
        pass
sys.stdin.read()
"""


def test_a_client_process_that_is_killed(server, client):
    command = [sys.executable, "-c", CLIENT_THAT_NEVER_ENDS, server.address]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "streaming\n"
        process.kill()
    outcomes = [line[1] for line in server.wait_for_log(r"request 'killed-\d+': (\w+)", 6)]
    assert "CANCELLED" in outcomes
    assert_back_within_two_steps(client)


def test_closing_an_iterator_ends_its_request(server: ServerProcess, client: Client):
    prompt: TokensPrompt = {"prompt_token_ids": [3]}
    stream = client.stream(prompt, ENDLESS, request_id="closed")
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    [line] = server.wait_for_log(r"request 'closed': (\w+), 1 prompt tokens, (\d+) generated")
    assert line[1] == "CANCELLED" and 0 < int(line[2]) < 2000
    assert_back_within_two_steps(client)
    assert not re.search("Task exception|never retrieved|Exception ignored", server.log)
