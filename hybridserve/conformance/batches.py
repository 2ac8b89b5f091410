"""Batches for a mixer that is looked at alone: rows, their blocks and their slots, as a runner would give them.

Owns the builder. Must not know any mixer. Called by `bench.py` and by tests of operations.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridserve.batch import NO_SLOT, Batch, PagedTable, StateTable
from hybridserve.kv.spec import PagedSpec, Spec, StateSpec

#: Tokens in a block where no spec asks for another number.
BLOCK_SIZE = 4
#: In entries of a block table that no token of the sequence needs: out of range, so that reading one fails.
UNUSED_BLOCK = 10**6


@dataclass(frozen=True)
class Rows:
    """The rows of one sequence in a pass, and where its caches live.

    `writes` pairs a row, counted from the sequence's first row here, with the slot that its state is written to.
    """

    length: int
    context: int = 0
    start: int = NO_SLOT
    writes: tuple[tuple[int, int], ...] = ()
    blocks: tuple[int, ...] = ()


def block_size_for(specs: Iterable[Spec]) -> int:
    """The smallest multiple of `BLOCK_SIZE` that holds whole entries of every paged spec."""
    return math.lcm(BLOCK_SIZE, *(spec.tokens_per_entry for spec in specs if isinstance(spec, PagedSpec)))


def build_batch(
    sequences: Sequence[Rows],
    specs: Iterable[Spec],
    block_size: int = BLOCK_SIZE,
    input_ids: Tensor | None = None,
    constant_slot: int = NO_SLOT,
) -> Batch:
    """The batch of one pass. Spec number i of `specs` is group i; all state groups use the same slots.

    input_ids: [T], or None for zeros; constant_slot: where fresh sequences start in groups with a learned initial state.
    """
    cu_seqlens = (0, *itertools.accumulate(s.length for s in sequences))
    kv_lens = tuple(s.context + s.length for s in sequences)
    positions = torch.cat([torch.arange(s.context, s.context + s.length) for s in sequences])
    groups = dict(enumerate(specs))
    return Batch(
        input_ids=torch.zeros(cu_seqlens[-1], dtype=torch.int64) if input_ids is None else input_ids,
        positions=positions,
        cu_seqlens=torch.tensor(cu_seqlens, dtype=torch.int32),
        kv_lens=torch.tensor(kv_lens, dtype=torch.int32),
        cu_seqlens_host=cu_seqlens,
        kv_lens_host=kv_lens,
        paged={g: _paged_table(sequences, block_size) for g, spec in groups.items() if isinstance(spec, PagedSpec)},
        states={
            g: _state_table(sequences, cu_seqlens, constant_slot if spec.is_learned else NO_SLOT)
            for g, spec in groups.items()
            if isinstance(spec, StateSpec)
        },
    )


def _paged_table(sequences: Sequence[Rows], block_size: int) -> PagedTable:
    width = max(len(s.blocks) for s in sequences)
    tables = torch.full((len(sequences), width), UNUSED_BLOCK, dtype=torch.int32)
    index = []
    for table, s in zip(tables, sequences, strict=True):
        table[: len(s.blocks)] = torch.tensor(s.blocks, dtype=torch.int32)
        positions = range(s.context, s.context + s.length)
        index += [s.blocks[position // block_size] * block_size + position % block_size for position in positions]
    return PagedTable(tables, torch.tensor(index, dtype=torch.int64), block_size)


def _state_table(sequences: Sequence[Rows], cu_seqlens: Sequence[int], fresh: int) -> StateTable:
    starts = tuple(fresh if s.start == NO_SLOT else s.start for s in sequences)
    writes = sorted((cu + row, slot) for cu, s in zip(cu_seqlens, sequences, strict=False) for row, slot in s.writes)
    rows, slots = tuple(row for row, _ in writes), [slot for _, slot in writes]
    return StateTable(
        start_slots=torch.tensor(starts, dtype=torch.int64),
        write_rows=torch.tensor(rows, dtype=torch.int64),
        write_slots=torch.tensor(slots, dtype=torch.int64),
        write_rows_host=rows,
        starts_host=starts,
    )


def blocks_for(num_tokens: int, first: int = 0) -> tuple[int, ...]:
    """Blocks for a sequence, from `first` on, in an order that is not theirs in memory. Larger blocks leave the last unused."""
    count = -(-num_tokens // BLOCK_SIZE)
    return tuple(first + (i ^ 1 if (i ^ 1) < count else i) for i in range(count))
