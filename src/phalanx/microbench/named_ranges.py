"""Named ranges around the phases of a step, for as long as somebody profiles.

The engine's own code knows nothing of them: while `named_ranges` is open, methods of the objects at hand are
replaced by ones that open a range around the same call, and put back afterwards. A process that is not being
profiled pays nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch.profiler import record_function

PREFIX = "phalanx: "  # tells our ranges in a trace from PyTorch's own

# Ranges of the thread that runs the loop.
STEP, PLAN, LAUNCH, READ, APPLY = "step", "plan", "launch", "read", "apply"
UPLOAD, ENTER, REPLAY = "upload", "enter rows", "graph replay"
# The whole of a step's work on a CPU engine, on the engine's own thread.
ENGINE = "engine"

Point = tuple[Any, str, str]  # owner (object, class or module), attribute, name of the range


@contextlib.contextmanager
def named_ranges(worker: Any) -> Iterator[None]:
    """Name what the worker, its engine and the model's layers do, until the block ends.

    worker: a `runtime.worker.Worker` over an `engine.Engine` or `engine.CudaEngine`.

    Raises AttributeError if something that should be named is not there.
    """
    points = [*_loop_points(worker), *_engine_points(worker._engine), *_layer_points()]
    with contextlib.ExitStack() as undo:
        for owner, attribute, name in points:
            undo.enter_context(_named(owner, attribute, name))
        yield


def _loop_points(worker: Any) -> list[Point]:
    from phalanx.engine.engine import StepHandle
    from phalanx.engine.sampled import CudaHandle

    return [
        (worker, "step", STEP),
        (worker.scheduler, "plan", PLAN),
        (worker._engine, "launch", LAUNCH),
        (worker.scheduler, "apply", APPLY),
        (StepHandle, "result", READ),
        (CudaHandle, "result", READ),
    ]


def _engine_points(engine: Any) -> list[Point]:
    from phalanx.engine import cuda

    common = [
        (engine._batches, "copy", UPLOAD),
        (engine._batches._sampling, "enter", ENTER),
        (engine._batches, "advance", "step_prep"),
        (engine._batches._rows, "grant", "step_prep"),
        (engine._batches._rows, "store_prompt", "step_prep"),
        (engine._batches._rows, "store_sampled", "sampling"),
        (engine._attn, "begin", "attention"),
        (engine._attn, "forward", "attention"),
        (engine._model, "forward", "model"),
        (engine._model, "logits", "head"),
    ]
    if isinstance(engine, cuda.CudaEngine):
        return [
            *common,
            (engine._graphs, "replay", REPLAY),
            (engine._eager_sampler, "sample", "sampling"),
            (cuda, "sample", "sampling"),
        ]
    return [*common, (engine, "_run", ENGINE), (engine._sampler, "sample", "sampling")]


def _layer_points() -> list[Point]:
    from phalanx.layers import mlp
    from phalanx.layers.embedding import Embedding
    from phalanx.layers.linear import Linear
    from phalanx.layers.rmsnorm import RMSNorm
    from phalanx.layers.rope import RotaryEmbedding
    from phalanx.models import decoder

    return [
        (Linear, "__call__", "gemm"),
        (Linear, "into", "gemm"),
        (RMSNorm, "__call__", "norm"),
        (RMSNorm, "fused", "norm"),
        (RMSNorm, "add_to", "norm"),
        (Embedding, "__call__", "embedding"),
        (RotaryEmbedding, "tables", "rope"),
        (decoder, "rope", "rope"),
        (decoder, "apply_rope", "rope"),
        (decoder, "store_kv", "kv store"),
        (mlp.GatedMLP, "__call__", "activation"),  # less the two products inside it
        (mlp, "silu_mul", "activation"),
    ]


@contextlib.contextmanager
def _named(owner: Any, attribute: str, name: str) -> Iterator[None]:
    """Replace a method or function by a call of it in a range."""
    own = attribute in vars(owner)
    before = vars(owner)[attribute] if own else None
    setattr(owner, attribute, _in_range(getattr(owner, attribute), PREFIX + name))
    try:
        yield
    finally:
        if own:
            setattr(owner, attribute, before)
        else:
            delattr(owner, attribute)


def _in_range(real: Callable[..., Any], name: str) -> Callable[..., Any]:
    def named(*args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            return real(*args, **kwargs)

    return named
