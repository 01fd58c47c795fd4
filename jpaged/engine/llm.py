"""The offline door: prompts in, finished outputs out."""

from collections.abc import Callable, Generator
from collections.abc import Sequence as SequenceOf
from typing import Any

from jpaged.config import EngineConfig
from jpaged.engine.engine import Engine
from jpaged.engine.profiling import Profiler
from jpaged.engine.publishing import OutputShaper
from jpaged.engine.tokenizer import Tokenizer
from jpaged.errors import InvalidRequestError, JpagedError
from jpaged.execution.runner import ReportProgress
from jpaged.metrics import EngineStats
from jpaged.params import BeamSearchParams, Params, SamplingParams
from jpaged.request import Message, OutputDelta, PreparedRequest, Prompt, RequestOutput

# Variables of a chat template that are arguments of their own.
RESERVED_VARIABLES = frozenset({"documents", "messages", "self", "tools"})


def render_chat(
    tokenizer: Tokenizer | None,
    messages: SequenceOf[Message],
    tools: SequenceOf[dict[str, Any]] | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> Prompt:
    """Put a conversation through the model's chat template, ready for the model's answer.

    Args:
        tools: functions that the model may call, as OpenAI's interface describes them.
        chat_template_kwargs: further variables of the template. `add_generation_prompt` (True unless said otherwise)
            lets the model begin an answer; `continue_final_message` lets it go on with the last message instead.

    Raises:
        InvalidRequestError: the model has no tokenizer or chat template, the template refuses the messages or has no
            place for tools, or a variable is one that messages and tools have.
    """
    if tokenizer is None:
        raise InvalidRequestError("this model has no tokenizer, so it has no chat template; use prompt_token_ids")
    if tools and tokenizer.chat_template is not None and not tokenizer.chat_template.takes_tools:
        raise InvalidRequestError("the model's chat template has no place for tools; leave them out")
    variables = dict(chat_template_kwargs or {})
    reserved = sorted(RESERVED_VARIABLES & variables.keys())
    if reserved:
        raise InvalidRequestError(
            f"chat_template_kwargs holds {', '.join(reserved)}; give messages and tools themselves"
        )
    continues = bool(variables.pop("continue_final_message", False))
    adds_prompt = bool(variables.pop("add_generation_prompt", not continues))
    if continues and adds_prompt:
        raise InvalidRequestError("continue_final_message and add_generation_prompt are both true; choose one")
    text = tokenizer.render_chat(list(messages), adds_prompt, tools, **variables)
    if continues:
        text = _up_to_content(text, messages[-1])
    return {"prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}


def _up_to_content(text: str, message: Message) -> str:
    """A rendered chat up to the end of its last message's content."""
    content = message.get("content")
    content = content.strip() if isinstance(content, str) else ""
    found = text.rfind(content) if content else -1
    if found < 0:
        raise InvalidRequestError("continue_final_message is true, but the last message's content is not in the prompt")
    return text[: found + len(content)]


class LLM:
    """A model with its own engine. Options are those of EngineConfig.

    Raises:
        ConfigError: an option is unknown, out of range, or does not fit the machine.
        ModelError: the model cannot be loaded.
    """

    def __init__(self, model: str, *, report: ReportProgress | None = None, **options: Any) -> None:
        self.engine = Engine(EngineConfig.from_options(model, options), report)
        self._next_request = 0

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        *,
        on_delta: Callable[[OutputDelta], None] | None = None,
    ) -> list[RequestOutput]:
        """Generate for all prompts together; the results are in the prompts' order.

        Args:
            prompts: text or {"prompt_token_ids": [...]}, one or many.
            params: for all prompts, or one for each; `None` takes SamplingParams().
            on_delta: called with everything a step adds, as it comes.

        Raises:
            InvalidRequestError: a prompt or a parameter is refused, or the numbers of prompts and parameters differ;
                nothing has run then.
            CapacityError: a request could never fit; nothing has run then.
        """
        return self._generate(prompts, params or SamplingParams(), on_delta)

    def beam_search(
        self, prompts: Prompt | SequenceOf[Prompt], params: BeamSearchParams | SequenceOf[BeamSearchParams]
    ) -> list[RequestOutput]:
        """Search for the most likely continuations of each prompt; `outputs` holds generated tokens, best first.

        Raises:
            InvalidRequestError, CapacityError: as `generate`.
        """
        return self._generate(prompts, params, None)

    def pin_prefix(self, name: str, prefix: Prompt) -> int:
        """Compute a prompt prefix and keep its full pages on the device until `unpin_prefix`.

        Returns:
            how many tokens they hold.

        Raises:
            InvalidRequestError, CapacityError: as `generate`, and as Engine.pin_prefix.
        """
        request = self.engine.prepare(prefix, SamplingParams(temperature=0.0, max_tokens=1, detokenize=False))
        self._run([request], None)
        return self.engine.pin_prefix(name, request.prompt_token_ids)

    def unpin_prefix(self, name: str) -> bool:
        """`False` if no prefix of that name is pinned."""
        return self.engine.unpin_prefix(name)

    def flush_prefix_cache(self) -> None:
        """Forget what is cached."""
        self.engine.flush_prefix_cache()

    def reload_weights(self, model: str | None = None) -> None:
        """Serve other weights of the same model from now on, as Engine.reload_weights."""
        self.engine.reload_weights(model)

    def chat(
        self,
        messages: SequenceOf[Message] | SequenceOf[SequenceOf[Message]],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        *,
        tools: SequenceOf[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        on_delta: Callable[[OutputDelta], None] | None = None,
    ) -> list[RequestOutput]:
        """As `generate`, for one conversation or many: lists of {"role": ..., "content": ...}, put through the model's
        chat template with `tools` and `chat_template_kwargs` as in the function `render_chat`."""
        conversations = [messages] if messages and isinstance(messages[0], dict) else messages
        prompts = [self.render_chat(c, tools, chat_template_kwargs) for c in conversations]  # type: ignore[arg-type]
        return self.generate(prompts, params, on_delta=on_delta)

    def render_chat(
        self,
        messages: SequenceOf[Message],
        tools: SequenceOf[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> Prompt:
        """As the function `render_chat`, with this model's tokenizer."""
        return render_chat(self.tokenizer, messages, tools, chat_template_kwargs)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[OutputDelta]:
        """Generate for one prompt and yield what each step adds, or what `params.output_kind` says.

        Closing the iterator aborts the request.
        """
        self._check_idle()
        request_id, params = self._new_request_id(), params or SamplingParams()
        self.engine.add_request(request_id, self.engine.prepare(prompt, params))
        shaper = OutputShaper(params.output_kind)
        try:
            while self.engine.has_work:
                for delta in self.engine.step():
                    shaped = shaper.push(delta)
                    if shaped is not None:
                        yield shaped
        finally:
            self.engine.abort_request(request_id)

    def profile(self, directory: str) -> Profiler:
        """Trace what runs in a `with` block, for jax's tools; its `profile` then says where a step's time went."""
        return self.engine.make_profiler(directory)

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def _generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        params: Params | SequenceOf[Params],
        on_delta: Callable[[OutputDelta], None] | None,
    ) -> list[RequestOutput]:
        if not isinstance(prompts, SequenceOf) or isinstance(prompts, str):
            prompts = [prompts]  # what is no prompt at all is refused as one
        if isinstance(params, SamplingParams | BeamSearchParams):
            params = [params] * len(prompts)
        if len(params) != len(prompts):
            raise InvalidRequestError(
                f"there are {len(prompts)} prompts and {len(params)} params; give one for all, or one each"
            )
        requests = [self._prepare(place, len(prompts), prompt, params[place]) for place, prompt in enumerate(prompts)]
        return self._run(requests, on_delta)

    def _prepare(self, place: int, count: int, prompt: Prompt, params: Params) -> PreparedRequest:
        try:
            return self.engine.prepare(prompt, params)
        except JpagedError as error:
            raise type(error)(f"prompt {place} of {count}: {error}" if count > 1 else str(error)) from error

    def _run(
        self, requests: list[PreparedRequest], on_delta: Callable[[OutputDelta], None] | None
    ) -> list[RequestOutput]:
        self._check_idle()
        outputs: list[RequestOutput] = []
        try:
            outputs += [self.engine.add_request(self._new_request_id(), request) for request in requests]
            while self.engine.has_work:
                for delta in self.engine.step():
                    if on_delta is not None:
                        on_delta(delta)
        finally:
            # Without effect on finished requests; an interrupt must not leave the others behind.
            for output in outputs:
                self.engine.abort_request(output.request_id)
        return outputs

    def _check_idle(self) -> None:
        """One thing at a time: a second one would take the first one's deltas."""
        if self.engine.num_requests:
            raise InvalidRequestError("a stream of this LLM is open; finish or close it first, or use AsyncLLM")

    def _new_request_id(self) -> str:
        self._next_request += 1
        return f"offline-{self._next_request}"
