"""Scheduler and coordinator together, on integers: every page and slot that a pass reads holds what it must."""

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from hybridserve.engine.scheduler import Limits, Scheduler
from hybridserve.errors import OverloadedError, RequestError
from hybridserve.kv.arena import plan_cache
from hybridserve.kv.coordinator import KVCacheCoordinator
from hybridserve.request import CacheHints, EngineRequest, SamplingParams
from tests.simulation import LAYOUTS, Simulation

VOCAB = 3  # so small that prompts share prefixes all the time


def choose(prefix):
    """Next token as a function of the prefix alone, so that scheduling cannot change it."""
    return random.Random(str(prefix)).randrange(VOCAB)


def build(layout, *, superpages=40, seats=4, budget=64, max_len=256, caching=True, policy="cost"):
    layers = LAYOUTS[layout]
    size = plan_cache(layers, 2**40, max_chunk=budget).superpage_nbytes
    plan = plan_cache(layers, superpages * size, max_chunk=budget)
    coordinator = KVCacheCoordinator(plan, num_seats=seats, max_model_len=max_len, enable_prefix_caching=caching, policy=policy)
    scheduler = Scheduler(Limits(plan.longest_sequence(max_len), seats, budget, 100, VOCAB), coordinator)
    return Simulation(scheduler, coordinator, choose), coordinator


def request(name, tokens, max_tokens=5, **hints):
    return EngineRequest(
        request_id=name,
        prompt_token_ids=list(tokens),
        sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        cache=CacheHints(**hints),
    )


def run(simulation, *requests):
    for one in requests:
        simulation.scheduler.add(one)
    for _ in range(10_000):
        if not simulation.scheduler.has_work:
            return
        simulation.step()
        simulation.scheduler.check()
    raise AssertionError("no end after 10,000 steps")


def expected(prompt, n):
    out = list(prompt)
    for _ in range(n):
        out.append(choose(tuple(out)))
    return out[len(prompt) :]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_identical_resend_computes_one_token(layout):
    simulation, _ = build(layout)
    prompt = [random.Random(1).randrange(VOCAB) for _ in range(75)]
    run(simulation, request("a", prompt, 1))
    before = simulation.num_computed
    run(simulation, request("b", prompt, 1))
    assert simulation.num_computed - before == 1


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shared", [5, 16, 40, 63])
def test_shared_prefix_hits_to_the_token(layout, shared):
    simulation, _ = build(layout, superpages=200)
    rng = random.Random(shared)
    prefix = [rng.randrange(VOCAB) for _ in range(shared)]
    computed = []
    for i in range(3):
        prompt = [*prefix, i, *(rng.randrange(VOCAB) for _ in range(30))]
        before = simulation.num_computed
        run(simulation, request(str(i), prompt, 1))
        computed.append(simulation.num_computed - before)
    has_state = any("state" in name for layer in LAYOUTS[layout] for name in layer)
    assert computed[2] == 31  # everything behind the shared prefix, nothing before it
    # The second one saw the junction and wrote its state; where no layer has a state it could resume there at once.
    assert computed[1] <= (31 + shared if has_state else 31)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_next_turn_of_a_chat_computes_only_what_is_new(layout):
    simulation, _ = build(layout, superpages=200)
    text = [random.Random(2).randrange(VOCAB) for _ in range(50)]
    run(simulation, request("1", text, 20))
    turn = [*text, *simulation.outputs["1"], 0, 1, 2]
    before = simulation.num_computed
    run(simulation, request("2", turn, 1))
    assert simulation.num_computed - before == 4  # the answer's last token was chosen but not computed


@pytest.mark.parametrize("layout", LAYOUTS)
def test_salts_share_nothing(layout):
    simulation, _ = build(layout)
    prompt = [1] * 40
    run(simulation, request("a", prompt, 1, salt="x"))
    before = simulation.num_computed
    run(simulation, request("b", prompt, 1, salt="y"))
    assert simulation.num_computed - before == 40


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("superpages", [6, 8, 12])
def test_little_memory_preempts_and_finishes_all(layout, superpages):
    simulation, _ = build(layout, superpages=superpages, seats=8, budget=32)
    longest = simulation.scheduler.limits.max_model_len
    rng = random.Random(superpages)
    requests = []
    for i in range(12):
        n = rng.randrange(1, max(2, longest - 12))
        requests.append(request(str(i), [rng.randrange(VOCAB) for _ in range(n)], rng.randrange(1, 11)))
    run(simulation, *requests)
    for one in requests:
        room = longest - len(one.prompt_token_ids)
        assert simulation.outputs[one.request_id] == expected(one.prompt_token_ids, min(room, one.sampling.max_tokens))
        assert simulation.ended[one.request_id].reason == "length"


