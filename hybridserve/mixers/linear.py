"""The linear projection that mixers and MLPs are made of: a weight and the operation chosen at load.

Owns the parameters and their names (`weight`, `bias`). Must not know what it projects. Called by mixers and models.
"""

import torch
from torch import Tensor, nn

from hybridserve.backends.ops import Ops
from hybridserve.mixers.base import empty_parameter


class Linear(nn.Module):
    """y = x weight^T + bias, through `ops.linear`."""

    def __init__(self, in_features: int, out_features: int, ops: Ops, dtype: torch.dtype, bias: bool = False) -> None:
        super().__init__()
        self._linear = ops.linear
        self.weight = empty_parameter(out_features, in_features, dtype=dtype)
        self.bias = empty_parameter(out_features, dtype=dtype) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in]. Returns [..., out] in x's dtype."""
        return self._linear(x, self.weight, self.bias)
