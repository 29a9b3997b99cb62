"""Which prompt tokens run in a step: admission, and cutting prompts into chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.config.groups import SchedulerConfig
from phalanx.core.request import EngineRequest, LogprobParams
from phalanx.core.step import Int64, PrefillChunks
from phalanx.scheduler.pages import RowPages
from phalanx.scheduler.queue import Waiting, WaitingQueue

_NO_PROMPT_LOGPROBS = LogprobParams()


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prompt positions start .. stop-1 of a row."""

    row: int
    request: EngineRequest
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        """Whether the prompt ends here."""
        return self.stop == len(self.request.input_ids)

    @property
    def logprobs(self) -> LogprobParams:
        """What the request wants (prompt_start -1: nothing of its prompt)."""
        return self.request.logprobs or _NO_PROMPT_LOGPROBS

    def delivers_logprobs(self) -> bool:
        """Whether any prompt position's log-probability comes out of this chunk."""
        return self.request.logprobs is not None and self.logprob_start() < self.logprob_stop()

    def logprob_start(self) -> int:
        """First prompt position whose log-probability this chunk delivers."""
        wanted = self.logprobs.prompt_start
        return max(self.start + 1, wanted) if wanted >= 0 else len(self.request.input_ids)

    def logprob_stop(self) -> int:
        """One past the last such position; not above `logprob_start()` if there is none."""
        return min(self.stop + 1, len(self.request.input_ids))


class TokenBudget:
    """Prompt tokens that still fit into one step.

    Unsplit prompts: as many as fit into max_prefill_tokens, but the first always fits. Split prompts: at most
    chunked_prefill_size (and max_prefill_tokens) tokens in all; the last prompt is cut.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._split = config.chunked_prefill_size > 0
        self._left = config.max_prefill_tokens
        if self._split:
            self._left = min(self._left, config.chunked_prefill_size)
        self._first = True

    def take(self, num_tokens: int) -> int:
        """How many of a prompt's `num_tokens` (>= 1) remaining tokens run in this step; 0: it is full."""
        if not self._split and (self._first or num_tokens <= self._left):
            taken = num_tokens
        elif self._split:
            taken = min(num_tokens, self._left)
        else:
            taken = 0
        self._first = False
        self._left -= taken
        return taken


def admit(
    queue: WaitingQueue, budget: TokenBudget, *, num_rows: int, num_pages: int
) -> tuple[list[Waiting], list[int]]:
    """Take requests off the queue while rows, unreserved pages and budget last; none overtakes the head.

    Returns:
        The admitted, and for each the number of prompt tokens that run in this step (>= 1).
    """
    admitted: list[Waiting] = []
    lens: list[int] = []
    while queue and len(admitted) < num_rows:
        head = queue.head()
        if head.num_pages > num_pages:
            break
        taken = budget.take(len(head.request.input_ids))
        if taken == 0:
            break
        num_pages -= head.num_pages
        admitted.append(queue.pop())
        lens.append(taken)
    return admitted, lens


def build_chunks(chunks: Sequence[Chunk], pages: RowPages) -> tuple[PrefillChunks, Int64]:
    """The arrays of these chunks, and the rows of those that end their prompt ([l] int64)."""
    rows = np.array([c.row for c in chunks], dtype=np.int64)
    starts = np.array([c.start for c in chunks], dtype=np.int32)
    lens = np.array([c.stop - c.start for c in chunks], dtype=np.int32)
    is_last = np.array([c.is_last for c in chunks], dtype=np.bool_)
    prefill = PrefillChunks(
        rows=rows.astype(np.int32),
        starts=starts,
        lens=lens,
        is_last=is_last,
        input_ids=np.concatenate([c.request.input_ids[c.start : c.stop] for c in chunks]),
        slots=pages.slots(rows, starts, lens),
    )
    return prefill, rows[is_last]


_NONE = np.zeros(0, dtype=np.int32)
NO_CHUNKS = PrefillChunks(
    rows=_NONE, starts=_NONE, lens=_NONE, is_last=np.zeros(0, dtype=np.bool_), input_ids=_NONE, slots=_NONE
)
