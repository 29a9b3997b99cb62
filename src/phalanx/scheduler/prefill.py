"""Which prompt tokens run in a step: admission, and cutting prompts into chunks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.config.groups import SchedulerConfig
from phalanx.core.request import EngineRequest
from phalanx.core.step import Bool, Int32, Int64, PrefillChunks
from phalanx.scheduler.pages import RowPages
from phalanx.scheduler.queue import Waiting, WaitingQueue


@dataclass(frozen=True, slots=True)
class PartialPrompt:
    """A prompt whose first `done` tokens are launched, and its row."""

    row: int
    request: EngineRequest
    done: int


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chunks of a step, [m] each: prompt positions starts[i] .. starts[i]+lens[i]-1 of requests[i]."""

    rows: Int64
    starts: Int32
    lens: Int32
    prompt_lens: Int32
    requests: list[EngineRequest]

    @property
    def count(self) -> int:
        """Number of chunks."""
        return len(self.requests)

    def is_last(self) -> Bool:
        """[m] bool: the prompt ends with this chunk."""
        ends: Bool = self.starts + self.lens == self.prompt_lens
        return ends

    def after(self, partial: PartialPrompt, taken: int) -> Chunks:
        """These, behind a chunk of `taken` tokens that goes on with a partly launched prompt."""
        return Chunks(
            rows=np.concatenate((np.array([partial.row]), self.rows)),
            starts=np.concatenate((np.array([partial.done], dtype=np.int32), self.starts)),
            lens=np.concatenate((np.array([taken], dtype=np.int32), self.lens)),
            prompt_lens=np.concatenate(
                (np.array([len(partial.request.input_ids)], dtype=np.int32), self.prompt_lens)
            ),
            requests=[partial.request, *self.requests],
        )

    def partial(self) -> PartialPrompt | None:
        """The last chunk's prompt if it does not end here. (No other can be cut.)"""
        if not self.requests:
            return None
        request, done = self.requests[-1], int(self.starts[-1] + self.lens[-1])
        return PartialPrompt(int(self.rows[-1]), request, done) if done < len(request.input_ids) else None

    def build(self, pages: RowPages) -> PrefillChunks:
        """The plan's arrays."""
        spans = zip(self.requests, self.starts.tolist(), self.lens.tolist(), strict=True)
        return PrefillChunks(
            rows=self.rows.astype(np.int32),
            starts=self.starts,
            lens=self.lens,
            is_last=self.is_last(),
            input_ids=np.concatenate([r.input_ids[start : start + size] for r, start, size in spans]),
            slots=pages.slots(self.rows, self.starts, self.lens),
        )


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
        if num_tokens <= self._left or (self._first and not self._split):
            taken = num_tokens
        else:
            taken = self._left if self._split else 0
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
    for head in queue.in_order():
        if len(admitted) == num_rows or head.num_pages > num_pages:
            break
        taken = budget.take(head.prompt_len)
        if taken == 0:
            break
        num_pages -= head.num_pages
        admitted.append(head)
        lens.append(taken)
    queue.pop(len(admitted))
    return admitted, lens


_NONE: Int32 = np.zeros(0, dtype=np.int32)
NO_CHUNKS = Chunks(rows=np.zeros(0, dtype=np.int64), starts=_NONE, lens=_NONE, prompt_lens=_NONE, requests=[])
NO_PREFILL = PrefillChunks(
    rows=_NONE, starts=_NONE, lens=_NONE, is_last=np.zeros(0, dtype=np.bool_), input_ids=_NONE, slots=_NONE
)
