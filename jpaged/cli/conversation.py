"""A conversation in the terminal, whoever answers."""

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from jpaged.cli.console import notes, write_text
from jpaged.cli.method_options import read_text_file
from jpaged.cli.options import Option, with_options
from jpaged.request import Message
from jpaged.serving.messages import read_json

_HELP = """\
/reset          forget the conversation, but not the system message
/system TEXT    change the system message; without TEXT show it
/stats          say how full the engine is
/help           say this
/exit           leave, as Ctrl-D does
\"\"\"             begins a turn of several lines, and ends it
Ctrl-C          stop an answer; at the prompt, twice: leave"""
_QUOTES = '"""'
_OPTIONS = {
    "system": Option(str | None, None, "A system message to begin with."),
    "tools": Option(
        Path | None, None, "A JSON list of functions that the model may call, as in OpenAI's interface.", metavar="FILE"
    ),
    "chat_template_kwargs": Option(
        str | None, None, 'Variables of the template, for example {"enable_thinking": false}.', metavar="JSON"
    ),
}


@dataclass(frozen=True)
class ChatSettings:
    """What a conversation begins with, and what the model's template gets beside it."""

    system: str | None
    tools: list[dict[str, Any]] | None
    chat_template_kwargs: dict[str, Any] | None


def with_chat_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of a conversation; it gets them as ChatSettings in its parameter `settings`."""

    def build(values: dict[str, Any]) -> ChatSettings:
        tools = read_json("tools", read_text_file("tools", values["tools"]), list)
        variables = read_json("chat_template_kwargs", values["chat_template_kwargs"], dict)
        return ChatSettings(values["system"], tools, variables)

    return with_options(command, "settings", _OPTIONS, build, "Conversation")


class Speaker(Protocol):
    """Answers conversations."""

    def answer(self, messages: list[Message]) -> Iterator[str]:
        """Yield the answer's text piece by piece; closing the iterator ends the work."""
        ...

    def describe_answer(self) -> str:
        """Say what the last answer took, also if it was stopped."""
        ...

    def describe_engine(self) -> str:
        """Say how full the engine is."""
        ...


class Conversation:
    """Reads turns from standard input and streams the answers.

    A turn that is refused with one of `refusals` is reported and forgotten; the conversation goes on.
    """

    def __init__(self, speaker: Speaker, system: str | None, refusals: tuple[type[Exception], ...]) -> None:
        self._speaker = speaker
        self._system = system
        self._refusals = refusals
        self._turns: list[Message] = []

    def run(self) -> None:
        """Go on until the input ends, /exit, or Ctrl-C twice at the prompt."""
        notes.print("/help says what can be said here beside a message; Ctrl-C stops an answer, Ctrl-D leaves.")
        leaving = False
        while True:
            try:
                text = _read_turn().strip()
            except EOFError:
                notes.print()
                return
            except KeyboardInterrupt:
                notes.print()
                if leaving:
                    return
                leaving = True
                notes.print("Ctrl-C again leaves.")
                continue
            leaving = False
            if text == "/exit":
                return
            with suppress(KeyboardInterrupt):  # one more, while the answer that the first one stopped is wound up
                if text.startswith("/"):
                    self._obey(*text.split(maxsplit=1))
                elif text:
                    self._take_turn(text)

    def _obey(self, command: str, argument: str = "") -> None:
        if command == "/reset":
            self._turns.clear()
            notes.print("Forgotten.")
        elif command == "/system":
            self._system = argument or self._system
            notes.print(f"System message: {self._system}" if self._system else "There is no system message.")
        elif command == "/stats":
            with suppress(*self._refusals):  # a server may have gone; the next turn says so
                notes.print(self._speaker.describe_engine())
        else:
            notes.print(_HELP)

    def _take_turn(self, text: str) -> None:
        """Stream the answer to `text` and remember both, also an answer that was stopped."""
        system: list[Message] = [{"role": "system", "content": self._system}] if self._system else []
        asked = [*self._turns, {"role": "user", "content": text}]
        answer, ending = "", "\n"
        pieces = self._speaker.answer([*system, *asked])
        try:
            for piece in pieces:
                answer += piece
                write_text(piece)
        except KeyboardInterrupt:
            ending = " ... stopped\n"
        except self._refusals as error:
            notes.print(f"{error} (this turn is forgotten; /reset forgets the others)", style="red")
            return
        self._turns = [*asked, {"role": "assistant", "content": answer}]
        pieces.close()  # type: ignore[attr-defined]
        write_text(ending)
        notes.print(self._speaker.describe_answer(), style="dim")


def _read_turn() -> str:
    """A line, or all up to the next quotes."""
    line = _read_line("> ")
    if not line.lstrip().startswith(_QUOTES):
        return line
    text = line.lstrip().removeprefix(_QUOTES)
    while not text.rstrip().endswith(_QUOTES):
        text += "\n" + _read_line(". ")
    return text.rstrip().removesuffix(_QUOTES)


def _read_line(prompt: str) -> str:
    """Ask on the terminal, if there is one; nothing but answers goes to standard output."""
    if not sys.stdin.isatty():
        return input()
    with suppress(ImportError):
        import readline  # noqa: F401  # gives `input` line editing and a history
    if sys.stdout.isatty():
        return input(prompt)
    notes.print(prompt, end="")
    return input()
