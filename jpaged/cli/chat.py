"""`jpaged chat`: talk with a model in this process."""

import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Annotated

import typer

from jpaged.cli.console import describe_answer, start_llm
from jpaged.cli.conversation import converse
from jpaged.cli.options import MODEL_HELP, with_engine_options, with_sampling_options
from jpaged.config import EngineConfig
from jpaged.errors import InvalidRequestError, JpagedError
from jpaged.params import SamplingParams
from jpaged.request import Message


@with_engine_options
@with_sampling_options
def chat(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    *,
    config: EngineConfig,
    params: SamplingParams,
) -> None:
    """Talk with a model; answers stream."""
    llm = start_llm(config)
    if llm.tokenizer is None or llm.tokenizer.chat_template is None:
        raise InvalidRequestError(f"{model} has no chat template; try `jpaged generate` with a text")
    converse(_LocalSpeaker(llm, params), system, refusals=(JpagedError,))


class _LocalSpeaker:
    def __init__(self, llm, params: SamplingParams) -> None:
        self._llm = llm
        self._params = params
        self._description = "nothing yet"

    def answer(self, messages: list[Message]) -> Iterator[str]:
        pages_peak = 0
        stream = self._llm.stream(self._llm.render_chat(messages), self._params)
        with closing(stream), _interrupts_noted() as interrupted:
            for delta in stream:
                pages_peak = max(pages_peak, self._llm.stats().pages_used)
                self._description = describe_answer(delta.request, self._llm.stats(), pages_peak)
                yield delta.text
                if interrupted():
                    raise KeyboardInterrupt

    def describe(self) -> str:
        return self._description


@contextmanager
def _interrupts_noted() -> Iterator[Callable[[], bool]]:
    """Only note the first Ctrl-C: one that broke into a step would leave the engine's books wrong."""
    noted = False

    def note(*_: object) -> None:
        nonlocal noted
        if noted:
            raise KeyboardInterrupt
        noted = True

    earlier = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: noted
    finally:
        signal.signal(signal.SIGINT, earlier)
