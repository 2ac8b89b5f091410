"""What an engine may offer beside generating tokens, and why something of it is off.

Owns the list and the reason codes, which log, `check-model` and `/v1/limits` share. Called by `core.py` and `check/`.
"""

from collections.abc import Mapping

from hybridserve.config import EngineSettings

#: Feature -> why no engine offers it; None where it depends on the settings alone.
FEATURES: Mapping[str, str | None] = {
    "prefix_caching": None,
    "chunked_prefill": None,
    "speculation": "not_implemented",
    "adapters": "not_implemented",
    "structured_output": "not_implemented",
    "tool_calling": "not_implemented",
    "reasoning": "not_implemented",  # told apart from the answer
}


def features_off(settings: EngineSettings) -> dict[str, str]:
    """Features that an engine with these settings does not offer: name -> reason code."""
    off = {name: reason for name, reason in FEATURES.items() if reason is not None}
    return off if settings.enable_prefix_caching else {"prefix_caching": "disabled_by_flag", **off}
