"""`jpaged client`: ask a running server."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import grpc
import typer

from jpaged.cli.console import describe_completion, notes, write_text
from jpaged.cli.conversation import converse
from jpaged.cli.options import with_method_options, with_sampling_options
from jpaged.client import Client, Usage
from jpaged.errors import JpagedError
from jpaged.params import BeamSearchParams, Params, SamplingParams
from jpaged.request import Message, Prompt

client = typer.Typer(help="Ask a running server.", no_args_is_help=True)
Address = Annotated[str, typer.Option(help="HOST:PORT of the server.")]
_DEFAULT_ADDRESS = "127.0.0.1:50051"


class CallFailedError(JpagedError):
    """The server refused a call, or is not there."""

    def __init__(self, error: grpc.RpcError) -> None:
        code, details = error.code(), error.details()  # type: ignore[attr-defined]
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:  # gRPC says no more than that
            details = "no server answered in time; check that it runs and the address"
        super().__init__(f"{code.name}: {details}")


class _Speaker:
    """Streams answers and remembers what the last one took."""

    def __init__(self, connection: Client, params: SamplingParams) -> None:
        self._client = connection
        self._params = params
        self._description = "nothing yet"

    def answer(self, messages: Prompt | list[Message]) -> Iterator[str]:
        usage: Usage | None = None
        times, generated = [time.monotonic()], 0
        try:
            with _as_call_failed():
                for delta in self._client.stream(messages, self._params):
                    times.append(time.monotonic())
                    generated += len(delta.token_ids)
                    usage = delta.usage or usage
                    yield delta.text
        finally:
            if generated:
                self._description = _describe_answer(usage, times, generated)

    def describe(self) -> str:
        return self._description


@client.command()
@with_method_options
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt.")],
    address: Address = _DEFAULT_ADDRESS,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt through the model's chat template.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Say what happened afterwards.")] = False,
    *,
    params: Params,
) -> None:
    """Stream the answer to one prompt; several samples or beams are printed as JSON objects, one a line."""
    given = [{"role": "user", "content": prompt}] if chat else prompt
    with Client(address) as connection:
        if isinstance(params, BeamSearchParams) or params.n > 1:
            with _as_call_failed():
                outputs = connection.generate(given, params).outputs
            for completion in outputs:
                print(json.dumps(describe_completion(completion, len(outputs)), ensure_ascii=False))
            return
        speaker = _Speaker(connection, params)
        for text in speaker.answer(given):
            write_text(text)
        write_text("\n")
        if stats:
            notes.print(speaker.describe())
            notes.print(_describe_server(connection))


@client.command(name="chat")
@with_sampling_options
def chat_command(
    address: Address = _DEFAULT_ADDRESS,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    *,
    params: SamplingParams,
) -> None:
    """Talk with the served model."""
    with Client(address) as connection:
        converse(_Speaker(connection, params), system, refusals=(JpagedError,))


@client.command()
def health(
    address: Address = _DEFAULT_ADDRESS,
    wait_seconds: Annotated[float, typer.Option(min=0, help="Wait this long for the server to be ready.")] = 0.0,
) -> None:
    """Print SERVING or NOT_SERVING; the exit code is 0 only for SERVING."""
    with Client(address) as connection, _as_call_failed():
        status = connection.wait_until_serving(wait_seconds) if wait_seconds else connection.health()
    print(status)
    if status != "SERVING":
        raise typer.Exit(1)


@client.command()
def info(address: Address = _DEFAULT_ADDRESS) -> None:
    """Print what is served and how full the server is."""
    with Client(address) as connection, _as_call_failed():
        print(f"{connection.model_info()}{connection.server_info()}", end="")


def _describe_answer(usage: Usage | None, times: list[float], generated: int) -> str:
    """`times` is the start, then every delta's. Without usage, which comes with the last delta, it was stopped."""
    prompt = f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached), " if usage else "stopped: "
    seconds = times[-1] - times[1]
    rate = f"{(generated - 1) / seconds:.1f} tokens/s" if generated > 1 and seconds > 0 else "no more"
    return f"{prompt}{generated} generated; time to first token {times[1] - times[0]:.3f} s, then {rate}"


def _describe_server(connection: Client) -> str:
    with _as_call_failed():
        info = connection.server_info()
    return (
        f"pages: {info.pages_used} used, {info.pages_free} of {info.pages_total} free;"
        f" compiled shapes: {info.buckets}, compilations after ready: {info.compilations_after_ready}"
    )


@contextmanager
def _as_call_failed() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise CallFailedError(error) from error
