"""The engine: one model, one cache, one scheduler, and the loop body that advances them by a step.

Owns the scheduler, the runner and the sampler, and turns their results into messages. Must not know sockets or HTTP: it runs
inside the engine process (`process.py`) and inside `LLM` alike.
"""

import dataclasses
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping

import msgspec
import numpy as np
import torch

from hybridserve.backends.select import select
from hybridserve.config import EngineSettings
from hybridserve.engine.messages import EngineInfo, EngineStats, GroupInfo
from hybridserve.engine.runner import PassResult, Runner
from hybridserve.engine.sampler import Sampled, Sampler
from hybridserve.engine.scheduler import Ended, Limits, Plan, Scheduler
from hybridserve.engine.seats import Running
from hybridserve.errors import DoesNotFitError, HybridServeError, UsageError
from hybridserve.kv.arena import CachePlan, plan_cache
from hybridserve.kv.coordinator import KVCacheCoordinator
from hybridserve.kv.spec import Spec
from hybridserve.models import LoadedModel, format_layer_plan, load, resolve
from hybridserve.registry import load_plugin
from hybridserve.request import EngineRequest, RequestOutput, TokenLogprob

log = logging.getLogger(__name__)

#: Told the stage of loading and how much of it is done, from 0 to 1.
OnProgress = Callable[[str, float], None]

#: Context lengths, beside the longest, at which the plan says how many users fit.
_CONTEXT_LENGTHS = (1024, 8192)


class EngineCore:
    """Loads a model and serves requests to it, step by step. Not thread-safe: one loop owns it."""

    def __init__(self, settings: EngineSettings, on_progress: OnProgress | None = None) -> None:
        started = time.monotonic()
        progress = on_progress or (lambda stage, fraction: None)
        for path in settings.plugin:
            load_plugin(path)
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        device = _device(settings.device)
        dtype = resolve(settings.model, load_format=settings.load_format).dtype(settings.dtype)
        progress("choosing backends", 0.0)
        selection = select(device, dtype, settings.backend)
        loaded = load(settings, selection.ops, device, lambda fraction: progress("loading weights", fraction))
        plan, max_model_len = _plan(settings, loaded, device)
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
        limits = Limits(
            max_model_len=max_model_len,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=max(settings.max_num_batched_tokens, settings.max_num_seqs),
            max_num_queued_reqs=settings.max_num_queued_reqs,
            vocab_size=loaded.model.info.vocab_size,
        )
        self._scheduler = Scheduler(limits, self._coordinator)
        self._sampler = Sampler(settings.max_num_seqs, limits.vocab_size, settings.seed)
        self._prompt_logprobs: dict[str, list[TokenLogprob | None]] = {}
        backends = {operation: str(choice) for operation, choice in selection.reasons.items()}
        self.info = self._describe(settings, plan, backends, device, time.monotonic() - started)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

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
        """Advance by one pass. A failure inside it ends the requests of that pass and no other."""
        ended = self._scheduler.expire(time.monotonic())
        plan = self._scheduler.plan()
        ended += self._scheduler.take_failed()
        outputs = [self._last_output(one) for one in ended]
        if plan is None:
            return outputs
        for seat in plan.seated:
            running = self._running(seat)
            self._sampler.admit(seat, running.request.sampling, running.arrival)
        try:
            result = self._runner.run(plan, self._scheduler.seats)
            self._keep_prompt_logprobs(plan, result)
            sampled = self._sampler.sample(result.logits, plan.seats[plan.samples], self._scheduler.seats)
        except Exception as error:
            log.exception("a step of %d sequences failed", len(plan.seats))
            message = f"the engine failed in this step ({type(error).__name__}); the request was ended"
            return outputs + [self._last_output(one) for one in self._scheduler.fail(plan, message)]
        return outputs + self._commit(plan, sampled)

    def _commit(self, plan: Plan, sampled: Sampled) -> list[RequestOutput]:
        seats = plan.seats[plan.samples].tolist()
        requests = [self._running(seat) for seat in seats]
        ended = {id(one.running): one for one in self._scheduler.commit(plan, sampled.tokens, sampled.failed)}
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
            output.explanation = running.explanation
            if running.request.sampling.prompt_logprobs is not None:
                output.prompt_logprobs = self._prompt_logprobs.pop(running.request.request_id, None)
        return output

    def _last_output(self, ended: Ended) -> RequestOutput:
        output = self._first_fields(ended.running)
        output.finish_reason, output.error = ended.reason, ended.error
        self._prompt_logprobs.pop(ended.running.request.request_id, None)
        return output

    def _keep_prompt_logprobs(self, plan: Plan, result: PassResult) -> None:
        """Log-probabilities of the prompt tokens that this chunk computed the predecessors of, for requests that want them."""
        first_row = 0
        for seat, start, count in zip(plan.seats.tolist(), plan.starts.tolist(), plan.counts.tolist(), strict=True):
            running = self._running(seat)
            num_top = running.request.sampling.prompt_logprobs
            if num_top is not None and start < len(running.request.prompt_token_ids):
                self._add_prompt_logprobs(running, result, first_row, start, count, num_top)
            first_row += count

    def _add_prompt_logprobs(self, running: Running, result: PassResult, row: int, start: int, count: int, num_top: int) -> None:
        request = running.request
        following = np.array(request.prompt_token_ids[start + 1 : start + count + 1], np.int64)
        known = self._prompt_logprobs.setdefault(request.request_id, [None])
        # A preempted request computes its prompt again; what is known already stays.
        if running.was_announced or len(known) > start + 1:
            return
        known += self._runner.prompt_logprobs(result.hidden[row : row + len(following)], following, num_top)

    def _running(self, seat: int) -> Running:
        running = self._scheduler.seats.running[seat]
        assert running is not None, f"seat {seat} of a plan is empty"
        return running

    def stats(self) -> EngineStats:
        """Gauges and counters as they are now."""
        counters, usage = self._scheduler.counters, self._coordinator.usage()
        return msgspec.convert(
            {
                "num_running": self._scheduler.num_running,
                "num_waiting": self._scheduler.num_waiting,
                **dataclasses.asdict(counters),
                **usage,
            },
            EngineStats,
        )

    def check(self) -> None:
        """Assert that memory and requests are accounted for (tests, and the engine when idle)."""
        self._scheduler.check()

    def _describe(
        self, settings: EngineSettings, plan: CachePlan, backends: Mapping[str, str], device: torch.device, load_s: float
    ) -> EngineInfo:
        limits, model, report = self._scheduler.limits, self._loaded.model, self._loaded.report
        lengths = sorted({*(n for n in _CONTEXT_LENGTHS if n < limits.max_model_len), limits.max_model_len})
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
            groups=[
                GroupInfo(
                    kind=group.kind,
                    layers=list(group.layers),
                    page_nbytes=group.page_nbytes,
                    natural_nbytes=group.natural_nbytes,
                    pages_per_superpage=group.pages_per_superpage,
                    window=group.window,
                )
                for group in plan.groups
            ],
            users_at={str(n): min(plan.users_at(n), limits.max_num_seqs) for n in lengths},
            features_off={} if settings.enable_prefix_caching else {"prefix_caching": "disabled_by_flag"},
            max_num_queued_reqs=limits.max_num_queued_reqs,
        )


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no CUDA device; use --device cpu, or install a CUDA build of torch")
    return torch.device(name)


