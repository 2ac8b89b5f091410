"""Runs a plan on the model: builds the `Batch`, executes the pass, takes the logits that are wanted.

Owns the cache storage and the device. Turns the scheduler's integers into tensors; decides nothing about requests or memory.
Called by `core.py` once a step.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hybridserve.batch import Batch, PagedTable, StateTable
from hybridserve.engine.sampler import PROMPT_ROWS, describe
from hybridserve.engine.scheduler import Plan
from hybridserve.engine.seats import Ints, Seats
from hybridserve.errors import EngineError
from hybridserve.kv.arena import CachePlan
from hybridserve.kv.coordinator import StepMemory
from hybridserve.kv.storage import Storage
from hybridserve.models import CausalLM
from hybridserve.request import TokenLogprob


@dataclass(frozen=True)
class PassResult:
    """What a pass gives: logits of the sequences that sample, and the hidden rows for whoever wants more."""

    logits: Tensor  # fp32 [R, vocab], R = sequences of the plan that sample, in order
    hidden: Tensor  # [T, D]


class Runner:
    """One model on one device with its caches."""

    def __init__(self, model: CausalLM, plan: CachePlan, device: torch.device) -> None:
        self._model = model
        self._plan = plan
        self._device = device
        self._storage = Storage(plan, device)
        self._caches = self._storage.layer_caches(len(model.cache_specs()))

    @property
    def cache_nbytes(self) -> int:
        return self._storage.nbytes

    @torch.inference_mode()
    def fill_constant_slots(self, slots: Mapping[int, int]) -> None:
        """Write the learned initial states of all layers. slots: by state group. Raises EngineError where a layer has none."""
        for layer, (specs, states) in enumerate(zip(self._model.cache_specs(), self._model.initial_states(), strict=True)):
            for name in specs:
                cache = self._caches[layer][name]
                if cache.group not in slots:
                    continue
                if name not in states:
                    raise EngineError(f"layer {layer}: initial_states() leaves out {name!r}, whose spec says that it is learned")
                for tensor, state in states[name].items():
                    cache.tensors[tensor][slots[cache.group]] = state

    def spoil_caches(self) -> None:
        """Flip a bit in every byte of cache memory, a sign or an exponent among them (a hook for tests)."""
        self._storage.flip_bits()

    @torch.inference_mode()
    def run(self, plan: Plan, seats: Seats) -> PassResult:
        """Execute one pass. Copies come first: a block that is about to be written may be the copy of a shared one."""
        if plan.memory.copies:
            self._storage.copy(plan.memory.copies)
        batch = self.build(plan, seats)
        hidden = self._model(batch, self._caches)
        if hidden.shape[0] != plan.num_tokens:
            raise EngineError(f"a pass over {plan.num_tokens} rows returned {hidden.shape[0]}")
        last_rows = batch.cu_seqlens[1:][torch.from_numpy(plan.samples).to(self._device)].long() - 1
        return PassResult(self._model.logits(hidden[last_rows]), hidden)

    @torch.inference_mode()
    def prompt_logprobs(self, hidden: Tensor, tokens: Ints, num_top: int) -> list[TokenLogprob]:
        """Log-probability of the token that follows each row. hidden: [R, D]; tokens: [R], the ones that follow."""
        found: list[TokenLogprob] = []
        for start in range(0, len(tokens), PROMPT_ROWS):
            logits = self._model.logits(hidden[start : start + PROMPT_ROWS])
            part = tokens[start : start + PROMPT_ROWS]
            found += describe(torch.log_softmax(logits, dim=-1), part, np.full(len(part), num_top))
        return found

    def build(self, plan: Plan, seats: Seats) -> Batch:
        """The `Batch` of a plan: rows of all sequences packed one after the other."""
        ends = plan.starts + plan.counts
        cu_seqlens = np.concatenate([[0], np.cumsum(plan.counts)])
        sequence = np.repeat(np.arange(len(plan.seats)), plan.counts)
        positions = np.arange(cu_seqlens[-1]) - np.repeat(cu_seqlens[:-1], plan.counts) + plan.starts[sequence]
        return Batch(
            input_ids=self._tensor(seats.tokens[plan.seats[sequence], positions].astype(np.int64)),
            positions=self._tensor(positions),
            cu_seqlens=self._tensor(cu_seqlens.astype(np.int32)),
            kv_lens=self._tensor(ends.astype(np.int32)),
            cu_seqlens_host=tuple(cu_seqlens.tolist()),
            kv_lens_host=tuple(ends.tolist()),
            paged=dict(self._paged_tables(plan.memory, sequence, positions)),
            states=dict(self._state_tables(plan.memory)),
        )

    def _paged_tables(self, memory: StepMemory, sequence: Ints, positions: Ints) -> Iterator[tuple[int, PagedTable]]:
        for group in self._plan.paged:
            tables, size = memory.block_tables[group.index], group.block_size
            index = tables[sequence, positions // size].astype(np.int64) * size + positions % size
            yield group.index, PagedTable(self._tensor(tables), self._tensor(index), size)

    def _state_tables(self, memory: StepMemory) -> Iterator[tuple[int, StateTable]]:
        rows, rows_host = self._tensor(memory.write_rows), tuple(memory.write_rows.tolist())
        for group in self._plan.states:
            starts = memory.start_slots[group.index]
            writes = self._tensor(memory.write_slots[group.index])
            yield group.index, StateTable(self._tensor(starts), rows, writes, rows_host, tuple(starts.tolist()))

    def _tensor(self, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)
