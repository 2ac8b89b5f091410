"""`PrefixCache`: what earlier requests left behind, where it can be resumed from, and what goes first when memory is needed.

Owns the index, the eviction queue and the holds that index entries have on pages. Knows nothing of seats or passes; the
coordinator tells it what was written and asks it for matches and for memory.
"""

import math
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridserve.kv.arena import Arena, CachePlan, GroupPlan
from hybridserve.kv.entries import NO_BLOCK, TOKEN_NBYTES, Checkpoint, Origin, Run, WindowSpan, kind_of
from hybridserve.kv.eviction import Entry, EvictionQueue, Policy
from hybridserve.kv.ghosts import Ghosts
from hybridserve.kv.lookup import Lookup, Match
from hybridserve.kv.odds import Odds
from hybridserve.kv.pool import PagePool
from hybridserve.kv.prefix import KEY_NBYTES, PrefixIndex, common_units

#: Entries looked at in one search for memory before any that frees a page counts as good enough.
_SEARCH_LIMIT: Final = 256
#: What an optional checkpoint counts for beside those that are kept: that it is new says nothing of its use.
_NEWCOMER: Final = 0.05
#: What a window block is worth of a whole unit of text: only a prompt that resumes just behind it needs it.
_WINDOW_SHARE: Final = 0.05
#: Share of all slots that may hold pinned states; what is pinned beyond it is treated as any other.
_MAX_PINNED_SHARE: Final = 0.25


