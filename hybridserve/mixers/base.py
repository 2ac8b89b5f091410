"""The seam of hybridserve: what a token mixer declares and what it is given.

Owns the two base classes. A mixer returns its cache needs as data (`specs`) and computes rows (`forward`); it never
sees block ids' meaning, requests, pools or the scheduler. `step` is the definition of a recurrent layer; overriding
`forward` with fast code is optional and is held to `step` by the conformance tests.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import msgspec
import torch
from torch import Tensor, nn

from hybridserve.backends.ops import Ops
from hybridserve.batch import NO_SLOT, Batch, Cache, LayerCaches
from hybridserve.errors import EngineError
from hybridserve.kv.spec import Spec, StateSpec, TensorSpec
from hybridserve.registry import Registry

#: Layer kinds by name: ``@mixers.register("gated_delta")`` puts a class in; it is built as ``cls(config, ops, dtype)``.
mixers: Registry[type["Mixer"]] = Registry("mixer", group="hybridserve.mixers")

#: States of S sequences: spec name -> tensor name -> [S, *shape].
States: TypeAlias = Mapping[str, Mapping[str, Tensor]]


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name of a dtype as specs spell it: "float32"."""
    return str(dtype).removeprefix("torch.")


def empty_parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """A parameter for the loader to fill. Never trained: without gradients, results may be written in place."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


class MixerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every mixer's own frozen, typed configuration."""

    hidden_size: int


class Mixer(nn.Module):
    """The token-mixing part of a layer.

    A subclass names its `Config`, is registered under its kind, and implements `specs` and `forward`. It is built as
    ``cls(config, ops, dtype)``, under ``torch.device("meta")`` too: whatever is not a parameter must not live on the
    default device. A result may depend on the caches, `x` and `batch` only; rows of other sequences never change it.
    """

    Config: ClassVar[type[MixerConfig]]
    kind: ClassVar[str]

    def __init__(self, config: MixerConfig, ops: Ops, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.ops = ops
        self.dtype = dtype

    def specs(self) -> dict[str, Spec]:
        """The caches this layer needs, by name: none, one, several, of both kinds."""
        raise NotImplementedError

    def initial_states(self) -> States:
        """What fresh sequences start from, by spec and tensor name, for the specs that name parameters: ``[*shape]`` each.

        Tensors of such a spec that name none are zeros. Raises EngineError when a parameter is missing or of another shape.
        """
        return {
            name: {tensor.name: self._initial(tensor) for tensor in spec.tensors}
            for name, spec in self.specs().items()
            if isinstance(spec, StateSpec) and spec.is_learned
        }

    def _initial(self, tensor: TensorSpec) -> Tensor:
        if tensor.initial is None:
            return torch.zeros(tensor.shape, dtype=getattr(torch, tensor.dtype), device="cpu")
        parameter = dict(self.named_parameters(remove_duplicate=False)).get(tensor.initial)
        if parameter is None or parameter.shape != tensor.shape:
            found = "there is none" if parameter is None else f"its shape is {list(parameter.shape)}"
            raise EngineError(
                f"mixer {self.kind}: tensor {tensor.name!r} starts from parameter {tensor.initial!r}, but {found}; "
                f"it must have the tensor's shape {list(tensor.shape)}"
            )
        return parameter

    def forward(self, x: Tensor, batch: Batch, caches: LayerCaches) -> Tensor:
        """Mix rows. x: [T, D]. Writes the caches that `specs` named where `batch` says. Returns [T, D]."""
        raise NotImplementedError


class RecurrentMixer(Mixer):
    """A mixer whose memory has a fixed size. `specs` and `step` make a complete, servable layer."""

    #: Whether `step` is given a third argument, `positions`: int64 [S], 0 for the first token of a request.
    needs_positions: ClassVar[bool] = False

    # Any, so that a type checker accepts overrides with `positions` and without.
    def step(self, x: Tensor, states: States, *args: Any, **kwargs: Any) -> tuple[Tensor, States]:
        """One token of each sequence. x: [S, D]; states: see `States`. Returns y: [S, D] and the states afterwards."""
        raise NotImplementedError

    def forward(self, x: Tensor, batch: Batch, caches: LayerCaches) -> Tensor:
        """Run `step` over the rows, all sequences abreast. x: [T, D]. Returns [T, D]."""
        states = {name: _read(cache, batch) for name, cache in caches.items()}
        kept = {name: _room_for_writes(cache, batch) for name, cache in caches.items()}
        starts = torch.tensor(batch.cu_seqlens_host[:-1], device=x.device)
        lengths = torch.tensor(batch.cu_seqlens_host[1:], device=x.device) - starts
        y = torch.empty_like(x)
        for t in range(batch.max_rows):
            live = lengths > t
            rows = starts[live] + t
            before = {n: {k: v[live] for k, v in per.items()} for n, per in states.items()}
            positions = {"positions": batch.positions[rows]} if self.needs_positions else {}
            y[rows], stepped = self.step(x[rows], before, **positions)
            for n, per in stepped.items():
                for k, v in per.items():
                    # Rounded to the stored dtype at every token, so that a chunk's end changes nothing.
                    states[n][k][live] = v.to(states[n][k].dtype)
                    kept[n].keep(k, rows, states[n][k][live])
        for name, cache in caches.items():
            kept[name].write(cache)
        return y


@dataclass(frozen=True)
class _Writes:
    """States to be written once all reads are done: a slot may be one sequence's start and another's target."""

    place_of_row: Tensor  # int64 [T]: where the state after a row is kept, or -1
    places: Tensor  # int64 [W]: place of each write; a row written to two slots has one place
    slots: Tensor  # int64 [W]
    tensors: dict[str, Tensor]  # name -> [W, *shape]

    def keep(self, name: str, rows: Tensor, states: Tensor) -> None:
        """Keep what is to be written. rows: [S]; states: [S, *shape], after those rows."""
        place = self.place_of_row[rows]
        self.tensors[name][place[place >= 0]] = states[place >= 0]

    def write(self, cache: Cache) -> None:
        """Write to the slots, in place."""
        for name, states in self.tensors.items():
            cache.tensors[name][self.slots] = states[self.places]


def _room_for_writes(cache: Cache, batch: Batch) -> _Writes:
    table = batch.states[cache.group]
    num_writes = len(table.write_rows_host)
    place_of_row = table.write_rows.new_full((batch.num_tokens,), -1)
    place_of_row[table.write_rows] = torch.arange(num_writes, device=table.write_rows.device)
    tensors = {name: pool.new_empty(num_writes, *pool.shape[1:]) for name, pool in cache.tensors.items()}
    return _Writes(place_of_row, place_of_row[table.write_rows], table.write_slots, tensors)


def _read(cache: Cache, batch: Batch) -> dict[str, Tensor]:
    """Start states of every sequence: ``{tensor: [S, *shape]}``, zeros where there is no slot to start from."""
    table = batch.states[cache.group]
    fresh = table.start_slots == NO_SLOT
    out = {}
    for name, pool in cache.tensors.items():
        state = pool[table.start_slots.clamp(min=0)]
        state[fresh] = 0  # by assignment, not by multiplying: a poisoned slot may hold NaN
        out[name] = state
    return out
