"""Runs a whole model over packed batches with caches of its own: what the engine does, in its barest form.

Owns where each sequence's blocks and slots are. Must not know architectures. Used by the tests of models.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hybridserve.batch import NO_SLOT
from hybridserve.models import CausalLM
from tests.conformance import BLOCK_SIZE, Rows, allocate, build_batch

MAX_TOKENS = 128


@dataclass
class _Sequence:
    length: int
    slot: int
    blocks: tuple[int, ...]


class Driver:
    """A model and the sequences that it has seen, by name."""

    def __init__(self, model: CausalLM, num_sequences: int = 4) -> None:
        self.model = model
        named = [{f"{i}/{name}": spec for name, spec in specs.items()} for i, specs in enumerate(model.cache_specs())]
        self._specs = {full: spec for layer in named for full, spec in layer.items()}
        per_sequence = MAX_TOKENS // BLOCK_SIZE
        caches = allocate(self._specs, num_slots=num_sequences, num_blocks=num_sequences * per_sequence)
        self._caches = [{full.partition("/")[2]: caches[full] for full in layer} for layer in named]
        # Blocks of a sequence are not in order of memory, slots not in order of arrival.
        self._free = [
            _Sequence(0, slot, tuple(reversed(range(slot * per_sequence, (slot + 1) * per_sequence))))
            for slot in range(num_sequences)
        ]
        self._sequences: dict[str, _Sequence] = {}

    def step(self, chunks: Sequence[tuple[str, Sequence[int]]]) -> list[Tensor]:
        """One pass over (sequence, its next token ids). Returns the logits of all its rows, for each: fp32 [rows, vocab]."""
        rows = [self._rows(name, len(ids)) for name, ids in chunks]
        ids = torch.tensor([one for _, chunk in chunks for one in chunk])
        batch = replace(build_batch(rows, self._specs.values()), input_ids=ids)
        with torch.inference_mode():
            logits = self.model.logits(self.model(batch, self._caches))
        return list(logits.split([len(chunk) for _, chunk in chunks]))

    def _rows(self, name: str, length: int) -> Rows:
        sequence = self._sequences.get(name)
        if sequence is None:
            sequence = self._sequences[name] = self._free.pop()
        context = sequence.length
        sequence.length += length
        start = sequence.slot if context else NO_SLOT
        return Rows(length, context, start, ((length - 1, sequence.slot),), sequence.blocks)

    def run_chunks(self, name: str, ids: Sequence[int], size: int) -> Tensor:
        """One sequence alone, `size` tokens a pass. Returns the logits of all rows: [len(ids), vocab]."""
        return torch.cat([self.step([(name, ids[at : at + size])])[0] for at in range(0, len(ids), size)])

    def generate(self, name: str, ids: Sequence[int], count: int) -> list[int]:
        """Greedy continuation of a new sequence."""
        out = [int(self.step([(name, ids)])[0][-1].argmax())]
        while len(out) < count:
            out.append(int(self.step([(name, out[-1:])])[0][-1].argmax()))
        return out
