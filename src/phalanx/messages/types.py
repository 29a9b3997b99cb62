"""The messages between API workers and the engine. StepOutputs, the sixth, is in core.step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from phalanx.core.request import EngineRequest
from phalanx.core.step import StepOutputs


@dataclass(frozen=True, slots=True)
class Submit:
    """Worker to engine: run these sequences."""

    requests: tuple[EngineRequest, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """Worker to engine: end these streams. Ids that are unknown or already ended are ignored."""

    stream_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Control:
    """A question or order outside the token path; answered by a ControlReply with the same id.

    The engine knows "hello" (a worker's first word, answered by an EngineReady besides), "ping" (nothing),
    "stats" (counters), "flush_cache", "pause" (args: mode), "continue", "start_profile" (args: SGLang's) and
    "stop_profile". The launcher alone sends "worker_ended" (args: worker). "relay" is answered by the channel
    itself, which hands `Control(id, args["op"], args)` to every API worker; the workers know "abort" (args:
    rid, abort_all). args holds JSON-like values.
    """

    id: int
    op: str
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ControlReply:
    """The answer to a Control. ok: it was done; if not, data["message"] says why."""

    id: int
    ok: bool
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineReady:
    """Engine to worker: the model is loaded.

    info: facts known only after loading, JSON-like. The worker reads "pid" (the engine's process id, watched
    to notice its death at once) and "max_request_tokens" (the most tokens one request can hold), if present.
    """

    info: dict[str, Any] = field(default_factory=dict)


Message = Submit | Abort | Control | ControlReply | EngineReady | StepOutputs
