"""Which steps of a CUDA engine become graphs."""

from __future__ import annotations

from phalanx.config.groups import Settings
from phalanx.engine.buckets import MixedShapes, decode_buckets, free_tokens
from phalanx.engine.warm_up import most_prompt_tokens


def captured_steps(settings: Settings, num_slots: int) -> tuple[list[int], MixedShapes]:
    """Sizes of decode batches, ascending, and mixed steps that are captured; none without graphs.

    Decode batches up to the first size that holds --cuda-graph-max-bs. Mixed steps only where the graph
    itself prepares what attention reads.

    num_slots: of the KV pool, page 0 left out.
    """
    scheduler, engine = settings.scheduler, settings.engine
    most_rows = engine.cuda_graph_max_bs if engine.cuda_graph else 0
    buckets = decode_buckets(scheduler.max_running_requests)
    largest = next((bucket for bucket in buckets if bucket >= most_rows), buckets[-1]) if most_rows else 0
    captured = [bucket for bucket in buckets if bucket <= largest]
    shapes = MixedShapes(
        captured if engine.prepares_inside else [],
        free_tokens=free_tokens(settings.model, engine.dtype),
        most_tokens=most_prompt_tokens(scheduler, num_slots),
    )
    return captured, shapes
