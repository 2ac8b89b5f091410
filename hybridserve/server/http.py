"""uvicorn, set up for this server: our signals, our logs, our limits on connections, sockets bound by us.

Owns that set-up. Must not know routes. Called by `run.py`, which imports it late.
"""

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import Iterator
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from hybridserve.config import ServerSettings
from hybridserve.server.connections import KEEP_ALIVE_S, Connections, connection_limits


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers, which know no draining, and with limits on every connection."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, *, last_writes_s: int, ended: "Counter[str]") -> None:
        """`last_writes_s`: how long connections may take, once it shall end, to write what is buffered.

        `ended` counts the connections that a limit has ended, by its name.
        """
        self._connections = Connections(connection_limits(settings), ended)
        super().__init__(
            uvicorn.Config(
                app,
                # It is called as a class is.
                http=cast("type[asyncio.Protocol]", self._connections.protocol),
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=last_writes_s,
                ssl_keyfile=settings.ssl_keyfile,
                ssl_certfile=settings.ssl_certfile,
            )
        )

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until told to exit."""
        sweeping = asyncio.create_task(self._connections.sweep())
        try:
            await super().serve(sockets)
        finally:
            sweeping.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
