"""Mamba's selective scan in plain torch, from any start state.

Owns `selective_scan` of the reference backend. Must not know layers. Rows go one after the other, since every state element
has a decay of its own; what does not depend on the state is computed for some rows of several sequences together.
"""

import torch
from torch import Tensor

from hybridserve.backends.reference.chunk_grid import Rank, grid_of
from hybridserve.backends.reference.decay import drop_negligible, factor
from hybridserve.backends.reference.slots import start_states, write_states
from hybridserve.batch import Batch, StateTable

#: Rows of a sequence that are prepared together.
CHUNK = 16
#: Bytes of the states of all rows that are worked on at once.
TEMPORARY_NBYTES = 32 * 2**20


def selective_scan(
    x: Tensor, dt: Tensor, A: Tensor, b: Tensor, c: Tensor, state: Tensor, batch: Batch, table: StateTable
) -> Tensor:
    """See `ops.SelectiveScan`. x, dt: [T, C]; A: [C, N]; b, c: [T, N]; state: [L, C, N], in place. Returns [T, C] fp32."""
    x, dt, A, b, c = (tensor.float() for tensor in (x, dt, A, b, c))
    grid = grid_of(batch, table, range(batch.num_sequences), 1 if batch.max_rows == 1 else CHUNK)
    states = start_states(state, table).float()[grid.sequences]
    kept = torch.empty(len(table.write_rows_host), *A.shape, dtype=torch.float32, device=x.device)
    # One row more than the batch has: the outputs of padding go there.
    y = torch.empty(len(x) + 1, x.shape[1], dtype=torch.float32, device=x.device)
    for rank in grid.ranks:
        chunks = slice(rank.first, rank.first + rank.count)
        rows = grid.rows[chunks]
        padding = None if grid.padding is None else grid.padding[chunks]
        part = max(1, TEMPORARY_NBYTES // (4 * rows.shape[1] * A.numel()))
        for first in range(0, rank.count, part):
            here = slice(first, min(first + part, rank.count))
            inside = rows[here].clamp(max=len(x) - 1)
            step = dt[inside]
            if padding is not None:
                step.masked_fill_(padding[here, :, None], 0)  # a step of no length changes no state
            trail = _trail(step, step * x[inside], A, b[inside], states[here])
            states[here] = drop_negligible(trail[:, -1])
            _keep_inner(rank, here, trail, kept)
            y[rows[here]] = (trail @ c[inside].unsqueeze(-1)).squeeze(-1)
        kept[rank.end_writes] = states[rank.end_sequences]
    write_states(state, table, kept)
    return y[:-1]


def _trail(dt: Tensor, u: Tensor, A: Tensor, b: Tensor, states: Tensor) -> Tensor:
    """The state after every row. dt, u = dt x: [n, R, C]; A: [C, N]; b: [n, R, N]; states: [n, C, N], before the first row.

    Returns [n, R, C, N].
    """
    decay = factor(dt.unsqueeze(-1) * A)
    trail = u.unsqueeze(-1) * b.unsqueeze(-2)
    for row in range(dt.shape[1]):
        states = trail[:, row].addcmul_(states, decay[:, row])
    return trail


def _keep_inner(rank: Rank, here: slice, trail: Tensor, kept: Tensor) -> None:
    """Keep states that lie inside a chunk. trail: [n, R, C, N], of the sequences `here`; kept: [W, C, N], in place."""
    for write, sequence, offset in rank.inner_writes:
        if here.start <= sequence < here.stop:
            kept[write] = trail[sequence - here.start, offset]
