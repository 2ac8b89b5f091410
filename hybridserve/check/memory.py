"""The memory section: what weights, text and states take, and how many users that leaves room for.

Owns the wording and the order of these findings. The figures are `engine/sizing.py`'s, which the engine uses as well. Called by
`checker.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from hybridserve.check.report import Finding, Memory, failed, passed, warned
from hybridserve.check.target import Target
from hybridserve.config import EngineSettings, format_nbytes
from hybridserve.engine.sizing import Capacity, Sizing, capacities, describe_groups, size_cache, unlimited_plan
from hybridserve.errors import DoesNotFitError
from hybridserve.kv.arena import CachePlan
from hybridserve.models import CausalLM
from hybridserve.models.loader import MatchedWeights, host_parameters


@dataclass(frozen=True)
class _Weights:
    num_parameters: int
    nbytes: int
    host_nbytes: int  # of those, tables that stay in the host's memory
    taken_nbytes: int  # of the target's memory


def check_memory(
    model: CausalLM, settings: EngineSettings, target: Target, matched: MatchedWeights | None = None
) -> tuple[list[Finding], Memory]:
    """All findings about memory, and the figures. When something does not fit, the figures are those of the layout alone.

    `matched`: the weights that will be loaded, where their headers are known.
    """
    weights = _weigh(model, settings, target, matched)
    specs = model.cache_specs()
    plan = unlimited_plan(settings, specs)
    findings = [_check_weights(weights, target), *_check_layout(plan)]
    free = target.memory_nbytes - weights.taken_nbytes
    try:
        if free <= 0:
            return findings, _figures(weights, target, plan, None, {})
        sizing = size_cache(settings, specs, model.info.max_positions, free)
        _check_total(sizing, free, target)
    except DoesNotFitError as error:
        return [*findings, failed("memory.cache", error)], _figures(weights, target, plan, None, {})
    fitting = capacities(sizing, settings.max_num_seqs)
    findings += [_check_cache(sizing, settings), *(_users(length, one, settings) for length, one in fitting.items())]
    return findings, _figures(weights, target, sizing.plan, sizing, fitting)


def device_weights_nbytes(model: CausalLM, matched: MatchedWeights | None) -> int:
    """Bytes of weights that a device holds which is not the host itself."""
    nbytes = _parameter_nbytes(model, matched)
    return sum(nbytes.values()) - sum(nbytes[name] for name in host_parameters(model))


def _parameter_nbytes(model: CausalLM, matched: MatchedWeights | None) -> Mapping[str, int]:
    if matched is None:
        return {name: parameter.nbytes for name, parameter in model.named_parameters()}
    return matched.parameter_nbytes(model)


def _weigh(model: CausalLM, settings: EngineSettings, target: Target, matched: MatchedWeights | None) -> _Weights:
    nbytes = _parameter_nbytes(model, matched)
    total, on_host = sum(nbytes.values()), sum(nbytes[name] for name in host_parameters(model))
    # A mapped table costs the pages that are read; random ones take memory like all other weights.
    is_free = target.device.type != "cpu" or settings.load_format != "dummy"
    count = sum(parameter.numel() for parameter in model.parameters())
    return _Weights(count, total, on_host, total - on_host if is_free else total)


def _check_weights(weights: _Weights, target: Target) -> Finding:
    there = f"{format_nbytes(target.memory_nbytes)} ({target.source})"
    text = f"{weights.num_parameters:,} parameters, {weights.nbytes:,} bytes ({format_nbytes(weights.nbytes)})"
    if weights.taken_nbytes < weights.nbytes:
        text += f", of which {format_nbytes(weights.host_nbytes)} are tables that stay in files, mapped, and are read row by row;"
        text += f" {format_nbytes(weights.taken_nbytes)}"
    if weights.taken_nbytes >= target.memory_nbytes:
        error = DoesNotFitError(
            f"{text} of weights, but {target.name} has {there} for weights and caches; take a machine with more memory or a "
            "smaller model"
        )
        return failed("memory.weights", error)
    return passed("memory.weights", f"{text} of {there}")


def _check_total(sizing: Sizing, free: int, target: Target) -> None:
    """Raise DoesNotFitError if the caches that were asked for in bytes do not fit beside the weights."""
    if sizing.plan.nbytes > free:
        raise DoesNotFitError(
            f"the caches take {sizing.plan.nbytes:,} bytes as told, but beside the weights {target.name} has {free:,}; "
            f"lower --kv-cache-memory to at most that"
        )


def _check_layout(plan: CachePlan) -> list[Finding]:
    per_token, state = plan.kv_nbytes_per_token, plan.state_nbytes_per_sequence
    worth = f", as much as {state // per_token:,} tokens of text" if per_token and state else ""
    findings = [
        passed(
            "memory.sequence",
            f"a sequence takes {per_token:,} bytes a token and {state:,} bytes of state ({format_nbytes(state)}{worth}); "
            f"a checkpoint takes {_checkpoint_nbytes(plan):,}",
        ),
        passed(
            "memory.pages",
            f"blocks of {plan.block_size} tokens, match unit {plan.match_unit}, superpages of {plan.superpage_nbytes:,} bytes, "
            f"padding {plan.padding_percent:.2f} %",
        ),
    ]
    for group in plan.groups:
        what = f"blocks of {group.block_size} tokens" if group.is_paged else "state slots"
        window = f", window {group.window}" if group.window is not None else ""
        constant = f", {group.num_constant} of them for the learned initial state" if group.num_constant else ""
        findings.append(
            passed(
                "memory.group",
                f"{len(set(group.layers))} layers: {what} of {group.page_nbytes:,} bytes, "
                f"{group.pages_per_superpage} in a superpage{window}{constant}",
            )
        )
    return findings


def _check_cache(sizing: Sizing, settings: EngineSettings) -> Finding:
    plan, longest = sizing.plan, sizing.wanted_len
    how = "as told" if settings.kv_cache_memory is not None else f"at most {settings.kv_cache_share:.0%} of what is left"
    text = f"{plan.num_superpages:,} superpages, {plan.nbytes:,} bytes ({format_nbytes(plan.nbytes)}; {how})"
    if sizing.max_model_len < longest:
        return warned(
            "memory.cache",
            f"{text}; they hold one sequence of {sizing.max_model_len:,} tokens, not the model's {longest:,}",
            "raise --kv-cache-memory or --kv-cache-share, or say the length that is needed with --max-model-len",
        )
    return passed("memory.cache", f"{text}; the longest sequence, {longest:,} tokens, fits")


def _users(length: int, capacity: Capacity, settings: EngineSettings) -> Finding:
    binding = {
        "max_num_seqs": f"--max-num-seqs {settings.max_num_seqs}; memory alone would hold {capacity.memory_users:,}",
        "paged_cache": "memory, most of it for text",
        "states": "memory, most of it for states",
    }[capacity.limit]
    text = f"{length:,} tokens each: {capacity.users:,} at once, {capacity.users * length:,} tokens; bound by {binding}"
    return passed("memory.users", text)


def _checkpoint_nbytes(plan: CachePlan) -> int:
    return sum(group.page_nbytes for group in plan.states)


def _figures(weights: _Weights, target: Target, plan: CachePlan, sizing: Sizing | None, fitting: dict[int, Capacity]) -> Memory:
    return Memory(
        num_parameters=weights.num_parameters,
        weights_nbytes=weights.nbytes,
        host_nbytes=weights.host_nbytes,
        memory_nbytes=target.memory_nbytes,
        kv_nbytes_per_token=plan.kv_nbytes_per_token,
        state_nbytes_per_sequence=plan.state_nbytes_per_sequence,
        checkpoint_nbytes=_checkpoint_nbytes(plan),
        block_size=plan.block_size,
        match_unit=plan.match_unit,
        superpage_nbytes=plan.superpage_nbytes,
        num_superpages=plan.num_superpages if sizing is not None else 0,
        cache_nbytes=plan.nbytes if sizing is not None else 0,
        padding_percent=plan.padding_percent,
        groups=describe_groups(plan),
        max_model_len=sizing.max_model_len if sizing is not None else 0,
        users_at={str(n): one.users for n, one in fitting.items()},
        tokens_at={str(n): one.users * n for n, one in fitting.items()},
        limit_at={str(n): one.limit for n, one in fitting.items()},
        memory_users_at={str(n): one.memory_users for n, one in fitting.items()},
    )
