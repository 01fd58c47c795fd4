"""`jpaged convert`: a model in another form."""

from pathlib import Path
from typing import Annotated

import typer

from jpaged.cli.console import notes
from jpaged.cli.options import MODEL_HELP


def convert(
    source: Annotated[str, typer.Argument(help=MODEL_HELP)],
    target: Annotated[Path, typer.Argument(help="A directory that does not exist yet, or is empty.")],
    to: Annotated[str, typer.Option(help="safetensors or orbax.")] = "safetensors",
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Of the weights: bfloat16, float16 or float32. Default: as they are, bfloat16 for a .gguf file."
        ),
    ] = None,
) -> None:
    """Write a model as a plain directory (config.json, safetensors, tokenizer) or as an Orbax checkpoint."""
    from jpaged.engine.convert import convert as convert_model

    convert_model(source, target, to=to, dtype=dtype, progress=notes.print)
    notes.print(f"Wrote {target}.")
