"""What the GPU benchmarks share: results as JSON lines, timing by graph replays, batches of rows."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

HBM_BYTES_PER_S = 4.3e12  # what a large copy on an H200 moves


def read(results: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def add(results: Path, record: dict[str, Any]) -> None:
    with results.open("a") as file:
        print(json.dumps(record), file=file)


def median_and_range(figures: list[float | None], form: str = ".4g") -> str:
    """ "middle (lowest-highest)" of the figures that there are."""
    found = [figure for figure in figures if figure is not None]
    if not found:
        return "-"
    return f"{np.median(found):{form}} ({min(found):{form}}-{max(found):{form}})"


def device_facts() -> dict[str, str]:
    import torch
    import triton

    return {
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def dummy_llm(model: str, **more: Any) -> Any:
    """An `LLM` as all measurements of the seed's workload want it: dummy weights, ids alone, 4096 rows."""
    from phalanx.runtime.llm import LLM

    settings = {"context_length": 4096, "max_running_requests": 4096, **more}
    return LLM(
        model, load_format="dummy", skip_tokenizer_init=True, progress=False, random_seed=0, **settings
    )


def median_us(calls: list[Callable[[], object]], repeats: int) -> float:
    """Microseconds of one of the calls, from a CUDA graph that holds them all: the median over its replays.

    Without a GPU: of plain calls.
    """
    import torch

    for call in calls:
        call()
    replay = functools.partial(_all, calls)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replay()
        replay = graph.replay
    times = [_replay_ms(replay, torch.cuda.is_available()) for _ in range(repeats + 2)]
    return float(np.median(times[2:])) * 1e3 / len(calls)


def _all(calls: list[Callable[[], object]]) -> None:
    for call in calls:
        call()


def _replay_ms(replay: Callable[[], object], cuda: bool) -> float:
    import torch

    if not cuda:
        start = time.perf_counter()
        replay()
        return (time.perf_counter() - start) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


class DecodeRows:
    """One layer's K and V of rows of these lengths, in bf16, their pages scattered; a query for each row.

    lens: [bs]. num_q, num_kv, dim: query and KV heads, head_dim. Row i of the batch is row i of the table.
    """

    def __init__(
        self, lens: np.ndarray, num_q: int, num_kv: int, dim: int, page_size: int, device: str | None = None
    ) -> None:
        import torch

        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        pages = -(-lens // page_size)
        first = 1 + np.cumsum(pages) - pages
        pool = np.concatenate(([0], 1 + np.random.default_rng(5).permutation(int(pages.sum()))))
        pool = pool.astype(np.int32) * page_size
        table = torch.zeros(len(lens), int(pages.max()) * page_size, dtype=torch.int32)
        for row, (start, count) in enumerate(zip(first.tolist(), pages.tolist(), strict=True)):
            table[row, : count * page_size : page_size] = torch.from_numpy(pool[start : start + count])
        self.num_pages, self.page_size = len(pool), page_size
        shape = (len(pool) * page_size, num_kv, dim)
        self.k, self.v = (torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(2))
        self.q = torch.randn(len(lens), num_q, dim, dtype=torch.bfloat16, device=device)
        self.out = torch.empty_like(self.q)
        self.table = table.to(device)
        self.rows = torch.arange(len(lens), device=device)
        self.lens = torch.from_numpy(lens.astype(np.int32)).to(device)
        self.floor_us = float(lens.sum()) * num_kv * dim * 2 * 2 / HBM_BYTES_PER_S * 1e6

    def attend(self, **more: Any) -> Any:
        """`decode_attention` into `out`."""
        from phalanx.kernels import decode_attention

        args = (self.q, self.k, self.v, self.table, self.rows, self.lens)
        return decode_attention(*args, page_size=self.page_size, out=self.out, backend="triton", **more)
