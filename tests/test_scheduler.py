"""Scheduler and coordinator together, on integers: every page and slot that a pass reads holds what it must."""

import contextlib
import random

import numpy as np
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


def build(layout, *, superpages=40, seats=4, budget=64, max_len=256, caching=True, policy="cost", vocab=VOCAB, **limits):
    layers = LAYOUTS[layout]
    size = plan_cache(layers, 2**40, max_chunk=budget).superpage_nbytes
    plan = plan_cache(layers, superpages * size, max_chunk=budget)
    coordinator = KVCacheCoordinator(plan, num_seats=seats, max_model_len=max_len, enable_prefix_caching=caching, policy=policy)
    scheduler = Scheduler(Limits(plan.longest_sequence(max_len), seats, budget, 100, vocab, **limits), coordinator)
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
@pytest.mark.parametrize(("shared", "own"), [(150, 70), (160, 60)])
def test_requests_that_arrive_together_compute_a_shared_prefix_once(layout, shared, own):
    simulation, _ = build(layout, superpages=900, seats=8, budget=64)
    rng = random.Random(shared)
    prefix = [rng.randrange(VOCAB) for _ in range(shared)]
    # The first own token differs from all others', so that nothing more is shared by chance.
    prompts = [[*prefix, *(rng.randrange(VOCAB) for _ in range(own))] for i in range(8)]
    run(simulation, *(request(str(i), prompt, 1) for i, prompt in enumerate(prompts)))
    common = sum(common_prefix(prompts[i], [p for j, p in enumerate(prompts) if j < i]) for i in range(8))
    assert simulation.num_computed >= sum(map(len, prompts)) - common
    # Less than a match unit is not waited for.
    assert simulation.num_computed <= shared + 8 * own + 7 * 16


def common_prefix(prompt, others):
    def shared(other):
        return next((i for i, (a, b) in enumerate(zip(prompt, other, strict=True)) if a != b), len(prompt) - 1)

    return max(map(shared, others), default=0)


def test_an_explanation_adds_up_and_names_its_reason():
    simulation, _ = build("attention+state", superpages=200)
    first = [random.Random(3).randrange(VOCAB) for _ in range(60)]
    run(simulation, request("a", first, 1))
    scheduler = simulation.scheduler
    parted = [*first[:40], (first[40] + 1) % VOCAB, *first[41:]]
    told = scheduler.explain(parted, CacheHints())
    assert (told.num_hit, told.num_text, told.reason) == (0, 40, "no_state")
    assert told.tokens == {"no_state": 40, "never_seen": 19, "last_token": 1}
    assert scheduler.explain(first, CacheHints()).tokens == {"hit": 59, "last_token": 1}
    assert scheduler.explain(first, CacheHints(salt="x")).tokens == {"salted": 59, "last_token": 1}
    drift = scheduler.explain(parted, CacheHints(history=(20, 50)))
    assert drift.tokens == {"no_state": 40, "template_drift": 10, "never_seen": 9, "last_token": 1}
    assert drift.parted_at == 40
    # Another chat has parted before the first question's end; an answer's last token was never computed.
    for history in ((41, 50), (20, 41), (20, 30)):
        assert "template_drift" not in scheduler.explain(parted, CacheHints(history=history)).tokens


def test_an_evicted_prefix_is_told_from_a_new_one():
    simulation, coordinator = build("attention+state", superpages=200)
    prompt = [random.Random(4).randrange(VOCAB) for _ in range(70)]
    run(simulation, request("a", prompt, 1))
    coordinator.clear()
    told = simulation.scheduler.explain(prompt, CacheHints())
    assert told.tokens == {"evicted": 64, "never_seen": 5, "last_token": 1}


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


