"""Random histories of arrivals, steps, aborts and failing steps, and the faults that they must find.

Two thousand sequences of sixty operations in the default suite, a hundred thousand under `slow`. Each operation is followed by
the full check of the books; each pass checks what it reads; each answer is compared with what scheduling cannot change.
"""

import random

import pytest

from hybridserve.kv.cache import PrefixCache
from hybridserve.kv.coordinator import NO_SLOT, KVCacheCoordinator
from hybridserve.kv.pool import PagePool
from hybridserve.kv.prefix import Node
from tests.simulation import LAYOUTS
from tests.test_scheduler import VOCAB, build, expected, request

OPERATIONS = 60


def sequence(seed):
    """One history. Raises whatever a check or a pass finds."""
    rng = random.Random(seed)
    simulation, _ = build(
        rng.choice(sorted(LAYOUTS)),
        superpages=rng.randint(4, 14),
        seats=rng.randint(1, 4),
        budget=rng.choice([5, 17, 48]),
        max_len=72,
        policy=rng.choice(["cost", "lru"]),
    )
    scheduler, prompts = simulation.scheduler, {}
    for _ in range(OPERATIONS):
        operation = rng.random()
        if operation < 0.25 and scheduler.limits.max_model_len > 2:
            _arrive(rng, scheduler, prompts)
        elif operation < 0.90:
            simulation.step()
        elif operation < 0.96 and prompts:
            scheduler.abort([rng.choice(sorted(prompts))])
        else:
            plan = scheduler.plan()
            scheduler.take_failed()
            if plan is not None:
                scheduler.fail(plan, "test")
        scheduler.check()
    for name, tokens in simulation.outputs.items():
        assert tokens == expected(prompts[name], len(tokens)), f"the output of {name} depends on scheduling"


def _arrive(rng, scheduler, prompts):
    limit = scheduler.limits.max_model_len
    start = rng.choice(list(prompts.values()))[: rng.randint(0, limit)] if prompts and rng.random() < 0.6 else []
    tokens = [*start, *(rng.randrange(VOCAB) for _ in range(rng.randint(1, 24)))][: limit - 1]
    name = str(len(prompts))
    prompts[name] = tokens
    boundaries = (rng.randint(0, len(tokens)),) if rng.random() < 0.3 else ()
    scheduler.add(request(name, tokens, rng.randint(1, 12), boundaries=boundaries, salt=rng.choice(["", "", "s"])))


@pytest.mark.parametrize("part", range(8))
def test_random_histories(part):
    for seed in range(part * 250, (part + 1) * 250):
        sequence(seed)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_a_hundred_thousand_random_histories():
    for seed in range(10_000, 110_000):
        sequence(seed)


# -- the faults that must be found ----------------------------------------------------------------------------------------


def published_before_the_write(monkeypatch):
    address = KVCacheCoordinator.address

    def early(self, seats, starts, counts):
        memory = address(self, seats, starts, counts)
        for seat, end in zip(seats.tolist(), (starts + counts).tolist(), strict=True):
            self._publish_text(seat, end)
        return memory

    monkeypatch.setattr(KVCacheCoordinator, "address", early)


def slot_not_cleared(monkeypatch):
    address = KVCacheCoordinator.address

    def stale(self, seats, starts, counts):
        memory = address(self, seats, starts, counts)
        for index, slots in memory.start_slots.items():
            slots[slots == NO_SLOT] = self._own[index][seats][slots == NO_SLOT]
        return memory

    monkeypatch.setattr(KVCacheCoordinator, "address", stale)


def parent_evicted_before_child(monkeypatch):
    evictable = PrefixCache._is_evictable

    def any_node(self, entry):
        return (not entry.evicted and entry.parent is not None) if isinstance(entry, Node) else evictable(self, entry)

    offer = PrefixCache._offer

    def offer_all(self, node):
        offer(self, node)
        while node.parent is not None:
            self._queue.push(node, 0.0)
            node = node.parent

    monkeypatch.setattr(PrefixCache, "_is_evictable", any_node)
    monkeypatch.setattr(PrefixCache, "_offer", offer_all)


def checkpoint_one_token_off(monkeypatch):
    add = KVCacheCoordinator._add_checkpoint

    def off(self, seat, position, slots):
        return add(self, seat, max(1, position - 1), slots)

    monkeypatch.setattr(KVCacheCoordinator, "_add_checkpoint", off)


def block_freed_twice(monkeypatch):
    release = PagePool.release

    def twice(self, page):
        freed = release(self, page)
        if freed and self.group.is_paged and not self._holds[page] and page // self._per_superpage in self._free:
            self._put_back(page)
        return freed

    monkeypatch.setattr(PagePool, "release", twice)


@pytest.mark.parametrize(
    "fault",
    [published_before_the_write, slot_not_cleared, parent_evicted_before_child, checkpoint_one_token_off, block_freed_twice],
)
def test_a_seeded_fault_is_found(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError)):
        _sequences(300)


def _sequences(count):
    for seed in range(count):
        sequence(seed)
