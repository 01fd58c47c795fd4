"""Serving under load: requests arrive by a Poisson process and are streamed over gRPC.

    python scripts/bench_serving.py --model demo --requests 100 --rate 2 [--dtype float32 ...]
    python scripts/bench_serving.py --address 127.0.0.1:50051 --requests 100 --rate 2

Without --address it starts `jpaged serve` itself and stops it afterwards. Lengths are those of
workloads/sharegpt_lengths.csv, capped to the context; token ids are drawn, greedy, EOS ignored; the same --seed gives
the same requests at the same moments. Times count from the moment a request was due, so a client that falls behind
does not hide what the server takes.

Prints a table and, last, one JSON line. Exits with 1 if a request failed, a page was lost, or something was compiled
while serving.
"""

import argparse
import asyncio
import json
import math
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
import numpy as np
from rich.console import Console
from rich.table import Table
from workload import load

from jpaged import SamplingParams
from jpaged.client import AsyncClient, Client
from jpaged.request import TokensPrompt
from jpaged.v1.inference_pb2 import GetModelInfoResponse, GetServerInfoResponse

SERVER_OPTIONS = ("dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens")
READY_TIMEOUT_SECONDS = 1800.0  # the first start may fetch a model and compile
STOP_TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Request:
    """What is sent, and when after the start."""

    due_seconds: float
    prompt: TokensPrompt
    max_tokens: int


@dataclass(slots=True)
class Record:
    """What a client saw of one request, in seconds from when it was due; `failure` is a status, or empty."""

    first_token_seconds: float = 0.0
    total_seconds: float = 0.0
    gaps_seconds: list[float] = field(default_factory=list)  # one for each token after the first
    num_tokens: int = 0
    failure: str = ""


def main() -> None:
    arguments = parse_arguments()
    with server_address(arguments) as address, Client(address) as client:
        model, before = client.model_info(), client.server_info()
        requests = make_requests(arguments, model)
        start = time.perf_counter()
        records = asyncio.run(send_all(address, requests))
        seconds = time.perf_counter() - start
        figures = summarise(requests, records, seconds)
        figures |= server_figures(model, before, client.server_info())
    rate = arguments.rate if math.isfinite(arguments.rate) else None  # JSON has no infinity
    figures = {"engine": f"jpaged {figures.pop('dtype')}", "rate": rate, "seed": arguments.seed} | figures
    print_table(figures)
    print(json.dumps(figures))
    if figures["failures"] or figures["pages_leaked"] or figures["compilations_after_ready"]:
        sys.exit("see failures, pages_leaked and compilations_after_ready above")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", help="HOST:PORT of a running server; without it one is started")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--rate", type=float, default=1.0, help="arrivals per second on average; inf sends all at once")
    parser.add_argument("--seed", type=int, default=0)
    started = parser.add_argument_group("the started server")
    started.add_argument("--model", default="demo")
    started.add_argument("--dtype", default="bfloat16")
    started.add_argument("--max-model-len", type=int, default=2048)
    started.add_argument("--max-num-seqs", type=int, default=64)
    started.add_argument("--max-num-batched-tokens", type=int, default=512)
    arguments = parser.parse_args()
    if arguments.requests < 1:
        parser.error(f"--requests is {arguments.requests}, it must be at least 1")
    if not arguments.rate > 0:
        parser.error(f"--rate is {arguments.rate}, it must be above 0")
    return arguments


