"""The feed-forward part of a layer, with a gate and without.

Owns its parameters and arithmetic. Must not know layers, configs or weights on disk. Built by the files of the architectures.

Letters: T rows, D hidden, I width.
"""

import torch
from torch import Tensor, nn

from hybridserve.backends.activations import ACTIVATIONS
from hybridserve.backends.ops import Activation, Ops
from hybridserve.mixers.linear import Linear


class SwiGLU(nn.Module):
    """down(act(gate x) * up x), gate and up stored as one weight [2I, D], gate rows first; act is silu unless told.

    The multipliers are Falcon-H1's: on the gate's input to silu, and on the result. `limit` bounds the gate above and up on
    both sides (GLM). Source: Shazeer 2020 (arXiv 2002.05202).
    """

    def __init__(
        self,
        hidden_size: int,
        width: int,
        ops: Ops,
        dtype: torch.dtype,
        *,
        bias: bool = False,
        activation: Activation = "silu",
        limit: float | None = None,
        gate_multiplier: float = 1.0,
        down_multiplier: float = 1.0,
    ) -> None:
        super().__init__()
        self.gate_up = Linear(hidden_size, 2 * width, ops, dtype, bias=bias)
        self.down = Linear(width, hidden_size, ops, dtype, bias=bias)
        self.activation = activation
        self.limit = limit
        self.gate_multiplier = gate_multiplier
        self.down_multiplier = down_multiplier

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, D]. Returns [T, D]."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        if self.gate_multiplier != 1.0:
            gate = gate * self.gate_multiplier
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        y = self.down(ACTIVATIONS[self.activation](gate) * up)
        return y if self.down_multiplier == 1.0 else y * self.down_multiplier


class PlainMLP(nn.Module):
    """down(act(up x)), without a gate (Nemotron-H)."""

    def __init__(
        self, hidden_size: int, width: int, ops: Ops, dtype: torch.dtype, *, activation: Activation, bias: bool = False
    ) -> None:
        super().__init__()
        self.up = Linear(hidden_size, width, ops, dtype, bias=bias)
        self.down = Linear(width, hidden_size, ops, dtype, bias=bias)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, D]. Returns [T, D]."""
        return self.down(ACTIVATIONS[self.activation](self.up(x)))
