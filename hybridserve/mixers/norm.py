"""Norms: root-mean-square, plain and gated, by the operation chosen at load, and with the mean taken off.

Owns the parameter (`weight`) and the options that tell published norms apart. Must not know where a norm stands in a
layer. Called by mixers and models.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridserve.backends.ops import Activation, Ops
from hybridserve.mixers.base import empty_parameter


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension; the factor is 1 + weight when `zero_centred` (Qwen3-Next, Gemma)."""

    def __init__(self, dim: int, eps: float, ops: Ops, dtype: torch.dtype, zero_centred: bool = False) -> None:
        super().__init__()
        self._rms_norm = ops.rms_norm
        self.eps = eps
        self.zero_centred = zero_centred
        self.weight = empty_parameter(dim, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., D]. Returns [..., D] in x's dtype."""
        return self._rms_norm(x, self.weight, self.eps, zero_centred=self.zero_centred)


class LayerNorm(nn.Module):
    """(x - mean) / std * weight + bias over the last dimension, as torch computes it."""

    def __init__(self, dim: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = empty_parameter(dim, dtype=dtype)
        self.bias = empty_parameter(dim, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., D]. Returns [..., D] in x's dtype."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class GroupedRMSNorm(nn.Module):
    """x / rms(x) * (1 + weight), the mean square over each `group_size` elements; fp32 inside (Qwen3.8-Flash-Next)."""

    def __init__(self, dim: int, eps: float, dtype: torch.dtype, *, group_size: int) -> None:
        super().__init__()
        self.eps = eps
        self.group_size = group_size
        self.weight = empty_parameter(dim, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., D]. Returns [..., D] in x's dtype."""
        groups = torch.unflatten(x.float(), -1, (-1, self.group_size))
        normed = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)
        return (normed.flatten(-2) * (1.0 + self.weight.float())).to(x.dtype)


class GatedRMSNorm(nn.Module):
    """RMS norm and a gate, in either order; the norm is over each `group_size` elements, all of D when None."""

    def __init__(
        self,
        dim: int,
        eps: float,
        ops: Ops,
        dtype: torch.dtype,
        group_size: int | None = None,
        *,
        norm_first: bool,
        activation: Activation,
    ) -> None:
        super().__init__()
        self._gated_rms_norm = ops.gated_rms_norm
        self.eps = eps
        self.group_size = dim if group_size is None else group_size
        self.norm_first = norm_first
        self.activation = activation
        self.weight = empty_parameter(dim, dtype=dtype)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x, gate: [..., D]. Returns [..., D] in gate's dtype."""
        return self._gated_rms_norm(
            x,
            gate,
            self.weight,
            self.eps,
            group_size=self.group_size,
            norm_first=self.norm_first,
            activation=self.activation,
        )
