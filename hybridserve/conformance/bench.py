"""One mixer with caches of its own, run pass by pass.

Owns the caches, which are filled with NaN and strided like views of an arena, so that reading what was never written, or writing
what was not named, shows. Must not know what is checked. Called by the checks and by tests.

A sequence is a tensor of rows ``[T, D]``.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from hybridserve.batch import NO_SLOT, Batch, Cache, LayerCaches
from hybridserve.conformance.batches import Rows, block_size_for, blocks_for, build_batch
from hybridserve.conformance.tolerance import require
from hybridserve.kv.spec import Spec, StateSpec, TensorSpec
from hybridserve.mixers.base import Mixer

NUM_SLOTS = 24
NUM_BLOCKS = 96
#: Elements between the pages of a cache, which belong to other layers in an arena.
GAP = 8

#: Signature of `Mixer.forward`, unbound: checks run with another implementation of it where one is to be compared.
Forward: TypeAlias = Callable[[Mixer, Tensor, Batch, LayerCaches], Tensor]


def allocate(
    specs: Mapping[str, Spec], num_slots: int = NUM_SLOTS, num_blocks: int = NUM_BLOCKS, block_size: int | None = None
) -> dict[str, Cache]:
    """Caches as storage lays them out: one entry of every tensor after the other, so that the first dimension is strided.

    block_size: None for the smallest that suits the specs.
    """
    block_size = block_size or block_size_for(specs.values())
    return {
        name: Cache(
            group,
            {
                tensor.name: _strided_pool(tensor, num_slots, ())
                if isinstance(spec, StateSpec)
                else _strided_pool(tensor, num_blocks, (block_size // spec.tokens_per_entry,))
                for tensor in spec.tensors
            },
        )
        for group, (name, spec) in enumerate(specs.items())
    }


def _strided_pool(tensor: TensorSpec, num_pages: int, entries: tuple[int, ...]) -> Tensor:
    """[num_pages, *entries, *shape] filled with poison."""
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    shape = (*entries, *tensor.shape)
    page = torch.full((num_pages, math.prod(shape) + GAP), poison(dtype), dtype=dtype)
    return torch.unflatten(page[:, : math.prod(shape)], 1, shape)


def poison(dtype: torch.dtype) -> float | int:
    """What no sequence may ever read: NaN, or the largest number where there is none."""
    return math.nan if dtype.is_floating_point else torch.iinfo(dtype).max


@dataclass
class Bench:
    """One mixer with caches of its own. `forward` replaces the mixer's, to compare two implementations.

    `block_size` 0 stands for the smallest that suits the specs. Where the initial state is learned, there is one slot more,
    which holds it.
    """

    mixer: Mixer
    forward: Forward | None = None
    block_size: int = 0
    num_slots: int = NUM_SLOTS
    num_blocks: int = NUM_BLOCKS
    caches: dict[str, Cache] = field(init=False)
    constant_slot: int = field(init=False)

    def __post_init__(self) -> None:
        specs = self.mixer.specs()
        self.block_size = self.block_size or block_size_for(specs.values())
        learned = self.mixer.initial_states()
        self.constant_slot = self.num_slots if learned else NO_SLOT
        self.caches = allocate(specs, self.num_slots + bool(learned), self.num_blocks, self.block_size)
        self.fill_constant_slot(self.mixer)

    def use(self, caches: dict[str, Cache]) -> None:
        """Run in other caches from now on. Slot 0 is the constant one there, if there is any."""
        self.caches = caches
        self.constant_slot = 0 if self.mixer.initial_states() else NO_SLOT
        self.fill_constant_slot(self.mixer)

    def fill_constant_slot(self, mixer: Mixer) -> None:
        """Let fresh sequences start from what this mixer has learned, as the engine does when weights are loaded."""
        with torch.no_grad():
            for name, states in mixer.initial_states().items():
                for tensor, state in states.items():
                    self.caches[name].tensors[tensor][self.constant_slot] = state

    def batch(self, sequences: Sequence[Rows], input_ids: Tensor | None = None) -> Batch:
        """The batch of one pass. input_ids: [T], or None for zeros."""
        return build_batch(sequences, self.mixer.specs().values(), self.block_size, input_ids, self.constant_slot)

    def run(self, x: Tensor, sequences: Sequence[Rows], input_ids: Tensor | None = None) -> Tensor:
        """One pass. x: [T, D]; input_ids: [T], or None for zeros. Returns [T, D]."""
        batch = self.batch(sequences, input_ids)
        with torch.no_grad():
            if self.forward is not None:
                return self.forward(self.mixer, x, batch, self.caches)
            return self.mixer(x, batch, self.caches)

    def run_chunks(
        self,
        x: Tensor,
        lengths: Iterable[int],
        slot: int = 0,
        blocks: tuple[int, ...] = (),
        input_ids: Tensor | None = None,
    ) -> Tensor:
        """One sequence alone, chunk after chunk, its state in `slot`. x: [T, D]; input_ids: [T]. Returns [T, D]."""
        blocks = blocks or blocks_for(len(x))
        out, done = [], 0
        for length in lengths:
            start = slot if done else NO_SLOT
            rows, part = Rows(length, done, start, ((length - 1, slot),), blocks), slice(done, done + length)
            out.append(self.run(x[part], [rows], None if input_ids is None else input_ids[part]))
            done += length
        require(done == len(x), f"chunks of {done} rows in all were given for {len(x)} rows")
        return torch.cat(out)

    def state(self, slot: int) -> dict[str, Tensor]:
        """Copies of what a slot holds, in fp32, by spec and tensor name."""
        specs = self.mixer.specs()
        return {
            f"{name}.{tensor}": pool[slot].to(torch.float32, copy=True)
            for name, cache in self.caches.items()
            if isinstance(specs[name], StateSpec)
            for tensor, pool in cache.tensors.items()
        }

    def pools(self) -> dict[str, Tensor]:
        """All caches, by spec and tensor name."""
        return {f"{name}.{tensor}": pool for name, cache in self.caches.items() for tensor, pool in cache.tensors.items()}

    def snapshot(self) -> dict[str, Tensor]:
        """Copies of all caches, whole."""
        return {name: pool.clone() for name, pool in self.pools().items()}

    def is_state(self, pool: str) -> bool:
        """Whether a name of `pools` is that of a state; else its pages are blocks."""
        return isinstance(self.mixer.specs()[pool.partition(".")[0]], StateSpec)


def rows_of(mixer: Mixer, num_rows: int, seed: int = 1) -> Tensor:
    """Inputs of a sequence: [num_rows, D], from a generator of their own."""
    x = torch.randn(num_rows, mixer.config.hidden_size, generator=torch.Generator().manual_seed(seed))
    return x.to(mixer.dtype)


def run_whole(
    mixer: Mixer, x: Tensor, forward: Forward | None = None, input_ids: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Output [T, D] of one sequence in one pass, and its state after the last row."""
    bench = Bench(mixer, forward)
    y = bench.run_chunks(x, [len(x)], input_ids=input_ids)
    return y, bench.state(0)


def build_again(mixer: Mixer, dtype: torch.dtype | None = None) -> Mixer:
    """Another mixer of the same kind and config, its parameters unfilled."""
    return type(mixer)(mixer.config, mixer.ops, dtype or mixer.dtype)


def is_same(actual: Tensor, expected: Tensor) -> bool:
    """Equality bit by bit, NaN included. Both are of one dtype."""
    return torch.equal(actual.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))