@pytest.mark.parametrize(
    ("field", "sampling"),
    [
        ("stop_token_ids", {"stop_token_ids": (1, 3)}),
        ("stop_token_ids", {"stop_token_ids": (-1,)}),
        ("logit_bias", {"logit_bias": {-1: 1.0}}),
        ("logit_bias", {"logit_bias": {2**40: 1.0}}),
    ],
)
def test_I32_ids_of_every_kind_are_checked_in_the_engine(field, sampling):
    scheduler = build("attention")[0].scheduler
    one = EngineRequest(request_id="a", prompt_token_ids=[0], sampling=SamplingParams(**sampling))
    with pytest.raises(RequestError, match=f"{field}: token id .* outside the vocabulary of 3; use ids from 0 to 2"):
        scheduler.add(one)
    assert not scheduler.has_work


@pytest.mark.parametrize(
    "change", [{"deadline_s": float("nan")}, {"deadline_s": float("inf")}, {"cache": CacheHints(salt="\ud800")}]
)
def test_I21_what_would_disturb_the_engine_for_all_is_refused(change):
    scheduler = build("attention")[0].scheduler
    with pytest.raises(RequestError):
        scheduler.add(EngineRequest(request_id="a", prompt_token_ids=[0], sampling=SamplingParams(), **change))


def test_I21_explaining_ids_outside_the_vocabulary_says_never_seen():
    scheduler = build("attention")[0].scheduler
    assert scheduler.explain([2**40, -1, 0], CacheHints()).tokens == {"never_seen": 2, "last_token": 1}


def test_I32_an_end_of_text_beyond_the_vocabulary_is_no_stop_id():
    simulation, _ = build("attention")
    sampling = SamplingParams(max_tokens=2, min_tokens=1)
    simulation.scheduler.add(EngineRequest(request_id="a", prompt_token_ids=[0], sampling=sampling, eos_token_ids=(-1, 1, 3)))
    simulation.step()
    assert simulation.scheduler.seats.running[0].stop_ids == (1,)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num", [2, 5])
def test_I33_a_request_that_fails_passes_ends_alone_and_soon(layout, num):
    """Whatever it fails at: its prompt, or a token of its answer. The others get all their tokens."""
    for fails_at in (0, 7):
        simulation, _ = build(layout, superpages=900, seats=8, budget=64)
        simulation.fails = lambda names, s=simulation, n=fails_at: "1" in names and len(s.outputs.get("1", [])) == n
        rng = random.Random(num)
        requests = [request(str(i), [rng.randrange(VOCAB) for _ in range(10 + 9 * i)], 20) for i in range(num)]
        run(simulation, *requests)
        for one in requests:
            name, is_guilty = one.request_id, one.request_id == "1"
            assert simulation.ended[name].reason == ("error" if is_guilty else "length")
            assert simulation.outputs.get(name, []) == expected(one.prompt_token_ids, fails_at if is_guilty else 20)
        assert simulation.num_failed_steps <= 2 * num


@pytest.mark.parametrize("layout", LAYOUTS)
def test_I22_an_engine_that_fails_every_pass_ends_all_in_bounded_steps(layout):
    simulation, _ = build(layout, superpages=900, seats=8, budget=64)
    simulation.fails = lambda names: True
    run(simulation, *(request(str(i), [i % VOCAB] * (5 + i)) for i in range(20)))
    assert {ended.reason for ended in simulation.ended.values()} == {"error"}
    assert len(simulation.ended) == 20
    assert simulation.num_failed_steps <= 2 * 20


def test_I33_two_that_fail_only_together_both_finish():
    simulation, _ = build("attention+state", superpages=200)
    simulation.fails = lambda names: {"0", "1"} <= set(names)
    prompts = [[0, 1, 2] * 9, [1, 2] * 9, [2, 0] * 9]
    run(simulation, *(request(str(i), prompt, 9) for i, prompt in enumerate(prompts)))
    assert [simulation.outputs[str(i)] for i in range(3)] == [expected(prompt, 9) for prompt in prompts]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(2))
