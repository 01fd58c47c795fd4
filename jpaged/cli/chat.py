"""`jpaged chat`: talk with a model in this process."""

import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Annotated

import typer

from jpaged.cli.console import AnswerStatistics, describe_engine, print_profile, start_llm
from jpaged.cli.conversation import ChatSettings, Conversation, with_chat_options
from jpaged.cli.method_options import with_sampling_options
from jpaged.cli.options import MODEL_HELP, with_engine_options
from jpaged.config import EngineConfig
from jpaged.errors import InvalidRequestError, JpagedError
from jpaged.params import SamplingParams
from jpaged.request import Message


@with_engine_options
@with_sampling_options
@with_chat_options
def chat(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    *,
    config: EngineConfig,
    params: SamplingParams,
    settings: ChatSettings,
) -> None:
    """Talk with a model; answers stream."""
    llm = start_llm(config)
    if llm.tokenizer is None or llm.tokenizer.chat_template is None:
        raise InvalidRequestError(f"{model} has no chat template; try `jpaged generate` with a text")
    Conversation(_LocalSpeaker(llm, params, settings), settings.system, refusals=(JpagedError,)).run()
    print_profile(llm)


class _LocalSpeaker:
    def __init__(self, llm, params: SamplingParams, settings: ChatSettings) -> None:
        self._llm = llm
        self._params = params
        self._settings = settings
        self._statistics = AnswerStatistics()

    def answer(self, messages: list[Message]) -> Iterator[str]:
        self._statistics = AnswerStatistics()
        prompt = self._llm.render_chat(messages, self._settings.tools, self._settings.chat_template_kwargs)
        stream = self._llm.stream(prompt, self._params)
        with closing(stream), _interrupts_noted() as interrupted:
            for delta in stream:
                self._statistics.count(delta.token_ids)
                self._statistics.prompt_tokens = len(delta.request.prompt_token_ids)
                self._statistics.cached_tokens = delta.request.num_cached_tokens
                self._statistics.finish_reason = delta.finish_reason
                yield delta.text
                if interrupted():
                    raise KeyboardInterrupt

    def describe_answer(self) -> str:
        return self._statistics.describe()

    def describe_engine(self) -> str:
        return describe_engine(self._llm.stats())


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
