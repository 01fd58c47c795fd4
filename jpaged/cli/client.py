"""`jpaged client`: ask a running server."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import grpc
import typer

from jpaged.cli.console import AnswerStatistics, describe_completion, describe_logprobs, notes, write_text
from jpaged.cli.conversation import ChatSettings, Conversation, with_chat_options
from jpaged.cli.generate import is_plain
from jpaged.cli.method_options import with_method_options, with_sampling_options
from jpaged.client import Client, Delta
from jpaged.errors import JpagedError
from jpaged.params import Params, SamplingParams
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

    def __init__(self, connection: Client, params: SamplingParams, settings: ChatSettings | None = None) -> None:
        self._client = connection
        self._params = params
        self._settings = settings
        self._statistics = AnswerStatistics()

    def answer(self, messages: Prompt | list[Message]) -> Iterator[str]:
        self._statistics = AnswerStatistics()
        with _as_call_failed():
            for delta in self._stream(messages):
                self._statistics.count(delta.token_ids)
                self._statistics.finish_reason = delta.finish_reason
                if delta.usage is not None:
                    self._statistics.prompt_tokens = delta.usage.prompt_tokens
                    self._statistics.cached_tokens = delta.usage.cached_tokens
                yield delta.text if self._params.detokenize else "".join(f"{token} " for token in delta.token_ids)

    def _stream(self, messages: Prompt | list[Message]) -> Iterator[Delta]:
        if self._settings is None:
            return self._client.stream(messages, self._params)
        tools, variables = self._settings.tools, self._settings.chat_template_kwargs
        return self._client.stream(messages, self._params, tools=tools, chat_template_kwargs=variables)

    def describe_answer(self) -> str:
        return self._statistics.describe()

    def describe_engine(self) -> str:
        return _describe_server(self._client)


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
    """Stream the answer to one prompt; several samples or beams, and answers with logprobs, are printed as JSON
    objects, one a line."""
    given = [{"role": "user", "content": prompt}] if chat else prompt
    with Client(address) as connection:
        if not is_plain(params):
            _print_whole(connection, given, params)
            return
        speaker = _Speaker(connection, params)
        for text in speaker.answer(given):
            write_text(text)
        write_text("\n")
        if stats:
            notes.print(speaker.describe_answer())
            notes.print(_describe_server(connection))


@client.command(name="chat")
@with_sampling_options
@with_chat_options
def chat_command(
    address: Address = _DEFAULT_ADDRESS,
    *,
    params: SamplingParams,
    settings: ChatSettings,
) -> None:
    """Talk with the served model."""
    with Client(address) as connection:
        Conversation(_Speaker(connection, params, settings), settings.system, refusals=(JpagedError,)).run()


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


def _print_whole(connection: Client, prompt: Prompt | list[Message], params: Params) -> None:
    with _as_call_failed():
        answer = connection.generate(prompt, params)
    for completion in answer.outputs:
        line = describe_completion(completion, len(answer.outputs))
        if answer.prompt_token_ids is not None and answer.prompt_logprobs is not None:
            line["prompt_logprobs"] = describe_logprobs(answer.prompt_token_ids, answer.prompt_logprobs)
        print(json.dumps(line, ensure_ascii=False))


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
