"""What a loaded engine is, in the lines that people look for at start-up.

Owns their wording. Called by `serve` and `chat`.
"""

from hybridserve.config import format_nbytes as nbytes
from hybridserve.engine.messages import EngineInfo, GroupInfo


def describe(info: EngineInfo) -> list[str]:
    """One fact a line: model, layers, backends, weights, caches, users, and what is off."""
    return [
        f"model: {info.architecture}, {info.num_parameters / 1e6:,.1f} M parameters, {info.dtype} on {info.device}",
        f"layers: {info.layer_plan}",
        *_backends(info),
        f"weights: {nbytes(info.weights_nbytes)}, loaded in {info.load_s:.1f} s",
        *_cache_plan(info),
        f"users at once: {_users(info)} (at most {info.max_num_seqs} run, {info.max_num_queued_reqs} wait)",
        *(f"off: {feature}: {reason}" for feature, reason in sorted(info.features_off.items())),
    ]


def _backends(info: EngineInfo) -> list[str]:
    """A line for each backend and reason, with the operations that have it."""
    chosen: dict[str, list[str]] = {}
    for operation, choice in sorted(info.backends.items()):
        chosen.setdefault(choice, []).append(operation)
    return [f"backend {choice}: {', '.join(operations)}" for choice, operations in chosen.items()]


def _cache_plan(info: EngineInfo) -> list[str]:
    total = info.num_superpages * info.superpage_nbytes
    return [
        f"caches: {nbytes(total)} in {info.num_superpages} superpages of {nbytes(info.superpage_nbytes)}, "
        f"{info.padding_percent:.2f} % of it padding; blocks of {info.block_size} tokens, match unit {info.match_unit}",
        f"a sequence needs {nbytes(info.kv_nbytes_per_token)} a token and {nbytes(info.state_nbytes_per_sequence)} of state",
        *(_group(group) for group in info.groups),
    ]


def _group(group: GroupInfo) -> str:
    window = f", window {group.window}" if group.window is not None else ""
    return (
        f"  {group.kind} group of {len(group.layers)} layers: pages of {nbytes(group.page_nbytes)}, "
        f"{group.pages_per_superpage} in a superpage{window}"
    )


def _users(info: EngineInfo) -> str:
    return ", ".join(f"{users:,} with {int(length):,} tokens" for length, users in info.users_at.items())
