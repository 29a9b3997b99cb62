"""The printed table, in SGLang's layout."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from phalanx.bench.client_load import ClientLoad
from phalanx.bench.distribution import Distribution
from phalanx.bench.metrics import Metrics
from phalanx.bench.server_figures import ServerFigures

_WIDTH = 50
_MAX_CAUSES = 10


def format_table(
    args: argparse.Namespace, metrics: Metrics, client: ClientLoad, server: ServerFigures
) -> str:
    """Return the result as SGLang's client prints it, then what that leaves out (failures, delays, sources).

    A figure that was not measured prints as n/a.
    """
    lines = [_rule(" Serving Benchmark Result ", "=")]
    lines += _summary_lines(args, metrics, server.accept_length)
    lines += _goodput_lines(metrics)
    sections = (
        ("End-to-End Latency", "E2E Latency", metrics.e2e),
        ("Time to First Token", "TTFT", metrics.ttft),
        ("Time per Output Token (excl. 1st token)", "TPOT", metrics.tpot),
        ("Inter-Token Latency", "ITL", metrics.itl),
    )
    for title, name, distribution in sections:
        lines.append(_rule(title, "-"))
        lines += _latency_lines(name, distribution)
    if args.cache_report:
        lines += _cache_lines(metrics)
    lines += _over_time_lines(metrics)
    lines += _steady_lines(metrics)
    lines += _server_lines(server)
    lines += _delivery_lines(args, metrics)
    lines += _client_lines(client)
    lines += _count_lines(metrics)
    lines += _failure_lines(metrics)
    lines.append("=" * _WIDTH)
    return "\n".join(lines)


def _summary_lines(args: argparse.Namespace, m: Metrics, accept_length: float | None) -> Iterator[str]:
    yield _row("Backend:", args.backend)
    yield _row("Traffic request rate:", str(args.request_rate))
    yield _row("Max request concurrency:", args.max_concurrency or "not set")
    yield _row("Successful requests:", m.num_completed)
    yield _row("Benchmark duration (s):", m.duration_s)
    yield _row("Total input tokens:", m.total_input)
    yield _row("Total input text tokens:", m.total_input)
    yield _row("Total generated tokens:", m.total_output)
    yield _row("Total generated tokens (retokenized):", m.total_output_retokenized)
    yield _row("Request throughput (req/s):", m.rate(m.num_completed))
    yield _row("Input token throughput (tok/s):", m.rate(m.total_input))
    yield _row("Output token throughput (tok/s):", m.rate(m.total_output))
    yield _row("Peak output token throughput (tok/s):", m.peak_output_tokens_per_s)
    yield _row("Peak concurrent requests:", m.peak_concurrent_requests)
    yield _row("Total token throughput (tok/s):", m.rate(m.total_input + m.total_output))
    yield _row("Concurrency:", m.concurrency)
    if accept_length:
        yield _row("Accept length:", accept_length)


def _goodput_lines(m: Metrics) -> Iterator[str]:
    if m.goodput is None:
        return
    yield _rule("Goodput", "-")
    yield _row("SLOs (ms):", " ".join(f"{name}:{slo:g}" for name, slo in m.goodput.slos_ms.items()))
    yield _row("Request goodput (req/s):", m.goodput.requests_per_s)
    yield _row("SLO attainment (%):", m.goodput.attainment * 100)
    for name, share in m.goodput.attainment_by_metric.items():
        yield _row(f"{name.upper()} SLO attainment (%):", share * 100)


def _latency_lines(name: str, d: Distribution) -> Iterator[str]:
    for figure, value in (
        ("Mean", d.mean),
        ("Median", d.p50),
        ("P90", d.p90),
        ("P95", d.p95),
        ("P99", d.p99),
        ("Max", d.max),
    ):
        yield _row(f"{figure} {name} (ms):", value)


def _cache_lines(m: Metrics) -> Iterator[str]:
    rate = m.cache_hit_rate
    yield _rule("Cache Hit Details", "-")
    yield _row("Total prompt tokens:", m.total_input_server)
    yield _row("Total cached tokens:", m.total_cached)
    yield _row("Cache hit rate:", None if rate is None else f"{100 * rate:.1f}%")


def _over_time_lines(m: Metrics) -> Iterator[str]:
    yield _rule("Over Time", "-")
    for name, d in (("requests in flight", m.in_flight), ("output tok/s (1 s)", m.output_rate)):
        for figure, value in (
            ("Median", d.p50),
            ("P90", d.p90),
            ("P95", d.p95),
            ("P99", d.p99),
            ("Max", d.max),
        ):
            yield _row(f"{figure} {name}:", value)


def _steady_lines(m: Metrics) -> Iterator[str]:
    yield _rule("Steady State", "-")
    window = m.steady
    if window is None:
        yield f"none: {m.steady_reason}"
        return
    yield _row("Window (s from the start):", f"{window.begin_s:.2f} - {window.end_s:.2f}")
    yield _row("Detected by:", window.rule)
    yield _row("Requests ended in it:", window.num_finished)
    yield _row("Steady request throughput (req/s):", window.requests_per_s)
    yield _row("Steady output throughput (tok/s):", window.output_tokens_per_s)
    yield _row("Steady mean requests in flight:", window.mean_in_flight)


def _server_lines(server: ServerFigures) -> Iterator[str]:
    """What the server says of its own steps, where it says anything."""
    if server.host_mean_ms is None and server.host_p99_ms is None and server.kv_indices_backend is None:
        return
    yield _rule("Server", "-")
    yield _row("Mean host time between steps (ms):", server.host_mean_ms)
    yield _row("P99 host time between steps (ms):", server.host_p99_ms)
    yield _row("KV-indices backend:", server.kv_indices_backend)


def _delivery_lines(args: argparse.Namespace, m: Metrics) -> Iterator[str]:
    """Was the load what was asked for?"""
    yield _rule("Load as Sent", "-")
    yield _row("Median schedule delay (ms):", m.schedule_delay.p50)
    yield _row("P99 schedule delay (ms):", m.schedule_delay.p99)
    yield _row("Max schedule delay (ms):", m.schedule_delay.max)
    if args.max_concurrency:
        yield _row("Median wait for a slot in it (ms):", m.slot_wait.p50)
        yield _row("P99 wait for a slot in it (ms):", m.slot_wait.p99)


def _client_lines(client: ClientLoad) -> Iterator[str]:
    """Could the client keep up?"""
    yield _rule("Client", "-")
    yield _row("Client processes:", len(client.processes))
    yield _row("Connections opened:", client.num_connections)
    if client.num_resent:
        yield _row("Sent again (idle connection closed):", client.num_resent)
    share = client.worst("cpu_share")
    yield _row("Busiest process (% of one core):", None if share is None else 100 * share)
    yield _row("P99 event-loop lag (ms):", client.worst("lag_p99_ms"))
    yield _row("Max event-loop lag (ms):", client.worst("lag_max_ms"))
    if len(client.processes) > 1:
        for number, process in enumerate(client.processes):
            share = process.cpu_share
            shown = "n/a" if share is None else f"{100 * share:.0f}% of a core"
            yield f"  process {number}: {process.num_requests} requests, {process.num_pieces} pieces, {shown}"
    if client.bottleneck is None:
        yield _row("Client was the bottleneck:", "no")
    else:
        yield f"THE CLIENT WAS THE BOTTLENECK: {client.bottleneck}"
        yield "  (give it cores of its own, or more --client-processes)"


def _count_lines(m: Metrics) -> Iterator[str]:
    yield _rule("Token Counts", "-")
    yield _row("Input tokens asked of the dataset:", m.total_input_asked)
    yield _row("Input tokens counted by the server:", m.total_input_server)
    yield _row("Output lengths from the server (req):", m.count_sources["server"])
    yield _row("Output lengths retokenized (req):", m.count_sources["retokenized"])
    yield _row("ITL weights retokenized (req):", m.num_retokenized_itl)
    for name, count in m.unmeasured.items():
        yield _row(f"Successful requests without {name.upper()}:", count)
    if m.num_in_one_piece:
        yield _row("Streams that came in one piece (req):", m.num_in_one_piece)
        yield "  (something gathers the chunks on their way: no TPOT, no ITL)"


def _failure_lines(m: Metrics) -> Iterator[str]:
    yield _rule("Failures", "-")
    yield _row("Failed requests:", sum(m.failures.values()))
    for cause, count in list(m.failures.items())[:_MAX_CAUSES]:
        yield f"  {count} x {cause}"
    if len(m.failures) > _MAX_CAUSES:
        rest = list(m.failures.values())[_MAX_CAUSES:]
        yield f"  {sum(rest)} x {len(rest)} other causes"


def _rule(title: str, fill: str) -> str:
    return f"{title:{fill}^{_WIDTH}}"


def _row(label: str, value: str | int | float | None) -> str:
    if value is None:
        value = "n/a"
    shown = f"{value:<10.2f}" if isinstance(value, float) else f"{value:<10}"
    return f"{label:<40} {shown}"
