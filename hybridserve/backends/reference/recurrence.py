"""Linear recurrences in plain torch: the gated delta rule and the scan of Mamba-2, by one algorithm.

Owns `delta_rule` and `linear_scan` of the reference backend. Must not know layers. Sequences with few rows go row by
row, all abreast; longer ones in chunks whose rows are computed together (Yang et al. 2024, arXiv 2406.06484, section 3;
with decay arXiv 2412.06464; the scan is the case without correction, Dao and Gu 2024, arXiv 2405.21060, section 6).

With S the state before a chunk and G the sum of log decays from its start, the state after row i is
    S exp(G_i) + sum over j <= i of u_j (k_j exp(G_i - G_j))^T
where u_j = v_j for the scan, and for the delta rule u solves (I + A) u = beta (v - exp(G) S k) with
A_ij = beta_i k_i . k_j exp(G_i - G_j) for j < i. All kept states follow from u, so none costs a chunk of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridserve.backends.reference import decay
from hybridserve.backends.reference.chunk_grid import Grid, Rank, grid_of
from hybridserve.backends.reference.slots import start_states, write_states
from hybridserve.batch import Batch, StateTable

CHUNK = 64
#: Sequences with at most so many rows (decode, verification of drafts) go row by row.
MAX_ROWS_ABREAST = 8
#: Chunks prepared together: enough to fill a device, few enough to bound the memory.
WAVE_CHUNKS = 16


@dataclass(frozen=True)
class Inputs:
    """Rows of a recurrence, fp32, every head with its own q and k. With `beta` the delta rule, without it the scan."""

    q: Tensor  # [T, H, K], scaled
    k: Tensor  # [T, H, K]
    v: Tensor  # [T, H, V]
    log_decay: Tensor  # [T, H, 1] or [T, H, K]
    beta: Tensor | None  # [T, H, 1]

    def rows(self, rows: Tensor) -> Inputs:
        """Some of the rows. rows: int64 [n]. Returns tensors [n, ...]."""
        beta = None if self.beta is None else self.beta[rows]
        return Inputs(self.q[rows], self.k[rows], self.v[rows], self.log_decay[rows], beta)

    def chunks(self, rows: Tensor, padding: Tensor | None) -> Inputs:
        """Rows laid out by chunk, zero where padding, which changes no state. rows: [M, C]. Returns tensors [M, H, C,
        *].
        """
        inside = rows.clamp(max=len(self.q) - 1)

        def pick(x: Tensor) -> Tensor:
            laid_out = x[inside]
            if padding is not None:
                laid_out.masked_fill_(padding[:, :, None, None], 0)
            return laid_out.transpose(1, 2).contiguous()

        beta = None if self.beta is None else pick(self.beta)
        return Inputs(pick(self.q), pick(self.k), pick(self.v), pick(self.log_decay), beta)


@dataclass(frozen=True)
class Chunks:
    """What M chunks contribute, before the states that they start from are known."""

    q_start: Tensor  # [M, H, C, K]: q exp(G), to be applied to the start state
    scores: Tensor  # [M, H, C, C]: q_i . k_j exp(G_i - G_j), j <= i
    u: Tensor  # [M, H, C, V]: as if the start state were zero
    u_start: Tensor | None  # [M, H, C, K]: what applied to the start state is subtracted from u
    k: Tensor  # [M, H, C, K]
    sums: Tensor  # [M, H, C, 1 | K]: G

    def advance(self, first: int, rank: Rank, states: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and end states of one rank's chunks, which begin at `first` here; inner kept states are written.

        states: [n, H, V, K] before; kept: [W, H, V, K], in place. Returns [n, H, C, V] and [n, H, V, K].
        """
        here = slice(first, first + rank.count)
        u = self.u[here]
        if self.u_start is not None:
            u = u - self.u_start[here] @ states.mT
        y = self.q_start[here] @ states.mT + self.scores[here] @ u
        k, sums = self.k[here], self.sums[here]
        for write, sequence, offset in rank.inner_writes:
            kept[write] = _state_after(offset, states[sequence], u[sequence], k[sequence], sums[sequence])
        return y, _state_after(k.shape[-2] - 1, states, u, k, sums)


def _state_after(offset: int, states: Tensor, u: Tensor, k: Tensor, sums: Tensor) -> Tensor:
    """State after row `offset` of a chunk, from the states before it.

    states: [..., V, K]; u: [..., C, V]; k: [..., C, K]; sums: [..., C, 1 | K]. Returns [..., V, K].
    """
    done = slice(0, offset + 1)
    here = sums[..., offset : offset + 1, :]
    faded = k[..., done, :] * decay.factor(here - sums[..., done, :])
    return decay.drop_negligible(states * decay.factor(here) + u[..., done, :].mT @ faded)


def prepare(inputs: Inputs) -> Chunks:
    """The part of the chunk algorithm that needs no state. inputs: tensors [M, H, C, *]."""
    q, k, v, beta = inputs.q, inputs.k, inputs.v, inputs.beta
    sums = decay.summed(inputs.log_decay)
    from_start = decay.factor(sums)
    if beta is None:
        (scores,) = decay.pair_scores((q,), k, sums)
        return Chunks(q * from_start, scores, v, None, k, sums)
    scores, overlap = decay.pair_scores((q, k), k, sums)
    wanted = torch.cat((v, k * from_start), dim=-1) * beta
    # Only what is below the diagonal of `overlap` is read; the diagonal counts as ones.
    solved = torch.linalg.solve_triangular(overlap * beta, wanted, upper=False, unitriangular=True)
    u, u_start = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    return Chunks(q * from_start, scores, u, u_start, k, sums)


