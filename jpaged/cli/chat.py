"""`jpaged chat`: a conversation in the terminal."""

from typing import Annotated, Any

import typer

from jpaged.cli.console import describe_answer, notes, start_llm, write_text
from jpaged.cli.options import MODEL_HELP, with_engine_options, with_sampling_options
from jpaged.config import EngineConfig
from jpaged.errors import InvalidRequestError, JpagedError
from jpaged.request import SamplingParams

_HELP = "/reset forgets the conversation, /stats says what happened, /exit (or Ctrl-D) leaves; Ctrl-C stops an answer."


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
    beginning: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    messages, last = list(beginning), "nothing yet"
    notes.print(_HELP)
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            notes.print()
            return
        if text == "/exit":
            return
        if text == "/reset":
            messages = list(beginning)
        elif text == "/stats":
            notes.print(last)
        elif text.startswith("/"):
            notes.print(_HELP)
        elif text:
            last = _answer(llm, messages, text, params) or last


def _answer(llm, messages: list[dict[str, Any]], text: str, params: SamplingParams) -> str | None:
    """Stream the answer to `text`, and append both to `messages`; return what happened. A refused turn is forgotten."""
    messages.append({"role": "user", "content": text})
    pages_peak, output = 0, None
    try:
        stream = llm.stream(llm.render_chat(messages), params)
        try:
            for delta in stream:
                write_text(delta.text)
                pages_peak = max(pages_peak, llm.stats().pages_used)
                output = delta.request
        except KeyboardInterrupt:
            stream.close()
            write_text(" ... stopped")
    except JpagedError as error:
        messages.pop()
        notes.print(str(error), style="red")
        return None
    write_text("\n")
    if output is None:
        messages.pop()
        return None
    messages.append({"role": "assistant", "content": output.outputs[0].text})
    return describe_answer(output, llm.stats(), pages_peak)
