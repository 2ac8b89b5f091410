"""The server's side of the process border: sends requests to the engine process, hands out their outputs, keeps it alive.

Owns the child process, its spare, and one queue per open request. Must not know HTTP or tensors. `start_engine` is what the
server calls; one event loop owns the client. When the engine dies, or hangs and is killed, every open request ends with
EngineDeadError, and it is started again after a pause that doubles each time.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import zmq.asyncio

from hybridserve.config import EngineSettings
from hybridserve.engine.child import ENGINE_COMMAND, Child, OnProgress, exception_of, spawn_child
from hybridserve.engine.messages import (
    ANSWER_LIMIT_S,
    Abort,
    AskExplanation,
    AskStats,
    EngineInfo,
    EngineStats,
    Explained,
    Fatal,
    FromEngine,
    Outputs,
    Shutdown,
    ToEngine,
)
from hybridserve.engine.progress import Progress
from hybridserve.engine.unread import Unread
from hybridserve.errors import (
    DeadlineError,
    EngineDeadError,
    EngineError,
    HybridServeError,
    OverloadedError,
    RequestError,
    SlowReaderError,
)
from hybridserve.request import CacheHints, EngineRequest, Explanation, RequestOutput

log = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 60.0
_EXIT_TIMEOUT_S = 10.0
#: An idle engine is asked so often whether it answers.
_PING_S = 5.0
#: Messages of so many bytes may wait for an engine that is silent; a hung one must not fill the server's memory.
_MAX_UNHEARD_NBYTES = 64 * 2**20


@dataclass(frozen=True)
class Supervision:
    """How an engine process is kept alive."""

    step_timeout_s: float = 300.0  # an engine that has work and completes no step for so long is killed and started again
    keeps_spare: bool = False  # hold a second process whose imports are done, so that a restart need only load
    spare_delay_s: float = 10.0  # from readiness to the spare's start, whose imports take a core for some seconds
    watch_every_s: float = 1.0
    command: tuple[str, ...] = ENGINE_COMMAND


async def start_engine(
    settings: EngineSettings,
    on_progress: OnProgress | None = None,
    on_spawned: Callable[[], None] | None = None,
    supervision: Supervision | None = None,
) -> "EngineProcessClient":
    """Start an engine process and wait until it is ready. Raises the error that kept it from starting.

    `on_spawned` is called once the process runs, which is long before it is ready: the time for work of one's own.
    """
    client = EngineProcessClient(settings, on_progress, supervision or Supervision())
    await client.start(on_spawned)
    return client


@dataclass(eq=False)
class _Open:
    """A request whose outputs are still read."""

    unread: Unread | None
    queue: "asyncio.Queue[RequestOutput | HybridServeError]" = field(default_factory=asyncio.Queue)
    has_ended: bool = False  # the engine has said its last output, which may not be read yet


class EngineProcessClient:
    """`EngineClient` over a child process and a ZMQ socket on a private path."""

    def __init__(self, settings: EngineSettings, on_progress: OnProgress | None, supervision: Supervision) -> None:
        self._settings = settings
        self._on_progress = on_progress
        self._supervision = supervision
        self._context = zmq.asyncio.Context()
        self._child: Child | None = None
        self._spare: Child | None = None
        self._warming: asyncio.Task[None] | None = None
        self._info: EngineInfo | None = None
        self._open: dict[str, _Open] = {}
        self._num_unfinished = 0
        self._stats: asyncio.Future[EngineStats] | None = None  # asked for and not answered yet
        self._explanations: dict[int, asyncio.Future[Explanation]] = {}
        self._num_asked = 0
        self._num_messages = 0  # that have come from engines
        self._num_unheard_nbytes = 0  # sent since the engine last said anything
        self._fatal: Fatal | None = None
        self._is_alive = False
        self._is_closing = False
        self._progress = Progress()
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
        return self._progress.stalled_s if self._is_alive else 0.0

    @property
    def pid(self) -> int:
        """The engine's process id; it changes with every restart. Raises EngineDeadError while there is none."""
        if self._child is None:
            raise EngineDeadError("the engine process has stopped")
        return self._child.pid

    async def submit(self, request: EngineRequest, unread: Unread | None = None) -> AsyncGenerator[RequestOutput, None]:
        """See `EngineClient.submit`. Outputs that have piled up are merged into one."""
        self._admit()
        if request.request_id in self._open:
            raise RequestError(f"request id {request.request_id!r} is in use; choose another", param="request_id")
        opened = self._open[request.request_id] = _Open(unread)
        self._num_unfinished += 1
        try:
            self._send(request)
            self._progress.note_asked()
            has_ended = False
            while not has_ended:
                output = await _next(opened)
                if output.error_type is not None:
                    raise _refusal(output)
                has_ended = output.finish_reason is not None
                yield output
        finally:
            self._open.pop(request.request_id, None)
            if not opened.has_ended:
                self._note_end(opened)
                if self._is_alive:
                    self._send(Abort([request.request_id]))

    async def stats(self) -> EngineStats:
        self._check_alive()
        return await _answer(self._ask_stats())

    async def explain(self, prompt_token_ids: list[int], cache: CacheHints) -> Explanation:
        self._admit()
        self._num_asked += 1
        number = self._num_asked
        waiter: asyncio.Future[Explanation] = asyncio.get_running_loop().create_future()
        self._explanations[number] = waiter
        try:
            self._send(AskExplanation(number=number, prompt_token_ids=prompt_token_ids, cache=cache))
            self._progress.note_asked()
            return await _answer(waiter)
        finally:
            del self._explanations[number]
            self._note_pending()

    async def close(self, drain_s: float) -> None:
        self._is_closing = True
        child = self._child
        # An engine that still loads reads no messages, and has nothing to lose.
        if child is not None and child.is_running and self._is_alive:
            self._send(Shutdown(drain=drain_s > 0))
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(child.exited(), drain_s + _EXIT_TIMEOUT_S)
        for task in (self._supervisor, self._warming):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        self._is_alive = False
        self._end_all()
        for one in (self._child, self._spare):
            if one is not None:
                await one.end()
        self._child = self._spare = None
        self._context.term()

    # -- life of the process --------------------------------------------------------------------------------------------

    async def start(self, on_spawned: Callable[[], None] | None = None) -> None:
        """Start the process, tell it, and wait until it is ready. Raises the error that it reports."""
        try:
            self._child = await spawn_child(self._context, self._supervision.command)
            if on_spawned is not None:
                on_spawned()
            await self._load(self._child)
        except BaseException:
            await self.close(0)
            raise
        self._supervisor = asyncio.create_task(self._supervise())

    async def _load(self, child: Child) -> None:
        self._info = await child.load(self._settings, self._on_progress)
        self._progress = Progress()
        self._num_unheard_nbytes = 0
        self._fatal = None
        self._is_alive = True
        if self._supervision.keeps_spare:
            self._warming = asyncio.create_task(self._warm_spare())

    async def _warm_spare(self) -> None:
        """Start a process that waits for its turn. Without one a restart takes longer, and that is all."""
        await asyncio.sleep(self._supervision.spare_delay_s)
        try:
            self._spare = await spawn_child(self._context, self._supervision.command)
        except Exception as error:
            log.warning("no spare engine process could be started, so a restart will take longer: %s", error)

    async def _supervise(self) -> None:
        """Receive until the process ends; then, unless that was wished, start another one. No failure ends this."""
        pause_s = _FIRST_PAUSE_S
        while not self._closes():
            try:
                if self._is_alive:
                    started = time.monotonic()
                    await self._live()
                    if time.monotonic() - started > _LONGEST_PAUSE_S:
                        pause_s = _FIRST_PAUSE_S
                if self._closes():
                    return
                log.error("the engine process has stopped; a new one starts in %.2f s", pause_s)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                await self._restart()
            except HybridServeError as error:
                log.error("the engine process did not start: %s", error)
            except Exception:
                log.exception("the engine process could not be started")

    def _closes(self) -> bool:
        return self._is_closing

    async def _restart(self) -> None:
        started = time.monotonic()
        if self._warming is not None:
            self._warming.cancel()
            await asyncio.gather(self._warming, return_exceptions=True)
        spare, self._spare = self._spare, None
        if spare is not None and not spare.is_running:
            await spare.end()
            spare = None
        self._child = spare or await spawn_child(self._context, self._supervision.command)
        try:
            await self._load(self._child)
        except BaseException:
            await self._bury()
            raise
        log.warning("the engine process is ready again after %.1f s", time.monotonic() - started)

    async def _live(self) -> None:
        """Receive until the process ends or says something unreadable, or is killed for making no progress."""
        assert self._child is not None, "a live engine has a process"
        receiving = asyncio.create_task(self._receive(self._child))
        exited = asyncio.create_task(self._child.exited())
        watching = asyncio.create_task(self._watch(self._child))
        try:
            await asyncio.wait({receiving, exited}, return_when=asyncio.FIRST_COMPLETED)
            # Messages sent just before the end are still in the socket.
            await asyncio.wait({receiving}, timeout=0.2)
            if receiving.done() and (error := receiving.exception()) is not None:
                log.error("the engine process is ended, since a message of it cannot be read: %s", error)
        finally:
            self._is_alive = False
            for task in (receiving, exited, watching):
                task.cancel()
            await asyncio.gather(receiving, exited, watching, return_exceptions=True)
            self._end_all()
            if not self._is_closing:
                await self._bury()

    async def _bury(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            await child.end()

    async def _watch(self, child: Child) -> None:
        """Kill an engine that has work and completes no step; ask an idle one now and then whether it answers."""
        limit_s, last, last_ping = self._supervision.step_timeout_s, time.monotonic(), time.monotonic()
        while True:
            await asyncio.sleep(self._supervision.watch_every_s)
            now = time.monotonic()
            if now - last > self._supervision.watch_every_s + limit_s / 2:
                # This process itself was held up (stopped, swapped out): what the engine did meanwhile is still unread.
                self._progress.note_advance()
            last = now
            if self._progress.stalled_s > limit_s:
                log.error("the engine has had work for %.0f s and completed no step; it is killed", self._progress.stalled_s)
                child.kill()
                return
            if now - last_ping >= _PING_S:
                last_ping = now
                self._ask_stats()

    def _end_all(self) -> None:
        """Tell every open request and waiter that the engine is gone."""
        why = f": {self._fatal.error}: {self._fatal.message}" if self._fatal is not None else ""
        for opened in self._open.values():
            self._note_end(opened)
            opened.queue.put_nowait(EngineDeadError(f"the engine process has stopped{why}; send the request again later"))
        gone = EngineDeadError("the engine process has stopped; try again later")
        waiters: list[asyncio.Future[Any]] = [*self._explanations.values()]
        if self._stats is not None:
            waiters.append(self._stats)
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(gone)
                waiter.exception()  # a question that nobody waits for is not reported as forgotten
        self._stats = None

    # -- messages -------------------------------------------------------------------------------------------------------

    def _check_alive(self) -> None:
        if not self._is_alive:
            raise EngineDeadError("the engine process has stopped; try again later")

    def _admit(self) -> None:
        """Refuse at the border what the engine could not take. Raises OverloadedError or EngineDeadError."""
        if self._is_closing:
            raise OverloadedError("the server is shutting down; send the request to another one", retry_after_s=30.0)
        self._check_alive()
        limit = self.info.max_num_seqs + self.info.max_num_queued_reqs
        num_open = len(self._open) + len(self._explanations)
        if num_open >= limit:
            raise OverloadedError(f"{num_open} requests are open, the limit is {limit}; try again later")
        if self._num_unheard_nbytes > _MAX_UNHEARD_NBYTES:
            waiting = f"{self._num_unheard_nbytes} bytes of requests wait for an engine that is silent"
            raise OverloadedError(f"{waiting}; the limit is {_MAX_UNHEARD_NBYTES}; try again later", retry_after_s=5.0)

    def _send(self, message: ToEngine) -> None:
        assert self._child is not None, "a live engine has a process"
        self._num_unheard_nbytes += self._child.send(message)

    def _ask_stats(self) -> "asyncio.Future[EngineStats]":
        """The answer to come. One serves all that wait for it, so that a silent engine is asked once."""
        if self._stats is None:
            self._stats = asyncio.get_running_loop().create_future()
            self._send(AskStats())
            self._progress.note_asked()
        return self._stats

    async def _receive(self, child: Child) -> None:
        """Hand out messages until the engine says that it ends."""
        while True:
            message = await child.receive()
            self._num_unheard_nbytes = 0
            self._num_messages += 1
            if isinstance(message, Fatal):
                self._fatal = message
                return
            self._take(message)
            # While requests are open only steps are progress; without any, every answer is.
            if not self._num_unfinished:
                self._progress.note_advance()
            self._note_pending()
            await asyncio.sleep(0)  # readers take this message's outputs before the next one, which may be here already

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, Outputs):
            self._progress.note_steps(message.num_steps)
            for output in message.outputs:
                self._hand_out(output)
        elif isinstance(message, EngineStats):
            self._progress.note_steps(message.num_steps)
            asked, self._stats = self._stats, None
            if asked is not None and not asked.done():
                asked.set_result(message)
        elif isinstance(message, Explained):
            self._explain(message)

    def _explain(self, message: Explained) -> None:
        asked = self._explanations.get(message.number)
        if asked is None or asked.done():
            return  # it was answered too late
        if message.explanation is None:
            asked.set_exception(EngineError("the engine could not explain this prompt; its log has the details"))
        else:
            asked.set_result(message.explanation)

    def _hand_out(self, output: RequestOutput) -> None:
        opened = self._open.get(output.request_id)
        if opened is None or opened.has_ended:
            return  # it has just been aborted
        opened.queue.put_nowait(output)
        if opened.unread is not None:
            opened.unread.note_put(output, self._num_messages)
            if opened.unread.is_full:
                self._cut(output.request_id, opened, opened.unread)
        if output.finish_reason is not None:
            self._progress.note_advance()  # a refusal takes no step
            self._note_end(opened)

    def _cut(self, request_id: str, opened: _Open, unread: Unread) -> None:
        """Abort a request whose outputs nobody takes. Its reader, if it ever comes, finds an error in their place."""
        if not opened.has_ended:
            self._note_end(opened)
            self._send(Abort([request_id]))
        while not opened.queue.empty():
            waiting = opened.queue.get_nowait()
            if isinstance(waiting, RequestOutput):
                unread.note_read(waiting)
        limit = unread.limit_nbytes
        opened.queue.put_nowait(SlowReaderError(f"more than {limit} bytes of this stream waited for their reader; read faster"))

    def _note_end(self, opened: _Open) -> None:
        if not opened.has_ended:
            opened.has_ended = True
            self._num_unfinished -= 1
            self._note_pending()

    def _note_pending(self) -> None:
        if not self._num_unfinished and self._stats is None and not self._explanations:
            self._progress.note_idle()


