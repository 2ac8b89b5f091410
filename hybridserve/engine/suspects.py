"""Which request makes passes fail.

Owns the groups of requests that are still to be tried. The sequences of a failed pass run again in halves, each half for itself
and nothing beside it, until one fails alone: that one ends, with at most twice as many failed passes as there were sequences. A
request is cleared when it has come past the token where the pass failed; so whatever fails, every try ends or goes forward. Must
not know memory or passes: `scheduler.py` tells it what failed and what went well.
"""

from collections.abc import Mapping

from hybridserve.engine.seats import Running


class Suspects:
    """Groups of requests; only the last one runs, until all in it are cleared or gone."""

    def __init__(self) -> None:
        self._groups: list[dict[Running, int]] = []

    @property
    def on_trial(self) -> Mapping[Running, int] | None:
        """The only requests that may run now, each with the tokens that it must have computed to be cleared; None: all may."""
        return self._groups[-1] if self._groups else None

    def accuse(self, ends: Mapping[Running, int]) -> None:
        """A pass failed that would have computed so many tokens of each of these, two or more of them."""
        targets = {one: max(end, self._target(one)) for one, end in ends.items()}
        for running in targets:
            self.clear(running)
        both, half = list(targets.items()), len(targets) // 2
        self._groups += [dict(both[half:]), dict(both[:half])]

    def clear(self, running: Running) -> None:
        """This request is none any more: it has come past its failed pass, or has ended."""
        for group in self._groups:
            group.pop(running, None)
        self._groups = [group for group in self._groups if group]

    def _target(self, running: Running) -> int:
        return max((group[running] for group in self._groups if running in group), default=0)
