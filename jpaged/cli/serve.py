"""`jpaged serve`: the engine behind a gRPC server."""

import asyncio
import logging
from pathlib import Path
from typing import Annotated

import typer

from jpaged.cli.options import MODEL_HELP, with_engine_options
from jpaged.config import EngineConfig
from jpaged.errors import ConfigError


@with_engine_options
def serve(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one; the log names it.")] = 50051,
    model_name: Annotated[str, typer.Option(help="What clients may call the model. Default: MODEL.")] = "",
    max_queued_requests: Annotated[int, typer.Option(min=1, help="Requests that may wait for a row.")] = 1024,
    max_message_bytes: Annotated[int, typer.Option(min=1024, help="Largest request.")] = 16 << 20,
    keepalive_seconds: Annotated[float, typer.Option(min=1, help="Between probes of an idle connection.")] = 60.0,
    drain_seconds: Annotated[float, typer.Option(min=0, help="For accepted requests after SIGTERM.")] = 30.0,
    metrics_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Prometheus metrics over HTTP. Default: none.")
    ] = None,
    pin_prefix: Annotated[
        list[Path] | None, typer.Option(help="A text file whose beginning of prompts is computed once and kept.")
    ] = None,
    *,
    config: EngineConfig,
) -> None:
    """Serve a model over gRPC (jpaged.v1.Inference, grpc.health.v1, reflection) until SIGTERM."""
    from jpaged.serving.server import Server, ServerConfig

    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("jpaged").setLevel(logging.INFO)  # others, such as jax, report every backend that they try
    server_config = ServerConfig(
        host=host,
        port=port,
        model_name=model_name,
        max_queued_requests=max_queued_requests,
        max_message_bytes=max_message_bytes,
        keepalive_seconds=keepalive_seconds,
        drain_seconds=drain_seconds,
        metrics_port=metrics_port,
        pinned_prefixes={str(path): _read(path) for path in pin_prefix or ()},
    )

    async def run() -> None:
        await Server(config, server_config).run()

    asyncio.run(run())


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the prefix {path}: {error}") from error
