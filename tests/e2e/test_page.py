"""GET /: served open and locked down, and what a real browser makes of it."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.e2e.chromium import PROGRAM, Page, browser
from tests.e2e.server_harness import PATIENCE_S, make_settings, write_byte_tokenizer
from tests.e2e.server_harness import Server as HarnessServer
from tests.e2e.server_harness import running as harness_running
from tests.e2e.serving import Server, running

needs_chromium = pytest.mark.skipif(PROGRAM is None, reason="no chromium on this machine")
KEY = "sésame-42"
FLAGS = ("--load-format", "dummy", "--device", "null", "--null-step-ms", "10", "--max-total-tokens", "65536")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HarnessServer]:
    """A fake engine that answers 'abcdef...', and an API key."""
    folder = write_byte_tokenizer(tmp_path_factory.mktemp("tok"))
    with harness_running(
        tmp_path_factory.mktemp("run"), make_settings(folder, api_key="sesame-42")
    ) as server:
        assert server.engine is not None
        server.engine.step_s = 0.01
        yield server


def test_every_file_of_the_page_is_open_and_says_what_it_may_do(guarded: HarnessServer) -> None:
    html = httpx.get(guarded.url + "/")
    assert html.status_code == 200 and html.headers["content-type"] == "text/html; charset=utf-8"
    found = re.findall(r'(?:src|href)="(page/[^"]+)"', html.text)
    assert found == ["page/style.css", "page/page.js"]
    files, seen = found, []
    while files:
        path = files.pop()
        reply = httpx.get(f"{guarded.url}/{path}")
        assert reply.status_code == 200, path
        kind = "javascript" if path.endswith(".js") else "css"
        assert reply.headers["content-type"] == f"text/{kind}; charset=utf-8"
        policy = reply.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert not re.search(r"https?://", reply.text), path
        seen.append(path)
        files += [f"page/{name}" for name in re.findall(r'from "\./([^"]+)"', reply.text)]
        files = [name for name in files if name not in seen]
    assert len(seen) == 6
    for path in (
        "/page/",
        "/page/nothing.js",
        "/page/../metrics",
        "/page/%2e%2e/page.py",
        "/metrics",
        "/docs",
    ):
        assert httpx.get(guarded.url + path).status_code == 401, path


def in_browser(folder: Path, url: str, visit: Callable[[Page], Awaitable[None]]) -> None:
    async def all_of_it() -> None:
        async with browser(folder) as page:
            await page.open(url)
            await visit(page)
            assert page.problems == []
            hosts = {urlsplit(u).netloc for u in page.urls if not u.startswith(("data:", "about:"))}
            assert hosts == {urlsplit(url).netloc}

    asyncio.run(all_of_it())


async def ask(page: Page, text: str, num_tokens: int) -> None:
    await page.run(f"document.getElementById('max-tokens').value = {num_tokens}")
    await page.run("document.getElementById('temperature').value = 0")
    await page.run("document.getElementById('prompt').focus()")
    await page.call("Input.insertText", text=text)
    await page.run("document.getElementById('send').click()")


def shown(element: str) -> str:
    return f"document.getElementById('{element}').textContent"


@needs_chromium
def test_figures_are_those_of_metrics(tmp_path: Path) -> None:
    async def visit(page: Page) -> None:
        await page.until(f"{shown('state')} === 'up'")
        assert await page.run(shown("model")) == "tiny-llama"
        thread = threading.Thread(target=load, args=(server,))
        thread.start()
        await page.until(f"{shown('running')} === '5'")
        await page.until("Number(document.getElementById('tokens-out').title) > 0")
        await page.until("parseFloat(document.getElementById('step-time').title) >= 0.004")
        await page.until("document.querySelector('#latencies tr:nth-child(2)').cells[3].textContent !== '0'")
        kv = float(await page.run("document.getElementById('kv').title"))
        assert 5 * 16 / 65536 <= kv < 0.5
        for name in ("running", "tokens", "step", "kv"):  # lines grow with each second that is seen
            await page.until(_COLOURS.format(name) + ".then(count => count > 10)")
        httpx.post(f"{server.url}/abort_request", json={"abort_all": True})
        thread.join(PATIENCE_S)
        await page.until(f"{shown('running')} === '0'")
        values = dict(
            line.rsplit(" ", 1)
            for line in httpx.get(f"{server.url}/metrics").text.splitlines()
            if not line.startswith("#")
        )
        for element, metric in (
            ("total-prompt", "sglang:prompt_tokens_total"),
            ("total-generated", "sglang:generation_tokens_total"),
            ("total-requests", "sglang:num_requests_total"),
            ("queued", "sglang:num_queue_reqs"),
            ("kv-tokens", "sglang:num_used_tokens"),
        ):
            told = values[f'{metric}{{model_name="tiny-llama"}}']
            await page.until(f"document.getElementById('{element}').title === '{told}'")

    with running(tmp_path / "log", *FLAGS, model="tiny-llama") as server:
        in_browser(tmp_path / "profile", server.url + "/", visit)


# Pixels of the first line's colour: pure red, set for the test, so that no other ink is taken for it.
# Read from a copy: the browser complains of a page's canvas that is read again and again.
_COLOURS = """(() => {{
    const canvas = document.getElementById('chart-{0}');
    document.documentElement.style.setProperty('--first', '#f00');
    canvas.style.height = canvas.clientHeight + 1 + 'px';  // draws anew
    return new Promise(done => setTimeout(() => {{
        const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext('2d');
        copy.drawImage(canvas, 0, 0);
        const data = copy.getImageData(0, 0, canvas.width, canvas.height).data;
        let count = 0;
        for (let i = 0; i < data.length; i += 4) {{
            if (data[i] > 180 && data[i + 1] < 80 && data[i + 3] > 90) count++;
        }}
        done(count);
    }}, 300));
}})()"""


def load(server: Server) -> None:
    """Five requests that run until they are aborted."""
    body = {"input_ids": [[5, 6, 7]] * 5, "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}}
    assert httpx.post(f"{server.url}/generate", json=body).status_code == 200


@needs_chromium
def test_a_key_is_asked_for_and_an_answer_streams(tmp_path: Path, guarded: HarnessServer) -> None:
    async def visit(page: Page) -> None:
        form = "document.getElementById('key-form')"
        await page.until(f"!{form}.hidden")
        # A browser logs every 401 by itself.
        assert all("401" in problem for problem in page.problems)
        await page.run("document.getElementById('key').value = 'wrong'")
        await page.run(f"{form}.requestSubmit()")
        await page.until(f"{shown('key-error')} === 'That is not the key.'")
        await page.run("document.getElementById('key').value = 'sesame-42'")
        await page.run(f"{form}.requestSubmit()")
        await page.until(f"{form}.hidden && {shown('state')} === 'up'")
        page.problems.clear()
        assert not any("sesame" in url for url in page.urls)

        engine = guarded.engine
        assert engine is not None
        engine.budget = 5
        await ask(page, "x", 20)
        await page.until(f"{shown('answer')} === 'abcde'")
        engine.budget = None
        await page.until("!document.getElementById('send').disabled")
        assert await page.run(shown("answer")) == "abcdefghijklmnopqrst"
        assert "20 tokens" in await page.run(shown("timing"))
        assert "cut at the limit" in await page.run(shown("timing"))
        assert bytes(engine.seen[-1].input_ids.tolist()[1:]) == b"user:x>"

    in_browser(tmp_path / "profile", guarded.url + "/", visit)


@needs_chromium
def test_an_answer_can_be_stopped_and_an_error_is_shown(tmp_path: Path) -> None:
    folder = write_byte_tokenizer(tmp_path)
    with harness_running(tmp_path, make_settings(folder)) as server:
        engine = server.engine
        assert engine is not None
        engine.budget = 5

        async def visit(page: Page) -> None:
            await page.until(f"{shown('state')} === 'up'")
            await page.run("document.getElementById('mode').value = 'plain'")
            await ask(page, "<b>&", 40)
            await page.until(f"{shown('answer')} === 'abcde'")
            assert await page.run("document.getElementById('stop').disabled") is False
            await page.run("document.getElementById('stop').click()")
            await page.until(f"{shown('timing')} === 'stopped'")
            while not engine.aborted:
                await asyncio.sleep(0.02)
            assert bytes(engine.seen[-1].input_ids.tolist()) == b"<b>&"
            engine.budget = None
            engine.reply = lambda request: [*b"<i>no tag</i>"]
            await ask(page, "", 13)
            await page.until("!document.getElementById('send').disabled")
            assert await page.run(shown("answer")) == "<i>no tag</i>"
            await ask(page, "y" * 100, 5)  # more than the context holds
            problem = await page.until(shown("ask-error"))
            assert "context" in problem
            assert len(page.problems) == 1 and "400" in page.problems.pop()

        in_browser(tmp_path / "profile", server.url + "/", visit)
