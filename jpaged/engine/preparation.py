"""Checks a request against the model and the engine, before anything is queued, and turns it into sequences."""

import threading
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from jpaged.decoding.beam_search import BeamSearch
from jpaged.decoding.grammar import Grammar, GrammarCompiler
from jpaged.decoding.stopping import StopRules
from jpaged.engine.grammars import make_grammar_compiler
from jpaged.engine.startup import EngineParts
from jpaged.errors import CapacityError, InvalidRequestError
from jpaged.params import (
    MAX_BAD_WORD_TOKENS,
    WHOLE_VOCABULARY,
    BeamSearchParams,
    Params,
    SamplingParams,
    StructuredOutputs,
)
from jpaged.request import PreparedRequest, Prompt, validate_prompt_token_ids
from jpaged.scheduling.sequence import Sequence, SequenceGroup
from jpaged.step_plan import RowConstraints, RowSampling

MAX_LOGPROB_ENTRIES = 2**22  # of one request: each takes some 150 bytes


class Preparation:
    """Turns prompts and parameters into requests that can be served, and those into groups of sequences.

    `prepare` reads nothing that changes, so any thread may call it.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._grammar_compiler: GrammarCompiler | None = None
        self._lock = threading.Lock()

    def prepare(self, prompt: Prompt, params: Params) -> PreparedRequest:
        """Check a request without queueing it.

        Raises:
            InvalidRequestError: the prompt or a parameter does not fit the model.
            CapacityError: the pool could never hold the request.
        """
        parts = self._parts
        token_ids = self._tokenize(prompt)
        if isinstance(params, SamplingParams) and params.truncate_prompt_tokens is not None:
            keep = params.truncate_prompt_tokens
            token_ids = list(token_ids)[-(keep if keep > 0 else parts.max_model_len - 1) :]
        token_ids = validate_prompt_token_ids(token_ids, parts.spec.vocab_size, parts.max_model_len)
        if params.priority and parts.config.policy != "priority":
            raise InvalidRequestError(
                f'priority is {params.priority}, but the engine serves by "{parts.config.policy}";'
                ' leave it out, or start the engine with the policy "priority"'
            )
        width = params.beam_width if isinstance(params, BeamSearchParams) else params.n
        parts.scheduler.check_width(width)
        max_length = self._max_length(len(token_ids), params.max_tokens, width)
        parts.scheduler.check_fits(len(token_ids), max_length, width)
        request = PreparedRequest(prompt if isinstance(prompt, str) else None, token_ids, params, max_length)
        if isinstance(params, SamplingParams):
            self._check_sampling(params, len(token_ids), max_length)
            grammar = None if params.structured_outputs is None else self._compile(params.structured_outputs)
            request = replace(request, constraints=self._constraints(params), grammar=grammar)
        return request

    def make_group(self, group_id: int, request: PreparedRequest, new_seed: Callable[[], int]) -> SequenceGroup:
        """Turn a request into sequences: all samples, or a search's first beam.

        Args:
            new_seed: gives the noise of a request that names none.
        """
        params, scheduler = request.params, self._parts.scheduler
        is_search = isinstance(params, BeamSearchParams)
        eos_token_ids = self._eos_token_ids(params)
        beams, prompt_length = None, len(request.prompt_token_ids)
        if is_search:
            rules = StopRules(frozenset(), frozenset(), request.max_length)
            beams = BeamSearch(
                params.beam_width,
                request.max_length - prompt_length,
                eos_token_ids,
                params.length_penalty,
                params.early_stopping,
            )
        else:
            min_length = prompt_length + params.min_tokens
            rules = StopRules(eos_token_ids, frozenset(params.stop_token_ids), request.max_length, min_length)
        group = SequenceGroup(
            group_id,
            request.prompt_token_ids,
            rules,
            width=params.beam_width if is_search else params.n,
            priority=params.priority,
            beams=beams,
            num_logprobs=None if is_search else params.logprobs,
            num_prompt_logprobs=None if is_search else params.prompt_logprobs,
            cache_keys=self.cache_keys(params.cache_salt),
            # The logprobs of a prompt need all of it computed.
            reads_cache=not params.skip_reading_prefix_cache and (is_search or params.prompt_logprobs is None),
        )
        if is_search:
            samplings = [RowSampling(temperature=params.temperature, is_beam=True)]
        else:
            seed = params.seed if params.seed is not None else new_seed()
            sampling = _row_sampling(params, seed, prompt_length, request.constraints)
            samplings = [replace(sampling, sample_index=index) for index in range(params.n)]
        for index, sampling in enumerate(samplings):
            table = scheduler.new_page_table()
            sequence = Sequence(scheduler.new_sequence_id(), group, index, sampling, table)
            sequence.grammar = None if request.grammar is None else request.grammar.start()
            group.live.append(sequence)
        return group

    def _eos_token_ids(self, params: Params) -> frozenset[int]:
        return frozenset() if params.ignore_eos else frozenset(self._parts.spec.eos_token_ids)

    def cache_keys(self, salt: str) -> tuple[str, ...]:
        """What the KV of a request with this salt depends on, besides tokens."""
        return (salt, self._parts.dtype)

    def _tokenize(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self._parts.tokenizer is None:
                raise InvalidRequestError("this model has no tokenizer; give the prompt as prompt_token_ids")
            return self._parts.tokenizer.encode(prompt)
        if isinstance(prompt, dict) and "prompt_token_ids" in prompt:
            return prompt["prompt_token_ids"]
        raise InvalidRequestError(
            f"a prompt is text or {{'prompt_token_ids': [...]}}, got {type(prompt).__name__}: {str(prompt)[:80]!r}"
        )

    def _max_length(self, num_prompt_tokens: int, max_tokens: int | None, width: int) -> int:
        """Tokens of prompt and output at most: the request's own limit, the context, and without a limit of its own
        also what the pool can hold for each of `width` sequences."""
        max_model_len = self._parts.max_model_len
        if max_tokens is not None:
            return min(num_prompt_tokens + max_tokens, max_model_len)
        longest = self._parts.scheduler.longest_that_fits(num_prompt_tokens, width)
        if num_prompt_tokens >= longest:
            raise CapacityError(
                f"the prompt has {num_prompt_tokens} tokens, the pool holds {longest - 1} for {width} sequences of one"
                " request; shorten it, or raise num_pages"
            )
        return min(max_model_len, longest)

    def _check_sampling(self, params: SamplingParams, num_prompt_tokens: int, max_length: int) -> None:
        vocab_size = self._parts.spec.vocab_size
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            worst = max(getattr(params, name) or (), default=0)
            if worst >= vocab_size:
                raise InvalidRequestError(f"{name} holds {worst}, the vocabulary has ids 0..{vocab_size - 1}")
        num_output_tokens = params.n * (max_length - num_prompt_tokens)
        for name, num_tokens in (("logprobs", num_output_tokens), ("prompt_logprobs", num_prompt_tokens)):
            wanted = getattr(params, name)
            if wanted is None:
                continue
            if wanted > vocab_size:
                raise InvalidRequestError(
                    f"{name} is {wanted}, it must be at most the vocabulary's {vocab_size}, or -1 for all of it"
                )
            each = vocab_size if wanted == WHOLE_VOCABULARY else wanted
            if each * num_tokens > MAX_LOGPROB_ENTRIES:
                raise InvalidRequestError(
                    f"{name} is {wanted}, which makes {each * num_tokens} entries for {num_tokens} tokens, the limit is"
                    f" {MAX_LOGPROB_ENTRIES}; ask for fewer, or for fewer tokens"
                )
        if self._parts.tokenizer is None:
            for name in ("stop", "bad_words", "structured_outputs"):
                if getattr(params, name):
                    raise InvalidRequestError(f"{name} is set, but this model has no tokenizer; leave it out")

    def _tokenize_bad_words(self, words: SequenceOf[str]) -> tuple[tuple[int, ...], ...]:
        """The tokens of each word, at the beginning of a text and after a space."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            assert self._parts.tokenizer is not None
            for text in (word, f" {word}"):
                token_ids = tuple(self._parts.tokenizer.encode(text, add_special_tokens=False))
                if len(token_ids) > MAX_BAD_WORD_TOKENS:
                    raise InvalidRequestError(
                        f"bad_words holds {word!r}, which has {len(token_ids)} tokens, the limit is"
                        f" {MAX_BAD_WORD_TOKENS}; give a shorter part of it"
                    )
                if token_ids:
                    found[token_ids] = None
        return tuple(found)

    def _compile(self, structured: StructuredOutputs) -> Grammar:
        """Raises InvalidRequestError if the model cannot follow it."""
        tokenizer, spec = self._parts.tokenizer, self._parts.spec
        assert tokenizer is not None
        with self._lock:  # reading the whole vocabulary takes a while: once is enough
            if self._grammar_compiler is None:
                self._grammar_compiler = make_grammar_compiler(tokenizer, spec.eos_token_ids, spec.vocab_size)
        return self._grammar_compiler.compile(structured)

    def _constraints(self, params: SamplingParams) -> RowConstraints | None:
        """What of the parameters needs more than numbers on the device; `None` if nothing does."""
        bad_word_ids = self._tokenize_bad_words(params.bad_words)
        forbidden = [token_ids[0] for token_ids in bad_word_ids if len(token_ids) == 1]
        allowed_bits = None
        if params.allowed_token_ids is not None or forbidden:
            allowed_bits = _pack_allowed(self._parts.spec.vocab_size, params.allowed_token_ids, forbidden)
            if not allowed_bits.any():
                raise InvalidRequestError(
                    "allowed_token_ids and bad_words leave no token that could be drawn; allow more"
                )
        bias = tuple((params.logit_bias or {}).items())
        bad_words = tuple(token_ids for token_ids in bad_word_ids if len(token_ids) > 1)
        late = self._eos_token_ids(params).union(params.stop_token_ids) if params.min_tokens else ()
        if allowed_bits is None and not (bias or bad_words or late):
            return None
        return RowConstraints(allowed_bits, bias, bad_words, tuple(sorted(late)))


def _pack_allowed(vocab_size: int, allowed: SequenceOf[int] | None, forbidden: list[int]) -> NDArray[np.uint32]:
    """Bits as in RowConstraints."""
    may = np.full(-(-vocab_size // 32) * 32, allowed is None)
    may[list(allowed or ())] = True
    may[forbidden] = False
    may[vocab_size:] = False
    return np.packbits(may, bitorder="little").view(np.uint32)


def _row_sampling(
    params: SamplingParams, seed: int, prompt_length: int, constraints: RowConstraints | None
) -> RowSampling:
    return RowSampling(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(params.top_k, 0),
        min_p=params.min_p,
        seed=seed,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        prompt_length=prompt_length,
        min_length=prompt_length + params.min_tokens,
        constraints=constraints,
    )
