"""Requests of a trace: when they came, what their prompts share, how long their answers were.

Owns the readers of trace files and the generators of synthetic ones. A prompt is a list of segments; equal keys mean equal text,
so what two prompts share is known without text. Must not know the engine. Called by `cli/replay.py` and benchmarks.
"""

import gzip
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from hybridserve.errors import UsageError

_MASK = 0x7FFF_FFFF


class Segment(NamedTuple):
    """A stretch of text: the first `length` tokens of the stream that `key` names."""

    key: int
    length: int


@dataclass(frozen=True)
class TraceRequest:
    """One request. `answer` is the text that it generates."""

    arrival_s: float
    prompt: tuple[Segment, ...]
    answer: Segment

    @property
    def num_prompt(self) -> int:
        return sum(segment.length for segment in self.prompt)


def tokens_of(*segments: Segment) -> NDArray[np.int32]:
    """Token ids of segments, one behind the other: each a stream of 31-bit numbers that differs by key from the first on."""
    lengths = np.array([segment.length for segment in segments], np.int64)
    starts = np.cumsum(lengths) - lengths
    keys = np.array([_mix(segment.key) for segment in segments], np.uint64)
    index = (np.arange(int(lengths.sum())) - np.repeat(starts, lengths)).astype(np.uint64)
    mixed = (index + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) ^ np.repeat(keys, lengths)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return ((mixed >> np.uint64(31)) & np.uint64(_MASK)).astype(np.int32)


def _mix(key: int) -> int:
    return (key * 0x94D049BB133111EB + 0x2545F4914F6CDD1D) & (2**64 - 1)


class _Row(msgspec.Struct):
    """A line of a trace file."""

    input_length: Annotated[int, msgspec.Meta(ge=1)]
    output_length: Annotated[int, msgspec.Meta(ge=0)]
    hash_ids: list[int]
    timestamp: float | None = None
    timestamp_ms: float = 0.0
    session: str | int = ""

    @property
    def arrival_ms(self) -> float:
        return self.timestamp_ms if self.timestamp is None else self.timestamp


def read_trace(path: str) -> list[TraceRequest]:
    """Read Mooncake-style jsonl (`.gz` too): one object a line with a time in ms, lengths, and ids of consecutive blocks.

    The block's unit in tokens is what the lengths imply. With a `session`, ids count within it. Tokens behind the last id, fewer
    than a unit, are taken for the beginning of the block that follows in the next prompt which goes on from this one; if there is
    none, for text of their own. Raises UsageError.
    """
    try:
        with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as file:
            decoder = msgspec.json.Decoder(_Row)
            rows = [decoder.decode(line) for line in file if not line.isspace()]
    except (OSError, EOFError, ValueError) as error:
        hint = "each line needs input_length, output_length and hash_ids"
        raise UsageError(f"trace {path!r}: {error}; give a jsonl file, plain or gzipped; {hint}") from error
    unit = _unit_of(rows)
    bases: dict[str | int, int] = {}
    blocks: dict[int, Segment] = {}  # one object for each block, however many prompts have it
    following: dict[tuple[str | int, int], list[int]] = {}  # by session and first id: ids of the next prompt
    requests = []
    for row in sorted(rows, key=lambda row: row.arrival_ms, reverse=True):
        base = bases.setdefault(row.session, len(bases)) << 40
        name = (row.session, row.hash_ids[0] if row.hash_ids else -1)
        requests.append(_request(row, unit, base, following.get(name, []), blocks))
        following[name] = row.hash_ids
    return requests[::-1]


