"""A server's life: starting, serving, full, draining, gone; and starts that fail."""

import socket
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jpaged.client import Answer, Client, Delta
from jpaged.params import SamplingParams
from jpaged.request import TokensPrompt
from jpaged.serving.inference_service import RETRY_AFTER_KEY
from jpaged.serving.server import SERVICE_NAME
from jpaged.v1 import inference_pb2 as pb
from jpaged.v1.inference_pb2_grpc import InferenceStub
from tests.serving.server_process import PATIENCE_SECONDS, SLOW_CONNECTION, SMALL, ServerProcess, start

PROMPT: TokensPrompt = {"prompt_token_ids": [3, 4, 5]}
NUM_ROWS, NUM_QUEUED = 8, 3  # what the servers below take


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


class HealthLog:
    """What grpc.health.v1's Watch says of a service."""

    def __init__(self, channel: grpc.Channel, service: str) -> None:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # the package has no types
        self._call = stub.Watch(health_pb2.HealthCheckRequest(service=service), timeout=PATIENCE_SECONDS)
        self._statuses: list[str] = []
        self._news = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            for response in self._call:
                self._note(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))
        except grpc.RpcError:
            self._note("the server has gone")

    def _note(self, status: str) -> None:
        with self._news:
            self._statuses.append(status)
            self._news.notify_all()

    def wait_for(self, statuses: list[str]) -> None:
        """Wait until as many statuses were seen; they must be these."""
        with self._news:
            self._news.wait_for(lambda: len(self._statuses) >= len(statuses), PATIENCE_SECONDS)
            assert self._statuses == statuses


def refusal(client: Client) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        client.generate(PROMPT, greedy(1))
    return caught.value


def status(error: grpc.RpcError) -> tuple[grpc.StatusCode, str]:
    return error.code(), error.details()  # type: ignore[attr-defined]


def fill(
    client: Client, pool: ThreadPoolExecutor, free_rows: int, max_tokens: int
) -> tuple[list[Iterator[Delta]], list[Future[Answer]]]:
    """Start as many requests as the server takes; return the running streams, and the futures of those that wait."""
    streams = [client.stream(PROMPT, greedy(max_tokens), request_id=f"running-{n}") for n in range(free_rows)]
    for stream in streams:
        next(stream)
    waiting = [
        pool.submit(client.generate, PROMPT, greedy(50 + n), request_id=f"waiting-{n}") for n in range(NUM_QUEUED)
    ]
    while client.server_info().rows_waiting < NUM_QUEUED:
        assert not any(future.done() for future in waiting)
    return streams, waiting


