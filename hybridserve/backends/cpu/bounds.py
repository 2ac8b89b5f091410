"""Indices are inside the memory that they are for, or IndexError: kernels would read and write wherever an index points.

Owns these checks and what is said when one fails. A wrong index is a mistake of a layer's specs or of the engine, never of a
request. Called by the wrappers of operations that are given indices.
"""

from torch import Tensor

from hybridserve.backends.cpu.library import Library
from hybridserve.batch import Batch, PagedTable, StateTable

#: The window of a row that sees all tokens.
EVERYTHING = 2**62


class Bounds:
    """Checks over host memory, in native code: a pass has thousands of indices."""

    def __init__(self, library: Library) -> None:
        self._first_outside = library.kernel("hs_first_outside")
        self._first_block_outside = library.kernel("hs_first_block_outside")

    def check(self, what: str, values: Tensor, low: int, high: int) -> None:
        """Raise IndexError unless every value is from `low` to `high` - 1. values: int64 [n], dense."""
        place = self._first_outside(values.data_ptr(), values.numel(), low, high)
        if place >= 0:
            raise IndexError(f"{what} {place} is {int(values[place])}; it must be from {low} to {high - 1}")

    def check_entries(self, name: str, table: PagedTable, entries: Tensor, cache: Tensor) -> None:
        """Raise IndexError unless every entry has its place. entries: [T, ...]; cache: [B, block_size, ...]."""
        if cache.shape[1] != table.block_size:
            raise IndexError(
                f"kv_write: {name} has {cache.shape[1]} entries in a block, the table {table.block_size}; "
                "give a table of the cache's own entries"
            )
        if len(entries) != len(table.kv_index):
            raise IndexError(
                f"kv_write: {len(entries)} rows of {name} for {len(table.kv_index)} places; give a place for each row"
            )
        self.check(f"kv_write: the place of {name}'s row", table.kv_index, 0, cache.shape[0] * table.block_size)

    def check_blocks(self, table: PagedTable, batch: Batch, num_blocks: int, window: int) -> None:
        """Raise IndexError unless every block that a pass reads is one of `num_blocks`."""
        tables = table.block_tables
        place = self._first_block_outside(
            *(tables.data_ptr(), tables.stride(0), tables.shape[1], table.block_size, num_blocks),
            *(batch.cu_seqlens.data_ptr(), batch.kv_lens.data_ptr(), batch.num_sequences, window),
        )
        if place >= 0:
            sequence, column = divmod(place, 2**32)
            found = int(tables[sequence, column]) if column < tables.shape[1] else "missing"
            raise IndexError(f"block {column} of sequence {sequence} is {found}; it must be from 0 to {num_blocks - 1}")

    def state_arguments(self, batch: Batch, table: StateTable, num_slots: int) -> tuple[int, int, int, int, int, int]:
        """What kernels of states are told: addresses of cu_seqlens, start slots, rows and slots of writes; numbers of sequences
        and writes. Raises IndexError for a slot that is not among `num_slots`, or a row that is not in the batch.
        """
        self.check("start slot of sequence", table.start_slots, -1, num_slots)
        self.check("row of write", table.write_rows, 0, batch.num_tokens)
        self.check("slot of write", table.write_slots, 0, num_slots)
        return (
            batch.cu_seqlens.data_ptr(),
            table.start_slots.data_ptr(),
            table.write_rows.data_ptr(),
            table.write_slots.data_ptr(),
            batch.num_sequences,
            len(table.write_rows_host),
        )
