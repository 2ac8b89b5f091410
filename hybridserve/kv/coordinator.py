"""`KVCacheCoordinator`: the one face of all cache memory, and the only thing of `kv/` that the scheduler sees.

Owns the arena, the pools, the prefix cache and, for each seat (a running request's place in the arrays), its block tables and
slots. Integers and numpy arrays only; tensors live in `storage.py`. What a pass writes can be found only after `commit`: publish
after write.

The cost of a step follows events (a block filled, an arrival, a checkpoint, a finish), not the number of seats: what happens to
every seat at every step is array arithmetic.
"""

from array import array
from bisect import insort
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridserve.errors import DoesNotFitError
from hybridserve.kv.arena import Arena, CachePlan, GroupPlan
from hybridserve.kv.cache import PrefixCache
from hybridserve.kv.checkpoints import CheckpointPolicy
from hybridserve.kv.entries import NO_BLOCK, Checkpoint, Origin, Run
from hybridserve.kv.eviction import Policy
from hybridserve.kv.explanation import explain, unexplored
from hybridserve.kv.lookup import Match
from hybridserve.kv.pool import PagePool
from hybridserve.request import CacheHints, Explanation

Ints = NDArray[np.int64]

#: A start slot of a sequence that begins with a zero state, where its group has no learned one.
NO_SLOT: Final = -1
_NEVER: Final = 2**62


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
    run: Run  # its text in the index, up to that run's end
    matched: int  # tokens that it resumed from
    trusted: int  # those of them that others had computed: when it was here before, some may have been its own
    stores: bool  # whether what it computes is offered to others
    pinned: bool
    junction: int
    boundaries: tuple[int, ...]
    num_prompt: int
    follows: Origin | None = None  # the origin of the checkpoint that it resumed from, or would have
    written: list[Checkpoint] = field(default_factory=list)
    is_distrusted: bool = False
    promised: set[int] = field(default_factory=set)  # positions that waiting requests will resume from
    optional: set[int] = field(default_factory=set)  # those of the wanted ones that give way to anything better
    wanted: list[int] = field(default_factory=list)  # positions of checkpoints to come, ascending
    borrowed: list[int] | None = None  # slots of somebody's checkpoint that its next pass starts from
    sources: list[tuple[int, int]] = field(default_factory=list)  # (group, page) held for a copy
    num_blocks: dict[int, int] = field(default_factory=dict)  # by paged group: length of its row of the block table
    first_block: dict[int, int] = field(default_factory=dict)  # by paged group: blocks before it were given back


