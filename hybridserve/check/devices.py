"""Which known devices hold a model, and how many users: what a buyer asks before there is a machine.

Owns the comparison over the table in `target.py`; the arithmetic is the arena plan's. Called by `memory.py`.
"""

from dataclasses import replace

from hybridserve.check.report import DeviceFit, Finding, passed, warned
from hybridserve.check.target import CUDA_DEVICES
from hybridserve.config import EngineSettings, format_nbytes
from hybridserve.kv.arena import CachePlan

#: The context length at which users are compared, or the longest, where that is shorter.
USERS_AT = 8192


def fit_devices(plan: CachePlan, weights_nbytes: int, settings: EngineSettings, longest: int) -> list[DeviceFit]:
    """What each known device holds, from the smallest. `plan`: any division of the same caches; its size does not count."""
    devices = sorted({nbytes: name for name, nbytes in CUDA_DEVICES.items()}.items())
    return [_fit(name, nbytes, plan, weights_nbytes, settings, longest) for nbytes, name in devices]


def _fit(name: str, nbytes: int, plan: CachePlan, weights_nbytes: int, settings: EngineSettings, longest: int) -> DeviceFit:
    free = nbytes - weights_nbytes
    granted = settings.kv_cache_memory or int(free * settings.kv_cache_share)
    there = replace(plan, num_superpages=max(0, min(granted, free)) // plan.superpage_nbytes)
    return DeviceFit(
        device=f"cuda:{name}",
        memory_nbytes=nbytes,
        max_model_len=there.longest_sequence(longest) if free > 0 else 0,
        memory_users=there.users_at(min(USERS_AT, longest)) if free > 0 else 0,
    )


def check_devices(fits: list[DeviceFit], weights_nbytes: int, settings: EngineSettings, longest: int) -> Finding:
    """The smallest device for the whole context, and every other that holds at least something."""
    at = min(USERS_AT, longest)
    whole = [fit for fit in fits if fit.max_model_len >= longest]
    some = [fit for fit in fits if fit.max_model_len >= 2]
    if not some:
        least = -(-weights_nbytes // fits[-1].memory_nbytes)
        return warned(
            "memory.devices",
            f"no known device holds it: the weights take {format_nbytes(weights_nbytes)}, the largest, {fits[-1].device}, has "
            f"{format_nbytes(fits[-1].memory_nbytes)}; {least} of them would hold the weights, but this release serves from one",
            "take a smaller model of the family",
        )
    rows = ", ".join(f"{fit.device} {fit.memory_users:,}" for fit in some)
    first = (
        f"{whole[0].device} is the smallest known device for {longest:,} tokens"
        if whole
        else (f"no known device holds {longest:,} tokens; {some[-1].device} holds {some[-1].max_model_len:,}")
    )
    share = "" if settings.kv_cache_memory is not None else f", {settings.kv_cache_share:.0%} of what is left as cache"
    return passed("memory.devices", f"{first}; users at {at:,} tokens by memory alone{share}: {rows}")
