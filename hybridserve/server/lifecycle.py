"""Whether the server takes requests: ready, draining, stalled or without an engine.

Owns the draining flag, the count of open generation calls and that of connections ended by limits. Read by routes.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from hybridserve.engine.messages import EngineClient
from hybridserve.errors import EngineDeadError, OverloadedError

#: Seconds without progress after which readiness turns 503.
STALL_LIMIT_S = 30.0
_DRAIN_RETRY_S = 5.0


class Lifecycle:
    """State of one server, from the moment its port is bound."""

    def __init__(self) -> None:
        self.is_draining = False
        self.num_open = 0
        self.ended: Counter[str] = Counter()  # connections and streams that a limit has ended, by its name
        self._idle = asyncio.Event()
        self._idle.set()

    def state(self, client: EngineClient) -> str:
        """`ready`, or what keeps it from being so."""
        if self.is_draining:
            return "draining"
        if not client.is_alive:
            return "engine dead"
        return "stalled" if client.stalled_s > STALL_LIMIT_S else "ready"

    @contextmanager
    def call(self, client: EngineClient) -> Iterator[None]:
        """Count one generation call. Raises OverloadedError while draining, EngineDeadError without an engine."""
        if self.is_draining:
            raise OverloadedError("the server is shutting down; ask another replica", retry_after_s=_DRAIN_RETRY_S)
        if not client.is_alive:
            raise EngineDeadError("the engine has stopped; try again once /ready answers 200")
        self.num_open += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_open -= 1
            if self.num_open == 0:
                self._idle.set()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no call is open; False when that took longer than `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
