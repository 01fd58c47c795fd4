"""OpenAI's batch format: a request a line in, an answer a line out, and an interrupted run goes on where it stopped.

https://platform.openai.com/docs/guides/batch describes the format; openai_format has the bodies.
"""

import json
import os
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeGuard

from jpaged.engine.engine import Engine
from jpaged.engine.llm import render_chat
from jpaged.errors import InvalidRequestError, JpagedError
from jpaged.params import SamplingParams
from jpaged.request import Prompt, RequestOutput
from jpaged.serving.openai_format import CHAT_URL, COMPLETIONS_URL, read_chat, read_params, read_prompt, write_body

_QUEUED_PER_ROW = 2  # requests handed to the engine ahead, so that a long file need not fit in memory as requests
_ANSWER_START = '{"id": "batch_req_'  # of every line written here


@dataclass(frozen=True, slots=True)
class _InputLine:
    """A line that has no answer yet. `repeats` says that an earlier line has the same custom id."""

    number: int
    text: str
    custom_id: str | None
    repeats: bool


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One valid line: where its answer belongs and what it asks for."""

    custom_id: str
    url: str
    prompt: Prompt
    params: SamplingParams


class BatchRun:
    """Answers one input file into one output file.

    The constructor reads what an earlier run left in the output file: answered lines are kept, errors and a line cut
    short are dropped and tried again.

    Attributes:
        num_lines: requests in the input.
        num_done: of them answered by an earlier run.
        errors: messages of the lines that failed in this run.

    Raises:
        InvalidRequestError: the input cannot be read, the output cannot be written, or it is no batch file; it is left
            as it was then.
    """

    def __init__(self, input_path: Path, output_path: Path, model_name: str) -> None:
        lines = _read_lines(input_path)
        answered = _keep_answers(output_path, input_path)
        self._output_path = output_path
        self._model_name = model_name
        self._todo: list[_InputLine] = []
        self.num_lines = self.num_done = 0
        self.errors: list[str] = []
        met: set[str] = set()
        for number, text in lines:
            custom_id = _custom_id(text)
            repeats = custom_id in met
            self.num_lines += 1
            if custom_id in answered and not repeats:
                self.num_done += 1
            else:
                self._todo.append(_InputLine(number, text, custom_id, repeats))
            if custom_id is not None:
                met.add(custom_id)

    def answer(self, engine: Engine) -> Generator[str]:
        """Answer what is not answered yet; yield each custom id (or line number) as its line is written.

        Stopping the iteration early ends the requests in the engine.
        """
        self.errors.clear()
        active: dict[str, BatchLine] = {}
        waiting = iter(self._todo)
        limit = _QUEUED_PER_ROW * engine.parts.config.max_num_seqs
        with _open_output(self._output_path) as output:
            try:
                while True:
                    while len(active) < limit and (line := next(waiting, None)) is not None:
                        error = self._submit(engine, line, active)
                        if error is not None:
                            _write(output, error)
                            yield line.custom_id or f"line {line.number}"
                    if not active:
                        return
                    finished = [delta.request for delta in engine.step() if delta.finished]
                    for result in finished:  # all are written before the caller may stop
                        _write(output, _answer(active.pop(result.request_id), result, self._model_name, engine))
                    yield from (result.request_id for result in finished)
            finally:
                for request_id in active:
                    engine.abort_request(request_id)

    def _submit(self, engine: Engine, line: _InputLine, active: dict[str, BatchLine]) -> dict[str, Any] | None:
        """Queue a line; return the error to write if it cannot be served."""
        try:
            request = parse_line(line.text, engine)
            if line.repeats:
                raise InvalidRequestError(
                    f"custom_id {request.custom_id!r} stands on an earlier line too; give each its own"
                )
            engine.add_request(request.custom_id, engine.prepare(request.prompt, request.params))
        except JpagedError as error:
            message = f"line {line.number}: {error}"
            self.errors.append(message)
            return {
                "id": f"batch_req_{line.number}",
                "custom_id": line.custom_id,
                "response": None,
                "error": {"code": "invalid_request", "message": message},
            }
        active[request.custom_id] = request
        return None


def parse_line(text: str, engine: Engine) -> BatchLine:
    """Read one line.

    Raises:
        InvalidRequestError: it is no JSON object, lacks a field, or asks for something that cannot be honoured.
    """
    try:
        request = _parse_json(text)
    except ValueError as error:
        raise InvalidRequestError(f"this is no JSON ({error}): {text[:80]!r}") from error
    if not isinstance(request, dict) or not isinstance(request.get("body"), dict):
        raise InvalidRequestError('a request is an object {"custom_id": ..., "url": ..., "body": {...}}')
    custom_id, url, body = request.get("custom_id"), request.get("url"), request["body"]
    if not isinstance(custom_id, str) or not custom_id:
        raise InvalidRequestError(f"custom_id is {custom_id!r}, it must be a text that names the line")
    if url not in (CHAT_URL, COMPLETIONS_URL):
        raise InvalidRequestError(f"url is {url!r}, it must be {CHAT_URL} or {COMPLETIONS_URL}")
    params = read_params(body, url)
    prompt = render_chat(engine.tokenizer, *read_chat(body)) if url == CHAT_URL else read_prompt(body)
    return BatchLine(custom_id, url, prompt, params)


def _answer(line: BatchLine, output: RequestOutput, model_name: str, engine: Engine) -> dict[str, Any]:
    body = write_body(line.url, line.params, output, model_name, engine.tokenizer)
    response = {"status_code": 200, "request_id": output.request_id, "body": body}
    return {"id": f"batch_req_{output.request_id}", "custom_id": line.custom_id, "response": response, "error": None}


def _write(output: Any, answer: dict[str, Any]) -> None:
    """Write a line at once, so that an interrupted run loses nothing that was finished."""
    output.write(json.dumps(answer, ensure_ascii=False) + "\n")
    output.flush()


def _parse_json(text: str) -> Any:
    """Raises ValueError for everything that is no JSON."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _custom_id(line: str) -> str | None:
    """The custom id of a line, if it is a line that can have one."""
    try:
        custom_id = _parse_json(line).get("custom_id")
    except (ValueError, AttributeError):
        return None
    return custom_id if isinstance(custom_id, str) else None


