"""The loop: plan, run, commit; with overlap, a step is planned while the device runs the one before it."""

import random
import time
from dataclasses import dataclass

from jpaged.config import EngineConfig
from jpaged.decoding.stopping import StopRules
from jpaged.engine.detokenizer import IncrementalDetokenizer
from jpaged.engine.startup import EngineParts, start_up
from jpaged.engine.tokenizer import Tokenizer
from jpaged.errors import CapacityError, InvalidRequestError
from jpaged.execution.runner import PendingStep, ReportProgress
from jpaged.metrics import EngineStats, Observer
from jpaged.request import (
    CompletionOutput,
    OutputDelta,
    PreparedRequest,
    Prompt,
    RequestOutput,
    RequestTimes,
    SamplingParams,
    validate_prompt_token_ids,
)
from jpaged.scheduling.scheduler import Progress
from jpaged.scheduling.sequence import Sequence
from jpaged.step_plan import RowSampling, StepPlan


@dataclass(slots=True)
class _Request:
    """A request in the engine: its sequence for the scheduler, its output for the user."""

    sequence: Sequence
    output: RequestOutput
    detokenizer: IncrementalDetokenizer | None


class Engine:
    """Serves requests step by step; not thread-safe, one owner calls it.

    `add_request` checks everything that can be checked and raises before anything is queued; after that a request ends
    by itself or by `abort_request`, and its pages come back either way.
    """

    def __init__(
        self, config: EngineConfig, report: ReportProgress | None = None, observer: Observer | None = None
    ) -> None:
        self.parts: EngineParts = start_up(config, report)
        self.observer = observer or Observer()
        self._scheduler = self.parts.scheduler
        self._runner = self.parts.runner
        self._requests: dict[int, _Request] = {}
        self._sequence_ids: dict[str, int] = {}
        self._next_sequence_id = 0
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

    def prepare(self, prompt: Prompt, params: SamplingParams) -> PreparedRequest:
        """Check a request without queueing it. Reads nothing that changes: any thread may call it.

        Raises:
            InvalidRequestError: the prompt or a parameter does not fit the model.
            CapacityError: the pool could never hold the request.
        """
        spec = self.parts.spec
        token_ids = validate_prompt_token_ids(self._tokenize(prompt), spec.vocab_size, self.parts.max_model_len)
        for token_id in params.stop_token_ids:
            if token_id >= spec.vocab_size:
                raise InvalidRequestError(
                    f"stop_token_ids holds {token_id}, the vocabulary has ids 0..{spec.vocab_size - 1}"
                )
        max_length = self._max_length(len(token_ids), params)
        self._scheduler.check_fits(max_length)
        return PreparedRequest(prompt if isinstance(prompt, str) else None, token_ids, params, max_length)

    def add_request(self, request_id: str, request: PreparedRequest) -> RequestOutput:
        """Queue a request. Raises InvalidRequestError for an id in use."""
        if request_id in self._sequence_ids:
            raise InvalidRequestError(f"request_id {request_id!r} is in use; give every request its own")
        params = request.params
        sequence = Sequence(
            self._next_sequence_id,
            request.prompt_token_ids,
            self._row_sampling(params),
            StopRules(
                eos_token_ids=frozenset() if params.ignore_eos else frozenset(self.parts.spec.eos_token_ids),
                stop_token_ids=frozenset(params.stop_token_ids),
                max_length=request.max_length,
            ),
            self._scheduler.new_page_table(),
        )
        self._scheduler.add(sequence)
        self._next_sequence_id += 1
        output = RequestOutput(
            request_id=request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[CompletionOutput(index=0)],
            finished=False,
            times=RequestTimes(arrival=time.monotonic()),
        )
        detokenizer = self._make_detokenizer(request.prompt_token_ids, params)
        self._requests[sequence.sequence_id] = _Request(sequence, output, detokenizer)
        self._sequence_ids[request_id] = sequence.sequence_id
        return output

    def abort_request(self, request_id: str) -> bool:
        """End a request now and free its pages; `False` if there is no such request (any more)."""
        sequence_id = self._sequence_ids.pop(request_id, None)
        if sequence_id is None:
            return False
        self._scheduler.abort(self._requests.pop(sequence_id).sequence)
        return True

    def step(self) -> list[OutputDelta]:
        """Dispatch the next step and return what the last finished one added to its requests."""
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
        """After a failed step: drop every request and start over with empty pages; return the requests' ids."""
        self._in_flight = None
        request_ids = list(self._sequence_ids)
        for request_id in request_ids:
            self.abort_request(request_id)
        self._runner.reset()
        return request_ids

    def stats(self) -> EngineStats:
        pool = self._scheduler.pool
        return EngineStats(
            pages_total=pool.num_pages,
            pages_free=pool.num_free,
            pages_used=pool.num_used,
            pages_cached=0,
            rows_running=self._scheduler.num_running,
            rows_waiting=self._scheduler.num_waiting,
            preemptions=self._scheduler.num_preemptions,
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
        assert sorted(self._sequence_ids.values()) == sorted(self._requests), "a request is lost"

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

    def _max_length(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """Tokens of prompt and output at most: the request's own limit, the context, and without a limit of its own
        also what the pool can hold (its last token is never computed and takes no place)."""
        if params.max_tokens is not None:
            return min(num_prompt_tokens + params.max_tokens, self.parts.max_model_len)
        config = self._scheduler.config
        pool_limit = config.num_pages * config.page_size_tokens + 1
        if num_prompt_tokens >= pool_limit:
            raise CapacityError(
                f"the prompt has {num_prompt_tokens} tokens, the whole pool holds {pool_limit - 1};"
                " shorten it, or raise num_pages"
            )
        return min(self.parts.max_model_len, pool_limit)

    def _row_sampling(self, params: SamplingParams) -> RowSampling:
        return RowSampling(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=max(params.top_k, 0),
            min_p=params.min_p,
            seed=self._seeds.getrandbits(64) if params.seed is None else params.seed,
            sample_index=0,
        )

    def _make_detokenizer(self, token_ids: list[int], params: SamplingParams) -> IncrementalDetokenizer | None:
        if self.tokenizer is None or not params.detokenize:
            return None
        return IncrementalDetokenizer(self.tokenizer, token_ids, skip_special_tokens=params.skip_special_tokens)

    def _note_plan(self, plan: StepPlan) -> None:
        self._num_steps += 1
        self._utilisation_sum += self._scheduler.used_token_slots / max(self._scheduler.allocated_token_slots, 1)
        if plan.rows_taken:
            now = time.monotonic()
            for sequence_id in plan.sequence_ids:
                times = self._requests[sequence_id].output.times
                if times.first_scheduled is None:
                    times.first_scheduled = now

    def _publish(self, progress: Progress) -> list[OutputDelta]:
        """Turn a commit into what users see."""
        now = time.monotonic()
        return [self._publish_token(sequence, now) for sequence in progress.sequences]

    def _publish_token(self, sequence: Sequence, now: float) -> OutputDelta:
        request = self._requests[sequence.sequence_id]
        output, completion, times = request.output, request.output.outputs[0], request.output.times
        token_id = sequence.token_ids[-1]
        text = self._detokenize(request, token_id)
        completion.token_ids.append(token_id)
        completion.text += text
        output.num_preemptions = sequence.num_preemptions
        if times.first_token is None:
            times.first_token = now
        else:
            self.observer.token_followed(now - times.last_token)
        times.last_token = now
        if sequence.finish is not None:
            completion.finish_reason = sequence.finish.reason
            completion.stop_reason = sequence.finish.stop_reason
            output.finished = True
            times.finished = now
            del self._requests[sequence.sequence_id]
            del self._sequence_ids[output.request_id]
            self.observer.request_finished(output)
        return OutputDelta(
            output,
            index=0,
            text=text,
            token_ids=[token_id],
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            finished=output.finished,
        )

    def _detokenize(self, request: _Request, token_id: int) -> str:
        """Return the text that a token adds. The token that stops a sequence adds none."""
        detokenizer, finish = request.detokenizer, request.sequence.finish
        if detokenizer is None:
            return ""
        stops = finish is not None and finish.reason == "stop"
        text = "" if stops else detokenizer.push([token_id])
        return text if finish is None else text + detokenizer.finish()
