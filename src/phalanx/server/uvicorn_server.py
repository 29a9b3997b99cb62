"""Uvicorn as this server wants it: a drain that waits for running sequences alone, and not for ever."""

from __future__ import annotations

import asyncio
import logging
import socket
import time

import uvicorn

from phalanx.server.http_limits import LimitedProtocol
from phalanx.server.state import ApiWorker

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_LAST_BYTES_S = 5.0  # how long a client may take to read the rest of an answer


class HttpProtocol(LimitedProtocol):
    """One connection."""

    def shutdown(self) -> None:
        """The server ends: close at once unless a whole request is being answered."""
        if self.cycle is not None and not self.cycle.response_complete and self.cycle.more_body:
            self.transport.close()
        else:
            super().shutdown()

    def _unsupported_upgrade_warning(self) -> None:
        """Such a request is answered as if it had not asked; Uvicorn would advise what to install."""


class DrainingServer(uvicorn.Server):
    """One worker's server."""

    def __init__(self, config: uvicorn.Config, worker: ApiWorker) -> None:
        super().__init__(config)
        self._worker = worker

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop to listen, wait for sequences and big requests, at most for the shutdown timeout, and end."""
        self._worker.is_draining = True
        closing = asyncio.get_running_loop().create_task(self._close_the_rest())
        await super().shutdown(sockets)
        closing.cancel()

    async def _close_the_rest(self) -> None:
        """End what runs too long; close what is open some seconds after the last sequence: nobody reads."""
        dispatcher, worker = self._worker.dispatcher, self._worker
        idle_s = 0.0
        deadline_s = time.monotonic() + self._worker.settings.server.shutdown_timeout_s
        while idle_s < _LAST_BYTES_S:
            await asyncio.sleep(_POLL_S)
            if time.monotonic() >= deadline_s:
                worker.side.close()  # who waits for it gets a 503
                if dispatcher.num_streams:
                    logger.warning("the server ends: aborting %d sequences", dispatcher.num_streams)
                    dispatcher.fail_all(503, "the server is shutting down", "shutdown")
            is_busy = dispatcher.num_streams or worker.num_side_bytes
            idle_s = 0.0 if is_busy else idle_s + _POLL_S
        for connection in list(self.server_state.connections):
            connection.transport.abort()
