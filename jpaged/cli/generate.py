"""`jpaged generate`: prompts from the command line or standard input, answers to standard output."""

import json
import sys
from typing import Annotated

import typer

from jpaged.cli.console import describe_answer, notes, start_llm, write_text
from jpaged.cli.options import MODEL_HELP, with_engine_options, with_sampling_options
from jpaged.config import EngineConfig
from jpaged.errors import InvalidRequestError
from jpaged.request import Prompt, SamplingParams


@with_engine_options
@with_sampling_options
def generate(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts; without any, one is read from stdin.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put each prompt through the model's chat template.")] = False,
    token_ids: Annotated[bool, typer.Option("--token-ids", help="Prompts are JSON lists of token ids.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Say what happened afterwards.")] = False,
    *,
    config: EngineConfig,
    params: SamplingParams,
) -> None:
    """Generate text for prompts. One prompt streams token by token; several run together."""
    texts = prompts or [sys.stdin.read()]
    llm = start_llm(config)
    ready: list[Prompt] = [_make_prompt(llm, text, chat, token_ids) for text in texts]
    if len(ready) == 1:
        _stream(llm, ready[0], params, stats)
        return
    for text, output in zip(texts, llm.generate(ready, params), strict=True):
        print(
            json.dumps(
                {"prompt": text, "text": output.outputs[0].text, "finish_reason": output.outputs[0].finish_reason}
            )
        )
    if stats:
        notes.print(str(llm.stats()))


def _make_prompt(llm, text: str, chat: bool, token_ids: bool) -> Prompt:
    if token_ids:
        try:
            return {"prompt_token_ids": json.loads(text)}
        except json.JSONDecodeError as error:
            raise InvalidRequestError(f"the prompt is no JSON list of token ids ({error}): {text[:80]!r}") from error
    return llm.render_chat([{"role": "user", "content": text}]) if chat else text


def _stream(llm, prompt: Prompt, params: SamplingParams, stats: bool) -> None:
    pages_peak, output = 0, None
    for delta in llm.stream(prompt, params):
        write_text(delta.text if llm.tokenizer is not None else f"{delta.token_ids[0]} ")
        pages_peak = max(pages_peak, llm.stats().pages_used)
        output = delta.request
    write_text("\n")
    if stats and output is not None:
        notes.print(describe_answer(output, llm.stats(), pages_peak))
