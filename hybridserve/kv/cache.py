"""`PrefixCache`: what earlier requests left behind, where it can be resumed from, and what goes first when memory is needed.

Owns the index, the eviction queue and the holds that index entries have on pages. Knows nothing of seats or passes; the
coordinator tells it what was written and asks it for matches and for memory.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridserve.kv.arena import Arena, CachePlan, GroupPlan
from hybridserve.kv.eviction import WORTHLESS, Entry, EvictionQueue, Policy
from hybridserve.kv.explanation import Findings
from hybridserve.kv.pool import PagePool
from hybridserve.kv.prefix import TOKEN_NBYTES, Checkpoint, Node, Origin, PrefixIndex, TextMatch, WindowBlock

#: Entries looked at in one search for memory before any that frees a page counts as good enough.
_SEARCH_LIMIT: Final = 256
#: Evicted nodes that are remembered by key, so that a miss can be told from a first sight.
_NUM_GHOSTS: Final = 1 << 17
#: What a window block is worth of a whole unit of text: only a prompt that resumes just behind it needs it.
_WINDOW_SHARE: Final = 0.05
#: Checkpoints of a kind, and hits on them, that are assumed before any were counted.
_PRIOR_SEEN: Final = 8.0
_PRIOR_HITS: Final = 4.0
#: Share of all checkpoints that may be pinned; what is pinned beyond it is treated as any other.
_MAX_PINNED_SHARE: Final = 0.25


@dataclass(frozen=True)
class Match:
    """What of a prompt is cached. `num_tokens` can be resumed from; `text_tokens` of text are known, states or not."""

    num_tokens: int
    text_tokens: int
    group_tokens: Mapping[int, int]  # by group: how far that group alone could resume
    text: TextMatch | None
    checkpoint: Checkpoint | None
    limited_by_window: bool = False

    @classmethod
    def nothing(cls) -> "Match":
        """No prefix is known, or none may be used."""
        return cls(0, 0, {}, None, None)


class PrefixCache:
    """Entries of all groups: text by match unit, states by token."""

    def __init__(self, plan: CachePlan, pools: Sequence[PagePool], arena: Arena, policy: Policy, fingerprint: str) -> None:
        self._plan = plan
        self._pools = pools
        self._arena = arena
        self._unit = plan.match_unit
        self._index = PrefixIndex(self._unit, len(plan.paged), fingerprint)
        self._queue = EvictionQueue(policy)
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._num_pinned = 0
        # Of each kind, by origin and whether passed: how many there were, and how many of them were resumed from.
        self._seen: Counter[tuple[Origin, bool]] = Counter()
        self._useful: Counter[tuple[Origin, bool]] = Counter()
        self._slot_nbytes = sum(group.page_nbytes for group in plan.states)
        self._text_worth = self._unit / max(1, sum(group.page_nbytes for group in plan.paged))

    # -- lookup ---------------------------------------------------------------------------------------------------------

    def root(self, salt: str) -> Node:
        """The text of length 0 under a salt."""
        return self._index.root(salt)

    def match(self, tokens: NDArray[np.int32], salt: str) -> Match:
        """The longest position at which every group can resume this prompt, at most its length - 1."""
        plan = self._plan
        data = tokens.astype("<i4", copy=False).tobytes()
        text = self._index.match_text(self._index.root(salt), data)
        limit = len(tokens) - 1
        known = min(text.num_tokens, limit) if plan.paged else limit
        reach = {group.index: known for group in plan.groups}
        if not plan.states:
            position = min(text.num_tokens, limit)
            while position > 0 and not self._has_text(text, position, None):
                position = (position - 1) // self._unit * self._unit
            reach |= {group.index: position for group in plan.paged if group.window is not None}
            return Match(position, text.num_tokens, reach, text, None, limited_by_window=position < known)
        deepest = 0
        for checkpoint in self._index.checkpoints_on(text, data, limit):
            deepest = max(deepest, checkpoint.position)
            if self._has_text(text, checkpoint.position, checkpoint):
                reach |= {group.index: deepest for group in plan.states}
                position = checkpoint.position
                return Match(position, text.num_tokens, reach, text, checkpoint, limited_by_window=position < deepest)
        reach |= {group.index: deepest for group in plan.states}
        return Match(0, text.num_tokens, reach, text, None, limited_by_window=deepest > 0)

    def _has_text(self, text: TextMatch, position: int, checkpoint: Checkpoint | None) -> bool:
        """Whether every paged group has the entries that a token at `position` looks at."""
        whole = position // self._unit
        if position % self._unit and any(block is None for block in self.partial_blocks(text, position, checkpoint)):
            return False
        for order, group in enumerate(self._plan.paged):
            # A full group's blocks go leaf by leaf, so that a node's block implies those of its ancestors.
            first = max(whole - 1, 0) if group.window is None else max(0, position - group.window + 1) // self._unit
            if any(text.path[unit + 1].blocks[order] is None for unit in range(first, whole)):
                return False
        return True

    def partial_blocks(self, text: TextMatch, position: int, checkpoint: Checkpoint | None) -> Sequence[int | None]:
        """Blocks that hold the entries of the unit that `position` lies inside."""
        if checkpoint is not None:
            return checkpoint.blocks
        whole = position // self._unit
        return text.path[whole + 1].blocks if whole + 1 < len(text.path) else text.tail_blocks

    def findings(self, tokens: NDArray[np.int32], match: Match) -> Findings:
        """What a match says about the tokens that it did not reach."""
        if match.text is None:
            return Findings(0, 0, 0, {}, False, False, False)
        path, unit = match.text.path, self._unit
        ghosts = self._count_ghosts(tokens, match.text) * unit if not match.text.tail_tokens else 0
        behind = path[match.num_tokens // unit :]
        return Findings(
            num_hit=match.num_tokens,
            num_text=match.text_tokens if self._plan.paged else match.num_tokens,
            num_known=match.text_tokens + ghosts,
            group_tokens=match.group_tokens,
            state_was_evicted=any(node.lost_state for node in behind),
            limited_by_window=match.limited_by_window,
            has_siblings=bool(path[-1].edges),
        )

    def _count_ghosts(self, tokens: NDArray[np.int32], text: TextMatch) -> int:
        """Units behind the known text that were there once."""
        key, at, count = text.node.key, text.node.depth, 0
        while at + self._unit <= len(tokens):
            key = self._index.child_key(key, tokens[at : at + self._unit].astype("<i4", copy=False).tobytes())
            if key not in self._ghosts:
                break
            at, count = at + self._unit, count + 1
        return count

    # -- use ------------------------------------------------------------------------------------------------------------

    def use(self, node: Node, by: int) -> None:
        """`by` more (or fewer) requests go on from this text."""
        node.num_users += by
        if not node.num_users:
            self._offer(node)

    def resume(self, match: Match) -> None:
        """Note that a request goes on from here: its text was used now, and the checkpoints on its way are passed."""
        if match.text is None:
            return
        path = match.text.path[: match.num_tokens // self._unit + 1]
        stamp = self._queue.stamp()
        for node, following in zip(path, [*path[1:], None], strict=True):
            node.stamp = stamp
            for checkpoint in node.checkpoints.values():
                is_on_way = following is None or following.tokens.startswith(checkpoint.tail)
                if is_on_way and checkpoint is not match.checkpoint and checkpoint.position < match.num_tokens:
                    self._pass(checkpoint)
        if match.checkpoint is not None:
            self._count_hit(match.checkpoint)

    def _pass(self, checkpoint: Checkpoint) -> None:
        if not checkpoint.is_passed:
            checkpoint.is_passed = True
            self._seen[checkpoint.origin, True] += 1
            self._queue.push(checkpoint, self._worth(checkpoint))

    def _count_hit(self, checkpoint: Checkpoint) -> None:
        self._queue.hit(checkpoint.stamp)
        if not checkpoint.is_passed:
            self._useful[checkpoint.origin, False] += 1
            checkpoint.is_passed = True
            self._seen[checkpoint.origin, True] += 1
        else:
            self._useful[checkpoint.origin, True] += checkpoint.num_late_hits == 0
            checkpoint.num_late_hits += 1
        self._renew(checkpoint)

    def _renew(self, checkpoint: Checkpoint) -> None:
        checkpoint.stamp = self._queue.stamp()
        if not checkpoint.evicted:
            self._queue.push(checkpoint, self._worth(checkpoint))

    # -- additions ------------------------------------------------------------------------------------------------------

    def add_text(self, parent: Node, data: bytes, blocks: list[list[int | None]]) -> Node:
        """The units of text in `data`, one behind the other; entries hold their blocks from now on.

        `blocks` has, by paged group, a block per unit. Returns the last unit's node.
        """
        step, node, stamp = self._unit * TOKEN_NBYTES, parent, self._queue.stamp()
        new: list[list[int]] = [[] for _ in blocks]
        for at, start in enumerate(range(0, len(data), step)):
            mine = [row[at] for row in blocks]
            node, is_new = self._index.add_node(node, data[start : start + step], mine)
            node.stamp = stamp
            if is_new:
                self._ghosts.pop(node.key, None)
                for row, block in zip(new, mine, strict=True):
                    if block is not None:
                        row.append(block)
            else:
                self._complete(node, mine)
        for group, row in zip(self._plan.paged, new, strict=True):
            self._pools[group.index].hold_many(row)
        return node

    def _complete(self, node: Node, blocks: list[int | None]) -> None:
        """Give a known node the blocks that it has lost (of window groups) and this request has."""
        for order, (group, block) in enumerate(zip(self._plan.paged, blocks, strict=True)):
            if node.blocks[order] is None and block is not None:
                node.blocks[order] = block
                self._pools[group.index].hold(block)

    def add_state(
        self, node: Node, tail: bytes, slots: list[int], blocks: list[int], *, origin: Origin, pin: bool
    ) -> Checkpoint | None:
        """States after `node`'s text and `tail`; None when the index has them already and these are not needed."""
        known = node.checkpoints.get(tail)
        if known is not None:
            if origin == "junction":
                known.origin = origin
            self._renew(known)
            return None
        pinned = pin and self._num_pinned < _MAX_PINNED_SHARE * (self._index.num_checkpoints + 1)
        checkpoint = Checkpoint(node, tail, slots, blocks, origin, pinned, stamp=self._queue.stamp())
        self._num_pinned += pinned
        self._seen[origin, False] += 1
        self._index.add_checkpoint(checkpoint)
        self._hold(blocks)
        for group, slot in zip(self._plan.states, slots, strict=True):
            self._pools[group.index].hold(slot)
        self._queue.push(checkpoint, self._worth(checkpoint))
        return checkpoint

    def offer_window(self, node: Node, group: GroupPlan, first: int, end: int) -> None:
        """Queue the window blocks of units `first` to `end` above `node`: of use only to a prompt that resumes just behind."""
        order = self._plan.paged.index(group)
        at: Node | None = node
        while at is not None and at.depth > first * self._unit:
            if at.depth <= end * self._unit and at.blocks[order] is not None:
                entry = WindowBlock(at, order, stamp=at.stamp)
                self._queue.push(entry, self._worth(entry))
            at = at.parent

    def _hold(self, blocks: Sequence[int | None]) -> None:
        for group, block in zip(self._plan.paged, blocks, strict=False):
            if block is not None:
                self._pools[group.index].hold(block)

    # -- eviction -------------------------------------------------------------------------------------------------------

    def make_room(self, group: GroupPlan) -> bool:
        """Evict until the group or the arena has a free page; False when nothing more can be evicted."""
        pool, set_aside = self._pools[group.index], list[Entry]()
        while not (pool.has_free or self._arena.num_free):
            entry = self._queue.pop(self._is_evictable)
            if isinstance(entry, Checkpoint) and self._has_gained(entry):
                continue
            if entry is None and not set_aside:
                break
            if entry is None:
                # Nothing frees a page by itself: then whatever may uncover something that does.
                self._evict(set_aside.pop(0))
            elif entry.priority != WORTHLESS and len(set_aside) < _SEARCH_LIMIT and not self._frees(entry, group):
                set_aside.append(entry)
            else:
                self._evict(entry)
        for entry in set_aside:
            self._queue.put_back(entry)
        return pool.has_free or self._arena.num_free > 0

    def drop(self, written: Sequence[Checkpoint], node: Node, start: Node) -> None:
        """Drop what a request left that cannot be trusted: its checkpoints, and its text behind `start` up to `node`."""
        for checkpoint in written:
            if not checkpoint.evicted:
                self._evict(checkpoint)
        while node is not start and node.parent is not None and not (node.children or node.checkpoints or node.num_users):
            parent = node.parent
            if not node.evicted:
                self._evict(node)
            node = parent

    def clear(self) -> None:
        """Evict all that no request uses."""
        while (entry := self._queue.pop(self._is_evictable)) is not None:
            self._evict(entry)

    def _offer(self, node: Node) -> None:
        """Queue a node for eviction once nothing hangs from it."""
        if node.parent is None:
            self._index.forget_root(node)
        elif self._is_evictable(node):
            if self._plan.paged:
                self._queue.push(node, self._worth(node))
            else:
                self._evict(node)  # it holds no memory, so nothing else would ever remove it

    def _worth(self, entry: Entry) -> float:
        """Tokens saved per byte, times how often it was used."""
        if isinstance(entry, WindowBlock):
            return _WINDOW_SHARE * self._text_worth
        if isinstance(entry, Node):
            return WORTHLESS if self._plan.states else self._text_worth
        saved = entry.position - self._index.position_before(entry)
        nbytes = self._slot_nbytes + saved * self._plan.kv_nbytes_per_token
        return self._chance(entry) * saved / max(1, nbytes)

    def _chance(self, checkpoint: Checkpoint) -> float:
        """How likely a checkpoint is to be resumed from, up to a factor that is common to all."""
        if checkpoint.pinned:
            return float("inf")
        if checkpoint.num_late_hits:
            return 1.0 + checkpoint.num_late_hits
        kind = (checkpoint.origin, checkpoint.is_passed)
        return (self._useful[kind] + _PRIOR_HITS) / (self._seen[kind] + _PRIOR_SEEN)

    def _is_evictable(self, entry: Entry) -> bool:
        if isinstance(entry, Checkpoint):
            return not entry.evicted
        if isinstance(entry, WindowBlock):
            return not entry.node.evicted and entry.node.blocks[entry.order] is not None
        is_leaf = not entry.children and not entry.checkpoints
        return is_leaf and not entry.num_users and not entry.evicted and entry.parent is not None

    def _has_gained(self, checkpoint: Checkpoint) -> bool:
        """Whether a checkpoint is worth more than when it was queued: what it stands in for was evicted meanwhile."""
        worth = self._worth(checkpoint)
        if self._queue.priority_of(checkpoint, worth) <= checkpoint.priority:
            return False
        self._queue.push(checkpoint, worth)
        return True

    def _frees(self, entry: Entry, group: GroupPlan) -> bool:
        """Whether evicting the entry brings the group nearer to a page: one of its own, or a superpage without live pages."""
        for owner, page in self._pages_of(entry):
            pool = self._pools[owner.index]
            if not pool.is_live(page) and (owner is group or pool.can_empty(page)):
                return True
        return False

    def _pages_of(self, entry: Entry) -> list[tuple[GroupPlan, int]]:
        if isinstance(entry, WindowBlock):
            block = entry.node.blocks[entry.order]
            return [(self._plan.paged[entry.order], block)] if block is not None else []
        pages = [(group, block) for group, block in zip(self._plan.paged, entry.blocks, strict=False) if block is not None]
        if isinstance(entry, Checkpoint):
            pages += zip(self._plan.states, entry.slots, strict=True)
        return pages

    def _evict(self, entry: Entry) -> None:
        for group, page in self._pages_of(entry):
            self._pools[group.index].drop(page)
        if isinstance(entry, Checkpoint):
            self._index.remove_checkpoint(entry)
            self._num_pinned -= entry.pinned
            entry.node.lost_state = True
            self._offer(entry.node)
        elif isinstance(entry, WindowBlock):
            entry.node.blocks[entry.order] = None
        else:
            parent = entry.parent
            assert parent is not None, "a root is never queued"
            self._index.remove_node(entry)
            self._remember(entry.key)
            self._offer(parent)

    def _remember(self, key: bytes) -> None:
        self._ghosts[key] = None
        if len(self._ghosts) > _NUM_GHOSTS:
            self._ghosts.popitem(last=False)

    # -- reports --------------------------------------------------------------------------------------------------------

    @property
    def num_checkpoints(self) -> int:
        return self._index.num_checkpoints

    def nodes(self) -> Iterator[Node]:
        """Every node, roots included, for checks."""
        return self._index.walk()

    def holds(self) -> list[Counter[int]]:
        """Holds on each group's pages, counted anew from the tree."""
        counts: list[Counter[int]] = [Counter() for _ in self._plan.groups]
        for node in self._index.walk():
            entries: list[Entry] = [node, *node.checkpoints.values()]
            for entry in entries:
                for group, page in self._pages_of(entry):
                    counts[group.index][page] += 1
        return counts
