"""Server-sent events: the choices of one request in one stream, ended early when the client goes.

Owns the socket's side of a stream and the watch for a disconnect. Must not know what an event holds: a route's `Events` writes
that. Tokens that pile up while the socket is slow come from the engine's client as one output, so they become one event.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Protocol

from starlette.types import Receive, Send

from hybridserve.engine.messages import EngineClient
from hybridserve.engine.unread import Unread
from hybridserve.server.fault import ENDINGS, error_body, told
from hybridserve.server.generation import Choice, Delta

#: How long the headers wait for a first output, so that a refusal can still be a status code.
FIRST_OUTPUT_S = 2.0
#: A comment is sent when nothing came for so long, or proxies would close the connection.
KEEP_ALIVE_S = 15.0

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_DONE = b"data: [DONE]\n\n"
_KEEP_ALIVE = b": waiting\n\n"


class Events(Protocol):
    """What one route puts into its events. All methods return whole events, or nothing."""

    def open(self, choice: Choice) -> bytes:
        """Before a choice's first delta."""
        ...

    def delta(self, choice: Choice, delta: Delta) -> bytes: ...

    def close(self, choices: Sequence[Choice]) -> bytes:
        """After all choices have finished."""
        ...


class _Writer:
    """The reply's body. Its headers are sent with the first event."""

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self._send = send
        self._headers = headers
        self._starting = asyncio.Lock()
        self._has_started = False
        self.is_begun = False  # from now on an error cannot be a status
        self.num_written = 0

    async def write(self, body: bytes, *, more: bool = True) -> None:
        if not self._has_started:
            await self._start()
        self.num_written += 1
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def _start(self) -> None:
        self.is_begun = True
        async with self._starting:
            if not self._has_started:
                await self._send({"type": "http.response.start", "status": 200, "headers": [*_HEADERS, *self._headers]})
                self._has_started = True


async def send_stream(
    choices: Sequence[Choice],
    client: EngineClient,
    events: Events,
    receive: Receive,
    send: Send,
    headers: list[tuple[bytes, bytes]],
    unread: Unread,
    max_at_once: int,
) -> None:
    """Answer with a stream of events until all choices have finished or the client has gone.

    A failure before the first output is raised, so that it becomes a status code; a later one becomes an error event, and the
    stream ends without `[DONE]`. What the client has not taken is counted in `unread`; how long a write may take is the
    connection's matter.
    """
    writer = _Writer(send, headers)
    async with until_disconnect(receive):
        try:
            async with _kept_alive(writer):
                await _write_all(choices, client, events, writer, unread, max_at_once)
            last = events.close(choices) + _DONE
        except ENDINGS:
            raise
        except BaseException as error:  # a panic of compiled code is no Exception
            if not writer.is_begun:
                raise
            last = b"data: " + error_body(told(error)) + b"\n\n"
        await writer.write(last, more=False)


async def _write_all(
    choices: Sequence[Choice], client: EngineClient, events: Events, writer: _Writer, unread: Unread, max_at_once: int
) -> None:
    """Write all choices as their outputs come, `max_at_once` at the same time. The first failure ends the others."""
    if len(choices) == 1:
        await _write(choices[0], client, events, writer, unread)
        return
    gate = asyncio.Semaphore(max_at_once)

    async def one(choice: Choice) -> None:
        async with gate:
            await _write(choice, client, events, writer, unread)

    try:
        async with asyncio.TaskGroup() as group:
            for choice in choices:
                group.create_task(one(choice))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _write(choice: Choice, client: EngineClient, events: Events, writer: _Writer, unread: Unread) -> None:
    opening = events.open(choice)
    async with aclosing(choice.deltas(client, unread)) as deltas:
        async for delta in deltas:
            body = events.delta(choice, delta)
            if opening:
                body, opening = opening + body, b""
            if body:
                await writer.write(body)


@asynccontextmanager
async def _kept_alive(writer: _Writer) -> AsyncIterator[None]:
    """Write a comment now and then while there is nothing else to write."""

    async def keep_alive() -> None:
        pause_s, seen = FIRST_OUTPUT_S, 0
        while True:
            await asyncio.sleep(pause_s)
            if writer.num_written == seen:
                await writer.write(_KEEP_ALIVE)
            pause_s, seen = KEEP_ALIVE_S, writer.num_written

    task = asyncio.create_task(keep_alive())
    try:
        yield
    finally:
        task.cancel()


@asynccontextmanager
async def until_disconnect(receive: Receive) -> AsyncIterator[None]:
    """Cancel what is inside when the client goes, and end quietly then. The request's body must have been read."""
    work = asyncio.current_task()
    assert work is not None, "a request runs in a task"
    has_gone = False

    async def watch() -> None:
        nonlocal has_gone
        while (await receive())["type"] != "http.disconnect":
            pass
        has_gone = True
        work.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if not has_gone:
            raise
        work.uncancel()
    finally:
        watcher.cancel()
