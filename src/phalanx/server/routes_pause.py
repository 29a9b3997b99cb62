"""POST /pause_generation and /continue_generation, with SGLang's modes."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request

from phalanx.core.errors import RequestError
from phalanx.server.errors import decode_json
from phalanx.server.response import read_body
from phalanx.server.state import ApiWorker

_MODES = ("abort", "in_place")


class PauseBody(msgspec.Struct, kw_only=True):
    """POST /pause_generation: run no step until /continue_generation; requests that come are queued.

    mode: "abort" ends what runs and waits (finish reason "abort"); "in_place" keeps it, to go on later.
    SGLang's "retract" is refused: rows cannot be put back into the queue yet.
    """

    mode: str = "abort"


_pause_decoder = msgspec.json.Decoder(PauseBody)


def add_pause_routes(router: APIRouter, worker: ApiWorker) -> None:
    """Pausing is the engine's: it holds for the requests of all workers, whichever is asked."""

    @router.post("/pause_generation", summary="Run no step until /continue_generation")
    async def pause_generation(request: Request) -> dict[str, str]:
        raw = await read_body(request.receive, worker.settings.server.max_body_bytes)
        body = decode_json(_pause_decoder, raw) if raw else PauseBody()
        if body.mode not in _MODES:
            raise RequestError(
                f"mode {body.mode!r} is not supported: {' or '.join(_MODES)}",
                param="mode",
                code="unsupported_parameter",
            )
        # The step in flight is finished first, however long it is.
        timeout_s = worker.settings.server.watchdog_timeout_s or None
        await worker.engine.control("pause", {"mode": body.mode}, timeout_s)
        return {"message": "Generation paused successfully.", "status": "ok"}

    @router.post("/continue_generation", summary="Go on after /pause_generation")
    async def continue_generation() -> dict[str, str]:
        await worker.engine.control("continue")
        return {"message": "Generation continued successfully.", "status": "ok"}
