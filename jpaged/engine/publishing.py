"""Turns what a step drew into what users see: text, logprobs, reasons to end."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from jpaged.decoding.stop_strings import StopStringMatcher
from jpaged.decoding.stopping import Finish
from jpaged.engine.detokenizer import IncrementalDetokenizer
from jpaged.engine.tokenizer import Tokenizer
from jpaged.params import WHOLE_VOCABULARY, BeamSearchParams, OutputKind, SamplingParams
from jpaged.request import CompletionOutput, Logprob, OutputDelta, PreparedRequest, RequestOutput, TokenLogprobs
from jpaged.scheduling.sequence import Sequence, SequenceGroup
from jpaged.step_plan import Logprobs, StepPlan, StepResult


class SequenceText:
    """One sequence's text as its tokens come, up to its end or to a stop string."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: list[int], params: SamplingParams) -> None:
        self._params = params
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, prompt_token_ids, params.skip_special_tokens, params.spaces_between_special_tokens
        )
        self._stops = StopStringMatcher(params.stop, params.include_stop_str_in_output) if params.stop else None

    def push(self, token_id: int, num_tokens: int, finish: Finish | None) -> tuple[str, str | None]:
        """Return the text that may be shown now, and the stop string that was met.

        Args:
            num_tokens: tokens of the output, this one included.
            finish: why this token is the last, if it is.
        """
        text = ""
        if finish is None or not finish.by_token or self._params.include_stop_str_in_output:
            text = self._detokenizer.push([token_id])
        if finish is not None:
            text += self._detokenizer.finish()
        if self._stops is None:
            return text, None
        text, met = self._stops.push(text, ignoring=num_tokens < self._params.min_tokens)
        if met is None and finish is not None:
            text += self._stops.flush()
        return text, met

    def close(self) -> str:
        """What was held back, when the sequence ends without another token."""
        if self._stops is None:
            return self._detokenizer.finish()
        text, _ = self._stops.push(self._detokenizer.finish())
        return text + self._stops.flush()


