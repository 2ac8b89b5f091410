"""How likely checkpoints are to be resumed from, learned from the traffic.

Owns the counts. A checkpoint that was evicted and would have been resumed from counts as well: else what is evicted early would
look useless, and be evicted earlier still. Knows nothing of pages or text. `PrefixCache` is its only caller.
"""

from collections import Counter
from typing import Final

from hybridserve.kv.entries import Kind

#: Checkpoints of a kind, and uses of them, that are assumed before any were counted.
_PRIOR_SEEN: Final = 8.0
_PRIOR_USED: Final = 4.0


class Odds:
    """Counts by kind."""

    def __init__(self) -> None:
        self._seen: Counter[Kind] = Counter()
        self._used: Counter[Kind] = Counter()

    def see(self, kind: Kind) -> None:
        """There is one more checkpoint of this kind."""
        self._seen[kind] += 1

    def use(self, kind: Kind) -> None:
        """One of this kind was resumed from for the first time, or would have been."""
        self._used[kind] += 1

    def chance(self, kind: Kind) -> float:
        """The share of this kind that is ever resumed from."""
        return (self._used[kind] + _PRIOR_USED) / (self._seen[kind] + _PRIOR_SEEN)
