"""uvicorn, set up for this server: our signals, our logs, sockets bound by us.

Owns that set-up. Must not know routes. Called by `run.py`, which imports it late.
"""

import contextlib
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from hybridserve.config import ServerSettings


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers, which know no draining."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, *, last_writes_s: int) -> None:
        """`last_writes_s`: how long connections may take, once it shall end, to write what is buffered."""
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                server_header=False,
                timeout_graceful_shutdown=last_writes_s,
                ssl_keyfile=settings.ssl_keyfile,
                ssl_certfile=settings.ssl_certfile,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
