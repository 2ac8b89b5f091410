"""The seam of hybridserve: what a token mixer declares and what it is given.

Owns the two base classes. A mixer returns its cache needs as data (`specs`) and computes rows (`forward`); it never sees block
ids' meaning, requests, pools or the scheduler. `step` is the definition of a recurrent layer; overriding `forward` with fast
code is optional and is held to `step` by the conformance tests.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import msgspec
import torch
from torch import Tensor, nn

from hybridserve.backends.ops import Ops
from hybridserve.batch import NO_SLOT, Batch, Cache, LayerCaches
from hybridserve.kv.spec import Spec
from hybridserve.registry import Registry

#: Layer kinds by name. A class is registered as ``@mixers.register("gated_delta")`` and built as ``cls(config, ops, dtype)``.
mixers: Registry[type["Mixer"]] = Registry("mixer", group="hybridserve.mixers")

#: States of S sequences: spec name -> tensor name -> [S, *shape].
States: TypeAlias = Mapping[str, Mapping[str, Tensor]]


class MixerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every mixer's own frozen, typed configuration."""

    hidden_size: int


class Mixer(nn.Module):
    """The token-mixing part of a layer.

    A subclass names its `Config`, is registered under its kind, and implements `specs` and `forward`.
    """

    Config: ClassVar[type[MixerConfig]]
    kind: ClassVar[str]

    def specs(self) -> dict[str, Spec]:
        """The caches this layer needs, by name: none, one, several, of both kinds."""
        raise NotImplementedError

    def forward(self, x: Tensor, batch: Batch, caches: LayerCaches) -> Tensor:
        """Mix rows. x: [T, D]. Writes the caches that `specs` named where `batch` says. Returns [T, D]."""
        raise NotImplementedError


class RecurrentMixer(Mixer):
    """A mixer whose memory has a fixed size. `specs` and `step` make a complete, servable layer."""

    def step(self, x: Tensor, states: States) -> tuple[Tensor, States]:
        """One token of each sequence. x: [S, D]; states: see `States`. Returns y: [S, D] and the states afterwards."""
        raise NotImplementedError

    def forward(self, x: Tensor, batch: Batch, caches: LayerCaches) -> Tensor:
        """Run `step` over the rows, all sequences abreast. x: [T, D]. Returns [T, D]."""
        states = {name: _read(caches, name, batch) for name in caches}
        kept = {name: _room_for_writes(caches[name], batch) for name in caches}
        starts = torch.tensor(batch.cu_seqlens_host[:-1], device=x.device)
        lengths = torch.tensor(batch.cu_seqlens_host[1:], device=x.device) - starts
        y = torch.empty_like(x)
        for t in range(batch.max_rows):
            live = lengths > t
            rows = starts[live] + t
            y[rows], stepped = self.step(x[rows], {n: {k: v[live] for k, v in per.items()} for n, per in states.items()})
            for n, per in stepped.items():
                write = kept[n].write_of_row[rows]
                for k, v in per.items():
                    # Rounded to the stored dtype at every token, so that a chunk's end changes nothing.
                    rounded = v.to(states[n][k].dtype)
                    states[n][k][live] = rounded
                    kept[n].tensors[k][write[write >= 0]] = rounded[write >= 0]
        for n, room in kept.items():
            for k, v in room.tensors.items():
                caches[n].tensors[k][batch.states[caches[n].group].write_slots] = v
        return y


@dataclass(frozen=True)
class _Writes:
    """States to be written once all reads are done: a slot may be one sequence's start and another's target."""

    write_of_row: Tensor  # int64 [T]: index among the writes, or -1
    tensors: dict[str, Tensor]  # name -> [W, *shape]


def _room_for_writes(cache: Cache, batch: Batch) -> _Writes:
    table = batch.states[cache.group]
    write_of_row = torch.full((batch.num_tokens,), -1, dtype=torch.int64, device=table.write_rows.device)
    write_of_row[table.write_rows] = torch.arange(len(table.write_rows), device=table.write_rows.device)
    tensors = {k: pool.new_empty(len(table.write_rows), *pool.shape[1:]) for k, pool in cache.tensors.items()}
    return _Writes(write_of_row, tensors)


def _read(caches: LayerCaches, name: str, batch: Batch) -> dict[str, Tensor]:
    """Start states of every sequence: ``{tensor: [S, *shape]}``, zeros where there is no slot to start from."""
    table = batch.states[caches[name].group]
    fresh = table.start_slots == NO_SLOT
    out = {}
    for tensor_name, pool in caches[name].tensors.items():
        state = pool[table.start_slots.clamp(min=0)]
        state[fresh] = 0  # by assignment, not by multiplying: a poisoned slot may hold NaN
        out[tensor_name] = state
    return out
