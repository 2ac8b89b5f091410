"""Who of those that wait starts next, and what that is for."""

import random
from statistics import fmean

import pytest

from hybridserve.engine import order
from hybridserve.engine.order import StartOrder
from hybridserve.engine.seats import Running
from hybridserve.kv.lookup import Match
from hybridserve.replay.oracle import visits_of
from hybridserve.replay.trace import Segment, TraceRequest
from tests.test_replay import replay
from tests.test_scheduler import build, request, run

WARM = [3] * 40


def place_of_cold(simulation, number_of_warm):
    """How many start before a long new prompt while requests whose prefix is cached keep coming, one for each that ends."""
    run(simulation, request("first", WARM, 1), request("second", [*WARM, 1], 1))
    scheduler = simulation.scheduler
    scheduler.add(request("cold", [5] * 60, 1))
    ended: list[str] = []
    for number in range(number_of_warm):
        scheduler.add(request(f"warm {number}", [*WARM, 10 + number], 1))
        while len(ended) <= number:
            simulation.step()
            ended = [name for name in simulation.ended if name not in ("first", "second")]
    return ended.index("cold")


def test_one_whose_prefix_is_cached_passes_one_that_is_new_and_has_waited_as_long():
    simulation, _ = build("attention+state", seats=1, superpages=60, vocab=100)
    run(simulation, request("first", WARM, 1), request("second", [*WARM, 1], 1), request("third", [7] * 4, 30))
    for name, tokens in (("cold", [5] * 200), ("warm", [*WARM, 2]), ("also warm", [*WARM, 3])):
        simulation.scheduler.add(request(name, tokens, 1))
    run(simulation)
    assert list(simulation.ended)[-3:] == ["warm", "also warm", "cold"]


def test_nobody_is_passed_for_ever(monkeypatch):
    simulation, _ = build("attention+state", seats=1, superpages=60, vocab=170)
    assert place_of_cold(simulation, 100) <= order.TURN_OF_THE_OLDEST
    # A long wait suffices, too, though it takes longer.
    monkeypatch.setattr(order, "TURN_OF_THE_OLDEST", 10**9)
    simulation, _ = build("attention+state", seats=1, superpages=60, vocab=170)
    assert 16 < place_of_cold(simulation, 100) < 90


def test_requests_that_cost_the_same_start_in_order_of_arrival():
    simulation, _ = build("attention+state", seats=1, superpages=60, vocab=100)
    names = [f"r{number}" for number in range(20)]
    run(simulation, *(request(name, [number] * 20, 1) for number, name in enumerate(names)))
    assert list(simulation.ended) == names


def test_what_a_choice_rests_on_is_looked_up_again():
    """Of forty that wait a few are looked up for each choice; still one whose prefix has gone meanwhile is not taken for warm."""
    cached = {f"warm {number}": 90 for number in range(20)}
    looked_up = []

    def match(running):
        looked_up.append(running)
        return Match(cached.get(running.request.request_id, 0), 0, {}, None, None)

    start_order = StartOrder(match)
    names = [*cached, *(f"cold {number}" for number in range(20))]
    waiting = [Running(request(name, [1] * 100), number, 200, ()) for number, name in enumerate(names)]
    for running in waiting:
        start_order.arrive(running)
    start_order.compute(1000)
    for _ in range(4):  # all have been looked up by now
        assert start_order.choose(waiting)[0].request.request_id == "warm 0"
    cached.clear()
    cached["cold 19"] = 20
    for _ in range(4):
        looked_up.clear()
        chosen, found = start_order.choose(waiting)
        assert found.num_tokens == cached.get(chosen.request.request_id, 0)
    assert chosen.request.request_id == "cold 19"
    assert len(looked_up) <= 17


def conversations(count, turns, seed):
    """So many chats at once, each of 20,000 tokens and then some, that take turns and come faster than they are served."""
    rng, requests = random.Random(seed), []
    for chat in range(count):
        prompt, arrival_s = [Segment(chat + 1, 20_000)], rng.uniform(0, count / 12)
        for turn in range(turns):
            answer = Segment(10**6 + chat * 100 + turn, 100)
            requests.append(TraceRequest(arrival_s, tuple(prompt), answer))
            prompt = [*prompt, answer, Segment(10**7 + chat * 100 + turn, 500)]
            arrival_s += count / 12 * rng.uniform(0.8, 1.2)
    return sorted(requests, key=lambda request: request.arrival_s)


def first_tokens(outcome):
    return sorted(timing.first_token_s for timing in outcome.timings)


@pytest.mark.parametrize("memory", [4e9, 6e9])
def test_beyond_the_memory_and_the_machine_the_choice_of_who_starts_gains_hits_and_time(memory):
    """Eleven gigabytes of conversations in a half or a third of it: in order of arrival nearly nothing is reused."""
    trace = conversations(count=24, turns=6, seed=0)
    most = sum(visit.hit for visit in visits_of(trace))
    chosen = replay(trace, memory, num_seqs=64)[0]
    in_order = replay(trace, memory, num_seqs=64, policy="lru", starts_in_order=True)[0]
    assert sum(in_order.hits) < 0.05 * most
    assert sum(chosen.hits) > 0.3 * most
    assert fmean(first_tokens(chosen)) < 0.6 * fmean(first_tokens(in_order))
    assert first_tokens(chosen)[-2] < first_tokens(in_order)[-2]
    assert chosen.clock_s < in_order.clock_s
