"""In which order cached entries give up their memory: one queue over all groups.

Owns the priorities. An entry is the end of a run of text that nothing deeper needs, a checkpoint, or a span of window blocks; so
a parent never goes before its children, and text never before the states that need it. Knows no pages; the
cache evicts what it is handed.

Policy `cost` supposes that an entry which was not used for a time t is used again at a rate that falls as exp(-t / T), with T
learned from the ages of entries when they are hit. What an entry is worth is then worth x exp(-age / T), and since all age alike
their order is that of log(worth) + last use / T, a number that never changes. The clock runs in units of T, so that what was
queued under another T keeps its place. Policy `lru` is last use alone.
"""

import heapq
import math
from collections.abc import Callable
from typing import Literal, TypeAlias

from hybridserve.kv.entries import Checkpoint, Run, WindowSpan

Entry: TypeAlias = Run | Checkpoint | WindowSpan
Policy: TypeAlias = Literal["cost", "lru"]

_LEAST_WORTH = 1e-30
#: Uses after which an entry's chance has fallen to 1/e, before anything was learned, and at the least.
_FIRST_LIFETIME = 200.0
_SHORTEST_LIFETIME = 20.0
_LEARNING_RATE = 0.02
#: Places in the queue below which looking for stale ones is not worth it.
_LEAST_SWEPT = 1024
#: Lifetimes: one use after a very long time says no more than this.
_LONGEST_AGE = 20.0


class EvictionQueue:
    """Entries by priority. Re-inserting an entry makes its older place stale; stale places are skipped when met."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._heap: list[tuple[float, int, Entry]] = []
        self._num_tickets = 0
        self._most = _LEAST_SWEPT
        self._lifetime = _FIRST_LIFETIME  # in uses
        self._clock = 0.0  # in lifetimes

    def stamp(self) -> float:
        """The time of a use, to be kept by the entry that was used."""
        self._clock += 1.0 / self._lifetime
        return self._clock

    def hit(self, stamp: float) -> None:
        """Note that an entry last used at `stamp` was used again: this is what ages are measured against."""
        age = self._clock - stamp
        self._lifetime = max(_SHORTEST_LIFETIME, self._lifetime * (1.0 + _LEARNING_RATE * (min(age, _LONGEST_AGE) - 1.0)))

    def push(self, entry: Entry, worth: float) -> None:
        """Put an entry where its last use and its worth (tokens saved per byte, times its chance) place it."""
        entry.priority = self.priority_of(entry, worth)
        self.put_back(entry)

    def put_back(self, entry: Entry) -> None:
        """Return an entry that was popped and not evicted to its place."""
        self._num_tickets += 1
        entry.ticket = self._num_tickets
        heapq.heappush(self._heap, (entry.priority, entry.ticket, entry))
        if len(self._heap) > self._most:
            self._sweep()

    def _sweep(self) -> None:
        """Drop stale places, which are only met by `pop` and would pile up while memory suffices."""
        self._heap = [place for place in self._heap if place[1] == place[2].ticket and not place[2].evicted]
        heapq.heapify(self._heap)
        self._most = 2 * len(self._heap) + _LEAST_SWEPT

    def pop(self, is_evictable: Callable[[Entry], bool]) -> Entry | None:
        """The evictable entry of lowest priority, taken out of the queue; None when there is none."""
        while self._heap:
            _, ticket, entry = heapq.heappop(self._heap)
            if entry.ticket == ticket and is_evictable(entry):
                return entry
        return None

    def would_keep(self, worth: float, is_evictable: Callable[[Entry], bool]) -> bool:
        """Whether something new of this worth would outlast another entry. Under plain LRU all would: so none may."""
        while self._heap:
            priority, ticket, entry = self._heap[0]
            if entry.ticket == ticket and is_evictable(entry):
                return self._policy == "cost" and priority < math.log(max(worth, _LEAST_WORTH)) + self._clock
            heapq.heappop(self._heap)
        return False

    def priority_of(self, entry: Entry, worth: float) -> float:
        """Where an entry belongs."""
        if self._policy == "lru":
            return entry.stamp if worth < math.inf else math.inf
        return math.log(max(worth, _LEAST_WORTH)) + entry.stamp
