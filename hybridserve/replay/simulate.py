"""The real scheduler and cache over a trace, on a virtual clock.

Owns the virtual clock and the executor that is modelled: a pass takes what the roofline says, and chooses the tokens that the
trace says were generated. Everything else is the code that serves. Called by `cli/replay.py` and benchmarks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hybridserve.engine.scheduler import Limits, Plan, Scheduler
from hybridserve.engine.seats import Ints
from hybridserve.kv.arena import CachePlan
from hybridserve.kv.coordinator import KVCacheCoordinator
from hybridserve.kv.eviction import Policy
from hybridserve.replay.oracle import Span
from hybridserve.replay.roofline import Roofline, Work
from hybridserve.replay.trace import TraceRequest, tokens_of
from hybridserve.request import EngineRequest, SamplingParams

#: Passes that are planned at once at most.
_MAX_AHEAD = 256
#: Plans without anything to compute, one behind the other: one that ran alone may start over in empty memory.
_MOST_IDLE = 16


@dataclass(frozen=True)
class Timing:
    """Virtual seconds of one request from its arrival."""

    first_token_s: float
    end_s: float


@dataclass
class Outcome:
    """What a replay came to. Lists run over the requests of the trace."""

    hits: list[int]
    timings: list[Timing | None]
    order: list[int] = field(default_factory=list)  # requests by their first starts
    spans: dict[int, Span] = field(default_factory=dict)  # of those that have ended
    clock_s: float = 0.0
    num_computed: int = 0  # tokens, whatever for
    num_steps: int = 0
    num_preemptions: int = 0
    num_checkpoints: int = 0
    num_refused: int = 0
    prompt_tokens_by_reason: dict[str, int] = field(default_factory=dict)
    occupancy: list[tuple[float, dict[str, int]]] = field(default_factory=list)  # samples over virtual time


class Replay:
    """One run of a trace through a fresh scheduler and cache."""

    def __init__(
        self,
        trace: Sequence[TraceRequest],
        plan: CachePlan,
        roofline: Roofline,
        *,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        policy: Policy,
        enable_prefix_caching: bool = True,
        starts_in_order: bool = False,
        on_progress: Callable[[float], None] = lambda fraction: None,
    ) -> None:
        self._trace = trace
        self._roofline = roofline
        self._on_progress = on_progress
        self._coordinator = KVCacheCoordinator(
            plan,
            num_seats=max_num_seqs,
            max_model_len=max_model_len,
            enable_prefix_caching=enable_prefix_caching,
            policy=policy,
        )
        limits = Limits(max_model_len, max_num_seqs, max_num_batched_tokens, len(trace) + 1, 2**31 - 1, starts_in_order)
        self._scheduler = Scheduler(limits, self._coordinator)
        longest = max((request.answer.length for request in trace), default=1)
        self._answers: NDArray[np.int32] = np.zeros((max_num_seqs, longest + 1), np.int32)
        self._first: dict[int, float] = {}
        self._started: set[int] = set()
        self._preempted: set[int] = set()  # those that have started more than once
        self._outcome = Outcome([0] * len(trace), [None] * len(trace))

    def run(self) -> Outcome:
        """Replay the whole trace."""
        clock, arrived, num_idle, outcome, total = 0.0, 0, 0, self._outcome, len(self._trace)
        while arrived < total or self._scheduler.has_work:
            while arrived < total and self._trace[arrived].arrival_s <= clock:
                self._arrive(arrived)
                arrived += 1
                self._on_progress(arrived / total)
            next_arrival = self._trace[arrived].arrival_s if arrived < total else float("inf")
            num_passes = self._write_ahead(next_arrival - clock)
            plan = self._scheduler.plan()
            outcome.num_refused += len(self._scheduler.take_failed())
            if plan is None:
                clock = max(clock, next_arrival) if arrived < total else clock
                num_idle = 0 if arrived < total else num_idle + 1
                assert num_idle < _MOST_IDLE, f"{self._scheduler.num_waiting} requests wait, and none of them ever starts"
                continue
            num_idle = 0
            outcome.num_computed += plan.num_tokens
            pass_s = self._pass_s(plan, num_passes)
            clock += pass_s * num_passes
            self._commit(plan, clock, pass_s, num_passes)
            if outcome.num_steps % 200 == 0:
                outcome.occupancy.append((clock, self._coordinator.usage()))
            outcome.num_steps += 1
        outcome.clock_s = clock
        outcome.num_preemptions = self._scheduler.counters.num_preemptions
        outcome.prompt_tokens_by_reason = dict(self._scheduler.counters.prompt_tokens_by_reason)
        outcome.num_checkpoints = self._coordinator.num_checkpoints_written
        return outcome

    def _arrive(self, number: int) -> None:
        request = self._trace[number]
        prompt = tokens_of(*request.prompt)
        room = self._scheduler.limits.max_model_len - request.answer.length - 1
        if len(prompt) > room:
            self._outcome.num_refused += 1
            return
        sampling = SamplingParams(temperature=0.0, max_tokens=request.answer.length, ignore_eos=True)
        self._scheduler.add(EngineRequest(request_id=str(number), prompt_token_ids=prompt.tolist(), sampling=sampling))

    def _write_ahead(self, until_arrival_s: float) -> int:
        """Let running requests know tokens that they are about to generate, so that many passes are planned at once.

        Only while all decode and nobody waits: then nothing but a finish can happen between. Returns the passes that this is.
        """
        scheduler = self._scheduler
        seats = scheduler.running_seats
        state = scheduler.seats
        if not len(seats) or scheduler.num_waiting:
            return 1
        # A seat with one token to compute may have the last of its prompt to come, and its first token not yet.
        decodes = (state.num_tokens[seats] - state.num_computed[seats] == 1) & (state.num_tokens[seats] > state.num_prompt[seats])
        if not decodes.all():
            return 1
        context = int(state.num_tokens[seats].sum())
        pass_s = self._roofline.seconds(Work(len(seats), len(seats), context, context))
        left = state.limit[seats] - state.num_tokens[seats]
        within_budget = scheduler.limits.max_num_batched_tokens // len(seats)
        ahead = int(min(until_arrival_s / pass_s, left.max(), _MAX_AHEAD, within_budget)) - 1
        if ahead < 1:
            return 1
        for seat, count in zip(seats.tolist(), np.minimum(left - 1, ahead).tolist(), strict=True):
            at = int(state.num_tokens[seat])
            done = at - int(state.num_prompt[seat])
            state.tokens[seat, at : at + count] = self._answers[seat, done : done + count]
            state.num_tokens[seat] = at + count
        return ahead + 1

    def _pass_s(self, plan: Plan, num_passes: int) -> float:
        """Seconds of one of the passes that a plan stands for."""
        context = int(plan.starts.sum() + plan.counts.sum())
        pairs = int((plan.counts * plan.starts + plan.counts * (plan.counts + 1) // 2).sum())
        return self._roofline.seconds(Work(-(-plan.num_tokens // num_passes), len(plan.seats), context, pairs // num_passes))

    def _commit(self, plan: Plan, clock: float, pass_s: float, num_passes: int) -> None:
        for seat in plan.seated:
            number = self._number(seat)
            answer = tokens_of(self._trace[number].answer)
            self._answers[seat, : len(answer)] = answer
            if number in self._started:
                self._preempted.add(number)
            else:
                self._started.add(number)
                self._outcome.order.append(number)
        seats = plan.seats[plan.samples]
        numbers = self._scheduler.seats.num_tokens[seats] - self._scheduler.seats.num_prompt[seats]
        for seat in seats[numbers == 0].tolist():
            self._first.setdefault(self._number(seat), clock)
        sampled: Ints = self._answers[seats, numbers].astype(np.int64)
        passes_of = dict(zip(plan.seats.tolist(), plan.counts.tolist(), strict=True)) if num_passes > 1 else {}
        seat_of = {self._number(seat): seat for seat in seats.tolist()} if num_passes > 1 else {}
        for ended in self._scheduler.commit(plan, sampled):
            number = int(ended.running.request.request_id)
            arrival = self._trace[number].arrival_s
            # It ended in the pass of its own last token, which may lie before the last of the plan.
            early = num_passes - passes_of[seat_of[number]] if num_passes > 1 else 0
            self._outcome.hits[number] = ended.running.num_cached or 0
            self._outcome.spans[number] = Span(len(self._outcome.order), number in self._preempted)
            self._outcome.timings[number] = Timing(self._first[number] - arrival, clock - early * pass_s - arrival)

    def _number(self, seat: int) -> int:
        running = self._scheduler.seats.running[seat]
        assert running is not None, f"seat {seat} of a plan is empty"
        return int(running.request.request_id)
