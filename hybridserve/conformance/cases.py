"""What each built-in kind of layer is checked as: small configs that use every option somewhere, each with its oracle.

Owns the table. A registered kind without a case fails a test, so that no layer of the package goes unchecked. Called by
`subjects.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from hybridserve.conformance import oracles
from hybridserve.conformance.conduct import Oracle
from hybridserve.mixers.attention import AttentionConfig
from hybridserve.mixers.base import MixerConfig
from hybridserve.mixers.gated_delta import GatedDeltaConfig
from hybridserve.mixers.kda import KDAConfig
from hybridserve.mixers.mamba2 import Mamba2Config
from hybridserve.mixers.mla import MLAConfig
from hybridserve.mixers.rotary import RotaryConfig
from hybridserve.mixers.short_conv import ShortConvConfig

HIDDEN = 32


@dataclass(frozen=True)
class Case:
    """A config and what it must compute; `name` tells it from the others of its kind."""

    name: str
    config: MixerConfig
    oracle: Oracle | None = None


_HALVES, _PAIRS = (RotaryConfig(rotary_dim=6, theta=1e4, interleaved=pairs) for pairs in (False, True))


def _attention(rotary: RotaryConfig | None = _HALVES) -> AttentionConfig:
    return AttentionConfig(hidden_size=HIDDEN, num_heads=4, num_kv_heads=2, head_dim=8, rotary=rotary)
