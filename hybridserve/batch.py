"""What one forward pass is given beside the weights: T token rows of S sequences, packed, and where their caches live.

Owns no memory of its own: a `Batch` is built by `engine/runner.py` for one step and read by models, mixers and backends.
Must not know pools, requests or the scheduler. There is no padding, and no difference between prefill and decode.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from torch import Tensor

#: In `StateTable.start_slots`: this sequence starts from a zero state and reads no slot.
NO_SLOT = -1


@dataclass(frozen=True)
class PagedTable:
    """Where the sequences' tokens live in the caches of one paged group.

    A window group's table has stale ids for blocks that fell out of the window: readers start at the window's first token.
    """

    block_tables: Tensor  # int32 [S, max_blocks]: block ids of each sequence, in the order of its tokens
    kv_index: Tensor  # int64 [T]: block * block_size + offset, the entry that each row's token writes
    block_size: int  # tokens per block


@dataclass(frozen=True)
class StateTable:
    """Where the sequences' states of one state group are read and written.

    A state is read from `start_slots` only and written to `write_slots` only; the two may share a slot. What a pass does not
    name is not touched. So a checkpoint is one more write, a prefix hit is a start slot that belongs to somebody else, and a
    verification of drafts writes nothing.
    """

    start_slots: Tensor  # int64 [S]: slot that holds the state before the sequence's first row, or NO_SLOT
    write_rows: Tensor  # int64 [W], ascending: rows of the batch whose state afterwards is kept
    write_slots: Tensor  # int64 [W]: the slot that each of them goes to
    write_rows_host: tuple[int, ...]  # write_rows, for control flow without a device sync
    starts_host: tuple[int, ...]  # start_slots, likewise

    @cached_property
    def starts_anywhere(self) -> bool:
        """Whether any sequence reads a slot at all."""
        return any(slot != NO_SLOT for slot in self.starts_host)


@dataclass(frozen=True)
class Batch:
    """T tokens of S sequences, row after row. Sequence s owns rows cu_seqlens[s] to cu_seqlens[s + 1], at least one."""

    input_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]: 0 is the first token of a request
    cu_seqlens: Tensor  # int32 [S + 1]
    kv_lens: Tensor  # int32 [S]: tokens of each sequence once this pass is done (computed before + rows here)
    cu_seqlens_host: tuple[int, ...]
    kv_lens_host: tuple[int, ...]
    paged: Mapping[int, PagedTable]  # by group
    states: Mapping[int, StateTable]  # by group

    @property
    def num_tokens(self) -> int:
        return self.cu_seqlens_host[-1]

    @property
    def num_sequences(self) -> int:
        return len(self.kv_lens_host)

    @cached_property
    def max_rows(self) -> int:
        """Rows of the longest sequence of this pass; 1 when all decode."""
        return max(end - start for start, end in zip(self.cu_seqlens_host, self.cu_seqlens_host[1:], strict=False))

    @cached_property
    def derived(self) -> dict[object, tuple[Tensor, ...]]:
        """What one layer computed for this pass and the next ones use again (rotary angles, an index's choice), by what it is."""
        return {}


@dataclass(frozen=True)
class Cache:
    """Storage of one named spec of one layer: views into the arena, indexed by block or slot.

    Paged: ``tensors[name]`` is ``[num_blocks, block_size // tokens_per_entry, *shape]``. State: ``[num_slots, *shape]``.
    The first dimension is strided; all offsets need 64 bits.
    """

    group: int  # key of Batch.paged or Batch.states
    tensors: Mapping[str, Tensor]


#: The caches of one layer, by the names that its mixer's `specs()` gave.
LayerCaches: TypeAlias = Mapping[str, Cache]
