"""What a perfect cache would have hit: with unlimited memory, and with the same bytes and knowledge of the future.

Owns the two oracles. They know segments, not pages, and nothing of the engine; so they cannot share its mistakes.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hybridserve.replay.trace import TraceRequest


@dataclass(eq=False, slots=True)
class _Item:
    """Something a cache may hold: a node's text, or the states at one position inside it."""

    nbytes: float
    uses: list[int] = field(default_factory=list)  # requests that need it, ascending
    num_past: int = 0
    held_until: int | None = None  # the use that it is kept for

    def next_use(self, now: int) -> int | None:
        while self.num_past < len(self.uses) and self.uses[self.num_past] <= now:
            self.num_past += 1
        return self.uses[self.num_past] if self.num_past < len(self.uses) else None


@dataclass(eq=False, slots=True)
class _Node:
    """Text from the start of a prompt to the end of a segment."""

    longest: int = 0  # tokens of the segment that were seen
    children: "dict[int, _Node]" = field(default_factory=dict)
    text: _Item | None = None  # when anything shares it
    states: dict[int, _Item] = field(default_factory=dict)  # by position, where anything ends


@dataclass(slots=True)
class Visit:
    """One request's way through the tree of all text before it."""

    hit: int  # tokens that it shares with the start of anything before, at most its length - 1
    num_shared: int  # nodes that the hit goes through
    nodes: list[_Node]  # all of prompt and answer


def visits_of(requests: Sequence[TraceRequest]) -> list[Visit]:
    """What each request shares with those before it; the first oracle, which has all the memory that it wants."""
    root, visits = _Node(), []
    for request in requests:
        nodes, num_shared, hit, node, is_known = list[_Node](), 0, 0, root, True
        for key, length in (*request.prompt, request.answer):
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = _Node()
            elif is_known and len(nodes) < len(request.prompt):
                common = min(child.longest, length)
                hit += common
                num_shared += 1
                is_known = common == length
            if child.longest < length:
                child.longest = length
            nodes.append(child)
            node = child
        visits.append(Visit(min(hit, request.num_prompt - 1), num_shared, nodes))
    return visits


def capacity_hits(visits: Sequence[Visit], *, nbytes: float, kv_nbytes_per_token: float, state_nbytes: float) -> list[int]:
    """Hits of a cache of `nbytes` that knows the future: it keeps only what will be used, and drops the farthest use first.

    A hit of p tokens needs the text up to p and, where there are states, those at p, which the first request that passed p
    left there. A request gets its longest prefix or, when something of that is missing, the longest earlier point that is whole.
    """
    _note_uses(visits, kv_nbytes_per_token, state_nbytes)
    farthest: list[tuple[int, int, _Item]] = []
    used, order, hits = 0.0, 0, []
    for number, visit in enumerate(visits):
        hits.append(_best(visit))
        for item in _items_of(visit):
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


def _note_uses(visits: Sequence[Visit], kv_nbytes_per_token: float, state_nbytes: float) -> None:
    """Hang from every node what a cache may hold of it, with the requests that need it."""
    for visit in visits:
        for node in visit.nodes[: visit.num_shared]:
            node.text, node.states = None, {}
    for number, visit in enumerate(visits):
        shared = visit.nodes[: visit.num_shared]
        for node in shared:
            if node.text is None:
                node.text = _Item(node.longest * kv_nbytes_per_token)
            node.text.uses.append(number)
        if shared:
            shared[-1].states.setdefault(visit.hit, _Item(state_nbytes)).uses.append(number)


def _items_of(visit: Visit) -> Iterator[_Item]:
    """What a request leaves that anything comes back to."""
    for node in visit.nodes:
        if node.text is not None:
            yield node.text
            yield from node.states.values()


def _best(visit: Visit) -> int:
    """The longest point of a request's prefix that the cache holds whole."""
    best = 0
    for node in visit.nodes[: visit.num_shared]:
        if node.text is None or node.text.held_until is None:
            break
        for position, item in node.states.items():
            if item.held_until is not None and best < position <= visit.hit:
                best = position
    return best
