"""OpenAI's batch format: a request a line in, an answer a line out, and an interrupted run goes on where it stopped.

https://platform.openai.com/docs/guides/batch describes the format.
"""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jpaged.engine.engine import Engine
from jpaged.engine.llm import render_chat
from jpaged.errors import InvalidRequestError, JpagedError
from jpaged.request import Prompt, RequestOutput, SamplingParams

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"
_QUEUED_PER_ROW = 2  # requests handed to the engine ahead, so that a long file need not fit in memory as requests
# Body field -> SamplingParams field. What is in neither table is refused.
_SAMPLING_FIELDS = {
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "seed": "seed",
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
}
# Fields that do not bear on the answer, or only with a value that asks for nothing.
_WITHOUT_EFFECT = frozenset({"model", "user", "metadata", "store"})
_ONLY_DEFAULT = {
    "n": 1,
    "stream": False,
    "logprobs": False,
    "echo": False,
    "presence_penalty": 0,
    "frequency_penalty": 0,
}


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
        InvalidRequestError: the input cannot be read.
    """

    def __init__(self, input_path: Path, output_path: Path, model_name: str) -> None:
        try:
            lines = input_path.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequestError(f"cannot read the batch file {input_path}: {error}") from error
        if output_path.exists() and output_path.samefile(input_path):
            raise InvalidRequestError(f"{output_path} is the input file; give the answers a file of their own")
        self._lines = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
        self._output_path = output_path
        self._model_name = model_name
        self._done = _keep_answers(output_path)
        self.num_lines = len(self._lines)
        self.num_done = sum(_custom_id(line) in self._done for _, line in self._lines)
        self.errors: list[str] = []

    def answer(self, engine: Engine) -> Iterator[str]:
        """Answer what is not answered yet; yield each custom id (or line number) as its line is written.

        Stopping the iteration early ends the requests in the engine.
        """
        self.errors.clear()
        active: dict[str, BatchLine] = {}
        waiting = self._todo()
        seen: set[str] = set(self._done)
        limit = _QUEUED_PER_ROW * engine.parts.config.max_num_seqs
        with self._output_path.open("a", encoding="utf-8") as output:
            try:
                while True:
                    while len(active) < limit and (entry := next(waiting, None)) is not None:
                        error = self._submit(engine, *entry, active, seen)
                        if error is not None:
                            _write(output, error)
                            yield error["custom_id"] or f"line {entry[0]}"
                    if not active:
                        return
                    for delta in engine.step():
                        if delta.finished:
                            line = active.pop(delta.request.request_id)
                            _write(output, _answer(line, delta.request, self._model_name))
                            yield line.custom_id
            finally:
                for request_id in active:
                    engine.abort_request(request_id)

    def _todo(self) -> Iterator[tuple[int, str]]:
        return ((number, line) for number, line in self._lines if _custom_id(line) not in self._done)

    def _submit(
        self, engine: Engine, number: int, text: str, active: dict[str, BatchLine], seen: set[str]
    ) -> dict[str, Any] | None:
        """Queue a line; return the error to write if it cannot be served."""
        try:
            line = parse_line(text, engine)
            if line.custom_id in seen:
                raise InvalidRequestError(
                    f"custom_id {line.custom_id!r} stands on an earlier line too; give each its own"
                )
            engine.add_request(line.custom_id, engine.prepare(line.prompt, line.params))
        except JpagedError as error:
            message = f"line {number}: {error}"
            self.errors.append(message)
            return {
                "id": f"batch_req_{number}",
                "custom_id": _custom_id(text),
                "response": None,
                "error": {"code": "invalid_request", "message": message},
            }
        seen.add(line.custom_id)
        active[line.custom_id] = line
        return None


def parse_line(text: str, engine: Engine) -> BatchLine:
    """Read one line.

    Raises:
        InvalidRequestError: it is no JSON object, lacks a field, or asks for something that cannot be honoured.
    """
    try:
        request = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidRequestError(f"this is no JSON ({error}): {text[:80]!r}") from error
    if not isinstance(request, dict) or not isinstance(request.get("body"), dict):
        raise InvalidRequestError('a request is an object {"custom_id": ..., "url": ..., "body": {...}}')
    custom_id, url, body = request.get("custom_id"), request.get("url"), dict(request["body"])
    if not isinstance(custom_id, str) or not custom_id:
        raise InvalidRequestError(f"custom_id is {custom_id!r}, it must be a text that names the line")
    if url not in (CHAT_URL, COMPLETIONS_URL):
        raise InvalidRequestError(f"url is {url!r}, it must be {CHAT_URL} or {COMPLETIONS_URL}")
    prompt = _read_chat(body, engine) if url == CHAT_URL else _read_prompt(body)
    return BatchLine(custom_id, url, prompt, _read_params(body, url))


def _read_chat(body: dict[str, Any], engine: Engine) -> Prompt:
    messages = body.pop("messages", None)
    well_formed = isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages)
    if not well_formed:
        raise InvalidRequestError(f"body.messages is {str(messages)[:80]!r}, it must be a list of messages")
    return render_chat(engine.tokenizer, messages)


def _read_prompt(body: dict[str, Any]) -> Prompt:
    prompt = body.pop("prompt", None)
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and all(isinstance(token_id, int) for token_id in prompt):
        return {"prompt_token_ids": prompt}
    raise InvalidRequestError(f"body.prompt is {str(prompt)[:80]!r}, it must be a text or a list of token ids")


def _read_params(body: dict[str, Any], url: str) -> SamplingParams:
    values: dict[str, Any] = {"max_tokens": None} if url == CHAT_URL else {}
    for name, value in body.items():
        if name in _WITHOUT_EFFECT or value is None:
            continue
        if name in _SAMPLING_FIELDS:
            values[_SAMPLING_FIELDS[name]] = value
        elif name not in _ONLY_DEFAULT:
            known = sorted({*_SAMPLING_FIELDS, *_WITHOUT_EFFECT})
            raise InvalidRequestError(f"body.{name} is not supported; supported are {', '.join(known)}")
        elif value != _ONLY_DEFAULT[name]:
            raise InvalidRequestError(f"body.{name} is {value!r}, only {_ONLY_DEFAULT[name]!r} is supported")
    return SamplingParams(**values)


def _answer(line: BatchLine, output: RequestOutput, model_name: str) -> dict[str, Any]:
    completion = output.outputs[0]
    is_chat = line.url == CHAT_URL
    content: dict[str, Any] = (
        {"message": {"role": "assistant", "content": completion.text}} if is_chat else {"text": completion.text}
    )
    body = {
        "id": output.request_id,
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": model_name,
        "choices": [{"index": 0, **content, "logprobs": None, "finish_reason": completion.finish_reason}],
        "usage": {
            "prompt_tokens": len(output.prompt_token_ids),
            "completion_tokens": len(completion.token_ids),
            "total_tokens": len(output.prompt_token_ids) + len(completion.token_ids),
        },
    }
    response = {"status_code": 200, "request_id": output.request_id, "body": body}
    return {"id": f"batch_req_{output.request_id}", "custom_id": line.custom_id, "response": response, "error": None}


def _write(output: Any, answer: dict[str, Any]) -> None:
    """Write a line at once, so that an interrupted run loses nothing that was finished."""
    output.write(json.dumps(answer, ensure_ascii=False) + "\n")
    output.flush()


def _custom_id(line: str) -> str | None:
    """The custom id of a line, if it is a line that can have one."""
    try:
        custom_id = json.loads(line).get("custom_id")
    except (json.JSONDecodeError, AttributeError):
        return None
    return custom_id if isinstance(custom_id, str) else None


def _keep_answers(path: Path) -> set[str]:
    """Reduce the output file to its answers; return their custom ids. The file is replaced in one move."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        return set()
    answered: dict[str, str] = {}
    # Not splitlines: JSON texts may hold characters that it takes for line ends.
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, 1):
        try:
            answer = json.loads(line)
        except json.JSONDecodeError:
            if number >= len(lines) - 1:
                continue  # empty, or cut short by the interruption
            answer = None
        if not isinstance(answer, dict) or not {"custom_id", "response", "error"} <= set(answer):
            raise InvalidRequestError(
                f"line {number} of {path} is no batch answer; give the answers a file of their own"
            )
        if answer["response"] is not None:
            answered[answer["custom_id"]] = line
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text("".join(line + "\n" for line in answered.values()), encoding="utf-8")
    os.replace(temporary, path)
    return set(answered)