def test_from_the_start_to_a_drain_that_loses_nothing(model_dir):
    queue = ("--max-queued-requests", str(NUM_QUEUED))
    with (
        ServerProcess(model_dir, *SMALL, *queue, "--drain-seconds", "60") as server,
        grpc.insecure_channel(server.address) as channel,
        grpc.insecure_channel(server.address, options=SLOW_CONNECTION) as slow_channel,
        Client(server.address) as client,
        ThreadPoolExecutor(NUM_QUEUED) as pool,
    ):
        watches = [HealthLog(channel, service) for service in ("", SERVICE_NAME)]
        for watch in watches:
            watch.wait_for(["NOT_SERVING"])
        assert client.health() == "NOT_SERVING"
        code, details = status(refusal(client))
        assert code == grpc.StatusCode.UNAVAILABLE and "starting" in details
        assert client.server_info().state == pb.SERVER_STATE_STARTING
        for watch in watches:
            watch.wait_for(["NOT_SERVING", "SERVING"])
        assert client.server_info().state == pb.SERVER_STATE_READY

        # A reader that stalls keeps the server from having drained too soon.
        sampling = pb.SamplingParams(temperature=0.0, max_tokens=1000, ignore_eos=True)
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[3, 4, 5]), sampling=sampling, request_id="running-slow")
        stalled = InferenceStub(slow_channel).GenerateStream(request)
        next(stalled)
        streams, waiting = fill(client, pool, free_rows=NUM_ROWS - 1, max_tokens=1000)
        error = refusal(client)
        code, details = status(error)
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert f"{NUM_QUEUED} requests wait already, the limit is {NUM_QUEUED}" in details
        assert int(dict(error.trailing_metadata())[RETRY_AFTER_KEY]) > 0  # type: ignore[attr-defined]

        server.terminate()
        for watch in watches:
            watch.wait_for(["NOT_SERVING", "SERVING", "NOT_SERVING"])
        code, details = status(refusal(client))
        assert code == grpc.StatusCode.UNAVAILABLE and "draining" in details
        assert client.server_info().state == pb.SERVER_STATE_DRAINING

        [expected] = {tuple(token for delta in stream for token in delta.token_ids) for stream in streams}
        assert len(expected) == 999  # each has given one before
        assert [token for message in stalled for token in message.delta.token_ids] == list(expected)
        answers = [future.result(PATIENCE_SECONDS) for future in waiting]
        assert [answer.usage.generated_tokens for answer in answers] == [50 + n for n in range(NUM_QUEUED)]
        assert server.wait() == 0
        for watch in watches:
            watch.wait_for(["NOT_SERVING", "SERVING", "NOT_SERVING", "the server has gone"])
        outcomes = [line[1] for line in server.wait_for_log(r"request '(?:running|waiting)-\w+': (\w+)")]
        assert outcomes == ["OK"] * (NUM_ROWS + NUM_QUEUED)
        server.wait_for_log("INFO jpaged.serving.server: drained")
        assert "Traceback" not in server.log


def test_what_is_left_after_the_drain_time_is_told_so(model_dir):
    with (
        ServerProcess(model_dir, *SMALL, "--drain-seconds", "0") as server,
        Client(server.address) as client,
        ThreadPoolExecutor(NUM_QUEUED) as pool,
    ):
        server.wait_until_serving()
        streams, waiting = fill(client, pool, free_rows=NUM_ROWS, max_tokens=2300)
        server.terminate()
        for end in [lambda stream=stream: list(stream) for stream in streams] + [future.result for future in waiting]:
            with pytest.raises(grpc.RpcError) as caught:
                end()
            code, details = status(caught.value)
            assert code == grpc.StatusCode.UNAVAILABLE and "the engine is closing" in details
        assert server.wait() == 0
        server.wait_for_log("the drain time is over")
        assert "Traceback" not in server.log


def test_sigterm_while_starting(model_dir):
    with ServerProcess(model_dir, *SMALL) as server:
        server.terminate()
        assert server.wait() == 0
        server.wait_for_log("told to stop while starting")
        assert "Traceback" not in server.log


def test_sigterm_while_compiling(model_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "none")  # nor need native kernels be built
    with ServerProcess(model_dir, *SMALL) as server:
        server.wait_for_log("compiled .* \\(1 of")
        server.terminate()
        assert server.wait() == 0
        server.wait_for_log("told to stop while starting")
        assert "ready after" not in server.log and "Traceback" not in server.log


def test_starts_that_fail_say_why_and_exit_with_2(model_dir, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        missing = tmp_path / "missing"
        starts = {
            start(model_dir, *SMALL, "--port", str(port)): [f"cannot listen on 127.0.0.1:{port}", "--port"],
            start(model_dir, *SMALL, "--metrics-port", str(port)): [f"metrics on 127.0.0.1:{port}", "--metrics-port"],
            start(missing): [f"no model '{missing}'", "directory"],
        }
        for process, messages in starts.items():
            code, said = end_of(process)
            assert code == 2, said
            assert "Traceback" not in said
            assert all(message in said for message in messages), said


def end_of(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and what was said, on one line as the console may have wrapped it anywhere."""
    _, said = process.communicate(timeout=PATIENCE_SECONDS)
    return process.returncode, " ".join(said.split())