def test_refusals_name_value_limit_and_remedy():
    simulation, _ = build("attention")
    scheduler = simulation.scheduler
    limit = scheduler.limits.max_model_len
    with pytest.raises(RequestError, match=f"{limit} tokens; at most {limit - 1}"):
        scheduler.add(request("a", [0] * limit))
    with pytest.raises(RequestError, match="empty"):
        scheduler.add(request("a", []))
    with pytest.raises(RequestError, match="id 3 is outside the vocabulary of 3"):
        scheduler.add(request("a", [0, 3]))
    for i in range(104):
        scheduler.add(request(str(i), [0]))
    with pytest.raises(OverloadedError, match="limit is 104"):
        scheduler.add(request("b", [0]))


def test_deadline_ends_a_request_with_timeout():
    simulation, _ = build("attention+state")
    one = EngineRequest(request_id="a", prompt_token_ids=[0, 1], sampling=SamplingParams(max_tokens=50), deadline_s=5)
    simulation.scheduler.add(one, now=100.0)
    simulation.step()
    assert simulation.scheduler.expire(104.0) == []
    assert [ended.reason for ended in simulation.scheduler.expire(105.5)] == ["timeout"]
    assert not simulation.scheduler.has_work
    simulation.scheduler.check()


class Machine(RuleBasedStateMachine):
    """Any order of arrivals, steps, aborts and failing steps, on any layout and amount of memory."""

    @initialize(
        layout=st.sampled_from(sorted(LAYOUTS)),
        superpages=st.integers(5, 30),
        seats=st.integers(1, 5),
        budget=st.sampled_from([8, 17, 64]),
        policy=st.sampled_from(["cost", "lru"]),
        caching=st.booleans(),
    )
    def start(self, layout, superpages, seats, budget, policy, caching):
        self.simulation, self.coordinator = build(
            layout, superpages=superpages, seats=seats, budget=budget, max_len=96, policy=policy, caching=caching
        )
        self.scheduler = self.simulation.scheduler
        self.prompts = {}

    @rule(data=st.data(), fork=st.booleans(), n=st.integers(1, 70), new=st.integers(1, 30), salt=st.sampled_from(["", "s"]))
    def arrive(self, data, fork, n, new, salt):
        limit = self.scheduler.limits.max_model_len
        if limit < 2:
            return
        known = sorted(self.prompts)
        tokens = []
        if fork and known:
            tokens = self.prompts[data.draw(st.sampled_from(known))][: data.draw(st.integers(0, limit))]
        tokens = [*tokens, *data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=n))][: limit - 1]
        name = str(len(self.prompts))
        self.prompts[name] = tokens
        hints = {"salt": salt, "boundaries": tuple(data.draw(st.lists(st.integers(0, len(tokens)), max_size=3)))}
        self.scheduler.add(request(name, tokens, new, **hints))

    @rule(steps=st.integers(1, 12))
    def run_steps(self, steps):
        for _ in range(steps):
            self.simulation.step()

    @rule(data=st.data())
    def abort(self, data):
        if self.prompts:
            self.scheduler.abort([data.draw(st.sampled_from(sorted(self.prompts)))])

    @rule()
    def failing_step(self):
        plan = self.scheduler.plan()
        self.scheduler.take_failed()
        if plan is not None:
            self.scheduler.fail(plan, "test")

    @invariant()
    def all_is_accounted_for(self):
        if hasattr(self, "scheduler"):
            self.scheduler.check()

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        for _ in range(5_000):
            if not self.scheduler.has_work:
                break
            self.simulation.step()
        assert not self.scheduler.has_work, "requests never end"
        for name, tokens in self.simulation.outputs.items():
            assert tokens == expected(self.prompts[name], len(tokens)), "cache, chunks or preemption changed the output"
        self.coordinator.clear()
        usage = self.coordinator.usage()
        assert usage["superpages_free"] == usage["superpages_total"], "memory is not flat: something was not given back"


def test_any_history_keeps_the_books_and_the_output():
    run_state_machine_as_test(
        Machine,
        settings=settings(max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)),
    )
