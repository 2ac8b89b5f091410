"""How much of the memory running requests may take, so that what they leave behind is still there when it is wanted.

Owns one number. With too little memory for all conversations at once, requests that run push out the text of those that wait;
these then compute it anew, run longer and push out more, and the engine stays in that state even when less would arrive. As an
operating system that thrashes runs fewer programs, the scheduler starts fewer requests while much of what it computes had been
there before. Written and read by `scheduler.py` alone.
"""

from typing import Final

#: Share of the memory that running requests may always take.
_LEAST: Final = 0.25
#: What a request that computes mostly evicted text takes off the share, and what any other gives back.
_SHRINK: Final = 0.9
_GROWTH: Final = 0.02
#: Part of what a request computes that must have been evicted for it to count.
_MOSTLY: Final = 0.5


class LoadControl:
    """The share of the memory beyond which no request is started beside those that run."""

    def __init__(self) -> None:
        self.share = 1.0

    @property
    def is_limiting(self) -> bool:
        return self.share < 1.0

    def note(self, num_computed: int, num_evicted: int) -> None:
        """A request starts: of the prompt tokens that it computes, so many were there once and gave way to something else."""
        if num_evicted > _MOSTLY * num_computed:
            self.share = max(_LEAST, self.share * _SHRINK)
        else:
            self.share = min(1.0, self.share + _GROWTH)
