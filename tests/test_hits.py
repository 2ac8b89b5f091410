"""What hits, to the token: on models of four kinds of cache, and on the real division of memory of a released hybrid.

The real division runs without a model: the scheduler and the coordinator at the sizes of Qwen3.5-35B-A3B, whose state weighs as
much as 3,152 tokens of text, so that a grid of any kind would show.
"""

import random

import numpy as np
import pytest

from hybridserve.config import EngineSettings
from hybridserve.engine.core import EngineCore
from hybridserve.engine.scheduler import Limits, Scheduler
from hybridserve.kv.arena import plan_cache
from hybridserve.kv.coordinator import KVCacheCoordinator
from hybridserve.request import EngineRequest, SamplingParams
from tests import checkpoints
from tests.simulation import LAYOUTS
from tests.test_replay import LAYERS

#: Gated delta rule and attention, Mamba-2 in parallel with attention, short convolutions with windows and attention, attention.
KINDS = {"qwen3_5": True, "falcon_h1": True, "lfm3": True, "llama": False}
WITHOUT_STATES = ("attention", "attention+window")
SHARED = 40


def text(count, seed, vocab=200_000):
    rng = random.Random(f"{count} {seed}")
    return [rng.randrange(vocab) for _ in range(count)]


def ask(name, prompt, max_tokens=1):
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return EngineRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling)


# -- models ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=KINDS)
def kind(request, tmp_path_factory):
    """A tiny model, and whether it has states."""
    return checkpoints.save(checkpoints.make(request.param), tmp_path_factory.mktemp(request.param)), KINDS[request.param]


def engine(folder, **settings):
    return EngineCore(EngineSettings(model=str(folder), dtype="float32", kv_cache_memory=2**26, max_num_seqs=4, **settings))


def answer(core, name, prompt, max_tokens=6):
    """Tokens, tokens that were reused, and the number of passes."""
    assert core.add(ask(name, prompt, max_tokens)) is None
    tokens, cached, before = [], None, core.stats().num_steps
    while core.has_work:
        for output in core.step():
            tokens += output.new_token_ids
            cached = output.num_cached_tokens if output.num_cached_tokens is not None else cached
        core.check()
    return tokens, cached, core.stats().num_steps - before


def test_an_identical_resend_computes_exactly_one_token(kind):
    folder, _ = kind
    core, cold = engine(folder), engine(folder, enable_prefix_caching=False)
    prompt = text(75, 1, checkpoints.VOCAB_SIZE)
    want, cached, _ = answer(cold, "cold", prompt)
    assert cached == 0
    assert answer(core, "first", prompt)[:2] == (want, 0)
    for number in range(3):
        tokens, cached, passes = answer(core, f"again {number}", prompt)
        assert tokens == want
        assert len(prompt) - cached == 1
        assert passes == len(want)


def test_a_prefix_of_forty_tokens_hits_from_the_third_request_on(kind):
    folder, has_states = kind
    core, cold = engine(folder), engine(folder, enable_prefix_caching=False)
    prefix = text(SHARED, 2, checkpoints.VOCAB_SIZE)
    for number in range(6):
        prompt = [*prefix, number, *text(30, number, checkpoints.VOCAB_SIZE)]
        tokens, cached, _ = answer(core, str(number), prompt)
        # The second one sees the junction and writes its state; where no layer has a state it resumes there at once.
        assert cached == (0 if number == 0 else SHARED) or (has_states and number == 1 and cached < SHARED)
        assert tokens == answer(cold, str(number), prompt)[0]


# -- the real division ----------------------------------------------------------------------------------------------------


class Engine:
    """Scheduler and coordinator with stub outputs."""

    def __init__(self, layers, superpages, *, max_len, budget=2048, seats=64):
        size = plan_cache(layers, 2**50, max_chunk=budget).superpage_nbytes
        self.plan = plan_cache(layers, superpages * size, max_chunk=budget)
        coordinator = KVCacheCoordinator(self.plan, num_seats=seats, max_model_len=max_len)
        self.scheduler = Scheduler(Limits(max_len, seats, budget, 1024, 200_000), coordinator)
        self.hits = {}

    @property
    def superpage_tokens(self):
        """Tokens of text that fit one superpage."""
        return self.plan.paged[0].pages_per_superpage * self.plan.block_size

    def run(self, *requests):
        """Run requests that arrive together; returns the tokens that were computed."""
        for one in requests:
            self.scheduler.add(one)
        computed = 0
        while self.scheduler.has_work:
            plan = self.scheduler.plan()
            computed += plan.num_tokens
            for ended in self.scheduler.commit(plan, np.full(int(plan.samples.sum()), 199_999)):
                self.hits[ended.running.request.request_id] = ended.running.num_cached
        return computed


@pytest.mark.parametrize("together", [False, True])
def test_prefixes_of_1500_and_1600_tokens_hit_alike(together):
    """64 requests each. A grid of blocks as large as a state, 3,152 tokens, would give neither of them a hit."""
    found = {}
    for shared, own in ((1500, 700), (1600, 600)):
        run = Engine(LAYERS, 200, max_len=4096)
        assert run.superpage_tokens > 3000
        prefix = text(shared, 0)
        requests = [ask(str(number), [*prefix, *text(own, 1 + number)]) for number in range(64)]
        computed = run.run(*requests) if together else sum(run.run(one) for one in requests)
        run.scheduler.check()
        hits = [run.hits[str(number)] for number in range(64)]
        assert hits[2:] == [shared] * 62
        found[shared] = [hit == shared for hit in hits]
        assert computed == 64 * 2200 - sum(hits)
    assert found[1500] == found[1600]


def edges_near(boundaries, last, stride):
    """Token positions to look at: all around each boundary, and every `stride`-th between."""
    near = {boundary + offset for boundary in boundaries for offset in (-2, -1, 0, 1, 2)}
    return sorted(edge for edge in {*near, *range(1, last, stride)} if 0 < edge < last)


def hits_at(layers, edge, superpages, **limits):
    """What three requests in a row reuse that share exactly `edge` tokens."""
    run, prefix = Engine(layers, superpages, **limits), text(edge, edge)
    for number in range(3):
        run.run(ask(str(number), [*prefix, number, *text(9, f"{edge} {number}")]))
    return [run.hits[str(number)] for number in range(3)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_cliff_at_any_token_of_two_superpages(layout):
    layers = LAYOUTS[layout]
    size = Engine(layers, 50, max_len=64).superpage_tokens if layout != "states alone" else 64
    last = 2 * size + 20
    for edge in range(1, last):
        first, second, third = hits_at(layers, edge, 400, max_len=last + 20, seats=2)
        assert (first, third) == (0, edge)
        # On its way to the junction it may find a state that was kept for no particular reason.
        assert second <= edge if layout not in WITHOUT_STATES else second == edge


@pytest.mark.parametrize("stride", [97, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_no_cliff_at_the_sizes_of_a_released_hybrid(stride):
    tokens = Engine(LAYERS, 10, max_len=64).superpage_tokens
    for edge in edges_near((16, tokens, tokens + 16, 2 * tokens), 2 * tokens + 5, stride):
        first, second, third = hits_at(LAYERS, edge, 40, max_len=2 * tokens + 64, seats=2)
        assert (first, third) == (0, edge)
        assert edge - 256 <= second <= edge  # from an optional state, of which a prompt has one every 128 or 256 tokens
