"""What callers say about reuse: marks, pins, what is not to be stored. On integers, with every layout of caches."""

import random

import pytest

from hybridserve.kv.checkpoints import CheckpointPolicy
from hybridserve.request import CacheHints
from tests.simulation import LAYOUTS
from tests.test_scheduler import VOCAB, build, request, run

WITH_STATES = [name for name, layers in LAYOUTS.items() if any("state" in kind for layer in layers for kind in layer)]


def text(count, seed):
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(count)]


def parted(prompt, at, seed):
    """A prompt that is the same up to token `at`, and no further."""
    return [*prompt[:at], (prompt[at] + 1) % VOCAB, *text(20, seed)]


@pytest.mark.parametrize("layout", WITH_STATES)
@pytest.mark.parametrize("mark", [1, 15, 16, 17, 63, 100])
def test_the_second_request_resumes_at_a_mark(layout, mark):
    simulation, _ = build(layout, superpages=300)
    prompt = text(120, 1)
    run(simulation, request("a", prompt, 1, marks=(mark,)))
    assert simulation.scheduler.explain(parted(prompt, mark, 2), CacheHints()).num_hit == mark
    before = simulation.num_computed
    run(simulation, request("b", parted(prompt, mark, 2), 1))
    assert simulation.num_computed - before == 21


def test_a_mark_at_the_very_end_of_a_prompt_is_kept():
    simulation, _ = build("attention+state", superpages=300)
    prompt = text(50, 1)
    run(simulation, request("a", prompt, 9, marks=(50,)))
    assert simulation.scheduler.explain([*prompt, VOCAB - 1 - simulation.outputs["a"][0], 0], CacheHints()).num_hit == 50


def test_marks_are_kept_where_all_else_is_dropped():
    policy = CheckpointPolicy(spacing=32, most_per_prompt=2)
    assert policy.positions(0, 1000, 700, (100, 800, 900)) == (900, 999)
    assert policy.positions(0, 1000, 700, (100, 800, 900), (300,)) == (300, 999)
    assert policy.positions(0, 1000, 700, (100, 800, 900), (100, 300, 1000)) == (300, 1000)
    assert policy.positions(400, 1000, 700, (), (300, 400)) == (700, 999)
    ample = CheckpointPolicy(spacing=32, most_per_prompt=8)
    assert set(ample.positions(0, 200, 0, (50,), (70, 90))) >= {50, 70, 90, 199}
    assert len(ample.positions(0, 2000, 0, (50,), (70, 90))) <= 8


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_not_to_be_stored_is_never_found(layout):
    simulation, coordinator = build(layout, superpages=300)
    prompt = text(60, 1)
    run(simulation, request("a", prompt, 5, no_store=True, marks=(30,)))
    assert simulation.scheduler.explain(prompt, CacheHints()).num_text == 0
    assert coordinator.usage()["checkpoints_written"] == 0
    usage = coordinator.usage()
    assert usage["superpages_free"] == usage["superpages_total"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_not_to_be_stored_may_still_hit(layout):
    simulation, _ = build(layout, superpages=300)
    prompt = text(60, 1)
    run(simulation, request("a", prompt, 1))
    before = simulation.num_computed
    run(simulation, request("b", prompt, 1, no_store=True))
    assert simulation.num_computed - before == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nobody_waits_for_a_prefix_that_will_not_be_stored(layout):
    simulation, _ = build(layout, superpages=300, budget=16)
    prompt = text(100, 1)
    simulation.scheduler.add(request("a", prompt, 1, no_store=True))
    simulation.scheduler.add(request("b", prompt, 1))
    run(simulation)
    assert simulation.num_computed == 200


@pytest.mark.parametrize("layout", WITH_STATES)
@pytest.mark.parametrize("policy", ["cost", "lru"])
def test_a_pinned_state_outlives_the_others(layout, policy):
    """Requests of which each fills a part of memory come by; only what is pinned is still there."""
    simulation, _ = build(layout, superpages=40, policy=policy)
    kept, other = text(40, 1), text(40, 2)
    run(simulation, request("kept", kept, 1, pin=True))
    run(simulation, request("other", other, 1))
    for number in range(150):
        run(simulation, request(str(number), text(60, 10 + number), 1))
    hits = [simulation.scheduler.explain(prompt, CacheHints()).num_hit for prompt in (kept, other)]
    assert hits[0] == 39
    assert hits[1] < 16  # what other prompts happen to share


@pytest.mark.parametrize("layout", WITH_STATES)
def test_pins_cannot_take_all_memory(layout):
    """When everything is pinned, what is beyond the cap goes as if it were not, and requests still run."""
    simulation, _ = build(layout, superpages=20)
    for number in range(100):
        run(simulation, request(str(number), text(60, 10 + number), 1, pin=True))
    assert len(simulation.outputs) == 100
