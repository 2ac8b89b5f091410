"""Random histories on real models: with caching, chunks, preemption and aborts the output is that of an engine without any of it.

Requests branch from earlier ones at any token and go on from earlier answers, so that they come cold, warm, from inside a block
and from junctions; memory is so short that some are preempted.
"""

import random

import pytest

from hybridserve.request import CacheHints, EngineRequest, SamplingParams
from tests import checkpoints
from tests.test_engine import engine, pinched

#: The states of the others weigh so much at these sizes that what was admitted never outgrows memory.
GROWS = ("qwen3_5", "gemma3", "lfm3")
MAX_LEN = 96
OPERATIONS = 45


class Reference:
    """Greedy tokens by an engine that keeps nothing and computes one request at a time."""

    def __init__(self, folder):
        self.core = engine(folder, enable_prefix_caching=False, max_model_len=MAX_LEN)
        self.known = {}

    def tokens(self, prompt, count):
        key = tuple(prompt)
        if len(self.known.get(key, ())) < count:
            self.core.add(ask("r", prompt, count))
            found = []
            while self.core.has_work:
                found += [token for output in self.core.step() for token in output.new_token_ids]
            self.known[key] = found
        return self.known[key][:count]


def ask(name, prompt, count, **hints):
    sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    return EngineRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling, cache=CacheHints(**hints))


class History:
    """One engine under random operations."""

    def __init__(self, core, seed, longest_answer):
        self.core = core
        self.longest_answer = longest_answer
        self.rng = random.Random(seed)
        self.prompts = {}
        self.tokens = {}
        self.cached = {}

    def prompt(self):
        """New text, often behind the beginning of an earlier prompt, or behind an earlier answer."""
        rng, start = self.rng, []
        if self.prompts and rng.random() < 0.75:
            name = rng.choice(sorted(self.prompts))
            start = [*self.prompts[name], *self.tokens.get(name, [])]
            start = start if rng.random() < 0.4 else start[: rng.randrange(len(start) + 1)]
        new = [rng.randrange(checkpoints.VOCAB_SIZE) for _ in range(rng.randrange(1, 30))]
        return [*start, *new][: MAX_LEN - self.longest_answer]

    def operate(self):
        what = self.rng.random()
        if what < 0.3:
            name, prompt = str(len(self.prompts)), self.prompt()
            self.prompts[name] = prompt
            boundaries = (self.rng.randrange(1, len(prompt) + 1),) if self.rng.random() < 0.5 else ()
            assert self.core.add(ask(name, prompt, self.rng.randint(1, self.longest_answer), boundaries=boundaries)) is None
        elif what < 0.37 and self.prompts:
            self.core.abort([self.rng.choice(sorted(self.prompts))])
        else:
            self.step()

    def step(self):
        for output in self.core.step():
            assert output.error is None, output.error
            self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.num_cached_tokens is not None:
                self.cached[output.request_id] = output.num_cached_tokens
        self.core.check()


def play(folder, reference, seed, longest_answer, **settings):
    history = History(engine(folder, max_model_len=MAX_LEN, **settings), seed, longest_answer)
    for _ in range(OPERATIONS):
        history.operate()
    while history.core.has_work:
        history.step()
    for name, tokens in history.tokens.items():
        assert tokens == reference.tokens(history.prompts[name], len(tokens)), f"request {name} of seed {seed}"
    return history


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in (*GROWS, "falcon_h1") else pytest.mark.slow) for name in checkpoints.TINY]
)
def test_any_history_gives_what_an_engine_without_a_cache_gives(name, tmp_path):
    folder = checkpoints.save(checkpoints.make(name), tmp_path)
    reference = Reference(folder)
    info = reference.core.info
    hits, num_preemptions = [], 0
    # Long answers beside each other outgrow what was there when they were admitted.
    for seed, (budget, spare, longest_answer) in enumerate([(2048, None, 8), (16, 8, 8), (24, 1, 60)]):
        memory = 2**26 if spare is None else pinched(info, spare)
        sizes = {"kv_cache_memory": memory, "max_num_batched_tokens": budget, "max_num_seqs": 6}
        history = play(folder, reference, f"{name} {seed}", longest_answer, **sizes)
        hits += history.cached.values()
        num_preemptions += history.core.stats().num_preemptions
    assert 0 in hits
    if any(group.kind == "paged" for group in info.groups):
        assert any(hit % info.block_size for hit in hits), "no hit inside a block"
    assert sum(hit > 0 for hit in hits) >= 5
    if name in GROWS:
        assert num_preemptions > 0
