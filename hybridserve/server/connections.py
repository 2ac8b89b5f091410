"""Connections with limits: how many there are, how long each may take, and how much it may send before it has asked anything.

Owns the counts per address and the clocks of a connection, on top of uvicorn's protocol. Must not know routes or what a body
holds. One look at all connections a second (`Connections.sweep`) takes the place of timers: of uvicorn's protocol it relies on
the parser's callbacks (`on_message_begin` ... `on_response_complete`), `transport`, `cycle` and `send_400_response`.
"""

import asyncio
import logging
import resource
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from hybridserve.config import ServerSettings
from hybridserve.server.address import network_of

#: Bytes of a request's line and headers.
MAX_HEADER_NBYTES = 64 * 2**10
#: An open connection that nothing is asked on is closed after so long.
KEEP_ALIVE_S = 5
#: Descriptors that are not connections: files, the engine's socket and pipes, new processes.
_SPARE_DESCRIPTORS = 128
#: A client that takes this much of a reply, or all that there is, within the write limit is reading.
_READING_NBYTES = 16 * 2**10

# Requests that are none are counted, not logged one by one; errors of ours are logged as ever.
_log = logging.getLogger("hybridserve.connections")
_log.setLevel(logging.ERROR)
log = logging.getLogger("hybridserve.server")


@dataclass(frozen=True)
class ConnectionLimits:
    """What connections may do. Seconds, bytes and counts."""

    max_open: int
    max_open_per_client: int
    header_s: float
    body_s: float
    write_s: float


def connection_limits(settings: ServerSettings) -> ConnectionLimits:
    """The settings' limits, with no more connections than this process may have; its limit of descriptors is raised first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    max_open = settings.max_connections
    if hard != resource.RLIM_INFINITY and max_open > hard - _SPARE_DESCRIPTORS:
        max_open = max(1, hard - _SPARE_DESCRIPTORS)
        log.warning("at most %d connections, since this process may open %d files; raise it with ulimit -n", max_open, hard)
    return ConnectionLimits(
        max_open=max_open,
        max_open_per_client=max(1, int(max_open * settings.client_share)),
        header_s=settings.header_timeout_s,
        body_s=settings.body_timeout_s,
        write_s=settings.write_timeout_s,
    )


class Connections:
    """All open connections of a server. `ended` counts those that a limit has ended, by the limit's name."""

    def __init__(self, limits: ConnectionLimits, ended: "Counter[str]") -> None:
        self.limits = limits
        self.ended = ended
        self._open: set[LimitedProtocol] = set()
        self._by_client: Counter[str] = Counter()

    def protocol(self, **arguments: Any) -> "LimitedProtocol":
        """A connection to come; called by uvicorn with what its own protocols take."""
        return LimitedProtocol(self, **arguments)

    def enter(self, connection: "LimitedProtocol", client: str) -> str | None:
        """Count a connection. Returns the limit that it is over, or None."""
        self._open.add(connection)
        self._by_client[client] += 1
        if len(self._open) > self.limits.max_open:
            return "max_connections"
        return "client_share" if self._by_client[client] > self.limits.max_open_per_client else None

    def leave(self, connection: "LimitedProtocol", client: str) -> None:
        """Forget a connection that is gone."""
        self._open.discard(connection)
        self._by_client[client] -= 1
        if not self._by_client[client]:
            del self._by_client[client]

    async def sweep(self) -> None:
        """End, for ever, what has taken longer than it may."""
        limits = self.limits
        pause_s = min(1.0, limits.header_s / 4, limits.body_s / 4, limits.write_s / 4)
        while True:
            await asyncio.sleep(pause_s)
            now = time.monotonic()
            for connection in list(self._open):
                try:
                    connection.check(now)
                except Exception:
                    log.exception("a connection could not be checked")


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, counted, and on the clock while it waits for the client."""

    def __init__(self, connections: Connections, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.logger = _log
        self._all = connections
        self._phase = "headers"  # then "body", "answer" and "idle"
        self._since = time.monotonic()  # when the phase began
        self._num_header_nbytes = 0  # of the headers that the parser has told
        self._num_head_nbytes = 0  # of all that came before the last of them, told or not yet
        self._refusal = (400, "the request is not HTTP/1.1")
        self._unread: tuple[int, float] | None = None  # bytes that the client has not taken, and since when so many

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._client = network_of(self.client[0]) if self.client else "unknown"
        over = self._all.enter(self, self._client)
        if over is not None:
            self._end(over, 503, f"too many connections are open ({over}); try again later")

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.leave(self, self._client)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._phase == "idle":
            self._enter("headers")
        super().data_received(data)
        if self._phase == "headers" and not self.transport.is_closing():
            self._num_head_nbytes += len(data)
            if self._num_head_nbytes > MAX_HEADER_NBYTES:
                self._end("header_nbytes", 431, _too_many_headers())

    def send_400_response(self, msg: str) -> None:
        status, text = self._refusal
        self._end("no_http" if status == 400 else "header_nbytes", status, text)

    # The parser's callbacks, in their order.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._enter("headers")

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._num_header_nbytes += len(name) + len(value)
        if self._num_header_nbytes + len(self.url) > MAX_HEADER_NBYTES:
            self._refusal = (431, _too_many_headers())
            raise ValueError("too many bytes of headers")  # the parser stops, and `send_400_response` is called

    def on_headers_complete(self) -> None:
        self._enter("body")
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._enter("answer")

    def on_response_complete(self) -> None:
        if self._phase == "answer":
            self._enter("idle")
        super().on_response_complete()

    def _enter(self, phase: str) -> None:
        self._phase, self._since = phase, time.monotonic()
        self._num_header_nbytes = self._num_head_nbytes = 0

    def check(self, now: float) -> None:
        """End this connection if the client has taken longer than it may."""
        limits = self._all.limits
        if self._is_not_read(now):
            self._all.ended["write_timeout_s"] += 1
            self.transport.abort()
        elif self.transport.is_closing():
            return
        elif self._phase == "body" and now - self._since > limits.body_s:
            self._end("body_timeout_s", 408, f"the body was not complete after {limits.body_s:g} s; send it faster")
        elif self._phase == "headers" and not self._is_answering and now - self._since > limits.header_s:
            self._end("header_timeout_s", 408, f"the headers were not complete after {limits.header_s:g} s; send them faster")

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _is_not_read(self, now: float) -> bool:
        """Whether the client has taken next to nothing of what waits for it for as long as the limit allows."""
        waiting = self.transport.get_write_buffer_size()
        if not waiting:
            self._unread = None
        elif self._unread is None or waiting <= self._unread[0] - _READING_NBYTES:
            self._unread = (waiting, now)
        elif waiting > self._unread[0]:
            self._unread = (waiting, self._unread[1])
        return self._unread is not None and now - self._unread[1] > self._all.limits.write_s

    def _end(self, limit: str, status: int, text: str) -> None:
        """Say why, where no reply has begun, and close. What the client does not take then is dropped by `check`."""
        self._all.ended[limit] += 1
        if not (self._is_answering and self.cycle.response_started):
            body = msgspec.json.encode({"error": {"message": text, "type": _kind(status), "param": None, "code": limit}})
            head = f"HTTP/1.1 {status} {'Limit' if status != 400 else 'Bad Request'}\r\ncontent-type: application/json\r\n"
            head += "retry-after: 1\r\n" if status == 503 else ""
            self.transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        self.transport.close()


def _kind(status: int) -> str:
    return "overloaded_error" if status == 503 else "invalid_request_error"


def _too_many_headers() -> str:
    return f"the request's line and headers are more than {MAX_HEADER_NBYTES} bytes; send fewer"
