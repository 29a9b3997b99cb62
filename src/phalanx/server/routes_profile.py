"""/start_profile and /stop_profile, with SGLang's fields."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse

from phalanx.core.errors import RequestError
from phalanx.messages import ControlReply
from phalanx.server.errors import decode_json, refuse_unsupported
from phalanx.server.response import read_body
from phalanx.server.state import ApiWorker

_UNSUPPORTED = ("profile_by_stage", "profile_stages", "merge_profiles")
# A trace is written between steps and may take long; the engine's death ends the wait at once.
_TIMEOUT_S = 3600.0
_MAX_STEP = 2**53


class ProfileBody(msgspec.Struct, kw_only=True):
    """POST /start_profile: record steps of the engine and write a chrome trace.

    output_dir: a folder on the server, by default $SGLANG_TORCH_PROFILER_DIR or the temporary folder.
    num_steps: it ends by itself after so many; else with /stop_profile. start_step: the number of the step to
    begin with. activities: CPU and GPU.
    """

    output_dir: str | None = None
    num_steps: int | None = None
    start_step: int | None = None
    activities: list[str] | None = None
    with_stack: bool | None = None
    record_shapes: bool | None = None
    profile_prefix: str | None = None
    profile_by_stage: Any = None
    profile_stages: Any = None
    merge_profiles: Any = None


_decoder = msgspec.json.Decoder(ProfileBody)


def add_profile_routes(router: APIRouter, worker: ApiWorker) -> None:
    """There is one engine, so one profile, whichever worker is asked."""

    @router.get("/start_profile", response_class=PlainTextResponse)
    @router.post("/start_profile", response_class=PlainTextResponse)
    async def start_profile(request: Request) -> PlainTextResponse:
        raw = await read_body(request.receive, worker.settings.server.max_body_bytes)
        body = decode_json(_decoder, raw) if raw else ProfileBody()
        refuse_unsupported(body, _UNSUPPORTED)
        _check_steps(body)
        args = {name: value for name, value in msgspec.structs.asdict(body).items() if value is not None}
        _check(await worker.engine.control("start_profile", args, _TIMEOUT_S))
        return PlainTextResponse("Start profiling.\n")

    @router.get("/stop_profile", response_class=PlainTextResponse)
    @router.post("/stop_profile", response_class=PlainTextResponse)
    async def stop_profile() -> PlainTextResponse:
        _check(await worker.engine.control("stop_profile", {}, _TIMEOUT_S))
        return PlainTextResponse("Stop profiling. The trace is written.\n")


def _check_steps(body: ProfileBody) -> None:
    """Numbers that no message to the engine could hold are no numbers of steps."""
    for name in ("num_steps", "start_step"):
        value = getattr(body, name)
        if value is not None and not 0 <= value < _MAX_STEP:
            raise RequestError(
                f"{name} must be in [0, {_MAX_STEP}), got {value}", param=name, code="invalid_value"
            )


def _check(reply: ControlReply) -> None:
    if not reply.ok:
        data = reply.data
        raise RequestError(
            data["message"], status=data.get("status", 400), param=data.get("param"), code=data.get("code")
        )
