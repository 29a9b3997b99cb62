"""A request's numbers, packed once when it arrives, so that a step unpacks all that enter with one call."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from phalanx.core.request import EngineRequest
from phalanx.core.sampling_params import SamplingParams
from phalanx.core.step import EnteringRows, Int64
from phalanx.scheduler.queue import Waiting
from phalanx.scheduler.ragged import indptr_of

ALWAYS_EAGER = 2**31 - 1
_INT32_MAX = 2**31 - 1
_FLOAT32_MAX = float(np.finfo(np.float32).max)

_FIELDS = (
    ("stream_id", "q"),
    ("seed", "q"),
    ("prompt_len", "i"),
    ("max_new_tokens", "i"),
    ("num_pages", "i"),
    ("eager_until", "i"),
    ("top_k", "i"),
    ("min_new_tokens", "i"),
    ("num_stop_ids", "i"),
    ("num_bias", "i"),
    ("temperature", "f"),
    ("top_p", "f"),
    ("min_p", "f"),
    ("frequency_penalty", "f"),
    ("presence_penalty", "f"),
    ("repetition_penalty", "f"),
)
_PACK = struct.Struct("=" + "".join(code for _, code in _FIELDS))
_RECORD = np.dtype([(name, {"q": "i8", "i": "i4", "f": "f4"}[code]) for name, code in _FIELDS])

Records = npt.NDArray[np.void]


def pack(request: EngineRequest, max_new_tokens: int, num_pages: int) -> bytes:
    """The record of a request: `max_new_tokens` cut to the context, and the pages that it reserves."""
    s = request.sampling
    greedy = s.is_greedy
    eager_until = 0  # a prompt without output samples a token too, but nobody reads it
    if max_new_tokens > 0:
        eager = request.logprobs is not None or _needs_eager(s, greedy)
        eager_until = ALWAYS_EAGER if eager else min(s.min_new_tokens, max_new_tokens)
    return _PACK.pack(
        request.stream_id,
        s.sampling_seed,
        len(request.input_ids),
        max_new_tokens,
        num_pages,
        eager_until,
        min(s.top_k, _INT32_MAX),
        min(s.min_new_tokens, max_new_tokens),
        len(request.stop_ids),
        len(s.logit_bias),
        0.0 if greedy else min(s.temperature, _FLOAT32_MAX),
        s.top_p,
        s.min_p,
        s.frequency_penalty,
        s.presence_penalty,
        s.repetition_penalty,
    )


def unpack(waiting: Sequence[Waiting]) -> Records:
    """[k] records with the fields of `_FIELDS`."""
    return np.frombuffer(b"".join([w.packed for w in waiting]), dtype=_RECORD)


def device_columns(rows: Int64, records: Records, requests: Sequence[EngineRequest]) -> EnteringRows:
    """What the device has to know about these requests, in the order of `rows` ([k])."""
    stop_ids: list[int] = []
    if records["num_stop_ids"].any():
        stop_ids = [token for r in requests for token in r.stop_ids]
    bias: list[tuple[int, float]] = []
    if records["num_bias"].any():
        bias = [item for r in requests for item in r.sampling.logit_bias.items()]
    return EnteringRows(
        rows=rows.astype(np.int32),
        temperature=records["temperature"].copy(),
        top_p=records["top_p"].copy(),
        top_k=records["top_k"].copy(),
        min_p=records["min_p"].copy(),
        frequency_penalty=records["frequency_penalty"].copy(),
        presence_penalty=records["presence_penalty"].copy(),
        repetition_penalty=records["repetition_penalty"].copy(),
        min_new_tokens=records["min_new_tokens"].copy(),
        seed=records["seed"].copy(),
        prompt_lens=records["prompt_len"].copy(),
        stop_indptr=indptr_of(records["num_stop_ids"]),
        stop_ids=np.array(stop_ids, dtype=np.int32),
        bias_indptr=indptr_of(records["num_bias"]),
        bias_ids=np.array([token for token, _ in bias], dtype=np.int32),
        bias_values=np.array([value for _, value in bias], dtype=np.float32),
    )


def _needs_eager(s: SamplingParams, greedy: bool) -> bool:
    if s.frequency_penalty or s.presence_penalty or s.repetition_penalty != 1.0 or s.logit_bias:
        return True
    return not greedy and (s.top_k > 0 or s.top_p < 1.0 or s.min_p > 0.0)


NO_ENTERING = device_columns(np.zeros(0, dtype=np.int64), unpack(()), ())
