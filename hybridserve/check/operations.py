"""The backends and features sections: which implementation every operation gets, and what this engine does not offer.

Owns these findings; the choice is `backends/select.py`'s, as at load. Called by `checker.py`.
"""

from hybridserve.backends.select import BACKENDS, select
from hybridserve.check.report import Finding, passed
from hybridserve.check.target import Target
from hybridserve.config import EngineSettings
from hybridserve.engine.features import FEATURES, features_off
from hybridserve.models import CausalLM


def check_backends(model: CausalLM, settings: EngineSettings, target: Target) -> list[Finding]:
    """The choice for each operation with its reason. Raises UsageError or MissingDependencyError for a forced one that fails."""
    if not target.is_here:
        order = ", ".join(backend.name for backend in BACKENDS if target.device.type in backend.devices)
        return [passed("backends", f"chosen on {target.name} itself, in this order: {order}; run check-model there to see which")]
    selection = select(target.device, model.dtype, settings.backend)
    return [passed(f"backends.{operation}", str(choice)) for operation, choice in selection.reasons.items()]


def check_features(settings: EngineSettings) -> list[Finding]:
    """Every feature, and why it is off where it is."""
    off = features_off(settings)
    return [passed(f"features.{name}", f"off: {off[name]}" if name in off else "on") for name in FEATURES]