@dataclass(frozen=True)
class Left:
    """What a request that gave its seat back had written, should it come again and turn out bad."""

    trusted: int  # tokens that others had computed when it first came
    written: Sequence[Checkpoint]


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
        self._cache = PrefixCache(plan, self._pools, self._arena, policy, fingerprint)
        self._placement = CheckpointPolicy.for_plan(plan)
        #: By state group with a learned initial state: the slot for it, which the runner fills and nobody else is ever given.
        self.constant_slots = {group.index: self._take_constant(group) for group in plan.states if group.num_constant}
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
        self.num_checkpoints_written = 0

    def _take_constant(self, group: GroupPlan) -> int:
        slot = self._pools[group.index].take()
        if slot is None:
            raise DoesNotFitError(
                f"cache memory of {self.plan.nbytes:,} bytes has no slot for the learned initial state of group {group.index}; "
                f"raise --kv-cache-memory by {self.plan.superpage_nbytes:,}"
            )
        return slot

    # -- lookup ---------------------------------------------------------------------------------------------------------

    def match(self, tokens: NDArray[np.int32], salt: str = "") -> Match:
        """The longest position at which every group can resume this prompt, at most its length - 1."""
        if not self._caching or not self.plan.groups:
            return Match.nothing()
        return self._cache.lookup.match(tokens, salt)

    def explain(self, tokens: NDArray[np.int32], match: Match, hints: CacheHints) -> Explanation:
        """Why `match` is as long as it is."""
        if not self._caching:
            return unexplored(len(tokens), "caching_off")
        if match.text is None:
            return unexplored(len(tokens), "prompt_logprobs")
        found = self._cache.lookup.findings(tokens, match)
        return explain(len(tokens), found, hints)

    # -- room -----------------------------------------------------------------------------------------------------------

    def could_open(self, num_tokens: int, match: Match) -> bool:
        """Whether a request of `num_tokens` fits beside what runs. Evicts nothing to find out.

        Trying instead would evict all that is cached before it fails, the hit included.
        """
        whole, total = match.num_tokens // self._unit, 0
        borrowed = match.checkpoint.slots if match.checkpoint is not None else []
        sources = self._sources(match)
        for group, pool in zip(self.plan.groups, self._pools, strict=True):
            pages, kept = self.plan.pages_needed(group, num_tokens), list[int]()
            if group.is_paged and match.text is not None:
                order, first = self.plan.paged.index(group), self._first_kept(group, match.num_tokens)
                for _, part in self._cache.lookup.blocks(match.text, order, first, whole):
                    kept += part
                pages -= len(kept)
                kept += sources[order : order + 1]
            elif not group.is_paged:
                kept += borrowed[self.plan.states.index(group) :][:1]
            total += pool.superpages_with(max(0, pages), kept)
        return total <= self.plan.num_superpages

    def _first_kept(self, group: GroupPlan, num_tokens: int) -> int:
        """The first unit that a request which resumes behind `num_tokens` reads of a paged group."""
        return 0 if group.window is None else min(num_tokens, max(0, num_tokens - group.window + 1)) // self._unit

    def _sources(self, match: Match) -> Sequence[int]:
        """By paged group, the block of the unit that a match ends inside; nothing where it ends with a unit."""
        if match.text is None or not match.num_tokens % self._unit:
            return ()
        return self._cache.lookup.partial_blocks(match.text, match.num_tokens, match.checkpoint)

    def open(
        self, seat: int, tokens: NDArray[np.int32], num_prompt: int, match: Match, hints: CacheHints, left: "Left | None" = None
    ) -> bool:
        """Give a seat to a request: what matched, its own slots and blocks for its whole prompt; or take nothing and say False.

        `tokens` is its row of the token table, which grows in place; `left` is what `release` gave when it was preempted.
        """
        run = self._cache.anchor(match, hints.salt)
        stores = self._caching and not hints.no_store
        record = _Seat(
            tokens=tokens,
            run=run,
            matched=match.num_tokens,
            trusted=match.num_tokens if left is None else min(match.num_tokens, left.trusted),
            written=[] if left is None else [*left.written],
            stores=stores,
            pinned=hints.pin,
            junction=match.text_tokens,
            boundaries=hints.boundaries,
            num_prompt=num_prompt,
        )
        self._seats[seat] = record
        self._cache.use(run, 1)
        self._share(seat, record, match)
        if not (self._take_own_slots(seat) and self._take_copies(seat, record) and self._reserve_prompt(seat, num_prompt)):
            self._close(seat)
            return False
        record.follows = self._cache.resume(match, run)
        if stores:
            start, junction = match.num_tokens, match.text_tokens
            positions = self._placement.positions(start, num_prompt, junction, hints.boundaries, hints.marks)
            record.optional = set(self._placement.optional(start, num_prompt)).difference(positions)
            self._set_wanted(seat, record, sorted(record.optional.union(positions)))
        return True

    def _set_wanted(self, seat: int, record: _Seat, positions: list[int]) -> None:
        record.wanted = positions
        self._next_wanted[seat] = positions[0] if positions else _NEVER

    def promise(self, seat: int, position: int, num_computed: int) -> bool:
        """Whether what the seat will compute can be resumed from at `position`; asks for a checkpoint there if need be."""
        record = self._seats[seat]
        if not record.stores or position <= num_computed:
            return False
        record.promised.add(position)
        if position not in record.wanted:
            insort(record.wanted, position)
            self._next_wanted[seat] = record.wanted[0]
        return True

    def _share(self, seat: int, record: _Seat, match: Match) -> None:
        """Retain the whole blocks and the state that matched, so that making room cannot take them."""
        whole = match.num_tokens // self._unit
        for order, group in enumerate(self.plan.paged):
            first = self._first_kept(group, match.num_tokens)
            record.first_block[group.index], record.num_blocks[group.index] = first, whole
            if first == whole:
                continue
            pool, table = self._pools[group.index], self._tables[group.index]
            for unit, blocks in self._cache.lookup.blocks(match.text, order, first, whole) if match.text is not None else ():
                assert NO_BLOCK not in blocks, f"group {group.index} matched without a block behind unit {unit}"
                table[seat, unit : unit + len(blocks)] = blocks
            pool.retain_many(table[seat, first:whole])
        for group, source in zip(self.plan.paged, self._sources(match), strict=False):
            assert source != NO_BLOCK, f"group {group.index} matched a partial unit without a block"
            self._pools[group.index].retain(source)
            record.sources.append((group.index, source))
        for group in self.plan.states:
            self._own[group.index][seat] = NO_SLOT
            self._start[group.index][seat] = self.constant_slots.get(group.index, NO_SLOT)
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

    def _take_slots(self, *, spares_pinned: bool = False) -> list[int] | None:
        """A slot of every state group, or none at all. What is pinned gives way to what must run, and not to checkpoints."""
        slots: list[int] = []
        for group in self.plan.states:
            slot = self._take(group, spares_pinned=spares_pinned)
            if slot is None:
                self._give_back(self.plan.states, slots)
                return None
            slots.append(slot)
        return slots

    def _take_copies(self, seat: int, record: _Seat) -> bool:
        """Blocks of its own for the unit that matched in part, to be filled by a copy before the pass."""
        for group_index, source in record.sources:
            group, at = self.plan.groups[group_index], record.num_blocks[group_index]
            if not self._extend(seat, group, (at + 1) * group.block_size):
                return False
            self._copies.append(BlockCopy(group_index, source, int(self._tables[group_index][seat, at])))
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
        """Blocks of one group for the seat's first `num_tokens` tokens; False when memory is out (what was got is kept)."""
        record, pool, table = self._seats[seat], self._pools[group.index], self._tables[group.index]
        length = record.num_blocks[group.index]
        wanted = -(-num_tokens // group.block_size)
        while length < wanted:
            near = int(table[seat, length - 1]) if length > record.first_block[group.index] else None
            blocks = pool.take_many(wanted - length, near)
            if not blocks and not self._cache.make_room(group):
                return False
            table[seat, length : length + len(blocks)] = blocks
            length += len(blocks)
            record.num_blocks[group.index] = length
        return True

    def _take(self, group: GroupPlan, *, spares_pinned: bool) -> int | None:
        """A page of the group, if need be by evicting; None when nothing more can be evicted."""
        pool = self._pools[group.index]
        page = pool.take()
        while page is None and self._cache.make_room(group, spares_pinned=spares_pinned):
            page = pool.take()
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
        writes = {index: slots[seats] for index, slots in self._own.items()}
        write_rows = rows - 1
        due = np.flatnonzero(self._next_wanted[seats] <= ends)
        if len(due):
            write_rows, writes = self._with_checkpoints(due, seats, ends, rows, writes)
        copies, self._copies = tuple(self._copies), []
        return StepMemory(
            block_tables={index: table[seats, :longest] for index, table in self._tables.items()},
            start_slots={index: slots[seats] for index, slots in self._start.items()},
            write_rows=write_rows,
            write_slots=writes,
            copies=copies,
        )

    def _with_checkpoints(
        self, due: Ints, seats: Ints, ends: Ints, rows: Ints, own: dict[int, Ints]
    ) -> tuple[Ints, dict[int, Ints]]:
        """The writes of running states, with those of the checkpoints that the sequences `due` reach."""
        extra_rows: list[int] = []
        extra_slots: list[list[int]] = []
        for at in due.tolist():
            for position, slots in self._start_checkpoints(int(seats[at]), int(ends[at])):
                if position == ends[at]:
                    # The running state is this checkpoint: the next pass starts from it, no second write.
                    for group, slot in zip(self.plan.states, slots, strict=True):
                        own[group.index][at] = slot
                else:
                    extra_rows.append(int(rows[at] - (ends[at] - position) - 1))
                    extra_slots.append(slots)
        write_rows = np.concatenate([rows - 1, np.array(extra_rows, np.int64)])
        order = np.argsort(write_rows, kind="stable")
        writes = {
            group.index: np.concatenate([own[group.index], np.array([s[i] for s in extra_slots], np.int64)])[order]
            for i, group in enumerate(self.plan.states)
        }
        return write_rows[order], writes

    def _start_checkpoints(self, seat: int, end: int) -> list[tuple[int, list[int]]]:
        """Slots for the checkpoints that a pass up to token `end` of this seat reaches."""
        record = self._seats[seat]
        started = []
        while record.wanted and record.wanted[0] <= end:
            position = record.wanted.pop(0)
            if position in record.optional and not self._has_place(record, position):
                continue
            slots = self._take_slots(spares_pinned=True)
            if slots is None:
                continue
            self._pending.append(_Pending(seat, position, slots))
            if slots:
                started.append((position, slots))
        self._set_wanted(seat, record, record.wanted)
        return started

    def _has_place(self, record: _Seat, position: int) -> bool:
        """Whether an optional checkpoint is worth more than what it would push out."""
        last = record.written[-1].position if record.written else record.matched
        return position in record.promised or self._cache.would_keep("optional", record.follows, position - min(last, position))

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
        """What this seat computes is bad: nothing of it is offered to others, and what was goes when the seat is released."""
        self._seats[seat].stores = False
        self._seats[seat].is_distrusted = True
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
        start = record.run.end
        whole = (end - start) // self._unit
        if not whole:
            return
        first = start // self._unit
        blocks = [self._blocks_of(seat, record, group, first, first + whole) for group in self.plan.paged]
        run = self._cache.add_text(record.run, self._token_bytes(record, start, start + whole * self._unit), blocks)
        if run is not record.run:
            self._cache.use(run, 1)
            self._cache.use(record.run, -1)
            record.run = run

    def _blocks_of(self, seat: int, record: _Seat, group: GroupPlan, first: int, end: int) -> "array[int]":
        """Blocks of units `first` to `end`; NO_BLOCK for those that a window has left behind."""
        gone = min(max(record.first_block[group.index] - first, 0), end - first)
        blocks = array("i", self._tables[group.index][seat, first:end].tobytes())
        blocks[:gone] = array("i", [NO_BLOCK] * gone)
        return blocks

    def _block_at(self, seat: int, record: _Seat, group: GroupPlan, unit: int) -> int:
        assert unit >= record.first_block[group.index], "the block of the newest tokens is inside every window"
        return int(self._tables[group.index][seat, unit])

    def _publish_state(self, pending: _Pending, end: int) -> None:
        """Hang a written checkpoint into the index; its slots change owner."""
        self._add_checkpoint(pending.seat, pending.position, pending.slots)
        if pending.position == end and pending.slots:
            self._borrow(pending.seat, pending.slots)
        self._give_back(self.plan.states, pending.slots)

    def _add_checkpoint(self, seat: int, position: int, slots: list[int]) -> None:
        """Offer the states in `slots` as those after the seat's first `position` tokens."""
        record, run = self._seats[seat], self._seats[seat].run
        at = position // self._unit
        depth = at * self._unit
        while run.parent is not None and run.start >= depth:
            run = run.parent
        tail = self._token_bytes(record, depth, position)
        if not tail and not slots:
            return
        blocks = [self._block_at(seat, record, group, at) for group in self.plan.paged] if tail else []
        origin = self._origin(record, position)
        added = self._cache.add_state(run, depth, tail, slots, blocks, origin=origin, follows=record.follows, pin=record.pinned)
        if added is not None:
            record.written.append(added)
            self.num_checkpoints_written += 1

    def _origin(self, record: _Seat, position: int) -> Origin:
        """Why there is a checkpoint at this position of the seat's text."""
        if position >= record.num_prompt:
            return "answer_end"
        if position == record.junction or position in record.promised:
            return "junction"
        if position == record.num_prompt - 1:
            return "prompt_end"
        if position in record.boundaries:
            return "boundary"
        if position in record.optional:
            return "optional"
        # A prompt that goes on from this one is likelier to part near its end than anywhere before.
        return "spacing" if position + self._placement.spacing < record.num_prompt - 1 else "last_spacing"

    def _leave_window(self, seat: int, end: int) -> None:
        """Give back blocks that no later token of the seat looks at."""
        record = self._seats[seat]
        for group in self._window_groups:
            assert group.window is not None, "only window groups are here"
            first = max(0, end - group.window + 1) // group.block_size
            left = self._tables[group.index][seat, record.first_block[group.index] : first]
            self._pools[group.index].release_many(left)
            if record.stores and first > record.first_block[group.index]:
                self._cache.offer_window(record.run, group, record.first_block[group.index], first)
            record.first_block[group.index] = max(first, record.first_block[group.index])

    @staticmethod
    def _token_bytes(record: _Seat, start: int, end: int) -> bytes:
        return record.tokens[start:end].astype("<i4", copy=False).tobytes()

    # -- end ------------------------------------------------------------------------------------------------------------

    def release(self, seat: int, num_computed: int, *, keep: bool) -> Left:
        """Free a seat. With `keep` its text and its state after `num_computed` tokens stay as cache entries."""
        record = self._seats[seat]
        has_run = not record.sources and all(self._start[g.index][seat] == self._own[g.index][seat] for g in self.plan.states)
        if keep and record.stores and num_computed > 0 and has_run:
            slots = [int(self._own[group.index][seat]) for group in self.plan.states]
            self._add_checkpoint(seat, num_computed, slots)
        self._close(seat)
        return Left(record.trusted, record.written)

    def _close(self, seat: int) -> None:
        """Give back all that a seat holds."""
        record = self._seats.pop(seat)
        self._return_borrowed(record)
        for group in self.plan.paged:
            first, end = record.first_block[group.index], record.num_blocks[group.index]
            blocks = self._tables[group.index][seat, first:end]
            if self._copies:
                mine = set(blocks.tolist())
                self._copies = [copy for copy in self._copies if copy.group != group.index or copy.target not in mine]
            self._pools[group.index].release_many(blocks)
        for group in self.plan.states:
            slot = int(self._own[group.index][seat])
            if slot != NO_SLOT:
                self._pools[group.index].release(slot)
                self._own[group.index][seat] = NO_SLOT
        self.room[seat] = 0
        self._next_wanted[seat] = _NEVER
        if record.is_distrusted:
            self._drop(seat, record)
        self._cache.use(record.run, -1)

    def _drop(self, seat: int, record: _Seat) -> None:
        """Drop what a distrusted seat wrote, and trust nobody who has read it: what they write is of no use to others."""
        rows = [self._tables[group.index][seat] for group in self.plan.paged]
        trusted = record.trusted // self._unit * self._unit
        depth = self._cache.own_depth(record.written, record.run, trusted, rows)
        self._cache.drop(record.written, record.run, depth)
        for other_seat, other in self._seats.items():
            has_read = self._has_read(other, record)
            if has_read or other.run.evicted:
                other.stores, other.is_distrusted = False, other.is_distrusted or has_read
                self._set_wanted(other_seat, other, [])

    @staticmethod
    def _has_read(other: _Seat, record: _Seat) -> bool:
        """Whether a seat resumed from text that `record` may have computed."""
        if other.matched <= record.trusted or _root(other.run) is not _root(record.run):
            return False
        length = record.trusted + 1
        return bool((other.tokens[:length] == record.tokens[:length]).all())

    def clear(self) -> None:
        """Evict all that no request uses."""
        self._cache.clear()

    # -- reports --------------------------------------------------------------------------------------------------------

    def usage(self) -> dict[str, int]:
        """Pages by kind and state, and superpages, for metrics."""
        counts: Counter[str] = Counter()
        for group, pool in zip(self.plan.groups, self._pools, strict=True):
            kind = "blocks" if group.is_paged else "slots"
            counts[f"{kind}_used"] += pool.num_live
            counts[f"{kind}_cached"] += pool.num_cached
            counts[f"{kind}_total"] += pool.num_pages
        counts["checkpoints_written"] = self.num_checkpoints_written
        return {**counts, "superpages_free": self._arena.num_free, "superpages_total": self._arena.num_superpages}

    def check(self) -> None:
        """Assert that every page is accounted for exactly once: free + cached + live = all, per pool, as sets."""
        refs: list[Counter[int]] = [Counter() for _ in self.plan.groups]
        for index, slot in self.constant_slots.items():
            refs[index][slot] += 1
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
        users = Counter(record.run for record in self._seats.values())
        for run in self._cache.runs():
            assert run.num_users == users[run], f"the run to {run.end} counts {run.num_users} users, has {users[run]}"
        holds = self._cache.holds()
        owned: list[int] = []
        for pool, group_refs, group_holds in zip(self._pools, refs, holds, strict=True):
            pool.check(dict(group_refs), dict(group_holds))
            owned += pool.superpages()
        free = self._arena.free_set()
        assert sorted([*owned, *free]) == list(range(self._arena.num_superpages)), "superpages are lost or held twice"


def _root(run: Run) -> Run:
    while run.parent is not None:
        run = run.parent
    return run