@contextmanager
def server_address(arguments: argparse.Namespace) -> Iterator[str]:
    """The address of a server that is ready: the one named, or one that lives as long as this context."""
    if arguments.address:
        yield arguments.address
        return
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "jpaged", "serve", arguments.model, "--port", address.rpartition(":")[2]]
    for name in SERVER_OPTIONS:
        command += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    with tempfile.TemporaryFile("w+") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            wait_until_serving(address, process)
            yield address
            process.terminate()
            process.wait(STOP_TIMEOUT_SECONDS)
        finally:
            process.kill()
            if process.wait() != 0:
                log.seek(0)
                sys.stderr.write(log.read())


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def wait_until_serving(address: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with Client(address) as client:
                if client.wait_until_serving(5.0) == "SERVING":
                    return
        except grpc.RpcError:
            continue
    sys.exit("the server did not start; its log is above")


def make_requests(arguments: argparse.Namespace, model: GetModelInfoResponse) -> list[Request]:
    prompts, lengths = load(f"sharegpt:{arguments.requests}", model.vocabulary_size)
    if len(prompts) < arguments.requests:
        sys.exit(f"--requests is {arguments.requests}, the list has {len(prompts)} lengths")
    generator = random.Random(arguments.seed)
    order = generator.sample(range(len(prompts)), len(prompts))
    requests, due_seconds = [], 0.0
    for place in order:
        due_seconds += generator.expovariate(arguments.rate)
        token_ids = prompts[place][: model.max_model_len // 2]
        max_tokens = min(lengths[place], model.max_model_len - len(token_ids))
        requests.append(Request(due_seconds, {"prompt_token_ids": token_ids}, max_tokens))
    return requests


async def send_all(address: str, requests: list[Request]) -> list[Record]:
    async with AsyncClient(address) as client:
        start = time.perf_counter()
        return await asyncio.gather(*(send(client, request, start + request.due_seconds) for request in requests))


async def send(client: AsyncClient, request: Request, due: float) -> Record:
    """Stream one request when it is due, a moment of `time.perf_counter()`."""
    await asyncio.sleep(due - time.perf_counter())
    record, last = Record(), due
    params = SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True)
    try:
        async for delta in client.stream(request.prompt, params):
            now, count = time.perf_counter(), len(delta.token_ids)
            if not record.num_tokens:
                record.first_token_seconds = now - due
            else:
                # Tokens that came in one message are spread over the time since the one before.
                record.gaps_seconds += [(now - last) / count] * count
            record.num_tokens += count
            last = now
    except grpc.aio.AioRpcError as error:
        record.failure = error.code().name
    record.total_seconds = time.perf_counter() - due
    return record


def summarise(requests: list[Request], records: list[Record], seconds: float) -> dict[str, object]:
    done = [record for record in records if not record.failure]
    prompt_tokens = sum(
        len(request.prompt["prompt_token_ids"])
        for request, record in zip(requests, records, strict=True)
        if not record.failure
    )
    output_tokens = sum(record.num_tokens for record in done)
    figures: dict[str, object] = {
        "requests": len(records),
        "failures": dict(Counter(record.failure for record in records if record.failure)),
        "seconds": round(seconds, 2),
        "requests_per_second": round(len(done) / seconds, 3),
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "output_tokens_per_second": round(output_tokens / seconds, 1),
        "total_tokens_per_second": round((prompt_tokens + output_tokens) / seconds, 1),
    }
    figures |= percentiles("time_to_first_token", [record.first_token_seconds for record in done])
    figures |= percentiles("time_between_tokens", [gap for record in done for gap in record.gaps_seconds])
    figures |= percentiles("latency", [record.total_seconds for record in done])
    return figures


def percentiles(name: str, values_seconds: list[float]) -> dict[str, object]:
    """Median and 99th percentile in milliseconds; `None` without values."""
    return {
        f"{name}_p{percent}_ms": round(float(np.percentile(values_seconds, percent)) * 1000, 2)
        if values_seconds
        else None
        for percent in (50, 99)
    }


def server_figures(
    model: GetModelInfoResponse, before: GetServerInfoResponse, after: GetServerInfoResponse
) -> dict[str, object]:
    return {
        "dtype": model.dtype,
        "steps": after.steps - before.steps,
        "preemptions": after.preemptions - before.preemptions,
        "compilations_after_ready": after.compilations_after_ready - before.compilations_after_ready,
        "pages_leaked": after.pages_used - after.pages_pinned,
        "ready_seconds": round(after.ready_seconds, 2),
    }


def print_table(figures: dict[str, object]) -> None:
    table = Table("figure", "value", title="Serving over gRPC")
    for name, value in figures.items():
        table.add_row(name, str(value))
    Console().print(table)


if __name__ == "__main__":
    main()
