"""What a perfect cache would have hit: with unlimited memory, and with the same bytes and knowledge of the future.

Owns the two oracles. They know segments, not pages, and nothing of the engine; so they cannot share its mistakes.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from hybridserve.replay.trace import TraceRequest


@dataclass(eq=False)
class _Node:
    """Text from the start of a prompt to the end of a segment."""

    longest: int = 0  # tokens of the segment that were seen
    children: dict[int, "_Node"] = field(default_factory=dict)


@dataclass
class _Visit:
    """One request's way through the tree."""

    hit: int
    shared: list[_Node]  # nodes that the hit goes through
    whole: list[_Node]  # all of prompt and answer


def longest_prefixes(requests: Sequence[TraceRequest]) -> list[int]:
    """For each request the tokens that it shares with the start of anything before it, at most its length - 1."""
    return [visit.hit for visit in _walk(requests)]


def _walk(requests: Sequence[TraceRequest]) -> list[_Visit]:
    root, visits = _Node(), []
    for request in requests:
        shared, whole, hit, node, is_known = list[_Node](), list[_Node](), 0, root, True
        for segment in (*request.prompt, request.answer):
            child = node.children.setdefault(segment.key, _Node())
            if is_known and segment is not request.answer:
                common = min(child.longest, segment.length)
                hit += common
                if common:
                    shared.append(child)
                is_known = common == segment.length
            child.longest = max(child.longest, segment.length)
            whole.append(child)
            node = child
        visits.append(_Visit(min(hit, request.num_prompt - 1), shared, whole))
    return visits


@dataclass(eq=False)
class _Item:
    """Something a cache may hold: a node's text, or the states at one position inside it."""

    nbytes: float
    position: int | None  # of states
    uses: list[int] = field(default_factory=list)  # requests that need it, ascending
    num_past: int = 0
    held_until: int | None = None  # the use that it is kept for

    def next_use(self, now: int) -> int | None:
        while self.num_past < len(self.uses) and self.uses[self.num_past] <= now:
            self.num_past += 1
        return self.uses[self.num_past] if self.num_past < len(self.uses) else None


def capacity_hits(
    requests: Sequence[TraceRequest], *, nbytes: float, kv_nbytes_per_token: float, state_nbytes: float
) -> list[int]:
    """Hits of a cache of `nbytes` that knows the future: it keeps only what will be used, and drops the farthest use first.

    A hit of p tokens needs the text up to p and, where there are states, those at p, which the first request that passed p
    left there. A request gets its longest prefix or, when something of that is missing, the longest earlier point that is whole.
    """
    visits = _walk(requests)
    texts: dict[_Node, _Item] = {}
    states: dict[_Node, dict[int, _Item]] = {}
    for number, visit in enumerate(visits):
        for node in visit.shared:
            texts.setdefault(node, _Item(node.longest * kv_nbytes_per_token, None)).uses.append(number)
        if visit.shared:
            ends = states.setdefault(visit.shared[-1], {})
            ends.setdefault(visit.hit, _Item(state_nbytes, visit.hit)).uses.append(number)
    farthest: list[tuple[int, int, _Item]] = []
    used, order, hits = 0.0, 0, []
    for number, visit in enumerate(visits):
        hits.append(_best(visit, texts, states))
        for node in visit.whole:
            for item in [item for item in (texts.get(node),) if item is not None] + list(states.get(node, {}).values()):
                following = item.next_use(number)
                if item.held_until is not None:
                    used -= item.nbytes
                item.held_until = following
                if following is not None:
                    used += item.nbytes
                    order += 1
                    heapq.heappush(farthest, (-following, order, item))
        while used > nbytes and farthest:
            negative, _, item = heapq.heappop(farthest)
            if item.held_until == -negative:
                item.held_until = None
                used -= item.nbytes
    return hits


def _best(visit: _Visit, texts: dict[_Node, _Item], states: dict[_Node, dict[int, _Item]]) -> int:
    """The longest point of a request's prefix that the cache holds whole."""
    best = 0
    for node in visit.shared:
        if texts[node].held_until is None:
            break
        held = [position for position, item in states.get(node, {}).items() if item.held_until is not None]
        best = max([best, *(position for position in held if position <= visit.hit)])
    return best
