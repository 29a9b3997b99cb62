"""Plans that run kernels for the first time and touch nobody's rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import TypeVar

import numpy as np
import torch

from phalanx.config.groups import SchedulerConfig
from phalanx.core.step import EnteringRows, PageGrants, PrefillChunks, StepPlan

_DTYPES = {"Int32": np.int32, "Int64": np.int64, "Float32": np.float32}
_T = TypeVar("_T")

LONGEST_TRIED = 2048  # tokens of a prompt: attention to longer ones would only take time
_TOKEN_BYTES = 40  # of a plan: its id, position, slot and row, 8 bytes each, and what else there is
_KEPT = 8  # pinned buffers of one size: entering requests take four, and two steps are under way


def most_prompt_tokens(config: SchedulerConfig, num_slots: int) -> int:
    """The most prompt tokens that a step can hold, with a pool of so many slots."""
    longest = config.context_length - 1
    if config.chunked_prefill_size > 0:
        budget = min(config.max_prefill_tokens, config.chunked_prefill_size)
    else:
        budget = max(config.max_prefill_tokens, longest)  # a longer prompt is the only one of its step
    return min(budget, config.max_running_requests * longest, num_slots)


def prompt_sizes(limit: int) -> list[int]:
    """Prompt tokens of the steps to try before the first request: powers of two, and the limit itself.

    Powers of two from 1 on run every tile of the prefill kernel, whatever the query heads of a KV head.
    """
    sizes = [1 << n for n in range(limit.bit_length()) if 1 << n < limit]
    return [*sizes, limit]


def padding_prompts(num_tokens: int, longest: int) -> StepPlan:
    """A plan of prompts of `num_tokens` tokens in all, each of up to `longest`, which samples one token.

    All of them lie in padding row 0 and slot 0.
    """
    lens = np.full(-(-num_tokens // longest), longest, np.int32)
    lens[-1] = num_tokens - longest * (len(lens) - 1)
    nowhere, zeros = np.zeros(len(lens), np.int32), np.zeros(num_tokens, np.int32)
    none, first = np.zeros(0, np.int32), np.zeros(1, np.int32)
    nobody = {
        field.name: np.zeros(int(field.name.endswith("indptr")), _DTYPES[str(field.type)])
        for field in fields(EnteringRows)
    }
    return StepPlan(
        step_id=0,
        decode_rows=none,
        entering=EnteringRows(**nobody),
        prefill=PrefillChunks(nowhere, nowhere, lens, np.arange(len(lens)) == len(lens) - 1, zeros, zeros),
        grants=PageGrants(none, none, none),
        sample_rows=first,
        num_generated=first,
        needs_eager=np.zeros(1, np.bool_),
    )


def pin_buffers(num_tokens: int) -> None:
    """Leave pinned memory of every size that steps of up to `num_tokens` prompt tokens use in torch's cache.

    Asking the driver for such memory can wait for the device. torch rounds sizes up to powers of two.
    """
    largest = num_tokens * _TOKEN_BYTES
    sizes = [1 << n for n in range(9, largest.bit_length() + 1)]
    kept = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes for _ in range(_KEPT)]
    del kept


def with_bar(items: list[_T], title: str, progress: bool) -> Iterator[_T]:
    """Yield the items, with a bar on standard error that counts them."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not progress) as bar:
        yield from bar.track(items)
