"""Requests of a trace: when they came, what their prompts share, how long their answers were.

Owns the readers of trace files and the generators of synthetic ones. A prompt is a list of segments; equal keys mean equal text,
so what two prompts share is known without text. Must not know the engine. Called by `cli/replay.py` and benchmarks.
"""

import gzip
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

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


def tokens_of(segment: Segment) -> NDArray[np.int32]:
    """Token ids of a segment: a stream of 31-bit numbers that differs from its first token on between keys."""
    index = np.arange(segment.length, dtype=np.uint64)
    mixed = (index + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) ^ np.uint64(_mix(segment.key))
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return ((mixed >> np.uint64(31)) & np.uint64(_MASK)).astype(np.int32)


def _mix(key: int) -> int:
    return (key * 0x94D049BB133111EB + 0x2545F4914F6CDD1D) & (2**64 - 1)


def read_trace(path: str) -> list[TraceRequest]:
    """Read Mooncake-style jsonl (`.gz` too): one object a line with a time in ms, lengths, and ids of consecutive blocks.

    The block's unit in tokens is what the lengths imply. With a `session`, ids count within it. Raises UsageError.
    """
    opener: Callable[..., Any] = gzip.open if path.endswith(".gz") else open
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            rows = [json.loads(line) for line in file if line.strip()]
    except (OSError, ValueError) as error:
        raise UsageError(f"trace {path!r}: {error}; give a jsonl file, plain or gzipped") from error
    unit = _unit_of(rows, path)
    sessions: dict[str, int] = {}
    requests = [_request(row, unit, sessions) for row in rows]
    return sorted(requests, key=lambda request: request.arrival_s)


def _unit_of(rows: list[dict[str, Any]], path: str) -> int:
    """Tokens per block: the smallest power of two at which every prompt fits its ids."""
    try:
        need = max(-(-row["input_length"] // max(1, len(row["hash_ids"]))) for row in rows)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"trace {path!r}: a line lacks {error}; each needs input_length, output_length and hash_ids") from error
    return 1 << (need - 1).bit_length()


def _request(row: Mapping[str, Any], unit: int, sessions: dict[str, int]) -> TraceRequest:
    session = str(row.get("session", ""))
    base = sessions.setdefault(session, len(sessions)) << 40
    length, ids = int(row["input_length"]), row["hash_ids"]
    segments = [Segment(base + int(block) + 1, unit) for block in ids[: length // unit]]
    if length % unit and len(ids) > length // unit:
        segments.append(Segment(base + int(ids[length // unit]) + 1, length % unit))
    arrival_s = float(row.get("timestamp", row.get("timestamp_ms", 0))) / 1000
    fresh = (1 << 62) + hash_of(base, arrival_s, row["input_length"], row["hash_ids"][-1:])
    return TraceRequest(arrival_s, tuple(segments), Segment(fresh, max(1, int(row["output_length"]))))


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
