"""Whether a plan stays within the rows, pages and positions that there are."""

from __future__ import annotations

from phalanx.core.errors import EngineError
from phalanx.core.step import Int32, StepPlan


def check_plan(plan: StepPlan, *, num_rows: int, max_context: int, num_pages: int, page_size: int) -> None:
    """Raise EngineError for what does not fit.

    A wrong index would overwrite a neighbour on the CPU and kill the process on CUDA.
    """
    prefill, grants, step = plan.prefill, plan.grants, plan.step_id
    num_slots = num_pages * page_size
    for name, rows in (
        ("decode", plan.decode_rows),
        ("sampled", plan.sample_rows),
        ("entering", plan.entering.rows),
        ("granted", grants.rows),
        ("prompt", prefill.rows),
    ):
        _check_range(f"step {step}: {name} row", rows, 1, num_rows)
    _check_range(f"step {step}: page", grants.page_ids, 1, num_pages)
    _check_range(f"step {step}: page number", grants.page_index, 0, max_context)
    _check_range(f"step {step}: slot", prefill.slots, page_size, num_slots)
    _check_range(f"step {step}: chunk start", prefill.starts, 0, max_context)
    ends = prefill.starts + prefill.lens
    _check_range(f"step {step}: chunk end", ends, 1, max_context + 1)
    if not len(prefill.slots) == len(prefill.input_ids) == int(prefill.lens.sum()):
        raise EngineError(
            f"step {step}: prompt chunks of {int(prefill.lens.sum())} tokens in all carry "
            f"{len(prefill.input_ids)} ids and {len(prefill.slots)} slots"
        )
    if len(plan.sample_rows) != len(plan.decode_rows) + int(prefill.is_last.sum()):
        raise EngineError(f"step {step}: sample_rows does not list the decode rows and the last chunks")


def _check_range(what: str, values: Int32, low: int, end: int) -> None:
    if len(values) and (values.min() < low or values.max() >= end):
        bad = values[(values < low) | (values >= end)][0]
        raise EngineError(f"{what} {bad} is outside [{low}, {end})")
