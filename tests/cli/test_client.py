"""What the client's commands say; the calls themselves are tested with a server."""

from collections.abc import Iterator
from typing import Any

import pytest

from jpaged.client import Delta, Usage


def delta(text: str, usage: Usage | None = None) -> Delta:
    return Delta("r", 0, text, [1], "stop" if usage else None, None, usage)


class FakeClient:
    """Answers every conversation with its number of messages, and is interrupted in its second answer."""

    answers = 0

    def __init__(self, address: str) -> None:
        self.address = address

    def __enter__(self) -> "FakeClient":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def stream(self, messages: Any, params: Any) -> Iterator[Delta]:
        FakeClient.answers += 1
        yield delta(f"{len(messages)} ")
        if FakeClient.answers == 2:
            raise KeyboardInterrupt
        yield delta("messages", Usage(7, 3, 2))


@pytest.fixture(autouse=True)
def fake_client(monkeypatch):
    monkeypatch.setattr(FakeClient, "answers", 0)
    monkeypatch.setattr("jpaged.cli.client.Client", FakeClient)


def test_chat_streams_remembers_and_can_be_stopped(run):
    turns = "/stats\nhello\n/stats\nhello\n/stats\nhello\n"
    result = run("client", "chat", "--system", "be nice", stdin=turns)
    assert result.exit_code == 0
    assert result.stdout == "2 messages\n4  ... stopped\n6 messages\n"
    notes = result.stderr.splitlines()
    assert notes[1] == "nothing yet"
    assert notes[2].startswith("7 prompt tokens (3 cached), 2 generated; time to first token ")
    assert notes[3].startswith("stopped: 1 generated; time to first token ") and notes[3].endswith("then no more")


def test_generate_writes_the_answer_and_a_line_end(run):
    result = run("client", "generate", "xy")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "2 messages\n", "")
