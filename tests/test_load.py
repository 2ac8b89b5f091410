"""Load control: the share of memory that running requests may take, and what it is for."""

import random

import pytest

from hybridserve.engine import load, scheduler
from hybridserve.engine.load import LoadControl
from hybridserve.engine.scheduler import Scheduler
from hybridserve.replay.oracle import visits_of
from hybridserve.replay.trace import Segment, TraceRequest
from tests.test_replay import replay
from tests.test_scheduler import build, request, run


def test_the_share_falls_while_most_of_what_is_computed_was_there_before_and_comes_back():
    control = LoadControl()
    control.note(1000, 400)
    assert control.share == 1.0
    assert not control.is_limiting
    for _ in range(100):
        control.note(1000, 900)
        assert control.is_limiting
    assert 0.2 < control.share < 0.3  # some requests always run
    for _ in range(100):
        control.note(1000, 0)
    assert control.share == 1.0


def test_a_prompt_that_hits_whole_says_nothing_against_its_start():
    control = LoadControl()
    control.note(1, 0)
    assert control.share == 1.0


def conversations(count, turns, seed):
    """So many chats at once, each of 20,000 tokens and then some, that take turns."""
    rng, requests = random.Random(seed), []
    for chat in range(count):
        prompt, arrival_s = [Segment(chat + 1, 20_000)], rng.uniform(0, count / 4)
        for turn in range(turns):
            answer = Segment(10**6 + chat * 100 + turn, 100)
            requests.append(TraceRequest(arrival_s, tuple(prompt), answer))
            prompt = [*prompt, answer, Segment(10**7 + chat * 100 + turn, 500)]
            arrival_s += count / 4 * rng.uniform(0.8, 1.2)
    return sorted(requests, key=lambda request: request.arrival_s)


@pytest.mark.parametrize("memory", [4e9, 6e9])
def test_conversations_beyond_the_memory_do_not_push_each_other_out_for_ever(memory, monkeypatch):
    """Eleven gigabytes of conversations in a half or a third of it: without load control nearly nothing is reused."""
    trace = conversations(count=24, turns=6, seed=0)
    most = sum(visit.hit for visit in visits_of(trace))
    with_control = sum(replay(trace, memory, num_seqs=64)[0].hits)
    monkeypatch.setattr(load.LoadControl, "note", lambda self, num_computed, num_evicted: None)
    without = sum(replay(trace, memory, num_seqs=64)[0].hits)
    assert without < 0.05 * most
    assert with_control > 0.3 * most


@pytest.mark.parametrize("thrashes", [False, True])
def test_who_has_least_to_compute_starts_first_while_memory_thrashes_and_nobody_waits_for_ever(thrashes, monkeypatch):
    monkeypatch.setattr(load.LoadControl, "is_limiting", thrashes)
    simulation, _ = build("attention+state", seats=1, superpages=60, vocab=100)
    warm = [3] * 40
    run(simulation, request("first", warm, 1), request("second", [*warm, 1], 1))
    scheduler = simulation.scheduler
    scheduler.add(request("cold", [5] * 60, 1))
    order: list[str] = []
    for number in range(90):
        scheduler.add(request(f"warm {number}", [*warm, 10 + number], 1))
        while len(order) <= number:  # as many end as come, so that somebody always waits
            simulation.step()
            order = [name for name in simulation.ended if name not in ("first", "second")]
    place = order.index("cold")
    assert place == 0 if not thrashes else 10 < place < 80


def test_nobody_is_overtaken_more_often_than_allowed_though_many_are_held_back(monkeypatch):
    """Memory is short, so that the one that was chosen often does not fit and waits in front of those it overtook."""
    most, start = [], Scheduler._open

    def watched(self, running, match, budget):
        most.append(running.num_overtaken)
        return start(self, running, match, budget)

    monkeypatch.setattr(Scheduler, "_open", watched)
    monkeypatch.setattr(load.LoadControl, "is_limiting", True)
    monkeypatch.setattr(scheduler, "_MOST_OVERTAKEN", 8)
    replay(conversations(count=24, turns=6, seed=1), 4e9, num_seqs=64)
    assert max(most) == 8
