"""Whether an engine advances, judged by the steps that it has completed.

Owns the time since when there has been work and no progress. Must not know messages or processes: `client.py` tells it what
was asked and what came. An engine that answers questions and completes no step does not advance.
"""

import time
from collections.abc import Callable


class Progress:
    """One engine's advance. Times are seconds of `clock`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: float | None = None  # None: nothing is asked of it
        self._num_steps = 0

    @property
    def stalled_s(self) -> float:
        """Seconds for which there has been work and no progress; 0 without work."""
        return 0.0 if self._since is None else self._clock() - self._since

    def note_asked(self) -> None:
        """Something has been asked of the engine."""
        if self._since is None:
            self._since = self._clock()

    def note_advance(self) -> None:
        """The engine has done something that it was asked for."""
        if self._since is not None:
            self._since = self._clock()

    def note_steps(self, num_steps: int) -> None:
        """The engine said how many steps it has completed since its start."""
        if num_steps != self._num_steps:
            self._num_steps = num_steps
            self.note_advance()

    def note_idle(self) -> None:
        """Nothing is asked of the engine any more."""
        self._since = None
