"""Reading start states from a pool and writing kept ones back.

Owns the two rules that every state operation obeys: NO_SLOT means zeros whatever the pool holds, and all reads come
before any write. Called by the recurrences and the convolution of the reference backend.
"""

from torch import Tensor

from hybridserve.batch import NO_SLOT, StateTable


def start_states(pool: Tensor, table: StateTable) -> Tensor:
    """States before the first row of each sequence, as a copy. pool: [L, ...]. Returns [S, ...] in the pool's dtype."""
    if not table.starts_anywhere:
        return pool.new_zeros(len(table.starts_host), *pool.shape[1:])
    if NO_SLOT not in table.starts_host:
        return pool[table.start_slots]
    states = pool[table.start_slots.clamp(min=0)]
    fresh = (table.start_slots == NO_SLOT).view(-1, *(1 for _ in pool.shape[1:]))
    # By filling, not by multiplying: a slot that is nobody's may hold NaN.
    return states.masked_fill_(fresh, 0)


def write_states(pool: Tensor, table: StateTable, kept: Tensor) -> None:
    """Store the kept states in their slots. pool: [L, ...], in place; kept: [W, ...], in the order of `write_rows`."""
    if table.write_rows_host:
        pool.index_copy_(0, table.write_slots, kept.to(pool.dtype))
