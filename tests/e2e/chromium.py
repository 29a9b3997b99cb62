"""A headless Chromium that tests steer over its DevTools protocol."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

from tests.e2e.server_harness import PATIENCE_S

PROGRAM = next(
    (p for name in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(name))), None
)
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--window-size=1200,900",
)


class Page:
    """One tab.

    Attributes:
        problems: errors on the console, exceptions nobody caught, and requests that failed or left the host.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._session: str | None = None
        self._reader = asyncio.create_task(self._read())
        self.urls: list[str] = []
        self.problems: list[str] = []

    async def _read(self) -> None:
        async for message in self._socket:
            event = json.loads(message.data)
            if "id" in event:
                self._asked.pop(event["id"]).set_result(event)
            else:
                self._note(event["method"], event.get("params", {}))

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(json.dumps(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(f"{params['entry']['text']} {params['entry'].get('url')}")
        elif method == "Network.requestWillBeSent":
            self.urls.append(params["request"]["url"])

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol."""
        number = next(self._ids)
        self._asked[number] = asyncio.get_running_loop().create_future()
        command: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            command["sessionId"] = self._session
        answer = self._asked[number]
        await self._socket.send_json(command)
        reply = await asyncio.wait_for(answer, PATIENCE_S)
        assert "error" not in reply, reply
        return reply["result"]

    async def open(self, url: str) -> None:
        """A new tab at `url`."""
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Runtime", "Log", "Network", "Page"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)
        await self.until(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    async def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        result = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def until(self, script: str) -> Any:
        """The expression's value once it is true."""
        deadline = time.monotonic() + PATIENCE_S
        while not (value := await self.run(script)):
            assert time.monotonic() < deadline, f"waited in vain for: {script}; {self.problems}"
            await asyncio.sleep(0.05)
        return value

    async def close(self) -> None:
        """Stop to listen."""
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader


@contextlib.asynccontextmanager
async def browser(folder: Path) -> AsyncIterator[Page]:
    """A browser with its own profile in `folder`."""
    assert PROGRAM is not None
    command = [PROGRAM, *_FLAGS, "--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    try:
        url = await asyncio.wait_for(_address(process.stderr), PATIENCE_S)
        drain = asyncio.create_task(_drain(process.stderr))
        async with aiohttp.ClientSession() as session, session.ws_connect(url, max_msg_size=0) as socket:
            page = Page(socket)
            yield page
            await page.close()
        drain.cancel()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _address(stderr: asyncio.StreamReader) -> str:
    async for line in stderr:
        if b"DevTools listening on " in line:
            return line.split()[-1].decode()
    raise AssertionError("the browser has ended")


async def _drain(stderr: asyncio.StreamReader) -> None:
    async for _ in stderr:
        pass
