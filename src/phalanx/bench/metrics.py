"""The figures of a run, computed from outcomes with arrays. `docs/bench.md` draws each definition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from phalanx.bench.distribution import Distribution
from phalanx.bench.failures import count_causes
from phalanx.bench.parse import CountSource, Outcome
from phalanx.bench.steady import SteadyWindow, find_steady_window
from phalanx.bench.timeline import Timeline, make_timeline

_QUANTILES = np.linspace(0, 100, 101)


class TokenCounter(Protocol):
    """The one thing this module asks of a tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`."""


@dataclass(frozen=True, slots=True)
class Goodput:
    """How many requests met every latency target."""

    slos_ms: dict[str, float]
    requests_per_s: float
    attainment: float
    attainment_by_metric: dict[str, float]


@dataclass(frozen=True, slots=True)
class Metrics:
    """All figures of one run. Token and request totals are over successful requests only.

    Latencies are in ms. `in_flight` summarises the number of requests in flight at 2000 evenly spaced
    instants, `output_rate` the output tokens of each full second of the run (of the whole run, if that is
    shorter). `num_in_one_piece` streams of several tokens came whole at one instant: they have no TPOT.
    `quantiles_ms` holds 101 values per latency, from the minimum to the maximum.
    """

    num_sent: int
    num_completed: int
    failures: dict[str, int]
    unmeasured: dict[str, int]
    duration_s: float
    total_input: int
    total_input_asked: int
    total_input_server: int | None
    total_output: int
    total_output_retokenized: int
    count_sources: dict[str, int]
    num_retokenized_itl: int
    num_in_one_piece: int
    total_cached: int | None
    peak_output_tokens_per_s: float
    peak_concurrent_requests: int
    peak_in_flight: int
    concurrency: float
    e2e: Distribution
    ttft: Distribution
    tpot: Distribution
    itl: Distribution
    schedule_delay: Distribution
    slot_wait: Distribution
    in_flight: Distribution
    output_rate: Distribution
    timeline: Timeline
    steady: SteadyWindow | None
    steady_reason: str
    quantiles_ms: dict[str, list[float]]
    goodput: Goodput | None = None
    output_lens: list[int] = field(default_factory=list)
    itls: list[list[float]] = field(default_factory=list)

    @property
    def cache_hit_rate(self) -> float | None:
        """Cached prompt tokens / prompt tokens, by the server's counts; None where it does not give them."""
        if self.total_cached is None or not self.total_input_server:
            return None
        return self.total_cached / self.total_input_server

    def rate(self, total: float) -> float:
        """Return `total` per second of the run; 0 for an empty run."""
        return total / self.duration_s if self.duration_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Asked:
    """What the run asked for, per request, in the order of the requests.

    Attributes:
        prompt_lens: [n] int64, tokens of each prompt as sent (re-encoded when sent as text).
        asked_lens: [n] int64, tokens the dataset was asked to make.
        due, sent: [n] float64 seconds; NaN in `sent` where a request never reached a socket.
        slot_waits: [n] float64 seconds, or [0] where nothing limits concurrency.
    """

    prompt_lens: np.ndarray
    asked_lens: np.ndarray
    due: np.ndarray
    sent: np.ndarray
    slot_waits: np.ndarray


def compute_metrics(
    outcomes: Sequence[Outcome],
    asked: Asked,
    duration_s: float,
    tokenizer: TokenCounter,
    goodput_slos_ms: dict[str, float] | None = None,
    *,
    began: float | None = None,
    ramped_rate: bool = False,
) -> Metrics:
    """Compute every figure. Failed requests count in `failures` and nowhere else.

    Args:
        outcomes: one per request, in order.
        asked: the same requests as they were planned and sent.
        duration_s: first send to last response.
        tokenizer: counts the tokens of returned text (`total_output_retokenized`, and the output length where
            the server does not give it).
        goodput_slos_ms: targets by name (ttft, tpot, e2el), or None.
        began: `time.perf_counter` start of the run; None for the first request's start.
        ramped_rate: the request rate rose over the whole run.
    """
    good = [outcome for outcome in outcomes if outcome.success]
    rows = np.asarray([outcome.index for outcome in good], np.int64)
    retokenized = np.asarray(
        [len(tokenizer.encode(o.text, add_special_tokens=False)) for o in good], np.int64
    )
    sources, lens = _output_lens(good, retokenized)
    chunks = [
        _chunks(outcome, length, tokenizer) for outcome, length in zip(good, lens.tolist(), strict=True)
    ]
    itls = [_itl(times, tokens) for times, tokens in chunks]
    e2e = np.asarray([outcome.latency for outcome in good], np.float64)
    ttft = np.asarray([np.nan if o.ttft is None else o.ttft for o in good], np.float64)
    tpot = np.full(len(good), np.nan)
    several = (lens > 1) & ~np.isnan(ttft)
    # What came whole at one instant has a TTFT, but says nothing about the tokens after the first.
    at_once = several & np.asarray([outcome.in_one_piece for outcome in good], bool)
    paced = several & ~at_once
    tpot[paced] = (e2e - ttft)[paced] / (lens[paced] - 1)
    starts = np.asarray([outcome.start for outcome in good], np.float64)
    delays = (asked.sent - asked.due)[~np.isnan(asked.sent)]
    all_itls = np.concatenate([np.empty(0), *itls])
    if began is None:
        began = min((outcome.start for outcome in outcomes), default=0.0)
    timeline = make_timeline(outcomes, *_token_times(good, chunks, lens), began, duration_s)
    peak_in_flight = _peak_in_flight(outcomes)
    steady, steady_reason = find_steady_window(timeline, ramped_rate=ramped_rate)
    return Metrics(
        num_sent=len(outcomes),
        num_completed=len(good),
        failures=count_causes([o.failure for o in outcomes if o.failure is not None]),
        unmeasured={
            "ttft": int(np.isnan(ttft).sum()),
            "tpot": int(np.isnan(tpot).sum()),
            "itl": sum(not len(values) for values in itls),
        },
        duration_s=duration_s,
        total_input=int(asked.prompt_lens[rows].sum()),
        total_input_asked=int(asked.asked_lens[rows].sum()),
        total_input_server=_sum_if_all(o.num_prompt_tokens for o in good),
        total_output=int(lens.sum()),
        total_output_retokenized=int(retokenized.sum()),
        count_sources={source.value: sources.count(source) for source in CountSource},
        num_retokenized_itl=sum(outcome.event_tokens is None for outcome in good),
        num_in_one_piece=int(at_once.sum()),
        total_cached=_sum_if_all(o.num_cached_tokens for o in good),
        peak_output_tokens_per_s=_peak_tokens(timeline),
        peak_concurrent_requests=_peak_touched(starts, e2e),
        peak_in_flight=peak_in_flight,
        concurrency=float(e2e.sum()) / duration_s if duration_s > 0 else 0.0,
        e2e=Distribution.of_seconds(e2e),
        ttft=Distribution.of_seconds(ttft[~np.isnan(ttft)]),
        tpot=Distribution.of_seconds(tpot[~np.isnan(tpot)]),
        itl=Distribution.of_seconds(all_itls),
        schedule_delay=Distribution.of_seconds(delays),
        slot_wait=Distribution.of_seconds(asked.slot_waits),
        in_flight=_in_flight(timeline, peak_in_flight),
        output_rate=_output_rate(timeline),
        timeline=timeline,
        steady=steady,
        steady_reason=steady_reason,
        quantiles_ms=_quantiles({"e2e_latency": e2e, "ttft": ttft, "tpot": tpot, "itl": all_itls}),
        goodput=_goodput(e2e, ttft, tpot, lens, len(outcomes), duration_s, goodput_slos_ms or {}),
        output_lens=_by_request(len(outcomes), rows, lens.tolist(), 0),
        itls=_by_request(len(outcomes), rows, [values.tolist() for values in itls], []),
    )


def _output_lens(good: list[Outcome], retokenized: np.ndarray) -> tuple[list[CountSource], np.ndarray]:
    sources = [CountSource.RETOKENIZED if o.num_output_tokens is None else CountSource.SERVER for o in good]
    lens = [
        count if o.num_output_tokens is None else o.num_output_tokens
        for o, count in zip(good, retokenized.tolist(), strict=True)
    ]
    return sources, np.asarray(lens, np.int64)


def _chunks(outcome: Outcome, length: int, tokenizer: TokenCounter) -> tuple[np.ndarray, np.ndarray]:
    """Return the arrivals of a stream's chunks and the tokens of each, 1 at least.

    Where the server did not say, each chunk's text is tokenized by itself and the counts are scaled to the
    whole answer's `length`: text cut into pieces has more tokens than in one. A chunk that gets none is
    joined to the next.
    """
    if outcome.event_tokens is not None:
        return _join_instants(outcome.event_times, outcome.event_tokens)
    counts = [len(tokenizer.encode(text, add_special_tokens=False)) for text in outcome.chunk_texts]
    so_far = np.cumsum(np.maximum(np.asarray(counts, np.int64), 1))
    so_far = np.maximum(np.rint(so_far * (length / so_far[-1])).astype(np.int64), 1)
    tokens = np.diff(so_far, prepend=0)
    return _join_instants(outcome.event_times[tokens > 0], tokens[tokens > 0])


def _join_instants(times: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Join chunks that came with one read: nothing was measured between them, least of all a gap of 0."""
    first = np.diff(times, prepend=-np.inf) > 0
    if first.all():
        return times, tokens
    return times[first], np.add.reduceat(tokens, np.flatnonzero(first))


def _itl(times: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Inter-token latencies: the gap before each chunk but the first, shared evenly by the chunk's tokens."""
    if len(times) < 2:
        return np.empty(0)
    return np.repeat(np.diff(times) / tokens[1:], tokens[1:])


def _token_times(
    good: list[Outcome], chunks: list[tuple[np.ndarray, np.ndarray]], lens: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return when output tokens came and how many each time.

    A chunk's tokens lie evenly in the gap before it; those of a first chunk, or of a whole answer, come at
    once.
    """
    times, counts = [np.empty(0)], [np.empty(0)]
    for outcome, (events, tokens), length in zip(good, chunks, lens.tolist(), strict=True):
        if len(events):
            spread = events[0] + np.cumsum(_itl(events, tokens))
            times += [events[:1], spread]
            counts += [tokens[:1], np.ones(len(spread))]
        else:
            times.append(np.asarray([outcome.end]))
            counts.append(np.asarray([length]))
    return np.concatenate(times), np.concatenate(counts)


def _peak_tokens(timeline: Timeline) -> float:
    """Most tokens in a 1 s bucket."""
    return float(timeline.tokens_per_second().max())


def _output_rate(timeline: Timeline) -> Distribution:
    """Output tokens/s over the full seconds of the run: its last, cut one would pull the figures down."""
    full = int(timeline.duration_s)
    if full:
        return Distribution.of(timeline.tokens_per_second()[:full])
    total = float(timeline.token_counts.sum())
    return (
        Distribution.of(np.asarray([total / timeline.duration_s]))
        if timeline.duration_s > 0
        else Distribution(0)
    )


def _in_flight(timeline: Timeline, peak: int) -> Distribution:
    """Requests in flight over time; their maximum is exact, the other figures are sampled."""
    sampled = Distribution.of(timeline.sampled_in_flight())
    return replace(sampled, max=float(peak)) if sampled.count else sampled


def _quantiles(seconds: dict[str, np.ndarray]) -> dict[str, list[float]]:
    """Return 101 quantiles of each, in ms; none where nothing was measured."""
    measured = {name: values[~np.isnan(values)] for name, values in seconds.items()}
    return {
        name: np.percentile(values * 1e3, _QUANTILES).round(4).tolist() if len(values) else []
        for name, values in measured.items()
    }


def _peak_touched(starts: np.ndarray, e2e: np.ndarray) -> int:
    """Most requests that touch one 1 s bucket (SGLang's figure: short requests are over-counted)."""
    if not len(starts):
        return 0
    first = np.floor(starts - starts.min()).astype(np.int64)
    last = np.floor(starts + e2e - starts.min()).astype(np.int64)
    change = np.zeros(int(last.max()) + 2, np.int64)
    np.add.at(change, first, 1)
    np.add.at(change, last + 1, -1)
    return int(np.cumsum(change).max())


def _peak_in_flight(outcomes: Sequence[Outcome]) -> int:
    """Most requests in flight at one instant, failed ones included."""
    if not outcomes:
        return 0
    edges = np.asarray([[o.start, o.end] for o in outcomes], np.float64)
    # An end at the same instant as a start comes first.
    order = np.lexsort((np.repeat([1, 0], len(edges)), edges.T.ravel()))
    change = np.repeat([1, -1], len(edges))[order]
    return int(np.cumsum(change).max(initial=0))


def _goodput(
    e2e: np.ndarray,
    ttft: np.ndarray,
    tpot: np.ndarray,
    lens: np.ndarray,
    num_sent: int,
    duration_s: float,
    slos_ms: dict[str, float],
) -> Goodput | None:
    """Count requests within every target.

    One token has no TPOT to miss. Of a stream that came whole at one instant only a bound of it is known: all
    tokens after the first took no longer than the request. What else is unmeasured meets no target.
    """
    if not slos_ms:
        return None
    bound = np.where(np.isnan(ttft), np.nan, e2e / np.maximum(lens - 1, 1))
    at_most = np.where(np.isnan(tpot), bound, tpot)
    observed_ms = {"ttft": ttft * 1e3, "tpot": np.where(lens <= 1, 0.0, at_most * 1e3), "e2el": e2e * 1e3}
    met = {name: observed_ms[name] <= slo for name, slo in slos_ms.items()}
    num_good = int(np.logical_and.reduce(list(met.values())).sum())
    share = {name: float(hits.sum()) / max(num_sent, 1) for name, hits in met.items()}
    per_s = num_good / duration_s if duration_s > 0 else 0.0
    return Goodput(dict(slos_ms), per_s, num_good / max(num_sent, 1), share)


def _sum_if_all(values: Any) -> int | None:
    found = list(values)
    return sum(found) if found and None not in found else None


def _by_request(num_requests: int, rows: np.ndarray, values: list[Any], missing: Any) -> list[Any]:
    out = [missing] * num_requests
    for row, value in zip(rows.tolist(), values, strict=True):
        out[row] = value
    return out
