"""`KVCacheCoordinator`: the one face of all cache memory, and the only thing of `kv/` that the scheduler sees.

Owns the arena, the pools, the prefix index, the eviction queue and, for each seat (a running request's place in the arrays), its
block tables and slots. Integers and numpy arrays only; tensors live in `storage.py`. What a pass writes can be found only after
`commit`: publish after write.

The cost of a step follows events (a block filled, an arrival, a checkpoint, a finish), not the number of seats: what happens to
every seat at every step is array arithmetic.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridserve.kv.arena import Arena, CachePlan, GroupPlan
from hybridserve.kv.checkpoints import CheckpointPolicy
from hybridserve.kv.eviction import WORTHLESS, Entry, EvictionQueue, Policy
from hybridserve.kv.pool import PagePool
from hybridserve.kv.prefix import Checkpoint, Node, PrefixIndex, TextMatch, WindowBlock

Ints = NDArray[np.int64]

#: A start slot of a sequence that begins with a zero state.
NO_SLOT: Final = -1
_NEVER: Final = 2**62
#: Entries looked at in one search for memory before any that frees a page counts as good enough.
_SEARCH_LIMIT: Final = 256


@dataclass(frozen=True)
class Match:
    """What of a prompt is cached. `num_tokens` can be resumed from; `text_tokens` of text are known, states or not."""

    num_tokens: int
    text_tokens: int
    group_tokens: Mapping[int, int]  # by group: how far that group alone could resume
    text: TextMatch | None
    checkpoint: Checkpoint | None

    @classmethod
    def nothing(cls) -> "Match":
        """No prefix is known, or none may be used."""
        return cls(0, 0, {}, None, None)


@dataclass(frozen=True)
class BlockCopy:
    """Copy one page's content before the pass: a partly filled block is about to be written by a second owner."""

    group: int
    source: int
    target: int


@dataclass(frozen=True)
class StepMemory:
    """Where one pass reads and writes, as values for the runner."""

    block_tables: Mapping[int, NDArray[np.int32]]  # by paged group: [S, max_blocks]
    start_slots: Mapping[int, Ints]  # by state group: [S]
    write_rows: Ints  # [W], ascending
    write_slots: Mapping[int, Ints]  # by state group: [W]
    copies: tuple[BlockCopy, ...]


@dataclass
class _Seat:
    """What a running request holds, beside its rows in the arrays."""

    tokens: NDArray[np.int32]  # the request's row of the token table: valid as far as it is computed
    node: Node  # the deepest text of it in the index
    stores: bool  # whether what it computes is offered to others
    pinned: bool
    junction: int
    last_checkpoint: int  # position of the one before
    wanted: tuple[int, ...] = ()  # positions of checkpoints to come
    borrowed: list[int] | None = None  # slots of somebody's checkpoint that its next pass starts from
    sources: list[tuple[int, int]] = field(default_factory=list)  # (group, page) held for a copy
    num_blocks: dict[int, int] = field(default_factory=dict)  # by paged group: length of its row of the block table
    first_block: dict[int, int] = field(default_factory=dict)  # by paged group: blocks before it were given back


@dataclass(frozen=True)
class _Pending:
    """A checkpoint that the pass under way writes."""

    seat: int
    position: int
    slots: list[int]


