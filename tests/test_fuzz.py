"""Random histories of arrivals, steps, aborts, failing steps and failing rows, and the faults that they must find.

Two thousand sequences of sixty operations in the default suite, a hundred thousand under `slow`, in parts that can be run one by
one. Each operation is followed by the full check of the books; each pass checks what it reads; each answer is compared with what
scheduling cannot change; at the end everything has ended and all memory can be had back.
"""

import random

import pytest

from hybridserve.kv.cache import PrefixCache
from hybridserve.kv.coordinator import NO_SLOT, KVCacheCoordinator
from hybridserve.kv.pool import PagePool
from hybridserve.request import CacheHints, EngineRequest, SamplingParams
from tests.simulation import LAYOUTS
from tests.test_scheduler import VOCAB, build, expected

OPERATIONS = 60
SALTS = ("", "", "s")


class History:
    """One engine without a model, and what has been asked of it."""

    def __init__(self, seed):
        self.rng = rng = random.Random(seed)
        self.simulation, self.coordinator = build(
            rng.choice(sorted(LAYOUTS)),
            superpages=rng.randint(4, 14),
            seats=rng.randint(1, 4),
            budget=rng.choice([5, 17, 48]),
            max_len=72,
            policy=rng.choice(["cost", "lru"]),
        )
        self.scheduler = self.simulation.scheduler
        self.prompts = {}
        self.has_room = self.scheduler.limits.max_model_len > 2

    def advance(self):
        """One operation."""
        operation = self.rng.random()
        if operation < 0.25:
            self._arrive()
        elif operation < 0.88:
            self.simulation.step()
        elif operation < 0.93:
            self._abort()
        elif operation < 0.96:
            self._fail_a_step()
        elif operation < 0.98:
            self._fail_a_row()
        elif operation < 0.99:
            self._explain()
        else:
            self.coordinator.clear()

    def _arrive(self):
        if not self.has_room:
            return
        rng, name = self.rng, str(len(self.prompts))
        tokens = self._prompt()
        self.prompts[name] = tokens
        hints = CacheHints(
            salt=rng.choice(SALTS),
            boundaries=(rng.randint(0, len(tokens)),) if rng.random() < 0.3 else (),
            pin=rng.random() < 0.1,
            no_store=rng.random() < 0.1,
        )
        sampling = SamplingParams(
            max_tokens=rng.randint(1, 12), ignore_eos=True, prompt_logprobs=1 if rng.random() < 0.05 else None
        )
        self.scheduler.add(EngineRequest(request_id=name, prompt_token_ids=tokens, sampling=sampling, cache=hints))

    def _prompt(self):
        """Often the beginning of an earlier one, with something of its own behind it."""
        rng, limit = self.rng, self.scheduler.limits.max_model_len
        known = list(self.prompts.values())
        start = rng.choice(known)[: rng.randint(0, limit)] if known and rng.random() < 0.6 else []
        return [*start, *(rng.randrange(VOCAB) for _ in range(rng.randint(1, 24)))][: limit - 1]

    def _abort(self):
        if self.prompts:
            self.scheduler.abort([self.rng.choice(sorted(self.prompts))])

    def _fail_a_step(self):
        plan = self.scheduler.plan()
        self.scheduler.take_failed()
        if plan is not None:
            self.scheduler.fail(plan, "test")

    def _fail_a_row(self):
        """The logits of one sequence that samples are bad."""
        self.simulation.step(failing=self.rng.randrange(self.scheduler.limits.max_num_seqs))

    def _explain(self):
        tokens, salt = self._prompt(), self.rng.choice(SALTS)
        told = self.scheduler.explain(tokens, CacheHints(salt=salt))
        assert sum(told.tokens.values()) == len(tokens)
        assert told.tokens.get("hit", 0) == told.num_hit <= told.num_text

    def end(self):
        """Let everything end, and take all memory back."""
        for _ in range(2_000):
            if not self.scheduler.has_work:
                break
            self.simulation.step()
        assert not self.scheduler.has_work, "requests never end"
        self.scheduler.check()
        for name, tokens in self.simulation.outputs.items():
            assert tokens == expected(self.prompts[name], len(tokens)), f"the output of {name} depends on scheduling"
        counters = self.scheduler.counters
        assert sum(counters.prompt_tokens_by_reason.values()) == counters.num_prompt_tokens
        assert counters.prompt_tokens_by_reason["hit"] == counters.num_cached_tokens
        self.coordinator.clear()
        usage = self.coordinator.usage()
        assert usage["superpages_free"] == usage["superpages_total"], "memory was not given back"


def sequence(seed):
    """One history. Raises whatever a check or a pass finds."""
    history = History(seed)
    for _ in range(OPERATIONS):
        history.advance()
        history.scheduler.check()
    history.end()


@pytest.mark.parametrize("part", range(8))
def test_random_histories(part):
    for seed in range(part * 250, (part + 1) * 250):
        sequence(seed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(100))
def test_a_hundred_thousand_random_histories(part):
    for seed in range(10_000 + part * 1_000, 10_000 + (part + 1) * 1_000):
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
        return bool(getattr(entry, "children", ())) or evictable(self, entry)

    offer = PrefixCache._offer

    def offer_all(self, run):
        offer(self, run)
        while run.parent is not None:
            self._queue.push(run, 0.0)
            run = run.parent

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