def _unit_of(rows: list[_Row]) -> int:
    """Tokens per block: the smallest power of two at which every prompt fits its ids, but for less than a block."""
    units = (1 << power for power in range(4, 20))
    return next((unit for unit in units if all(row.input_length // unit <= len(row.hash_ids) for row in rows)), 1 << 20)


def _request(row: _Row, unit: int, base: int, following: list[int], blocks: dict[int, Segment]) -> TraceRequest:
    whole, rest = divmod(row.input_length, unit)
    segments = [
        blocks.get(base + block) or blocks.setdefault(base + block, Segment(base + block + 1, unit))
        for block in row.hash_ids[:whole]
    ]
    own = (1 << 62) + hash_of(base, row.arrival_ms, row.input_length, row.hash_ids[-1:])
    if rest:
        goes_on = len(following) > whole and following[:whole] == row.hash_ids[:whole]
        known = row.hash_ids if len(row.hash_ids) > whole else following if goes_on else []
        segments.append(Segment(base + known[whole] + 1 if known else own + 1, rest))
    return TraceRequest(row.arrival_ms / 1000, tuple(segments), Segment(own, max(1, row.output_length)))


def hash_of(*parts: object) -> int:
    """A stable 60-bit number from parts of a request, for text that nothing else repeats."""
    value = 1469598103934665603
    for byte in repr(parts).encode():
        value = ((value ^ byte) * 1099511628211) & (2**60 - 1)
    return value


#: Synthetic traces by name; each takes the number of requests and a seed.
Generator = Callable[[int, random.Random], Iterator[TraceRequest]]


def shared_prefixes(num_requests: int, rng: random.Random) -> Iterator[TraceRequest]:
    """Requests that share one of several prefixes of 100 to 3,000 tokens, with about 100 tokens of their own."""
    lengths = [100, 300, 800, 1500, 3000]
    clock = 0.0
    for number in range(num_requests):
        clock += rng.expovariate(4.0)
        which = rng.randrange(len(lengths))
        own = Segment(1000 + number, rng.randint(60, 140))
        yield TraceRequest(clock, (Segment(1 + which, lengths[which]), own), Segment(10**9 + number, rng.randint(20, 100)))


def conversations(num_requests: int, rng: random.Random) -> Iterator[TraceRequest]:
    """Chats that grow turn by turn; in a third of them the start of each answer is thinking, which history leaves out."""
    made, chats = 0, list[TraceRequest]()
    chat = 0
    while made < num_requests:
        chat += 1
        clock, strips = rng.uniform(0, num_requests / 4), rng.random() < 1 / 3
        history = [Segment(chat % 3 + 1, 400)]
        for turn in range(min(rng.randint(1, 10), num_requests - made)):
            key = chat * 1000 + turn * 10 + 10**6
            history.append(Segment(key, rng.randint(20, 300)))
            answer = Segment(key + 1, rng.randint(50, 400))
            chats.append(TraceRequest(clock, tuple(history), answer))
            # With thinking stripped, what history holds of the answer is text that no cache has seen at that place.
            history.append(Segment(key + 2, max(10, answer.length // 3)) if strips else answer)
            clock += rng.expovariate(1 / 20)
            made += 1
    yield from chats


def branches(num_requests: int, rng: random.Random) -> Iterator[TraceRequest]:
    """Agents that go back to an earlier point and try again."""
    clock, trunk = 0.0, [Segment(1, 2000)]
    for number in range(num_requests):
        clock += rng.expovariate(2.0)
        if rng.random() < 0.3 and len(trunk) > 1:
            trunk = trunk[: rng.randint(1, len(trunk))]
        trunk = [*trunk, Segment(10**6 + number, rng.randint(50, 500))]
        answer = Segment(10**9 + number, rng.randint(20, 200))
        yield TraceRequest(clock, tuple(trunk), answer)
        trunk = [*trunk, answer] if len(trunk) < 40 else [Segment(1, 2000)]


def bursts(num_requests: int, rng: random.Random) -> Iterator[TraceRequest]:
    """Sixteen requests at once with the same new prefix, again and again."""
    for number in range(num_requests):
        group = number // 16
        prompt = (Segment(1 + group, 1500), Segment(10**6 + number, rng.randint(50, 700)))
        yield TraceRequest(group * 5.0, prompt, Segment(10**9 + number, rng.randint(20, 100)))


SYNTHETIC: Mapping[str, Generator] = {
    "shared-prefixes": shared_prefixes,
    "conversations": conversations,
    "branches": branches,
    "bursts": bursts,
}


def load_trace(name: str, *, num_requests: int | None, seed: int) -> list[TraceRequest]:
    """A trace file's requests, or a synthetic trace's by name. Raises UsageError."""
    if name in SYNTHETIC:
        made = SYNTHETIC[name](num_requests or 1000, random.Random(seed))
        return sorted(made, key=lambda request: request.arrival_s)
    if not Path(name).is_file():
        raise UsageError(f"trace {name!r} is no file, and no synthetic trace; known: {', '.join(SYNTHETIC)}")
    return read_trace(name)[:num_requests]
