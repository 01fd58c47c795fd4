"""What the commands print while an engine starts and after it has answered."""

import math
import sys
import time
from collections.abc import Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jpaged.config import EngineConfig
from jpaged.metrics import EngineStats
from jpaged.request import CompletionOutput, Logprob, RequestOutput, RequestTimes, TokenLogprobs

# Answers go to stdout and nothing else does, so that they can be piped.
notes = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def progress_bar():
    """A bar on stderr for counted work, if that is a terminal; leaves no trace when done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=notes, transient=True, disable=not notes.is_terminal) as progress:
        yield progress


def start_llm(config: EngineConfig):
    """Start an engine with a progress bar over the shapes it compiles."""
    notes.print(f"Loading {config.model} ...")
    from jpaged.engine.llm import LLM

    with progress_bar() as progress:
        task = progress.add_task("Loading", total=None)  # until there is something to compile

        def report(what: str, done: int, total: int) -> None:
            if total:
                progress.update(task, description=f"Compiled {what}", completed=done, total=total)
            else:  # what happens before anything is counted: a download, a conversion
                notes.print(what)

        llm = LLM(config.model, report=report, **config.options())
    stats = llm.stats()
    compiled = f"{stats.compilations} programs compiled" if stats.compilations else "compiled earlier"
    notes.print(
        f"Ready in {stats.ready_seconds:.1f} s: {llm.engine.parts.dtype}, {stats.pages_total} pages,"
        f" {stats.buckets} shapes ({compiled})."
    )
    return llm


def print_profile(llm) -> None:
    """Print where the time of the first steps went, if that was asked for."""
    if llm.engine.profile is not None:
        notes.print(llm.engine.profile.describe())


def describe_answer(output: RequestOutput, stats: EngineStats, pages_peak: int) -> str:
    """Return what happened, in a few lines."""
    num_tokens = len(output.outputs[0].token_ids)
    return "\n".join(
        (
            f"{len(output.prompt_token_ids)} prompt tokens, {num_tokens} generated ({output.outputs[0].finish_reason})",
            f"time to first token {_time_to_first_token(output.times):.3f} s,"
            f" then {_decode_rate(output.times, num_tokens)}",
            f"pages: {pages_peak} used at most, {_describe_free_pages(stats)}",
            _describe_compilations(stats),
        )
    )


class AnswerStatistics:
    """What one answer took, for those who see it arrive. Without a finish reason it was stopped."""

    def __init__(self) -> None:
        self._start = self._first = self._last = time.monotonic()
        self._generated = 0
        self.prompt_tokens: int | None = None
        self.cached_tokens = 0
        self.finish_reason: str | None = None

    def count(self, token_ids: list[int]) -> None:
        """To be called when tokens arrive."""
        self._last = time.monotonic()
        if not self._generated:
            self._first = self._last
        self._generated += len(token_ids)

    def describe(self) -> str:
        """Return a line."""
        prompt = (
            "" if self.prompt_tokens is None else f"{self.prompt_tokens} prompt tokens ({self.cached_tokens} cached), "
        )
        if not self._generated:
            return f"{prompt}nothing generated ({self.finish_reason or 'stopped'})"
        seconds = self._last - self._first
        rate = f", then {(self._generated - 1) / seconds:.1f} tokens/s" if self._generated > 1 and seconds > 0 else ""
        return (
            f"{prompt}{self._generated} generated ({self.finish_reason or 'stopped'});"
            f" first token after {self._first - self._start:.3f} s{rate}"
        )


def describe_engine(stats: EngineStats) -> str:
    """Return what happened to many requests, in a few lines."""
    return "\n".join(
        (
            f"{stats.steps} steps, {stats.preemptions} preemptions",
            f"pages: {_describe_free_pages(stats)}; token slots used of those allocated: {stats.kv_utilisation:.1%}",
            _describe_compilations(stats),
        )
    )


def describe_completion(completion: CompletionOutput, num_completions: int) -> dict[str, object]:
    """Return what a JSON line says of one generated sequence."""
    answer: dict[str, object] = {"text": completion.text, "finish_reason": completion.finish_reason}
    if completion.stop_reason is not None:
        answer["stop_reason"] = completion.stop_reason
    if num_completions > 1:
        answer["index"] = completion.index
    if completion.score is not None:
        answer["score"] = round(completion.score, 4)
    if completion.token_ids and not completion.text:  # without a tokenizer that is all there is
        answer["token_ids"] = completion.token_ids
    if completion.logprobs is not None:
        answer["logprobs"] = describe_logprobs(completion.token_ids, completion.logprobs)
    return answer


def describe_logprobs(token_ids: list[int], logprobs: Sequence[TokenLogprobs | None]) -> list[dict[str, object] | None]:
    """Return for each token its logprob and rank and, where there are any, those of the most likely tokens."""

    def describe(token_id: int, logprob: Logprob) -> dict[str, object]:
        text = {} if logprob.decoded_token is None else {"token": logprob.decoded_token}
        # JSON has no minus infinity.
        value = round(logprob.logprob, 4) if math.isfinite(logprob.logprob) else None
        return {"id": token_id, **text, "logprob": value, "rank": logprob.rank}

    described: list[dict[str, object] | None] = []
    for token_id, known in zip(token_ids, logprobs, strict=True):
        others = {} if known is None or len(known) == 1 else {"top": [describe(*item) for item in known.items()]}
        described.append(None if known is None else describe(token_id, known[token_id]) | others)
    return described


def _describe_free_pages(stats: EngineStats) -> str:
    cached = f", {stats.pages_cached} of them with cached prefixes" if stats.pages_cached else ""
    return f"{stats.pages_free + stats.pages_cached} of {stats.pages_total} free now{cached}"


def write_text(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _describe_compilations(stats: EngineStats) -> str:
    return f"compiled shapes: {stats.buckets}, compilations after ready: {stats.compilations_after_ready}"


def _time_to_first_token(times: RequestTimes) -> float:
    return (times.first_token or time.monotonic()) - times.arrival


def _decode_rate(times: RequestTimes, num_tokens: int) -> str:
    if num_tokens < 2 or times.first_token is None or times.finished is None:
        return "no more tokens"
    return f"{(num_tokens - 1) / max(times.finished - times.first_token, 1e-9):.1f} tokens/s"
