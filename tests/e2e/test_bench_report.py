"""`bench sweep` and `bench compare` against a scripted server; the page as a real browser sees it."""

from __future__ import annotations

import argparse
import html.parser
import json
import math
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from phalanx.bench import compare, sweep
from phalanx.bench.errors import BenchError
from phalanx.bench.report_page import show
from tests.e2e.server_harness import PATIENCE_S
from tests.e2e.sse_server import Reply, json_reply, serving, steady
from tests.e2e.test_bench_client import Words

CHROMIUM = shutil.which("chromium")
DATA = (
    "--dataset-name",
    "random",
    "--random-input-len",
    "8",
    "--random-output-len",
    "4",
    "--warmup-requests",
    "0",
)


def parse(module: Any, *argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    module.add_arguments(parser)
    return parser.parse_args([*DATA, *argv])


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


# On a busy machine the events of an answer may be read at once, and there is no time between them: such a run
# is repeated with longer ones.
INTERVALS_MS = (2.0, 50.0, 1000.0)


def has_gaps(path: Path) -> bool:
    """Whether every run has measured some time between tokens."""
    return all(line["median_itl_ms"] is not None for line in lines_of(path))


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A sweep over three concurrencies, with some failures whose text tries to break the page."""
    folder = tmp_path_factory.mktemp("sweep")

    argv = ["--concurrencies", "4", "1", "2", "--num-prompts", "12"]
    argv += ["--goodput", "e2el:60000", "--server-metrics", "--header", "X-Key=s3cret"]
    argv += ["--output-file", str(folder / "out.jsonl"), "--report", str(folder / "report.html")]
    for interval_ms in INTERVALS_MS:
        (folder / "out.jsonl").unlink(missing_ok=True)

        def respond(path: str, body: dict, nth: int, interval_ms: float = interval_ms) -> Reply:
            error = json_reply({"error": "</script><b>no</b>"}, status=500)
            return error if nth == 3 else steady(4, interval_ms)

        with serving(respond) as server:
            server.gauges = (2, 1)
            server.info |= {
                "host_time_between_steps_ms": {"mean": 0.25, "p99": 1.5},
                "kv_indices_backend": "<i>",
            }
            args = parse(sweep, "--base-url", server.url, *argv)
            assert sweep.run(args, lambda name: Words(), settle_s=0.0) == 0
        if has_gaps(folder / "out.jsonl"):
            break
    return folder / "report.html", lines_of(folder / "out.jsonl")


class Page(html.parser.HTMLParser):
    """Cells by (run, field), text by id, and the number of charts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.cells: dict[tuple[int, str], str] = {}
        self.by_id: dict[str, str] = {}
        self.num_charts = 0
        self.tags: set[str] = set()
        self._cell: tuple[int, str] | None = None
        self._id: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.add(tag)
        self.num_charts += tag == "svg"
        self._cell = (int(found["data-run"] or 0), str(found["data-field"])) if "data-run" in found else None
        self._id = found.get("id") if tag in ("script", "p", "pre") else None
        for name in ("src", "href", "xlink:href"):
            # A chart's parts refer to each other; nothing else may be referred to.
            assert (found.get(name) or "#").startswith("#"), (tag, found)

    def handle_data(self, data: str) -> None:
        if self._cell is not None:
            self.cells[self._cell] = data
        if self._id:
            self.by_id[self._id] = self.by_id.get(self._id, "") + data

    def handle_endtag(self, tag: str) -> None:
        self._cell = self._id = None


def assert_page_shows(text: str, lines: list[dict[str, Any]]) -> None:
    page = Page(text)
    assert page.num_charts == 5
    assert json.loads(page.by_id["runs"]) == lines
    fields = {field for _, field in page.cells}
    assert {"request_throughput", "p99_ttft_ms", "median_itl_ms", "failed", "request_goodput"} <= fields
    assert len(page.cells) == 3 * len(fields)
    for (run, field), shown in page.cells.items():
        assert shown == show(lines[run][field]), field
    config = json.loads(page.by_id["config"])
    assert config == lines[0]["config"]
    assert (config["num_prompts"], config["max_concurrency"]) == (12, 1)
    assert "b" not in page.tags  # what a server answered stays text


def test_sweep_runs_every_point_and_writes_the_page(swept: tuple[Path, list[dict[str, Any]]]) -> None:
    path, lines = swept
    assert [(line["sweep"]["value"], line["max_concurrency"]) for line in lines] == [(1, 1), (2, 2), (4, 4)]
    assert [line["completed"] for line in lines] == [11, 12, 12]
    assert [line["peak_requests_in_flight"] for line in lines] == [1, 2, 4]
    text = path.read_text()
    assert_page_shows(text, lines)
    assert "s3cret" not in text
    assert text.count("<td>0.25</td><td>1.50</td><td>&lt;i&gt;</td>") == 3
    # 11 of 12 is under 99%.
    knee = "Knee: none, concurrency 1, the lowest tried, misses the targets (e2el <= 60000 ms)"
    assert Page(text).by_id["knee"] == knee


def test_the_page_renders_in_a_browser(swept: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine")
    path, lines = swept
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync"
    flags += " --disable-background-networking --disable-component-update --disable-dev-shm-usage"
    command = [CHROMIUM, *flags.split(), f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr"]
    command += ["--v=0", "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE_S)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "CONSOLE" not in done.stderr, done.stderr[-2000:]
    assert_page_shows(done.stdout, lines)


def test_console_errors_would_be_seen(tmp_path: Path) -> None:
    """The check above can fail: a page that breaks its own policy is caught by it."""
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine")
    page = tmp_path / "bad.html"
    page.write_text("<!DOCTYPE html><script>console.error('broken')</script>")
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync"
    flags += " --disable-background-networking --disable-component-update --disable-dev-shm-usage"
    command = [CHROMIUM, *flags.split(), f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr"]
    command += ["--v=0", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE_S)
    assert "CONSOLE" in done.stderr


def test_summary_knee_and_json_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--rates", "100", "200", "--num-prompts", "5", "--goodput", "e2el:60000", "--plot"]
    argv += ["--output-file", str(tmp_path / "o"), "--report", str(tmp_path / "r.html")]
    for interval_ms in INTERVALS_MS:
        (tmp_path / "o").unlink(missing_ok=True)
        capsys.readouterr()
        with serving(lambda path, body, nth, interval_ms=interval_ms: steady(4, interval_ms)) as server:
            args = parse(sweep, "--base-url", server.url, *argv)
            assert sweep.run(args, lambda name: Words(), settle_s=0.0) == 0
        if has_gaps(tmp_path / "o"):
            break
    # Each point has a seed, and so prompts, of its own.
    texts = [body["text"] for path, body in server.requests]
    assert texts[:5] != texts[5:]
    lines = capsys.readouterr().out.splitlines()
    knee = next(number for number, text in enumerate(lines) if text.startswith("Knee: "))
    assert lines[knee].startswith("Knee: rate 200 or above: it is the last one tried")
    # One plot each for TTFT and ITL, with a letter for each rate.
    assert [lines[knee + 1], lines[knee + 17]] == ["median TTFT (ms)", "median ITL (ms)"]
    assert lines[knee + 16].split() == lines[knee + 32].split() == ["a", "100", "b", "200"]
    assert knee + 33 == len(lines) - 1
    summary = json.loads(lines[-1])
    assert (summary["sweep"], summary["knee"], summary["knee_first_bad"]) == ("rate", 200.0, None)
    assert [point["value"] for point in summary["points"]] == [100.0, 200.0]


def test_a_point_without_a_success_ends_with_exit_code_1(tmp_path: Path) -> None:
    with serving(lambda path, body, nth: json_reply({"error": "no"}, status=500)) as server:
        argv = ["--base-url", server.url, "--rates", "100", "--num-prompts", "2"]
        argv += ["--output-file", str(tmp_path / "o"), "--report", str(tmp_path / "r.html")]
        assert sweep.run(parse(sweep, *argv), lambda name: Words(), settle_s=0.0) == 1
    assert "2 x HTTP 500: no" in (tmp_path / "r.html").read_text()


@pytest.mark.parametrize("option", ["--output-file", "--report"])
def test_a_file_that_cannot_be_written_is_refused_before_the_load(tmp_path: Path, option: str) -> None:
    paths = {"--output-file": str(tmp_path / "o"), "--report": str(tmp_path / "r.html")}
    paths[option] = str(tmp_path / "none" / "x")
    with serving(lambda path, body, nth: steady(2, 0)) as server:
        argv = ["--base-url", server.url, "--rates", "100", "--num-prompts", "2"]
        with pytest.raises(BenchError, match=f"{option} .*: cannot be written: No such file") as caught:
            sweep.run(
                parse(sweep, *argv, *(text for pair in paths.items() for text in pair)),
                lambda name: Words(),
                settle_s=0.0,
            )
        urls = ["--base-url-a", server.url, "--base-url-b", server.url]
        with pytest.raises(BenchError, match=r"--output-file .*: cannot be written"):
            compare.run(parse(compare, *urls, "--output-file", str(tmp_path)), lambda name: Words())
        assert server.num_accepted == 0
    assert caught.value.exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_that_breaks_off_still_shows_what_it_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def respond(path: str, body: dict, nth: int) -> Reply:
        return steady(2, 0) if nth < 4 else json_reply({"error": "dead"}, status=500)

    with serving(respond) as server:
        argv = ["--base-url", server.url, "--rates", "100", "200", "--num-prompts", "3"]
        argv += ["--output-file", str(tmp_path / "o"), "--report", str(tmp_path / "r.html")]
        args = parse(sweep, *argv, "--warmup-requests", "1")
        with pytest.raises(BenchError, match="warm-up failed: HTTP 500: dead"):
            sweep.run(args, lambda name: Words(), settle_s=0.0)
    captured = capsys.readouterr()
    assert [point["value"] for point in json.loads(captured.out.splitlines()[-1])["points"]] == [100.0]
    assert "ended early, after 1 of 2 runs" in captured.err
    assert json.loads(Page((tmp_path / "r.html").read_text()).by_id["runs"]) == lines_of(tmp_path / "o")


def test_two_servers_are_measured_in_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    order: list[str] = []

    def respond(name: str, interval_ms: float) -> Any:
        def answer(path: str, body: dict, nth: int) -> Reply:
            order.append(name)
            return steady(4, interval_ms)

        return answer

    with serving(respond("A", 1)) as a, serving(respond("B", 60)) as b:
        argv = ["--base-url-a", a.url, "--base-url-b", b.url, "--repeats", "3", "--num-prompts", "4"]
        argv += ["--output-file", str(tmp_path / "o"), "--plot"]
        assert compare.run(parse(compare, *argv), lambda name: Words(), settle_s=0.0) == 0
        assert [body["text"] for _, body in a.requests] == [body["text"] for _, body in b.requests]
    assert order == [side for side in "ABBAAB" for _ in range(4)]
    assert [line["compare"] for line in lines_of(tmp_path / "o")][:2] == [
        {"pair": 0, "side": "A"},
        {"pair": 0, "side": "B"},
    ]
    out = capsys.readouterr().out
    assert "\nB/A, logarithmic\nrequest_throughput " in out
    (only,) = json.loads(out.splitlines()[-1])["comparisons"]
    # Whose figures are whose: no answer of B comes within 240 ms, and a ratio is B's over A's.
    runs = {side: [x for x in lines_of(tmp_path / "o") if x["compare"]["side"] == side] for side in "AB"}
    assert all(line["mean_e2e_latency_ms"] >= 240 for line in runs["B"])
    for name in ("mean_e2e_latency_ms", "request_throughput"):
        logs = [math.log(b[name] / a[name]) for a, b in zip(runs["A"], runs["B"], strict=True)]
        assert only["ratios"][name]["ratio"] == pytest.approx(math.exp(sum(logs) / 3), rel=1e-3)
