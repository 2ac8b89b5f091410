"""In which order cached entries give up their memory: one queue over all groups.

Owns the priorities. An entry is a node without children and checkpoints (text that nothing deeper needs), a checkpoint, or a
window block; so a parent never goes before its children, and text never before the states that need it. Knows no pages; the
coordinator evicts what it is handed.

Policy `cost` is GreedyDual-Size-Frequency (Cherkasova 1998): priority = clock at last use + frequency x tokens saved per byte,
and the clock moves to the priority of what was last evicted, so that what was once valuable ages. Policy `lru` is last use alone.
"""

import heapq
from collections.abc import Callable, Iterator
from itertools import count
from typing import Literal, TypeAlias

from hybridserve.kv.prefix import Checkpoint, Node, WindowBlock

Entry: TypeAlias = Node | Checkpoint | WindowBlock
Policy: TypeAlias = Literal["cost", "lru"]

#: Priority of what no hit can use: text past the last state of a model with states.
WORTHLESS = -1.0


class EvictionQueue:
    """Entries by priority. Re-inserting an entry makes its older place stale; stale places are skipped when met."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._heap: list[tuple[float, int, Entry]] = []
        self._order = count()
        self.clock = 0.0

    def stamp(self) -> float:
        """The time of a use, to be kept by the entry that was used."""
        if self._policy == "lru":
            self.clock += 1.0
        return self.clock

    def push(self, entry: Entry, worth: float) -> None:
        """Put an entry where its last use and its worth (tokens saved per byte, times frequency) place it."""
        if worth == WORTHLESS:
            entry.priority = WORTHLESS
        else:
            entry.priority = entry.stamp + (worth if self._policy == "cost" else 0.0)
        heapq.heappush(self._heap, (entry.priority, next(self._order), entry))

    def pop(self, is_evictable: Callable[[Entry], bool]) -> Entry | None:
        """The evictable entry of lowest priority, taken out of the queue; None when there is none."""
        while self._heap:
            priority, _, entry = heapq.heappop(self._heap)
            if entry.priority == priority and is_evictable(entry):
                return entry
        return None

    def evicted(self, entry: Entry) -> None:
        """Note that an entry was evicted: whatever is used from now on outlives what was worth as little."""
        if self._policy == "cost":
            self.clock = max(self.clock, entry.priority)

    def put_back(self, entry: Entry) -> None:
        """Return an entry that was popped and not evicted."""
        heapq.heappush(self._heap, (entry.priority, next(self._order), entry))

    def entries(self) -> Iterator[Entry]:
        """Entries in the queue, stale places included, in no order."""
        return (entry for _, _, entry in self._heap)
