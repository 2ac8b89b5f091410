"""Which of the waiting requests starts next.

Owns the choice, not the queue. The request whose wait is longest for what it has to compute starts first: so one whose prefix is
cached passes others before its prefix gives way to them, a short one is not held up by long ones, and nobody is passed for ever,
since a wait counts for more the longer it lasts. (Known as highest response ratio next.) Waits are counted in tokens that the
engine has computed meanwhile: no clock, so that a replay chooses as a server does. Called by `scheduler.py` alone.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Final

from hybridserve.engine.seats import Running
from hybridserve.kv.lookup import Match

#: Waiting requests among which the next is chosen; of these, so many are looked up anew for a choice, beside the chosen one.
CANDIDATES: Final = 256
_LOOKED_UP: Final = 16
#: Of so many starts in a row, one is of the request that came first, whatever the others have cached.
TURN_OF_THE_OLDEST: Final = 16
#: Tokens that a start costs beside those that it computes: a pass has a price of its own.
_FIXED_COST: Final = 64


class StartOrder:
    """Chooses by what each request has waited and has to compute. What is cached of it is looked up from time to time."""

    def __init__(self, match: Callable[[Running], Match]) -> None:
        self._match = match
        self._num_computed = 0
        self._num_started = 0
        self._num_choices = 0

    def arrive(self, running: Running) -> None:
        """A request begins to wait."""
        running.num_computed_before = self._num_computed

    def compute(self, num_tokens: int) -> None:
        """The engine has computed so many tokens more."""
        self._num_computed += num_tokens

    def start(self) -> None:
        """The request that was chosen has started."""
        self._num_started += 1

    def leave(self, running: Running, waiting: Iterable[Running]) -> None:
        """What `running` leaves behind may be what some of `waiting` go on from: they are looked up first."""
        for one in islice(waiting, CANDIDATES):
            if one.start == running.start:
                one.looked_up_at = -1

    def choose(self, candidates: Sequence[Running]) -> tuple[Running, Match]:
        """The request to start, with what of it is cached. `candidates`, at least one, are in order of arrival."""
        if len(candidates) == 1 or self._num_started % TURN_OF_THE_OLDEST == TURN_OF_THE_OLDEST - 1:
            return candidates[0], self._match(candidates[0])
        self._num_choices += 1
        found = {one: self._look_up(one) for one in sorted(candidates, key=lambda one: one.looked_up_at)[:_LOOKED_UP]}
        while True:
            chosen = max(candidates, key=self._ratio)
            if chosen in found:
                return chosen, found[chosen]
            found[chosen] = self._look_up(chosen)  # what was cached of it may be gone: then another is better by now

    def _look_up(self, running: Running) -> Match:
        match = self._match(running)
        running.num_to_compute = running.num_known - match.num_tokens
        running.looked_up_at = self._num_choices
        return match

    def _ratio(self, running: Running) -> float:
        cost = _FIXED_COST + running.most_to_compute
        # Of those that have not waited at all, too, the one with least to compute is first.
        return (_FIXED_COST + self._num_computed - running.num_computed_before) / cost