class Request:
    """A request in the engine: its group for the scheduler, its output for the user, text for each sequence."""

    def __init__(
        self, group: SequenceGroup, request: PreparedRequest, output: RequestOutput, tokenizer: Tokenizer | None
    ) -> None:
        self.group = group
        self.params = request.params
        self.output = output
        self._tokenizer = tokenizer if request.params.detokenize else None
        self._texts: list[SequenceText] = []
        if isinstance(self.params, SamplingParams):
            if self._tokenizer is not None:
                texts = (SequenceText(self._tokenizer, output.prompt_token_ids, self.params) for _ in group.live)
                self._texts = list(texts)
            if self.params.logprobs is not None:
                for completion in output.outputs:
                    completion.logprobs, completion.cumulative_logprob = [], 0.0
            if self.params.prompt_logprobs is not None:
                output.prompt_logprobs = [*([None] * len(output.prompt_token_ids))]

    def publish_token(
        self,
        sequence: Sequence,
        place: int,
        result: StepResult,
        wide: NDArray[np.float32] | None,
        end: Callable[[Sequence, Finish], None],
    ) -> OutputDelta:
        """Add what a sequence gained to the output; return that.

        Args:
            place: where the sequence stands in the result.
            wide: the logprobs of the whole vocabulary for this token, if they were asked for.
            end: called if the text shows that the sequence ends here.
        """
        assert isinstance(self.params, SamplingParams)
        completion, finish = self.output.outputs[sequence.index], sequence.finish
        if finish is not None and finish.reason == "error":
            text = self._texts[sequence.index].close() if self._texts else ""
            return self._delta(completion, text, [], None, finish)
        token_id = sequence.token_ids[-1]
        completion.token_ids.append(token_id)
        logprobs = None
        if completion.logprobs is not None:
            entry = self._entry(self.params.logprobs, token_id, result.logprobs, place, wide)
            completion.logprobs.append(entry)
            assert completion.cumulative_logprob is not None
            completion.cumulative_logprob += entry[token_id].logprob
            logprobs = [entry]
        text = ""
        if self._texts:
            text, met = self._texts[sequence.index].push(token_id, len(completion.token_ids), finish)
            if met is not None:
                is_ended, finish = finish is not None, Finish("stop", met)
                if not is_ended:
                    end(sequence, finish)
        return self._delta(completion, text, [token_id], logprobs, finish)

    def publish_beams(self) -> list[OutputDelta]:
        """A search is done: its hypotheses come at once, best first."""
        params, beams = self.params, self.group.beams
        assert beams is not None and isinstance(params, BeamSearchParams)
        self.output.outputs.clear()
        deltas: list[OutputDelta] = []
        for index, found in enumerate(beams.finished):
            completion = CompletionOutput(
                index, cumulative_logprob=found.cumulative_logprob, score=found.score, token_ids=found.token_ids
            )
            self.output.outputs.append(completion)
            is_stopped = found.stop_token_id is not None
            text = ""
            if self._tokenizer is not None:
                text_ids = found.token_ids
                if is_stopped and not params.include_stop_str_in_output:
                    text_ids = text_ids[:-1]
                skips = params.skip_special_tokens and not params.include_stop_str_in_output
                detokenizer = IncrementalDetokenizer(self._tokenizer, self.output.prompt_token_ids, skips)
                text = detokenizer.push(text_ids) + detokenizer.finish()
            finish = Finish("stop" if is_stopped else "length")
            deltas.append(self._delta(completion, text, list(found.token_ids), None, finish))
        return deltas

    def publish_prompt_logprobs(
        self, position: int, scores: Logprobs | None, place: int, wide: NDArray[np.float32] | None
    ) -> None:
        """Enter the logprobs of one of the prompt's tokens: entry `place` of `scores`, or a whole distribution."""
        assert isinstance(self.params, SamplingParams) and self.output.prompt_logprobs is not None
        token_id = self.output.prompt_token_ids[position]
        entry = self._entry(self.params.prompt_logprobs, token_id, scores, place, wide)
        self.output.prompt_logprobs[position] = entry

    def _delta(
        self,
        completion: CompletionOutput,
        text: str,
        token_ids: list[int],
        logprobs: list[TokenLogprobs] | None,
        finish: Finish | None,
    ) -> OutputDelta:
        completion.text += text
        if finish is not None:
            completion.finish_reason, completion.stop_reason = finish.reason, finish.stop_reason
        return OutputDelta(
            self.output,
            completion.index,
            text,
            token_ids,
            completion.finish_reason,
            completion.stop_reason,
            logprobs=logprobs,
            cumulative_logprob=completion.cumulative_logprob,
            score=completion.score,
        )

    def _entry(
        self, count: int | None, token_id: int, found: Logprobs | None, place: int, wide: NDArray[np.float32] | None
    ) -> TokenLogprobs:
        """The token's logprob and those of the `count` most likely ones, the most likely first."""
        assert count is not None
        if wide is not None:
            count = len(wide) if count == WHOLE_VOCABULARY else count
            best_ids, best_logprobs, own, rank = _best_of(wide, count, token_id)
        else:
            assert found is not None
            best_ids, best_logprobs = found.candidate_ids[place, :count], found.candidate_logprobs[place, :count]
            own, rank = float(found.logprobs[place]), int(found.ranks[place])
        entry: TokenLogprobs = {}
        for its_rank, (best_id, logprob) in enumerate(zip(best_ids.tolist(), best_logprobs.tolist(), strict=True), 1):
            if logprob > -np.inf:  # a vocabulary of fewer tokens
                entry[best_id] = Logprob(logprob, its_rank, self._token_text(best_id))
        entry[token_id] = Logprob(own, rank, self._token_text(token_id))
        return entry

    def _token_text(self, token_id: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.token_text(token_id)


def _best_of(
    logprobs: NDArray[np.float32], count: int, token_id: int
) -> tuple[NDArray[np.intp], NDArray[np.float32], float, int]:
    """The `count` best tokens of a distribution and their logprobs; the logprob and the rank of `token_id`."""
    if count < len(logprobs):
        best = np.argpartition(-logprobs, count)[:count]
        best = best[np.lexsort((best, -logprobs[best]))]
    else:
        best = np.argsort(-logprobs, kind="stable")
    own = logprobs[token_id]
    return best, logprobs[best], float(own), int((logprobs >= own).sum())


class OutputShaper:
    """Turns deltas into the kind of output that a stream's reader asked for."""

    def __init__(self, kind: OutputKind) -> None:
        self._kind = kind
        self._so_far: dict[int, OutputDelta] = {}

    def push(self, delta: OutputDelta) -> OutputDelta | None:
        """What to yield for a delta; `None` for nothing yet."""
        if self._kind == "delta":
            return delta
        if self._kind == "final_only":
            if delta.finish_reason is None:
                return None
            # The sequence has ended, so its output changes no more.
            whole = delta.request.outputs[delta.index]
            return replace(delta, text=whole.text, token_ids=whole.token_ids, logprobs=whole.logprobs)
        so_far = self._so_far.get(delta.index)
        self._so_far[delta.index] = delta if so_far is None else merge(so_far, delta)
        return self._so_far[delta.index]


def merge(earlier: OutputDelta, later: OutputDelta) -> OutputDelta:
    """What two deltas of one sequence say together."""
    logprobs = None if later.logprobs is None else (earlier.logprobs or []) + later.logprobs
    return replace(
        later, text=earlier.text + later.text, token_ids=earlier.token_ids + later.token_ids, logprobs=logprobs
    )


def publish_prompt_logprobs(requests: dict[int, Request], plan: StepPlan, result: StepResult) -> None:
    """Enter what a step found of prompts into the requests that are still here."""
    for place, token in enumerate(plan.scored):
        request = requests.get(token.group_id)
        if request is not None:
            request.publish_prompt_logprobs(token.position, result.scored, place, None)
    for place, token in enumerate(plan.wide):
        request = requests.get(token.group_id)
        if token.token_id >= 0 and request is not None:
            assert result.wide is not None
            request.publish_prompt_logprobs(token.position, None, 0, result.wide[place])
