"""The backends and features sections: which implementation each kind of layer gets, and what this engine does not offer.

Owns these findings; the choice is `backends/select.py`'s, as at load. Called by `checker.py`.
"""

from collections.abc import Mapping, Sequence

from hybridserve.backends.offer import OPERATIONS
from hybridserve.backends.select import BACKENDS, FORESEEN, Choice, select
from hybridserve.check.report import Finding, LayerRun, passed
from hybridserve.check.target import Target
from hybridserve.config import EngineSettings
from hybridserve.engine.features import FEATURES, features_off
from hybridserve.models import CausalLM

#: Reason codes of `engine/features.py` in words.
_REASONS = {
    "not_implemented": "no engine of this release has it",
    "disabled_by_flag": "--no-enable-prefix-caching",
}
_FEATURES = {
    "prefix_caching": "a hit may end at any token",
    "chunked_prefill": "a prompt may be cut at any token",
}


def choose_backends(model: CausalLM, settings: EngineSettings, target: Target) -> dict[str, str]:
    """Operation -> the backend that it gets on the target, why, and why not those before it.

    Raises UsageError or MissingDependencyError for a forced one that fails.
    """
    if target.is_here:
        reasons = select(target.device, model.dtype, settings.backend, FORESEEN).reasons
        return {operation: str(choice) for operation, choice in reasons.items()}
    return dict.fromkeys(OPERATIONS, str(_expected(target)))


def _expected(target: Target) -> Choice:
    """The choice on a device that cannot be asked."""
    kind = target.device.type
    names = [backend.name for backend in BACKENDS if kind in backend.devices]
    refused = {one.name: f"runs on {' and '.join(one.devices)}, not on {kind}" for one in BACKENDS if kind not in one.devices}
    if len(names) == 1:
        return Choice(names[0], f"the only one there is for {kind}", refused)
    return Choice(" or ".join(names), f"the first of them that {target.name} itself agrees to", refused)


def check_backends(runs: Sequence[LayerRun], chosen: Mapping[str, str]) -> list[Finding]:
    """For each kind of layer, by what its operations are done; the rest of the model at the end."""
    kinds: dict[str, set[str]] = {}
    for run in runs:
        kinds.setdefault(run.kind, set()).update(run.operations)
    rest = {"linear", "rms_norm"}  # of the final norm and the head, which every model has
    return [_describe(kind, [o for o in OPERATIONS if o in used], chosen) for kind, used in (*kinds.items(), ("head", rest))]


def _describe(kind: str, operations: Sequence[str], chosen: Mapping[str, str]) -> Finding:
    by_choice: dict[str, list[str]] = {}
    for operation in operations:
        by_choice.setdefault(chosen[operation], []).append(operation)
    text = "; ".join(f"{', '.join(members)} by {choice}" for choice, members in by_choice.items())
    return passed(f"backends.{kind}", text or "plain torch alone: the layer calls no operation of a backend")


def check_features(settings: EngineSettings) -> list[Finding]:
    """Every feature, and why it is off where it is."""
    off = features_off(settings)
    return [passed(f"features.{name}", _feature(name, off.get(name))) for name in FEATURES]


def _feature(name: str, reason: str | None) -> str:
    if reason is None:
        return f"on: {_FEATURES[name]}" if name in _FEATURES else "on"
    return f"off: {reason} ({_REASONS[reason]})" if reason in _REASONS else f"off: {reason}"
