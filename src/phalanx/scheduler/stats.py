"""Totals since the start."""

from __future__ import annotations

import numpy as np

from phalanx.core.step import Finish, Int64, StepOutputs


class Counters:
    """Running totals.

    Attributes:
        received: requests that were queued.
        prompt_tokens: prompt tokens planned.
        generated_tokens: output tokens handed to streams.
        finished: [len(Finish)] int64, ended streams by reason.
    """

    def __init__(self) -> None:
        self.received = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.finished: Int64 = np.zeros(len(Finish), dtype=np.int64)

    def count(self, outputs: StepOutputs) -> None:
        """Add the tokens and ends of a step."""
        self.generated_tokens += int(np.count_nonzero(outputs.tokens >= 0))
        ended = np.flatnonzero(outputs.finish != int(Finish.NONE))
        if len(ended):
            self.finished += np.bincount(outputs.finish[ended], minlength=len(Finish))

    def as_dict(self) -> dict[str, int]:
        """By name, for `Scheduler.stats`."""
        ends = {
            f"finished_{reason.name.lower()}_total": int(self.finished[reason])
            for reason in Finish
            if reason != Finish.NONE
        }
        return {
            "requests_total": self.received,
            "prompt_tokens_total": self.prompt_tokens,
            "generated_tokens_total": self.generated_tokens,
            **ends,
        }
