"""Requests of a trace: when they came, what their prompts share, how long their answers were.

Owns the readers of trace files and the generators of synthetic ones. A prompt is a list of segments; equal keys mean equal text,
so what two prompts share is known without text. Must not know the engine. Called by `cli/replay.py` and benchmarks.
"""

import gzip
import random
import zlib
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


#: Tokens of a prompt or an answer, and milliseconds, beyond which a number in a trace is taken for a mistake.
_MOST_TOKENS = 1 << 26
_MOST_MS = 1e12

_Tokens = Annotated[int, msgspec.Meta(ge=0, le=_MOST_TOKENS)]
_Ms = Annotated[float, msgspec.Meta(ge=0, le=_MOST_MS)]


class _Row(msgspec.Struct):
    """A line of a trace file."""

    input_length: Annotated[int, msgspec.Meta(ge=1, le=_MOST_TOKENS)]
    output_length: _Tokens
    hash_ids: list[int]
    timestamp: _Ms | None = None
    timestamp_ms: _Ms = 0.0
    session: str | int = ""

    @property
    def arrival_ms(self) -> float:
        return self.timestamp_ms if self.timestamp is None else self.timestamp


def read_trace(path: str) -> list[TraceRequest]:
    """Read Mooncake-style jsonl (`.gz` too): one object a line with a time in ms, lengths, and ids of consecutive blocks.

    The block's unit in tokens is what the lengths of most lines imply. With a `session`, ids count within it. Tokens behind the
    last id, fewer than a unit, are taken for the beginning of the block that follows in the next prompt which goes on from this
    one; if there is none, for text of their own. Raises UsageError that names the line, for one that another unit would fit, too.
    """
    rows = _read_rows(path)
    if not rows:
        raise UsageError(f"trace {path!r} holds no requests; {_HINT}")
    unit = _unit_of(path, rows)
    numbers: dict[tuple[str | int, int], int] = {}  # of blocks, by session and id
    blocks: dict[int, Segment] = {}  # one object for each block, however many prompts have it
    following: dict[tuple[str | int, int], list[int]] = {}  # by session and first id: blocks of the next prompt
    requests = []
    for at, row in sorted(enumerate(rows.values()), key=lambda item: (item[1].arrival_ms, item[0]), reverse=True):
        ids = [numbers.setdefault((row.session, block), len(numbers)) for block in row.hash_ids]
        name = (row.session, ids[0] if ids else -1)
        requests.append(_request(row, at, unit, ids, following.get(name, []), blocks))
        following[name] = ids
    return requests[::-1]


_HINT = "give a jsonl file, plain or gzipped; each line needs input_length, output_length and hash_ids"


def _read_rows(path: str) -> dict[int, _Row]:
    """The rows of a file by their line numbers, from 1."""
    rows, number, decoder = dict[int, _Row](), 0, msgspec.json.Decoder(_Row)
    try:
        with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.isspace():
                    rows[number] = decoder.decode(line)
    except msgspec.MsgspecError as error:
        raise UsageError(f"trace {path!r}, line {number}: {error}; {_HINT}") from error
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise UsageError(f"trace {path!r}, after line {number}: {error}; {_HINT}") from error
    return rows


def _unit_of(path: str, rows: Mapping[int, _Row]) -> int:
    """Tokens per block: the smallest power of two at which most prompts have as many ids as blocks, the last one whole or not."""
    units = [1 << power for power in range(4, 21)]
    fits = {unit: sum(_has_ids_for(row, unit) for row in rows.values()) for unit in units}
    unit = max(units, key=lambda unit: fits[unit])
    for number, row in rows.items():
        if not _has_ids_for(row, unit):
            raise UsageError(
                f"trace {path!r}, line {number}: {len(row.hash_ids)} hash_ids for {row.input_length} tokens; at {unit} tokens an "
                f"id, as {fits[unit]} of {len(rows)} lines have it, there are {row.input_length // unit}, or one more for the "
                "rest; correct the line or leave it out"
            )
    return unit


def _has_ids_for(row: _Row, unit: int) -> bool:
    return row.input_length // unit <= len(row.hash_ids) <= -(-row.input_length // unit)


def _request(row: _Row, number: int, unit: int, ids: list[int], following: list[int], blocks: dict[int, Segment]) -> TraceRequest:
    whole, rest = divmod(row.input_length, unit)
    segments = [blocks.get(block) or blocks.setdefault(block, Segment(block + 1, unit)) for block in ids[:whole]]
    own = (1 << 62) + 2 * number
    if rest:
        goes_on = len(following) > whole and following[:whole] == ids[:whole]
        known = ids if len(ids) > whole else following if goes_on else []
        segments.append(Segment(known[whole] + 1 if known else own + 1, rest))
    return TraceRequest(row.arrival_ms / 1000, tuple(segments), Segment(own, max(1, row.output_length)))


