"""The server's side of the process border: starts the engine process, sends requests, hands out their outputs.

Owns the socket, the child process and one queue per open request. Must not know HTTP or tensors. `start_engine` is what the
server calls; one event loop owns the client. When the engine dies, every open request ends with EngineDeadError, and it is
started again after a pause that doubles each time.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

import hybridserve.errors as errors
from hybridserve.config import EngineSettings
from hybridserve.engine.messages import (
    Abort,
    AskExplanation,
    AskStats,
    EngineInfo,
    EngineStats,
    Explained,
    Fatal,
    Loading,
    Outputs,
    Shutdown,
    ToEngine,
    encoder,
    from_engine,
)
from hybridserve.errors import EngineDeadError, HybridServeError, OverloadedError, RequestError
from hybridserve.request import CacheHints, EngineRequest, Explanation, RequestOutput

log = logging.getLogger(__name__)

OnProgress = Callable[[str, float], None]

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_STATS_TIMEOUT_S = 30.0
_EXIT_TIMEOUT_S = 10.0


async def start_engine(
    settings: EngineSettings, on_progress: OnProgress | None = None, on_spawned: Callable[[], None] | None = None
) -> "EngineProcessClient":
    """Start an engine process and wait until it is ready. Raises the error that kept it from starting.

    `on_spawned` is called once the process runs, which is long before it is ready: the time for work of one's own.
    """
    client = EngineProcessClient(settings, on_progress)
    await client.start(on_spawned)
    return client


class EngineProcessClient:
    """`EngineClient` over a child process and a ZMQ socket on a private path."""

    def __init__(self, settings: EngineSettings, on_progress: OnProgress | None = None) -> None:
        self._settings = settings
        self._on_progress = on_progress
        # Only this user may enter: ZMQ itself asks nobody who they are.
        self._folder = Path(tempfile.mkdtemp(prefix="hybridserve-"))
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._info: EngineInfo | None = None
        self._open: dict[str, asyncio.Queue[RequestOutput | HybridServeError]] = {}
        self._stats_waiters: list[asyncio.Future[EngineStats]] = []
        self._explanations: dict[int, asyncio.Future[Explanation]] = {}
        self._num_asked = 0
        self._fatal: Fatal | None = None
        self._is_alive = False
        self._is_closing = False
        self._last_progress = time.monotonic()
        self._supervisor: asyncio.Task[None] | None = None

    # -- the interface of EngineClient ----------------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        assert self._info is not None, "start() has not returned yet"
        return self._info

    @property
    def is_alive(self) -> bool:
        return self._is_alive

    @property
    def stalled_s(self) -> float:
        return time.monotonic() - self._last_progress if self._open else 0.0

    async def submit(self, request: EngineRequest) -> AsyncGenerator[RequestOutput, None]:
        """See `EngineClient.submit`. Outputs that have piled up are merged into one."""
        self._admit()
        if request.request_id in self._open:
            raise RequestError(f"request id {request.request_id!r} is in use; choose another", param="request_id")
        queue: asyncio.Queue[RequestOutput | HybridServeError] = asyncio.Queue()
        if not self._open:
            self._last_progress = time.monotonic()
        self._open[request.request_id] = queue
        has_ended = False
        try:
            await self._send(request)
            while not has_ended:
                output = await _next(queue)
                if output.error_type is not None:
                    has_ended = True
                    raise _refusal(output)
                has_ended = output.finish_reason is not None
                yield output
        finally:
            self._open.pop(request.request_id, None)
            if not has_ended and self._is_alive:
                # Not awaited: this may run while the caller's task is being cancelled.
                self._send_soon(Abort([request.request_id]))

    async def stats(self) -> EngineStats:
        if not self._is_alive:
            raise EngineDeadError("the engine process has stopped; try again later")
        waiter: asyncio.Future[EngineStats] = asyncio.get_running_loop().create_future()
        self._stats_waiters.append(waiter)
        await self._send(AskStats())
        return await asyncio.wait_for(waiter, _STATS_TIMEOUT_S)

    async def explain(self, prompt_token_ids: list[int], cache: CacheHints) -> Explanation:
        if not self._is_alive:
            raise EngineDeadError("the engine process has stopped; try again later")
        self._num_asked += 1
        number = self._num_asked
        waiter: asyncio.Future[Explanation] = asyncio.get_running_loop().create_future()
        self._explanations[number] = waiter
        try:
            await self._send(AskExplanation(number=number, prompt_token_ids=prompt_token_ids, cache=cache))
            return await asyncio.wait_for(waiter, _STATS_TIMEOUT_S)
        finally:
            del self._explanations[number]

    async def close(self, drain_s: float) -> None:
        self._is_closing = True
        process = self._process
        if process is not None and process.returncode is None:
            # An engine that still loads reads no messages, and has nothing to lose.
            if self._is_alive:
                await self._send(Shutdown(drain=drain_s > 0))
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(process.wait(), drain_s + _EXIT_TIMEOUT_S)
            if process.returncode is None:
                process.kill()
                await process.wait()
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
        self._is_alive = False
        self._end_all()
        self._disconnect()
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- life of the process --------------------------------------------------------------------------------------------

    async def start(self, on_spawned: Callable[[], None] | None = None) -> None:
        """Start the process, tell it, and wait until it is ready. Raises the error that it reports."""
        try:
            spawned = await self._spawn()
            if on_spawned is not None:
                on_spawned()
            await self._wait_until_ready(*spawned)
        except BaseException:
            await self.close(0)
            raise
        self._supervisor = asyncio.create_task(self._supervise())

    async def _spawn(self) -> tuple[asyncio.subprocess.Process, zmq.asyncio.Socket]:
        """Start a process and send it the settings. Returns it, and the socket to it."""
        address = f"ipc://{self._folder / 'engine.sock'}"
        self._disconnect()
        self._socket = self._context.socket(zmq.PAIR)
        # Neither side may block on the other: what is open is bounded by admission, not by the socket.
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(address)
        self._fatal = None
        # A spinning OpenMP thread takes a core from the server; it must be set before torch is imported.
        environment = {**os.environ, "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive")}
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "hybridserve.engine", address, stdin=asyncio.subprocess.PIPE, env=environment
        )
        await self._socket.send(msgspec.msgpack.encode(self._settings))
        return self._process, self._socket

    async def _wait_until_ready(self, process: asyncio.subprocess.Process, socket: zmq.asyncio.Socket) -> None:
        exited = asyncio.create_task(process.wait())
        try:
            while True:
                received = asyncio.ensure_future(socket.recv())
                await asyncio.wait({received, exited}, return_when=asyncio.FIRST_COMPLETED)
                if not received.done() and await socket.poll(0):
                    await received  # the process ended, and its last words are still in the socket
                if not received.done():
                    received.cancel()
                    raise EngineDeadError(f"the engine process ended with exit code {process.returncode} while it was starting")
                message = from_engine.decode(received.result())
                if isinstance(message, EngineInfo):
                    self._info = message
                    self._is_alive = True
                    return
                if isinstance(message, Fatal):
                    raise _exception(message)
                if isinstance(message, Loading) and self._on_progress is not None:
                    self._on_progress(message.stage, message.fraction)
        finally:
            exited.cancel()

    async def _supervise(self) -> None:
        """Receive until the process ends; then, unless that was wished, start another one."""
        pause_s = _FIRST_PAUSE_S
        while not self._closes():
            if self._is_alive:
                started = time.monotonic()
                await self._receive_until_exit()
                if time.monotonic() - started > _LONGEST_PAUSE_S:
                    pause_s = _FIRST_PAUSE_S
                self._end_all()
            if self._closes():
                return
            log.error("the engine process has stopped; a new one starts in %.0f s", pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            try:
                await self._wait_until_ready(*await self._spawn())
                log.warning("the engine process is ready again")
            except HybridServeError as error:
                log.error("the engine process did not start: %s", error)

    def _closes(self) -> bool:
        return self._is_closing

    async def _receive_until_exit(self) -> None:
        assert self._process is not None, "a live engine has a process"
        receiving = asyncio.create_task(self._receive())
        exited = asyncio.create_task(self._process.wait())
        try:
            await asyncio.wait({receiving, exited}, return_when=asyncio.FIRST_COMPLETED)
            # Messages sent just before the end are still in the socket.
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.shield(receiving), 0.2)
        finally:
            self._is_alive = False
            receiving.cancel()
            exited.cancel()

    def _end_all(self) -> None:
        """Tell every open request and waiter that the engine is gone."""
        why = f": {self._fatal.error}: {self._fatal.message}" if self._fatal is not None else ""
        for queue in self._open.values():
            queue.put_nowait(EngineDeadError(f"the engine process has stopped{why}; send the request again later"))
        gone = EngineDeadError("the engine process has stopped; try again later")
        for waiter in self._stats_waiters:
            if not waiter.done():
                waiter.set_exception(gone)
        for asked in self._explanations.values():
            if not asked.done():
                asked.set_exception(gone)
        self._stats_waiters.clear()

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    # -- messages -------------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Refuse at the border what the engine could not take. Raises OverloadedError or EngineDeadError."""
        if self._is_closing:
            raise OverloadedError("the server is shutting down; send the request to another one", retry_after_s=30.0)
        if not self._is_alive:
            raise EngineDeadError("the engine process has stopped; try again later")
        limit = self.info.max_num_seqs + self.info.max_num_queued_reqs
        if len(self._open) >= limit:
            raise OverloadedError(f"{len(self._open)} requests are open, the limit is {limit}; try again later")

    async def _send(self, message: ToEngine) -> None:
        assert self._socket is not None, "a live engine has a socket"
        await self._socket.send(encoder.encode(message))

    def _send_soon(self, message: ToEngine) -> None:
        assert self._socket is not None, "a live engine has a socket"
        # With no high-water mark this is done at once; the future only reports it.
        self._socket.send(encoder.encode(message))

    async def _receive(self) -> None:
        assert self._socket is not None, "a live engine has a socket"
        while True:
            message = from_engine.decode(await self._socket.recv())
            self._last_progress = time.monotonic()
            if isinstance(message, Outputs):
                for output in message.outputs:
                    queue = self._open.get(output.request_id)
                    if queue is not None:
                        queue.put_nowait(output)
            elif isinstance(message, EngineStats):
                waiters, self._stats_waiters = self._stats_waiters, []
                for waiter in waiters:
                    if not waiter.done():
                        waiter.set_result(message)
            elif isinstance(message, Explained):
                asked = self._explanations.get(message.number)
                if asked is not None and not asked.done():
                    asked.set_result(message.explanation)
            elif isinstance(message, Fatal):
                self._fatal = message
                return


