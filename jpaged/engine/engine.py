"""The loop: plan, run, commit; with overlap, a step is planned while the device runs the one before it."""

import random
import time
from dataclasses import dataclass

from jpaged.config import EngineConfig
from jpaged.decoding.beam_search import BeamSearch
from jpaged.decoding.stopping import StopRules
from jpaged.engine.detokenizer import IncrementalDetokenizer
from jpaged.engine.startup import EngineParts, start_up
from jpaged.engine.tokenizer import Tokenizer
from jpaged.errors import CapacityError, InvalidRequestError
from jpaged.execution.runner import PendingStep, ReportProgress
from jpaged.metrics import EngineStats, Observer
from jpaged.params import BeamSearchParams, Params
from jpaged.request import (
    CompletionOutput,
    OutputDelta,
    PreparedRequest,
    Prompt,
    RequestOutput,
    RequestTimes,
    validate_prompt_token_ids,
)
from jpaged.scheduling.scheduler import Progress
from jpaged.scheduling.sequence import Sequence, SequenceGroup
from jpaged.step_plan import RowSampling, StepPlan


@dataclass(slots=True)
class _Request:
    """A request in the engine: its group for the scheduler, its output for the user, text for each sequence."""

    group: SequenceGroup
    params: Params
    output: RequestOutput
    detokenizers: list[IncrementalDetokenizer]