def test_no_request_ends_for_want_of_memory_that_it_fits(layout, seed):
    """Memory holds exactly one longest sequence, and prompts share beginnings that end inside blocks."""
    rng = random.Random(seed)
    max_len, budget = rng.choice([40, 64, 96]), rng.choice([17, 64])
    need = plan_cache(LAYOUTS[layout], 2**40, max_chunk=budget).superpages_needed(max_len)
    simulation, _ = build(layout, superpages=need, seats=4, budget=budget, max_len=max_len)
    limit = simulation.scheduler.limits.max_model_len
    base = [rng.randrange(VOCAB) for _ in range(limit)]
    requests = []
    for i in range(16):
        own = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 30))]
        requests.append(request(str(i), [*base[: rng.randrange(limit)], *own][: limit - 1], rng.choice([1, 9, limit])))
    run(simulation, *requests)
    for one in requests:
        assert simulation.ended[one.request_id].reason == "length", simulation.ended[one.request_id].error
        wanted = min(one.sampling.max_tokens, limit - len(one.prompt_token_ids))
        assert simulation.outputs[one.request_id] == expected(one.prompt_token_ids, wanted)


def num_cached(usage):
    return sum(count for name, count in usage.items() if name.endswith("_cached"))


@pytest.mark.parametrize("layout", ["attention", "attention+state", "attention+window+conv"])
def test_a_hit_that_does_not_fit_beside_what_runs_evicts_nothing(layout):
    """A hit holds its source block and its state beside the request's own, until the first pass has read them."""
    budget, num_prompt, matched = 64, 60, 37
    large = plan_cache(LAYOUTS[layout], 2**40, max_chunk=budget)
    need = large.superpages_needed(num_prompt)
    for more in range(3 * need):
        simulation, coordinator = build(layout, superpages=need + more, seats=4, budget=budget, max_len=num_prompt + 2)
        base = [random.Random(0).randrange(VOCAB) for _ in range(num_prompt)]
        run(simulation, request("known", base[:matched], 1, marks=(matched,)))
        simulation.scheduler.add(request("runs", [1] * 30, 8, salt="x"))
        simulation.step()
        before = coordinator.usage()
        simulation.scheduler.add(request("hit", base, 1))
        simulation.step()
        if simulation.scheduler.num_waiting:
            assert num_cached(coordinator.usage()) >= num_cached(before), f"{more} superpages beside the prompt's"
        run(simulation)


def test_what_is_pinned_does_not_give_way_to_an_optional_checkpoint():
    """All other slots belong to running requests, each of which would like more."""
    simulation, coordinator = build("states alone", superpages=6, seats=4, budget=256)
    pinned = [1] * 20
    run(simulation, request("pinned", pinned, 1, pin=True))
    rng = random.Random(5)
    run(simulation, *(request(str(i), [rng.randrange(VOCAB) for _ in range(40)], 2, marks=(10, 20)) for i in range(4)))
    assert simulation.scheduler.explain(pinned, CacheHints()).num_hit == 19
    assert coordinator.num_checkpoints_written > 3


def steps_until_end(layout, short_prompt_share, *, every=None):
    """By request, steps from its arrival to its end: a prompt of 1,600 tokens, and short ones that come behind it."""
    simulation, _ = build(layout, superpages=900, max_len=2048, short_prompt_share=short_prompt_share)
    came, ended = {}, {}
    rng = random.Random(0)
    prompts = {"long": [rng.randrange(VOCAB) for _ in range(1600)]}
    for step in range(200):
        if step == 0 or (every is not None and step % every == 0) or step == 2:
            name = "long" if step == 0 else f"short {step}"
            prompts.setdefault(name, [rng.randrange(VOCAB) for _ in range(20)])
            simulation.scheduler.add(request(name, prompts[name], 1))
            came[name] = step
        simulation.step()
        simulation.scheduler.check()
        for name in simulation.ended:
            ended.setdefault(name, step)
        if "long" in ended and every is not None:
            break
    for name in ended:
        assert simulation.outputs[name] == expected(prompts[name], 1)
    return {name: ended[name] - came[name] + 1 for name in ended}


@pytest.mark.parametrize("layout", ["attention+state", "attention+window+conv"])
def test_a_short_request_does_not_wait_for_long_prompts(layout):
    assert steps_until_end(layout, 0.0) == {"long": 25, "short 2": 24}  # 1,600 tokens in steps of 64, and the short one last
    assert steps_until_end(layout, 0.5) == {"long": 26, "short 2": 1}
    crowded = steps_until_end(layout, 0.5, every=1)
    assert crowded.pop("long") <= 51  # half of each step is its own
    assert max(crowded.values()) == 1