#: Takes the number of requests and a seeded generator.
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
        clock += rng.expovariate(4.0)
        if rng.random() < 0.3 and len(trunk) > 1:
            trunk = trunk[: rng.randint(1, len(trunk))]
        trunk = [*trunk, Segment(10**6 + number, rng.randint(50, 500))]
        answer = Segment(10**9 + number, rng.randint(20, 200))
        yield TraceRequest(clock, tuple(trunk), answer)
        clock += answer.length / 100  # whoever goes on from an answer has read it
        trunk = [*trunk, answer] if len(trunk) < 40 else [Segment(1, 2000)]


def bursts(num_requests: int, rng: random.Random) -> Iterator[TraceRequest]:
    """Sixteen requests at once with the same new prefix, again and again."""
    for number in range(num_requests):
        group = number // 16
        prompt = (Segment(1 + group, 1500), Segment(10**6 + number, rng.randint(50, 700)))
        yield TraceRequest(group * 5.0, prompt, Segment(10**9 + number, rng.randint(20, 100)))


def retrieval(num_requests: int, rng: random.Random) -> Iterator[TraceRequest]:
    """Questions behind three of 300 documents, the best first; some documents are asked about far more often than others."""
    lengths = [rng.randint(300, 1500) for _ in range(300)]
    clock = 0.0
    for number in range(num_requests):
        clock += rng.expovariate(4.0)
        chosen = dict.fromkeys(min(299, int(rng.paretovariate(0.7)) - 1) for _ in range(3))
        documents = [Segment(100 + document, lengths[document]) for document in chosen]
        question = Segment(10**6 + number, rng.randint(20, 100))
        yield TraceRequest(clock, (Segment(1, 250), *documents, question), Segment(10**9 + number, rng.randint(30, 200)))


def agents(num_requests: int, rng: random.Random) -> Iterator[TraceRequest]:
    """Coding agents of 10,000 to 60,000 tokens: each turn sends all before it, the answer as it was, and what a tool returned."""
    made, session, found = 0, 0, list[TraceRequest]()
    while made < num_requests:
        session += 1
        clock = rng.uniform(0, num_requests / 2)
        history = [Segment(1, 6000), Segment(10**6 + session * 1000, rng.randint(4000, 30_000))]
        for turn in range(min(rng.randint(5, 30), num_requests - made)):
            answer = Segment(10**6 + session * 1000 + 2 * turn + 1, rng.randint(30, 400))
            found.append(TraceRequest(clock, tuple(history), answer))
            history += [answer, Segment(answer.key + 1, int(min(5000, rng.paretovariate(0.8) * 100)))]
            clock += rng.uniform(2, 20)
            made += 1
    yield from found


def trees(num_requests: int, rng: random.Random) -> Iterator[TraceRequest]:
    """Best of n: four answers to one prompt at once, and the same again behind each of the two best, five times."""
    made, clock, tree = 0, 0.0, 0
    while made < num_requests:
        tree += 1
        clock += rng.expovariate(1 / 10)
        paths, now = list[tuple[Segment, ...]](), clock
        paths.append((Segment(1, 300), Segment(10**6 + tree, rng.randint(200, 2000))))
        for _ in range(5):
            following = list[tuple[Segment, ...]]()
            for path in paths:
                for answer in (Segment(10**9 + made + i, rng.randint(50, 300)) for i in range(4)):
                    yield TraceRequest(now, path, answer)
                    following.append((*path, answer, Segment(2, 60)))
                    made += 1
                    if made == num_requests:
                        return
            paths, now = rng.sample(following, 2), now + 5.0


def edits(num_requests: int, rng: random.Random) -> Iterator[TraceRequest]:
    """Questions behind a long system prompt that is changed at some place after every few of them."""
    clock, system, key = 0.0, [Segment(1, 4000)], 1
    for number in range(num_requests):
        clock += rng.expovariate(2.0)
        if rng.random() < 1 / 8:
            at, kept, key = rng.randint(200, 3800), [], key + 1
            for segment in system:
                kept.append(Segment(segment.key, min(segment.length, at)))
                at -= kept[-1].length
                if not at:
                    break
            system = [*kept, Segment(key, 4000 - sum(segment.length for segment in kept))]
        question = Segment(10**6 + number, rng.randint(20, 200))
        yield TraceRequest(clock, (*system, question), Segment(10**9 + number, rng.randint(30, 200)))


#: Synthetic traces by name.
SYNTHETIC: Mapping[str, Generator] = {
    "shared-prefixes": shared_prefixes,
    "conversations": conversations,
    "branches": branches,
    "bursts": bursts,
    "retrieval": retrieval,
    "agents": agents,
    "trees": trees,
    "edits": edits,
}


def load_trace(name: str, *, num_requests: int | None, seed: int) -> list[TraceRequest]:
    """A trace file's requests, or a synthetic trace's by name. Raises UsageError."""
    if name in SYNTHETIC:
        made = SYNTHETIC[name](1000 if num_requests is None else num_requests, random.Random(seed))
        return sorted(made, key=lambda request: request.arrival_s)
    if not Path(name).is_file():
        raise UsageError(f"trace {name!r} is no file, and no synthetic trace; known: {', '.join(SYNTHETIC)}")
    return read_trace(name)[:num_requests]
