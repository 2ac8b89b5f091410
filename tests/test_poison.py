"""Bad values never survive: a pass of one sequence goes wrong at random, and what it wrote spreads to whoever reads it.

On integers: entries and states that a wrong pass wrote, or that were computed from such, are poisoned; a sequence that has read
one and chooses a token has bad logits. Once all have ended, nothing that can be found is poisoned.
"""

import random

import numpy as np
import pytest

from hybridserve.kv.coordinator import NO_SLOT
from hybridserve.kv.entries import NO_BLOCK
from tests.simulation import LAYOUTS, Simulation
from tests.test_scheduler import VOCAB, build, request

OPERATIONS = 60


class Poisoned(Simulation):
    """A simulation whose pages remember whether they are poisoned."""

    def __init__(self, simulation):
        self.__dict__.update(simulation.__dict__)
        self.bad_entries = set()
        self.bad_states = set()
        self.num_failed = 0

    def advance(self, glitch=None):
        """One step, in which the pass of the `glitch`-th sequence goes wrong."""
        plan = self.scheduler.plan()
        self.scheduler.take_failed()
        if plan is None:
            return
        for copy in plan.memory.copies:
            for offset in range(self.plan.block_size):
                self._mark(
                    self.bad_entries, (copy.group, copy.target, offset), (copy.group, copy.source, offset) in self.bad_entries
                )
        bad = np.array([at == glitch or self._reads_bad(plan, at) for at in range(len(plan.seats))])
        for at in range(len(plan.seats)):
            self._write(plan, at, bool(bad[at]))
        failed = bad[plan.samples]
        self.num_failed += int(failed.sum())
        self.scheduler.commit(plan, np.zeros(len(failed), np.int64), failed)

    def _reads_bad(self, plan, at):
        start = int(plan.starts[at])
        for group in self.plan.states:
            slot = int(plan.memory.start_slots[group.index][at])
            if slot != NO_SLOT and (group.index, slot) in self.bad_states:
                return True
        for group in self.plan.paged:
            first = 0 if group.window is None else max(0, start - group.window + 1)
            if any(self._place(plan, group, at, position) in self.bad_entries for position in range(first, start)):
                return True
        return False

    def _write(self, plan, at, is_bad):
        for group in self.plan.paged:
            for position in range(int(plan.starts[at]), int(plan.starts[at] + plan.counts[at])):
                self._mark(self.bad_entries, self._place(plan, group, at, position), is_bad)
        end = int(plan.counts[: at + 1].sum())
        for group in self.plan.states:
            for row, slot in zip(plan.memory.write_rows, plan.memory.write_slots[group.index], strict=True):
                if end - int(plan.counts[at]) <= row < end:
                    self._mark(self.bad_states, (group.index, int(slot)), is_bad)

    @staticmethod
    def _place(plan, group, at, position):
        block = int(plan.memory.block_tables[group.index][at, position // group.block_size])
        return group.index, block, position % group.block_size

    @staticmethod
    def _mark(bad, key, is_bad):
        if is_bad:
            bad.add(key)
        else:
            bad.discard(key)

    def assert_nothing_bad_is_found(self, cache):
        size = self.plan.block_size
        for run in cache.runs():
            for group, blocks in zip(self.plan.paged, run.blocks, strict=True):
                found = [b for b in blocks if b != NO_BLOCK for at in range(size) if (group.index, b, at) in self.bad_entries]
                assert not found, f"text of group {group.index} is poisoned in blocks {sorted(set(found))}"
            for point in run.points.values():
                for checkpoint in point.checkpoints.values():
                    for group, slot in zip(self.plan.states, checkpoint.slots, strict=True):
                        assert (group.index, slot) not in self.bad_states, f"a state at {checkpoint.position} is poisoned"


def history(layout, seed):
    rng = random.Random(f"{layout} {seed}")
    simulation, coordinator = build(layout, superpages=rng.choice([12, 30, 200]), seats=4, budget=rng.choice([9, 32]), max_len=96)
    poisoned = Poisoned(simulation)
    scheduler, prompts = poisoned.scheduler, []
    for number in range(OPERATIONS):
        what = rng.random()
        if what < 0.3 and scheduler.limits.max_model_len > 8:
            start = rng.choice(prompts)[: rng.randint(0, 90)] if prompts and rng.random() < 0.8 else []
            prompt = [*start, *(rng.randrange(VOCAB) for _ in range(rng.randint(1, 40)))][: scheduler.limits.max_model_len - 4]
            prompts.append(prompt)
            scheduler.add(request(str(number), prompt, rng.randint(1, 4)))
        else:
            poisoned.advance(glitch=rng.randrange(4) if rng.random() < 0.06 else None)
        scheduler.check()
    while scheduler.has_work:
        poisoned.advance()
    scheduler.check()
    poisoned.assert_nothing_bad_is_found(coordinator._cache)
    return poisoned.num_failed


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bad_values_do_not_survive_those_who_read_them(layout):
    assert sum(history(layout, seed) for seed in range(60)) > 20


@pytest.mark.parametrize("layout", ["attention", "attention+window", "attention+window+conv"])
def test_bad_values_of_a_request_that_was_preempted_do_not_survive(layout):
    """It comes again, finds what it had left, and goes on from there: all of that is its own."""
    num_seen = 0
    for superpages in range(5, 40):
        simulation, coordinator = build(layout, superpages=superpages, seats=2, budget=5, max_len=96)
        poisoned, rng = Poisoned(simulation), random.Random(superpages)
        scheduler = poisoned.scheduler
        if scheduler.limits.max_model_len < 90:
            continue
        for name, prompt, count in (("old", 6, 70), ("young", 70, 3)):
            scheduler.add(request(name, [rng.randrange(VOCAB) for _ in range(prompt)], count))
        poisoned.advance()
        for _ in range(5):
            poisoned.advance(glitch=1)
        while scheduler.has_work:
            poisoned.advance()
            scheduler.check()
        poisoned.assert_nothing_bad_is_found(coordinator._cache)
        num_seen += scheduler.counters.num_preemptions > 0
    assert num_seen > 0