def test_deadline_ends_a_request_with_timeout():
    simulation, _ = build("attention+state")
    one = EngineRequest(request_id="a", prompt_token_ids=[0, 1], sampling=SamplingParams(max_tokens=50), deadline_s=5)
    simulation.scheduler.add(one, now=100.0)
    simulation.step()
    assert simulation.scheduler.expire(104.0) == []
    assert [ended.reason for ended in simulation.scheduler.expire(105.5)] == ["timeout"]
    assert not simulation.scheduler.has_work
    simulation.scheduler.check()


def test_a_deadline_is_not_that_of_a_later_request_with_the_same_id():
    simulation, _ = build("attention")
    one = EngineRequest(request_id="a", prompt_token_ids=[0, 1], sampling=SamplingParams(max_tokens=50), deadline_s=5)
    simulation.scheduler.add(one, now=0.0)
    simulation.scheduler.abort(["a"])
    simulation.scheduler.add(one, now=4.0)
    assert simulation.scheduler.expire(5.5) == []
    assert [ended.reason for ended in simulation.scheduler.expire(9.5)] == ["timeout"]


@pytest.mark.parametrize("seed", [80, 227, 347, 635, *range(8)])
def test_I25_suspects_that_need_memory_take_it_from_those_that_pause_for_them(seed):
    """Passes of several requests fail now and then, with little memory: something runs in every step all the same."""
    rng = random.Random(seed)
    layout = rng.choice(list(LAYOUTS))
    simulation, _ = build(layout, superpages=rng.randint(6, 60), seats=8, budget=rng.choice([16, 32, 64]), max_len=256)
    longest = simulation.scheduler.limits.max_model_len
    simulation.fails = lambda names: len(names) > 1 and rng.random() < 0.15
    waiting = [
        request(str(i), [rng.randrange(VOCAB) for _ in range(rng.randint(1, max(1, longest - 30)))], rng.randint(1, 25))
        for i in range(8)
    ]
    idle = 0
    while waiting or simulation.scheduler.has_work:
        if waiting and rng.random() < 0.2:
            with contextlib.suppress(RequestError):
                simulation.scheduler.add(waiting.pop())
        idle = idle + 1 if simulation.step() is None and simulation.scheduler.has_work else 0
        assert idle < 10, "nothing runs, and there is work"


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
        self.simulation.fails = self.fails
        self.prompts, self.new = {}, {}
        self.guilty, self.aborted, self.failed_alone = set(), set(), set()
        self.fails_next = False

    def fails(self, names):
        """A guilty request makes every pass fail that it is in; others fail now and then."""
        raises, self.fails_next = self.fails_next or not self.guilty.isdisjoint(names), False
        if raises and len(names) == 1:
            self.failed_alone.update(names)
        return raises

    @rule(
        data=st.data(),
        fork=st.booleans(),
        n=st.integers(1, 70),
        new=st.integers(1, 30),
        salt=st.sampled_from(["", "s"]),
        guilty=st.sampled_from([False] * 5 + [True]),
        pin=st.booleans(),
    )
    def arrive(self, data, fork, n, new, salt, guilty, pin):
        limit = self.scheduler.limits.max_model_len
        if limit < 2:
            return
        known = sorted(self.prompts)
        tokens = []
        if fork and known:
            tokens = self.prompts[data.draw(st.sampled_from(known))][: data.draw(st.integers(0, limit))]
        tokens = [*tokens, *data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=n))][: limit - 1]
        name = str(len(self.prompts))
        self.prompts[name], self.new[name] = tokens, new
        if guilty:
            self.guilty.add(name)
        hints = {"salt": salt, "pin": pin, "boundaries": tuple(data.draw(st.lists(st.integers(0, len(tokens)), max_size=3)))}
        self.scheduler.add(request(name, tokens, new, **hints))

    @rule(steps=st.integers(1, 12))
    def run_steps(self, steps):
        for _ in range(steps):
            self.simulation.step()

    @rule(data=st.data())
    def abort(self, data):
        if self.prompts:
            name = data.draw(st.sampled_from(sorted(self.prompts)))
            self.aborted.update(one.running.request.request_id for one in self.scheduler.abort([name]))

    @rule()
    def failing_step(self):
        self.fails_next = True
        self.simulation.step()
        self.fails_next = False

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
        limit = self.scheduler.limits.max_model_len
        for name, prompt in self.prompts.items():
            tokens = self.simulation.outputs.get(name, [])
            assert tokens == expected(prompt, len(tokens)), "cache, chunks, preemption or failed passes changed the output"
            if name not in self.aborted:
                ended = self.simulation.ended[name]
                # Who fails alone ends with an error; nobody else does, whether or not memory is short.
                assert (ended.reason == "error") == (name in self.failed_alone), (name, ended.error)
                wanted = min(self.new[name], limit - len(prompt))
                assert ended.reason == "error" or len(tokens) == wanted, "tokens are missing"
        counters = self.scheduler.counters
        assert sum(counters.prompt_tokens_by_reason.values()) == counters.num_prompt_tokens
        assert counters.prompt_tokens_by_reason["hit"] == counters.num_cached_tokens
        self.coordinator.clear()
        usage = self.coordinator.usage()
        assert usage["superpages_free"] == usage["superpages_total"], "memory is not flat: something was not given back"