class KVCacheCoordinator:
    """Divides one memory pool among paged caches and states. See the module docstring."""

    def __init__(
        self,
        plan: CachePlan,
        *,
        num_seats: int,
        max_model_len: int,
        enable_prefix_caching: bool = True,
        policy: Policy = "cost",
        fingerprint: str = "",
    ) -> None:
        self.plan = plan
        self._caching = enable_prefix_caching
        self._arena = Arena(plan.num_superpages)
        self._pools = [PagePool(group, self._arena) for group in plan.groups]
        self._unit = plan.match_unit
        self._index = PrefixIndex(self._unit, len(plan.paged), fingerprint)
        self._queue = EvictionQueue(policy)
        self._placement = CheckpointPolicy.for_plan(plan)
        max_blocks = -(-max_model_len // plan.block_size)
        self._tables = {g.index: np.zeros((num_seats, max_blocks), np.int32) for g in plan.paged}
        self._own = {g.index: np.full(num_seats, NO_SLOT, np.int64) for g in plan.states}
        self._start = {g.index: np.full(num_seats, NO_SLOT, np.int64) for g in plan.states}
        self._window_groups = [g for g in plan.paged if g.window is not None]
        self._full_groups = [g for g in plan.paged if g.window is None]
        #: Tokens that each seat has blocks for; `reserve` is needed only beyond.
        self.room = np.zeros(num_seats, np.int64)
        self._next_wanted = np.full(num_seats, _NEVER, np.int64)
        self._seats: dict[int, _Seat] = {}
        self._pending: list[_Pending] = []
        self._copies: list[BlockCopy] = []
        self._borrowers: list[int] = []

    # -- lookup ---------------------------------------------------------------------------------------------------------

    def match(self, tokens: NDArray[np.int32], salt: str = "") -> Match:
        """The longest position at which every group can resume this prompt, at most its length - 1."""
        if not self._caching or not self.plan.groups:
            return Match.nothing()
        data = tokens.astype("<i4", copy=False).tobytes()
        text = self._index.match_text(self._index.root(salt), data)
        limit = len(tokens) - 1
        reach = {g.index: min(text.num_tokens, limit) if self.plan.paged else limit for g in self.plan.groups}
        if not self.plan.states:
            position = min(text.num_tokens, limit)
            while position > 0 and not self._has_text(text, position, None):
                position = (position - 1) // self._unit * self._unit
            return Match(position, text.num_tokens, reach | {g.index: position for g in self._window_groups}, text, None)
        deepest = 0
        for checkpoint in self._index.checkpoints_on(text, data, limit):
            deepest = max(deepest, checkpoint.position)
            if self._has_text(text, checkpoint.position, checkpoint):
                reach |= {g.index: deepest for g in self.plan.states}
                return Match(checkpoint.position, text.num_tokens, reach, text, checkpoint)
        reach |= {g.index: deepest for g in self.plan.states}
        return Match(0, text.num_tokens, reach, text, None)

    def _has_text(self, text: TextMatch, position: int, checkpoint: Checkpoint | None) -> bool:
        """Whether every paged group has the entries that a token at `position` looks at."""
        whole = position // self._unit
        partial = self._partial_blocks(text, position, checkpoint)
        if position % self._unit and any(block is None for block in partial):
            return False
        for order, group in enumerate(self.plan.paged):
            first = 0 if group.window is None else max(0, position - group.window + 1) // self._unit
            # A full group's blocks go leaf by leaf, so that a node's block implies those of its ancestors.
            units = range(max(whole - 1, 0), whole) if group.window is None else range(first, whole)
            if any(text.path[unit + 1].blocks[order] is None for unit in units):
                return False
        return True

    def _partial_blocks(self, text: TextMatch, position: int, checkpoint: Checkpoint | None) -> Sequence[int | None]:
        if checkpoint is not None:
            return checkpoint.blocks
        whole = position // self._unit
        return text.path[whole + 1].blocks if whole + 1 < len(text.path) else text.tail_blocks

    # -- room -----------------------------------------------------------------------------------------------------------

    def open(
        self,
        seat: int,
        tokens: NDArray[np.int32],
        num_prompt: int,
        match: Match,
        *,
        salt: str = "",
        boundaries: tuple[int, ...] = (),
        pin: bool = False,
        store: bool = True,
    ) -> bool:
        """Give a seat to a request: what matched, its own slots and blocks for its whole prompt; or take nothing and say False.

        `tokens` is the request's row of the token table, which grows in place.
        """
        node = match.text.path[match.num_tokens // self._unit] if match.text is not None else self._index.root(salt)
        record = _Seat(tokens, node, store and self._caching, pin, match.text_tokens, last_checkpoint=match.num_tokens)
        self._seats[seat] = record
        node.num_users += 1
        self._share(seat, record, match)
        if not (self._take_own_slots(seat) and self._take_copies(seat, record) and self._reserve_prompt(seat, num_prompt)):
            self._close(seat)
            return False
        if match.checkpoint is not None:
            self._touch(match.checkpoint)
        if record.stores:
            record.wanted = self._placement.positions(match.num_tokens, num_prompt, match.text_tokens, boundaries)
            self._next_wanted[seat] = record.wanted[0] if record.wanted else _NEVER
        return True

    def _share(self, seat: int, record: _Seat, match: Match) -> None:
        """Retain the whole blocks and the state that matched, so that making room cannot take them."""
        whole = match.num_tokens // self._unit
        path = match.text.path if match.text is not None else []
        stamp = self._queue.stamp()
        for node in path[1 : whole + 1]:
            node.stamp = stamp
        for order, group in enumerate(self.plan.paged):
            first = 0 if group.window is None else min(whole, max(0, match.num_tokens - group.window + 1) // self._unit)
            record.first_block[group.index], record.num_blocks[group.index] = first, whole
            pool, table = self._pools[group.index], self._tables[group.index]
            for unit in range(first, whole):
                block = path[unit + 1].blocks[order]
                assert block is not None, f"unit {unit} of group {group.index} matched without a block"
                pool.retain(block)
                table[seat, unit] = block
        if match.text is not None and match.num_tokens % self._unit:
            sources = self._partial_blocks(match.text, match.num_tokens, match.checkpoint)
            for group, source in zip(self.plan.paged, sources, strict=True):
                assert source is not None, f"group {group.index} matched a partial unit without a block"
                self._pools[group.index].retain(source)
                record.sources.append((group.index, source))
        for group in self.plan.states:
            self._own[group.index][seat] = self._start[group.index][seat] = NO_SLOT
        if match.checkpoint is not None and match.checkpoint.slots:
            self._borrow(seat, match.checkpoint.slots)
        if record.sources:
            self._borrowers.append(seat)

    def _borrow(self, seat: int, slots: list[int]) -> None:
        """Let the seat's next pass start from slots that belong to a checkpoint."""
        self._seats[seat].borrowed = slots
        for group, slot in zip(self.plan.states, slots, strict=True):
            self._pools[group.index].retain(slot)
            self._start[group.index][seat] = slot
        self._borrowers.append(seat)

    def _take_own_slots(self, seat: int) -> bool:
        slots = self._take_slots()
        for group, slot in zip(self.plan.states, slots or (), strict=slots is not None):
            self._own[group.index][seat] = slot
        return slots is not None

    def _take_slots(self) -> list[int] | None:
        """A slot of every state group, or none at all."""
        slots: list[int] = []
        for group in self.plan.states:
            slot = self._take(group, None)
            if slot is None:
                self._give_back(self.plan.states, slots)
                return None
            slots.append(slot)
        return slots

    def _take_copies(self, seat: int, record: _Seat) -> bool:
        """Blocks of its own for the unit that matched in part, to be filled by a copy before the pass."""
        for group_index, source in record.sources:
            target = self._take_block(seat, record, self.plan.groups[group_index])
            if target is None:
                return False
            self._copies.append(BlockCopy(group_index, source, target))
        return True

    def _reserve_prompt(self, seat: int, num_prompt: int) -> bool:
        """Blocks for a whole prompt. Window groups take theirs chunk by chunk, as older ones are given back."""
        return all(self._extend(seat, group, num_prompt) for group in self._full_groups) and self._set_room(seat)

    def reserve(self, seat: int, num_tokens: int) -> bool:
        """Make room for the seat's first `num_tokens` tokens; False when memory is out (what was got so far is kept)."""
        return all(self._extend(seat, group, num_tokens) for group in self.plan.paged) and self._set_room(seat)

    def _set_room(self, seat: int) -> bool:
        blocks = min(self._seats[seat].num_blocks.values(), default=_NEVER // self.plan.block_size)
        self.room[seat] = blocks * self.plan.block_size
        return True

    def _extend(self, seat: int, group: GroupPlan, num_tokens: int) -> bool:
        record = self._seats[seat]
        while record.num_blocks[group.index] * group.block_size < num_tokens:
            if self._take_block(seat, record, group) is None:
                return False
        return True

    def _take_block(self, seat: int, record: _Seat, group: GroupPlan) -> int | None:
        """One more block at the end of the seat's row."""
        table, length = self._tables[group.index], record.num_blocks[group.index]
        near = int(table[seat, length - 1]) if length > record.first_block[group.index] else None
        block = self._take(group, near)
        if block is not None:
            table[seat, length] = block
            record.num_blocks[group.index] = length + 1
        return block

    def _take(self, group: GroupPlan, near: int | None) -> int | None:
        """A page of the group, if need be by evicting; None when nothing more can be evicted."""
        pool = self._pools[group.index]
        page = pool.take(near)
        while page is None and self._evict_for(group):
            page = pool.take(near)
        return page

    def _give_back(self, groups: Sequence[GroupPlan], pages: Sequence[int]) -> None:
        for group, page in zip(groups, pages, strict=False):
            self._pools[group.index].release(page)

    # -- one pass -------------------------------------------------------------------------------------------------------

    def address(self, seats: Ints, starts: Ints, counts: Ints) -> StepMemory:
        """Where a pass over `counts` tokens of each seat, from token `starts` on, reads and writes. Called once a step, last.

        Takes slots for the checkpoints that the pass reaches; one that finds no slot is skipped: caching is optional.
        """
        ends = starts + counts
        rows = np.cumsum(counts)
        longest = -(-int(ends.max()) // self.plan.block_size)
        last_rows = rows - 1
        own = {index: slots[seats].copy() for index, slots in self._own.items()}
        extra_rows: list[int] = []
        extra_slots: list[list[int]] = []
        for at in np.flatnonzero(self._next_wanted[seats] <= ends):
            for position, slots in self._start_checkpoints(int(seats[at]), int(ends[at])):
                if position == ends[at]:
                    # The running state is this checkpoint: the next pass starts from it, no second write.
                    for group, slot in zip(self.plan.states, slots, strict=True):
                        own[group.index][at] = slot
                else:
                    extra_rows.append(int(rows[at] - (ends[at] - position) - 1))
                    extra_slots.append(slots)
        write_rows = np.concatenate([last_rows, np.array(extra_rows, np.int64)])
        order = np.argsort(write_rows, kind="stable") if extra_rows else slice(None)
        writes = {
            group.index: np.concatenate([own[group.index], np.array([s[i] for s in extra_slots], np.int64)])[order]
            for i, group in enumerate(self.plan.states)
        }
        copies, self._copies = tuple(self._copies), []
        return StepMemory(
            block_tables={index: table[seats, :longest] for index, table in self._tables.items()},
            start_slots={index: slots[seats] for index, slots in self._start.items()},
            write_rows=write_rows[order],
            write_slots=writes,
            copies=copies,
        )

    def _start_checkpoints(self, seat: int, end: int) -> list[tuple[int, list[int]]]:
        """Slots for the checkpoints that a pass up to token `end` of this seat reaches."""
        record = self._seats[seat]
        started = []
        while record.wanted and record.wanted[0] <= end:
            position, record.wanted = record.wanted[0], record.wanted[1:]
            slots = self._take_slots()
            if slots is None:
                continue
            self._pending.append(_Pending(seat, position, slots))
            if slots:
                started.append((position, slots))
        self._next_wanted[seat] = record.wanted[0] if record.wanted else _NEVER
        return started

    def commit(self, seats: Ints, starts: Ints, counts: Ints) -> None:
        """The pass is known done: what it wrote can be found from now on."""
        ends = starts + counts
        self._end_borrowing(set(seats.tolist()))
        crossed = np.flatnonzero(starts // self._unit != ends // self._unit)
        for at in crossed:
            self._publish_text(int(seats[at]), int(ends[at]))
        for index, slots in self._start.items():
            slots[seats] = self._own[index][seats]
        pending, self._pending = self._pending, []
        for checkpoint in pending:
            self._publish_state(checkpoint, int(ends[np.flatnonzero(seats == checkpoint.seat)[0]]))
        for at in crossed if self._window_groups else ():
            self._leave_window(int(seats[at]), int(ends[at]))

    def abandon(self) -> None:
        """The pass failed: nothing that it wrote is ever found. The seats it ran for must be released without keeping."""
        for pending in self._pending:
            self._give_back(self.plan.states, pending.slots)
        self._pending.clear()

    def distrust(self, seat: int) -> None:
        """What this seat computes is bad: neither the pass under way nor anything later of it is offered to others."""
        self._seats[seat].stores = False
        for pending in [p for p in self._pending if p.seat == seat]:
            self._pending.remove(pending)
            self._give_back(self.plan.states, pending.slots)

    def _end_borrowing(self, ran: set[int]) -> None:
        """Seats whose pass is done have read what they started from."""
        borrowers, self._borrowers = self._borrowers, []
        for seat in borrowers:
            if seat in ran:
                self._return_borrowed(self._seats[seat])
            elif seat in self._seats:
                self._borrowers.append(seat)

    def _return_borrowed(self, record: _Seat) -> None:
        self._give_back(self.plan.states, record.borrowed or ())
        record.borrowed = None
        for group_index, source in record.sources:
            self._pools[group_index].release(source)
        record.sources.clear()

    def _publish_text(self, seat: int, end: int) -> None:
        """Offer the seat's blocks that are full by now."""
        record = self._seats[seat]
        if not record.stores:
            return
        unit, node = self._unit, record.node
        while node.depth + unit <= end:
            at = node.depth // unit
            blocks = [self._block_at(seat, record, group, at) for group in self.plan.paged]
            child, is_new = self._index.add_node(node, self._token_bytes(record, node.depth, node.depth + unit), blocks)
            if is_new:
                self._hold_blocks(blocks)
            else:
                self._complete(child, blocks)
            child.stamp = self._queue.stamp()
            node = child
        node.num_users += 1
        record.node.num_users -= 1
        record.node = node

    def _block_at(self, seat: int, record: _Seat, group: GroupPlan, unit: int) -> int | None:
        if unit < record.first_block[group.index]:
            return None
        return int(self._tables[group.index][seat, unit])

    def _complete(self, node: Node, blocks: list[int | None]) -> None:
        """Give a known node the blocks that it has lost (of window groups) and this seat has."""
        for order, (group, block) in enumerate(zip(self.plan.paged, blocks, strict=True)):
            if node.blocks[order] is None and block is not None:
                node.blocks[order] = block
                self._pools[group.index].hold(block)

    def _publish_state(self, pending: _Pending, end: int) -> None:
        """Hang a written checkpoint into the index; its slots change owner."""
        record = self._seats[pending.seat]
        checkpoint = self._add_checkpoint(pending.seat, record, pending.position, pending.slots)
        if pending.position == end and pending.slots:
            self._borrow(pending.seat, pending.slots)
        self._give_back(self.plan.states, pending.slots)
        if checkpoint is not None:
            checkpoint.is_junction = pending.position == record.junction
            self._queue.push(checkpoint, self._worth(checkpoint))

    def _add_checkpoint(self, seat: int, record: _Seat, position: int, slots: list[int]) -> Checkpoint | None:
        """Record the states in `slots` as those after `position`; None when the index has them already."""
        node = record.node
        while node.depth > position:
            assert node.parent is not None, f"position {position} lies before the root"
            node = node.parent
        tail = self._token_bytes(record, node.depth, position)
        known = node.checkpoints.get(tail)
        if known is not None or (not tail and not slots):
            if known is not None:
                self._touch(known)
            return None
        at = position // self._unit
        blocks = [self._block_at(seat, record, group, at) for group in self.plan.paged] if tail else []
        kept = [block for block in blocks if block is not None]
        assert len(kept) == len(blocks), "the block of the newest tokens is inside every window"
        saved = max(1, position - record.last_checkpoint)
        record.last_checkpoint = position
        checkpoint = Checkpoint(node, tail, slots, kept, pinned=record.pinned, tokens_saved=saved, stamp=self._queue.stamp())
        self._index.add_checkpoint(checkpoint)
        self._hold_blocks(kept)
        for group, slot in zip(self.plan.states, slots, strict=True):
            self._pools[group.index].hold(slot)
        return checkpoint

    def _hold_blocks(self, blocks: Sequence[int | None]) -> None:
        for group, block in zip(self.plan.paged, blocks, strict=False):
            if block is not None:
                self._pools[group.index].hold(block)

    def _leave_window(self, seat: int, end: int) -> None:
        """Give back blocks that no later token of the seat looks at."""
        record = self._seats[seat]
        for group in self._window_groups:
            assert group.window is not None, "only window groups are here"
            first = max(0, end - group.window + 1) // group.block_size
            for unit in range(record.first_block[group.index], first):
                self._pools[group.index].release(int(self._tables[group.index][seat, unit]))
            self._offer_window(record, group, record.first_block[group.index], first)
            record.first_block[group.index] = max(first, record.first_block[group.index])

    def _offer_window(self, record: _Seat, group: GroupPlan, first: int, end: int) -> None:
        """Queue the window blocks of units `first` to `end`: of use only to a prompt that resumes just behind them."""
        if not record.stores or first >= end:
            return
        order = self.plan.paged.index(group)
        node: Node | None = record.node
        while node is not None and node.depth > first * self._unit:
            if node.depth <= end * self._unit and node.blocks[order] is not None:
                entry = WindowBlock(node, order, stamp=node.stamp)
                self._queue.push(entry, self._worth(entry))
            node = node.parent

    @staticmethod
    def _token_bytes(record: _Seat, start: int, end: int) -> bytes:
        return record.tokens[start:end].astype("<i4", copy=False).tobytes()

    # -- end ------------------------------------------------------------------------------------------------------------

    def release(self, seat: int, num_computed: int, *, keep: bool) -> None:
        """Free a seat. With `keep` its text and its state after `num_computed` tokens stay as cache entries."""
        record = self._seats[seat]
        has_run = not record.sources and all(self._start[g.index][seat] == self._own[g.index][seat] for g in self.plan.states)
        if keep and record.stores and num_computed > 0 and has_run:
            slots = [int(self._own[group.index][seat]) for group in self.plan.states]
            checkpoint = self._add_checkpoint(seat, record, num_computed, slots)
            if checkpoint is not None:
                self._queue.push(checkpoint, self._worth(checkpoint))
        self._close(seat)

    def _close(self, seat: int) -> None:
        """Give back all that a seat holds."""
        record = self._seats.pop(seat)
        self._return_borrowed(record)
        targets = {(copy.group, copy.target) for copy in self._copies}
        for group in self.plan.paged:
            table, pool = self._tables[group.index], self._pools[group.index]
            for unit in range(record.first_block.get(group.index, 0), record.num_blocks.get(group.index, 0)):
                block = int(table[seat, unit])
                if (group.index, block) in targets:
                    self._copies = [copy for copy in self._copies if (copy.group, copy.target) != (group.index, block)]
                pool.release(block)
        for group in self.plan.states:
            slot = int(self._own[group.index][seat])
            if slot != NO_SLOT:
                self._pools[group.index].release(slot)
                self._own[group.index][seat] = NO_SLOT
        self.room[seat] = 0
        self._next_wanted[seat] = _NEVER
        record.node.num_users -= 1
        self._offer(record.node)

    # -- eviction -------------------------------------------------------------------------------------------------------

    def _touch(self, checkpoint: Checkpoint) -> None:
        checkpoint.frequency += 1
        checkpoint.stamp = self._queue.stamp()
        self._queue.push(checkpoint, self._worth(checkpoint))

    def _offer(self, node: Node) -> None:
        """Queue a node for eviction once nothing hangs from it."""
        if node.parent is None:
            self._index.forget_root(node)
        elif self._is_evictable(node):
            if self.plan.paged:
                self._queue.push(node, self._worth(node))
            else:
                self._evict(node)  # it holds no memory, so nothing else would ever remove it

    def _worth(self, entry: Entry) -> float:
        """Tokens saved per byte, times how often it was used."""
        if isinstance(entry, WindowBlock):
            return 0.0
        if isinstance(entry, Node):
            if self.plan.states:
                return WORTHLESS
            return self._unit / max(1, sum(group.page_nbytes for group in self.plan.paged))
        nbytes = sum(group.page_nbytes for group in self.plan.states)
        nbytes += entry.tokens_saved * self.plan.kv_nbytes_per_token
        return entry.frequency * entry.tokens_saved / max(1, nbytes)

    def _is_evictable(self, entry: Entry) -> bool:
        if isinstance(entry, Checkpoint):
            return not entry.evicted
        if isinstance(entry, WindowBlock):
            return not entry.node.evicted and entry.node.blocks[entry.order] is not None
        return (
            entry.parent is not None
            and not entry.children
            and not entry.checkpoints
            and not entry.num_users
            and not entry.evicted
        )

    def _evict_for(self, group: GroupPlan) -> bool:
        """Evict until the group or the arena has a free page; False when nothing more can be evicted."""
        set_aside: list[Entry] = []
        while not (self._pools[group.index].has_free or self._arena.num_free):
            entry = self._queue.pop(self._is_evictable)
            if entry is None and not set_aside:
                break
            if entry is None:
                # Nothing frees a page by itself: then whatever may uncover something that does.
                self._evict(set_aside.pop(0))
                continue
            if entry.priority != WORTHLESS and len(set_aside) < _SEARCH_LIMIT and not self._frees(entry, group):
                set_aside.append(entry)
                continue
            self._evict(entry)
        for entry in set_aside:
            self._queue.put_back(entry)
        return self._pools[group.index].has_free or self._arena.num_free > 0

    def _frees(self, entry: Entry, group: GroupPlan) -> bool:
        """Whether evicting the entry brings the group nearer to a page: one of its own, or a superpage without live pages."""
        for owner, page in self._pages_of(entry):
            pool = self._pools[owner.index]
            if pool.is_live(page):
                continue
            if owner is group or pool.can_empty(page):
                return True
        return False

    def _pages_of(self, entry: Entry) -> list[tuple[GroupPlan, int]]:
        if isinstance(entry, WindowBlock):
            block = entry.node.blocks[entry.order]
            return [(self.plan.paged[entry.order], block)] if block is not None else []
        pages = [(group, block) for group, block in zip(self.plan.paged, entry.blocks, strict=False) if block is not None]
        if isinstance(entry, Checkpoint):
            pages += zip(self.plan.states, entry.slots, strict=True)
        return pages

    def _evict(self, entry: Entry) -> None:
        self._queue.evicted(entry)
        for group, page in self._pages_of(entry):
            self._pools[group.index].drop(page)
        if isinstance(entry, Checkpoint):
            self._index.remove_checkpoint(entry)
            self._offer(entry.node)
        elif isinstance(entry, WindowBlock):
            entry.node.blocks[entry.order] = None
        else:
            parent = entry.parent
            assert parent is not None, "a root is never queued"
            self._index.remove_node(entry)
            self._offer(parent)

    def clear(self) -> None:
        """Evict all that no request uses."""
        while (entry := self._queue.pop(self._is_evictable)) is not None:
            self._evict(entry)

    # -- reports --------------------------------------------------------------------------------------------------------

    def usage(self) -> dict[str, int]:
        """Pages by kind and state, and superpages, for metrics."""
        counts: Counter[str] = Counter()
        for group, pool in zip(self.plan.groups, self._pools, strict=True):
            kind = "blocks" if group.is_paged else "slots"
            counts[f"{kind}_used"] += pool.num_live
            counts[f"{kind}_cached"] += pool.num_cached
            counts[f"{kind}_total"] += pool.num_pages
        return {**counts, "superpages_free": self._arena.num_free, "superpages_total": self._arena.num_superpages}

    def check(self) -> None:
        """Assert that every page is accounted for exactly once: free + cached + live = all, per pool, as sets."""
        refs: list[Counter[int]] = [Counter() for _ in self.plan.groups]
        holds: list[Counter[int]] = [Counter() for _ in self.plan.groups]
        for seat, record in self._seats.items():
            for group in self.plan.paged:
                row = self._tables[group.index][seat]
                refs[group.index].update(row[record.first_block[group.index] : record.num_blocks[group.index]].tolist())
            for group in self.plan.states:
                refs[group.index][int(self._own[group.index][seat])] += 1
            for group, slot in zip(self.plan.states, record.borrowed or (), strict=False):
                refs[group.index][slot] += 1
            for group_index, source in record.sources:
                refs[group_index][source] += 1
        for pending in self._pending:
            for group, slot in zip(self.plan.states, pending.slots, strict=True):
                refs[group.index][slot] += 1
        users = Counter(id(record.node) for record in self._seats.values())
        for node in self._index.walk():
            assert node.num_users == users[id(node)], f"node at {node.depth} counts {node.num_users} users, has {users[id(node)]}"
            entries: list[Entry] = [node, *node.checkpoints.values()]
            for entry in entries:
                for group, page in self._pages_of(entry):
                    holds[group.index][page] += 1
        owned: list[int] = []
        for pool, group_refs, group_holds in zip(self._pools, refs, holds, strict=True):
            pool.check(dict(group_refs), dict(group_holds))
            owned += pool.superpages()
        free = self._arena.free_set()
        assert sorted([*owned, *free]) == list(range(self._arena.num_superpages)), "superpages are lost or held twice"
