"""RMS norms in plain torch, fp32 inside.

Owns `rms_norm` and `gated_rms_norm` of the reference backend. Must not know which layer norms what.
"""

import torch
from torch import Tensor

from hybridserve.backends.activations import ACTIVATIONS
from hybridserve.backends.ops import Activation


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, *, zero_centred: bool = False) -> Tensor:
    """See `ops.RmsNorm`. x: [..., D]; weight: [D] or None. Returns [..., D] in x's dtype."""
    normed = _normalised(x.float(), eps)
    if weight is None:
        return normed.to(x.dtype)
    if zero_centred:
        return (normed * (1.0 + weight.float())).to(x.dtype)
    return (normed.to(x.dtype) * weight).to(x.dtype)


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    group_size: int,
    norm_first: bool,
    activation: Activation,
) -> Tensor:
    """See `ops.GatedRmsNorm`. x, gate: [..., D]; weight: [D] or None. Returns [..., D] in gate's dtype.

    Each of the D // group_size parts has its own mean square. Source: the gated norms of Mamba-2 (published as
    `RMSNormGated`, norm after the gate) and of Qwen3-Next (norm before it).
    """
    factor = ACTIVATIONS[activation](gate.float())
    y = x.float()
    if not norm_first:
        y = y * factor
    y = _normalised(y.reshape(*y.shape[:-1], -1, group_size), eps).flatten(-2)
    if weight is not None:
        y = y * weight.float()
    if norm_first:
        y = y * factor
    return y.to(gate.dtype)


def _normalised(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension. x: [..., D] fp32. Returns [..., D] fp32."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
