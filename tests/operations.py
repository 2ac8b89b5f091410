"""Ground of the operation tests: the backends to test, batches with traps in them, and token-serial oracles in fp64.

Owns the situations. Must not know how a backend computes. Used by `test_ops*.py`; a new backend is tested as soon as it is in
the table of `select.py`.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from hybridserve.backends.offer import Offer, Operation
from hybridserve.backends.select import BACKENDS
from hybridserve.batch import NO_SLOT, Batch, StateTable
from hybridserve.kv.spec import StateSpec, TensorSpec
from tests.conformance import Rows, build_batch

CPU = torch.device("cpu")
NUM_SLOTS = 12


@functools.cache
def offer_of(backend: str, dtype: torch.dtype) -> Offer:
    """What a backend offers on the CPU."""
    return next(row for row in BACKENDS if row.name == backend).offer(CPU, dtype)


def over_backends(name: str) -> pytest.MarkDecorator:
    """Run a test with every backend that implements an operation; one that refuses it, or cannot run, is a visible skip."""
    offers = {row.name: offer_of(row.name, torch.float32) for row in BACKENDS if "cpu" in row.devices}
    implemented = [key for key, offer in offers.items() if name in offer.ops or name in offer.refused or not offer.ops]
    return pytest.mark.parametrize("backend", implemented)


def operation(backend: str, name: str, dtype: torch.dtype = torch.float32) -> Operation:
    """The implementation of an operation by one backend on the CPU. Skips the test if this backend has none here."""
    offer = offer_of(backend, dtype)
    if name not in offer.ops:
        pytest.skip(f"{backend} has no {name} here: {offer.refused.get(name, offer.reason)}")
    return offer.ops[name]


#: Passes of sequences with states: lengths around the chunk size, a start that is also a target, several kept states, the
#: same row kept twice, none kept, starts from nothing with tokens before, slots in no order.
SITUATIONS: dict[str, list[Rows]] = {
    "decode": [
        Rows(1, context=5, start=7, writes=((0, 3),)),
        Rows(1, context=0, writes=((0, 7),)),
        Rows(1, context=64, start=3, writes=((0, 0), (0, 9))),
        Rows(1, context=9, start=5),
    ],
    "verify": [
        Rows(3, context=70, start=2, writes=((0, 4), (1, 5), (2, 2))),
        Rows(5, context=11, start=4, writes=((4, 8),)),
        Rows(1, context=2, start=8, writes=((0, 10),)),
        Rows(2, context=0, writes=()),
    ],
    "63": [Rows(63, writes=((62, 1),))],
    "64": [Rows(64, start=1, writes=((63, 1),))],
    "65": [Rows(65, context=3, start=11, writes=((0, 2), (64, 11)))],
    "130": [Rows(130, context=64, start=0, writes=((63, 3), (64, 4), (65, 5), (127, 6), (129, 0), (129, 8)))],
    "mixed": [
        Rows(1, context=33, start=6, writes=((0, 6),)),
        Rows(70, context=0, writes=((9, 5), (50, 1), (69, 2))),
        Rows(9, context=61, start=2, writes=((2, 7), (3, 11), (8, 3))),
        Rows(1, context=128, start=3, writes=((0, 4),)),
        Rows(130, context=17, start=4, writes=((110, 8), (129, 10))),
        Rows(2, context=1, start=5, writes=((1, 9),)),
    ],
}


def build(sequences: Sequence[Rows]) -> tuple[Batch, StateTable]:
    """The batch of a situation and its only state table."""
    batch = build_batch(sequences, [StateSpec((TensorSpec("state", (1,), "float32"),))])
    return batch, batch.states[0]


def random_situation(seed: int) -> list[Rows]:
    """Up to six sequences with random lengths, starts and writes; every slot is written at most once."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int) -> int:
        return int(torch.randint(high, (), generator=generator))

    free = torch.randperm(NUM_SLOTS, generator=generator).tolist()
    sequences = []
    for _ in range(1 + draw(6)):
        length = (1, 1 + draw(8), 1 + draw(40), 1 + draw(150))[draw(4)]
        writes = [(draw(length), free.pop()) for _ in range(draw(3)) if free]
        start = draw(NUM_SLOTS) if draw(3) else NO_SLOT
        sequences.append(Rows(length, draw(100), start, tuple(sorted(writes))))
    return sequences


def pool_for(table: StateTable, *shape: int, seed: int = 0) -> Tensor:
    """[NUM_SLOTS, *shape] with normal numbers in the slots that are read and NaN in all others; strided like an arena."""
    size = torch.Size(shape).numel()
    pages = torch.full((NUM_SLOTS, size + 5), torch.nan)
    for slot in {slot for slot in table.starts_host if slot != NO_SLOT}:
        pages[slot, :size] = torch.randn(size, generator=torch.Generator().manual_seed(seed * NUM_SLOTS + slot))
    return pages[:, :size].unflatten(1, shape)


