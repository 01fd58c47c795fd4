"""`jpaged batch`: a file of requests in, a file of answers out."""

from pathlib import Path
from typing import Annotated

import typer

from jpaged.cli.console import describe_engine, notes, print_profile, progress_bar, start_llm
from jpaged.cli.options import MODEL_HELP, with_engine_options
from jpaged.config import EngineConfig
from jpaged.errors import InvalidRequestError
from jpaged.serving.openai_batch import BatchRun


@with_engine_options
def batch(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    input_path: Annotated[Path, typer.Argument(metavar="INPUT", help="Requests, one JSON object a line.")],
    output_path: Annotated[Path, typer.Argument(metavar="OUTPUT", help="Answers; an interrupted run goes on here.")],
    *,
    config: EngineConfig,
) -> None:
    """Answer a file in OpenAI's batch format (/v1/chat/completions and /v1/completions).

    Answers are written as they finish. A line that cannot be served gets an error of its own, and the exit code is 2.
    """
    run = BatchRun(input_path, output_path, model)
    if run.num_done:
        notes.print(
            f"{output_path} answers {run.num_done} of {run.num_lines} lines already, from an earlier run;"
            " remove it to begin anew."
        )
    if run.num_done < run.num_lines:
        _answer(run, start_llm(config))
    if run.errors:
        raise InvalidRequestError(
            f"{len(run.errors)} of {run.num_lines} lines failed, the others are answered in {output_path};"
            f" the first: {run.errors[0]}"
        )
    notes.print(f"All {run.num_lines} lines are answered in {output_path}.")


def _answer(run: BatchRun, llm) -> None:
    with progress_bar() as progress:
        task = progress.add_task("Answering", total=run.num_lines, completed=run.num_done)
        try:
            for _ in run.answer(llm.engine):
                progress.advance(task)
        except KeyboardInterrupt:
            notes.print("Stopped; what is answered is kept, and the same command goes on from there.")
            raise
    notes.print(describe_engine(llm.stats()))
    print_profile(llm)
