"""How much cache an engine makes of the memory it has, and what that holds: the one place for engine and `check-model`.

Owns the choice of the device, the bytes given to caches, the longest context that follows, and the figures that
`EngineInfo` and a report share. Must not know requests or weights: it is told how many bytes are free. Called by `core.py`
and by `check/`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from hybridserve.config import EngineSettings
from hybridserve.engine.host_memory import available_nbytes
from hybridserve.engine.messages import GroupInfo
from hybridserve.errors import DoesNotFitError, UsageError
from hybridserve.kv.arena import CachePlan, plan_cache
from hybridserve.kv.spec import Spec

#: Context lengths, beside the longest, at which it is told how many users fit.
CONTEXT_LENGTHS = (1024, 8192, 32768)
#: Tokens of the shortest context: one of a prompt and one of its answer.
_SHORTEST = 2
#: More than any machine has: for what a plan would need if memory did not matter.
_UNLIMITED_NBYTES = 2**60


@dataclass(frozen=True)
class Sizing:
    """The caches of an engine."""

    plan: CachePlan
    max_model_len: int  # as asked for, or as much of the model's own as fits
    wanted_len: int  # what was asked for, or the model's own
    granted_nbytes: int  # what caches may take; the plan takes less where so many seats could not use it


@dataclass(frozen=True)
class Capacity:
    """What fits at one context length."""

    users: int  # sequences of this length that run at once
    limit: str  # what keeps it from being one more: "max_num_seqs", "paged_cache" or "states"
    memory_users: int  # sequences that memory alone would hold, were there seats for them


def choose_device(name: str) -> torch.device:
    """The device of a setting: "auto" takes CUDA where there is one. Raises UsageError."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no CUDA device; use --device cpu, or install a CUDA build of torch")
    return torch.device(name)


def free_nbytes(device: torch.device) -> int:
    """Bytes that this process can still take on a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_nbytes()


def size_cache(settings: EngineSettings, specs: Sequence[Mapping[str, Spec]], max_positions: int, free: int) -> Sizing:
    """Plan the caches that layers with these specs get when `free` bytes are left beside the weights.

    `max_positions` is the longest context of the model. Raises UsageError when more is asked for, and DoesNotFitError with what
    one sequence needs.
    """
    if settings.max_model_len is not None and settings.max_model_len > max_positions:
        raise UsageError(
            f"--max-model-len is {settings.max_model_len:,}, but the model's own limit is {max_positions:,} tokens, beyond which "
            "it was not trained; lower it"
        )
    longest, chunk = settings.max_model_len or max_positions, longest_chunk(settings)
    granted = nbytes = settings.kv_cache_memory or int(free * settings.kv_cache_share)
    if settings.kv_cache_memory is None:
        nbytes = min(granted, _most_useful_nbytes(specs, settings, longest))
    plan = plan_cache(specs, nbytes, block_size=settings.block_size, max_chunk=chunk)
    fits = plan.longest_sequence(longest)
    if fits < _SHORTEST or (settings.max_model_len is not None and fits < longest):
        unlimited = unlimited_plan(settings, specs)
        needed, least = (unlimited.superpages_needed(n) * plan.superpage_nbytes for n in (longest, _SHORTEST))
        raise DoesNotFitError(
            f"one sequence of {longest:,} tokens needs {needed:,} bytes of cache, {nbytes:,} are there; "
            + (f"lower --max-model-len to {fits:,} or " if fits >= _SHORTEST else "")
            + f"raise --kv-cache-memory to {needed:,}"
            + (f", or to at least {least:,} and lower --max-model-len" if fits < _SHORTEST else "")
        )
    return Sizing(plan, fits, longest, granted)


def longest_chunk(settings: EngineSettings) -> int:
    """Most tokens of one sequence in a pass."""
    return max(settings.max_num_batched_tokens, settings.max_num_seqs)


def unlimited_plan(settings: EngineSettings, specs: Sequence[Mapping[str, Spec]]) -> CachePlan:
    """The division of memory without a bound on it: for pages, groups and what a sequence needs."""
    return plan_cache(specs, _UNLIMITED_NBYTES, block_size=settings.block_size, max_chunk=longest_chunk(settings))


def _most_useful_nbytes(specs: Sequence[Mapping[str, Spec]], settings: EngineSettings, longest: int) -> int:
    """Bytes beyond which more cache could not be used: every seat at full length, twice over for what is kept for hits."""
    unlimited = unlimited_plan(settings, specs)
    return max(1, 2 * unlimited.superpages_needed(longest, settings.max_num_seqs)) * unlimited.superpage_nbytes


def capacity_at(sizing: Sizing, num_tokens: int, max_num_seqs: int) -> Capacity:
    """How many sequences of `num_tokens` run at once, and which limit binds."""
    plan = sizing.plan
    users = plan.users_at(num_tokens)
    granted = replace(plan, num_superpages=max(plan.num_superpages, sizing.granted_nbytes // plan.superpage_nbytes))
    alone = granted.users_at(num_tokens)
    if users >= max_num_seqs:
        return Capacity(max_num_seqs, "max_num_seqs", alone)
    # Of the superpages that one user more would need, the kind that takes most.
    taken = {
        kind: sum(plan.superpages_of(group, num_tokens, users + 1) for group in groups)
        for kind, groups in (("paged_cache", plan.paged), ("states", plan.states))
    }
    return Capacity(users, max(taken, key=lambda kind: taken[kind]), alone)


def capacities(sizing: Sizing, max_num_seqs: int) -> dict[int, Capacity]:
    """`capacity_at` of every length in CONTEXT_LENGTHS that is possible, and of the longest."""
    lengths = sorted({*(n for n in CONTEXT_LENGTHS if n < sizing.max_model_len), sizing.max_model_len})
    return {n: capacity_at(sizing, n, max_num_seqs) for n in lengths}


def describe_groups(plan: CachePlan) -> list[GroupInfo]:
    """The cache groups as messages."""
    return [
        GroupInfo(
            kind=group.kind,
            layers=list(group.layers),
            page_nbytes=group.page_nbytes,
            natural_nbytes=group.natural_nbytes,
            pages_per_superpage=group.pages_per_superpage,
            window=group.window,
        )
        for group in plan.groups
    ]
