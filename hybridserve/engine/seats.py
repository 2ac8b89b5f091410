"""The running requests as arrays: one seat each, so that a step over all of them is array arithmetic.

Owns the token table and the per-seat numbers. Written by `scheduler.py` alone; the runner and the sampler read. No torch.
"""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hybridserve.kv.coordinator import Left
from hybridserve.request import EngineRequest, Explanation

Ints = NDArray[np.int64]

#: Fills unused places of the table of stop ids; no token has it.
NO_TOKEN = -1
#: Tokens that a prefix must save before a request waits for it.
MIN_SHARED = 16


@dataclass(eq=False)
class Running:
    """A request from arrival to finish. While it is seated its tokens are in the token table; `output` is kept when it leaves."""

    request: EngineRequest
    arrival: int  # order of arrival; a preempted request keeps it
    limit: int  # tokens, prompt included, at which it ends by length
    stop_ids: tuple[int, ...]
    output: list[int] = field(default_factory=list)
    num_cached: int | None = None  # prompt tokens that the first prefix hit saved
    explanation: Explanation | None = None
    seat: int | None = None
    was_examined: bool = False  # whether it was compared, while waiting, with what runs
    awaits: "Awaited | None" = None  # a running request that computes a prefix of this one, which waits for it
    has_waited: bool = False  # whether it did so once
    left: Left | None = None  # what it had written when it was preempted
    num_computed_before: int = 0  # tokens that the engine had computed when it came
    num_to_compute: int | None = None  # tokens of it that were not cached when that was last looked up
    looked_up_at: int = -1  # which choice of a request to start that was
    was_announced: bool = False  # whether the first output, with cached tokens and explanation, was sent

    @cached_property
    def prompt(self) -> NDArray[np.int32]:
        """The prompt as an array, made once."""
        return np.array(self.request.prompt_token_ids, np.int32)

    @property
    def known_tokens(self) -> NDArray[np.int32]:
        """Prompt and output so far, of a request that has no seat."""
        return np.concatenate([self.prompt, np.array(self.output, np.int32)]) if self.output else self.prompt

    @property
    def num_known(self) -> int:
        """Tokens of prompt and output so far, of a request that has no seat."""
        return len(self.prompt) + len(self.output)

    @property
    def most_to_compute(self) -> int:
        """Tokens that it has to compute, of a request that has no seat, as far as it is known what of it is cached."""
        return self.num_known if self.num_to_compute is None else self.num_to_compute

    @cached_property
    def start(self) -> tuple[str, bytes]:
        """What two requests must have in common before it is worth comparing them."""
        return self.request.cache.salt, self.prompt[:MIN_SHARED].tobytes()


@dataclass(frozen=True)
class Awaited:
    """A prefix that another request computes: `running`, in its seat, has not come to `position` yet."""

    running: Running
    seat: int
    position: int


class Seats:
    """Arrays over seats. A free seat's numbers mean nothing."""

    def __init__(self, num_seats: int, max_model_len: int) -> None:
        # Untouched rows cost no memory: the pages are the operating system's until written.
        self.tokens: NDArray[np.int32] = np.zeros((num_seats, max_model_len + 1), np.int32)
        self.num_tokens: Ints = np.zeros(num_seats, np.int64)
        self.num_computed: Ints = np.zeros(num_seats, np.int64)
        self.num_prompt: Ints = np.zeros(num_seats, np.int64)
        self.arrival: Ints = np.zeros(num_seats, np.int64)
        self.limit: Ints = np.zeros(num_seats, np.int64)
        self.stop_ids: Ints = np.full((num_seats, 1), NO_TOKEN, np.int64)
        self.running: list[Running | None] = [None] * num_seats
        self._free = list(range(num_seats - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, running: Running) -> int:
        """Seat a request and write its known tokens. Nothing is computed yet."""
        seat = self._free.pop()
        tokens = running.known_tokens
        self.running[seat] = running
        self.tokens[seat, : len(tokens)] = tokens
        self.arrival[seat] = running.arrival
        self.num_tokens[seat] = len(tokens)
        self.num_prompt[seat] = len(running.request.prompt_token_ids)
        self.num_computed[seat] = 0
        self.limit[seat] = running.limit
        self._write_stop_ids(seat, running.stop_ids)
        running.seat = seat
        return seat

    def give_back(self, seat: int) -> Running:
        """Empty a seat and return who sat there."""
        running = self.running[seat]
        assert running is not None, f"seat {seat} is empty"
        running.output = self.tokens[seat, self.num_prompt[seat] : self.num_tokens[seat]].tolist()
        self.running[seat] = None
        running.seat = None
        self._free.append(seat)
        return running

    def _write_stop_ids(self, seat: int, ids: tuple[int, ...]) -> None:
        if len(ids) > self.stop_ids.shape[1]:
            wider = np.full((len(self.stop_ids), len(ids)), NO_TOKEN, np.int64)
            wider[:, : self.stop_ids.shape[1]] = self.stop_ids
            self.stop_ids = wider
        self.stop_ids[seat] = NO_TOKEN
        self.stop_ids[seat, : len(ids)] = ids
