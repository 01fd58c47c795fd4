"""The loop: plan, run, commit; with overlap, a step is planned while the device runs the one before it."""

import random
import time

from jpaged.config import EngineConfig
from jpaged.engine.preparation import Preparation
from jpaged.engine.profiling import Profile, Profiler, StepsProfiler
from jpaged.engine.publishing import Request, publish_prompt_logprobs
from jpaged.engine.startup import EngineParts, reload_weights, start_up
from jpaged.engine.step_clock import StepClock
from jpaged.engine.tokenizer import Tokenizer
from jpaged.errors import InvalidRequestError
from jpaged.execution.runner import PendingStep, ReportProgress
from jpaged.metrics import EngineStats, Observer
from jpaged.params import Params
from jpaged.request import CompletionOutput, OutputDelta, PreparedRequest, Prompt, RequestOutput, RequestTimes
from jpaged.step_plan import ON_DEVICE, StepPlan, StepResult


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
        self._preparation = Preparation(self.parts)
        self._scheduler = self.parts.scheduler
        self._runner = self.parts.runner
        self._requests: dict[int, Request] = {}  # by group id
        self._group_ids: dict[str, int] = {}  # by request id
        self._next_group_id = 0
        self._in_flight: PendingStep | None = None
        self._clock = StepClock()
        self._profiler: StepsProfiler | None = None
        if config.profile_directory is not None:
            self._profiler = StepsProfiler(self.make_profiler(config.profile_directory), config.profile_steps)
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
        """Check a request without queueing it; any thread may call it. Raises as Preparation.prepare."""
        return self._preparation.prepare(prompt, params)

    def add_request(self, request_id: str, request: PreparedRequest) -> RequestOutput:
        """Queue a request. Raises InvalidRequestError for an id in use."""
        if request_id in self._group_ids:
            raise InvalidRequestError(f"request_id {request_id!r} is in use; give every request its own")
        if not self.has_work:
            self._clock.idle()
        group = self._preparation.make_group(self._next_group_id, request, lambda: self._seeds.getrandbits(64))
        self._scheduler.add(group)
        self._next_group_id += 1
        output = RequestOutput(
            request_id=request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[CompletionOutput(index) for index in range(len(group.live))],
            finished=False,
            times=RequestTimes(arrival=time.monotonic()),
        )
        self._requests[group.group_id] = Request(group, request, output, self.tokenizer)
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
        if self._profiler is not None:
            self._profiler.begin_step()
        try:
            deltas = self._step()
        except BaseException:
            self.reset()
            raise
        if self._profiler is not None:
            self._profiler.end_step(self.has_work)
        return deltas

    def _step(self) -> list[OutputDelta]:
        clock, before, dispatched = self._clock, self._in_flight, None
        clock.begin_turn(before)
        with clock.part("plan"):
            plan = self._scheduler.plan()
        if plan is not None:
            clock.look(before)
            with clock.part("dispatch"):
                dispatched = self._runner.start(plan)
            clock.dispatched(before)
            self._note_plan(plan)
        done, self._in_flight = (before, dispatched) if self.parts.config.overlap else (dispatched, None)
        if done is None:
            return []
        with clock.part("wait"):
            result = done.result()
        clock.waited()
        with clock.part("commit"):
            deltas = self._publish(done.plan, result)
        self.observer.step_done(clock.end_turn(), done.plan.num_tokens)
        return deltas

    def make_profiler(self, directory: str) -> Profiler:
        """What takes a trace of the next steps, into `directory`. Raises ConfigError if there can be none."""
        return Profiler(directory, self._runner.programs)

    @property
    def profile(self) -> Profile | None:
        """Where the time of the first steps went, if the configuration asks for it and they are done."""
        return None if self._profiler is None else self._profiler.profile

    def end_profile(self) -> None:
        """End the profile that the configuration asked for, if it has not ended by itself."""
        if self._profiler is not None:
            self._profiler.end()

    def reset(self) -> list[str]:
        """After a failed step: drop every request, pin and cached page and start over; return the requests' ids."""
        self._in_flight = None
        request_ids = list(self._group_ids)
        for request_id in request_ids:
            self.abort_request(request_id)
        self._scheduler.books.flush_prefix_cache(with_pins=True)
        self._runner.reset()
        return request_ids

    def reload_weights(self, model: str | None = None) -> None:
        """Serve the weights of `model` (`None`: the same place again) from now on; nothing of the old ones' KV is found
        again, and pins are gone.

        Raises:
            InvalidRequestError: requests are running; their KV would be of both.
            ModelError: as startup.reload_weights; the engine goes on with the old weights then.
        """
        if self._requests:
            raise InvalidRequestError(f"{len(self._requests)} requests are running; reload when they have ended")
        reload_weights(self.parts, model)
        self._scheduler.books.flush_prefix_cache(with_pins=True)

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
        return (
            self._scheduler.books.pin(name, token_ids, self._preparation.cache_keys("")) * self.parts.page_size_tokens
        )

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
            step_seconds=self._clock.turn_seconds,
            step_host_seconds=self._clock.host_seconds,
            step_gap_seconds=self._clock.gap_seconds,
            ready_seconds=self.parts.ready_seconds,
        )

    def check_invariants(self) -> None:
        """Assert that the books agree; for tests."""
        self._scheduler.check_invariants()
        assert sorted(self._group_ids.values()) == sorted(self._requests), "a request is lost"

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

    def _publish(self, plan: StepPlan, result: StepResult) -> list[OutputDelta]:
        """Book what a step drew and turn it into what users see."""
        progress = self._scheduler.commit(plan, result)
        now = time.monotonic()
        if plan.scored or plan.wide:
            publish_prompt_logprobs(self._requests, plan, result)
        wide = {token.place: place for place, token in enumerate(plan.wide) if token.token_id == ON_DEVICE}
        deltas: list[OutputDelta] = []
        for sequence, place in progress.sequences:
            request = self._requests[sequence.group.group_id]
            distribution = result.wide[wide[place]] if place in wide and result.wide is not None else None
            delta = request.publish_token(sequence, place, result, distribution, self._scheduler.finish)
            self._note_token(request, sequence.index, now)
            if delta.finish_reason is not None and all(other.finish_reason for other in request.output.outputs):
                self._finish(request, now)
                delta.finished = True
            deltas.append(delta)
        for group in progress.beam_groups:
            request = self._requests[group.group_id]
            deltas += request.publish_beams()
            self._note_token(request, 0, now)
            self._finish(request, now)
            deltas[-1].finished = True
        return deltas

    def _note_token(self, request: Request, index: int, now: float) -> None:
        """A sequence of a request has gained a token, or the request its beams."""
        output, times = request.output, request.output.times
        output.num_preemptions = request.group.num_preemptions
        if times.first_token is None:
            times.first_token = now
        elif index == 0:
            self.observer.token_followed(now - times.last_token)
        times.last_token = now

    def _finish(self, request: Request, now: float) -> None:
        output = request.output
        output.finished = True
        output.times.finished = now
        del self._requests[request.group.group_id]
        del self._group_ids[output.request_id]
        self.observer.request_finished(output)
