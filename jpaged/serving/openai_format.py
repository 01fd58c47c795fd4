"""The bodies of OpenAI's interface, in and out: /v1/chat/completions and /v1/completions.

https://platform.openai.com/docs/api-reference describes the fields. Beside them those of vLLM are known, under its
names. What cannot be honoured is refused by name. Tools are put into the prompt; calls come back in the text, as the
model writes them, so tool_choice is "auto" or "none" (which leaves the tools out).
"""

import codecs
import json
import time
from collections.abc import Sequence as SequenceOf
from typing import Any

from jpaged.engine.tokenizer import Tokenizer
from jpaged.errors import InvalidRequestError
from jpaged.params import SamplingParams, StructuredOutputs
from jpaged.request import CompletionOutput, Logprob, Message, Prompt, RequestOutput, TokenLogprobs

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"
# Body fields that are fields of SamplingParams, under the same names.
_SAME = frozenset(
    {
        *("n", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "stop", "stop_token_ids"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "allowed_token_ids", "bad_words"),
        *("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens"),
        *("prompt_logprobs", "truncate_prompt_tokens", "priority", "cache_salt", "skip_reading_prefix_cache"),
    }
)
_TRANSLATED = frozenset({"logit_bias", "logprobs", "response_format", "structured_outputs", "max_completion_tokens"})
_CHAT_ONLY = frozenset({"top_logprobs", "tools", "tool_choice", "chat_template_kwargs"})
# Fields that do not bear on the answer, or only with a value that asks for nothing.
_WITHOUT_EFFECT = frozenset({"model", "user", "metadata", "store", "safety_identifier"})
_ONLY_DEFAULT: dict[str, Any] = {
    "stream": False,
    "echo": False,
    "best_of": 1,
    "parallel_tool_calls": True,
    "service_tier": "auto",
    "add_generation_prompt": True,
    "use_beam_search": False,
}
# Names of what the output must look like -> ours.
_GUIDED = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
}
_STRUCTURED = {"json": "json_schema"} | {
    name: name for name in ("json_schema", "regex", "choice", "grammar", "json_object")
}
_LEAST_LOGPROB = -9999.0  # what OpenAI's interface says instead of minus infinity, which JSON cannot


def read_chat(body: dict[str, Any]) -> tuple[list[Message], list[dict[str, Any]] | None, dict[str, Any] | None]:
    """Return a chat body's messages, its tools, and further variables of the template.

    Raises:
        InvalidRequestError: they are not of the interface's form.
    """
    messages, tools, variables = (body.get(name) for name in ("messages", "tools", "chat_template_kwargs"))
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise InvalidRequestError(f"body.messages is {str(messages)[:80]!r}, it must be a list of messages")
    choice = body.get("tool_choice") or "auto"
    if choice not in ("auto", "none"):
        raise InvalidRequestError(f'body.tool_choice is {choice!r}, only "auto" and "none" are supported')
    if tools is not None and (not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools)):
        raise InvalidRequestError(f"body.tools is {str(tools)[:80]!r}, it must be a list of tools")
    if variables is not None and not isinstance(variables, dict):
        raise InvalidRequestError(f"body.chat_template_kwargs is {str(variables)[:80]!r}, it must be an object")
    return [_read_message(message) for message in messages], None if choice == "none" else tools, variables


def read_prompt(body: dict[str, Any]) -> Prompt:
    """Raises InvalidRequestError if a completion body's prompt is neither a text nor a list of token ids."""
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and all(isinstance(token_id, int) for token_id in prompt):
        return {"prompt_token_ids": prompt}
    raise InvalidRequestError(f"body.prompt is {str(prompt)[:80]!r}, it must be a text or a list of token ids")


