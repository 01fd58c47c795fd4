"""Tries grammars out where they can do no harm.

llguidance has limits for most that a grammar may cost, but not for all: a multiple of a large number or an intersection
of a few hundred expressions takes it minutes, and a long chain of rules overflows its stack, which would end a server.
So sources from users are compiled in a process of their own first, which has little time, memory and stack to lose.

That process runs this file as a script. It imports llguidance and nothing of jpaged.
"""

import base64
import json
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

CPU_SECONDS = 2.0
MEMORY_BYTES = 4 * 2**30
STACK_BYTES = 2**20  # less than any thread of a server has
READY = "ready"


class GrammarTrial:
    """A process that compiles what it is given. It starts with the first grammar, again after each that ended it, and
    goes when this object or the program does. Safe to use from several threads, one of which is served at a time."""

    def __init__(self, tokens: Sequence[bytes], special_token_ids: Sequence[int], end_ids: Sequence[int]):
        self._vocabulary = json.dumps(
            {
                "tokens": [base64.b64encode(token).decode() for token in tokens],
                "special_token_ids": list(special_token_ids),
                "end_ids": list(end_ids),
            }
        )
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def find_harm(self, definition: str, limits: dict[str, Any]) -> str | None:
        """Why llguidance cannot be given this `definition`; `None` if it can, be it to be refused by it.

        Raises RuntimeError when no process can be started.
        """
        with self._lock:
            process = self._process = self._process or self._start()
            if _ask(process, json.dumps({"definition": definition, "limits": limits})):
                return None
            self._process = None
            if process.wait() == -signal.SIGPROF:
                return f"it takes more than {CPU_SECONDS:g} seconds to compile"
            return "it takes too much memory or too deep a recursion to compile"

    def _start(self) -> "subprocess.Popen[str]":
        pipe, none = subprocess.PIPE, subprocess.DEVNULL
        process = subprocess.Popen(
            [sys.executable, "-P", __file__], stdin=pipe, stdout=pipe, stderr=none, text=True, encoding="utf-8"
        )
        weakref.finalize(self, process.kill)
        if _ask(process, self._vocabulary) != READY:
            raise RuntimeError(f"the process that tries grammars out ended with status {process.wait()}")
        return process


def _ask(process: "subprocess.Popen[str]", question: str) -> str:
    """The answer, one line; empty if the process has ended."""
    assert process.stdin is not None and process.stdout is not None
    with suppress(OSError):
        process.stdin.write(question + "\n")
        process.stdin.flush()
        return process.stdout.readline().strip()
    return ""


class _Vocabulary:
    """As llguidance's TokenizerWrapper."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[str], special_token_ids: list[int], end_ids: list[int]):
        self.tokens = [base64.b64decode(token) for token in tokens]
        self.special_token_ids, self.eos_token_id = special_token_ids, end_ids[0]
        self.tokenizer = LLTokenizer(cast(Any, self), eos_token=end_ids)

    def __call__(self, text: str | bytes) -> list[int]:
        return self.tokenizer.greedy_tokenize(text.decode(errors="ignore") if isinstance(text, bytes) else text)[:8]


def _serve() -> None:
    """Compiles each line of the input as the server would, and answers when that has ended."""
    tokenizer = _Vocabulary(**json.loads(sys.stdin.readline())).tokenizer
    print(READY, flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # its signal ends the process, whatever that does
        limits = LLParserLimits(**question["limits"])
        matcher = LLMatcher(tokenizer, question["definition"], log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        signal.setitimer(signal.ITIMER_PROF, 0)
        print("done", flush=True)


if __name__ == "__main__":
    with suppress(OSError, ValueError):  # not every system has this limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the program that started this one
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    threading.stack_size(STACK_BYTES)
    worker = threading.Thread(target=_serve)
    worker.start()
    worker.join()