class Engine:
    """Serves requests step by step; not thread-safe, one owner calls it.

    `prepare` checks everything that can be checked and raises before anything is queued; after that a request ends by
    itself or by `abort_request`, and its pages come back either way.
    """

    def __init__(
        self, config: EngineConfig, report: ReportProgress | None = None, observer: Observer | None = None
    ) -> None:
        self.parts: EngineParts = start_up(config, report)
        self.observer = observer or Observer()
        self._scheduler = self.parts.scheduler
        self._runner = self.parts.runner
        self._requests: dict[int, _Request] = {}  # by group id
        self._group_ids: dict[str, int] = {}  # by request id
        self._next_group_id = 0
        self._in_flight: tuple[StepPlan, PendingStep] | None = None
        self._seeds = random.Random(config.seed)
        self._num_steps = 0
        self._utilisation_sum = 0.0

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.parts.tokenizer

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything left to do, the result of the last step included."""
        return self._scheduler.has_work or self._in_flight is not None

    def prepare(self, prompt: Prompt, params: Params) -> PreparedRequest:
        """Check a request without queueing it. Reads nothing that changes: any thread may call it.

        Raises:
            InvalidRequestError: the prompt or a parameter does not fit the model.
            CapacityError: the pool could never hold the request.
        """
        spec = self.parts.spec
        token_ids = validate_prompt_token_ids(self._tokenize(prompt), spec.vocab_size, self.parts.max_model_len)
        if isinstance(params, BeamSearchParams):
            width = params.beam_width
        else:
            width = params.n
            for token_id in params.stop_token_ids:
                if token_id >= spec.vocab_size:
                    raise InvalidRequestError(
                        f"stop_token_ids holds {token_id}, the vocabulary has ids 0..{spec.vocab_size - 1}"
                    )
        if params.priority and self.parts.config.policy != "priority":
            raise InvalidRequestError(
                f'priority is {params.priority}, but the engine serves by "{self.parts.config.policy}";'
                ' leave it out, or start the engine with the policy "priority"'
            )
        self._scheduler.check_width(width)
        max_length = self._max_length(len(token_ids), params.max_tokens, width)
        self._scheduler.check_fits(len(token_ids), max_length, width)
        return PreparedRequest(prompt if isinstance(prompt, str) else None, token_ids, params, max_length)

    def add_request(self, request_id: str, request: PreparedRequest) -> RequestOutput:
        """Queue a request. Raises InvalidRequestError for an id in use."""
        if request_id in self._group_ids:
            raise InvalidRequestError(f"request_id {request_id!r} is in use; give every request its own")
        params, prompt_token_ids = request.params, request.prompt_token_ids
        group = self._make_group(request)
        self._scheduler.add(group)
        self._next_group_id += 1
        output = RequestOutput(
            request_id=request_id,
            prompt=request.prompt,
            prompt_token_ids=prompt_token_ids,
            outputs=[CompletionOutput(index) for index in range(len(group.live))],
            finished=False,
            times=RequestTimes(arrival=time.monotonic()),
        )
        detokenizers = []
        if self.tokenizer is not None and params.detokenize and group.beams is None:
            detokenizers = [self._new_detokenizer(prompt_token_ids, params) for _ in group.live]
        self._requests[group.group_id] = _Request(group, params, output, detokenizers)
        self._group_ids[request_id] = group.group_id
        return output

    def abort_request(self, request_id: str) -> bool:
        """End a request now and free its pages; `False` if there is no such request (any more)."""
        group_id = self._group_ids.pop(request_id, None)
        if group_id is None:
            return False
        self._scheduler.abort(self._requests.pop(group_id).group)
        return True

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    def step(self) -> list[OutputDelta]:
        """Dispatch the next step and return what the last finished one added to its requests.

        If it fails or is interrupted, the books and the device no longer agree: the engine is reset, and all requests
        are gone, before the error goes on.
        """
        try:
            return self._step()
        except BaseException:
            self.reset()
            raise

    def _step(self) -> list[OutputDelta]:
        start = time.monotonic()
        plan = self._scheduler.plan()
        dispatched: tuple[StepPlan, PendingStep] | None = None
        if plan is not None:
            dispatched = plan, self._runner.start(plan)
            self._note_plan(plan)
        if self.parts.config.overlap:
            dispatched, self._in_flight = self._in_flight, dispatched
        if dispatched is None:
            return []
        done_plan, pending = dispatched
        waits_from = time.monotonic()
        result = pending.result()
        waited_seconds = time.monotonic() - waits_from
        deltas = self._publish(self._scheduler.commit(done_plan, result))
        step_seconds = time.monotonic() - start
        self.observer.step_done(step_seconds, step_seconds - waited_seconds, done_plan.num_tokens)
        return deltas

    def reset(self) -> list[str]:
        """After a failed step: drop every request, pin and cached page and start over; return the requests' ids."""
        self._in_flight = None
        request_ids = list(self._group_ids)
        for request_id in request_ids:
            self.abort_request(request_id)
        self._scheduler.books.flush_prefix_cache(with_pins=True)
        self._runner.reset()
        return request_ids

    def flush_prefix_cache(self) -> None:
        """Forget what is cached; pinned prefixes stay in memory but are not found again."""
        self._scheduler.books.flush_prefix_cache()

    def pin_prefix(self, name: str, token_ids: list[int]) -> int:
        """Keep the full pages of a prefix that has been computed; return how many tokens they hold.

        Raises:
            InvalidRequestError: the name is taken, or prefix caching is off.
            CapacityError: it would take more pages than may be pinned.
        """
        if not self.parts.config.enable_prefix_caching:
            raise InvalidRequestError("prefix caching is off, so nothing can be pinned; set enable_prefix_caching")
        if self._scheduler.books.is_pinned(name):
            raise InvalidRequestError(f"a prefix named {name!r} is pinned already; unpin it first")
        return self._scheduler.books.pin(name, token_ids, self._cache_keys("")) * self.parts.page_size_tokens

    def unpin_prefix(self, name: str) -> bool:
        """`False` if no prefix of that name is pinned."""
        return self._scheduler.books.unpin(name)

    def stats(self) -> EngineStats:
        scheduler, pool, host_pool = self._scheduler, self._scheduler.pool, self._scheduler.host_pool
        return EngineStats(
            pages_total=pool.num_pages,
            pages_free=pool.num_free,
            pages_used=pool.num_used,
            pages_cached=pool.num_cached,
            pages_pinned=scheduler.books.num_pinned_pages,
            host_pages_total=host_pool.num_pages,
            host_pages_used=host_pool.num_used,
            host_pages_cached=host_pool.num_cached,
            rows_running=scheduler.num_running,
            rows_waiting=scheduler.num_waiting,
            preemptions=sum(scheduler.preemptions.values()),
            preemptions_swap=scheduler.preemptions["swap"],
            preemptions_recompute=scheduler.preemptions["recompute"],
            prefix_cache_queries_tokens=scheduler.prefix_queries_tokens,
            prefix_cache_hits_tokens=scheduler.prefix_hits_tokens,
            steps=self._num_steps,
            buckets=len(self._runner.buckets),
            compilations=self._runner.compilations,
            compilations_after_ready=self._runner.compilations_after_ready,
            kv_utilisation=self._utilisation_sum / self._num_steps if self._num_steps else 0.0,
            ready_seconds=self.parts.ready_seconds,
        )

    def check_invariants(self) -> None:
        """Assert that the books agree; for tests."""
        self._scheduler.check_invariants()
        assert sorted(self._group_ids.values()) == sorted(self._requests), "a request is lost"

    def _tokenize(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidRequestError("this model has no tokenizer; give the prompt as prompt_token_ids")
            return self.tokenizer.encode(prompt)
        if isinstance(prompt, dict) and "prompt_token_ids" in prompt:
            return prompt["prompt_token_ids"]
        raise InvalidRequestError(
            f"a prompt is text or {{'prompt_token_ids': [...]}}, got {type(prompt).__name__}: {str(prompt)[:80]!r}"
        )

    def _max_length(self, num_prompt_tokens: int, max_tokens: int | None, width: int) -> int:
        """Tokens of prompt and output at most: the request's own limit, the context, and without a limit of its own
        also what the pool can hold for each of `width` sequences."""
        if max_tokens is not None:
            return min(num_prompt_tokens + max_tokens, self.parts.max_model_len)
        longest = self._scheduler.longest_that_fits(num_prompt_tokens, width)
        if num_prompt_tokens >= longest:
            raise CapacityError(
                f"the prompt has {num_prompt_tokens} tokens, the pool holds {longest - 1} for {width} sequences of one"
                " request; shorten it, or raise num_pages"
            )
        return min(self.parts.max_model_len, longest)

    def _make_group(self, request: PreparedRequest) -> SequenceGroup:
        """Turn a request into sequences: all samples, or a search's first beam."""
        params, eos_token_ids = request.params, frozenset(self.parts.spec.eos_token_ids)
        if params.ignore_eos:
            eos_token_ids = frozenset()
        beams, seed, num_sequences = None, 0, 1
        if isinstance(params, BeamSearchParams):
            rules = StopRules(frozenset(), frozenset(), request.max_length)
            beams = BeamSearch(
                params.beam_width,
                request.max_length - len(request.prompt_token_ids),
                eos_token_ids,
                params.length_penalty,
                params.early_stopping,
            )
        else:
            rules = StopRules(eos_token_ids, frozenset(params.stop_token_ids), request.max_length)
            seed, num_sequences = params.seed, params.n
        group = SequenceGroup(
            self._next_group_id,
            request.prompt_token_ids,
            rules,
            width=num_sequences if beams is None else beams.width,
            priority=params.priority,
            beams=beams,
            cache_keys=self._cache_keys(params.cache_salt),
            reads_cache=not params.skip_reading_prefix_cache,
        )
        if seed is None:
            seed = self._seeds.getrandbits(64)
        for index in range(num_sequences):
            sampling = _row_sampling(params, seed, index)
            table = self._scheduler.new_page_table()
            group.live.append(Sequence(self._scheduler.new_sequence_id(), group, index, sampling, table))
        return group

    def _cache_keys(self, salt: str) -> tuple[str, ...]:
        return (salt, self.parts.dtype)

    def _new_detokenizer(self, prompt_token_ids: list[int], params: Params) -> IncrementalDetokenizer:
        assert self.tokenizer is not None
        return IncrementalDetokenizer(self.tokenizer, prompt_token_ids, skip_special_tokens=params.skip_special_tokens)

    def _note_plan(self, plan: StepPlan) -> None:
        self._num_steps += 1
        self._utilisation_sum += self._scheduler.used_token_slots / max(self._scheduler.allocated_token_slots, 1)
        if plan.rows_taken:
            now = time.monotonic()
            for sequence_id in plan.sequence_ids:
                group = self._scheduler.group_of(sequence_id)
                output = self._requests[group.group_id].output
                if output.times.first_scheduled is None:
                    output.times.first_scheduled = now
                    output.num_cached_tokens = group.num_cached_tokens

    def _publish(self, progress: Progress) -> list[OutputDelta]:
        """Turn a commit into what users see."""
        now = time.monotonic()
        deltas = [self._publish_token(sequence, now) for sequence in progress.sequences]
        for group in progress.beam_groups:
            deltas += self._publish_beams(group, now)
        return deltas

    def _publish_token(self, sequence: Sequence, now: float) -> OutputDelta:
        group, finish = sequence.group, sequence.finish
        request = self._requests[group.group_id]
        output, times = request.output, request.output.times
        completion = output.outputs[sequence.index]
        token_id = sequence.token_ids[-1]
        text = ""
        if request.detokenizers:
            detokenizer = request.detokenizers[sequence.index]
            # The token that stops a sequence adds no text.
            text = "" if finish is not None and finish.reason == "stop" else detokenizer.push([token_id])
            text += detokenizer.finish() if finish is not None else ""
        completion.token_ids.append(token_id)
        completion.text += text
        output.num_preemptions = group.num_preemptions
        if times.first_token is None:
            times.first_token = now
        elif sequence.index == 0:
            self.observer.token_followed(now - times.last_token)
        times.last_token = now
        if finish is not None:
            completion.finish_reason, completion.stop_reason = finish.reason, finish.stop_reason
            if all(other.finish_reason for other in output.outputs):
                self._finish(request, now)
        return OutputDelta(
            output,
            sequence.index,
            text,
            [token_id],
            completion.finish_reason,
            completion.stop_reason,
            finished=output.finished,
        )

    def _publish_beams(self, group: SequenceGroup, now: float) -> list[OutputDelta]:
        """A search is done: its hypotheses come at once, best first."""
        request = self._requests[group.group_id]
        output, params = request.output, request.params
        assert group.beams is not None and isinstance(params, BeamSearchParams)
        output.outputs.clear()
        for index, found in enumerate(group.beams.finished):
            text_ids = found.token_ids
            if found.stop_token_id is not None and not params.include_stop_str_in_output:
                text_ids = text_ids[:-1]
            text = ""
            if self.tokenizer is not None and params.detokenize:
                skips = params.skip_special_tokens and not params.include_stop_str_in_output
                detokenizer = IncrementalDetokenizer(self.tokenizer, output.prompt_token_ids, skip_special_tokens=skips)
                text = detokenizer.push(text_ids) + detokenizer.finish()
            output.outputs.append(
                CompletionOutput(
                    index,
                    text,
                    found.token_ids,
                    "length" if found.stop_token_id is None else "stop",
                    cumulative_logprob=found.cumulative_logprob,
                    score=found.score,
                )
            )
        output.num_preemptions = group.num_preemptions
        output.times.first_token = output.times.last_token = now
        self._finish(request, now)
        last = len(output.outputs) - 1
        return [
            OutputDelta(
                output,
                c.index,
                c.text,
                list(c.token_ids),
                c.finish_reason,
                c.stop_reason,
                finished=c.index == last,
                cumulative_logprob=c.cumulative_logprob,
                score=c.score,
            )
            for c in output.outputs
        ]

    def _finish(self, request: _Request, now: float) -> None:
        output = request.output
        output.finished = True
        output.times.finished = now
        del self._requests[request.group.group_id]
        del self._group_ids[output.request_id]
        self.observer.request_finished(output)


def _row_sampling(params: Params, seed: int, sample_index: int) -> RowSampling:
    if isinstance(params, BeamSearchParams):
        return RowSampling(temperature=params.temperature, is_beam=True)
    return RowSampling(params.temperature, params.top_p, max(params.top_k, 0), params.min_p, seed, sample_index)