def test_any_history_keeps_the_books_and_the_output():
    run_state_machine_as_test(
        Machine,
        settings=settings(max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)),
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_request_whose_logits_go_bad_leaves_nothing_in_the_cache(layout):
    """Also not what it published in the steps before the one that showed it."""
    simulation, _ = build(layout, superpages=200, budget=32)
    scheduler = simulation.scheduler
    good = [random.Random(1).randrange(VOCAB) for _ in range(40)]
    run(simulation, request("good", good, 1))
    rng = random.Random(2)
    bad = [*good[:35], (good[35] + 1) % VOCAB, *(rng.randrange(VOCAB) for _ in range(59))]
    scheduler.add(request("bad", bad, 9))
    while True:
        plan = scheduler.plan()
        if plan.samples.any():
            break
        scheduler.commit(plan, np.zeros(0, np.int64))
    ended = scheduler.commit(plan, np.zeros(1, np.int64), failed=np.array([True]))
    assert [one.reason for one in ended] == ["error"]
    scheduler.check()
    assert scheduler.explain(bad, CacheHints()).parted_at == 35
    assert scheduler.explain(good, CacheHints()).num_hit == 39


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("also_fails", [True, False])
def test_what_bad_logits_came_from_goes_also_where_others_resumed_from_it(layout, also_fails):
    """B waits for A's prefix and goes on from it; then A's logits are bad. Nothing of that prefix is ever found again."""
    simulation, _ = build(layout, superpages=400, budget=32)
    scheduler = simulation.scheduler
    rng = random.Random(1)
    base = [rng.randrange(VOCAB) for _ in range(60)]
    prompts = {name: [*base, own, *(rng.randrange(VOCAB) for _ in range(60))] for own, name in enumerate("ab")}
    for name, prompt in prompts.items():
        scheduler.add(request(name, prompt))
    while (plan := scheduler.plan()) is not None:
        running = [scheduler.seats.running[seat].request.request_id for seat in plan.seats[plan.samples]]
        failed = np.array([name == "a" or also_fails for name in running], bool)
        scheduler.commit(plan, np.zeros(len(running), np.int64), failed=failed)
        scheduler.check()
    for prompt in prompts.values():
        told = scheduler.explain([*prompt, 0], CacheHints())
        assert (told.num_hit, told.num_text) == (0, 0)
    before = simulation.num_computed
    run(simulation, request("c", prompts["a"], 1))
    assert simulation.num_computed - before == len(prompts["a"])
    assert scheduler.explain(prompts["a"], CacheHints()).num_hit == len(prompts["a"]) - 1
