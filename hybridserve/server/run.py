"""A server's life: wait for the engine, bind the port, serve, drain on the first signal, abort on the second.

Owns the signals and the order of things. Must not know routes. Called by the `serve` command and by tests. What it imports at
its top must be light: the engine process, whose start takes longest, is started from here.
"""

import asyncio
import contextlib
import gc
import logging
import signal
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridserve.config import ServerSettings
from hybridserve.engine.messages import EngineClient, EngineStats
from hybridserve.errors import HybridServeError
from hybridserve.server.address import address_of, bind, check_exposure
from hybridserve.server.lifecycle import Lifecycle

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from hybridserve.server.http import HttpServer

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
#: After the drain, how long connections may take to write what is buffered.
_LAST_WRITES_S = 3
_STATS_EVERY_S = 10.0

log = logging.getLogger("hybridserve.server")


@dataclass(frozen=True)
class Launch:
    """What a server is made of."""

    settings: ServerSettings
    start_engine: Callable[[], Awaitable[EngineClient]]
    make_app: Callable[[EngineClient, Lifecycle], "ASGIApp"]  # called once the engine is ready
    on_listening: Callable[[EngineClient, str], None]  # told the engine and the address


async def serve(launch: Launch) -> None:
    """Serve until a signal. Raises UsageError for an address that cannot be used, and what starting the engine raises."""
    check_exposure(launch.settings)
    bind(launch.settings).close()  # an address in use should not cost a model's loading time
    signals = _Signals()
    with signals.handled():
        client = await _unless_signalled(launch, signals)
        if client is None:
            return
        try:
            await _serve_engine(launch, client, signals)
        finally:
            await client.close(0.0)


async def _unless_signalled(launch: Launch, signals: "_Signals") -> EngineClient | None:
    """The engine's client; None when a signal came while it was loading."""
    starting = asyncio.ensure_future(launch.start_engine())
    first = asyncio.create_task(signals.first.wait())
    await asyncio.wait({starting, first}, return_when=asyncio.FIRST_COMPLETED)
    first.cancel()
    if starting.done():
        return starting.result()
    starting.cancel()
    with contextlib.suppress(asyncio.CancelledError, HybridServeError):
        await (await starting).close(0.0)
    return None


async def _serve_engine(launch: Launch, client: EngineClient, signals: "_Signals") -> None:
    from hybridserve.server.http import HttpServer

    settings = launch.settings
    lifecycle = Lifecycle()
    server = HttpServer(launch.make_app(client, lifecycle), settings, last_writes_s=_LAST_WRITES_S, ended=lifecycle.ended)
    listener = bind(settings)
    gc.collect()
    gc.freeze()  # what is loaded stays; collections need not walk it
    tasks = [
        asyncio.create_task(_drain_on_signal(settings, client, lifecycle, signals, server)),
        asyncio.create_task(_log_stats(client)),
    ]
    launch.on_listening(client, address_of(listener, is_tls=settings.ssl_certfile is not None))
    try:
        await server.serve(sockets=[listener])
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _drain_on_signal(
    settings: ServerSettings, client: EngineClient, lifecycle: Lifecycle, signals: "_Signals", server: "HttpServer"
) -> None:
    await signals.first.wait()
    lifecycle.is_draining = True
    log.warning(
        "draining: %d requests may run for %g s more; a second signal aborts them", lifecycle.num_open, settings.drain_timeout_s
    )
    idle = asyncio.create_task(lifecycle.wait_idle(settings.drain_timeout_s))
    second = asyncio.create_task(signals.second.wait())
    await asyncio.wait({idle, second}, return_when=asyncio.FIRST_COMPLETED)
    idle.cancel()
    second.cancel()
    if lifecycle.num_open:
        log.warning("aborting %d requests", lifecycle.num_open)
    await client.close(0.0)
    await lifecycle.wait_idle(_LAST_WRITES_S)  # open streams still tell their error
    server.should_exit = True


async def _log_stats(client: EngineClient) -> None:
    """One line every ten seconds in which something happened."""
    last = EngineStats()
    while True:
        await asyncio.sleep(_STATS_EVERY_S)
        try:
            stats = await client.stats()
        except HybridServeError:
            continue
        prompt = stats.num_prompt_tokens - last.num_prompt_tokens
        cached = stats.num_cached_tokens - last.num_cached_tokens
        generated = stats.num_generated_tokens - last.num_generated_tokens
        last = stats
        if not (prompt or generated or stats.num_running or stats.num_waiting):
            continue
        log.info(
            "prompt %.1f tok/s (%d %% cached), generated %.1f tok/s, running %d, waiting %d, blocks %d of %d, states %d of %d",
            prompt / _STATS_EVERY_S,
            round(100 * cached / prompt) if prompt else 0,
            generated / _STATS_EVERY_S,
            stats.num_running,
            stats.num_waiting,
            stats.blocks_used,
            stats.blocks_total,
            stats.slots_used,
            stats.slots_total,
        )


class _Signals:
    """The first and the second request to stop."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._note)
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    def _note(self) -> None:
        (self.second if self.first.is_set() else self.first).set()
