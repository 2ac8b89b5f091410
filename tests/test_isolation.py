"""Requests with different salts cannot learn of each other: whatever the others sent, what one sees is the same.

Two histories differ in one thing: whether another salt's requests have the attacker's text, or other text of the same lengths.
All that the attacker can observe must be equal: explanations, hits, and the step in which each token comes.
"""

import random

import pytest

from hybridserve.engine.seats import MIN_SHARED, Running
from hybridserve.kv.prefix import PrefixIndex
from hybridserve.request import CacheHints
from tests.simulation import LAYOUTS
from tests.test_scheduler import build, request, run

#: Ids that no generated token has, so that two texts share nothing that is not meant to be shared.
FIRST, LAST = 10, 5000


def text(length, seed):
    rng = random.Random(seed)
    return [rng.randrange(FIRST, LAST) for _ in range(length)]


class Observed:
    """One history, and what the requests with the attacker's salt see of it."""

    def __init__(self, layout, secrets, *, superpages, seed):
        self.simulation, _ = build(layout, superpages=superpages, seats=3, budget=32, max_len=160, vocab=LAST)
        self.scheduler = self.simulation.scheduler
        self.rng = random.Random(seed)
        self.secrets = secrets
        self.longest = self.scheduler.limits.max_model_len - 4
        self.seen = []
        self.count = 0

    def send(self, who, prompt):
        self.count += 1
        self.scheduler.add(request(f"{who}{self.count}", prompt[: self.longest], 3, salt=who))

    def ask(self, guess):
        told = self.scheduler.explain(guess, CacheHints(salt="attacker"))
        self.seen.append((told.num_hit, told.num_text, told.tokens, told.group_tokens, told.limiting_group, told.parted_at))

    def step(self):
        plan = self.simulation.step()
        outputs, ended = self.simulation.outputs, self.simulation.ended
        mine = sorted((name, len(tokens)) for name, tokens in outputs.items() if name.startswith("attacker"))
        # The time that a step takes grows with its tokens, so that their number is observable too.
        self.seen.append((plan and plan.num_tokens, mine, sorted(name for name in ended if name.startswith("attacker"))))

    def play(self, guesses):
        """Victim and attacker by turns, at random, from the same random numbers in every history."""
        for _ in range(60):
            what, which, length = self.rng.random(), self.rng.randrange(len(guesses)), self.rng.randint(20, 150)
            mine = [*guesses[which][:length], *text(self.rng.randint(1, 20), self.rng.random())]
            if what < 0.12:
                self.send("victim", self.secrets[which][:length])
            elif what < 0.24:
                self.send("attacker", mine)
            elif what < 0.34:
                self.ask(mine)
            else:
                self.step()
        for _ in range(3000):
            if self.scheduler.has_work:
                self.step()
        self.scheduler.check()
        ended = [one.running for name, one in sorted(self.simulation.ended.items()) if name.startswith("attacker")]
        counters = self.scheduler.counters
        return [*self.seen, *((one.num_cached, one.explanation) for one in ended), counters.num_steps, counters.num_preemptions]


def compare(layout, superpages, seed):
    """Whether the attacker sees a difference between a victim that has its text and one that has another."""
    guesses, others = ([text(150, f"{kind} {seed} {number}") for number in range(2)] for kind in ("guess", "other"))
    same, different = (Observed(layout, s, superpages=superpages, seed=seed).play(guesses) for s in (guesses, others))
    return same != different


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("superpages", [12, 40, 400])
def test_nothing_that_can_be_observed_depends_on_another_salts_text(layout, superpages):
    assert not any(compare(layout, superpages, seed) for seed in range(6))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_comparison_would_see_what_is_shared(layout, monkeypatch):
    """With a salt that is left out of the key, what is observed differs; and so it does where only waiting forgets it."""
    root, known_root = PrefixIndex.root, PrefixIndex.known_root
    with monkeypatch.context() as patch:
        patch.setattr(PrefixIndex, "root", lambda self, salt, adapter="": root(self, "", adapter))
        patch.setattr(PrefixIndex, "known_root", lambda self, salt, adapter="": known_root(self, "", adapter))
        assert any(compare(layout, 400, seed) for seed in range(20))
    with monkeypatch.context() as patch:
        patch.setattr(Running, "start", property(lambda running: ("", running.prompt[:MIN_SHARED].tobytes())))
        assert any(compare(layout, 400, seed) for seed in range(60))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("salts", "computed"), [(("a", "b"), 200), (("a", "a"), 101)])
def test_a_request_waits_for_its_own_salts_prefix_alone(layout, salts, computed):
    simulation, _ = build(layout, superpages=400, seats=4, budget=16, vocab=LAST)
    for name, salt in zip("xy", salts, strict=True):
        simulation.scheduler.add(request(name, text(100, 1), 1, salt=salt))
    while simulation.scheduler.has_work:
        simulation.step()
    assert simulation.num_computed == computed


def test_the_route_that_explains_knows_one_salt():
    """Also what it says of text that was evicted: only its own salt's is remembered."""
    simulation, coordinator = build("attention+state", superpages=100, vocab=LAST)
    run(simulation, request("victim", text(100, 1), 1, salt="victim"))
    for prepare in (lambda: None, coordinator.clear):
        prepare()
        told = simulation.scheduler.explain(text(100, 1), CacheHints(salt="attacker"))
        assert told.tokens == {"salted": 99, "last_token": 1}
        assert (told.num_text, told.parted_at) == (0, 0)
