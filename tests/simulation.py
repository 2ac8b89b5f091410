"""An executor without a model: pages and slots hold what a model would have had to know, so that a wrong address shows at once.

A paged entry holds (position, token); a state holds the whole prefix that it summarises. Every pass checks what it reads.
"""

from collections.abc import Callable

import numpy as np

from hybridserve.engine.scheduler import Ended, Plan, Scheduler
from hybridserve.engine.seats import Ints
from hybridserve.kv.coordinator import NO_SLOT, KVCacheCoordinator
from hybridserve.kv.spec import PagedSpec, Spec, StateSpec, TensorSpec

FULL = PagedSpec((TensorSpec("k", (2, 16), "float32"),))
WINDOW = PagedSpec((TensorSpec("k", (1, 16), "float32"),), window=20)
STATE = StateSpec((TensorSpec("s", (16, 40), "float32"),))
SMALL_STATE = StateSpec((TensorSpec("c", (3, 8), "float32"),))

#: Cache layouts that differ in kind: by name, the specs of each layer.
LAYOUTS: dict[str, list[dict[str, Spec]]] = {
    "attention": [{"kv": FULL}, {"kv": FULL}],
    "attention+state": [{"kv": FULL}, {"state": STATE}, {"state": STATE}],
    "attention+window": [{"kv": FULL}, {"kv": WINDOW}],
    "attention+window+conv": [{"kv": FULL}, {"kv": WINDOW}, {"state": SMALL_STATE}],
    "two states": [{"kv": FULL, "state": STATE}, {"state": SMALL_STATE}],
    "states alone": [{"state": STATE}],
}


class Simulation:
    """Runs a scheduler's plans. `choose(prefix)` gives the token that follows a prefix."""

    def __init__(self, scheduler: Scheduler, coordinator: KVCacheCoordinator, choose: Callable[[tuple[int, ...]], int]) -> None:
        self.scheduler = scheduler
        self.plan = coordinator.plan
        self.choose = choose
        self.entries: dict[tuple[int, int, int], tuple[int, int]] = {}  # (group, block, offset) -> (position, token)
        self.states: dict[tuple[int, int], tuple[int, ...]] = {}  # (group, slot) -> prefix
        self.outputs: dict[str, list[int]] = {}
        self.ended: dict[str, Ended] = {}
        self.num_computed = 0
        self.num_failed_steps = 0
        self.fails: Callable[[list[str]], bool] = lambda names: False  # whether a pass over these requests raises

    def step(self, failing: int | None = None) -> Plan | None:
        """Plan, run and commit one step. The logits of the `failing`-th sequence that samples, if there is one, are bad."""
        plan = self.scheduler.plan()
        for ended in self.scheduler.take_failed():
            self.ended[ended.running.request.request_id] = ended
        if plan is None:
            return None
        for copy in plan.memory.copies:
            for offset in range(self.plan.block_size):
                source = self.entries.get((copy.group, copy.source, offset))
                if source is not None:
                    self.entries[copy.group, copy.target, offset] = source
        names = [self.scheduler.seats.running[seat].request.request_id for seat in plan.seats]
        if self.fails(names):
            self._fail(plan)
            return plan
        sampled = self._run(plan)
        self.num_computed += plan.num_tokens
        failed = np.arange(len(sampled)) == failing
        for at in np.flatnonzero(failed):  # its token is none
            self._forget_last(plan, int(at))
        for ended in self.scheduler.commit(plan, sampled, failed):
            self.ended[ended.running.request.request_id] = ended
        return plan

    def _fail(self, plan: Plan) -> None:
        """A pass that raises at its very end: whatever it was to write holds rubbish."""
        self.num_failed_steps += 1
        for group in self.plan.states:
            self.states.update({(group.index, int(slot)): (-1,) for slot in plan.memory.write_slots[group.index]})
        for at in range(len(plan.seats)):
            for position in range(int(plan.starts[at]), int(plan.starts[at] + plan.counts[at])):
                for group in self.plan.paged:
                    block = int(plan.memory.block_tables[group.index][at, position // group.block_size])
                    self.entries[group.index, block, position % group.block_size] = (-1, -1)
        for ended in self.scheduler.fail(plan, "test"):
            self.ended[ended.running.request.request_id] = ended

    def _forget_last(self, plan: Plan, at: int) -> None:
        running = self.scheduler.seats.running[plan.seats[plan.samples][at]]
        self.outputs[running.request.request_id].pop()

    def _run(self, plan: Plan) -> Ints:
        self._write_entries(plan)
        before = {
            group.index: [self.states.get((group.index, int(slot)), ()) for slot in plan.memory.start_slots[group.index]]
            for group in self.plan.states
        }
        sampled, rows = [], np.cumsum(plan.counts)
        for at, seat in enumerate(plan.seats):
            start, end = int(plan.starts[at]), int(plan.starts[at] + plan.counts[at])
            tokens = tuple(self.scheduler.seats.tokens[seat, :end].tolist())
            self._check_text(plan, at, start, end, tokens)
            for group in self.plan.states:
                slot = int(plan.memory.start_slots[group.index][at])
                assert (slot == NO_SLOT) == (start == 0), f"seat {seat} starts at {start} from slot {slot}"
                assert slot == NO_SLOT or before[group.index][at] == tokens[:start], f"slot {slot} holds another prefix"
                first_row = int(rows[at] - plan.counts[at])
                for row, target in zip(plan.memory.write_rows, plan.memory.write_slots[group.index], strict=True):
                    if first_row <= row < rows[at]:
                        self.states[group.index, int(target)] = tokens[: start + int(row) - first_row + 1]
            if plan.samples[at]:
                token = self.choose(tokens)
                running = self.scheduler.seats.running[seat]
                self.outputs.setdefault(running.request.request_id, []).append(token)
                sampled.append(token)
        assert list(plan.memory.write_rows) == sorted(set(plan.memory.write_rows.tolist())), "rows are written twice"
        return np.array(sampled, np.int64)

    def _write_entries(self, plan: Plan) -> None:
        for at, seat in enumerate(plan.seats):
            for position in range(int(plan.starts[at]), int(plan.starts[at] + plan.counts[at])):
                token = int(self.scheduler.seats.tokens[seat, position])
                for group in self.plan.paged:
                    block = int(plan.memory.block_tables[group.index][at, position // group.block_size])
                    self.entries[group.index, block, position % group.block_size] = (position, token)

    def _check_text(self, plan: Plan, at: int, start: int, end: int, tokens: tuple[int, ...]) -> None:
        for group in self.plan.paged:
            first = 0 if group.window is None else max(0, start - group.window + 1)
            for position in range(first, end):
                block = int(plan.memory.block_tables[group.index][at, position // group.block_size])
                found = self.entries.get((group.index, block, position % group.block_size))
                assert found == (position, tokens[position]), f"group {group.index} block {block} has {found} at {position}"
