"""Hand-made parts of step plans, for tests of sampling and engine without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from phalanx.core.sampling_params import SamplingParams
from phalanx.core.step import EnteringRows, LogprobPlan, PageGrants, PrefillChunks, StepPlan


def i32(values: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.asarray(values, np.int32)


def csr(lists: Sequence[Sequence[float]], dtype: type = np.int32) -> tuple[np.ndarray, np.ndarray]:
    indptr = np.concatenate([[0], np.cumsum([len(x) for x in lists])]).astype(np.int32)
    return indptr, np.asarray([v for x in lists for v in x], dtype)


def entering(
    rows: Sequence[int],
    params: Sequence[SamplingParams],
    prompt_lens: Sequence[int],
    stops: Sequence[Sequence[int]] | None = None,
) -> EnteringRows:
    def f32(name: str) -> np.ndarray:
        return np.asarray([getattr(p, name) for p in params], np.float32)

    stop_indptr, stop_ids = csr(stops if stops is not None else [()] * len(rows))
    bias_indptr, bias_ids = csr([list(p.logit_bias) for p in params])
    return EnteringRows(
        rows=i32(rows),
        temperature=np.asarray([0 if p.is_greedy else p.temperature for p in params], np.float32),
        top_p=f32("top_p"),
        top_k=i32([p.top_k for p in params]),
        min_p=f32("min_p"),
        frequency_penalty=f32("frequency_penalty"),
        presence_penalty=f32("presence_penalty"),
        repetition_penalty=f32("repetition_penalty"),
        min_new_tokens=i32([p.min_new_tokens for p in params]),
        seed=np.asarray([p.sampling_seed or 0 for p in params], np.int64),
        prompt_lens=i32(prompt_lens),
        stop_indptr=stop_indptr,
        stop_ids=stop_ids,
        bias_indptr=bias_indptr,
        bias_ids=bias_ids,
        bias_values=csr([list(p.logit_bias.values()) for p in params], np.float32)[1],
    )


@dataclass
class HandRequest:
    """One request as a hand-made scheduler sees it."""

    row: int
    prompt: list[int]
    params: SamplingParams
    stops: tuple[int, ...] = ()
    pages: list[int] = field(default_factory=list)
    prompt_done: int = 0
    num_generated: int = 0


class HandScheduler:
    """Makes plans step by step, with pages in scattered order; grants each page with its first token."""

    def __init__(self, num_pages: int, page_size: int, seed: int = 0) -> None:
        self.page_size = page_size
        self.free = np.random.default_rng(seed).permutation(np.arange(1, num_pages)).tolist()
        self.sequences: dict[int, HandRequest] = {}
        self.step_id = 0

    def add(
        self, row: int, prompt: Sequence[int], params: SamplingParams, stops: tuple[int, ...] = ()
    ) -> None:
        self.sequences[row] = HandRequest(row, list(prompt), params, stops)

    def plan(
        self,
        decode: Sequence[int] = (),
        chunks: Sequence[tuple[int, int]] = (),
        logprobs: LogprobPlan | None = None,
        needs_eager: bool = True,
    ) -> StepPlan:
        """decode: rows. chunks: (row, number of prompt tokens to run)."""
        grants: list[tuple[int, int, int]] = []
        for row in decode:
            s = self.sequences[row]
            self._grant(s, len(s.prompt) + s.num_generated - 1, grants)
        new = [self.sequences[row] for row, _ in chunks if self.sequences[row].prompt_done == 0]
        enter = entering(
            [s.row for s in new],
            [s.params for s in new],
            [len(s.prompt) for s in new],
            [s.stops for s in new],
        )
        starts, last, ids, slots = [], [], [], []
        for row, count in chunks:
            s = self.sequences[row]
            starts.append(s.prompt_done)
            for position in range(s.prompt_done, s.prompt_done + count):
                page = self._page(s, position // self.page_size)
                slots.append(page * self.page_size + position % self.page_size)
            ids.extend(s.prompt[s.prompt_done : s.prompt_done + count])
            s.prompt_done += count
            last.append(s.prompt_done == len(s.prompt))
        sampled = [*decode, *(row for (row, _), end in zip(chunks, last, strict=True) if end)]
        done = [self.sequences[row].num_generated for row in sampled]
        for row in sampled:
            self.sequences[row].num_generated += 1
        self.step_id += 1
        return StepPlan(
            step_id=self.step_id,
            decode_rows=i32(decode),
            entering=enter,
            prefill=PrefillChunks(
                rows=i32([row for row, _ in chunks]),
                starts=i32(starts),
                lens=i32([count for _, count in chunks]),
                is_last=np.asarray(last, bool),
                input_ids=i32(ids),
                slots=i32(slots),
            ),
            grants=PageGrants(*(i32(x) for x in (zip(*grants, strict=True) if grants else ([], [], [])))),
            sample_rows=i32(sampled),
            num_generated=i32(done),
            needs_eager=np.full(len(sampled), needs_eager),
            logprobs=logprobs,
        )

    def _page(self, s: HandRequest, number: int) -> int:
        while len(s.pages) <= number:
            s.pages.append(self.free.pop())
        return s.pages[number]

    def _grant(self, s: HandRequest, position: int, grants: list[tuple[int, int, int]]) -> None:
        number = position // self.page_size
        if number >= len(s.pages) or s.num_generated == 1:
            grants.append((s.row, number, self._page(s, number)))