def strided(*shape: int, generator: torch.Generator) -> Tensor:
    """Normal numbers as a slice of a wider tensor, as projections hand them over."""
    return torch.randn(*shape[:-1], shape[-1] + 3, generator=generator)[..., : shape[-1]]


@dataclass(frozen=True)
class Recurrence:
    """Inputs of `delta_rule` or, without beta, of `linear_scan`."""

    q: Tensor  # [T, Hk, K]
    k: Tensor  # [T, Hk, K]
    v: Tensor  # [T, Hv, V]
    log_decay: Tensor  # [T, Hv] or [T, Hv, K]
    beta: Tensor | None = None  # [T, Hv]
    scale: float = 1.0
    qk_l2norm: bool = False

    def rows(self, first: int, last: int) -> "Recurrence":
        """Some consecutive rows."""
        beta = None if self.beta is None else self.beta[first:last]
        q, k, v, log_decay = (x[first:last] for x in (self.q, self.k, self.v, self.log_decay))
        return Recurrence(q, k, v, log_decay, beta, self.scale, self.qk_l2norm)

    def run(self, op: Operation, state: Tensor, batch: Batch, table: StateTable) -> Tensor:
        """Call a backend. state: [L, Hv, V, K], in place. Returns [T, Hv, V]."""
        if self.beta is None:
            y = op(self.q, self.k, self.v, self.log_decay, state, batch, table)
        else:
            y = op(
                *(self.q, self.k, self.v, self.log_decay, self.beta, state, batch, table),
                scale=self.scale,
                qk_l2norm=self.qk_l2norm,
            )
        assert y is not None
        return y

    def oracle(self, state: Tensor, batch: Batch, table: StateTable) -> tuple[Tensor, Tensor]:
        """Row by row in fp64, straight from the definition. Returns y: [T, Hv, V] and the pool afterwards."""
        after = state.double().clone()
        y = torch.zeros(self.v.shape, dtype=torch.float64)
        for sequence, start in enumerate(table.starts_host):
            S = torch.zeros(state.shape[1:], dtype=torch.float64) if start == NO_SLOT else state[start].double()
            for row in range(*batch.cu_seqlens_host[sequence : sequence + 2]):
                q, k, v = (x[row].double() for x in (self.q, self.k, self.v))
                if self.qk_l2norm:
                    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
                q, k = (x.repeat_interleave(v.shape[0] // x.shape[0], dim=0) for x in (q, k))
                S = S * self.log_decay[row].double().exp().view(v.shape[0], 1, -1)
                u = v
                if self.beta is not None:
                    u = self.beta[row].double()[:, None] * (v - torch.einsum("hvk,hk->hv", S, k))
                S = S + torch.einsum("hv,hk->hvk", u, k)
                y[row] = self.scale * torch.einsum("hvk,hk->hv", S, q)
                for written, slot in zip(table.write_rows_host, table.write_slots.tolist(), strict=True):
                    if written == row:
                        after[slot] = S
        return y, after


#: Log decays per token, as (smallest, largest): from almost none to forgetting everything at once, mixed with almost none.
DECAYS: Mapping[str, tuple[float, float]] = {"weak": (-0.02, 0.0), "usual": (-1.0, -0.01), "strong": (-8.0, -3.0)}


def recurrence(
    num_rows: int,
    *,
    seed: int = 0,
    delta: bool = True,
    per_channel: bool = False,
    decays: str = "usual",
    heads: tuple[int, int] = (2, 4),
    dims: tuple[int, int] = (16, 24),
    qk_l2norm: bool = True,
) -> Recurrence:
    """Random inputs. `heads` is (Hk, Hv), `dims` (K, V); "resets" are weak decays with one row in ten at -1000 or -inf."""
    generator = torch.Generator().manual_seed(seed)
    (Hk, Hv), (K, V) = heads, dims
    q, k = (strided(num_rows, Hk, K, generator=generator) for _ in range(2))
    v = strided(num_rows, Hv, V, generator=generator)
    shape = (num_rows, Hv, K) if per_channel else (num_rows, Hv)
    low, high = DECAYS.get(decays, DECAYS["weak"])
    log_decay = low + (high - low) * torch.rand(*shape, generator=generator)
    if decays == "resets":
        chance = torch.rand(*shape, generator=generator)
        log_decay[chance < 0.1] = -1000.0
        log_decay[chance < 0.03] = -torch.inf
    if not delta:
        return Recurrence(q, k, v, log_decay)
    beta = torch.rand(num_rows, Hv, generator=generator)
    return Recurrence(q, k, v, log_decay, beta, K**-0.5, qk_l2norm)
