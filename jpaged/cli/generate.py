"""`jpaged generate`: prompts from the command line or standard input, answers to standard output."""

import json
import sys
from typing import Annotated, TypeGuard

import typer

from jpaged.cli.console import (
    describe_answer,
    describe_completion,
    describe_engine,
    describe_logprobs,
    notes,
    print_profile,
    progress_bar,
    start_llm,
    write_text,
)
from jpaged.cli.method_options import with_method_options
from jpaged.cli.options import MODEL_HELP, with_engine_options
from jpaged.config import EngineConfig
from jpaged.errors import InvalidRequestError
from jpaged.params import BeamSearchParams, Params, SamplingParams
from jpaged.request import Prompt, RequestOutput


@with_engine_options
@with_method_options
def generate(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts; without any, stdin is one.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put each prompt through the model's chat template.")] = False,
    token_ids: Annotated[bool, typer.Option("--token-ids", help="Prompts are JSON lists of token ids.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Say what happened afterwards.")] = False,
    *,
    config: EngineConfig,
    params: Params,
) -> None:
    """Generate text for prompts.

    One prompt streams token by token. Several prompts run together and, like several samples or beams of a prompt and
    answers with logprobs, are printed as JSON objects, one a line.
    """
    if chat and token_ids:
        raise InvalidRequestError("--chat makes prompts of texts and --token-ids takes token ids; give one of them")
    texts = prompts or [_read_stdin()]
    given: list[Prompt] = [_read_token_ids(text) if token_ids else text for text in texts]
    llm = start_llm(config)
    if chat:
        given = [llm.render_chat([{"role": "user", "content": text}]) for text in texts]
    if len(given) == 1 and is_plain(params):
        _stream(llm, given[0], params, stats)
    else:
        _print_answers(llm, texts, _generate(llm, given, params), stats)
    print_profile(llm)


def _print_answers(llm, texts: list[str], outputs: list[RequestOutput], stats: bool) -> None:
    for text, output in zip(texts, outputs, strict=True):
        for completion in output.outputs:
            line = {"prompt": text} | describe_completion(completion, len(output.outputs))
            if output.prompt_logprobs is not None:
                line["prompt_logprobs"] = describe_logprobs(output.prompt_token_ids, output.prompt_logprobs)
            print(json.dumps(line, ensure_ascii=False))
    if stats:
        notes.print(describe_engine(llm.stats()))


def is_plain(params: Params) -> TypeGuard[SamplingParams]:
    """Whether an answer is one text and nothing else, which can stream."""
    if isinstance(params, BeamSearchParams) or params.n > 1:
        return False
    return params.logprobs is None and params.prompt_logprobs is None


def _read_stdin() -> str:
    """Standard input without the line end that `echo` and editors put there."""
    if sys.stdin.isatty():
        notes.print("Reading the prompt from the terminal; Ctrl-D on a line of its own ends it.")
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"standard input is no text: {error}") from error


def _read_token_ids(text: str) -> Prompt:
    try:
        token_ids = json.loads(text)
    except ValueError:
        token_ids = None
    if not isinstance(token_ids, list):
        raise InvalidRequestError(f"the prompt is no JSON list of token ids such as [1, 2, 3]: {text[:80]!r}")
    return {"prompt_token_ids": token_ids}


def _generate(llm, prompts: list[Prompt], params: Params) -> list[RequestOutput]:
    with progress_bar() as progress:
        task = progress.add_task("Generating", total=len(prompts))
        if isinstance(params, BeamSearchParams):
            return llm.beam_search(prompts, params)
        return llm.generate(prompts, params, on_delta=lambda delta: progress.advance(task, delta.finished))


def _stream(llm, prompt: Prompt, params: SamplingParams, stats: bool) -> None:
    pages_peak, output = 0, None
    try:
        for delta in llm.stream(prompt, params):
            has_text = llm.tokenizer is not None and params.detokenize
            write_text(delta.text if has_text else "".join(f"{token_id} " for token_id in delta.token_ids))
            pages_peak = max(pages_peak, llm.stats().pages_used)
            output = delta.request
    except KeyboardInterrupt:
        write_text("\n")
        raise
    write_text("\n")
    if stats and output is not None:
        notes.print(describe_answer(output, llm.stats(), pages_peak))
