"""Streams of tokens and the requests they belong to, as the scheduler sees them."""

from typing import Self

from jpaged.decoding.beam_search import BeamSearch
from jpaged.decoding.grammar import GrammarMatcher
from jpaged.decoding.stopping import Finish, StopRules
from jpaged.paging.page_table import PageTable
from jpaged.paging.prefix_cache import CachedPage
from jpaged.step_plan import RowSampling


class Sequence:
    """A sequence waits, runs in a row, and may be sent back to wait; it carries two counts of its tokens.

    Attributes:
        sequence_id: unique over the engine's life.
        index: its place in its group.
        group: the request it belongs to.
        token_ids: prompt and output known on the host (committed).
        num_planned_tokens: tokens whose KV the dispatched steps have computed or will compute.
        num_in_flight: tokens drawn by dispatched steps whose results have not come back.
        row: its place on the device while it runs, else -1.
        grammar: says which tokens may come next; `None` for any.
        digests: names of its first full pages, made as they are needed.
        chain: the cache's entries for its first pages that are named.
    """

    __slots__ = (
        "chain",
        "digests",
        "finish",
        "grammar",
        "group",
        "index",
        "num_in_flight",
        "num_planned_tokens",
        "row",
        "sampling",
        "sequence_id",
        "table",
        "token_ids",
    )

    def __init__(
        self, sequence_id: int, group: "SequenceGroup", index: int, sampling: RowSampling, table: PageTable
    ) -> None:
        self.sequence_id = sequence_id
        self.group = group
        self.index = index
        self.sampling = sampling
        self.table = table
        self.token_ids = list(group.prompt_token_ids)
        self.num_planned_tokens = 0
        self.num_in_flight = 0
        self.row = -1
        self.digests: list[bytes] = []
        self.chain: list[CachedPage] = []
        self.finish: Finish | None = None
        self.grammar: GrammarMatcher | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens committed and in flight."""
        return len(self.token_ids) + self.num_in_flight

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens a plan could compute now.

        0 when the tokens in flight already bring the sequence to its end, since nothing is drawn after the last one;
        and 0 while the host must first see the token in flight: it decides which token a beam goes on with, and what a
        grammar allows next.
        """
        in_flight = self.num_in_flight
        num_tokens = len(self.token_ids) + in_flight
        group = self.group
        if num_tokens >= group.stop_rules.max_length or (
            in_flight and (group.beams is not None or self.grammar is not None)
        ):
            return 0
        return num_tokens - self.num_planned_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.group.prompt_token_ids) :]

    def become_fork_of(self, other: Self, num_tokens: int) -> None:
        """Share another sequence's pages, which hold the KV of `num_tokens` tokens; what this one had is gone.

        Names are taken over for those tokens only: after them the two differ.
        """
        self.table.release()
        self.table = other.table.fork()
        self.num_planned_tokens = num_tokens
        num_full = num_tokens // self.table.page_size_tokens
        self.digests = other.digests[:num_full]
        self.chain = other.chain[:num_full]


class SequenceGroup:
    """The sequences of one request: admitted, preempted and finished together.

    Attributes:
        group_id: also its place in the order of arrival, kept through preemptions.
        priority: lower goes first where the policy looks at it.
        live: the sequences that have not ended; the first computes the prompt, the others fork from it.
        is_forked: whether they have their own tables; before that only the first has one.
        width: most sequences at one time.
        spare_rows: rows that it holds for sequences to come: beams multiply.
        beams: the search that decides how beams go on; `None` for samples.
        num_logprobs, num_prompt_logprobs: logprobs wanted for each token drawn, and for each token of the prompt;
            `None` for none, -1 for those of the whole vocabulary.
        num_scored: tokens of the prompt whose logprobs have been planned, or are not wanted: the first has none.
        cache_keys: what else the KV depends on, besides tokens.
        reads_cache: whether it may use cached pages.
        publishes: whether its own pages may be cached; no longer, once the cache was flushed while it ran.
        is_swapped: its tables name pages of the host tier.
        most_pages: pages that it can need at most.
        num_cached_tokens: prompt tokens that did not have to be computed when it first ran.
    """

    __slots__ = (
        "beams",
        "cache_keys",
        "group_id",
        "is_forked",
        "is_swapped",
        "live",
        "most_pages",
        "num_cached_tokens",
        "num_logprobs",
        "num_preemptions",
        "num_prompt_logprobs",
        "num_scored",
        "priority",
        "prompt_token_ids",
        "publishes",
        "reads_cache",
        "spare_rows",
        "stop_rules",
        "width",
    )

    def __init__(
        self,
        group_id: int,
        prompt_token_ids: list[int],
        stop_rules: StopRules,
        *,
        width: int = 1,
        priority: int = 0,
        beams: BeamSearch | None = None,
        num_logprobs: int | None = None,
        num_prompt_logprobs: int | None = None,
        cache_keys: tuple[str, ...] = (),
        reads_cache: bool = True,
    ) -> None:
        self.group_id = group_id
        self.prompt_token_ids = prompt_token_ids
        self.stop_rules = stop_rules
        self.width = width
        self.priority = priority
        self.beams = beams
        self.num_logprobs = num_logprobs
        self.num_prompt_logprobs = num_prompt_logprobs
        self.num_scored = 1 if num_prompt_logprobs is not None else len(prompt_token_ids)
        self.cache_keys = cache_keys
        self.reads_cache = reads_cache
        self.live: list[Sequence] = []
        self.is_forked = width == 1 or beams is not None
        self.spare_rows: list[int] = []
        self.is_swapped = False
        self.publishes = True
        self.most_pages = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0

    @property
    def prompt_length(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def fork_length(self) -> int:
        """Tokens that are computed once for all: the prompt but for its last token, after which each draws its own."""
        return len(self.prompt_token_ids) - 1

    @property
    def num_rows(self) -> int:
        """Rows that it holds while it runs."""
        return len(self.live) if self.beams is None else self.width

    @property
    def num_in_flight(self) -> int:
        return sum(sequence.num_in_flight for sequence in self.live)
