"""A conversation in the terminal, whoever answers."""

import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Protocol

from jpaged.cli.console import notes, write_text
from jpaged.request import Message

_HELP = "/reset forgets the conversation, /stats says what happened, /exit (or Ctrl-D) leaves; Ctrl-C stops an answer."


class Speaker(Protocol):
    """Answers conversations."""

    def answer(self, messages: list[Message]) -> Iterator[str]:
        """Yield the answer's text piece by piece; closing the iterator ends the work."""
        ...

    def describe(self) -> str:
        """Say what the last answer took."""
        ...


def converse(speaker: Speaker, system: str | None, refusals: tuple[type[Exception], ...]) -> None:
    """Read turns from standard input and stream the answers, until the input ends.

    A turn that is refused with one of `refusals` is reported and forgotten; the conversation goes on.
    """
    beginning: list[Message] = [{"role": "system", "content": system}] if system else []
    messages = list(beginning)
    notes.print(_HELP)
    while True:
        try:
            text = _read_turn().strip()
        except (EOFError, KeyboardInterrupt):
            notes.print()
            return
        if text == "/exit":
            return
        if text == "/reset":
            messages = list(beginning)
        elif text == "/stats":
            notes.print(speaker.describe())
        elif text.startswith("/"):
            notes.print(_HELP)
        elif text:
            messages = _take_turn(speaker, messages, text, refusals)


def _read_turn() -> str:
    """Ask on the terminal, if there is one; nothing but answers goes to standard output."""
    if not sys.stdin.isatty():
        return input()
    with suppress(ImportError):
        import readline  # noqa: F401  # gives `input` line editing and a history
    if sys.stdout.isatty():
        return input("> ")
    notes.print("> ", end="")
    return input()


def _take_turn(
    speaker: Speaker, messages: list[Message], text: str, refusals: tuple[type[Exception], ...]
) -> list[Message]:
    """Stream the answer to `text`; return the conversation with both, or as it was if the turn is refused."""
    asked = [*messages, {"role": "user", "content": text}]
    answer = ""
    pieces = speaker.answer(asked)
    try:
        for piece in pieces:
            write_text(piece)
            answer += piece
    except KeyboardInterrupt:
        pieces.close()  # type: ignore[attr-defined]
        write_text(" ... stopped")
    except refusals as error:
        notes.print(f"{error} (this turn is forgotten; /reset forgets the others)", style="red")
        return messages
    write_text("\n")
    return [*asked, {"role": "assistant", "content": answer}]
