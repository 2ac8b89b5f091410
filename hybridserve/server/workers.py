"""Threads for work on text that a client controls, off the event loop and with a time limit.

Owns a bounded pool. Must not know what the work is. Called by `prompts.py` and the tokenize routes.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from hybridserve.errors import OverloadedError, RequestError

T = TypeVar("T")


class Workers:
    """A few threads and a bound on how many jobs may wait for them."""

    def __init__(self, *, num_threads: int = 2, max_waiting: int = 1024, limit_s: float = 30.0) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="hybridserve-text")
        self._max_waiting = max_waiting
        self._limit_s = limit_s
        self._num_jobs = 0

    async def run(self, job: Callable[[], T]) -> T:
        """Result of `job`. Raises OverloadedError when too many wait, RequestError when it takes longer than the limit."""
        if self._num_jobs >= self._max_waiting:
            raise OverloadedError(f"{self._num_jobs} prompts wait to be tokenised; at most {self._max_waiting}; try again soon")
        self._num_jobs += 1
        future = asyncio.get_running_loop().run_in_executor(self._pool, job)
        future.add_done_callback(self._finished)
        try:
            async with asyncio.timeout(self._limit_s):
                return await future
        except TimeoutError:
            raise RequestError(f"preparing the prompt took longer than {self._limit_s:g} s; shorten it") from None

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _finished(self, _future: "asyncio.Future[T]") -> None:
        self._num_jobs -= 1
