"""Memory is flat after warm-up: the books of scheduler and cache, an engine, and a whole server."""

import gc
import itertools
import os
import random
import subprocess
import sys
import tracemalloc
from pathlib import Path

import httpx
import numpy as np
import pytest

from hybridserve.config import EngineSettings
from hybridserve.engine.core import EngineCore
from hybridserve.request import CacheHints, EngineRequest, SamplingParams
from tests.simulation import LAYOUTS
from tests.test_network import COMMAND
from tests.test_scheduler import build


class Traffic:
    """An engine without a model, and requests of all sorts: repeated, branching, under new salts, waiting, aborted, explained."""

    def __init__(self, layout, superpages):
        simulation, _ = build(layout, superpages=superpages, seats=3, budget=32, max_len=128, vocab=1000)
        self.scheduler = simulation.scheduler
        self.longest = self.scheduler.limits.max_model_len - 4
        self.rng = random.Random(1)
        self.prompts = [self._text(100) for _ in range(6)]
        self.count = 0

    def _text(self, count):
        return [self.rng.randrange(3, 1000) for _ in range(count)]

    def send(self, prompt, salt=""):
        self.count += 1
        sampling = SamplingParams(max_tokens=3, ignore_eos=True)
        prompt, hints = prompt[: self.longest], CacheHints(salt=salt)
        self.scheduler.add(
            EngineRequest(request_id=str(self.count), prompt_token_ids=prompt, sampling=sampling, cache=hints, deadline_s=0.01)
        )

    def send_all_sorts(self):
        known = self.rng.choice(self.prompts)
        self.send(known)
        self.send([*known[: self.rng.randrange(20, 90)], *self._text(9)])
        branch = [*known[:40], *self._text(40)]
        self.send([*branch, 5])
        self.send([*branch, 6])
        self.send(known, salt=f"{self.count}")
        self.scheduler.explain(known, CacheHints(salt=f"x{self.count}"))

    def run(self, rounds, send):
        for number in range(rounds):
            send()
            while self.scheduler.has_work:
                plan = self.scheduler.plan()
                self.scheduler.take_failed()
                if plan is not None:
                    self.scheduler.commit(plan, np.zeros(int(plan.samples.sum()), np.int64))
                if number % 5 == 0:
                    self.scheduler.abort([str(self.count - number % 4)])
            self.scheduler.expire(float("inf"))

    def growth(self, rounds, send):
        """Bytes of Python objects that are there after `rounds`, and were not before."""
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        self.run(rounds, send)
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before


over_layouts = pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=() if name in ("attention", "attention+window+conv") else pytest.mark.slow) for name in LAYOUTS],
)


@pytest.fixture
def traced(monkeypatch):
    # What is remembered up to a bound: soon full, as the real bounds are after a while.
    monkeypatch.setattr("hybridserve.kv.ghosts._MOST", 500)
    monkeypatch.setattr("hybridserve.kv.prefix.MOST_LOST", 8)
    monkeypatch.setattr("hybridserve.kv.eviction._LEAST_SWEPT", 64)
    tracemalloc.start()
    yield
    tracemalloc.stop()


@over_layouts
@pytest.mark.usefixtures("traced")
def test_P10_the_books_are_flat_under_pressure(layout):
    """All that a request left goes with its entries."""
    traffic = Traffic(layout, superpages=40)
    traffic.run(100, traffic.send_all_sorts)
    assert traffic.growth(120, traffic.send_all_sorts) < 60_000  # of 600 requests
    traffic.scheduler.check()


@over_layouts
@pytest.mark.usefixtures("traced")
def test_P10_the_books_are_flat_while_memory_suffices(layout):
    """What is sent again leaves nothing new, though nothing is ever evicted."""
    traffic = Traffic(layout, superpages=1000)

    def send():
        for prompt in traffic.prompts:
            traffic.send(prompt)

    traffic.run(100, send)
    assert traffic.growth(200, send) < 60_000  # of 1,200 requests
    traffic.scheduler.check()


def anonymous_nbytes(pid):
    """Memory of a process that is its own: anonymous pages, and those that were swapped out."""
    fields = dict(line.split(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "VmSwap"))


def test_P10_an_engine_is_flat():
    core = EngineCore(EngineSettings(model="demo", kv_cache_memory=2**22, max_model_len=256, max_num_seqs=4, threads=1))
    rng = random.Random(1)

    def run(rounds):
        for number in range(rounds):
            for name in "abc":
                prompt = [rng.randrange(3, 900) for _ in range(rng.randrange(20, 100))]
                sampling = SamplingParams(max_tokens=8, temperature=1.0, logprobs=2 if name == "a" else None)
                core.add(EngineRequest(request_id=f"{number}{name}", prompt_token_ids=prompt, sampling=sampling))
            while core.has_work:
                core.step()
        gc.collect()
        return anonymous_nbytes(os.getpid())

    run(60)  # the arena's pages are touched one after another
    assert least_growth(lambda: run(60)) < 2**20


def least_growth(measure, windows=3):
    """The least that memory grew by in some windows. What leaks does so in each; what an allocator keeps back, not again."""
    found = [measure()]
    while len(found) <= windows and (len(found) == 1 or found[-1] - found[-2] >= 2**20):
        found.append(measure())
    return min(after - before for before, after in itertools.pairwise(found))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_P10_a_server_is_flat():
    """Server and engine process under a thousand requests of several kinds, wrong ones and disconnects among them."""
    arguments = ["serve", "demo", "--port", "0", "--kv-cache-memory", "8MiB", "--threads", "1"]
    server = subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        ready = next(line for line in server.stdout if "http://" in line)
        url = next(word for word in ready.split() if word.startswith("http://"))
        children = [int(pid) for pid in Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()]
        with httpx.Client(base_url=url, timeout=60) as http:
            load(http, 300)

            def measure():
                load(http, 350)
                return sum(anonymous_nbytes(pid) for pid in (server.pid, *children))

            grown = least_growth(measure)
    finally:
        server.terminate()
        server.wait(60)
    assert children
    assert grown < 2 * 2**20, f"{grown} bytes more after 350 requests"


def load(http, count):
    rng = random.Random(1)
    for number in range(count):
        prompt = [rng.randrange(3, 900) for _ in range(rng.randrange(20, 200))]
        body = {"prompt": prompt, "max_tokens": 8, "cache_salt": f"{number % 9}", "hybrid_xargs": {"explain": True}}
        if number % 4 == 0:
            assert http.post("/v1/completions", json=body).status_code == 200
        elif number % 4 == 1:
            chat = {"messages": [{"role": "user", "content": f"What is {number} plus 4?"}], "max_tokens": 8, "stream": True}
            assert "[DONE]" in http.post("/v1/chat/completions", json=chat).text
        elif number % 4 == 2:
            assert http.post("/v1/completions", json={**body, "temperature": -1}).status_code == 400
            assert http.post("/v1/cache/explain", json={"prompt": prompt, "cache_salt": f"new {number}"}).status_code == 200
        else:
            with http.stream("POST", "/v1/completions", json={**body, "stream": True, "max_tokens": 500}) as reply:
                next(reply.iter_lines())  # and gone
