"""Threads for work on text that a client controls, off the event loop and with a time limit.

Owns a few threads for short texts, one for long ones and one for large replies. What texts wait is bounded, and a short one never
waits behind a long one. Must not know what the work is. Called by `prompts.py` and the routes.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from hybridserve.errors import OverloadedError, RequestError

T = TypeVar("T")

#: Texts of more characters, and bodies of more bytes, are long: they take more than some hundredths of a second.
SHORT_SIZE = 2**16
#: How many long ones may wait. Each may need a hundred times its bytes while it is worked on, and none while it waits.
MAX_LONG_WAITING = 16
_RETRY_S = 5.0


class Workers:
    """Two lanes of threads."""

    def __init__(self, *, num_threads: int = 2, max_waiting: int = 1024, limit_s: float = 30.0) -> None:
        self._short = _Lane(num_threads, max_waiting, "hybridserve-text")
        self._long = _Lane(1, min(max_waiting, MAX_LONG_WAITING), "hybridserve-long-text")
        # Decoding a body is cheap beside tokenising its text, so it never waits behind that.
        self._bodies = _Lane(1, max_waiting, "hybridserve-body")
        # Of replies no more wait than calls hold places: a finished call is neither refused nor behind texts.
        self._replies = ThreadPoolExecutor(1, thread_name_prefix="hybridserve-reply")
        self._limit_s = limit_s

    async def run(self, job: Callable[[], T], *, size: int = 0) -> T:
        """Result of `job`, which works on `size` characters, bytes or tokens.

        Raises OverloadedError when too many wait or its turn does not come, RequestError when it takes longer than the limit.
        """
        return await self._run(self._short if size <= SHORT_SIZE else self._long, job)

    async def decode(self, job: Callable[[], T]) -> T:
        """Result of `job`, which decodes a large body. Raises as `run` does."""
        return await self._run(self._bodies, job)

    async def _run(self, lane: "_Lane", job: Callable[[], T]) -> T:
        future, started = lane.submit(job)
        try:
            async with asyncio.timeout(self._limit_s):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            if not started.is_set():
                raise OverloadedError(
                    f"this text waited longer than {self._limit_s:g} s for others; send it again later", retry_after_s=_RETRY_S
                ) from None
            raise RequestError(f"preparing the prompt took longer than {self._limit_s:g} s; shorten it") from None

    async def build(self, job: Callable[[], T]) -> T:
        """Result of `job`, which builds the large reply of a finished call."""
        return await asyncio.wrap_future(self._replies.submit(job))

    def close(self) -> None:
        self._short.close()
        self._long.close()
        self._bodies.close()
        self._replies.shutdown(wait=False, cancel_futures=True)


class _Lane:
    """Threads of one kind, and the number of jobs that they have or that wait for them."""

    def __init__(self, num_threads: int, max_waiting: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._max_jobs = max_waiting
        self._num_jobs = 0
        self._lock = threading.Lock()

    def submit(self, job: Callable[[], T]) -> "tuple[Future[T], threading.Event]":
        """The result to come, and whether a thread has begun. Raises OverloadedError."""
        with self._lock:
            if self._num_jobs >= self._max_jobs:
                waiting = f"{self._num_jobs} texts wait to be tokenised; at most {self._max_jobs}"
                raise OverloadedError(f"{waiting}; try again soon", retry_after_s=_RETRY_S)
            self._num_jobs += 1
        started = threading.Event()

        def run() -> T:
            started.set()
            return job()

        future = self._pool.submit(run)
        # Of the thread's own future: a job that nobody waits for any more still takes its thread.
        future.add_done_callback(self._finished)
        return future, started

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _finished(self, _future: "Future[T]") -> None:
        with self._lock:
            self._num_jobs -= 1