def read_params(body: dict[str, Any], url: str) -> SamplingParams:
    """Raises InvalidRequestError for a value out of range, and by name for what cannot be honoured."""
    is_chat = url == CHAT_URL
    elsewhere = _WITHOUT_EFFECT | {"messages" if is_chat else "prompt"}
    given = {name: value for name, value in body.items() if value is not None and name not in elsewhere}
    values: dict[str, Any] = {"max_tokens": None} if is_chat else {}
    known = {*_SAME, *_TRANSLATED, *_GUIDED, *(_CHAT_ONLY if is_chat else ())}
    for name, value in given.items():
        if name in _ONLY_DEFAULT:
            if value != _ONLY_DEFAULT[name] or type(value) is not type(_ONLY_DEFAULT[name]):
                raise InvalidRequestError(f"body.{name} is {value!r}, only {_ONLY_DEFAULT[name]!r} is supported")
        elif name not in known:
            supported = sorted(known | _WITHOUT_EFFECT)
            raise InvalidRequestError(f"body.{name} is not supported; supported are {', '.join(supported)}")
        elif name in _SAME:
            values[name] = value
    if "max_completion_tokens" in given:
        if "max_tokens" in given:
            raise InvalidRequestError("body.max_tokens and body.max_completion_tokens say the same; give one of them")
        values["max_tokens"] = given["max_completion_tokens"]
    if "logit_bias" in given:
        values["logit_bias"] = _read_logit_bias(given["logit_bias"])
    values["logprobs"] = _read_chat_logprobs(given) if is_chat else given.get("logprobs")
    return SamplingParams(**values, structured_outputs=_read_structured_outputs(given))


