"""Between the wire's sampling and search parameters and the engine's: the same fields under the same names."""

from dataclasses import fields
from typing import Any, Literal

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from jpaged.errors import InvalidRequestError
from jpaged.params import BeamSearchParams, OutputKind, Params, SamplingParams, StructuredOutputs
from jpaged.v1 import inference_pb2 as pb

# What max_tokens says on the wire to go on to the context's end; unset means the default.
UNLIMITED_TOKENS = -1
_EARLY_STOPPING: dict[Any, bool | Literal["never"]] = {
    pb.EARLY_STOPPING_FALSE: False,
    pb.EARLY_STOPPING_TRUE: True,
    pb.EARLY_STOPPING_NEVER: "never",
}
_OUTPUT_KINDS: dict[Any, OutputKind] = {
    pb.OUTPUT_KIND_DELTA: "delta",
    pb.OUTPUT_KIND_CUMULATIVE: "cumulative",
    pb.OUTPUT_KIND_FINAL_ONLY: "final_only",
}


def read_method(request: pb.GenerateRequest) -> Params:
    """Raises InvalidRequestError for a value out of range, and for a field that this server does not know."""
    refuse_unknown("the request", request)
    if request.WhichOneof("method") == "beam_search":
        return read_beam_search(request.beam_search)
    return read_sampling(request.sampling)


def read_sampling(message: pb.SamplingParams) -> SamplingParams:
    """Raises InvalidRequestError as `read_method`."""
    refuse_unknown("sampling", message)
    values: dict[str, Any] = {
        field.name: (dict(value) if field.name == "logit_bias" else tuple(value)) if field.is_repeated else value
        for field, value in message.ListFields()
    }
    _read_max_tokens(values)
    if "structured_outputs" in values:
        values["structured_outputs"] = _read_structured_outputs(message.structured_outputs)
    if "output_kind" in values:
        values["output_kind"] = _read_enum("sampling.output_kind", _OUTPUT_KINDS, message.output_kind, "delta")
    return SamplingParams(**values)


def read_beam_search(message: pb.BeamSearchParams) -> BeamSearchParams:
    """Raises InvalidRequestError as `read_method`."""
    refuse_unknown("beam_search", message)
    values = {field.name: value for field, value in message.ListFields()}
    values["beam_width"] = message.beam_width
    _read_max_tokens(values)
    values["early_stopping"] = _read_enum("beam_search.early_stopping", _EARLY_STOPPING, message.early_stopping, False)
    return BeamSearchParams(**values)


def write_method(request: pb.GenerateRequest, params: Params) -> None:
    """Put the parameters of either method into a request.

    Raises:
        InvalidRequestError: a number is beyond what the wire can hold, and so beyond what any model takes.
    """
    if isinstance(params, BeamSearchParams):
        request.beam_search.CopyFrom(write_beam_search(params))
    else:
        request.sampling.CopyFrom(write_sampling(params))


def write_sampling(params: SamplingParams) -> pb.SamplingParams:
    """The inverse of `read_sampling`; raises InvalidRequestError as `write_method`."""
    values = _given(params)
    values["output_kind"] = _number_of(_OUTPUT_KINDS, params.output_kind)
    if params.structured_outputs is not None:
        values["structured_outputs"] = _write_structured_outputs(params.structured_outputs)
    return _fill(pb.SamplingParams(), values)


def write_beam_search(params: BeamSearchParams) -> pb.BeamSearchParams:
    """The inverse of `read_beam_search`; raises InvalidRequestError as `write_method`."""
    values = _given(params)
    values["early_stopping"] = _number_of(_EARLY_STOPPING, params.early_stopping)
    return _fill(pb.BeamSearchParams(), values)


def refuse_unknown(name: str, message: Message) -> None:
    """A newer client may set fields that this server would otherwise drop. Raises InvalidRequestError if one did."""
    if numbers := sorted({field.field_number for field in UnknownFieldSet(message)}):
        raise InvalidRequestError(
            f"{name} has fields that this server does not know, of the numbers {', '.join(map(str, numbers))};"
            " leave them out, or use a newer server"
        )


def _read_structured_outputs(message: pb.StructuredOutputs) -> StructuredOutputs:
    refuse_unknown("sampling.structured_outputs", message)
    kind = message.WhichOneof("constraint")
    if kind is None:
        return StructuredOutputs()  # which refuses it
    value = tuple(message.choice.choices) if kind == "choice" else getattr(message, kind)
    values: dict[str, Any] = {kind: value}
    return StructuredOutputs(**values)


def _write_structured_outputs(given: StructuredOutputs) -> pb.StructuredOutputs:
    if given.choice is not None:
        return pb.StructuredOutputs(choice=pb.Choices(choices=given.choice))
    values = {field.name: getattr(given, field.name) for field in fields(given)}
    return pb.StructuredOutputs(**{name: value for name, value in values.items() if value not in (None, False)})


def _read_max_tokens(values: dict[str, Any]) -> None:
    if values.get("max_tokens") == UNLIMITED_TOKENS:
        values["max_tokens"] = None


def _given(params: Params) -> dict[str, Any]:
    """What is set, by field; `max_tokens` always is."""
    values = {field.name: getattr(params, field.name) for field in fields(params)}
    if params.max_tokens is None:
        values["max_tokens"] = UNLIMITED_TOKENS
    return {name: value for name, value in values.items() if value is not None}


def _fill[M: Message](message: M, values: dict[str, Any]) -> M:
    for name, value in values.items():
        try:
            message.MergeFrom(type(message)(**{name: value}))
        except ValueError as error:
            raise InvalidRequestError(f"{name} is {value!r}, which is beyond what a request can hold") from error
    return message


def _read_enum[T](name: str, values: dict[Any, T], number: Any, default: T) -> T:
    if number == 0:  # unset, or unspecified
        return default
    if number not in values:
        raise InvalidRequestError(f"{name} is {number}, which is none of the known values")
    return values[number]


def _number_of(values: dict[Any, Any], value: Any) -> Any:
    return next(number for number, known in values.items() if known == value)