def _plan(settings: EngineSettings, loaded: LoadedModel, device: torch.device) -> tuple[CachePlan, int]:
    """The cache plan for the memory at hand, and the longest context: as asked for, or as much of the model's own as fits."""
    specs = loaded.model.cache_specs()
    longest = settings.max_model_len or loaded.model.info.max_positions
    chunk = max(settings.max_num_batched_tokens, settings.max_num_seqs)
    nbytes = settings.kv_cache_memory
    if nbytes is None:
        nbytes = min(int(_free_nbytes(device) * settings.kv_cache_share), _most_useful_nbytes(specs, settings, longest, chunk))
    plan = plan_cache(specs, nbytes, block_size=settings.block_size, max_chunk=chunk)
    fits = plan.longest_sequence(longest)
    if fits < 2 or (settings.max_model_len is not None and fits < longest):
        needed = plan_cache(specs, 2**60, block_size=settings.block_size, max_chunk=chunk).superpages_needed(longest)
        raise DoesNotFitError(
            f"one sequence of {longest:,} tokens needs {needed * plan.superpage_nbytes:,} bytes of cache, {nbytes:,} are there: "
            f"lower --max-model-len to {fits:,} or raise --kv-cache-memory"
        )
    if fits < longest:
        log.warning("max_model_len is %d, not the model's %d: that is what %d bytes of cache hold", fits, longest, nbytes)
    return plan, fits


def _most_useful_nbytes(specs: list[dict[str, Spec]], settings: EngineSettings, longest: int, chunk: int) -> int:
    """Bytes beyond which more cache could not be used: every seat at full length, twice over for what is kept for hits."""
    unlimited = plan_cache(specs, 2**60, block_size=settings.block_size, max_chunk=chunk)
    return max(1, 2 * unlimited.superpages_needed(longest, settings.max_num_seqs)) * unlimited.superpage_nbytes


def _free_nbytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _fingerprint(loaded: LoadedModel, plan: CachePlan) -> str:
    """What must be equal for cache entries to mean the same: the config, the dtype and the layout of the caches."""
    parts = [loaded.folder.config, str(loaded.model.dtype), [repr(group.spec) for group in plan.groups], plan.block_size]
    return hashlib.sha256(msgspec.json.encode(parts, order="sorted")).hexdigest()