async def _next(queue: "asyncio.Queue[RequestOutput | HybridServeError]") -> RequestOutput:
    """The next output, with all that have piled up behind it merged in. Raises what was put in place of one."""
    first = await queue.get()
    if isinstance(first, HybridServeError):
        raise first
    while not queue.empty() and first.finish_reason is None:
        following = queue.get_nowait()
        if isinstance(following, HybridServeError):
            raise following
        first = _merge(first, following)
    return first


def _merge(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """One output that says what both say."""
    first.new_token_ids = first.new_token_ids + second.new_token_ids
    if second.logprobs is not None:
        first.logprobs = (first.logprobs or []) + second.logprobs
    first.finish_reason, first.stop_token_id = second.finish_reason, second.stop_token_id
    first.error, first.error_type = second.error, second.error_type
    return first


def _refusal(output: RequestOutput) -> HybridServeError:
    return _exception(Fatal(output.error_type or "EngineError", output.error or "the engine refused the request"))


def _exception(fatal: Fatal) -> HybridServeError:
    """The exception that the engine process raised, by its class's name; any other class becomes EngineDeadError."""
    kind = getattr(errors, fatal.error, None)
    if isinstance(kind, type) and issubclass(kind, HybridServeError):
        return kind(fatal.message)
    return EngineDeadError(f"{fatal.error}: {fatal.message}")
