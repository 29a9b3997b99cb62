"""The engine's stats as Prometheus text, under SGLang's names where it has them."""

from __future__ import annotations

from typing import Any

_COUNTERS = {
    "prompt_tokens_total": "prompt_tokens_total",
    "generation_tokens_total": "generated_tokens_total",
    "num_requests_total": "requests_total",
    "num_aborted_requests_total": "finished_abort_total",
}


def render(stats: dict[str, Any], *, model: str, max_running_requests: int) -> str:
    """Prometheus text of `Scheduler.stats`: of the whole server, whichever worker is asked."""
    total, held = stats.get("pages_total", 0), stats.get("pages_held", 0)
    page_size = stats.get("page_size", 0)
    gauges = {
        "num_running_reqs": stats.get("running", 0),
        "num_queue_reqs": stats.get("queued", 0),
        "num_used_tokens": held * page_size,
        "token_usage": held / total if total else 0.0,
        "max_total_num_tokens": total * page_size,
        "max_running_requests": max_running_requests,
    }
    escaped = model.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    labels = f'{{model_name="{escaped}"}}'
    lines = []
    for name, value in gauges.items():
        lines += [f"# TYPE sglang:{name} gauge", f"sglang:{name}{labels} {value}"]
    for name, key in _COUNTERS.items():
        lines += [f"# TYPE sglang:{name} counter", f"sglang:{name}{labels} {stats.get(key, 0)}"]
    return "\n".join(lines) + "\n"
