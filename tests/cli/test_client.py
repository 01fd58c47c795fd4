"""What the client's commands say; the calls themselves are tested with a server."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from jpaged.client import Delta, Usage
from jpaged.v1.inference_pb2 import GetServerInfoResponse


def delta(text: str, usage: Usage | None = None) -> Delta:
    return Delta("r", 0, text, [1], "stop" if usage else None, None, usage)


class FakeClient:
    """Answers every conversation with its number of messages, and is interrupted in its second answer."""

    answers = 0
    chat: dict[str, Any]  # of the last answer

    def __init__(self, address: str) -> None:
        self.address = address

    def __enter__(self) -> "FakeClient":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def stream(self, messages: Any, params: Any, **chat: Any) -> Iterator[Delta]:
        FakeClient.answers += 1
        FakeClient.chat = chat
        yield delta(f"{len(messages)} ")
        if FakeClient.answers == 2:
            raise KeyboardInterrupt
        yield delta("messages", Usage(7, 3, 2))

    def server_info(self) -> GetServerInfoResponse:
        return GetServerInfoResponse(pages_used=5, pages_free=6, pages_total=11)


@pytest.fixture(autouse=True)
def fake_client(monkeypatch):
    monkeypatch.setattr(FakeClient, "answers", 0)
    monkeypatch.setattr("jpaged.cli.client.Client", FakeClient)


def test_chat_streams_remembers_and_can_be_stopped(run):
    turns = "/stats\nhello\nhello\nhello\n"
    result = run("client", "chat", "--system", "be nice", stdin=turns)
    assert result.exit_code == 0
    assert result.stdout == "2 messages\n4  ... stopped\n6 messages\n"
    notes = result.stderr.splitlines()
    assert notes[1].startswith("pages: 5 used, 6 of 11 free")
    assert notes[2].startswith("7 prompt tokens (3 cached), 2 generated (stop); first token after ")
    assert notes[2].endswith(" tokens/s")
    assert re.fullmatch(r"1 generated \(stopped\); first token after \S+ s", notes[3])
    assert notes[4].startswith("7 prompt tokens (3 cached), 2 generated (stop)")


def test_chat_sends_tools_and_variables_of_the_template(run, tmp_path):
    tools = [{"type": "function", "function": {"name": "now", "parameters": {}}}]
    (tmp_path / "tools.json").write_text(json.dumps(tools))
    arguments = ("--tools", tmp_path / "tools.json", "--chat-template-kwargs", '{"enable_thinking": false}')
    assert run("client", "chat", *arguments, stdin="hello\n").exit_code == 0
    assert FakeClient.chat == {"tools": tools, "chat_template_kwargs": {"enable_thinking": False}}
    for bad, message in (
        (("--tools", tmp_path / "nothing"), "tools names"),
        (("--chat-template-kwargs", "[]"), "chat_template_kwargs is '[]', it must be an object"),
        (("--chat-template-kwargs", "{"), "chat_template_kwargs is no JSON"),
    ):
        result = run("client", "chat", *bad, stdin="hello\n")
        assert result.exit_code == 2 and message in result.stderr


def test_generate_writes_the_answer_and_a_line_end(run):
    result = run("client", "generate", "xy")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "2 messages\n", "")
