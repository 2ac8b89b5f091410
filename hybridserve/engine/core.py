"""The engine: one model, one cache, one scheduler, and the loop body that advances them by a step.

Owns the scheduler, the runner and the sampler, and turns their results into messages. Must not know sockets or HTTP: it runs
inside the engine process (`process.py`) and inside `LLM` alike.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping

import msgspec
import numpy as np
import torch

from hybridserve.backends.select import select
from hybridserve.config import EngineSettings
from hybridserve.engine.features import features_off
from hybridserve.engine.messages import EngineInfo, EngineStats
from hybridserve.engine.runner import PassResult, Runner
from hybridserve.engine.sampler import Sampled, Sampler
from hybridserve.engine.scheduler import Ended, Limits, Plan, Scheduler
from hybridserve.engine.seats import Running
from hybridserve.engine.sizing import Sizing, capacities, choose_device, describe_groups, free_nbytes, size_cache
from hybridserve.errors import HybridServeError
from hybridserve.kv.arena import CachePlan
from hybridserve.kv.coordinator import KVCacheCoordinator
from hybridserve.models import LoadedModel, format_layer_plan, load, resolve
from hybridserve.registry import load_plugin
from hybridserve.request import CacheHints, EngineRequest, Explanation, RequestOutput, TokenLogprob

log = logging.getLogger(__name__)

#: Told the stage of loading and how much of it is done, from 0 to 1.
OnProgress = Callable[[str, float], None]


class EngineCore:
    """Loads a model and serves requests to it, step by step. Not thread-safe: one loop owns it."""

    def __init__(self, settings: EngineSettings, on_progress: OnProgress | None = None) -> None:
        started = time.monotonic()
        progress = on_progress or (lambda stage, fraction: None)
        for path in settings.plugin:
            load_plugin(path)
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        device = choose_device(settings.device)
        dtype = resolve(settings.model, load_format=settings.load_format).dtype(settings.dtype)
        progress("choosing backends", 0.0)
        selection = select(device, dtype, settings.backend)
        loaded = load(settings, selection.ops, device, lambda fraction: progress("loading weights", fraction))
        model = loaded.model
        sizing = size_cache(settings, model.cache_specs(), model.info.max_positions, free_nbytes(device))
        plan, max_model_len = sizing.plan, sizing.max_model_len
        if max_model_len < sizing.wanted_len:
            log.warning("max_model_len is %d, not the model's %d: that is what the caches hold", max_model_len, sizing.wanted_len)
        self._loaded = loaded
        self._runner = Runner(loaded.model, plan, device)
        self._coordinator = KVCacheCoordinator(
            plan,
            num_seats=settings.max_num_seqs,
            max_model_len=max_model_len,
            enable_prefix_caching=settings.enable_prefix_caching,
            policy=settings.cache_policy,
            fingerprint=_fingerprint(loaded, plan),
        )
        self._runner.fill_constant_slots(self._coordinator.constant_slots)
        limits = Limits(
            max_model_len=max_model_len,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=max(settings.max_num_batched_tokens, settings.max_num_seqs),
            max_num_queued_reqs=settings.max_num_queued_reqs,
            vocab_size=loaded.model.info.vocab_size,
            short_prompt_share=settings.short_prompt_share,
        )
        self._scheduler = Scheduler(limits, self._coordinator)
        self._sampler = Sampler(settings.max_num_seqs, limits.vocab_size, settings.seed)
        self._prompt_logprobs: dict[str, list[TokenLogprob | None]] = {}
        backends = {operation: str(choice) for operation, choice in selection.reasons.items()}
        self.info = self._describe(settings, sizing, backends, device, time.monotonic() - started)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @property
    def num_steps(self) -> int:
        """Passes that were completed since start."""
        return self._scheduler.counters.num_steps

    @property
    def num_unfinished(self) -> int:
        return self._scheduler.num_running + self._scheduler.num_waiting

    def add(self, request: EngineRequest) -> RequestOutput | None:
        """Queue a request; the answer is None, or its refusal, which is all that this request will get."""
        try:
            self._scheduler.add(request)
        except HybridServeError as error:
            return RequestOutput(
                request_id=request.request_id, finish_reason="error", error=str(error), error_type=type(error).__name__
            )
        return None

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """End requests; those that have ended already are ignored."""
        return [self._last_output(ended) for ended in self._scheduler.abort(request_ids)]

    def step(self) -> list[RequestOutput]:
        """Advance by one pass. Of a pass that fails, nothing is kept; a request that makes passes fail ends, and no other."""
        ended = self._scheduler.expire(time.monotonic())
        plan = self._scheduler.plan()
        ended += self._scheduler.take_failed()
        outputs = [self._last_output(one) for one in ended]
        if plan is None:
            return outputs
        try:
            sampled, prompt_logprobs = self._run(plan)
        except Exception as error:
            log.exception("a step of %d sequences and %d tokens failed", len(plan.seats), plan.num_tokens)
            message = f"the engine failed on this request ({type(error).__name__}); it was ended"
            return outputs + [self._last_output(one) for one in self._scheduler.fail(plan, message)]
        for request_id, found in prompt_logprobs.items():
            self._prompt_logprobs.setdefault(request_id, [None]).extend(found)
        return outputs + self._commit(plan, sampled)

    def _run(self, plan: Plan) -> tuple[Sampled, dict[str, list[TokenLogprob]]]:
        """The pass, and what is sampled of it. Changes nothing but cache memory that the plan writes to."""
        for seat in plan.seated:
            running = self._running(seat)
            self._sampler.admit(seat, running.request.sampling, running.arrival)
        result = self._runner.run(plan, self._scheduler.seats)
        prompt_logprobs = self._new_prompt_logprobs(plan, result)
        return self._sampler.sample(result.logits, plan.seats[plan.samples], self._scheduler.seats), prompt_logprobs

    def _commit(self, plan: Plan, sampled: Sampled) -> list[RequestOutput]:
        seats = plan.seats[plan.samples].tolist()
        requests = [self._running(seat) for seat in seats]
        ended = {id(one.running): one for one in self._scheduler.commit(plan, sampled.tokens, sampled.failed, sampled.barred)}
        outputs = []
        for row, (running, token) in enumerate(zip(requests, sampled.tokens.tolist(), strict=True)):
            end = ended.get(id(running))
            if end is not None and end.reason == "error":
                outputs.append(self._last_output(end))
                continue
            output = self._first_fields(running)
            output.new_token_ids = [token]
            if row in sampled.logprobs:
                output.logprobs = [sampled.logprobs[row]]
            if end is not None:
                output.finish_reason, output.stop_token_id = end.reason, end.stop_token_id
            outputs.append(output)
        return outputs

    def _first_fields(self, running: Running) -> RequestOutput:
        """An output with what is told once, if it has not been told yet."""
        output = RequestOutput(request_id=running.request.request_id)
        if not running.was_announced:
            running.was_announced = True
            output.num_cached_tokens = running.num_cached or 0
            output.explanation = running.explanation if running.request.explain else None
            if running.request.sampling.prompt_logprobs is not None:
                output.prompt_logprobs = self._prompt_logprobs.pop(running.request.request_id, None)
        return output

    def _last_output(self, ended: Ended) -> RequestOutput:
        output = self._first_fields(ended.running)
        output.finish_reason, output.error = ended.reason, ended.error
        self._prompt_logprobs.pop(ended.running.request.request_id, None)
        return output

    def _new_prompt_logprobs(self, plan: Plan, result: PassResult) -> dict[str, list[TokenLogprob]]:
        """Log-probabilities of the prompt tokens whose predecessors this pass computed, by id of the requests that want them.

        A request that was preempted computes its prompt again; what is known already is not told again.
        """
        found: dict[str, list[TokenLogprob]] = {}
        first_row = 0
        for seat, start, count in zip(plan.seats.tolist(), plan.starts.tolist(), plan.counts.tolist(), strict=True):
            running = self._running(seat)
            request, num_top = running.request, running.request.sampling.prompt_logprobs
            if num_top is not None and not running.was_announced:
                first = max(start, len(self._prompt_logprobs.get(request.request_id, [None])) - 1)
                following = np.array(request.prompt_token_ids[first + 1 : start + count + 1], np.int64)
                row = first_row + first - start
                hidden = result.hidden[row : row + len(following)]
                found[request.request_id] = self._runner.prompt_logprobs(hidden, following, num_top)
            first_row += count
        return found

    def _running(self, seat: int) -> Running:
        running = self._scheduler.seats.running[seat]
        assert running is not None, f"seat {seat} of a plan is empty"
        return running

    def explain(self, tokens: list[int], hints: CacheHints) -> Explanation:
        """What a prompt would hit now, and why not more."""
        return self._scheduler.explain(tokens, hints)

    def clear_cache(self) -> None:
        """Drop every cache entry that no running request uses."""
        self._coordinator.clear()

    def corrupt_cached_states(self) -> None:
        """Spoil everything in cache memory, as failing hardware would (a hook for tests; call it between requests)."""
        self._runner.spoil_caches()

    def stats(self) -> EngineStats:
        """Gauges and counters as they are now."""
        counters, usage = self._scheduler.counters, self._coordinator.usage()
        return msgspec.convert(
            {
                "num_running": self._scheduler.num_running,
                "num_waiting": self._scheduler.num_waiting,
                **vars(counters),
                "num_checkpoints_written": usage.pop("checkpoints_written"),
                **usage,
            },
            EngineStats,
        )

    def check(self) -> None:
        """Assert that memory and requests are accounted for (tests, and the engine when idle)."""
        self._scheduler.check()

    def _describe(
        self, settings: EngineSettings, sizing: Sizing, backends: Mapping[str, str], device: torch.device, load_s: float
    ) -> EngineInfo:
        limits, model, report = self._scheduler.limits, self._loaded.model, self._loaded.report
        plan, fitting = sizing.plan, capacities(sizing, limits.max_num_seqs)
        return EngineInfo(
            architecture=model.info.architecture,
            layer_plan=format_layer_plan(model.layer_kinds()),
            dtype=str(model.dtype).removeprefix("torch."),
            device=str(device),
            backends=dict(backends),
            num_parameters=report.num_parameters,
            weights_nbytes=report.weights_nbytes,
            load_s=load_s,
            vocab_size=limits.vocab_size,
            max_model_len=limits.max_model_len,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            block_size=plan.block_size,
            match_unit=plan.match_unit,
            superpage_nbytes=plan.superpage_nbytes,
            num_superpages=plan.num_superpages,
            padding_percent=plan.padding_percent,
            kv_nbytes_per_token=plan.kv_nbytes_per_token,
            state_nbytes_per_sequence=plan.state_nbytes_per_sequence,
            groups=describe_groups(plan),
            users_at={str(n): one.users for n, one in fitting.items()},
            limit_at={str(n): one.limit for n, one in fitting.items()},
            features_off=features_off(settings),
            max_num_queued_reqs=limits.max_num_queued_reqs,
        )


def _fingerprint(loaded: LoadedModel, plan: CachePlan) -> str:
    """What must be equal for cache entries to mean the same: the config, the dtype and the layout of the caches."""
    parts = [loaded.folder.config, str(loaded.model.dtype), [repr(group.spec) for group in plan.groups], plan.block_size]
    return hashlib.sha256(msgspec.json.encode(parts, order="sorted")).hexdigest()
