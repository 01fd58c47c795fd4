"""A conversation on a real terminal: a prompt, keys that interrupt, a way out."""

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

import pytest

from tests.cli.tiny_chat_model import write_tiny_chat_model
from tests.serving.server_process import PATIENCE_SECONDS, ROOT, ServerProcess

CTRL_C, CTRL_D = "\x03", "\x04"
ENGINE_OPTIONS = (
    "--dtype float32 --max-num-seqs 8 --max-num-batched-tokens 16 --max-model-len 8192 --page-size 4 --num-pages 2100"
).split()
# Far longer than a key takes to arrive.
ENDLESS = ("--max-tokens", "3000", "--ignore-eos", "--temperature", "1")
# A new session, whose terminal is the standard input: only so do keys become signals.
ON_ITS_TERMINAL = (
    "import fcntl, runpy, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
    " runpy.run_module('jpaged', run_name='__main__', alter_sys=True)"
)


class Terminal:
    """`jpaged` with a terminal of its own; what it shows is read as it comes."""

    def __init__(self, *arguments: str | Path) -> None:
        self._keyboard, terminal = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", ON_ITS_TERMINAL, *map(str, arguments)],
            **dict.fromkeys(("stdin", "stdout", "stderr"), terminal),
            cwd=ROOT,
            env=os.environ | {"TERM": "dumb", "COLUMNS": "200"},
            start_new_session=True,
        )
        os.close(terminal)
        self._shown = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._keyboard)

    def press(self, keys: str) -> None:
        os.write(self._keyboard, keys.encode())

    def interrupt_prompt(self) -> None:
        """Ctrl-C once the prompt waits for keys: what comes just before, readline only notices with the next key."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        status = Path(f"/proc/{self.process.pid}/stat")
        while status.read_text().rpartition(")")[2].split()[0] != "S":
            assert time.monotonic() < deadline, "the prompt does not come to rest"
        self.press(CTRL_C)

    def see(self, pattern: str) -> re.Match[str]:
        """Wait until something is shown, after what was seen before."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (found := re.search(pattern, self._shown, re.DOTALL)) is None:
            left = deadline - time.monotonic()
            readable, _, _ = select.select([self._keyboard], [], [], max(left, 0))
            try:
                read = os.read(self._keyboard, 4096) if readable else b""
            except OSError:  # the other end is closed
                read = b""
            assert read, f"{pattern!r} is not in {self._shown!r}"
            self._shown += read.decode(errors="replace")
        self._shown = self._shown[found.end() :]
        return found

    def wait(self) -> int:
        return self.process.wait(PATIENCE_SECONDS)


@pytest.fixture(scope="module")
def roomy_model(tmp_path_factory) -> Path:
    """A context in which an answer goes on for long."""
    path = write_tiny_chat_model(tmp_path_factory.mktemp("roomy") / "chat")
    config = json.loads((path / "config.json").read_text()) | {"max_position_embeddings": 8192}
    (path / "config.json").write_text(json.dumps(config))
    return path


def stop_an_answer(terminal: Terminal, question: str) -> re.Match[str]:
    terminal.press(f"{question}\n")
    terminal.see(rf"{question}\r\n.{{20}}")
    terminal.press(CTRL_C)
    terminal.see(r" \.\.\. stopped\r\n")
    return terminal.see(
        r"(?:(\d+) prompt tokens \((\d+) cached\), )?(\d+) generated \(stopped\); first token after .*?> "
    )


def test_ctrl_c_stops_the_answer_and_twice_at_the_prompt_it_leaves(roomy_model):
    with Terminal("chat", roomy_model, *ENDLESS, *ENGINE_OPTIONS) as terminal:
        terminal.see("Ready in .*Ctrl-D leaves.*> ")
        first = stop_an_answer(terminal, "hello")
        second = stop_an_answer(terminal, "you")
        # What was said before the keys came is remembered, and not computed again.
        assert int(first[2]) == 0 and int(second[1]) > int(first[1]) + 10 and int(second[2]) > 0
        assert 0 < int(first[3]) < 3000
        terminal.press("half a line")
        terminal.see("half a line")
        terminal.interrupt_prompt()
        terminal.see("Ctrl-C again leaves.*> ")
        terminal.press("/stats\n")  # so it was not again
        terminal.see("compilations after ready: 0.*> ")
        terminal.interrupt_prompt()
        terminal.see("Ctrl-C again leaves.*> ")
        terminal.interrupt_prompt()
        assert terminal.wait() == 0


def test_the_same_with_a_server_and_ctrl_d_leaves(roomy_model):
    with ServerProcess(roomy_model, *ENGINE_OPTIONS) as server:
        server.wait_until_serving()
        with Terminal("client", "chat", "--address", server.address, *ENDLESS) as terminal:
            terminal.see("Ctrl-D leaves.*> ")
            stop_an_answer(terminal, "hello")
            server.wait_for_log("CANCELLED")
            terminal.press('"""two\nlines"""\n')
            terminal.see(r"\. .{30}")
            terminal.press(CTRL_C)
            terminal.see(r" \.\.\. stopped.*> ")
            terminal.press(CTRL_D)
            assert terminal.wait() == 0
