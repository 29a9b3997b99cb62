"""Log-probabilities, position by position: for the few requests that ask, off the hot path."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.core.step import TokenLogprobs


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """What one position's request asked for.

    token_id, logprob: the chosen (or prompt) token. top: the likeliest alternatives as (id, log-probability),
    likeliest first. ids: the asked-for ids, in the order asked.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    ids: tuple[tuple[int, float], ...] = ()


def unpack(logprobs: TokenLogprobs) -> Iterator[tuple[int, PositionLogprobs]]:
    """Yield (index, position) for each of the q positions, in order."""
    top_at, ids_at = logprobs.top_indptr.tolist(), logprobs.ids_indptr.tolist()
    top = list(zip(logprobs.top_ids.tolist(), logprobs.top_logprobs.tolist(), strict=True))
    ids = list(zip(logprobs.ids.tolist(), logprobs.ids_logprobs.tolist(), strict=True))
    rows = zip(logprobs.index.tolist(), logprobs.token_ids.tolist(), logprobs.logprobs.tolist(), strict=True)
    for i, (index, token_id, logprob) in enumerate(rows):
        yield (
            index,
            PositionLogprobs(
                token_id=token_id,
                logprob=logprob,
                top=tuple(top[top_at[i] : top_at[i + 1]]),
                ids=tuple(ids[ids_at[i] : ids_at[i + 1]]),
            ),
        )
