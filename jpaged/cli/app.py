"""Puts the commands together and turns errors into exit codes."""

import sys

import typer

from jpaged.cli.batch import batch
from jpaged.cli.bench import bench
from jpaged.cli.chat import chat
from jpaged.cli.client import client
from jpaged.cli.compile import compile_model
from jpaged.cli.console import notes
from jpaged.cli.convert import convert
from jpaged.cli.generate import generate
from jpaged.cli.serve import serve
from jpaged.errors import JpagedError

BAD_INPUT_EXIT_CODE = 2
INTERRUPTED_EXIT_CODE = 130

app = typer.Typer(
    name="jpaged", help="Serve large language models with a paged KV cache.", no_args_is_help=True, add_completion=False
)
for command in (serve, generate, chat, batch, convert):
    app.command()(command)
app.command("compile")(compile_model)
app.add_typer(client, name="client")
app.add_typer(bench, name="bench")


def main() -> None:
    """Run the command line. Exit code 2 for bad input, 130 after Ctrl-C."""
    try:
        app()
    except JpagedError as error:
        notes.print(f"Error: {error}", style="bold red")
        sys.exit(BAD_INPUT_EXIT_CODE)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED_EXIT_CODE)
