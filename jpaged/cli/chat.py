"""`jpaged chat`: talk with a model in this process."""

from collections.abc import Iterator
from typing import Annotated

import typer

from jpaged.cli.console import describe_answer, start_llm
from jpaged.cli.conversation import converse
from jpaged.cli.options import MODEL_HELP, with_engine_options, with_sampling_options
from jpaged.config import EngineConfig
from jpaged.errors import InvalidRequestError, JpagedError
from jpaged.request import Message, SamplingParams


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
    if llm.tokenizer is None:
        raise InvalidRequestError(f"{model} has no tokenizer; chat needs one with a chat template")
    converse(_LocalSpeaker(llm, params), system, refusals=(JpagedError,))


class _LocalSpeaker:
    def __init__(self, llm, params: SamplingParams) -> None:
        self._llm = llm
        self._params = params
        self._description = "nothing yet"

    def answer(self, messages: list[Message]) -> Iterator[str]:
        pages_peak = 0
        for delta in self._llm.stream(self._llm.render_chat(messages), self._params):
            pages_peak = max(pages_peak, self._llm.stats().pages_used)
            self._description = describe_answer(delta.request, self._llm.stats(), pages_peak)
            yield delta.text

    def describe(self) -> str:
        return self._description
