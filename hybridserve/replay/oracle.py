"""What no cache can beat: hits with unlimited memory, and a bound on the hits with the same bytes.

Owns the tree of all text of a trace and the arithmetic on it. Knows segments, not pages, and nothing of the engine; so it cannot
share its mistakes.

The bound follows PFOO-U of Berger, Beckmann and Harchol-Balter, "Practical Bounds on Optimal Caching with Variable Object Sizes"
(2018, arxiv.org/abs/1711.03709): a hit needs bytes for a time, and all hits together need no more bytes x time than there are.
It holds for every policy that starts the requests in the same order and lets each run for as long:

1. Time is counted in starts. At the moment before a start, memory holds what the running requests use and what is kept.
2. A running request uses its prompt's text and one state. Text that several use is counted once; one that was preempted, not.
3. A request that hits p tokens finds all p of them in memory when it starts, and the states after exactly p. Only a request
   whose text begins with these tokens writes them. So from the end of the last such request on they have been kept at every
   moment: that is what the hit costs, and no two hits are charged for the same bytes at the same moment.
4. For each request the bound takes any p up to what unlimited memory would hit, and fractions of a choice. The best of these
   choices within nbytes x moments is found by one sort, and nothing that a cache can do is better.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

from hybridserve.replay.trace import Segment, TraceRequest


@dataclass(eq=False, slots=True)
class _Node:
    """A stretch of text that every request which passes it passes whole: a part of the stream that a key names."""

    length: int
    children: "dict[tuple[int, int], _Node]" = field(default_factory=dict)  # by key, and where in its stream the child begins
    last_end: int | None = None  # starts before the last of those that have passed it had ended; None before the first
    used_until: int = 0  # starts up to which a running request is known to use it


@dataclass(slots=True)
class Visit:
    """One request's way through the tree of all text."""

    hit: int  # tokens that it shares with the start of anything before, at most its length - 1
    prompt: list[_Node]
    answer: list[_Node]


class Span(NamedTuple):
    """How long a request ran, for requests in order of their starts."""

    end: int  # requests that had started when it ended, itself among them
    was_preempted: bool = False


@dataclass(frozen=True)
class Bound:
    """What memory of a size can do for a trace."""

    num_hit: float  # tokens that no policy can beat
    full_nbytes: float  # bytes that all hits of unlimited memory take, with what runs, on average over the starts


def visits_of(requests: Sequence[TraceRequest]) -> list[Visit]:
    """What each request shares with those before it: the hits of unlimited memory."""
    root = _Node(0)
    hits = []
    for request in requests:
        known = sum(node.length for node in _walk(root, request.prompt, is_new=False))
        hits.append(min(known, request.num_prompt - 1))
        for _ in _walk(root, (*request.prompt, request.answer), is_new=True):
            pass
    # Only now is every stretch cut wherever any two texts part.
    visits = []
    for request, hit in zip(requests, hits, strict=True):
        nodes = list(_walk(root, (*request.prompt, request.answer), is_new=False))
        ends = list(accumulate(node.length for node in nodes))
        num_prompt = bisect_right(ends, request.num_prompt)
        visits.append(Visit(hit, nodes[:num_prompt], nodes[num_prompt:]))
    return visits


def _walk(node: _Node, segments: Sequence[Segment], *, is_new: bool) -> Iterator[_Node]:
    """The nodes of a text, cut where the text ends inside one. Unknown text ends the walk, or becomes nodes where `is_new`."""
    for key, length in segments:
        at = 0
        while at < length:
            child = node.children.get((key, at))
            if child is None:
                if not is_new:
                    return
                child = node.children[key, at] = _Node(length - at)
            if child.length > length - at:
                _cut(child, key, at, length - at)
            yield child
            at += child.length
            node = child


def _cut(node: _Node, key: int, start: int, length: int) -> None:
    """Leave a node, which begins `start` tokens into the stream of `key`, its first `length` tokens; a child has the rest."""
    rest = _Node(node.length - length, node.children)
    node.length, node.children = length, {(key, start + length): rest}


def bound_hits(
    visits: Sequence[Visit], spans: Sequence[Span], *, nbytes: float, kv_nbytes_per_token: float, state_nbytes: float
) -> Bound:
    """The most tokens that a cache of `nbytes` can hit, for requests that start in the order of `visits` and run for `spans`.

    See the module docstring for why nothing beats it. Writes to the nodes of `visits`, once.
    """
    needed = used = 0.0
    free, steps = 0.0, list[tuple[float, float]]()  # tokens that cost nothing; (cost of a token, tokens) of those that do
    for number, (visit, span) in enumerate(zip(visits, spans, strict=True)):
        points = _costs(visit, number, kv_nbytes_per_token, state_nbytes)
        needed += points[-1][1]
        for (tokens, cost), (more_tokens, more_cost) in _lower_hull(points):
            if more_cost > cost:
                steps.append(((more_cost - cost) / (more_tokens - tokens), more_tokens - tokens))
            else:
                free += more_tokens - tokens
        used += _use(visit, number, span, kv_nbytes_per_token, state_nbytes)
    left, hit = max(0.0, nbytes * len(visits) - used), free
    for price, tokens in sorted(steps):
        bought = min(tokens, left / price)
        hit, left = hit + bought, left - bought * price
    return Bound(hit, (needed + used) / max(1, len(visits)))


def _costs(visit: Visit, number: int, kv_nbytes_per_token: float, state_nbytes: float) -> list[tuple[float, float]]:
    """What a request can hit, and bytes x moments that its text and state have been kept for it: ascending, from (0, 0)."""
    points, tokens, text_cost, last_gap = [(0.0, 0.0)], 0, 0.0, -1
    for node in visit.prompt:
        if tokens >= visit.hit or node.last_end is None:
            break
        gap = max(0, number + 1 - node.last_end)
        length = min(node.length, visit.hit - tokens)
        tokens += length
        text_cost += length * kv_nbytes_per_token * gap
        if gap == last_gap:  # inside a stretch that the same requests have passed the farthest point is the cheapest by token
            points.pop()
        points.append((float(tokens), text_cost + state_nbytes * gap))
        last_gap = gap
    return points


def _lower_hull(points: Sequence[tuple[float, float]]) -> Iterator[tuple[tuple[float, float], tuple[float, float]]]:
    """The edges of the lower convex hull of points with ascending tokens, left to right."""
    hull: list[tuple[float, float]] = []
    for x, y in points:
        while len(hull) > 1:
            (x0, y0), (x1, y1) = hull[-2:]
            if (y1 - y0) * (x - x1) < (y - y1) * (x1 - x0):
                break
            hull.pop()
        hull.append((x, y))
    return pairwise(hull)


def _use(visit: Visit, number: int, span: Span, kv_nbytes_per_token: float, state_nbytes: float) -> float:
    """Note that a request passed its text; bytes x moments that it alone used while it ran, nobody else having used them yet."""
    nbytes = 0.0
    if not span.was_preempted:
        nbytes += state_nbytes * (span.end - 1 - number)
        for node in visit.prompt:
            moments = span.end - 1 - max(number, node.used_until)
            if moments > 0:
                nbytes += node.length * kv_nbytes_per_token * moments
                node.used_until = span.end - 1
    for nodes in (visit.prompt, visit.answer):
        for node in nodes:
            node.last_end = span.end if node.last_end is None else max(node.last_end, span.end)
    return nbytes
