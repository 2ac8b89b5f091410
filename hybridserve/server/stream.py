"""Server-sent events: the choices of one request merged into one stream, ended early when the client goes.

Owns the mailbox between choices and socket, and the watch for a disconnect. Must not know what an event holds: a route's
`Events` writes that. Tokens that wait for the socket are merged into one event.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Protocol

from starlette.types import Receive, Send

from hybridserve.engine.messages import EngineClient
from hybridserve.server.fault import error_body, told
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
    """What one route puts into its events. All methods return whole events."""

    def open(self, choice: Choice) -> bytes:
        """Before a choice's first delta."""
        ...

    def delta(self, choice: Choice, delta: Delta) -> bytes: ...

    def close(self, choices: Sequence[Choice]) -> bytes:
        """After all choices have finished."""
        ...


class Mailbox:
    """Deltas of all choices that wait to be sent, merged per choice. One reader."""

    def __init__(self, num_choices: int) -> None:
        self._waiting: dict[int, Delta] = {}
        self._error: Exception | None = None
        self._num_open = num_choices
        self._is_pinged = False
        self._changed = asyncio.Event()

    @property
    def is_over(self) -> bool:
        return self._num_open == 0 and not self._waiting and self._error is None

    def put(self, index: int, delta: Delta) -> None:
        earlier = self._waiting.get(index)
        if earlier is None:
            self._waiting[index] = delta
            self._changed.set()
        else:
            earlier.extend(delta)

    def close_one(self, error: Exception | None = None) -> None:
        """A choice has ended, perhaps by an error, which ends the stream after what waits."""
        self._num_open -= 1
        self._error = self._error or error
        self._changed.set()

    def ping(self) -> None:
        """Let the reader go on without a delta."""
        self._is_pinged = True
        self._changed.set()

    async def take(self) -> dict[int, Delta]:
        """All that waits, by choice; empty after a ping or when all is over. Raises the error that ended a choice."""
        await self._changed.wait()
        waiting, self._waiting = self._waiting, {}
        if not waiting and self._error is not None:
            raise self._error
        self._is_pinged = False
        if self._error is None and self._num_open > 0:
            self._changed.clear()
        return waiting


async def send_stream(
    choices: Sequence[Choice],
    client: EngineClient,
    events: Events,
    receive: Receive,
    send: Send,
    headers: list[tuple[bytes, bytes]],
) -> None:
    """Answer with a stream of events until all choices have finished or the client has gone.

    A failure before the first output is raised, so that it becomes a status code; a later one becomes an error event, and the
    stream ends without `[DONE]`.
    """
    async with until_disconnect(receive), _pumped(choices, client) as mailbox:
        first = await mailbox.take()
        await send({"type": "http.response.start", "status": 200, "headers": [*_HEADERS, *headers]})
        try:
            await _send_deltas(choices, events, mailbox, first, send)
            last = events.close(choices) + _DONE
        except Exception as error:  # the status is sent: the stream itself must tell
            last = b"data: " + error_body(told(error)) + b"\n\n"
        await send({"type": "http.response.body", "body": last, "more_body": False})


async def _send_deltas(
    choices: Sequence[Choice], events: Events, mailbox: Mailbox, waiting: dict[int, Delta], send: Send
) -> None:
    is_open = [False] * len(choices)
    while True:
        parts = []
        for index, delta in waiting.items():
            if not is_open[index]:
                is_open[index] = True
                parts.append(events.open(choices[index]))
            parts.append(events.delta(choices[index], delta))
        body = b"".join(parts)
        if body or not waiting:
            await send({"type": "http.response.body", "body": body or _KEEP_ALIVE, "more_body": True})
        if mailbox.is_over:
            return
        waiting = await mailbox.take()


@asynccontextmanager
async def _pumped(choices: Sequence[Choice], client: EngineClient) -> AsyncIterator[Mailbox]:
    """Read all choices into a mailbox; leaving ends those that still run."""
    mailbox = Mailbox(len(choices))
    tasks = [asyncio.create_task(_pump(choice, client, mailbox)) for choice in choices]
    tasks.append(asyncio.create_task(_keep_alive(mailbox)))
    try:
        yield mailbox
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _keep_alive(mailbox: Mailbox) -> None:
    await asyncio.sleep(FIRST_OUTPUT_S)
    while True:
        mailbox.ping()
        await asyncio.sleep(KEEP_ALIVE_S)


async def _pump(choice: Choice, client: EngineClient, mailbox: Mailbox) -> None:
    try:
        async with aclosing(choice.deltas(client)) as deltas:
            async for delta in deltas:
                mailbox.put(choice.index, delta)
    except Exception as error:
        mailbox.close_one(error)
    else:
        mailbox.close_one()


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