def _read_lines(path: Path) -> list[tuple[int, str]]:
    """The lines that are not blank, with their numbers."""
    try:
        # A byte that is no UTF-8 spoils its own line, no more.
        text = path.read_text(encoding="utf-8-sig", errors="surrogateescape")
    except OSError as error:
        raise InvalidRequestError(f"cannot read the batch file {path}: {error.strerror}") from error
    # Not splitlines: JSON texts may hold characters that it takes for line ends.
    return [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]


def _open_output(path: Path) -> IO[str]:
    # A lone surrogate, which JSON can spell and UTF-8 cannot, is written as JSON spells it: \\udXXX.
    return path.open("a", encoding="utf-8", errors="backslashreplace")


def _keep_answers(path: Path, input_path: Path) -> set[str]:
    """Reduce the output file to its answers, or begin it; return their custom ids.

    Raises:
        InvalidRequestError: the file cannot be written, or holds something else; it is left as it was.
    """
    path = path.resolve()  # a link stays one
    try:
        if path.exists() and path.samefile(input_path):
            raise InvalidRequestError(f"{path} is the input file; give the answers a file of their own")
        if path.exists() and not path.is_file():
            raise InvalidRequestError(f"{path} is no regular file; an interrupted run could not go on in it")
        path.parent.mkdir(parents=True, exist_ok=True)
        _open_output(path).close()  # fails now rather than after the model is loaded
        text = path.read_text(encoding="utf-8", errors="surrogateescape")
        answered = _read_answers(path, text)
        kept = "".join(line + "\n" for line in answered.values())
        if kept != text:
            temporary = path.with_name(path.name + ".tmp")
            temporary.write_text(kept, encoding="utf-8", errors="surrogateescape")
            os.replace(temporary, path)
    except OSError as error:
        raise InvalidRequestError(f"cannot write the answers to {path}: {error.strerror}") from error
    return set(answered)


def _read_answers(path: Path, text: str) -> dict[str, str]:
    """Custom id -> line, for every answer in the text of an output file."""
    answered: dict[str, str] = {}
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        try:
            answer = _parse_json(line)
        except ValueError:
            if number == len(lines) and (line.startswith(_ANSWER_START) or _ANSWER_START.startswith(line)):
                break  # empty, or cut short by the interruption
            answer = None
        if not _is_answer(answer):
            raise InvalidRequestError(
                f"line {number} of {path} is no batch answer; give the answers a file of their own"
            )
        if answer["response"] is not None:
            answered[answer["custom_id"]] = line
    return answered


def _is_answer(value: Any) -> TypeGuard[dict[str, Any]]:
    if not isinstance(value, dict) or not {"custom_id", "response", "error"} <= set(value):
        return False
    # What failed may have been a line without a custom id.
    return isinstance(value["custom_id"], str) or value["custom_id"] is value["response"] is None
