"""How the rows of a batch are cut into chunks for a recurrence, and which chunk yields which kept state.

Owns the cutting, on host integers. Must not know what is computed in a chunk. Called by `recurrence.py`.

Chunks are cut at multiples of the chunk size in *positions*, not in rows: a prompt computed in several passes that end
on such multiples has the same chunks, and the same rounding, as in one pass. Rows a chunk lacks at either end are
padding.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hybridserve.batch import Batch, StateTable


class InnerWrite(NamedTuple):
    """A state to keep that lies inside a chunk."""

    write: int  # index among the batch's writes
    sequence: int  # index among the grid's sequences
    offset: int  # row within the chunk


@dataclass(frozen=True)
class Rank:
    """The r-th chunks of all sequences that have so many: those of the grid's first `count` sequences."""

    first: int  # of its chunks, in the grid
    count: int
    end_writes: Tensor  # int64 [E]: writes of states after a chunk's last row
    end_sequences: Tensor  # int64 [E]: the sequence of each, among the grid's
    inner_writes: tuple[InnerWrite, ...]


@dataclass(frozen=True)
class Grid:
    """M chunks of C rows each, of n sequences: the first chunk of each sequence, then the second of each, and so on."""

    sequences: Tensor  # int64 [n]: sequences of the batch, the one with most chunks first
    rows: Tensor  # int64 [M, C]: rows of the batch; T where padding
    padding: Tensor | None  # bool [M, C], or None when there is none
    ranks: tuple[Rank, ...]

    def waves(self, num_chunks: int) -> Iterator[tuple[Rank, ...]]:
        """Runs of ranks that have about `num_chunks` chunks together, and at least one rank."""
        wave: list[Rank] = []
        for rank in self.ranks:
            if wave and sum(other.count for other in wave) + rank.count > num_chunks:
                yield tuple(wave)
                wave = []
            wave.append(rank)
        if wave:
            yield tuple(wave)


@dataclass(frozen=True)
class _Cut:
    """One sequence on the grid: it starts `head` rows into its first chunk."""

    sequence: int
    start: int
    end: int
    head: int
    count: int  # chunks


def grid_of(batch: Batch, table: StateTable, sequences: Sequence[int], chunk: int) -> Grid:
    """The grid of some of a batch's sequences (at least one) with chunks of `chunk` rows."""
    cuts = sorted((_cut(batch, sequence, chunk) for sequence in sequences), key=lambda cut: -cut.count)
    device = batch.cu_seqlens.device
    bounds = [
        (cut.start - cut.head + rank * chunk, cut.start, cut.end)
        for rank in range(cuts[0].count)
        for cut in cuts
        if cut.count > rank
    ]
    base, start, end = torch.tensor(bounds, device=device).T.unsqueeze(-1)  # [M, 1] each
    rows = base + torch.arange(chunk, device=device)
    padding = None
    if any(low < first or low + chunk > last for low, first, last in bounds):
        padding = (rows < start) | (rows >= end)
        rows = rows.masked_fill(padding, batch.num_tokens)
    order = torch.tensor([cut.sequence for cut in cuts], device=device)
    return Grid(order, rows, padding, _ranks(cuts, table, chunk, device))


def _cut(batch: Batch, sequence: int, chunk: int) -> _Cut:
    start, end = batch.cu_seqlens_host[sequence : sequence + 2]
    head = (batch.kv_lens_host[sequence] - (end - start)) % chunk
    return _Cut(sequence, start, end, head, -(-(head + end - start) // chunk))


def _ranks(cuts: Sequence[_Cut], table: StateTable, chunk: int, device: torch.device) -> tuple[Rank, ...]:
    """Ranks of the grid with the writes that fall to each; `cuts` are ordered, most chunks first."""
    at_end: list[list[tuple[int, int]]] = [[] for _ in range(cuts[0].count)]
    inner: list[list[InnerWrite]] = [[] for _ in at_end]
    for index, cut in enumerate(cuts):
        first, last = (bisect_left(table.write_rows_host, row) for row in (cut.start, cut.end))
        for write in range(first, last):
            row = table.write_rows_host[write]
            rank, offset = divmod(row - cut.start + cut.head, chunk)
            # Padding changes no state, so the last real row's is the chunk's.
            if offset == chunk - 1 or row == cut.end - 1:
                at_end[rank].append((write, index))
            else:
                inner[rank].append(InnerWrite(write, index, offset))
    ranks = []
    first = 0
    for rank, pairs in enumerate(at_end):
        count = sum(cut.count > rank for cut in cuts)
        ends = torch.tensor(pairs, dtype=torch.int64, device=device).view(-1, 2)
        ranks.append(Rank(first, count, ends[:, 0], ends[:, 1], tuple(inner[rank])))
        first += count
    return tuple(ranks)
