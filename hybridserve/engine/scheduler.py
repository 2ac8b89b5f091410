"""Which requests compute how many tokens in the next step.

Owns the queue of waiting requests, the seats of running ones and the order among them. Asks `KVCacheCoordinator` for memory and
knows pages only through it. No prefill or decode phase: a request has tokens that are known and not yet computed, one for a
decoding request, many for a fresh one, and a step computes as many as the budget leaves. No torch.
"""

import heapq
import math
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import msgspec
import numpy as np
from numpy.typing import NDArray

from hybridserve.engine.order import CANDIDATES, StartOrder
from hybridserve.engine.seats import MIN_SHARED, NO_TOKEN, Awaited, Ints, Running, Seats
from hybridserve.engine.suspects import Suspects
from hybridserve.errors import OverloadedError, RequestError
from hybridserve.kv.coordinator import KVCacheCoordinator, StepMemory
from hybridserve.kv.lookup import Match
from hybridserve.request import CacheHints, EngineRequest, Explanation, FinishReason, check_request

#: Waiting requests that are compared with the running ones before it is their turn.
_LOOK_AHEAD = 256


@dataclass(frozen=True)
class Limits:
    """What one engine takes at once, and in which order: `starts_in_order` is that of arrival, whatever requests cost."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_queued_reqs: int
    vocab_size: int
    starts_in_order: bool = False
    short_prompt_share: float = 0.5  # of a step's tokens for prompts, what those with least left get; the others in order


@dataclass(frozen=True)
class Plan:
    """Tokens to compute in one step. Arrays run over the sequences of the batch."""

    seats: Ints
    starts: Ints  # tokens computed before
    counts: Ints  # tokens to compute now, at least 1
    samples: NDArray[np.bool_]  # whether the last known token is among them, so that a next one is chosen
    memory: StepMemory
    seated: tuple[int, ...] = ()  # seats that were taken for this step

    @property
    def num_tokens(self) -> int:
        return int(self.counts.sum())


@dataclass(frozen=True)
class Ended:
    """A request that has just ended, and why."""

    running: Running
    reason: FinishReason
    stop_token_id: int | None = None
    error: str | None = None


@dataclass
class Counters:
    """Totals since start."""

    num_steps: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    prompt_tokens_by_reason: Counter[str] = field(default_factory=Counter)  # adds up to num_prompt_tokens


@dataclass(frozen=True)
class _Alone:
    """A request that all memory belongs to until it has computed `until` tokens."""

    running: Running
    until: int


class Scheduler:
    """Running requests first, then waiting ones as `order.py` chooses; preempts the youngest when memory runs out."""

    def __init__(self, limits: Limits, coordinator: KVCacheCoordinator) -> None:
        self.limits = limits
        self.seats = Seats(limits.max_num_seqs, limits.max_model_len)
        self.counters = Counters()
        self._coordinator = coordinator
        self._waiting: deque[Running] = deque()
        self._order: Ints = np.zeros(0, np.int64)  # seats in order of admission
        self._by_id: dict[str, Running] = {}
        self._deadlines: list[tuple[float, int, str]] = []  # with the arrival: ids may be used again
        self._num_arrived = 0
        # Set when memory did not suffice for the head of the queue: trying again is in vain until something is given back.
        self._is_blocked = False
        self._start_order = StartOrder(self._match)
        self._suspects = Suspects()
        self._alone: _Alone | None = None
        self._failed: list[Ended] = []
        self._prefilling: dict[tuple[str, bytes], dict[int, Running]] = {}  # running requests by how they start
        self._seated: list[int] = []

    @property
    def num_running(self) -> int:
        return len(self._order)

    @property
    def running_seats(self) -> Ints:
        """Seats in order of admission."""
        return self._order

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting) or len(self._order) > 0 or bool(self._failed)

    # -- arrivals and departures ----------------------------------------------------------------------------------------

    def add(self, request: EngineRequest, now: float | None = None) -> None:
        """Queue a request. Raises RequestError when it can never run here, OverloadedError when the queue is full."""
        if request.request_id in self._by_id:
            raise RequestError(f"request id {request.request_id!r} is in use; choose another", param="request_id")
        check_request(request, vocab_size=self.limits.vocab_size, max_model_len=self.limits.max_model_len)
        most = self.limits.max_num_seqs + self.limits.max_num_queued_reqs
        if len(self._by_id) >= most:
            raise OverloadedError(f"{len(self._by_id)} requests run or wait, the limit is {most}; try again later")
        sampling = request.sampling
        num_prompt = len(request.prompt_token_ids)
        limit = self.limits.max_model_len if sampling.max_tokens is None else num_prompt + sampling.max_tokens
        # A tokenizer may name ends that the model has no logits for: they never come.
        eos_ids = tuple(one for one in request.eos_token_ids if 0 <= one < self.limits.vocab_size)
        stop_ids = sampling.stop_token_ids + (() if sampling.ignore_eos else eos_ids)
        running = Running(request, self._num_arrived, min(limit, self.limits.max_model_len), stop_ids)
        self._num_arrived += 1
        self._by_id[request.request_id] = running
        self._waiting.append(running)
        self._start_order.arrive(running)
        if request.deadline_s is not None:
            start = time.monotonic() if now is None else now
            heapq.heappush(self._deadlines, (start + request.deadline_s, running.arrival, request.request_id))

    def abort(self, request_ids: Iterable[str], reason: FinishReason = "abort") -> list[Ended]:
        """End these requests and free what they hold. Ids that are not known have ended already."""
        found = [self._by_id[request_id] for request_id in dict.fromkeys(request_ids) if request_id in self._by_id]
        for running in found:
            if running.seat is None:
                self._waiting.remove(running)
                self._forget(running)
        self._leave([running.seat for running in found if running.seat is not None], keep=True)
        return [Ended(running, reason) for running in found]

    def expire(self, now: float) -> list[Ended]:
        """End requests whose deadline has passed."""
        late = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, arrival, request_id = heapq.heappop(self._deadlines)
            running = self._by_id.get(request_id)
            if running is not None and running.arrival == arrival:
                late.append(request_id)
        return self.abort(late, reason="timeout") if late else []

    def _leave(self, seats: list[int], *, keep: bool) -> list[Running]:
        """Free seats for good. With `keep` their text and states stay as cache entries."""
        left = []
        for seat in seats:
            running = self._give_back(seat, keep=keep)
            self._forget(running)
            self._start_order.leave(running, self._waiting)
            left.append(running)
        if left:
            self._order = self._without(seats)
            self._is_blocked = False
        return left

    def _without(self, seats: Sequence[int]) -> Ints:
        """The running seats, in order, but for these."""
        is_left = np.ones(self.limits.max_num_seqs, bool)
        is_left[seats] = False
        return self._order[is_left[self._order]]

    def _give_back(self, seat: int, *, keep: bool) -> Running:
        left = self._coordinator.release(seat, int(self.seats.num_computed[seat]), keep=keep)
        running = self.seats.give_back(seat)
        running.left = left
        del self._prefilling[running.start][seat]
        if not self._prefilling[running.start]:
            del self._prefilling[running.start]
        return running

    def _forget(self, running: Running) -> None:
        del self._by_id[running.request.request_id]
        self._suspects.clear(running)
        if self._alone is not None and self._alone.running is running:
            self._alone = None
        self._is_blocked = False

    # -- planning -------------------------------------------------------------------------------------------------------

    def plan(self) -> Plan | None:
        """The next step, with its memory taken; None when nothing can run."""
        self._seated = []
        counts = self._share_budget()
        preempted = self._reserve(counts)
        if preempted:
            keep = ~np.isin(self._order, preempted)
            self._order, counts = self._order[keep], counts[keep]
        else:
            counts = self._hand_out_rest(self._admit(counts))
        chosen = np.flatnonzero(counts)
        if not len(chosen):
            return None
        seats, counts = self._order[chosen], counts[chosen]
        starts = self.seats.num_computed[seats]
        memory = self._coordinator.address(seats, starts, counts)
        return Plan(seats, starts, counts, starts + counts == self.seats.num_tokens[seats], memory, tuple(self._seated))

    def _share_budget(self) -> Ints:
        """Tokens for each running seat. One for each that decodes; of what is left, a share to the prompts with least left.

        What remains of that share stays for waiting requests that have less to compute than a running prompt; all else goes to
        prompts in order of admission, so that a long one comes forward, too.
        """
        pending = self._pending()
        counts = np.where(pending == 1, 1, 0)
        left = self.limits.max_num_batched_tokens - int(counts.sum())
        share = 0 if self.limits.starts_in_order else int(left * self.limits.short_prompt_share)
        prompts = np.flatnonzero(pending > 1)
        shortest, held = self._least_waiting(len(prompts)), 0
        for at in prompts[np.argsort(pending[prompts], kind="stable")]:
            if pending[at] > shortest:
                held = share
                break
            counts[at] = min(int(pending[at]), share)
            share, left = share - int(counts[at]), left - int(counts[at])
        return self._give_in_order(counts, pending, left - held)

    @staticmethod
    def _give_in_order(counts: Ints, pending: Ints, left: int) -> Ints:
        """The counts with `left` tokens more, to prompts in order."""
        for at in np.flatnonzero(pending > counts):
            more = min(int(pending[at] - counts[at]), left)
            counts[at] += more
            left -= more
        return counts

    def _pending(self) -> Ints:
        """Tokens that are known and not computed, for each running seat; 0 for those that have to pause."""
        pending = self.seats.num_tokens[self._order] - self.seats.num_computed[self._order]
        if (on_trial := self._suspects.on_trial) is not None:
            pending = np.where([self.seats.running[seat] in on_trial for seat in self._order.tolist()], pending, 0)
        return pending

    def _least_waiting(self, num_prompts: int) -> float:
        """Tokens to compute of the shortest request that could start now, beside so many prompts that are being computed."""
        if not num_prompts or self._is_blocked or not self.seats.num_free:
            return math.inf
        return min((one.most_to_compute for one in self._candidates()), default=math.inf)

    def _reserve(self, counts: Ints) -> list[int]:
        """Blocks for what the seats are to compute; returns the seats that had to be preempted for it."""
        ends = self.seats.num_computed[self._order] + counts
        preempted: list[int] = []
        for at in np.flatnonzero((ends > self._coordinator.room[self._order]) & (counts > 0)):
            seat = int(self._order[at])
            while seat not in preempted and not self._coordinator.reserve(seat, int(ends[at])):
                self._preempt_youngest(preempted)
        return preempted

    def _preempt_youngest(self, preempted: list[int]) -> None:
        candidates = self._order[~np.isin(self._order, preempted)]
        if (on_trial := self._suspects.on_trial) is not None:
            # Suspects that lose their place to those that pause for them would leave nothing that can run.
            paused = [seat for seat in candidates.tolist() if self.seats.running[seat] not in on_trial]
            candidates = np.array(paused, np.int64) if paused else candidates
        victim = int(candidates[np.argmax(self.seats.arrival[candidates])])
        running = self._preempt(victim)
        preempted.append(victim)
        self._is_blocked = True
        if len(self._order) - len(preempted) == 0:
            self._retry_in_empty_memory(running)

    def _preempt(self, seat: int) -> Running:
        running = self._give_back(seat, keep=True)
        self.counters.num_preemptions += 1
        self._waiting.appendleft(running)
        return running

    def _admit(self, counts: Ints) -> Ints:
        """Seat waiting requests while budget, seats and memory last. Returns the counts with theirs appended."""
        left = self.limits.max_num_batched_tokens - int(counts.sum())
        seated = self._seated
        new_counts: list[int] = []
        if not len(self._order):
            self._is_blocked = False
        # Before a running prompt has all that it can take in this step, only who has less to compute starts.
        pending = self._pending()
        shortest = min(pending[pending > counts].tolist(), default=math.inf)
        while left > 0 and self._waiting and self.seats.num_free and not self._is_blocked:
            candidates = [one for one in self._candidates() if one.most_to_compute < shortest]
            if not candidates:
                break
            running, match = self._start_order.choose(candidates[:1] if self.limits.starts_in_order else candidates)
            if self._suspects.on_trial is None and self._finds_prefix_under_way(running, match):
                continue
            count = self._open(running, match, left)
            if count is None:
                self._hold_back(running)
                counts = counts[: len(self._order)]  # who gave way to a suspect computed nothing
                continue
            self._waiting.remove(running)
            self._start_order.start()
            left -= count
            new_counts.append(count)
        self._look_ahead()
        if not seated:
            return counts
        self._order = np.concatenate([self._order, np.array(seated, np.int64)])
        return np.concatenate([counts, np.array(new_counts, np.int64)])

    def _hand_out_rest(self, counts: Ints) -> Ints:
        """Let prompts have what was held for requests that did not start after all, as far as there are blocks for it."""
        given = self._give_in_order(counts.copy(), self._pending(), self.limits.max_num_batched_tokens - int(counts.sum()))
        for at in np.flatnonzero(given > counts).tolist():
            seat = int(self._order[at])
            if not self._coordinator.reserve(seat, int(self.seats.num_computed[seat] + given[at])):
                given[at] = counts[at]
        return given

    def _candidates(self) -> list[Running]:
        """Waiting requests that may start now."""
        on_trial = self._suspects.on_trial
        if self._alone is not None and (on_trial is None or self._alone.running in on_trial):
            return [] if self._alone.running.seat is not None else [self._alone.running]
        if on_trial is not None:
            return [one for one in on_trial if one.seat is None]
        return [one for one in islice(self._waiting, CANDIDATES) if not self._still_awaits(one)]

    def _hold_back(self, running: Running) -> None:
        """Memory does not suffice for this request now; if nothing else runs, waiting would never end."""
        on_trial = self._suspects.on_trial
        if on_trial is not None and len(self._order) and not any(one.seat is not None for one in on_trial):
            # None that is seated runs until the trial is over, so the youngest of them gives way to it.
            victim = int(self._order[np.argmax(self.seats.arrival[self._order])])
            self._preempt(victim)
            self._order = self._without([victim])
        elif len(self._order) or self._seated:
            self._is_blocked = True
        else:
            self._retry_in_empty_memory(running)

    def _retry_in_empty_memory(self, running: Running) -> None:
        """What runs alone and does not fit had its pages scattered while others ran: it starts over in empty memory.

        There it fits, by the proof at start-up, until it has come past the point where memory ran out: so long nothing is
        started beside it, and it keeps nothing for others. If even so it does not fit, it ends, for waiting would never end.
        """
        if self._alone is not None and self._alone.running is running:
            self._waiting.remove(running)
            self._forget(running)
            self._failed.append(Ended(running, "error", error="cache memory does not hold this request even alone"))
            return
        self._alone = _Alone(running, running.num_known + self._coordinator.plan.block_size)
        self._coordinator.clear()

    def _match(self, running: Running) -> Match:
        request = running.request
        if request.sampling.prompt_logprobs is not None:
            return Match.nothing()  # every prompt token must pass through the model to have its log-probability
        return self._coordinator.match(running.known_tokens, request.cache.salt)

    def _still_awaits(self, running: Running) -> bool:
        """Whether the prefix that this request waits for is still being computed."""
        awaited = running.awaits
        if awaited is not None and self.seats.running[awaited.seat] is awaited.running:
            return bool(self.seats.num_computed[awaited.seat] < awaited.position)
        return False

    def _finds_prefix_under_way(self, running: Running, match: Match) -> bool:
        """Whether a request that is computing its prompt will soon have a longer prefix of this one than `match`."""
        request, tokens = running.request, running.known_tokens
        if request.sampling.prompt_logprobs is not None or running.has_waited:
            return False  # waiting once is enough: what it waited for may have been evicted again
        for other in self._prefilling.get(running.start, {}).values():
            seat = other.seat
            if seat is None or self.seats.num_computed[seat] >= self.seats.num_prompt[seat]:
                continue
            length = min(len(tokens) - 1, int(self.seats.num_tokens[seat]))
            different = np.flatnonzero(tokens[:length] != self.seats.tokens[seat, :length])
            shared = int(different[0]) if len(different) else length
            is_worth_it = shared - match.num_tokens >= MIN_SHARED
            if is_worth_it and self._coordinator.promise(seat, shared, int(self.seats.num_computed[seat])):
                running.awaits, running.has_waited = Awaited(other, seat, shared), True
                return True
        return False

    def _look_ahead(self) -> None:
        """Ask running requests for the prefixes that newly arrived ones share with them, before they have passed that point."""
        for running in islice(self._waiting, _LOOK_AHEAD):
            if not running.was_examined:
                running.was_examined = True
                self._finds_prefix_under_way(running, Match.nothing())

    def _open(self, running: Running, match: Match, budget: int) -> int | None:
        """Seat a request on what of it is cached. Returns the tokens to compute now, None when memory does not suffice.

        A hit may need a page or two more than a cold start. With nothing beside it that could give them back, it starts cold.
        """
        is_alone = not (len(self._order) or self._seated)
        for one in (match, match.without_hit()) if is_alone and match.num_tokens else (match,):
            count = self._open_on(running, one, budget)
            if count is not None:
                return count
        return None

    def _open_on(self, running: Running, match: Match, budget: int) -> int | None:
        num_tokens, start = running.num_known, match.num_tokens
        if not self._coordinator.could_open(num_tokens, match):
            return None
        seat = self.seats.take(running)
        count = min(num_tokens - start, budget)
        row, hints = self.seats.tokens[seat], running.request.cache
        if self._alone is not None and self._alone.running is running:
            hints = msgspec.structs.replace(hints, no_store=True)
        opened = self._coordinator.open(seat, row, num_tokens, match, hints, running.left)
        if opened and not self._coordinator.reserve(seat, start + count):
            self._coordinator.release(seat, 0, keep=False)
            opened = False
        if not opened:
            self.seats.give_back(seat)
            return None
        running.awaits = None  # who was waited for need not be remembered
        self.seats.num_computed[seat] = start
        self._seated.append(seat)
        self._prefilling.setdefault(running.start, {})[seat] = running
        if running.explanation is None:
            self._explain(running, match)
        return count

    def _explain(self, running: Running, match: Match) -> None:
        """Note, when a request first runs, what was reused and why not more."""
        explanation = self._coordinator.explain(running.known_tokens, match, running.request.cache)
        running.explanation, running.num_cached = explanation, match.num_tokens
        self.counters.num_prompt_tokens += explanation.num_prompt
        self.counters.num_cached_tokens += match.num_tokens
        self.counters.prompt_tokens_by_reason.update(explanation.tokens)

    def explain(self, tokens: list[int], hints: CacheHints) -> Explanation:
        """What a prompt would hit now, without running it."""
        array = np.array([token if 0 <= token < self.limits.vocab_size else NO_TOKEN for token in tokens], np.int32)
        return self._coordinator.explain(array, self._coordinator.match(array, hints.salt), hints)

    # -- results --------------------------------------------------------------------------------------------------------

    def commit(
        self,
        plan: Plan,
        sampled: Ints,
        failed: NDArray[np.bool_] | None = None,
        barred: NDArray[np.bool_] | None = None,
    ) -> list[Ended]:
        """The step is done. `sampled` has a token for each sequence that samples; `failed` marks those whose logits are bad.

        `barred` marks those whose own parameters leave no token. Publishes what was written, appends the tokens and returns the
        requests that ended.
        """
        seats = plan.seats[plan.samples]
        nobody = np.zeros(len(seats), bool)
        failed, barred = nobody if failed is None else failed, nobody if barred is None else barred
        for seat in seats[failed].tolist():
            self._coordinator.distrust(seat)
        self._coordinator.commit(plan.seats, plan.starts, plan.counts)
        self.seats.num_computed[plan.seats] = plan.starts + plan.counts
        at = self.seats.num_tokens[seats]
        self.seats.tokens[seats, at] = sampled
        self.seats.num_tokens[seats] = at + 1
        self._start_order.compute(plan.num_tokens)
        self.counters.num_steps += 1
        self.counters.num_generated_tokens += len(seats)
        self._clear_who_got_past()
        return self._end_bad(seats, failed, barred) + self._end_finished(seats, sampled, failed | barred)

    def _clear_who_got_past(self) -> None:
        """Let others run again beside those that have come past the point where a pass failed, or memory ran out."""

        def has_computed(running: Running, num_tokens: int) -> bool:
            return running.seat is not None and bool(self.seats.num_computed[running.seat] >= num_tokens)

        for running, target in [*(self._suspects.on_trial or {}).items()]:
            if has_computed(running, target):
                self._suspects.clear(running)
                self._is_blocked = False
        if self._alone is not None and has_computed(self._alone.running, self._alone.until):
            self._alone = None

    def _end_bad(self, seats: Ints, failed: NDArray[np.bool_], barred: NDArray[np.bool_]) -> list[Ended]:
        message = "the model produced NaN or infinite logits for this request; its cache entries were dropped"
        ended = [Ended(running, "error", error=message) for running in self._leave(seats[failed].tolist(), keep=False)]
        message = "logit_bias, penalties and min_tokens leave this request no token to choose; allow one that is no stop token"
        barred = barred & ~failed
        return ended + [Ended(running, "error", error=message) for running in self._leave(seats[barred].tolist(), keep=True)]

    def _end_finished(self, seats: Ints, sampled: Ints, bad: NDArray[np.bool_]) -> list[Ended]:
        stopped = (self.seats.stop_ids[seats] == sampled[:, None]).any(axis=1) & ~bad
        full = (self.seats.num_tokens[seats] >= self.seats.limit[seats]) & ~bad
        ended = []
        done = np.flatnonzero(stopped | full)
        if len(done):
            left = self._leave(seats[done].tolist(), keep=True)
            for running, index in zip(left, done.tolist(), strict=True):
                stop_id = int(sampled[index]) if stopped[index] else None
                ended.append(Ended(running, "stop" if stopped[index] else "length", stop_token_id=stop_id))
        return ended

    def take_failed(self) -> list[Ended]:
        """Requests that planning had to end."""
        failed, self._failed = self._failed, []
        return failed

    def fail(self, plan: Plan, error: str) -> list[Ended]:
        """The step itself failed: nothing that it wrote is published. Returns the request to blame, if that is known.

        A failed pass has changed running states already, so its sequences give their memory back and resume from what was kept
        before, as after a preemption, in halves. A sequence that fails alone ends.
        """
        self._coordinator.abandon()
        seats, ends = plan.seats.tolist(), (plan.starts + plan.counts).tolist()
        if len(seats) == 1:
            return [Ended(running, "error", error=error) for running in self._leave(seats, keep=False)]
        accused = {self._give_back(seat, keep=False): end for seat, end in zip(seats, ends, strict=True)}
        self._order = self._without(seats)
        self._waiting.extendleft(reversed(accused))
        self._suspects.accuse(accused)
        self._is_blocked = False
        return []

    def check(self) -> None:
        """Assert that seats and memory agree."""
        self._coordinator.check()
        seated = [seat for seat, running in enumerate(self.seats.running) if running is not None]
        assert sorted(self._order.tolist()) == seated, f"running order {self._order.tolist()} is not the seats {seated}"
        assert len(self._by_id) == len(seated) + len(self._waiting), "requests are lost or doubled"