def step(inputs: Inputs, states: Tensor) -> Tensor:
    """One row of each sequence. inputs: [n, H, *]; states: [n, H, V, K] fp32, in place. Returns y: [n, H, V]."""
    states *= decay.factor(inputs.log_decay).unsqueeze(-2)
    u = inputs.v
    if inputs.beta is not None:
        u = inputs.beta * (u - _apply(states, inputs.k))
    decay.drop_negligible(states.addcmul_(u.unsqueeze(-1), inputs.k.unsqueeze(-2)))
    return _apply(states, inputs.q)


def _apply(states: Tensor, x: Tensor) -> Tensor:
    """states: [n, H, V, K]; x: [n, H, K]. Returns [n, H, V]."""
    # A row times the transpose: on CPUs three times as fast as the matrix times a column.
    return (x.unsqueeze(-2) @ states.mT).squeeze(-2)


def scan(inputs: Inputs, pool: Tensor, batch: Batch, table: StateTable) -> Tensor:
    """Run a recurrence over a batch. pool: [L, H, V, K], in place. Returns y: [T, H, V] fp32."""
    states = start_states(pool, table).float()
    if batch.max_rows == 1:
        y = step(inputs, states)
        write_states(pool, table, states[table.write_rows])
        return decay.drop_negligible(y)
    kept = torch.empty(len(table.write_rows_host), *pool.shape[1:], dtype=torch.float32, device=pool.device)
    # One row more than the batch has: the outputs of padding go there.
    y = torch.empty(len(inputs.v) + 1, *inputs.v.shape[1:], dtype=torch.float32, device=pool.device)
    num_rows = [end - start for start, end in zip(batch.cu_seqlens_host, batch.cu_seqlens_host[1:], strict=False)]
    short = [sequence for sequence, count in enumerate(num_rows) if count <= MAX_ROWS_ABREAST]
    long = [sequence for sequence, count in enumerate(num_rows) if count > MAX_ROWS_ABREAST]
    if short:
        grid = grid_of(batch, table, short, chunk=1)
        _run_rows(inputs, grid, states[grid.sequences], kept, y)
    if long:
        grid = grid_of(batch, table, long, chunk=CHUNK)
        _run_chunks(inputs, grid, states[grid.sequences], kept, y)
    write_states(pool, table, kept)
    return decay.drop_negligible(y[:-1])


def _run_rows(inputs: Inputs, grid: Grid, states: Tensor, kept: Tensor, y: Tensor) -> None:
    """Row after row. states: [n, H, V, K], overwritten; kept: [W, H, V, K] and y: [T + 1, H, V], in place."""
    for rank in grid.ranks:
        rows = grid.rows[rank.first : rank.first + rank.count, 0]
        y[rows] = step(inputs.rows(rows), states[: rank.count])
        kept[rank.end_writes] = states[rank.end_sequences]


def _run_chunks(inputs: Inputs, grid: Grid, states: Tensor, kept: Tensor, y: Tensor) -> None:
    """Chunk after chunk. states: [n, H, V, K], overwritten; kept: [W, H, V, K] and y: [T + 1, H, V], in place."""
    for wave in grid.waves(WAVE_CHUNKS):
        first = wave[0].first
        here = slice(first, wave[-1].first + wave[-1].count)
        prepared = prepare(inputs.chunks(grid.rows[here], None if grid.padding is None else grid.padding[here]))
        for rank in wave:
            out, states[: rank.count] = prepared.advance(rank.first - first, rank, states[: rank.count], kept)
            y[grid.rows[rank.first : rank.first + rank.count]] = out.transpose(1, 2)
            kept[rank.end_writes] = states[rank.end_sequences]


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor,
    batch: Batch,
    table: StateTable,
    *,
    scale: float,
    qk_l2norm: bool,
) -> Tensor:
    """See `ops.DeltaRule`. q, k: [T, Hk, K]; v: [T, Hv, V]; log_decay: [T, Hv] or [T, Hv, K]; beta: [T, Hv];
    state: [L, Hv, V, K], in place. Returns [T, Hv, V] in v's dtype.
    """
    q, k = q.float(), k.float()
    if qk_l2norm:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    decays = log_decay.float().reshape(*v.shape[:2], -1)
    num_heads = v.shape[1]
    inputs = Inputs(
        _per_value_head(q * scale, num_heads),
        _per_value_head(k, num_heads),
        v.float(),
        decays,
        beta.float().unsqueeze(-1),
    )
    return scan(inputs, state, batch, table).to(v.dtype)


def linear_scan(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, batch: Batch, table: StateTable) -> Tensor:
    """See `ops.LinearScan`. q, k: [T, G, N]; v: [T, H, P]; log_decay: [T, H]; state: [L, H, P, N], in place.

    Returns [T, H, P] fp32.
    """
    heads = v.shape[1]
    inputs = Inputs(
        _per_value_head(q.float(), heads),
        _per_value_head(k.float(), heads),
        v.float(),
        log_decay.float().unsqueeze(-1),
        None,
    )
    return scan(inputs, state, batch, table)


def _per_value_head(x: Tensor, num_heads: int) -> Tensor:
    """Give every value head its key head's rows. x: [T, Hk, K]. Returns [T, num_heads, K]."""
    repeats = num_heads // x.shape[1]
    return x if repeats == 1 else x.repeat_interleave(repeats, dim=1)