def write_body(
    url: str, params: SamplingParams, output: RequestOutput, model_name: str, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """What an answer's body says of a finished request."""
    is_chat = url == CHAT_URL
    num_generated = sum(len(completion.token_ids) for completion in output.outputs)
    body: dict[str, Any] = {
        "id": output.request_id,
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": model_name,
        "choices": [_write_choice(is_chat, params, completion, tokenizer) for completion in output.outputs],
        "usage": {
            "prompt_tokens": len(output.prompt_token_ids),
            "completion_tokens": num_generated,
            "total_tokens": len(output.prompt_token_ids) + num_generated,
            "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens},
        },
    }
    if output.prompt_logprobs is not None:
        prompt_logprobs = [known and _write_prompt_logprobs(known) for known in output.prompt_logprobs]
        for holder in [body] if is_chat else body["choices"]:
            holder["prompt_logprobs"] = prompt_logprobs
    return body


def _read_message(message: dict[str, Any]) -> Message:
    """A message as templates expect it: text parts joined, arguments of tool calls as objects."""
    read = dict(message)
    if isinstance(read.get("content"), list):
        read["content"] = "\n".join(_part_text(part) for part in read["content"])
    if isinstance(read.get("tool_calls"), list):
        read["tool_calls"] = [_read_tool_call(call) for call in read["tool_calls"]]
    return read


def _part_text(part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise InvalidRequestError(f"body.messages holds the part {str(part)[:80]!r}, only text is supported")
    return part["text"]


def _read_tool_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):  # what a model wrote need not be JSON
        return call
    return call | {"function": function | {"arguments": arguments}}


def _read_logit_bias(given: Any) -> Any:
    """JSON's keys are texts."""
    try:
        return {int(token_id): bias for token_id, bias in given.items()}
    except (AttributeError, ValueError) as error:
        raise InvalidRequestError(f"body.logit_bias is {str(given)[:80]}, it must map token ids to numbers") from error


def _read_chat_logprobs(given: dict[str, Any]) -> int | None:
    wanted, top = given.get("logprobs", False), given.get("top_logprobs")
    if not isinstance(wanted, bool):
        raise InvalidRequestError(f"body.logprobs is {wanted!r}, it must be true or false; top_logprobs says how many")
    if top is not None and not wanted:
        raise InvalidRequestError(f"body.top_logprobs is {top!r}, which needs logprobs to be true")
    return (top or 0) if wanted else None


def _read_structured_outputs(given: dict[str, Any]) -> StructuredOutputs | None:
    """From response_format, structured_outputs and the guided_ fields: one of them."""
    found: list[tuple[str, dict[str, Any]]] = []
    if (response_format := _read_response_format(given.get("response_format"))) is not None:
        found.append(("response_format", response_format))
    if "structured_outputs" in given:
        found.append(("structured_outputs", _read_constraints(given["structured_outputs"])))
    found += [(name, {ours: given[name]}) for name, ours in _GUIDED.items() if name in given]
    if len(found) > 1:
        raise InvalidRequestError(f"{' and '.join(f'body.{name}' for name, _ in found)} are set; give one of them")
    return StructuredOutputs(**found[0][1]) if found else None


def _read_response_format(given: Any) -> dict[str, Any] | None:
    if given is None:
        return None
    kind = given.get("type") if isinstance(given, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    described = given.get("json_schema") if kind == "json_schema" else None
    if isinstance(described, dict) and "schema" in described:
        return {"json_schema": described["schema"]}
    raise InvalidRequestError(
        f'body.response_format is {str(given)[:80]}, it must be {{"type": "text"}}, {{"type": "json_object"}} or'
        ' {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}'
    )


def _read_constraints(given: Any) -> dict[str, Any]:
    if not isinstance(given, dict) or not set(given) <= set(_STRUCTURED):
        raise InvalidRequestError(
            f"body.structured_outputs is {str(given)[:80]}, it must be an object with one of {', '.join(_STRUCTURED)}"
        )
    return {_STRUCTURED[name]: value for name, value in given.items() if value is not None}


def _write_choice(
    is_chat: bool, params: SamplingParams, completion: CompletionOutput, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    text = completion.text
    choice: dict[str, Any] = {"index": completion.index}
    choice |= {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
    choice["logprobs"] = None
    if completion.logprobs is not None:
        write = _write_chat_logprobs if is_chat else _write_completion_logprobs
        choice["logprobs"] = write(completion, params.logprobs or 0, tokenizer)
    choice |= {"finish_reason": completion.finish_reason, "stop_reason": completion.stop_reason}
    if tokenizer is None:  # the format has no field for token ids, but there is no text
        choice["token_ids"] = completion.token_ids
    return choice


def _write_chat_logprobs(completion: CompletionOutput, k: int, tokenizer: Tokenizer | None) -> dict[str, Any]:
    def entry(token_id: int, logprob: Logprob) -> dict[str, Any]:
        shown = _token_bytes(token_id, logprob, tokenizer)
        return {"token": _token_text(token_id, logprob), "logprob": _finite(logprob.logprob), "bytes": list(shown)}

    return {
        "content": [
            entry(token_id, known[token_id])
            | {"top_logprobs": [entry(other, logprob) for other, logprob in _most_likely(known, k)]}
            for token_id, known in zip(completion.token_ids, completion.logprobs or (), strict=True)
        ],
        "refusal": None,
    }


def _write_completion_logprobs(completion: CompletionOutput, k: int, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The older form. Offsets are into the text, as if it held every token."""
    decoder, offset = codecs.getincrementaldecoder("utf-8")("replace"), 0
    written: dict[str, Any] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for token_id, known in zip(completion.token_ids, completion.logprobs or (), strict=True):
        drawn = known[token_id]
        written["text_offset"].append(offset)
        written["tokens"].append(_token_text(token_id, drawn))
        written["token_logprobs"].append(_finite(drawn.logprob))
        top: dict[str, float] = {}
        for other, logprob in [(token_id, drawn), *_most_likely(known, k)]:  # several may have the same text
            top.setdefault(_token_text(other, logprob), _finite(logprob.logprob))
        written["top_logprobs"].append(top if k else None)
        offset += len(decoder.decode(_token_bytes(token_id, drawn, tokenizer)))
    return written


def _write_prompt_logprobs(known: TokenLogprobs) -> dict[str, Any]:
    return {
        str(token_id): {
            "logprob": _finite(logprob.logprob),
            "rank": logprob.rank,
            "decoded_token": logprob.decoded_token,
        }
        for token_id, logprob in known.items()
    }


def _most_likely(known: TokenLogprobs, k: int) -> SequenceOf[tuple[int, Logprob]]:
    ranked = sorted(known.items(), key=lambda item: item[1].rank)
    return ranked if k < 0 else ranked[:k]


def _token_text(token_id: int, logprob: Logprob) -> str:
    return f"token_id:{token_id}" if logprob.decoded_token is None else logprob.decoded_token


def _token_bytes(token_id: int, logprob: Logprob, tokenizer: Tokenizer | None) -> bytes:
    """A token may be part of a character."""
    if tokenizer is not None and tokenizer.byte_codec is not None:
        return tokenizer.token_bytes(token_id)
    return (logprob.decoded_token or "").encode()


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)
