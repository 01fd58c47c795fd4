"""One stream of tokens, as the scheduler sees it."""

from jpaged.decoding.stopping import Finish, StopRules
from jpaged.paging.page_table import PageTable
from jpaged.step_plan import RowSampling


class Sequence:
    """A sequence waits, runs in a row, and may be sent back to wait; it carries two counts of its tokens.

    Attributes:
        sequence_id: unique over the engine's life.
        arrival: place in the order of arrival; kept through preemptions.
        token_ids: prompt and output known on the host (committed).
        num_prompt_tokens: how many of them are the prompt.
        num_planned_tokens: tokens whose KV the dispatched steps have computed or will compute.
        num_in_flight: tokens drawn by dispatched steps whose results have not come back.
        row: its place on the device while it runs, else -1.
    """

    __slots__ = (
        "arrival",
        "finish",
        "num_in_flight",
        "num_planned_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "row",
        "sampling",
        "sequence_id",
        "stop_rules",
        "table",
        "token_ids",
    )

    def __init__(
        self,
        sequence_id: int,
        prompt_token_ids: list[int],
        sampling: RowSampling,
        stop_rules: StopRules,
        table: PageTable,
    ) -> None:
        self.sequence_id = sequence_id
        self.arrival = sequence_id
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_planned_tokens = 0
        self.num_in_flight = 0
        self.row = -1
        self.sampling = sampling
        self.stop_rules = stop_rules
        self.table = table
        self.finish: Finish | None = None
        self.num_preemptions = 0

    @property
    def num_tokens(self) -> int:
        """Tokens committed and in flight."""
        return len(self.token_ids) + self.num_in_flight

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens a plan could compute now; 0 when the tokens in flight already bring the sequence to its end."""
        num_tokens = len(self.token_ids) + self.num_in_flight
        # The token that completes the sequence is never computed: nothing is drawn after it.
        return 0 if num_tokens >= self.stop_rules.max_length else num_tokens - self.num_planned_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]