async def _answer(waiter: "asyncio.Future[T]") -> T:
    """What a question's answer says. Raises DeadlineError when it does not come."""
    try:
        return await asyncio.wait_for(asyncio.shield(waiter), ANSWER_LIMIT_S)
    except TimeoutError:
        raise DeadlineError(f"the engine did not answer within {ANSWER_LIMIT_S:g} s; try again later") from None


async def _next(opened: _Open) -> RequestOutput:
    """The next output, with all that have piled up behind it merged in. Raises what was put in place of one."""
    first = _read(opened, await opened.queue.get())
    while not opened.queue.empty() and first.finish_reason is None:
        first = _merge(first, _read(opened, opened.queue.get_nowait()))
    return first


def _read(opened: _Open, taken: RequestOutput | HybridServeError) -> RequestOutput:
    if isinstance(taken, HybridServeError):
        raise taken
    if opened.unread is not None:
        opened.unread.note_read(taken)
    return taken


def _merge(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """One output that says what both say."""
    first.new_token_ids = first.new_token_ids + second.new_token_ids
    if second.logprobs is not None:
        first.logprobs = (first.logprobs or []) + second.logprobs
    first.finish_reason, first.stop_token_id = second.finish_reason, second.stop_token_id
    first.error, first.error_type = second.error, second.error_type
    return first


def _refusal(output: RequestOutput) -> HybridServeError:
    return exception_of(Fatal(output.error_type or "EngineError", output.error or "the engine refused the request"))
