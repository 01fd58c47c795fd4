"""jpaged serves large language models from JAX with a paged KV cache."""

from typing import TYPE_CHECKING, Any

from jpaged.errors import CapacityError, ConfigError, InvalidRequestError, JpagedError, ModelError
from jpaged.params import BeamSearchParams, SamplingParams, StructuredOutputs
from jpaged.request import CompletionOutput, Logprob, RequestOutput

if TYPE_CHECKING:
    from jpaged.engine.async_llm import AsyncLLM
    from jpaged.engine.llm import LLM

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CapacityError",
    "CompletionOutput",
    "ConfigError",
    "InvalidRequestError",
    "JpagedError",
    "Logprob",
    "ModelError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
]


def __getattr__(name: str) -> Any:
    """Import the engine, and jax with it, only when it is asked for: decisions and facts stay plain host code."""
    if name == "LLM":
        from jpaged.engine.llm import LLM

        return LLM
    if name == "AsyncLLM":
        from jpaged.engine.async_llm import AsyncLLM

        return AsyncLLM
    raise AttributeError(f"module 'jpaged' has no attribute {name!r}")
