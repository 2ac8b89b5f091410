"""Token mixers, one file per layer kind. Importing the package registers the built-in kinds.

`mixers[kind]` finds plug-ins as well: files and entry points that register their own class, and import `mixers.base` to
do so.
"""

from hybridserve.mixers import (
    attention,
    gated_delta,
    indexed_attention,
    indexed_mla,
    kda,
    lightning,
    mamba1,
    mamba2,
    mla,
    ngram,
    short_conv,
)
from hybridserve.mixers.base import Mixer, MixerConfig, RecurrentMixer, States, mixers

__all__ = [
    "Mixer",
    "MixerConfig",
    "RecurrentMixer",
    "States",
    "attention",
    "gated_delta",
    "indexed_attention",
    "indexed_mla",
    "kda",
    "lightning",
    "mamba1",
    "mamba2",
    "mixers",
    "mla",
    "ngram",
    "short_conv",
]
