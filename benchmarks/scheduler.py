"""Host cost of a scheduling step: plan + commit with stub outputs, no model.

    python -m benchmarks.scheduler [--json FILE]

A hybrid of one attention and three state groups, at 1 to 1,000 running requests, in two mixes: steady decode, and 10 % of the
requests finishing and as many arriving at every step. The floor printed beside is an empty numpy pass over the same arrays: what
the same bookkeeping would cost if nothing ever happened.
"""

import argparse
import json
import statistics
import time

import numpy as np

from hybridserve.engine.scheduler import Limits, Scheduler
from hybridserve.kv.arena import plan_cache
from hybridserve.kv.coordinator import KVCacheCoordinator
from hybridserve.kv.spec import PagedSpec, Spec, StateSpec, TensorSpec
from hybridserve.request import EngineRequest, SamplingParams

LAYERS: list[dict[str, Spec]] = [
    {"kv": PagedSpec((TensorSpec("k", (2, 64), "bfloat16"), TensorSpec("v", (2, 64), "bfloat16")))},
    {"state": StateSpec((TensorSpec("s", (16, 64, 64), "float32"),))},
    {"state": StateSpec((TensorSpec("s", (8, 64, 64), "float32"),))},
    {"state": StateSpec((TensorSpec("c", (3, 512), "bfloat16"),))},
]
VOCAB = 32_000
PROMPT = 64
STEPS = 200


def build(num_running: int) -> Scheduler:
    """A scheduler with room for `num_running` requests of 2,048 tokens."""
    draft = plan_cache(LAYERS, 2**60)
    superpages = draft.superpages_needed(2048, num_running) + 64
    plan = plan_cache(LAYERS, superpages * draft.superpage_nbytes)
    coordinator = KVCacheCoordinator(plan, num_seats=num_running, max_model_len=2048)
    return Scheduler(Limits(2048, num_running, 100_000, 10 * num_running, VOCAB), coordinator)


def request(name: int, rng: np.random.Generator) -> EngineRequest:
    """A fresh prompt that shares nothing."""
    return EngineRequest(
        request_id=str(name),
        prompt_token_ids=rng.integers(0, VOCAB, PROMPT).tolist(),
        sampling=SamplingParams(max_tokens=1900, ignore_eos=True),
    )


def measure(num_running: int, churn: float) -> tuple[float, float]:
    """Median microseconds of a step, and of the floor, interleaved."""
    rng = np.random.default_rng(0)
    scheduler = build(num_running)
    names = iter(range(10**9))
    for _ in range(num_running):
        scheduler.add(request(next(names), rng))
    steps, floors = [], []
    num_changed = int(churn * num_running)
    for _ in range(STEPS):
        arrivals = [request(next(names), rng) for _ in range(num_changed)]
        leaving = [running for running in scheduler.seats.running if running is not None][:num_changed]
        started = time.perf_counter()
        scheduler.abort([running.request.request_id for running in leaving])
        for arrival in arrivals:
            scheduler.add(arrival)
        plan = scheduler.plan()
        assert plan is not None, "there is always work"
        sampled = np.full(int(plan.samples.sum()), 7, np.int64)
        scheduler.commit(plan, sampled)
        steps.append(time.perf_counter() - started)
        started = time.perf_counter()
        floor_pass(plan.seats, scheduler)
        floors.append(time.perf_counter() - started)
    return 1e6 * statistics.median(steps[20:]), 1e6 * statistics.median(floors[20:])


def floor_pass(seats: np.ndarray, scheduler: Scheduler) -> None:
    """What every step must at least touch: lengths and the new token of each seat."""
    at = scheduler.seats.num_tokens[seats]
    scheduler.seats.tokens[seats, at - 1] = 7
    scheduler.seats.num_tokens[seats] = at


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the rows to this file")
    arguments = parser.parse_args()
    rows = []
    print(f"{'running':>8} {'mix':>22} {'step us':>10} {'us a request':>13} {'floor us':>9}")
    for num_running in (1, 16, 64, 256, 1000):
        for mix, churn in (("steady", 0.0), ("10 % arrive and finish", 0.1)):
            step, floor = measure(num_running, churn)
            rows.append({"running": num_running, "mix": mix, "step_us": step, "floor_us": floor})
            print(f"{num_running:>8} {mix:>22} {step:>10.0f} {step / num_running:>13.2f} {floor:>9.1f}")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
