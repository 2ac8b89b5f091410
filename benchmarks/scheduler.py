"""Host cost of a scheduling step: plan + commit with stub outputs, no model.

    python -m benchmarks.scheduler [--json FILE]

A hybrid of one attention and three state groups, and beside it a model of attention alone, at 1 to 1,000 running requests, in two
mixes: steady decode, and 10 % of the requests finishing and as many arriving at every step. Memory is full, so that every arrival
evicts. An event is an arrival with the finish that makes room for it: lookup, seats, slots and blocks, two checkpoints written
and two evicted. The floor is an empty numpy pass over the same arrays: what a step would cost if nothing ever happened. Both
models run in turn, so that whatever else the machine does falls on both; medians of the steps after a warm-up.
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

HYBRID: list[dict[str, Spec]] = [
    {"kv": PagedSpec((TensorSpec("k", (2, 64), "bfloat16"), TensorSpec("v", (2, 64), "bfloat16")))},
    {"state": StateSpec((TensorSpec("s", (16, 64, 64), "float32"),))},
    {"state": StateSpec((TensorSpec("s", (8, 64, 64), "float32"),))},
    {"state": StateSpec((TensorSpec("c", (3, 512), "bfloat16"),))},
]
MODELS = {"hybrid": HYBRID, "attention alone": HYBRID[:1]}
VOCAB = 32_000
PROMPT = 64
STEPS, WARM_UP = 120, 20


class Arm:
    """One model's scheduler, full of running requests."""

    def __init__(self, layers: list[dict[str, Spec]], num_running: int, churn: float) -> None:
        draft = plan_cache(layers, 2**60)
        superpages = draft.superpages_needed(2048, num_running) + 64
        plan = plan_cache(layers, superpages * draft.superpage_nbytes)
        coordinator = KVCacheCoordinator(plan, num_seats=num_running, max_model_len=2048)
        self.scheduler = Scheduler(Limits(2048, num_running, 100_000, 10 * num_running, VOCAB), coordinator)
        self._num_changed = int(churn * num_running)
        self._rng = np.random.default_rng(0)
        self._num_made = 0
        for _ in range(num_running):
            self.scheduler.add(self._request())

    def _request(self) -> EngineRequest:
        """A fresh prompt that shares nothing."""
        self._num_made += 1
        return EngineRequest(
            request_id=str(self._num_made),
            prompt_token_ids=self._rng.integers(0, VOCAB, PROMPT).tolist(),
            sampling=SamplingParams(max_tokens=1900, ignore_eos=True),
        )

    def step(self) -> tuple[float, float]:
        """Seconds of one step, and of the floor."""
        scheduler = self.scheduler
        arrivals = [self._request() for _ in range(self._num_changed)]
        oldest = [scheduler.seats.running[seat] for seat in scheduler.running_seats[: self._num_changed].tolist()]
        leaving = [running.request.request_id for running in oldest if running is not None]
        started = time.perf_counter()
        scheduler.abort(leaving)
        for arrival in arrivals:
            scheduler.add(arrival)
        plan = scheduler.plan()
        assert plan is not None, "there is always work"
        scheduler.commit(plan, np.full(int(plan.samples.sum()), 7, np.int64))
        between = time.perf_counter()
        floor_pass(plan.seats, scheduler)
        return between - started, time.perf_counter() - between


def measure(num_running: int, churn: float) -> dict[str, tuple[float, float]]:
    """By model, median microseconds of a step and of the floor."""
    arms = {name: Arm(layers, num_running, churn) for name, layers in MODELS.items()}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
    for _ in range(STEPS):
        for name, arm in arms.items():
            seconds[name].append(arm.step())
    return {
        name: (1e6 * statistics.median(s for s, _ in rows[WARM_UP:]), 1e6 * statistics.median(f for _, f in rows[WARM_UP:]))
        for name, rows in seconds.items()
    }


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
    print(f"{'running':>8} {'mix':>22} {'model':>16} {'step us':>9} {'us a request':>13} {'us an event':>12} {'floor us':>9}")
    for num_running in (1, 16, 64, 256, 1000):
        for mix, churn in (("steady", 0.0), ("10 % arrive and finish", 0.1)):
            num_events = int(churn * num_running)
            for model, (step, floor) in measure(num_running, churn).items():
                event = step / num_events if num_events else None
                rows.append(
                    {"running": num_running, "mix": mix, "model": model, "step_us": step, "floor_us": floor, "event_us": event}
                )
                shown = f"{event:.0f}" if event is not None else "-"
                print(
                    f"{num_running:>8} {mix:>22} {model:>16} {step:>9.0f} {step / num_running:>13.2f} {shown:>12} {floor:>9.1f}",
                    flush=True,
                )
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