class PrefixCache:
    """Entries of all groups: text by match unit, states by token."""

    def __init__(self, plan: CachePlan, pools: Sequence[PagePool], arena: Arena, policy: Policy, fingerprint: str) -> None:
        self._plan = plan
        self._pools = pools
        self._arena = arena
        self._paged_pools = [pools[group.index] for group in plan.paged]
        self._state_pools = [pools[group.index] for group in plan.states]
        self._unit = plan.match_unit
        self._index = PrefixIndex(self._unit, len(plan.paged), fingerprint)
        self._queue = EvictionQueue(policy)
        self._ghosts = Ghosts(self._unit)
        self._odds = Odds()
        #: Questions that change nothing.
        self.lookup = Lookup(plan, self._index, self._ghosts)
        self._num_pinned = 0
        slots = min((pool.num_pages for pool in pools if not pool.group.is_paged), default=arena.num_superpages)
        self._most_pinned = max(1, int(_MAX_PINNED_SHARE * slots))
        self._slot_nbytes = sum(group.page_nbytes for group in plan.states)
        self._kv_nbytes = plan.kv_nbytes_per_token
        self._text_worth = self._unit / max(1, sum(group.page_nbytes for group in plan.paged))

    # -- use ------------------------------------------------------------------------------------------------------------

    def anchor(self, match: Match, salt: str) -> Run:
        """The run that ends with the last whole unit of a match, for a request to go on from."""
        depth = match.num_tokens // self._unit * self._unit
        if match.text is None or not depth:
            return self._index.root(salt)
        path = match.text.path
        at = next(at for at in range(len(path) - 1, -1, -1) if path[at].start < depth)
        if path[at].end > depth:
            path.insert(at, self._cut(path[at], depth))
        return path[at]

    def _cut(self, run: Run, depth: int) -> Run:
        upper = self._index.cut(run, depth)
        for span in upper.spans:
            if not span.ticket:
                self._queue.put_back(span)
        return upper

    def use(self, run: Run, by: int) -> None:
        """`by` more (or fewer) requests go on from the end of this run."""
        run.num_users += by
        if not run.num_users:
            self._offer(run)

    def resume(self, match: Match, anchor: Run) -> Origin | None:
        """Note that a request goes on from here: its text was used now, and the checkpoints on its way are passed.

        Returns the origin of the checkpoint that it resumes from, or would have, were it still there.
        """
        if match.text is None:
            return None
        past = self.lookup.recall(match, match.text)
        stamp, path, run = self._queue.stamp(), list[Run](), anchor
        while run.parent is not None:
            run.stamp = stamp
            path.append(run)
            run = run.parent
        path = [run, *reversed(path)]
        for checkpoint in self._index.checkpoints_on(path, match.text.data, anchor.end, match.num_tokens - 1):
            if not checkpoint.is_passed:
                self._pass(checkpoint)
        if match.checkpoint is not None:
            self._count_hit(match.checkpoint)
        if past.lost is not None:
            # It was right to keep it, had there been room; without this, what goes early would seem to be of no use.
            self._odds.use(past.lost.kind)
            self._queue.hit(past.lost.stamp)
            return past.lost.kind[0]
        return match.checkpoint.origin if match.checkpoint is not None else None

    def _pass(self, checkpoint: Checkpoint) -> None:
        checkpoint.is_passed = True
        self._odds.see(kind_of(checkpoint))
        self._queue.push(checkpoint, self._worth(checkpoint))

    def _count_hit(self, checkpoint: Checkpoint) -> None:
        self._queue.hit(checkpoint.stamp)
        if not checkpoint.is_passed:
            self._odds.use(kind_of(checkpoint))
            checkpoint.is_passed = True
            self._odds.see(kind_of(checkpoint))
        else:
            if not checkpoint.num_late_hits:
                self._odds.use(kind_of(checkpoint))
            checkpoint.num_late_hits += 1
        self._renew(checkpoint)

    def _renew(self, checkpoint: Checkpoint) -> None:
        checkpoint.stamp = self._queue.stamp()
        if not checkpoint.evicted:
            self._queue.push(checkpoint, self._worth(checkpoint))

    # -- additions ------------------------------------------------------------------------------------------------------

    def add_text(self, run: Run, data: bytes, blocks: "list[array[int]]") -> Run:
        """The whole units in `data` behind `run`, whose one user goes on with them. Entries hold their blocks from now on.

        `blocks` has, by paged group, a block per unit or NO_BLOCK. Returns the run that ends with them.
        """
        step, stamp, own = self._index.unit_nbytes, self._queue.stamp(), run
        while data and (child := run.children.get(data[:step])) is not None:
            units = common_units(child.tokens, data, step)
            depth = run.end + units * self._unit
            run = child if depth == child.end else self._cut(child, depth)
            run.stamp = stamp
            self._complete(run, [mine[:units] for mine in blocks])
            data, blocks = data[units * step :], [mine[units:] for mine in blocks]
        if not data:
            return run
        if run.parent is not None and not run.children and run.num_users <= (run is own):
            self._index.extend(run, data, blocks)
        else:
            run = self._index.add_run(run, data, blocks)
        run.stamp = stamp
        for group, mine in zip(self._plan.paged, blocks, strict=True):
            self._pools[group.index].hold_many(_present(group, mine))
        return run

    def _complete(self, run: Run, blocks: "list[array[int]]") -> None:
        """Give a known run the blocks that it has lost (of window groups) and this request has."""
        for order, group in enumerate(self._plan.paged):
            mine = run.blocks[order]
            if group.window is None or NO_BLOCK not in mine:
                continue
            for at, block in enumerate(blocks[order]):
                if mine[at] == NO_BLOCK and block != NO_BLOCK:
                    mine[at] = block
                    self._pools[group.index].hold(block)

    def add_state(
        self,
        run: Run,
        depth: int,
        tail: bytes,
        slots: list[int],
        blocks: list[int],
        *,
        origin: Origin,
        follows: Origin | None,
        pin: bool,
    ) -> Checkpoint | None:
        """States after `run`'s text up to `depth` and `tail`; None when the index has them already, and needs not these."""
        point = run.points.get(depth)
        known = point.checkpoints.get(tail) if point is not None else None
        if known is not None:
            if origin == "junction":
                known.origin = origin
            self._renew(known)
            return None
        pinned = pin and self._num_pinned < self._most_pinned
        position = depth + len(tail) // TOKEN_NBYTES
        checkpoint = Checkpoint(run, depth, tail, position, slots, blocks, origin, follows, pinned, stamp=self._queue.stamp())
        self._num_pinned += pinned
        self._odds.see(kind_of(checkpoint))
        self._index.add_checkpoint(checkpoint)
        for pool, page in zip(self._paged_pools, blocks, strict=False):
            pool.hold(page)
        for pool, page in zip(self._state_pools, slots, strict=True):
            pool.hold(page)
        checkpoint.before = self._index.checkpoint_before(checkpoint)
        self._queue.push(checkpoint, self._worth(checkpoint))
        return checkpoint

    def would_keep(self, origin: Origin, follows: Origin | None, num_saved: int) -> bool:
        """Whether a new checkpoint that saves so many tokens would not be the next to go, were room made for it."""
        if all(pool.has_free or self._arena.num_free for pool in self._state_pools):
            return True
        worth = _NEWCOMER * self._odds.chance((origin, follows, False)) * self._gain_of(num_saved)
        return self._queue.would_keep(worth, self._is_evictable)

    def offer_window(self, run: Run, group: GroupPlan, first: int, end: int) -> None:
        """Queue the window blocks of units `first` to `end` up to `run`: of use only to a prompt that resumes just behind."""
        order = self._plan.paged.index(group)
        start, stop = first * self._unit, min(end * self._unit, run.end)
        while run.parent is not None and start < stop:
            if run.start < stop:
                span = WindowSpan(run, order, max(start, run.start), stop, stamp=run.stamp)
                run.spans.append(span)
                self._queue.push(span, _WINDOW_SHARE * self._text_worth)
                stop = run.start
            run = run.parent

    # -- eviction -------------------------------------------------------------------------------------------------------

    def make_room(self, group: GroupPlan, *, spares_pinned: bool = False) -> bool:
        """Evict until the group or the arena has a free page; False when nothing more can be evicted."""
        pool, set_aside = self._pools[group.index], list[Entry]()
        while not (pool.has_free or self._arena.num_free):
            entry = self._queue.pop(self._is_evictable)
            if isinstance(entry, Checkpoint) and self._has_gained(entry):
                continue
            if entry is not None and entry.priority == math.inf and spares_pinned:
                self._queue.put_back(entry)  # all behind it are pinned, too
                entry = None
            if entry is None and not set_aside:
                break
            if entry is None or (entry.priority == math.inf and set_aside):
                # Nothing else frees a page by itself, but for what is pinned: then whatever may uncover something that does.
                if entry is not None:
                    self._queue.put_back(entry)
                if self._is_evictable(first := set_aside.pop(0)):  # the text of a window block may be gone by now
                    self._evict(first)
            elif len(set_aside) < _SEARCH_LIMIT and not self._frees(entry, group):
                set_aside.append(entry)
            else:
                self._evict(entry)
        for entry in set_aside:
            self._queue.put_back(entry)
        return pool.has_free or self._arena.num_free > 0

    def own_depth(self, written: Sequence[Checkpoint], run: Run, depth: int, rows: Sequence[NDArray[np.int32]]) -> int:
        """Where a request's own text begins: before the first unit behind `depth` that has, in some group, the block in `rows`.

        `run` is its text, `rows` are its block tables by paged group. Where text has no blocks, behind its first own state.
        """
        if not self._plan.paged:
            return min((checkpoint.depth for checkpoint in written), default=run.end)
        while run.evicted and run.parent is not None:
            run = run.parent
        first = run.end
        while run.parent is not None and run.end > depth:
            start, at = run.start // self._unit, max(depth - run.start, 0) // self._unit
            for blocks, row in zip(run.blocks, rows, strict=True):
                same = np.flatnonzero(np.array(blocks[at:], np.int32) == row[start + at : start + len(blocks)])
                if len(same):
                    first = min(first, run.start + (at + int(same[0])) * self._unit)
            run = run.parent
        return first

    def drop(self, written: Sequence[Checkpoint], run: Run, depth: int) -> None:
        """Drop what cannot be trusted: these checkpoints, the text to `run`'s end behind `depth`, and all that goes on from it.

        Running requests keep their pages; who goes on from there has an evicted run, and must not add to it.
        """
        for checkpoint in written:
            if not checkpoint.evicted:
                self._evict(checkpoint)
        while run.evicted and run.parent is not None:
            run = run.parent
        branch = None
        while run.parent is not None and run.end > depth:
            if run.start < depth:
                self._cut(run, depth)
            branch, run = run, run.parent
        if branch is not None:
            self._remove(branch)
        self._offer(run)

    def _remove(self, branch: Run) -> None:
        """Take a run out with all below it, whoever uses it."""
        found = [branch]
        for run in found:
            found += run.children.values()
        keys = [bytes(self._index.keys(run)) for run in found]
        for run in reversed(found):
            for point in list(run.points.values()):
                for checkpoint in list(point.checkpoints.values()):
                    self._evict(checkpoint)
            if not run.evicted:
                self._trim(run, run.start)
        for those in keys:
            self._ghosts.forget(those)  # it did not give way to something else: it never was good

    def clear(self) -> None:
        """Evict all that no request uses."""
        while (entry := self._queue.pop(self._is_evictable)) is not None:
            self._evict(entry)

    def _offer(self, run: Run) -> None:
        """See to the end of a run once nothing hangs from it: it goes when no state needs it, and is queued if there are none."""
        while self._is_evictable(run):
            if not self._plan.states:
                self._queue.push(run, self._text_worth)
                return
            run = self._trim(run, run.kept)
        if run.parent is None:
            self._index.forget_root(run)

    def _worth(self, checkpoint: Checkpoint) -> float:
        """Tokens saved per byte, times the chance that they are."""
        return self._chance(checkpoint) * self._gain(checkpoint)

    def _gain(self, checkpoint: Checkpoint) -> float:
        """Tokens that it saves per byte."""
        return self._gain_of(checkpoint.position - (checkpoint.before.position if checkpoint.before is not None else 0))

    def _gain_of(self, saved: int) -> float:
        return saved / max(1, self._slot_nbytes + saved * self._kv_nbytes)

    def _chance(self, checkpoint: Checkpoint) -> float:
        """How likely a checkpoint is to be resumed from, up to a factor that is common to all."""
        if checkpoint.pinned:
            return math.inf
        if checkpoint.num_late_hits:
            return 1.0 + checkpoint.num_late_hits
        return self._odds.chance(kind_of(checkpoint))

    def _is_evictable(self, entry: Entry) -> bool:
        if isinstance(entry, Checkpoint):
            return not entry.evicted
        if isinstance(entry, WindowSpan):
            return not entry.run.evicted and any(block != NO_BLOCK for block in self._span_blocks(entry))
        return not (entry.children or entry.num_users or entry.evicted) and entry.parent is not None and entry.kept < entry.end

    def _has_gained(self, checkpoint: Checkpoint) -> bool:
        """Whether a checkpoint is worth more than when it was queued: what it stands in for was evicted meanwhile."""
        if checkpoint.before is not None and checkpoint.before.evicted:
            checkpoint.before = self._index.checkpoint_before(checkpoint)
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

    def _pages_of(self, entry: Entry) -> Iterator[tuple[GroupPlan, int]]:
        """The pages that evicting an entry would no longer hold; of a run, those of its last unit."""
        if isinstance(entry, Checkpoint):
            yield from zip(self._plan.paged, entry.blocks, strict=False)
            yield from zip(self._plan.states, entry.slots, strict=True)
        elif isinstance(entry, WindowSpan):
            group = self._plan.paged[entry.order]
            yield from ((group, block) for block in _present(group, self._span_blocks(entry)))
        else:
            for group, blocks in zip(self._plan.paged, entry.blocks, strict=True):
                if blocks[-1] != NO_BLOCK:
                    yield group, blocks[-1]

    def _span_blocks(self, span: WindowSpan) -> "array[int]":
        start = span.run.start
        return span.run.blocks[span.order][(span.start - start) // self._unit : (span.end - start) // self._unit]

    def _evict(self, entry: Entry) -> None:
        if isinstance(entry, Checkpoint):
            for pool, page in zip(self._paged_pools, entry.blocks, strict=False):
                pool.drop(page)
            for pool, page in zip(self._state_pools, entry.slots, strict=True):
                pool.drop(page)
            self._index.remove_checkpoint(entry)
            self._num_pinned -= entry.pinned
            self._offer(entry.run)
        elif isinstance(entry, WindowSpan):
            self._evict_span(entry)
        else:
            self._offer(self._trim(entry, max(entry.kept, entry.end - self._unit)))

    def _evict_span(self, span: WindowSpan) -> None:
        run, start = span.run, span.run.start
        group, blocks = self._plan.paged[span.order], run.blocks[span.order]
        self._pools[group.index].drop_many(_present(group, self._span_blocks(span)))
        for at in range((span.start - start) // self._unit, min((span.end - start) // self._unit, len(blocks))):
            blocks[at] = NO_BLOCK
        run.spans.remove(span)

    def _trim(self, run: Run, depth: int) -> Run:
        """Drop a run's text behind `depth`, with its blocks; returns the run whose end may be the next to go."""
        parent, first = run.parent, (depth - run.start) // self._unit
        assert parent is not None, "a root is never queued"
        self._ghosts.add(self._index.keys(run)[first * KEY_NBYTES :], depth, (one for one in run.lost if one.depth > depth))
        for order, group in enumerate(self._plan.paged):
            self._pools[group.index].drop_many(_present(group, run.blocks[order][first:]))
        self._index.trim(run, depth)
        return parent if run.evicted else run

    # -- reports --------------------------------------------------------------------------------------------------------

    def runs(self) -> Iterator[Run]:
        """Every run of text, roots included, for checks."""
        return self._index.walk()

    def holds(self) -> list[Counter[int]]:
        """Holds on each group's pages, counted anew from the tree."""
        counts: list[Counter[int]] = [Counter() for _ in self._plan.groups]
        for run in self._index.walk():
            for group, blocks in zip(self._plan.paged, run.blocks, strict=True):
                counts[group.index].update(block for block in blocks if block != NO_BLOCK)
            for point in run.points.values():
                for checkpoint in point.checkpoints.values():
                    for group, page in self._pages_of(checkpoint):
                        counts[group.index][page] += 1
        return counts


def _present(group: GroupPlan, blocks: "array[int]") -> Sequence[int]:
    """Those of a run's blocks that are there: in a full group, all."""
    return blocks if group.window is None else [block for block in blocks if block != NO_BLOCK]
