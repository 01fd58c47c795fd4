"""`jpaged compile`: what a model's steps take on a TPU, without a TPU."""

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from jpaged.cli.console import notes
from jpaged.cli.options import MODEL_HELP, with_engine_options
from jpaged.config import EngineConfig

MIB = 1 << 20


@with_engine_options
def compile_model(
    model: Annotated[str, typer.Argument(help=MODEL_HELP + " Here a directory with only a config.json will do.")],
    config: EngineConfig,
    topology: Annotated[str, typer.Option(help="The TPU to compile for: v5e:1x1, v6e:2x2, tpu7x:2x2x1, ...")],
) -> None:
    """Compile every step of a model for a TPU topology, with no TPU present (needs libtpu: jpaged[tpu])."""
    from jpaged.engine.ahead import compile_ahead

    compilation = compile_ahead(config, topology)
    sizes = compilation.sizes
    notes.print(
        f"{topology}: {config.tensor_parallel_size} of {compilation.num_devices} devices ({compilation.device_kind}), "
        f"{sizes.dtype}, {sizes.page_spec.num_pages} pages of {sizes.page_spec.page_size_tokens} tokens: "
        f"{compilation.kv_tokens} KV tokens fit"
    )
    table = Table("tokens", "rows", "compiled in s", "weights MiB", "pages MiB", "temporaries MiB", "pages in place")
    for column in table.columns[:6]:
        column.justify = "right"
    for bucket in compilation.buckets:
        sizes_mib = (bucket.weight_bytes, bucket.page_bytes, bucket.temporary_bytes)
        table.add_row(
            str(bucket.num_tokens),
            str(bucket.num_rows),
            f"{bucket.compile_seconds:.1f}",
            *(f"{size / MIB:.1f}" for size in sizes_mib),
            "yes" if bucket.pages_are_aliased else "NO: copied",
        )
        notes.print(f"compiled {bucket.num_tokens} tokens, {bucket.num_rows} rows")
    Console().print(table)
    Console().print("Bytes are those of one device.")
