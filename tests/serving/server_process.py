"""`jpaged serve` in a process of its own, as users run it."""

import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Self

from jpaged.client import Client
from jpaged.v1.inference_pb2 import GetServerInfoResponse

ROOT = Path(__file__).resolve().parents[2]
# So few shapes that they compile in seconds. No request of more than 2,401 tokens ever fits.
SMALL_OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 4096,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 16,
    "page_size": 4,
    "num_pages": 600,
}
SMALL = tuple(word for name, value in SMALL_OPTIONS.items() for word in (f"--{name.replace('_', '-')}", str(value)))
# Of the shared server.
MODEL_NAME = "tiny"
MAX_MESSAGE_BYTES = 65536
PATIENCE_SECONDS = 120.0
# A connection of its own, which takes only a few hundred bytes ahead of its reader.
SLOW_CONNECTION = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.http2.lookahead_bytes", 256),
    ("grpc.http2.bdp_probe", 0),
]


class ServerProcess:
    """Starts a server on a free port and reads its log.

    Attributes:
        address: "HOST:PORT" of the gRPC server, once it listens.
    """

    def __init__(self, model: str | Path, *options: str) -> None:
        self._lines: list[str] = []
        self._news = threading.Condition()
        self._ended = False
        self.process = start(model, *options)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.address = self.wait_for_log(r"listening on (\S+)")[0][1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()

    def wait_for_log(self, pattern: str, count: int = 1) -> list[re.Match[str]]:
        """Wait until `pattern` was found in `count` lines of the log; return the matches."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        with self._news:
            while len(found := [match for line in self._lines if (match := re.search(pattern, line))]) < count:
                left = deadline - time.monotonic()
                assert not self._ended and left > 0, (
                    f"{len(found)} of {count} lines with {pattern!r} in the log:\n{self.log}"
                )
                self._news.wait(left)
        return found

    @property
    def log(self) -> str:
        return "".join(self._lines)

    def wait_until_serving(self) -> None:
        with Client(self.address) as client:
            assert client.wait_until_serving(PATIENCE_SECONDS) == "SERVING", self.log

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        """Wait for the end of the process and of its log; return the exit code."""
        code = self.process.wait(PATIENCE_SECONDS)
        self._reader.join(PATIENCE_SECONDS)
        return code

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._news:
                self._lines.append(line)
                self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()


def start(model: str | Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "jpaged", "serve", str(model), "--port", "0", *options]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def wait_until_idle(client: Client) -> GetServerInfoResponse:
    """Ask until no request is left in the engine; return what the server said then. Every page must be back."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        info = client.server_info()
        if not info.rows_running and not info.rows_waiting and not info.pages_used:
            assert info.pages_used == 0
            return info
        assert time.monotonic() < deadline, f"requests or pages are left:\n{info}"
