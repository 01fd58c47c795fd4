"""Runs requests on an engine step by step, so that a benchmark can look at the pool in between."""

from collections.abc import Callable

from jpaged import LLM
from jpaged.engine.engine import Params
from jpaged.request import RequestOutput

_num_requests = 0


def serve(
    llm: LLM, prompts: list[list[int]], params: list[Params], on_step: Callable[[list[RequestOutput]], None]
) -> list[RequestOutput]:
    """Generate for all prompts together; `on_step` is called after each step with all outputs so far."""
    global _num_requests
    engine, outputs = llm.engine, []
    for prompt, one in zip(prompts, params, strict=True):
        _num_requests += 1
        request = engine.prepare({"prompt_token_ids": prompt}, one)
        outputs.append(engine.add_request(f"bench-{_num_requests}", request))
    while engine.has_work:
        engine.step()
        on_step(outputs)
    return outputs
