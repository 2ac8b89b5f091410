"""Parameters for a layer under test: random, of a size that makes every part of it matter.

Owns the rule. Must not know any layer. Called by `subjects.py` and tests.
"""

import torch

from hybridserve.mixers.base import Mixer

#: Gain of a projection of independent inputs.
_GAIN = 1.4


def fill(mixer: Mixer, seed: int = 7) -> Mixer:
    """Draw all parameters: matrices by what they sum over, norms around 1, other vectors around 0. Returns the mixer."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in mixer.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:
            drawn *= _GAIN / parameter.shape[-1] ** 0.5
        else:
            drawn = drawn * 0.2 + 1.0 if "norm" in name and not name.endswith("bias") else drawn * 0.25
        parameter.data.copy_(drawn)
    return mixer
